"""Classifies score tiles as FULL, MASKED or skipped, with few calls of the mask function.

Interval arithmetic bounds the mask's values over boxes of tiles. If the bounds prove that the mask
keeps all scores of a box, or none, all tiles of the box are classified at once. A box that the
bounds do not decide is divided, down to single tiles. For a single tile, the mask is first
evaluated at a few scores: one kept and one masked score prove that the tile is MASKED. Otherwise,
the mask is evaluated at all scores of the tile. The classification is the same as if the mask were
evaluated at every score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flashsim.schedule import tables
from flashsim.schedule.grid import Grid
from flashsim.schedule.tables import FULL, MASKED

#: A box is divided into at most this many boxes per side.
PARTS = 4


class Boxes(NamedTuple):
    """Disjoint boxes (i0 .. i1 - 1, j0 .. j1 - 1), each with only FULL tiles or one MASKED tile."""

    i0: np.ndarray
    i1: np.ndarray
    j0: np.ndarray
    j1: np.ndarray
    kind: np.ndarray

    @property
    def tiles(self) -> int:
        """The number of tiles in all boxes."""
        return int(((self.i1 - self.i0) * (self.j1 - self.j0)).sum())

    def only(self, kind: int) -> Boxes:
        """Return only the boxes with tiles of one kind, FULL or MASKED."""
        return Boxes(*(x[self.kind == kind] for x in self))

    def sums(self, heights: np.ndarray, widths: np.ndarray) -> tuple[int, int, int, int]:
        """Return the fields of `Sums` for all boxes, from each tile's numbers of rows and keys."""
        down, across = (np.concatenate([[0], np.cumsum(x)]) for x in (heights, widths))
        high, wide = down[self.i1] - down[self.i0], across[self.j1] - across[self.j0]
        rows, cols = self.i1 - self.i0, self.j1 - self.j0
        each = rows * cols, rows * wide, cols * high, high * wide
        visits, row_cols, col_rows, area = (int(x.sum()) for x in each)
        return visits, row_cols, col_rows, area

    def csr(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the boxes' tiles as ``(ptr (rows + 1,), col, kind)``, with ascending columns."""
        tables.check_visits(self.tiles)
        height = self.i1 - self.i0
        owner = np.repeat(np.arange(len(height)), height)
        row = self.i0[owner] + np.arange(len(owner)) - (np.cumsum(height) - height)[owner]
        order = np.lexsort((self.j0[owner], row))
        owner, row = owner[order], row[order]
        width = self.j1[owner] - self.j0[owner]
        run = np.repeat(np.arange(len(owner)), width)
        col = self.j0[owner][run] + np.arange(len(run)) - (np.cumsum(width) - width)[run]
        ptr = np.concatenate([[0], np.cumsum(np.bincount(row, width, rows).astype(np.int64))])
        return ptr.astype(np.int32), col.astype(np.int32), self.kind[owner][run].astype(np.int32)


#: Returns whether any, and whether all, scores of tiles (i, j) are kept, from each of their scores.
Evaluate = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def classify(grid: Grid, elements: Evaluate) -> Boxes:
    """Return the tiles that a loop visits in a problem with a mask function, grouped into boxes.

    A tile with fewer than `block_k` keys is never FULL. ``elements(i, j)`` evaluates every score of
    tiles (i, j), and returns two booleans per tile: whether any score is kept, and whether all are.
    """
    p, mask, block_k = grid.problem, grid.problem.mask_mod, grid.tiling.block_k
    assert mask is not None
    q_start, k_start, offset = grid.sequence_starts.T
    other = p.block_mask is not None or p.mask is not None  # masks without bounds
    rows, cols, row_base, col_base = (x.astype(np.int64) for x in grid._edges)
    s = np.flatnonzero((np.diff(row_base) > 0) & (np.diff(col_base) > 0))
    box = np.stack([row_base[s], row_base[s + 1], col_base[s], col_base[s + 1], s])
    done: list[np.ndarray] = []
    while box.shape[1]:
        i0, i1, j0, j1, s = box
        q = rows[i0, 0], rows[i1 - 1, 1] - 1
        k = cols[j0, 0], cols[j1 - 1, 1] - 1
        low, high = mask.bounds(
            *(p.batch, p.heads),
            *((q[0] - q_start[s], q[1] - q_start[s]), (k[0] - k_start[s], k[1] - k_start[s])),
        )
        nearest, farthest = k[0] - (q[1] + offset[s]), k[1] - (q[0] + offset[s])
        none = (high == 0) | (farthest < -p.left) | (nearest > p.right)
        whole = (low == 1) & (nearest >= -p.left) & (farthest <= p.right) & (not other)
        single = (i1 - i0 == 1) & (j1 - j0 == 1)
        ragged = cols[j1 - 1, 1] - cols[j1 - 1, 0] < block_k
        kind = np.where(whole & ~ragged, FULL, MASKED)
        settled = (whole & (~ragged | single)) & ~none
        done.append(np.stack([i0, i1, j0, j1, kind])[:, settled])
        rest = ~none & ~settled
        last = rest & single
        if last.any():
            done.append(_tiles(grid, box[:, last], elements, probes=not other))
        box = _divided(box[:, rest & ~single])
    boxes = np.concatenate(done, axis=1) if done else np.zeros((5, 0), np.int64)
    return Boxes(*boxes)


def _divided(box: np.ndarray) -> np.ndarray:
    """Return smaller boxes: up to PARTS x PARTS for each of the given boxes."""
    if not box.shape[1]:
        return box
    i0, i1, j0, j1, s = box
    high, wide = -(-(i1 - i0) // PARTS), -(-(j1 - j0) // PARTS)
    parts = []
    for y in range(PARTS):
        for x in range(PARTS):
            a, b = i0 + y * high, np.minimum(i0 + (y + 1) * high, i1)
            c, d = j0 + x * wide, np.minimum(j0 + (x + 1) * wide, j1)
            there = (a < b) & (c < d)
            parts.append(np.stack([a, b, c, d, s])[:, there])
    return np.concatenate(parts, axis=1)


def _tiles(grid: Grid, box: np.ndarray, elements: Evaluate, *, probes: bool) -> np.ndarray:
    """Evaluate single tiles at a few or at all scores; return the FULL and the MASKED tiles."""
    i, j, s = box[0], box[2], box[4]
    some, every = np.zeros(len(i), bool), np.ones(len(i), bool)
    if probes:
        some, every = _probed(grid, i, j, s)
    open_ = np.flatnonzero(~some | every)
    if len(open_):
        some[open_], every[open_] = elements(i[open_], j[open_])
    every &= grid.widths[j] == grid.tiling.block_k
    kind = np.where(every, FULL, MASKED)
    return np.stack([i, i + 1, j, j + 1, kind])[:, some]


def _probed(
    grid: Grid, i: np.ndarray, j: np.ndarray, s: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate a few scores of each tile; return two booleans per tile: any kept, and all kept."""
    p, mask = grid.problem, grid.problem.mask_mod
    assert mask is not None
    q_start, k_start, offset = grid.sequence_starts[s].T
    rows, cols = grid.rows[i].astype(np.int64), grid.cols[j].astype(np.int64)
    first_q, last_q, first_k, last_k = rows[:, 0], rows[:, 1] - 1, cols[:, 0], cols[:, 1] - 1
    middle_q, middle_k = (first_q + last_q) // 2, (first_k + last_k) // 2
    q = np.stack([first_q, first_q, last_q, last_q, middle_q, first_q + 1, middle_q], axis=1)
    k = np.stack([first_k, last_k, first_k, last_k, middle_k, first_k, first_k + 1], axis=1)
    q, k = np.minimum(q, last_q[:, None]), np.minimum(k, last_k[:, None])
    rel = k - (q + offset[:, None])
    band = (rel >= -p.left) & (rel <= p.right)
    b = np.array([0, p.batch - 1] if "b" in mask.per_head and p.batch > 1 else [0])
    h = np.array([0, p.heads - 1] if "h" in mask.per_head and p.heads > 1 else [0])
    kept = mask.keep(
        b[:, None, None, None],
        h[None, :, None, None],
        (q - q_start[:, None])[None, None],
        (k - k_start[:, None])[None, None],
    )
    kept = np.broadcast_to(kept, (len(b), len(h), *q.shape)) & band
    return kept.any(axis=(0, 1, 3)), kept.all(axis=(0, 1, 3))
