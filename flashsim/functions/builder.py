"""`Builder` builds and simplifies expression graphs; `graph_of` reads a graph from a file."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from flashsim.functions.graph import ArraySpec, Graph, Node, needed
from flashsim.functions.operations import (
    BOOL,
    ELEMENTS,
    FLOAT,
    INDICES,
    INT,
    LOGIC,
    OPERATIONS,
    RANK,
    SCORE,
)


class Builder:
    """Creates the nodes of a graph without duplicates, and simplifies terms such as x + 0."""

    def __init__(self, nodes: Iterable[Node] = (), arrays: Iterable[ArraySpec] = ()) -> None:
        self.nodes: list[Node] = list(nodes)
        self.arrays: list[ArraySpec] = list(arrays)
        self._known = {_key(node): n for n, node in enumerate(self.nodes)}

    def graph(self, root: int, name: str = "function") -> Graph:
        """Return the graph that computes node `root`, with no unneeded nodes or arrays."""
        kept = needed(self.nodes, [root])
        arrays = sorted({self.nodes[n].value for n in kept if self.nodes[n].op == "load"})
        number = {old: new for new, old in enumerate(kept)}
        of_array = {old: new for new, old in enumerate(arrays)}
        nodes = []
        for n in kept:
            node = self.nodes[n]
            value = of_array[node.value] if node.op == "load" else node.value
            nodes.append(node._replace(args=tuple(number[a] for a in node.args), value=value))
        return Graph(tuple(nodes), number[root], tuple(self.arrays[a] for a in arrays), name)

    def put(self, node: Node) -> int:
        """Add a node to the graph unless an equal one exists, and return the node's number."""
        key = _key(node)
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return self._known[key]

    def arg(self, name: str) -> int:
        """Return the node number of an argument: the float score, or the integer b, h, q or k."""
        return self.put(Node("arg", (), name, FLOAT if name == SCORE else INT))

    def const(self, value: Any) -> int:
        """Return the number of a constant's node; the node's kind follows from the Python type."""
        if isinstance(value, (bool, np.bool_)):
            return self.put(Node("const", (), bool(value), BOOL))
        if isinstance(value, (int, np.integer)):
            return self.put(Node("const", (), int(value), INT))
        return self.put(Node("const", (), float(value), FLOAT))

    def load(self, array: int, indices: Iterable[int]) -> int:
        """Return the number of a node that reads an element of a captured array."""
        return self.put(Node("load", tuple(indices), array, self.arrays[array].kind))

    def cast(self, n: int, kind: str) -> int:
        """Return the number of a node that converts node `n` to a boolean, integer or float."""
        node = self.nodes[n]
        if node.kind == kind:
            return n
        if node.op == "const":
            return self.const(_plain(node.value, kind))
        if kind == BOOL:
            return self.op("ne", n, self.const(0))
        return self.put(Node("cast", (n,), None, kind))

    def op(self, name: str, *args: int) -> int:
        """Return the number of a node that converts arguments and applies an operation."""
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
        """Return a simpler node of the same value, such as x for x + 0, or None if none exists."""
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
    """Return a dict key that is equal for equal nodes.

    A constant's key contains the constant as text, because 0, 0.0 and False are equal in Python.
    """
    return node.op, node.args, repr(node.value), node.kind


def _plain(value: Any, kind: str) -> Any:
    """Return a constant, converted to a Python number of the given kind."""
    if kind == BOOL:
        return bool(value)
    return int(value) if kind == INT else float(value)


def graph_of(entry: Any) -> Graph:
    """Rebuild an expression graph from the description that `Graph.entry` wrote to a file.

    Raises
    ------
    ValueError, TypeError, LookupError
        If the entry does not describe a graph.
    """
    build = Builder(arrays=(_array_entry(*a) for a in entry["arrays"]))
    numbers: list[int] = []
    for op, args, value, kind in entry["nodes"]:
        if not all(type(a) is int and 0 <= a < len(numbers) for a in args):
            raise ValueError(
                f"node {len(numbers)} must have earlier nodes as arguments, got {args}"
            )
        own = [numbers[a] for a in args]
        if op == "arg":
            if value not in (SCORE, *INDICES):
                raise ValueError(f"a function has no argument {value!r}; use score, b, h, q or k")
            made = build.arg(value)
        elif op == "const":
            if not isinstance(value, (bool, int, float)):
                raise ValueError(f"a constant must be a number or a boolean, got {value!r}")
            made = build.const(value)
        elif op == "load":
            if type(value) is not int or len(own) != len(build.arrays[value].shape):
                raise ValueError(
                    f"a node reads array {value!r} with {len(own)} indices, but an array needs "
                    "one index per axis"
                )
            made = build.load(value, own)
        elif op == "cast":
            (one,) = own
            made = build.cast(one, {BOOL: BOOL, INT: INT, FLOAT: FLOAT}[kind])
        elif len(own) != OPERATIONS[op].arity:
            raise ValueError(f"{op} must have {OPERATIONS[op].arity} arguments, got {len(own)}")
        else:
            made = build.op(op, *own)
        numbers.append(made)
    return build.graph(numbers[entry["root"]], str(entry["name"])[:80])


def _array_entry(name: Any, shape: Any, dtype: Any) -> ArraySpec:
    """Return the specification of a captured array, as described in a file."""
    sizes = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    if not isinstance(name, str) or not name.isidentifier() or not sizes or dtype not in ELEMENTS:
        raise ValueError(
            f"a captured array must have a name, a shape and a supported dtype, got {name!r}, "
            f"{shape}, {dtype!r}"
        )
    return ArraySpec(name, tuple(shape), dtype)
