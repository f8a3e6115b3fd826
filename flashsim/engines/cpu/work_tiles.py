"""Divides a stage into work tiles: runs of neighbouring outer tiles for a set of heads."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from flashsim.engines.cpu.tables import Tiles
from flashsim.problem.problem import Problem
from flashsim.schedule.file_mask import Csr
from flashsim.schedule.schedule import MASKED, Schedule

#: The bytes of outer tiles that a thread keeps in its L2 cache, so that each inner tile is loaded
#: once for all of them; and the fewest work tiles per thread.
TOGETHER, WORK_TILES = 400 << 10, 4

#: The most mask bits (one byte each) to evaluate before a kernel call; limits an arbitrary mask's
#: memory.
MASK_CHUNK = 1 << 25


def tiles(
    schedule: Schedule, name: str, threads: int, lanes: int, *, one_query: bool = False
) -> Iterator[Tiles]:
    """Yield a stage's tables: tiles, and their division among threads.

    With a mask function, there are several `Tiles`, each with its own mask bits. Tables with mask
    bits are not cached between calls, since the mask function's results may change. `lanes` is the
    width of a panel. With `one_query` per head, a work tile is all query heads of a key head.
    """
    if schedule.problem.mask is None and schedule.problem.block_mask is None:
        yield from _known(schedule, name, threads, lanes, one_query)
    else:
        yield from _tiles(schedule, name, threads, lanes, one_query)


def known(schedule: Schedule) -> Schedule:
    """Return an equal, recently used schedule, whose tables can be reused, or `schedule` itself."""
    return _same(schedule) if schedule.problem.mask is None else schedule


@lru_cache(maxsize=8)
def _same(schedule: Schedule) -> Schedule:
    return schedule


@lru_cache(maxsize=16)
def _known(
    schedule: Schedule, name: str, threads: int, lanes: int, one_query: bool
) -> tuple[Tiles, ...]:
    return tuple(_tiles(schedule, name, threads, lanes, one_query))


def _tiles(
    schedule: Schedule, name: str, threads: int, lanes: int, one_query: bool
) -> Iterator[Tiles]:
    p, by_row = schedule.problem, schedule.outer == "queries"
    tables_of_tiles = _with_starts(schedule)
    own, other = tables_of_tiles if by_row else tables_of_tiles[::-1]
    csr = schedule.row_csr if by_row else schedule.col_csr
    fused = name == "fused"
    turn = turns(schedule, csr) if fused else _NOTHING
    set_ptr, heads = sets(p, by_row, shares=fused or name == "dq")
    if one_query:
        set_ptr = np.arange(p.batch * p.kv_heads + 1) * (p.heads // p.kv_heads)
    at_once = together(schedule, name, len(own) * (len(set_ptr) - 1), threads)
    order = runs(schedule, csr, fused, at_once, spread=threads > 1)
    for part, *masks in _masks(schedule, csr, order, by_row, lanes):
        tables = (own, other, *csr, *masks, turn, part, set_ptr, heads)
        longest = int(np.diff(part).max(initial=0))
        descending = schedule.key_order == "descending"
        yield Tiles._make([*(_table(x) for x in tables), longest, descending])


def _with_starts(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Return the tables of row tiles and column tiles, with the sequences' starts added."""
    sequences = schedule.problem.sequences
    extended = []
    for table, starts, ends in (
        (schedule.rows, [s.q_start for s in sequences], [s.q_stop for s in sequences]),
        (schedule.cols, [s.k_start for s in sequences], [s.k_stop for s in sequences]),
    ):
        own = np.array(starts)[np.searchsorted(ends, table[:, 0], "right")]
        extended.append(np.column_stack([table, own.astype(table.dtype)]))
    return extended[0], extended[1]


def together(schedule: Schedule, name: str, n: int, threads: int) -> int:
    """Return how many outer tiles form a run; this number does not change any result."""
    p, tile = schedule.problem, schedule.tiling.clip(schedule.problem)
    d, dv = p.head_dim, p.head_dim_v
    elements = {
        "forward": (d + dv) * tile.block_q,  # Q, O
        "dkdv": 2 * (d + dv) * tile.block_k,  # K, V, dK, dV
        "fused": (3 * d + 2 * dv) * tile.block_k,  # K is stored a second time, by row
    }
    if name not in elements:
        return 1
    fit = TOGETHER // (elements[name] * np.dtype(p.compute_dtype).itemsize)
    return max(1, min(fit, n // (WORK_TILES * threads)))


def sets(problem: Problem, by_row: bool, *, shares: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return sets of heads that add to the same bias gradient, in CSR form; each has one thread."""
    p = problem
    heads = p.heads if by_row else p.kv_heads
    numbers = np.arange(p.batch * heads).reshape(p.batch, heads)
    batch, matrices = p.bias if shares and p.bias is not None else (p.batch, p.heads)
    if matrices == 1:
        numbers = numbers.reshape(batch, -1)
    elif batch == 1:  # the matrix of a head serves every batch entry
        numbers = numbers.T
    else:
        numbers = numbers.reshape(-1, 1)
    return np.arange(len(numbers) + 1) * numbers.shape[1], numbers.reshape(-1)


def runs(
    schedule: Schedule, csr: Csr, fused: bool, together: int, *, spread: bool = False
) -> np.ndarray:
    """Return runs of outer tiles of about equal length, with at most `together` tiles each.

    In a fused backward pass, runs have the order of additions to dQ; otherwise, runs with the most
    visits come first. With `spread`, the last run is divided into single tiles, so that threads
    finish at about the same time.
    """
    n = len(csr[0]) - 1
    count = -(-n // together)
    edges = np.arange(count + 1) * n // max(count, 1)
    descending = schedule.key_order == "descending"
    if spread and count > 1:
        last = np.argmin(np.diff(csr[0][edges])) if not fused else 0 if descending else count - 1
        edges = np.union1d(edges, np.arange(edges[last], edges[last + 1]))
    order = np.stack([edges[:-1], edges[1:]], axis=1)
    if fused:
        return order[::-1] if descending else order
    return order[np.argsort(-np.diff(csr[0][edges]), kind="stable")]


def turns(schedule: Schedule, csr: Csr) -> np.ndarray:
    """Return the turn of each visit, a number that fixes when the visit adds to a row tile's dQ.

    A turn is minus the number of remaining visits to the row tile, including this visit. The column
    tiles' turns follow the outer loop.
    """
    row = csr[1]
    order = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=schedule.t_r)
    turn = np.empty(len(row), np.int32)
    turn[order] = np.arange(len(row)) - np.repeat(np.cumsum(counts), counts)
    if schedule.key_order == "descending":
        # Keeps the type, so the kernel is compiled once.
        np.subtract(-1 - counts[row], turn, out=turn, casting="same_kind")
    return turn


def first_turns(schedule: Schedule) -> np.ndarray:
    """Return the turn of the first visit that adds to dQ, for each head and row tile."""
    p = schedule.problem
    counts = np.bincount(schedule.col_csr[1], minlength=schedule.t_r)
    return np.tile(-counts, p.batch * p.heads)


def _masks(
    schedule: Schedule, csr: Csr, order: np.ndarray, by_row: bool, lanes: int
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield groups of runs with the mask bits and edges of each group's MASKED visits."""
    ptr, inner, kind = csr
    keep_at, edges_at = (np.full(len(inner), -1, np.int64) for _ in range(2))
    if schedule.problem.banded:
        yield order, keep_at, _NO_BITS, edges_at, _NOTHING
        return
    begin, size, length = 0, 0, 0
    bits: list[np.ndarray] = []
    edges: list[np.ndarray] = []
    owner = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    for nth, (first, last) in enumerate(order.tolist()):
        at = ptr[first] + np.flatnonzero(kind[ptr[first] : ptr[last]] == MASKED)
        i, j = (owner[at], inner[at]) if by_row else (inner[at], owner[at])
        for part in schedule.groups(len(at)):
            masked_tiles = _bits(schedule, at[part], i[part], j[part], by_row, lanes)
            for now, kept, edge in masked_tiles:
                keep_at[now], edges_at[now] = size, length
                bits.append(kept)
                edges.append(edge)
                size, length = size + kept.size, length + edge.size
        if size > MASK_CHUNK or nth == len(order) - 1:
            tables = np.concatenate([*bits, _NO_BITS]), edges_at, np.concatenate([*edges, _NOTHING])
            yield order[begin : nth + 1], keep_at, *tables
            begin, size, length, bits, edges = nth + 1, 0, 0, [], []


def _bits(
    schedule: Schedule, at: np.ndarray, i: np.ndarray, j: np.ndarray, by_row: bool, lanes: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For each visit in `at` that hides scores, yield its number, mask bits and `Tiles.edges`.

    The bits' shape is (columns, slots, rows) or, if KV-outer, (rows, slots, columns), so that the
    lanes of a panel row are adjacent in memory.
    """
    kept = schedule.kept_tiles(i, j)
    kept = kept.reshape(len(at), -1, *kept.shape[3:])  # the slots
    kept = np.ascontiguousarray(
        kept.transpose(0, 3, 1, 2) if by_row else kept.transpose(0, 2, 1, 3)
    )
    heights = np.diff(schedule.rows[i, :2])[:, 0]
    widths = np.diff(schedule.cols[j, :2])[:, 0]
    outer, wide = (widths, heights) if by_row else (heights, widths)
    panels = -(-kept.shape[3] // lanes)
    pad = panels * lanes - kept.shape[3]
    split = np.pad(kept, ((0, 0), (0, 0), (0, 0), (0, pad)), mode="edge")
    split = split.reshape(*kept.shape[:3], panels, lanes)
    some: Any = split.any(axis=4)  # (tiles, rows of a panel, slots, panels)
    hidden: Any = ~split.all(axis=4)
    edges = np.stack([*_ends(some, outer), *_ends(hidden, outer)], axis=-1).astype(np.int32)
    whole, bits = ~hidden.any(axis=(1, 2, 3)), kept.view(np.uint8)
    for n, now in enumerate(at.tolist()):
        if not whole[n]:
            own = bits[n, : outer[n], :, : wide[n]].reshape(-1)
            yield now, own, edges[n].transpose(1, 0, 2).reshape(-1)


def _ends(flags: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each panel's first row (axis 1) with a True, and the last such row plus 1.

    The two numbers of a panel without a True are equal. In `flags`, rows from `rows` on are copies
    of the tile's last row.
    """
    some = flags.any(axis=1)
    first = np.where(some, flags.argmax(axis=1), 0)
    last = np.where(some, flags.shape[1] - flags[:, ::-1].argmax(axis=1), 0)
    return first, np.minimum(last, rows[:, None, None])


_NOTHING = np.zeros(0, np.int32)
_NO_BITS = np.zeros(0, np.uint8)


def _table(array: np.ndarray) -> np.ndarray:
    """Return a read-only view of a table, so that Numba compiles a kernel only once."""
    view = np.ascontiguousarray(array).view()
    view.setflags(write=False)
    return view
