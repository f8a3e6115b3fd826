"""`Graph`: a score or mask function as an expression graph, which can be evaluated on arrays."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from flashsim.errors import ShapeError
from flashsim.functions.operations import BOOL, ELEMENTS, FLOAT, INT, OPERATIONS, SCORE, SIDES


class Node(NamedTuple):
    """One node of a graph: the operation `op`, applied to the earlier nodes numbered `args`.

    `op` is one of OPERATIONS, or "arg", "const", "cast" or "load". The field `value` is the
    argument's name in an "arg" node, and the number in a "const" node. A "cast" node converts its
    argument to the node's kind; a float is truncated to an integer. A "load" node reads element
    `args` (integer nodes) of the captured array with number `value`.
    """

    op: str
    args: tuple[int, ...]
    value: Any
    kind: str


class ArraySpec(NamedTuple):
    """A captured array's name, shape and element type; the graph does not contain the values."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def kind(self) -> str:
        """The kind of a loaded element: boolean, integer or float."""
        return ELEMENTS[self.dtype]

    @property
    def itemsize(self) -> int:
        """The number of bytes per element of the captured array."""
        return {"bool": 1, "bfloat16": 2}.get(self.dtype) or np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Graph:
    """A traced function as a list of nodes, arguments first; node number `root` is the result."""

    nodes: tuple[Node, ...]
    root: int
    arrays: tuple[ArraySpec, ...]
    name: str = field(default="function", compare=False)

    @cached_property
    def digest(self) -> str:
        """A hexadecimal hash, which is equal for equal graphs in every process."""
        text = repr((self.nodes, self.root, self.arrays))
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    @cached_property
    def _hash(self) -> int:
        return hash(self.digest)

    def __hash__(self) -> int:
        return self._hash

    def entry(self) -> dict[str, Any]:
        """Return the graph as values for a JSON file; `builder.graph_of` reads them."""
        return {
            "name": self.name,
            "nodes": [[x.op, list(x.args), x.value, x.kind] for x in self.nodes],
            "root": self.root,
            "arrays": [[a.name, list(a.shape), a.dtype] for a in self.arrays],
        }

    @cached_property
    def depends(self) -> tuple[frozenset[str], ...]:
        """One set per node, with the names of the arguments that the node's value depends on."""
        found: list[frozenset[str]] = []
        for node in self.nodes:
            own = frozenset([node.value]) if node.op == "arg" else frozenset()
            found.append(own.union(*(found[a] for a in node.args)))
        return tuple(found)

    @cached_property
    def uses(self) -> frozenset[str]:
        """The arguments, by name, that the function's result depends on."""
        return self.depends[self.root]

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """The numbers of the nodes that read a captured array."""
        return tuple(n for n, node in enumerate(self.nodes) if node.op == "load")

    @cached_property
    def differentiable(self) -> tuple[ArraySpec, ...]:
        """The captured arrays that can have gradients: those of floating-point type."""
        return tuple(a for a in self.arrays if a.kind == FLOAT)

    def side(self, n: int) -> str:
        """Return what load `n` depends on: "row", "col", "score" (both) or "fixed" (head only)."""
        moving = frozenset().union(*(self.depends[a] for a in self.nodes[n].args)) - {"b", "h"}
        return {frozenset(): "fixed", frozenset("q"): "row", frozenset("k"): "col"}.get(
            moving, "score"
        )

    def argument(self, name: str) -> int:
        """Return the number of an argument's node, or -1 if the function does not use it."""
        found = [n for n, x in enumerate(self.nodes) if x.op == "arg" and x.value == name]
        return found[0] if found else -1

    @cached_property
    def widths(self) -> dict[str, int]:
        """How many bytes of captured arrays the function reads per head, row, column and score."""
        found = dict.fromkeys(SIDES, 0)
        for n in self.loads:
            found[self.side(n)] += self.arrays[self.nodes[n].value].itemsize
        return found

    @cached_property
    def nbytes(self) -> int:
        """The total size in bytes of all captured arrays."""
        return sum(math.prod(a.shape) * a.itemsize for a in self.arrays)

    @cached_property
    def flops(self) -> int:
        """The number of floating-point operations in one evaluation of the function."""
        return count_flops(self.nodes, range(len(self.nodes)))

    @cached_property
    def softcap(self) -> float | None:
        """The cap c > 0 if the function is exactly ``c * tanh(score / c)``, otherwise None."""
        cap, n = self._scaled(self.root)
        if self.nodes[self.root].op == "div" or self.nodes[n].op != "tanh":
            return None
        inverse, n = self._scaled(self.nodes[n].args[0])
        exact = cap > 0 and cap * inverse == 1  # otherwise score * inverse is rounded differently
        return float(cap) if exact and self.nodes[n].value == SCORE else None

    def _scaled(self, n: int) -> tuple[Fraction, int]:
        """Return a factor and a node: node `n` is their product, or the node itself times 1."""
        node = self.nodes[n]
        if node.op in ("mul", "div"):
            for constant, other in (node.args[::-1], node.args)[: 2 if node.op == "mul" else 1]:
                value = self.nodes[constant].value
                if self.nodes[constant].op == "const" and value and math.isfinite(value):
                    return Fraction(value) ** (1 if node.op == "mul" else -1), other
        return Fraction(1), n

    def evaluate(
        self, given: Mapping[str, Any], arrays: Iterable[Any], dtype: str = "float64"
    ) -> Any:
        """Return the function's result for arrays of indices and scores, broadcast to one shape.

        Floating-point nodes are computed in type `dtype`. A negative index counts from an array's
        end, as in Python. An index out of range reads the nearest element, because the index of a
        masked score may have any value.
        """
        return self.values(given, arrays, dtype)[self.root]

    def values(
        self,
        given: Mapping[str, Any],
        arrays: Iterable[Any],
        dtype: str = "float64",
        read: Mapping[int, Any] = MappingProxyType({}),
    ) -> list[Any]:
        """Return the value that every node has when `evaluate` runs with these arguments.

        `read` holds the known values of load nodes, by node number.
        """
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


def needed(nodes: Sequence[Node], roots: Iterable[int]) -> list[int]:
    """Return the numbers of all nodes that the nodes `roots` depend on, in order."""
    found, stack = set(), list(roots)
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack += nodes[n].args
    return sorted(found)


def count_flops(nodes: tuple[Node, ...], numbers: Iterable[int]) -> int:
    """Return the number of FLOPs in the nodes `numbers`; `where`, loads and casts have none."""
    quiet = ("arg", "const", "load", "cast", "where")
    return sum(
        1
        for n in numbers
        if nodes[n].op not in quiet and any(nodes[a].kind == FLOAT for a in nodes[n].args)
    )


def check_extents(graph: Graph, **extents: int) -> None:
    """Raise `ShapeError` if b, h, q or k directly indexes a captured array that is too short."""
    for n in graph.loads:
        node = graph.nodes[n]
        spec = graph.arrays[node.value]
        for axis, a in enumerate(node.args):
            name = graph.nodes[a].value if graph.nodes[a].op == "arg" else None
            if name in extents and spec.shape[axis] < extents[name]:
                raise ShapeError(
                    f"{graph.name} indexes axis {axis} of captured array {spec.name} with "
                    f"{name}, which can be as large as {extents[name] - 1}, but the array's "
                    f"shape is {spec.shape}; pass an array whose axis {axis} has at least "
                    f"{extents[name]} elements"
                )


def place(indices: Iterable[Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return valid indices for a shape: negative indices wrap around, then all are clamped."""
    return tuple(
        np.clip(np.where(i < 0, i + n, i), 0, n - 1) for i, n in zip(indices, shape, strict=True)
    )


def add_at(total: np.ndarray, indices: Iterable[Any], each: np.ndarray) -> None:
    """Add each value of `each` to one element of `total`, at the value's indices, in float64."""
    at = tuple(np.broadcast_to(i, each.shape) for i in place(indices, total.shape))
    flat = np.ravel_multi_index(at, total.shape) if at else np.zeros(each.shape, np.int64)
    sums = np.bincount(flat.ravel(), each.ravel().astype(np.float64), total.size)
    total += sums.reshape(total.shape).astype(total.dtype)
