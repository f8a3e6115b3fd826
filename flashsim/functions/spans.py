"""Finds masks that keep one range of keys per query, and one range of queries per key.

A kernel then compares positions with a range's ends, which it computes once per row, and does not
evaluate the mask function per score.
"""

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from flashsim.functions.builder import Builder
from flashsim.functions.graph import ArraySpec, Graph, Node, needed
from flashsim.functions.intervals import Bounds
from flashsim.functions.mask import MaskFunction
from flashsim.functions.operations import BOOL, INT

#: Ends beyond every position.
LOWEST, HIGHEST = -(1 << 30), 1 << 30
#: Upper bounds of b, h, q and k, for the check that kernels compute ends without overflow.
_LARGEST = {"b": 1 << 16, "h": 1 << 16, "q": 1 << 28, "k": 1 << 28}


class Range(NamedTuple):
    """The positions that a mask keeps for one row, as numbers of nodes that compute them.

    Kept are the positions from `low` to `high`, both included, if `keep` is True, and otherwise no
    position. None stands for no limit.
    """

    low: int | None = None
    high: int | None = None
    keep: int | None = None


class Spans(NamedTuple):
    """The ranges that a mask function keeps: `keys` of a query, and `queries` of a key.

    `nodes` compute the ends. Their captured arrays are those of the mask function, followed by
    `arrays`, whose elements are in `values`.
    """

    nodes: tuple[Node, ...]
    keys: Range
    queries: Range
    arrays: tuple[ArraySpec, ...]
    values: tuple[np.ndarray, ...]


@lru_cache(maxsize=256)
def spans_of(mask: MaskFunction) -> Spans | None:
    """Return the ranges that a mask function keeps, or None if it is not known to keep ranges.

    A function is known to keep ranges if it combines, by and, comparisons of integers that are
    linear in q or k. Equal elements of a captured array must be neighbours, as in an array of
    document numbers. Integers must be so small that kernels compute the ends without overflow.
    """
    search = _Search(mask)
    keys = search.range_of(mask.graph.root, "k")
    queries = None if keys is None else search.range_of(mask.graph.root, "q")
    if keys is None or queries is None:
        return None
    first = len(mask.graph.arrays)
    made = tuple(search.build.arrays[first:]), tuple(search.values)
    found = Spans(tuple(search.build.nodes), keys, queries, *made)
    return found if _are_small(mask, found) else None


def _are_small(mask: MaskFunction, spans: Spans) -> bool:
    """Return whether all integers that lead to the ranges' ends are from LOWEST to HIGHEST."""
    zero = np.asarray(0)
    ranges = {name: (zero, np.asarray(last)) for name, last in _LARGEST.items()}
    graph = Graph(spans.nodes, mask.graph.root, (*mask.graph.arrays, *spans.arrays))
    bounds = Bounds(graph, (*mask.arrays, *spans.values), mask.dtype).every(ranges)
    return all(
        bounds[n][0].min() >= LOWEST and bounds[n][1].max() <= HIGHEST
        for n in needed(spans.nodes, roots((spans.keys, spans.queries)))
        if spans.nodes[n].kind == INT
    )


class _Search:
    """Finds ranges of the positions "q" or "k", called `moving`, for a fixed other position."""

    def __init__(self, mask: MaskFunction) -> None:
        self.mask, self.build = mask, Builder(mask.graph.nodes, mask.graph.arrays)
        self.values: list[np.ndarray] = []
        self._ends: dict[tuple[int, int], tuple[int, int]] = {}
        # Functions may use one value many times.
        self.depends, self.range_of = cache(self._depends), cache(self._range_of)
        self._linear = cache(self._as_linear)

    def _depends(self, n: int) -> frozenset[str]:
        node = self.build.nodes[n]
        own = frozenset([node.value]) if node.op == "arg" else frozenset()
        return own.union(*(self.depends(a) for a in node.args))

    def _range_of(self, n: int, moving: str) -> Range | None:
        """Return the range in which node `n` is True, or None if it is not known."""
        node = self.build.nodes[n]
        if node.kind != BOOL:
            return None
        if moving not in self.depends(n):
            return Range(keep=n)
        if node.op in ("and", "bitand", "or", "bitor"):
            both = [self.range_of(a, moving) for a in node.args]
            if both[0] is None or both[1] is None:
                return None
            return (self._both if "and" in node.op else self._either)(both[0], both[1])
        if node.op in ("le", "lt", "eq") and {self.build.nodes[a].kind for a in node.args} == {INT}:
            return self._compared(node.op, node.args[0], node.args[1], moving)
        return None

    def _both(self, one: Range, other: Range) -> Range:
        return Range(
            self._joined("max", one.low, other.low),
            self._joined("min", one.high, other.high),
            self._joined("and", one.keep, other.keep),
        )

    def _joined(self, op: str, *nodes: int | None) -> int | None:
        known = [n for n in nodes if n is not None]
        return self.build.op(op, *known) if len(known) == 2 else known[0] if known else None

    def _either(self, one: Range, other: Range) -> Range | None:
        """Two ranges that share one end, which has no limit, form a range."""
        has = [{e for e in ("low", "high") if getattr(x, e) is not None} for x in (one, other)]
        end = has[0] | has[1]
        if len(end) > 1:
            return None
        if not end:
            return Range(keep=self._joined("or", one.keep, other.keep))
        name, beyond = ("low", LOWEST) if end == {"low"} else ("high", HIGHEST)
        nowhere = -beyond
        ends = []
        for x in (one, other):
            at = getattr(x, name)
            at = self.build.const(beyond) if at is None else at
            if x.keep is not None:
                at = self.build.op("where", x.keep, at, self.build.const(nowhere))
            ends.append(at)
        return Range(**{name: self.build.op("min" if name == "low" else "max", *ends)})

    def _compared(self, op: str, x: int, y: int, moving: str) -> Range | None:
        """Return where x <= y, x < y or x == y."""
        if op == "eq":
            for a, b in ((x, y), (y, x)):
                if moving in self.depends(a) and moving not in self.depends(b):
                    found = self._quotient(a, b, moving) or self._equal_elements(a, b, moving)
                    if found is not None:
                        return found
        if op != "eq" and self.build.nodes[x].op == "abs":
            (inner,) = self.build.nodes[x].args
            both = [self._compared(op, a, y, moving) for a in (inner, self.build.op("neg", inner))]
            return None if both[0] is None or both[1] is None else self._both(both[0], both[1])
        left, right = self._linear(x, moving), self._linear(y, moving)
        if left is None or right is None or abs(left[0] - right[0]) != 1:
            return None
        step = left[0] - right[0]
        # step * moving + left <= right
        end = self.build.op("sub", *((right[1], left[1]) if step == 1 else (left[1], right[1])))
        if op == "eq":
            return Range(end, end)
        if op == "lt":
            end = self.build.op("sub", end, self.build.const(step))
        return Range(high=end) if step == 1 else Range(low=end)

    def _as_linear(self, n: int, moving: str) -> tuple[int, int] | None:
        """Return (step, rest) if node n is step * moving + rest; `rest` is another node."""
        node = self.build.nodes[n]
        if moving not in self.depends(n):
            return 0, n
        if node.op == "arg":
            return 1, self.build.const(0)
        if node.op not in ("add", "sub", "neg"):
            return None
        parts = [self._linear(a, moving) for a in node.args]
        if None in parts:
            return None
        known = [p for p in parts if p is not None]
        if node.op == "neg":
            return -known[0][0], self.build.op("neg", known[0][1])
        sign = 1 if node.op == "add" else -1
        rest = self.build.op(node.op, known[0][1], known[1][1])
        return known[0][0] + sign * known[1][0], rest

    def _quotient(self, x: int, y: int, moving: str) -> Range | None:
        """Return where (moving + ..) // constant == y, as in a mask of chunks."""
        node = self.build.nodes[x]
        if node.op != "floordiv" or self.build.nodes[node.args[1]].op != "const":
            return None
        size, top = self.build.nodes[node.args[1]].value, self._linear(node.args[0], moving)
        if size <= 0 or top is None or top[0] != 1:
            return None
        first = self.build.op("mul", y, self.build.const(size))
        low = self.build.op("sub", first, top[1])
        return Range(low, self.build.op("add", low, self.build.const(size - 1)))

    def _equal_elements(self, x: int, y: int, moving: str) -> Range | None:
        """Return where array[.., moving] equals another element, if the array is sorted."""
        of, by = self.build.nodes[x], self.build.nodes[y]
        if of.op != "load" or by.op != "load" or not of.args or not by.args:
            return None
        fixed = {"q": "k", "k": "q"}[moving]
        at = (self.build.arg(moving), self.build.arg(fixed))
        if (of.args[-1], by.args[-1]) != at or of.args[:-1] != by.args[:-1]:
            return None
        if any(self.depends(a) & {"q", "k"} for a in of.args[:-1]):
            return None
        ends = self._ends_of(of.value, by.value)
        if ends is None:
            return None
        return Range(*(self.build.load(a, by.args) for a in ends))

    def _ends_of(self, inner: int, outer: int) -> tuple[int, int] | None:
        """Return two new arrays: where elements of `outer` begin and end in `inner`, if sorted."""
        if (inner, outer) not in self._ends:
            rows, wanted = self.mask.arrays[inner], self.mask.arrays[outer]
            sizes_differ = rows.shape[:-1] != wanted.shape[:-1]
            if sizes_differ or not rows.size or (np.diff(rows.astype(np.int64)) < 0).any():
                return None
            flat = rows.reshape(-1, rows.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
            ends = [
                np.stack([np.searchsorted(r, w, side) for r, w in zip(*flat, strict=True)])
                for side in ("left", "right")
            ]
            self._ends[inner, outer] = self._new(ends[0], outer), self._new(ends[1] - 1, outer)
        return self._ends[inner, outer]

    def _new(self, values: np.ndarray, like: int) -> int:
        shape = self.mask.arrays[like].shape
        self.values.append(np.ascontiguousarray(values.reshape(shape), np.int32))
        self.build.arrays.append(ArraySpec(f"end{len(self.values)}", shape, "int32"))
        return len(self.build.arrays) - 1


def roots(ranges: Iterable[Range]) -> list[int]:
    """Return the numbers of the nodes that compute ranges."""
    return [n for r in ranges for n in r if n is not None]
