"""The cache lines of captured arrays that a tile touches, and the requests for them.

A captured array has no tiles, because a score or mask function reads the array at any index. So the
index expressions are evaluated, to find the cache lines of the array that each tile touches. Sinks
are treated as a captured array that is indexed by the head.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flashsim.errors import UnsupportedError
from flashsim.functions.graph import ArraySpec, Graph, Node, needed, place
from flashsim.functions.operations import FLOAT, INT, SIDES
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tables import INT32, MASKED
from flashsim.schedule.tensors import COL, ROW, TILE, shape

#: Bytes of a cache line.
LINE = 128
#: The tensors that consist of lines. `F` and `M` contain the elements of `F_own` and `M_own`.
LINED = ("F", "M", "dF", "sink", "dSink")
#: The most index evaluations for one array access in the source of a function.
MOST_EVALUATED = 2**34
_AXES = {"fixed": ROW, "row": ROW, "col": COL, "score": TILE}


class ElementAccess(NamedTuple):
    """One place in a score or mask function that reads an array element: load `node` of `graph`.

    `values` holds the captured arrays' values if they are known. `first` is the byte offset of the
    array in the tensor that contains all of a function's arrays.
    """

    graph: Graph
    values: tuple[np.ndarray, ...] | None
    node: int
    itemsize: int
    first: int

    @property
    def side(self) -> str:
        """The part of a tile that the array index depends on: a name in SIDES, such as "row"."""
        return self.graph.side(self.node)


def lined(name: str) -> str:
    """Return the name that stands for a tensor's cache lines, such as `F` for `F_own`."""
    return name.removesuffix("_own") if name.startswith(("F_", "M_")) else name


def line_sizes(problem: Problem, name: str) -> np.ndarray:
    """Return the bytes in each cache line of a tensor; a line never spans two arrays."""
    sizes = [_lines_of(nbytes) for nbytes in _array_bytes(problem, name)]
    return np.concatenate(sizes) if sizes else np.zeros(0, np.int64)


def _lines_of(nbytes: int) -> np.ndarray:
    sizes = np.full(-(-nbytes // LINE), LINE, np.int64)
    if len(sizes):
        sizes[-1] = nbytes - LINE * (len(sizes) - 1)
    return sizes


def _source(problem: Problem, name: str) -> tuple[Graph, tuple[np.ndarray, ...] | None, list[int]]:
    """Return a tensor's function, its arrays' values (or None), and the arrays' itemsizes."""
    p = problem
    if name in plans.SINKS:
        itemsize = shape(p, name).itemsize
        nodes = (Node("arg", (), "h", INT), Node("load", (0,), 0, FLOAT))
        return Graph(nodes, 1, (ArraySpec("sinks", (p.heads,), p.compute_dtype),)), None, [itemsize]
    if name == "M":
        mask = p.mask_mod
        return mask.graph, mask.arrays, [a.itemsize for a in mask.graph.arrays]
    graph = p.score_mod
    if name == "F":
        return graph, None, [a.itemsize for a in graph.arrays]
    each = shape(p, name).itemsize
    return graph, None, [each * (a.name in p.score_grads) for a in graph.arrays]


def _array_bytes(problem: Problem, name: str) -> list[int]:
    graph, _, sizes = _source(problem, name)
    return [math.prod(a.shape) * n for a, n in zip(graph.arrays, sizes, strict=True)]


def accesses(problem: Problem, tensor: str, outer: str) -> list[ElementAccess]:
    """Return the array accesses that one move makes, in the order of the function's source code."""
    name = lined(tensor)
    graph, values, sizes = _source(problem, name)
    lines = [-(-n // LINE) * LINE for n in _array_bytes(problem, name)]
    first = np.cumsum([0, *lines]).tolist()
    if name in ("F", "M"):
        own = tensor != name
        sides = ("fixed", "row") if own else ("col", "score") if outer == "queries" else SIDES
    else:
        sides = SIDES
    found = []
    for n in graph.loads:
        array = graph.nodes[n].value
        if sizes[array] and graph.side(n) in sides:
            found.append(ElementAccess(graph, values, n, sizes[array], first[array]))
    return found


class Touched:
    """The cache lines that one array access touches, for every head and tile.

    The lines differ per row tile, column tile or tile pair (`axis` is ROW, COL or TILE). `count` is
    the number of tiles per head along `axis`.
    """

    def __init__(self, access: ElementAccess, schedule: Schedule, *, masked_only: bool) -> None:
        self.access, self.schedule, self.masked_only = access, schedule, masked_only
        self.axis = TILE if masked_only else _AXES[access.side]
        t_r, t_c = schedule.t_r, schedule.t_c
        self.count = {ROW: t_r, COL: t_c, TILE: t_r * t_c}[self.axis]
        graph, node = access.graph, access.graph.nodes[access.node]
        shape = graph.arrays[node.value].shape
        steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        self._index = list(zip(node.args, shape, steps, strict=True))
        self._nodes = self._part()
        # An index of only b and h moves all lines of a head by the same number of bytes.
        of_head = [x for x in self._index if graph.depends[x[0]] <= {"b", "h"}]
        self._rest = [x for x in self._index if x not in of_head]
        heads = np.arange(schedule.problem.batch * schedule.problem.heads)
        b, h = divmod(heads, schedule.problem.heads)
        offset = np.broadcast_to(self._elements(of_head, b, h, 0, 0), heads.shape)
        offset = offset * access.itemsize + access.first
        uses = frozenset().union(*(graph.depends[x[0]] for x in self._rest))
        own = np.stack([b * ("b" in uses), h * ("h" in uses), offset % LINE])
        self._variants, variant = np.unique(own, axis=1, return_inverse=True)
        self.variant, self.shift = variant.reshape(-1), offset // LINE

    def _part(self) -> Graph:
        """Return the function's graph with only the nodes from which the index is computed."""
        graph = self.access.graph
        used = set(needed(graph.nodes, [x[0] for x in self._index]))
        if self.access.values is None and used & set(graph.loads):
            spec = graph.arrays[graph.nodes[self.access.node].value]
            raise UnsupportedError(
                f"{graph.name} indexes the captured array {spec.name} with elements of another "
                "captured array, but the L2 model does not know these elements; use "
                "level='requested'"
            )
        nodes = (
            x if n in used else Node("const", (), 0, x.kind) for n, x in enumerate(graph.nodes)
        )
        return Graph(tuple(nodes), graph.root, graph.arrays, graph.name)

    def _elements(self, index: list[tuple[int, int, int]], b, h, q, k) -> np.ndarray:
        """Return the flat numbers of the array elements that the indices select."""
        if not index:
            return np.zeros((), np.int64)
        given = {"b": b, "h": h, "q": q, "k": k, "score": 0.0}
        dtype = self.schedule.problem.compute_dtype
        values = self._nodes.values(given, self.access.values or (), dtype)
        places = place([values[n] for n, _, _ in index], tuple(size for _, size, _ in index))
        total = np.zeros((), np.int64)
        for place_on_axis, (_, _, step) in zip(places, index, strict=True):
            total = total + place_on_axis * step
        return total

    def _tiles(self) -> np.ndarray:
        """Return an array (pairs, 2): the pairs (row tile, column tile) whose lines are needed."""
        s, side = self.schedule, self.access.side
        if self.axis == TILE:
            ptr, col, kind = s.row_csr
            pairs = np.stack([np.repeat(np.arange(s.t_r), np.diff(ptr)), col], axis=1)
            return pairs[kind == MASKED] if self.masked_only else pairs
        own = np.arange(min(1, s.t_r) if side == "fixed" else self.count)
        return np.outer(own, [side == "row", side == "col"])

    @cached_property
    def sets(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The sets of lines that tiles touch, in CSR form, as ``(ptr, lines, number)``.

        In heads of variant v, tile t touches the lines of set ``number[v, t]``, moved by the head's
        `shift`. An unvisited tile has an empty set of lines.
        """
        pairs, s, side = self._tiles(), self.schedule, self.access.side
        # Tiles of the same row, column or head have the same set if the index says so.
        keep = {"fixed": (0, 0), "row": (1, 0), "col": (0, 1), "score": (1, 1)}[side]
        distinct, which = np.unique(pairs * keep, axis=0, return_inverse=True)
        evaluated = len(distinct) * self._variants.shape[1] * s.tiling.block_q * s.tiling.block_k
        if side == "score" and evaluated > MOST_EVALUATED:
            raise UnsupportedError(
                "to find the lines of a captured array, the L2 model must evaluate an index of "
                f"{self.access.graph.name} at {evaluated:.1e} scores, but the limit is "
                f"{MOST_EVALUATED:.1e}; use fewer queries, keys or heads, or level='requested'"
            )
        found = [
            self._lines(b, h, offset, int(i), int(j), side)
            for b, h, offset in self._variants.T
            for i, j in distinct
        ]
        ptr = np.cumsum([0, *map(len, found), 0])
        lines = np.concatenate([*found, np.zeros(0, np.int64)])
        each, variants = len(distinct), self._variants.shape[1]
        number = np.full((variants, self.count), len(found), np.int64)
        at = {ROW: pairs[:, 0], COL: pairs[:, 1], TILE: pairs[:, 0] * s.t_c + pairs[:, 1]}
        sets = np.arange(variants)[:, None] * each + which.reshape(-1)
        if side == "fixed" and self.axis != TILE:
            number[:] = sets[:, :1]
        else:
            number[:, at[self.axis]] = sets
        return ptr, lines, number

    def _lines(self, b: int, h: int, offset: int, i: int, j: int, side: str) -> np.ndarray:
        s, zero = self.schedule, np.zeros((1, 1), np.int64)
        q = k = zero
        if side in ("row", "score"):
            rows = s.row_slice(i)
            q = np.arange(rows.start, rows.stop)[:, None] - s.sequence_of_row(i).q_start
        if side in ("col", "score"):
            cols = s.col_slice(j)
            start = s.problem.sequences[int(s.sequence_of_cols[j])].k_start
            k = np.arange(cols.start, cols.stop)[None] - start
        elements = self._elements(self._rest, b, h, q, k)
        return np.unique((elements * self.access.itemsize + offset) // LINE)


class Requests:
    """Inserts placeholders for a kernel's array accesses, and replaces placeholders by cache lines.

    Each array access gets one placeholder per head and tile, because `interleave.weave` handles
    only tile numbers. Placeholders are numbers from `start` on.
    """

    def __init__(self, schedule: Schedule, tiles: int) -> None:
        self.schedule, self.start, self.next = schedule, tiles, tiles
        self.touched: list[tuple[int, int, Touched]] = []  # first placeholder, first line, access

    def rows(
        self, stage: plans.Stage, move: plans.Move, first_line: int
    ) -> Iterator[tuple[int, ...]]:
        """Yield one row of the table of requests for each array access that a move makes."""
        p = self.schedule.problem
        for access in accesses(p, move.tensor, stage.outer):
            touched = Touched(access, self.schedule, masked_only=move.for_masked)
            first, self.next = self.next, self.next + p.batch * p.heads * touched.count
            if self.next > INT32:
                raise UnsupportedError(
                    f"the L2 model supports at most {INT32:,} pairs of a head and a tile, but the "
                    f"captured arrays of {access.graph.name} need more; use larger tiles, fewer "
                    "heads or a shorter sequence, or level='requested'"
                )
            self.touched.append((first, first_line, touched))
            yield move.code, touched.axis, 0, first, touched.count, self.schedule.t_c

    def expand(
        self, ids: np.ndarray, codes: np.ndarray, most: int
    ) -> tuple[np.ndarray, np.ndarray] | int:
        """Return ``(ids, codes)`` with placeholders replaced by cache lines.

        Above `most` requests, the method returns only the number of requests.
        """
        if not self.touched:
            return ids, codes
        lengths = np.ones(len(ids), np.int64)
        for first, _, touched in self.touched:
            mine, sets, _ = self._sets(ids, first, touched)
            lengths[mine] = np.diff(touched.sets[0])[sets]
        total = int(lengths.sum())
        if total > most:
            return total
        out, at = np.repeat(ids, lengths), np.cumsum(lengths) - lengths
        for first, first_line, touched in self.touched:
            mine, sets, heads = self._sets(ids, first, touched)
            ptr, lines, _ = touched.sets
            size = lengths[mine]
            within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
            moved = first_line + touched.shift[heads]
            line = lines[np.repeat(ptr[sets], size) + within] + np.repeat(moved, size)
            out[np.repeat(at[mine], size) + within] = line
        return out, np.repeat(codes, lengths)

    @staticmethod
    def _sets(
        ids: np.ndarray, first: int, touched: Touched
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return an access's placeholders: positions in `ids`, numbers of line sets, and heads."""
        stop = first + len(touched.variant) * touched.count
        mine = np.flatnonzero((ids >= first) & (ids < stop))
        heads, tile = np.divmod(ids[mine].astype(np.int64) - first, touched.count)
        return mine, touched.sets[2][touched.variant[heads], tile], heads
