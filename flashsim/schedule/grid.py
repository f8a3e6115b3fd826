"""`Grid`: a problem's row and column tiles, and the pairs that causal or windowed loops visit."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from flashsim.errors import TilingError, UnsupportedError
from flashsim.problem.problem import Problem, Segment
from flashsim.schedule import tables
from flashsim.schedule.closed_sums import Strip
from flashsim.schedule.plans import Outer
from flashsim.schedule.split import Split
from flashsim.schedule.tiling import Tiling


class Grid:
    """A `Schedule`'s row and column tiles, and the span of tiles that each tile visits.

    The spans exist only if the problem has no mask except causality and a window, so that each row
    keeps one interval of keys.
    """

    problem: Problem
    tiling: Tiling
    dense: bool
    split: Split

    # -- tiles ----------------------------------------------------------------------------------

    @cached_property
    def _edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The tables of row and column tiles, and each sequence's first row and column tile."""
        block_q, block_k = self._blocks
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        rows, cols, row_base, col_base = [], [], [0], [0]
        longest = max(self.n_rows, self.problem.n_kv)
        kind = np.int32 if longest <= tables.INT32 else np.int64
        for s in self.problem.sequences:
            own = s.q_start * self.members, s.q_stop * self.members
            r = tables.cut(*own, block_q, s.offset, s.k_stop, kind)
            c = tables.cut(s.k_start, s.k_stop, block_k, s.offset, s.q_stop, kind)
            rows.append(r)
            cols.append(c)
            row_base.append(row_base[-1] + len(r))
            col_base.append(col_base[-1] + len(c))
        edges = np.concatenate(rows), np.concatenate(cols), np.array(row_base), np.array(col_base)
        for table in edges:
            table.setflags(write=False)
        return edges

    def _refusal(self) -> Exception | None:
        """The error to raise if the tables of tiles are too large, or None if they are not."""
        p, members = self.problem, self.members
        size = f"{p.n_q:,} queries x {p.n_kv:,} keys"
        if p.n_q * members * p.n_kv >= 2**63:
            return UnsupportedError(
                f"{size} are more scores than the 64-bit sums of a table can count; use a shorter "
                "sequence"
            )
        if max(p.n_q, p.n_kv) > tables.INT32 and not self._contiguous:
            return UnsupportedError(
                f"{size} with a mask or block_mask need a table of visits, whose indices are "
                f"limited to {tables.INT32:,}; use a shorter sequence, or a mask of causal and "
                "window alone, which needs no table"
            )
        cut_q, cut_k = self._cuts
        for what, side, tiles in (("row", "block_q", cut_q), ("column", "block_k", cut_k)):
            if tiles > tables.MOST_TILES:
                return TilingError(
                    f"{self.tiling} tiles divide {size} into {tiles:,} {what} tiles, but the limit "
                    f"for a schedule is {tables.MOST_TILES:,}; use a larger {side}"
                )
        return None

    @property
    def _cuts(self) -> tuple[int, int]:
        """The numbers of row tiles and of column tiles, computed without tables."""
        p, (block_q, block_k) = self.problem, self._blocks
        cut_q = sum(-(-(s.q_stop - s.q_start) * self.members // block_q) for s in p.sequences)
        return cut_q, sum(-(-(s.k_stop - s.k_start) // block_k) for s in p.sequences)

    def _bands(self, outer: Outer) -> list[Strip] | None:
        """Each sequence's tiles as a `Strip` if tables would be slow or too large; else None."""
        if not self._contiguous:
            return None
        few = max(self._cuts) <= tables.FEW_TILES * len(self.problem.sequences)
        if few and self._refusal() is None:
            return None
        p, (block_q, block_k) = self.problem, self._blocks
        left, right = (p.n_q + p.n_kv,) * 2 if self.dense else (p.left, p.right)
        bands = []
        for s in p.sequences:
            n_q, n_kv, offset = s.q_stop - s.q_start, s.k_stop - s.k_start, s.offset
            offset += s.q_start - s.k_start
            if outer == "queries":
                rows, m = n_q * self.members, self.members
                bands.append(Strip(rows, m, block_q, n_kv, block_k, offset, left, right))
            else:
                bands.append(Strip(n_kv, 1, block_k, n_q, block_q, -offset, right, left))
        return bands

    @property
    def _blocks(self) -> tuple[int, int]:
        """The rows and keys of a tile, each at most the problem's length plus 1 (no overflow)."""
        return (
            min(self.tiling.block_q, self.n_rows + 1),
            min(self.tiling.block_k, self.problem.n_kv + 1),
        )

    @property
    def members(self) -> int:
        """The number of rows per query: 1 or, if heads are packed, the query heads per group."""
        return self.problem.group if self.split.pack_gqa else 1

    @property
    def n_rows(self) -> int:
        """The number of rows of one head or, if heads are packed, of one group of heads."""
        return self.problem.n_q * self.members

    @property
    def rows(self) -> np.ndarray:
        """The table of row tiles, int32 (T_r, 4): start, stop, offset and key_stop of each.

        If a length exceeds int32, the type is int64, and the problem can be counted but not run.
        """
        return self._edges[0]

    @property
    def cols(self) -> np.ndarray:
        """The table of column tiles, int32 (T_c, 4): start, stop, offset and query_stop of each."""
        return self._edges[1]

    @property
    def t_r(self) -> int:
        """Number of row tiles."""
        return len(self.rows)

    @property
    def t_c(self) -> int:
        """Number of column tiles."""
        return len(self.cols)

    @property
    def heights(self) -> np.ndarray:
        """Number of rows of each row tile, int64 (T_r,)."""
        return (self.rows[:, 1] - self.rows[:, 0]).astype(np.int64)

    @property
    def widths(self) -> np.ndarray:
        """Number of keys of each column tile, int64 (T_c,)."""
        return (self.cols[:, 1] - self.cols[:, 0]).astype(np.int64)

    def row_slice(self, i: int) -> slice:
        """Return the slice of the rows (`n_rows`) that belong to row tile i."""
        return slice(int(self.rows[i, 0]), int(self.rows[i, 1]))

    def col_slice(self, j: int) -> slice:
        """Return the slice of keys of column tile j, as indices into the packed sequences."""
        return slice(int(self.cols[j, 0]), int(self.cols[j, 1]))

    def sequence_of_row(self, i: int) -> Segment:
        """Return the packed sequence of row tile i."""
        return self.problem.sequences[int(self.sequence_of_rows[i])]

    @property
    def sequence_starts(self) -> np.ndarray:
        """Each packed sequence's first query, first key and offset, int64 (sequences, 3)."""
        return np.array([(s.q_start, s.k_start, s.offset) for s in self.problem.sequences])

    @cached_property
    def sequence_of_rows(self) -> np.ndarray:
        """Index of the packed sequence to which each row tile belongs, int64 (T_r,)."""
        return np.repeat(np.arange(len(self.problem.sequences)), np.diff(self._edges[2]))

    @cached_property
    def sequence_of_cols(self) -> np.ndarray:
        """Index of the packed sequence to which each column tile belongs, int64 (T_c,)."""
        return np.repeat(np.arange(len(self.problem.sequences)), np.diff(self._edges[3]))

    @cached_property
    def key_counts(self) -> np.ndarray:
        """The number of keys in each row tile's sequence, int64 (T_r,)."""
        lengths = np.array([s.k_stop - s.k_start for s in self.problem.sequences])
        return lengths[self.sequence_of_rows]

    def queries(self, i: int) -> np.ndarray:
        """Return the packed query index of each row in row tile i."""
        return np.arange(*self.rows[i, :2].tolist()) // self.members

    def keep(self, i: int, j: int, *, functions: bool = True) -> np.ndarray | None:
        """Return booleans (rows, cols), True for kept scores of tile (i, j); None if all are kept.

        The mask function `mask_mod` is applied only if `functions` is true.
        """
        s, cols = self.sequence_of_row(i), np.arange(*self.cols[j, :2].tolist())
        kept = self.problem.keep(s, self.queries(i), cols, functions=functions)
        return None if kept.all() else kept

    def kept_tiles(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Return booleans, True for scores of tiles (i, j) that all masks of the problem keep.

        The result has the shape (tiles, 1 or batch, 1 or heads, rows, cols). A smaller tile repeats
        the last row's or column's booleans to fill this shape.
        """
        p, s = self.problem, self.sequence_of_rows[i]
        starts = self.sequence_starts[s]
        rows, cols = self.rows[i].astype(np.int64), self.cols[j].astype(np.int64)
        high, wide = (int((t[:, 1] - t[:, 0]).max(initial=0)) for t in (rows, cols))
        q = np.minimum(rows[:, :1] + np.arange(high), rows[:, 1:2] - 1) // self.members
        k = np.minimum(cols[:, :1] + np.arange(wide), cols[:, 1:2] - 1)
        q_local, k_local = (q - starts[:, :1])[:, :, None], (k - starts[:, 1:2])[:, None, :]
        rel = k[:, None, :] - (q[:, :, None] + starts[:, 2, None, None])
        kept = p.keep_alike(q_local, k_local, rel)[:, None, None]
        if p.mask_mod is None:
            return kept
        return kept & np.moveaxis(p.keep_per_head(q_local, k_local), 2, 0)

    # -- spans ----------------------------------------------------------------------------------

    @cached_property
    def row_spans(self) -> np.ndarray | None:
        """The column tiles that each row tile visits, int32 (T_r, 4): lo, full_lo, full_hi, hi."""
        if not self._contiguous:
            return None
        p = self.problem
        return self._spans(self.rows, "k", p.left, p.right)

    @cached_property
    def col_spans(self) -> np.ndarray | None:
        """The row tiles that visit each column tile, int32 (T_c, 4): lo, full_lo, full_hi, hi."""
        if not self._contiguous or self.members > 1:  # packed rows are not in order of queries
            return None
        # Key k is seen by queries from k - offset - right to k - offset + left.
        return self._spans(self.cols, "q", self.problem.right, self.problem.left)

    @property
    def _contiguous(self) -> bool:
        return self.dense or self.problem.banded

    def _spans(self, table: np.ndarray, other: str, left: int, right: int) -> np.ndarray:
        """Return, for each tile in `table`, the span of visited tiles on the opposite axis."""
        if other == "k":
            base, other_base, block, sign = *self._edges[2:], self._blocks[1], 1
        else:
            base, other_base, block, sign = *self._edges[:1:-1], self._blocks[0], -1

        def each(values: Iterable[int]) -> np.ndarray:
            """Return the value of each tile's sequence, or of the only sequence, as int64."""
            found = np.fromiter(values, np.int64)
            return found if len(found) == 1 else np.repeat(found, np.diff(base))

        sequences = self.problem.sequences
        start = each(s.q_start if other == "q" else s.k_start for s in sequences)
        n = each(s.q_stop if other == "q" else s.k_stop for s in sequences) - start
        offset = sign * each(s.offset for s in sequences)
        rows_each = self.members if other == "k" else 1
        first = table[:, 0].astype(np.int64) // rows_each + offset - start
        last = (table[:, 1].astype(np.int64) - 1) // rows_each + offset - start
        if self.dense:
            lo = np.zeros_like(first)
            hi = lo - (-n // block)
        else:
            # The positions that some row of the tile keeps: [first - left, last + right].
            begin, end = np.maximum(first - left, 0), np.minimum(last + right, n - 1)
            empty = end < begin
            lo = np.where(empty, 0, begin // block)
            hi = np.where(empty, 0, end // block + 1)
        # The positions that every row of the tile keeps: [last - left, first + right].
        begin, end = np.maximum(last - left, 0), np.minimum(first + right, n - 1)
        full_lo = -(-begin // block)
        full_hi = (end + 1) // block
        # Rows past the end of a tile need no mask, so a ragged last row tile can be FULL. Keys past
        # the end do, so a ragged column tile has no FULL visits.
        if other == "q":
            full_hi = np.where(end == n - 1, -(-n // block), full_hi)
            ragged = table[:, 1] - table[:, 0] < self._blocks[1]
            full_hi = np.where(ragged, full_lo, full_hi)
        full_lo, full_hi = np.clip(full_lo, lo, hi), np.clip(full_hi, lo, hi)
        nothing = (full_hi <= full_lo) | (not self.problem.banded)
        full_lo, full_hi = np.where(nothing, hi, full_lo), np.where(nothing, hi, full_hi)
        out = np.empty((len(table), 4), np.int32)
        out[:] = np.stack([lo, full_lo, full_hi, hi], axis=1) + each(other_base[:-1])[:, None]
        out.setflags(write=False)
        return out
