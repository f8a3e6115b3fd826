"""Boundaries of splits of the keys, and of KV-cache pages, on the grid of score tiles."""

from __future__ import annotations

import numpy as np

from flashsim.schedule.schedule import Schedule

#: The most pages per tile whose boundaries are drawn; more would hide the tile.
MOST_PAGES = 4


def part_numbers(schedule: Schedule) -> np.ndarray:
    """Return int64 (T_r, T_c): the thread block that works on each tile, or -1 if none does.

    A row tile's keys are split over several thread blocks, one split each. The blocks are numbered
    row tile by row tile.
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
    """Return (i, j) of each tile whose left neighbour is computed by another thread block."""
    if not (schedule.part_counts > 1).any():
        return []
    blocks = part_numbers(schedule)
    other = (blocks[:, 1:] != blocks[:, :-1]) & (np.minimum(blocks[:, 1:], blocks[:, :-1]) >= 0)
    return [(i, j + 1) for i, j in np.argwhere(other).tolist()]


def page_edges(schedule: Schedule) -> list[float]:
    """Return where KV-cache pages begin inside a sequence, in column tiles from the left.

    The list is empty if the KV cache has no pages, or too many to be told apart in a picture.
    """
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
