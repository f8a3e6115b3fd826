"""Place tensors around the grid of score tiles, for animations and HTML players.

The grid has one row per query tile and one column per key tile. So a tensor with one row per query
is drawn as a column beside the grid, and a tensor with one row per key as a row above or below the
grid. A matrix of scores is drawn as the grid itself. Input tensors are drawn at the left of the
grid and above it, and results at the right and below it.
"""

from __future__ import annotations

import numpy as np

from flashsim.errors import OptionError, UnsupportedError
from flashsim.schedule.names import TRANSFERS
from flashsim.schedule.schedule import MASKED, Schedule
from flashsim.schedule.tensors import COL, TILE
from flashsim.trace.steps import Steps
from flashsim.trace.trace import Trace

#: Short symbols for names that are too long for a strip.
SYMBOLS = {"delta": "δ", "dBias": "dB", "bias": "B", "O_part": "O′", "L_part": "L′", "table": "tbl"}


def key_side(trace: Trace) -> frozenset[str]:
    """Return the names of the tensors that have one row per key, except accumulators."""
    return _cut_along(trace, COL)


def matrices(trace: Trace) -> frozenset[str]:
    """Return the names of the tensors that are N x N matrices of scores."""
    return _cut_along(trace, TILE)


def _cut_along(trace: Trace, side: int) -> frozenset[str]:
    return frozenset(n for n, axis in trace.axes.items() if axis == side and not n.endswith("_acc"))


def sides(trace: Trace) -> dict[str, tuple[str, ...]]:
    """Return the names of the tensors that are drawn at each side of the score grid.

    The result is a dict with the keys "left", "right", "top", "bottom" and "grid". An accumulator
    such as dQ_acc is listed under the name of its tensor, dQ.
    """
    loaded: dict[str, None] = {}
    written: dict[str, None] = {}
    for _, op, tensor in trace.transfers:
        (loaded if op == "load" else written)[tensor.removesuffix("_acc")] = None
    tensors, keys, grid = list({**loaded, **written}), key_side(trace), matrices(trace)
    row = [t for t in tensors if t not in keys | grid]
    col = [t for t in tensors if t in keys]
    return {
        "left": tuple(t for t in row if t not in written),
        "right": tuple(t for t in row if t in written),
        "top": tuple(t for t in col if t not in written),
        "bottom": tuple(t for t in col if t in written),
        "grid": tuple(t for t in tensors if t in grid),
    }


#: Kinds of tiles, which `tile_kinds` returns.
SKIPPED, WHOLE, CUT, CUT_LOW, CUT_BOTH = range(5)


#: The most tiles in a picture; no picture has more pixels.
_MOST_TILES = 1 << 24


def tile_kinds(schedule: Schedule, most: int | None = _MOST_TILES) -> np.ndarray:
    """Return codes for how the mask cuts each score tile, a uint8 array of shape (T_r, T_c).

    A tile that is not computed is SKIPPED, and a tile that the mask does not change is WHOLE. A
    tile is CUT if the mask removes its upper right corner (as causal masks do), and CUT_LOW if the
    mask removes its lower left corner (as a sliding window does). A tile is CUT_BOTH if the mask
    removes both corners. Partly masked tiles without a removed corner are CUT. Tiles that the mask
    removes entirely are CUT too, if standard attention computes them. More than `most` tiles raise
    an `OptionError`.
    """
    if most is not None and schedule.t_r * schedule.t_c > most:
        raise OptionError(
            f"a grid of {schedule.t_r:,} x {schedule.t_c:,} tiles is too fine to draw; a plot "
            f"shows at most {most:,} tiles, so use larger tiles"
        )
    grid = np.zeros((schedule.t_r, schedule.t_c), np.uint8)
    ptr, col, kind = schedule.row_csr
    row = np.repeat(np.arange(schedule.t_r), np.diff(ptr))
    grid[row, col] = WHOLE
    for i, j in zip(row[kind == MASKED], col[kind == MASKED], strict=True):
        keep = schedule.keep(i, j)
        if keep is None or not keep.any():  # of a dense walk, or keys that do not exist
            grid[i, j] = CUT
            continue
        high, low = not keep[0, -1], not keep[-1, 0]
        grid[i, j] = CUT_BOTH if high and low else CUT_LOW if low else CUT
    return grid


def corners(kinds: np.ndarray) -> list[tuple[int, int, bool]]:
    """Return (i, j, upper) of each tile corner that is drawn as removed by the mask.

    `upper` is true for the upper right corner and false for the lower left corner.
    """
    return [
        (i, j, high)
        for high, other in ((True, CUT), (False, CUT_LOW))
        for i, j in np.argwhere((kinds == other) | (kinds == CUT_BOTH)).tolist()
    ]


def first_touch(walk: Steps) -> dict[str, np.ndarray]:
    """Return the step at which each tile of a tensor first moves between HBM and SRAM.

    For a tile that never moves, the step is `len(walk)`. The result has one array per tensor name.
    The array's shape is (T_r,) if the tensor has one row per query, (T_c,) if it has one row per
    key, and (T_r, T_c) for a matrix of scores.
    """
    t_r, t_c = one_grid(walk.trace)
    events = walk.events
    step = np.searchsorted(walk.ends, np.arange(len(events)))
    moving = np.isin(events["op"], TRANSFERS)
    result: dict[str, np.ndarray] = {}
    keys, scores = key_side(walk.trace), matrices(walk.trace)
    for code in np.unique(events["tensor"][moving]):
        name = walk.trace.tensors[code].removesuffix("_acc")
        chosen = moving & (events["tensor"] == code)
        i, j, at = events["i"][chosen], events["j"][chosen], step[chosen]
        shape = (t_r, t_c) if name in scores else (t_c,) if name in keys else (t_r,)
        first = result.setdefault(name, np.full(shape, len(walk), np.int64))
        if name in scores:
            whole = j < 0  # rows of a matrix moved at once
            np.minimum.at(first, (i[~whole], j[~whole]), at[~whole])
            for row, when in zip(i[whole], at[whole], strict=True):
                first[row] = np.minimum(first[row], when)
        else:
            np.minimum.at(first, j if name in keys else i, at)
    return result


def one_grid(trace: Trace) -> tuple[int, int]:
    """Return the numbers of row tiles and column tiles, if all stages of the trace share them.

    Stages with different tilings raise an `UnsupportedError`, because they do not fit on one grid.
    """
    shapes = {(s.schedule.t_r, s.schedule.t_c) for s in trace.stages}
    if len(shapes) > 1:
        raise UnsupportedError(
            f"the stages of this trace have grids of different sizes ({sorted(shapes)} tiles); "
            "they cannot be drawn on one grid; pass one stage as stage=, or use the same tiling "
            "for all stages"
        )
    return shapes.pop()


#: The most pages per tile whose boundaries are drawn; more would hide the tile.
MOST_PAGES = 4


def part_numbers(schedule: Schedule) -> np.ndarray:
    """Return each score tile's thread-block number, int64 of shape (T_r, T_c); -1 if no block.

    If the keys are split, several thread blocks work on one row tile, each on one split of the
    keys.
    """
    grid = np.full((schedule.t_r, schedule.t_c), -1)
    ptr, col, _ = schedule.row_csr
    first = 0
    for i, parts in enumerate(schedule.part_counts.tolist()):
        mine = col[ptr[i] : ptr[i + 1]]
        edges = len(mine) * np.arange(parts + 1) // parts
        grid[i, mine] = first + np.repeat(np.arange(parts), np.diff(edges))
        first += parts
    return grid


def part_edges(schedule: Schedule) -> list[tuple[int, int]]:
    """Return (i, j) of each score tile whose left neighbour belongs to another thread block."""
    if not (schedule.part_counts > 1).any():
        return []
    blocks = part_numbers(schedule)
    other = (blocks[:, 1:] != blocks[:, :-1]) & (np.minimum(blocks[:, 1:], blocks[:, :-1]) >= 0)
    return [(i, j + 1) for i, j in np.argwhere(other).tolist()]


def page_edges(schedule: Schedule) -> list[float]:
    """Return where KV-cache pages start, in units of column tiles; [] if too many to draw."""
    size = schedule.problem.page_size
    if size is None or schedule.problem.pages > MOST_PAGES * schedule.t_c:
        return []
    edges: list[float] = []
    starts, widths = schedule.cols[:, 0], schedule.cols[:, 1] - schedule.cols[:, 0]
    for s in schedule.problem.sequences:
        keys = np.arange(s.k_start + size, s.k_stop, size)
        tile = np.searchsorted(starts, keys, side="right") - 1
        edges += (tile + (keys - starts[tile]) / widths[tile]).tolist()
    return edges
