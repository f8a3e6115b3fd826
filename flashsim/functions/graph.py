"""The expression graph of a score or mask function: nodes in order, built with simplification.

A node is an operation on earlier nodes. Its kind is "b" (boolean), "i" (integer) or "f" (float).
The operations, with their NumPy form, are the table `OPERATIONS`. Other modules hold their CUDA C++
and Numba forms (`emit`), their derivatives (`derivative`) and their bounds (`intervals`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from flashsim.errors import ShapeError

BOOL, INT, FLOAT = "b", "i", "f"
RANK = {BOOL: 0, INT: 1, FLOAT: 2}
#: The arguments of a score function. A mask function has all except the score.
SCORE, INDICES = "score", ("b", "h", "q", "k")
#: What a captured element varies with, besides the batch entry and the head.
SIDES = ("fixed", "row", "col", "score")
#: Element types of captured arrays, and the kind of what is read.
ELEMENTS = {
    **{"bool": BOOL, "int8": INT, "uint8": INT, "int16": INT, "int32": INT, "int64": INT},
    **{"float16": FLOAT, "bfloat16": FLOAT, "float32": FLOAT, "float64": FLOAT},
}


class Operation(NamedTuple):
    """One operation: how many arguments it has, the kind it returns, and its NumPy form.

    `kind` is "b", "i" or "f" for a fixed one, or "same": that of the arguments, which are brought
    to one kind first, at least integers.
    """

    arity: int
    kind: str
    numpy: Callable[..., Any]


def _sigmoid(x: Any) -> Any:
    return 0.5 * np.tanh(0.5 * x) + 0.5


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.result_type(x)])(x)


def _floor_divide(a: Any, b: Any) -> Any:
    if np.result_type(a).kind == "f":
        return np.floor(a / b)
    return np.floor_divide(a, np.where(b == 0, 1, b))


def _remainder(a: Any, b: Any) -> Any:
    if np.result_type(a).kind == "f":
        return a - np.floor(a / b) * b
    return np.remainder(a, np.where(b == 0, 1, b))


OPERATIONS = {
    **{
        name: Operation(2, "same", f)
        for name, f in (
            *(("add", np.add), ("sub", np.subtract), ("mul", np.multiply)),
            *(("min", np.minimum), ("max", np.maximum)),
            *(("floordiv", _floor_divide), ("mod", _remainder)),
        )
    },
    "neg": Operation(1, "same", np.negative),
    "abs": Operation(1, "same", np.abs),
    "div": Operation(2, FLOAT, np.divide),
    "pow": Operation(2, FLOAT, np.power),
    **{
        name: Operation(1, FLOAT, f)
        for name, f in (
            *(("exp", np.exp), ("exp2", np.exp2), ("expm1", np.expm1), ("log", np.log)),
            *(("log2", np.log2), ("log1p", np.log1p), ("sqrt", np.sqrt), ("tanh", np.tanh)),
            *(("sin", np.sin), ("cos", np.cos), ("floor", np.floor), ("ceil", np.ceil)),
            *(("rsqrt", lambda x: 1 / np.sqrt(x)), ("sigmoid", _sigmoid), ("erf", _erf)),
        )
    },
    **{
        name: Operation(2, BOOL, f)
        for name, f in (
            *(("lt", np.less), ("le", np.less_equal)),
            *(("eq", np.equal), ("ne", np.not_equal)),
            *(("and", np.logical_and), ("or", np.logical_or)),
        )
    },
    "not": Operation(1, BOOL, np.logical_not),
    **{
        name: Operation(2, INT, f)
        for name, f in (
            *(("bitand", np.bitwise_and), ("bitor", np.bitwise_or), ("bitxor", np.bitwise_xor)),
            *(("shl", np.left_shift), ("shr", np.right_shift)),
        )
    },
    "where": Operation(3, "same", np.where),
}
#: Operations whose arguments are booleans.
LOGIC = ("and", "or", "not")


class Node(NamedTuple):
    """One value: an operation on earlier nodes, by their numbers.

    Besides OPERATIONS, `op` is "arg" (`value` is its name), "const" (`value` is a Python number),
    "cast" (to the node's kind; floats are truncated to integers), or "load": an element of captured
    array number `value`, at the integer `args`.
    """

    op: str
    args: tuple[int, ...]
    value: Any
    kind: str


class ArraySpec(NamedTuple):
    """A captured array as the graph knows it: its name, shape and element type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def kind(self) -> str:
        """The kind of an element that was read."""
        return ELEMENTS[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return {"bool": 1, "bfloat16": 2}.get(self.dtype) or np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Graph:
    """A traced function: nodes after their arguments, in order; `root` is the result.

    Two graphs are equal if their nodes and captured arrays' names, shapes and types are. `digest`
    names a graph on disk.
    """

    nodes: tuple[Node, ...]
    root: int
    arrays: tuple[ArraySpec, ...]
    name: str = field(default="function", compare=False)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digits that equal graphs share, in every process."""
        text = repr((self.nodes, self.root, self.arrays))
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    @cached_property
    def _hash(self) -> int:
        return hash(self.digest)

    def __hash__(self) -> int:
        return self._hash

    def entry(self) -> dict[str, Any]:
        """The graph as a file stores it in JSON; `from_entry` reads it."""
        return {
            "name": self.name,
            "nodes": [[x.op, list(x.args), x.value, x.kind] for x in self.nodes],
            "root": self.root,
            "arrays": [[a.name, list(a.shape), a.dtype] for a in self.arrays],
        }

    @classmethod
    def from_entry(cls, entry: Any) -> Graph:
        """The graph that `entry` describes.

        Raises
        ------
        ValueError, TypeError, LookupError
            If it describes none.
        """
        build = Builder(arrays=(_array_entry(*a) for a in entry["arrays"]))
        numbers: list[int] = []
        for op, args, value, kind in entry["nodes"]:
            if not all(type(a) is int and 0 <= a < len(numbers) for a in args):
                raise ValueError(f"a node's arguments are {args}")
            own = [numbers[a] for a in args]
            if op == "arg":
                if value not in (SCORE, *INDICES):
                    raise ValueError(f"a function has no argument {value!r}")
                made = build.arg(value)
            elif op == "const":
                if not isinstance(value, (bool, int, float)):
                    raise ValueError(f"a constant is {value!r}")
                made = build.const(value)
            elif op == "load":
                if type(value) is not int or len(own) != len(build.arrays[value].shape):
                    raise ValueError(f"a node reads array {value!r} at {len(own)} indices")
                made = build.load(value, own)
            elif op == "cast":
                (one,) = own
                made = build.cast(one, {BOOL: BOOL, INT: INT, FLOAT: FLOAT}[kind])
            elif len(own) != OPERATIONS[op].arity:
                raise ValueError(f"{op} has {len(own)} arguments")
            else:
                made = build.op(op, *own)
            numbers.append(made)
        return build.graph(numbers[entry["root"]], str(entry["name"])[:80])

    @cached_property
    def depends(self) -> tuple[frozenset[str], ...]:
        """For each node, the names of the arguments that it depends on."""
        found: list[frozenset[str]] = []
        for node in self.nodes:
            own = frozenset([node.value]) if node.op == "arg" else frozenset()
            found.append(own.union(*(found[a] for a in node.args)))
        return tuple(found)

    @cached_property
    def uses(self) -> frozenset[str]:
        """The names of the arguments that the result depends on."""
        return self.depends[self.root]

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """The numbers of the nodes that read a captured array."""
        return tuple(n for n, node in enumerate(self.nodes) if node.op == "load")

    @cached_property
    def differentiable(self) -> tuple[ArraySpec, ...]:
        """The captured arrays of floats, which can have gradients."""
        return tuple(a for a in self.arrays if a.kind == FLOAT)

    def side(self, n: int) -> str:
        """What load node `n` varies with, one of SIDES; "fixed" is one value per head."""
        moving = frozenset().union(*(self.depends[a] for a in self.nodes[n].args)) - {"b", "h"}
        return {frozenset(): "fixed", frozenset("q"): "row", frozenset("k"): "col"}.get(
            moving, "score"
        )

    def argument(self, name: str) -> int:
        """The number of the node of an argument; -1 if the function does not use it."""
        found = [n for n, x in enumerate(self.nodes) if x.op == "arg" and x.value == name]
        return found[0] if found else -1

    @cached_property
    def widths(self) -> dict[str, int]:
        """Bytes that are read of captured arrays, by `side`: per head, row, column or score."""
        found = dict.fromkeys(SIDES, 0)
        for n in self.loads:
            found[self.side(n)] += self.arrays[self.nodes[n].value].itemsize
        return found

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all captured arrays."""
        return sum(math.prod(a.shape) * a.itemsize for a in self.arrays)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one evaluation."""
        return count_flops(self.nodes, range(len(self.nodes)))

    def evaluate(
        self, given: Mapping[str, Any], arrays: Iterable[Any], dtype: str = "float64"
    ) -> Any:
        """The result for arrays of indices and scores that broadcast; floats are of type `dtype`.

        A negative index counts from an array's end, as in Python. An index outside an array reads
        its nearest element, since a masked score may have any index.
        """
        return self.values(given, arrays, dtype)[self.root]

    def values(
        self,
        given: Mapping[str, Any],
        arrays: Iterable[Any],
        dtype: str = "float64",
        read: Mapping[int, Any] = MappingProxyType({}),
    ) -> list[Any]:
        """The value of every node, as `evaluate` computes them; `read` holds those of loads."""
        kinds = {BOOL: np.dtype(bool), INT: np.dtype(np.int64), FLOAT: np.dtype(dtype)}
        captured = tuple(arrays)
        found: list[Any] = []
        with np.errstate(all="ignore"):
            for node in self.nodes:
                args = [found[a] for a in node.args]
                if node.op == "arg":
                    value = np.asarray(given[node.value])
                elif node.op == "const":
                    value = kinds[node.kind].type(node.value)
                elif len(found) in read:
                    value = read[len(found)]
                elif node.op == "load":
                    value = captured[node.value][place(args, captured[node.value].shape)]
                elif node.op == "cast":
                    value = args[0]
                else:
                    value = OPERATIONS[node.op].numpy(*args)
                found.append(np.asarray(value).astype(kinds[node.kind], copy=False))
        return found


def needed(nodes: tuple[Node, ...], roots: Iterable[int]) -> list[int]:
    """The numbers of the nodes that some results depend on, in order."""
    found, stack = set(), list(roots)
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack += nodes[n].args
    return sorted(found)


def count_flops(nodes: tuple[Node, ...], numbers: Iterable[int]) -> int:
    """Floating-point operations of some nodes; a choice, a read and a conversion are none."""
    quiet = ("arg", "const", "load", "cast", "where")
    return sum(
        1
        for n in numbers
        if nodes[n].op not in quiet and any(nodes[a].kind == FLOAT for a in nodes[n].args)
    )


def check_extents(graph: Graph, **extents: int) -> None:
    """Raise `ShapeError` if an array that is indexed by an argument itself has too few elements."""
    for n in graph.loads:
        node = graph.nodes[n]
        spec = graph.arrays[node.value]
        for axis, a in enumerate(node.args):
            name = graph.nodes[a].value if graph.nodes[a].op == "arg" else None
            if name in extents and spec.shape[axis] < extents[name]:
                raise ShapeError(
                    f"{graph.name} reads captured array {spec.name} of shape {spec.shape} at "
                    f"[{name}] along axis {axis}, and {name} reaches {extents[name] - 1}; the "
                    f"axis needs at least {extents[name]} elements"
                )


def place(indices: Iterable[Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Index arrays as an array of this shape can be read: wrapped if negative, then clamped."""
    return tuple(
        np.clip(np.where(i < 0, i + n, i), 0, n - 1) for i, n in zip(indices, shape, strict=True)
    )


def _array_entry(name: Any, shape: Any, dtype: Any) -> ArraySpec:
    """A captured array as a file describes it."""
    sizes = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    if not isinstance(name, str) or not name.isidentifier() or not sizes or dtype not in ELEMENTS:
        raise ValueError(f"a captured array is {name!r}, {shape}, {dtype!r}")
    return ArraySpec(name, tuple(shape), dtype)


def add_at(total: np.ndarray, indices: Iterable[Any], each: np.ndarray) -> None:
    """Add each value to the element of `total` that its indices read, in float64."""
    at = tuple(np.broadcast_to(i, each.shape) for i in place(indices, total.shape))
    flat = np.ravel_multi_index(at, total.shape) if at else np.zeros(each.shape, np.int64)
    sums = np.bincount(flat.ravel(), each.ravel().astype(np.float64), total.size)
    total += sums.reshape(total.shape).astype(total.dtype)


class Builder:
    """Makes nodes: equal ones once, constants folded, neutral operations left out."""

    def __init__(self, nodes: Iterable[Node] = (), arrays: Iterable[ArraySpec] = ()) -> None:
        self.nodes: list[Node] = list(nodes)
        self.arrays: list[ArraySpec] = list(arrays)
        self._known = {_key(node): n for n, node in enumerate(self.nodes)}

    def graph(self, root: int, name: str = "function") -> Graph:
        """The graph of one result: only the nodes that it needs, and only the arrays they read."""
        needed, stack = set(), [root]
        while stack:
            n = stack.pop()
            if n not in needed:
                needed.add(n)
                stack += self.nodes[n].args
        arrays = sorted({self.nodes[n].value for n in needed if self.nodes[n].op == "load"})
        number = {old: new for new, old in enumerate(sorted(needed))}
        of_array = {old: new for new, old in enumerate(arrays)}
        nodes = []
        for n in sorted(needed):
            node = self.nodes[n]
            value = of_array[node.value] if node.op == "load" else node.value
            nodes.append(node._replace(args=tuple(number[a] for a in node.args), value=value))
        return Graph(tuple(nodes), number[root], tuple(self.arrays[a] for a in arrays), name)

    def put(self, node: Node) -> int:
        """The number of a node, which is added unless an equal one is there."""
        key = _key(node)
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return self._known[key]

    def arg(self, name: str) -> int:
        """An argument of the function: the score is a float, the others are integers."""
        return self.put(Node("arg", (), name, FLOAT if name == SCORE else INT))

    def const(self, value: Any) -> int:
        """A constant; its kind follows from its Python type."""
        if isinstance(value, (bool, np.bool_)):
            return self.put(Node("const", (), bool(value), BOOL))
        if isinstance(value, (int, np.integer)):
            return self.put(Node("const", (), int(value), INT))
        return self.put(Node("const", (), float(value), FLOAT))

    def load(self, array: int, indices: Iterable[int]) -> int:
        """An element of a captured array."""
        return self.put(Node("load", tuple(indices), array, self.arrays[array].kind))

    def cast(self, n: int, kind: str) -> int:
        """Node `n` as a boolean, an integer or a float."""
        node = self.nodes[n]
        if node.kind == kind:
            return n
        if node.op == "const":
            return self.const(_plain(node.value, kind))
        if kind == BOOL:
            return self.op("ne", n, self.const(0))
        return self.put(Node("cast", (n,), None, kind))

    def op(self, name: str, *args: int) -> int:
        """An operation of OPERATIONS, with its arguments brought to the kinds it takes."""
        its = OPERATIONS[name]
        if name in LOGIC:
            args = tuple(self.cast(a, BOOL) for a in args)
        elif name == "where":
            both = self._alike(args[1:], BOOL)
            args = (self.cast(args[0], BOOL), *both)
        elif its.kind in (INT, FLOAT):
            args = tuple(self.cast(a, its.kind) for a in args)
        else:
            args = self._alike(args, BOOL if name in ("eq", "ne") else INT)
        kind = self.nodes[args[-1]].kind if its.kind == "same" else its.kind
        simple = self._simplified(name, args)
        if simple is not None:
            return simple
        if all(self.nodes[a].op == "const" for a in args):
            return self._folded(name, args, kind)
        return self.put(Node(name, args, None, kind))

    def _alike(self, args: Iterable[int], least: str) -> tuple[int, ...]:
        args = tuple(args)
        kind = max((least, *(self.nodes[a].kind for a in args)), key=RANK.__getitem__)
        return tuple(self.cast(a, kind) for a in args)

    def _folded(self, name: str, args: tuple[int, ...], kind: str) -> int:
        types: dict[str, Any] = {BOOL: bool, INT: np.int64, FLOAT: np.float64}
        values = [types[self.nodes[a].kind](self.nodes[a].value) for a in args]
        with np.errstate(all="ignore"):
            result = OPERATIONS[name].numpy(*values)
        return self.const(_plain(result, kind))

    def _is(self, n: int, value: Any) -> bool:
        node = self.nodes[n]
        return node.op == "const" and node.value == value

    def _simplified(self, name: str, args: tuple[int, ...]) -> int | None:
        """An equal node that is there already, where one argument is neutral; else None."""
        a, b = args[0], args[-1]
        if name in ("and", "or"):
            whole, none = (True, False) if name == "and" else (False, True)
            if self._is(a, whole) or a == b:
                return b
            if self._is(b, whole):
                return a
            if self._is(a, none) or self._is(b, none):
                return self.const(none)
        if name == "add" and self._is(a, 0) and self.nodes[a].kind == INT:
            return b
        if name in ("add", "sub") and self._is(b, 0) and self.nodes[b].kind == INT:
            return a
        if name == "mul" and self._is(a, 1):
            return b
        if (
            name in ("mul", "div", "floordiv")
            and self._is(b, 1)
            and not (name == "floordiv" and self.nodes[a].kind == FLOAT)
        ):
            return a
        if name in ("not", "neg") and self.nodes[a].op == name:
            return self.nodes[a].args[0]
        if name == "where":
            if self.nodes[a].op == "const":
                return args[1] if self.nodes[a].value else args[2]
            if args[1] == args[2]:
                return args[1]
        return None


def _key(node: Node) -> tuple[Any, ...]:
    """What equal nodes share; the value as text, since 0, 0.0 and False are equal numbers."""
    return node.op, node.args, repr(node.value), node.kind


def _plain(value: Any, kind: str) -> Any:
    """A constant as a Python number of this kind."""
    if kind == BOOL:
        return bool(value)
    return math.trunc(value) if kind == INT else float(value)
