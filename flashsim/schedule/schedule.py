"""`Schedule`: a problem's score tiles, the order of visits, and the tiles that need masks.

Every engine, kernel, count and plot follows a `Schedule`. A schedule divides the queries into *row
tiles* and the keys into *column tiles*; all rows or columns of a tile belong to one packed
sequence. A *visit* is the pair of one row tile and one column tile, whose scores are computed.
Kernels read the schedule as int32 tables:

``rows (T_r, 4)``   start, stop, offset, key_stop     of each row tile, packed indices
``cols (T_c, 4)``   start, stop, offset, query_stop   of each column tile
``row_spans (T_r, 4)``  lo, full_lo, full_hi, hi: row tile i visits column tiles lo .. hi - 1, of
    which full_lo .. full_hi - 1 are FULL; None if the tiles of a row are not contiguous
``row_csr``         (ptr (T_r + 1,), col (n,), kind (n,)): the same for any mask, in visit order

For KV-outer loops, `col_spans` and `col_csr` have the same content for each column tile. In a
visited tile of a causal or windowed problem, score (q, k) is kept if and only if ``-left <= k - (q
+ offset) <= right`` and k lies in the tile's sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from flashsim.errors import MaskError, OptionError, TilingError, own_errors
from flashsim.problem import checks
from flashsim.problem.problem import Problem
from flashsim.schedule import tables
from flashsim.schedule.classify import Boxes, classify
from flashsim.schedule.file_mask import Csr, SavedMask
from flashsim.schedule.grid import Grid
from flashsim.schedule.plans import Outer, Stage
from flashsim.schedule.split import WHOLE, Split, cut
from flashsim.schedule.tables import FULL, MASKED
from flashsim.schedule.tiling import Tiling

KeyOrder = Literal["ascending", "descending"]
KEY_ORDERS = ("ascending", "descending")
#: The number of scores at which masks are evaluated in one call; their indices take about 32 MB.
AT_ONCE = 1 << 22
#: The largest number of scores at which a mask is evaluated, which takes about an hour.
MOST_SCORES = 2**40


class Sums(NamedTuple):
    """Integer sums over a schedule's visits (tile pairs), from which closed forms are computed."""

    visits: int
    row_cols: int  # sum over visits of the tile's columns: keys loaded by a Q-outer loop
    col_rows: int  # sum over visits of the tile's rows: queries loaded by a KV-outer loop
    area: int  # sum over visits of rows x columns: scores computed


class PartSums(NamedTuple):
    """Sums over a schedule's row tiles: one for unsplit keys, one for keys split into parts."""

    whole_rows: int  # over tiles whose keys are in one part: rows
    part_rows: int  # over tiles whose keys are in several parts: rows x parts


@dataclass(frozen=True)
class Visit:
    """One visit: the tile of scores of row tile `i` and column tile `j`.

    `rows` and `cols` are slices of the packed sequence, `index` is the visit's number in loop
    order, and `kind` is FULL or MASKED.
    """

    schedule: Schedule
    index: int
    i: int
    j: int
    rows: slice
    cols: slice
    kind: int

    @property
    def keep(self) -> np.ndarray | None:
        """Return booleans (rows, cols), True for kept scores of the tile, or None if all are kept.

        The booleans ignore `mask_mod`, because a mask function may differ between heads.
        """
        if self.kind == FULL:
            return None
        return self.schedule.keep(self.i, self.j, functions=False)


@own_errors
@dataclass(frozen=True)
class Schedule(Grid):
    """The score tiles of a problem under a tiling, and the order of visits. Frozen and hashable.

    Parameters
    ----------
    problem : Problem
    tiling : Tiling
    outer : {"queries", "keys"}
        The tensor of the outer loop: queries in FlashAttention-2, keys in FlashAttention-1.
    key_order : {"ascending", "descending"}
        The order of column tiles in every loop over column tiles.
    dense : bool
        Visit every tile of a sequence, including fully masked tiles (standard attention).
    split : Split
        How keys are split into parts, and whether the query heads of a group share a row tile.
        Only for Q-outer loops.

    Raises
    ------
    OptionError, DTypeError
        If the loop or key order is unknown, or an argument has another type.
    """

    problem: Problem
    tiling: Tiling
    outer: Outer = "queries"
    key_order: KeyOrder = "ascending"
    dense: bool = False
    split: Split = WHOLE

    def __post_init__(self) -> None:
        for name, kind in (("problem", Problem), ("tiling", Tiling)):
            value = getattr(self, name)
            checks.instance(f"Schedule.{name}", value, kind, f"flashsim.{kind.__name__}")
        checks.one_of("outer", self.outer, ("queries", "keys"))
        checks.one_of("key_order", self.key_order, KEY_ORDERS)
        checks.flag("Schedule.dense", self.dense)
        checks.instance("Schedule.split", self.split, Split, "flashsim.schedule.split.Split")
        if self.outer == "keys" and self.split != WHOLE:
            raise OptionError(
                "a KV-outer loop (outer='keys') cannot split keys or pack heads, got "
                f"{self.split}; use outer='queries'"
            )

    # -- tables of visits -----------------------------------------------------------------------

    @cached_property
    def row_csr(self) -> Csr:
        """The visits by row tile: ``(ptr (T_r + 1,), col (n,), kind (n,))``, int32.

        The tiles of row i are ``col[ptr[i]:ptr[i + 1]]``, in `key_order`. The table has no fully
        masked tiles. A tile is FULL if every score is kept and the tile has all `block_k` keys;
        every other tile is MASKED.
        """
        if self.row_spans is not None:
            ptr, col, kind = tables.expand(self.row_spans)
        elif self._boxes is not None:
            ptr, col, kind = self._boxes.csr(self.t_r)
        else:
            ptr, col, kind = self._evaluate()
        if self.key_order == "descending":
            owner = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
            order = ptr[owner] + ptr[owner + 1] - 1 - np.arange(ptr[-1])  # reverses each row
            col, kind = col[order], kind[order]
        return tables.frozen(ptr, col, kind)

    @cached_property
    def col_csr(self) -> Csr:
        """The visits by column tile, in row order: ``(ptr (T_c + 1,), row (n,), kind (n,))``.

        Column tiles are numbered from the first key, whatever `key_order` is.
        """
        if self.col_spans is not None:
            return tables.frozen(*tables.expand(self.col_spans))
        ptr, col, kind = self.row_csr
        row = np.repeat(np.arange(self.t_r, dtype=np.int32), np.diff(ptr))
        order = np.lexsort((row, col))
        counts = np.bincount(col, minlength=self.t_c)
        return tables.frozen(np.concatenate([[0], np.cumsum(counts)]), row[order], kind[order])

    def _evaluate(self) -> Csr:
        """Return `row_csr`, by evaluating the mask at every score, one row of tiles at a time."""
        if isinstance(self.problem.mask, SavedMask):
            return self.problem.mask.row_csr(self.tiling)
        band = Schedule(_band(self.problem), self.tiling, split=self.split).row_spans
        assert band is not None
        scores = int((band[:, 3] - band[:, 0]).sum()) * self.tiling.block_q * self.tiling.block_k
        if scores > MOST_SCORES:
            raise MaskError(
                f"mask= or block_mask= must be evaluated at {scores:.1e} scores, but the limit is "
                f"{MOST_SCORES:.1e}; use fewer queries or keys, or causal=, window= and "
                "cu_seqlens, which need no evaluation per score"
            )
        ptr, cols, kinds = [0], [], []
        for i, (lo, _, _, hi) in enumerate(band.tolist()):
            visited, full = self._row_of_tiles(i, lo, hi)
            cols.append((lo + np.flatnonzero(visited)).astype(np.int32))
            kinds.append(np.where(full[visited], FULL, MASKED).astype(np.int32))
            ptr.append(ptr[-1] + len(cols[-1]))
        return np.array(ptr, np.int32), np.concatenate(cols), np.concatenate(kinds)

    @cached_property
    def _boxes(self) -> Boxes | None:
        """The tiles that loops visit, grouped into boxes; None if the problem has no `mask_mod`."""
        p = self.problem
        if p.mask_mod is None or self.dense or isinstance(p.mask, SavedMask):
            return None
        return classify(self, self._elements)

    def _elements(self, i: np.ndarray, j: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Evaluate all scores of tiles (i, j); return two booleans per tile: any kept, all kept."""
        scores = len(i) * self.tiling.block_q * self.tiling.block_k
        if scores > MOST_SCORES:
            raise MaskError(
                f"the bounds of {self.problem.mask_mod} do not decide whether {len(i):,} tiles "
                f"are masked, so it must be evaluated at their {scores:.1e} scores, but the limit "
                f"is {MOST_SCORES:.1e}; use fewer queries or keys"
            )
        some, every = np.zeros(len(i), bool), np.zeros(len(i), bool)
        for part in self.groups(len(i)):
            kept = self.kept_tiles(i[part], j[part])
            some[part] = kept.any(axis=(1, 2, 3, 4))
            every[part] = kept.all(axis=(1, 2, 3, 4))
        return some, every

    def groups(self, tiles: int) -> Iterator[slice]:
        """Divide the numbers of `tiles` tiles into slices, each short enough for one mask call."""
        mask = self.problem.mask_mod
        per_head = frozenset() if mask is None else mask.per_head
        tile = self.tiling.clip(self.problem, self.split)
        each = tile.block_q * tile.block_k
        each *= self.problem.batch if "b" in per_head else 1
        each *= self.problem.heads if "h" in per_head else 1
        step = max(1, AT_ONCE // each)
        return (slice(n, n + step) for n in range(0, tiles, step))

    def _row_of_tiles(self, i: int, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """Return two booleans per tile lo .. hi - 1 of row i: any score kept, and all scores kept.

        For a tile with fewer than `block_k` keys, the second boolean is always False.
        """
        if hi == lo:
            return np.zeros(0, bool), np.zeros(0, bool)
        edges = self.cols[lo:hi]
        keys = np.arange(edges[0, 0], edges[-1, 1])
        kept = self.problem.keep(self.sequence_of_row(i), self.queries(i), keys)
        begins = edges[:, 0] - edges[0, 0]
        some = np.logical_or.reduceat(kept.any(axis=0), begins)
        every = np.logical_and.reduceat(kept.all(axis=0), begins)
        return some, every & (edges[:, 1] - edges[:, 0] == self.tiling.block_k)

    # -- the loops ------------------------------------------------------------------------------

    def outer_order(self) -> range:
        """Return the numbers of the outer loop's tiles (row or column tiles) in loop order."""
        if self.outer == "queries":
            return range(self.t_r)
        columns = range(self.t_c)
        return columns[::-1] if self.key_order == "descending" else columns

    @cached_property
    def visit_counts(self) -> np.ndarray:
        """Number of column tiles that each row tile visits, int64 (T_r,)."""
        if self.row_spans is not None:
            return (self.row_spans[:, 3] - self.row_spans[:, 0]).astype(np.int64)
        return np.diff(self.row_csr[0]).astype(np.int64)

    @cached_property
    def visited_once(self) -> bool:
        """Whether each row tile has exactly one visit, which covers all keys of its rows."""
        return self.sums.visits == self.t_r and bool((self.visit_counts == 1).all())

    @cached_property
    def part_counts(self) -> np.ndarray:
        """Number of parts into which each row tile's keys are split, at least 1, int64 (T_r,)."""
        return self.split.parts(self.visit_counts, alike=bool(self.problem.shared_prefix))

    @cached_property
    def prefix_tiles(self) -> int:
        """The number of row tiles, at the start of the table, that visit a shared prefix."""
        return int(self._edges[2][1]) if self.problem.shared_prefix else 0

    @cached_property
    def slots(self) -> np.ndarray:
        """The slots in which each row tile stores its parts' partial results, int64 (T_r, 2).

        The parts of row tile i have the slots ``slots[i, 0] .. slots[i, 1] - 1``. Per query, the
        parts of a shared prefix come before the parts of the entry's own keys.
        """
        first = np.zeros(self.t_r, np.int64)
        first[self.prefix_tiles :] = self.part_counts[0] if self.prefix_tiles else 0
        return np.stack([first, first + self.part_counts], axis=1)

    @cached_property
    def merged(self) -> np.ndarray:
        """Booleans (T_r,): True for row tiles whose partial results a second stage merges.

        The value is False for row tiles of a shared prefix, because the row tiles of own keys do
        the merge.
        """
        if self.prefix_tiles:
            return np.arange(self.t_r) >= self.prefix_tiles
        return self.part_counts > 1

    def visits(self, outer: int, part: int | None = None) -> Iterator[Visit]:
        """Yield the visits of the outer step whose row tile (or column tile) has number `outer`.

        `part` selects one part of a row tile's keys: of n visits in P parts, part p has the visits
        ``n p // P`` up to, but not including, ``n (p + 1) // P``.

        Raises
        ------
        OptionError
            If there is no outer step or part with this number.
        """
        by_row = self.outer == "queries"
        ptr, inner, kind = self.row_csr if by_row else self.col_csr
        outer = checks.place("outer", outer, len(ptr) - 1)
        first, last = int(ptr[outer]), int(ptr[outer + 1])
        if part is not None:
            parts = int(self.part_counts[outer])
            first, last = cut(first, last, checks.place("part", part, parts), parts)
        for v in range(first, last):
            i, j = (outer, int(inner[v])) if by_row else (int(inner[v]), outer)
            yield Visit(self, v, i, j, self.row_slice(i), self.col_slice(j), int(kind[v]))

    def __iter__(self) -> Iterator[Visit]:
        for outer in self.outer_order():
            yield from self.visits(outer)

    @cached_property
    def n_visits(self) -> int:
        """The number of visits (tile pairs) per head, or per group of heads if heads are packed."""
        return self.sums.visits

    # -- sums -----------------------------------------------------------------------------------

    @cached_property
    def sums(self) -> Sums:
        """Sums over all visits, in at most O(row tiles) if the tiles of each row are contiguous."""
        bands = self._bands("queries")
        if bands is not None:
            return Sums(*map(sum, zip(*(band.sums() for band in bands), strict=True)))
        heights, widths = self.heights, self.widths
        if self._boxes is not None:
            return Sums(*self._boxes.sums(heights, widths))
        if self.row_spans is not None:
            lo, hi = self.row_spans[:, 0], self.row_spans[:, 3]
            reach = np.concatenate([[0], np.cumsum(widths)])
            count, width = (hi - lo).astype(np.int64), reach[hi] - reach[lo]
        else:
            ptr, col, _ = self.row_csr
            reach = np.concatenate([[0], np.cumsum(widths[col])])
            count, width = np.diff(ptr).astype(np.int64), reach[ptr[1:]] - reach[ptr[:-1]]
        return Sums(
            visits=int(count.sum()),
            row_cols=int(width.sum()),
            col_rows=int((heights * count).sum()),
            area=int((heights * width).sum()),
        )

    @cached_property
    def masked_sums(self) -> Sums:
        """Sums over the visits of MASKED tiles, which read the mask's captured arrays."""
        if self._boxes is not None:
            return Sums(*self._boxes.only(MASKED).sums(self.heights, self.widths))
        ptr, col, kind = self.row_csr
        row = np.repeat(np.arange(self.t_r), np.diff(ptr))[kind == MASKED]
        of_rows, of_cols = self.heights[row], self.widths[col[kind == MASKED]]
        each = of_cols.sum(), of_rows.sum(), (of_rows * of_cols).sum()
        return Sums(len(row), *map(int, each))

    @cached_property
    def page_counts(self) -> np.ndarray:
        """The number of KV-cache pages per column tile, int64 (T_c,); 0 without a paged cache."""
        size = self.problem.page_size
        if size is None:
            return np.zeros(self.t_c, np.int64)
        starts = np.array([s.k_start for s in self.problem.sequences])
        starts = np.repeat(starts, np.diff(self._edges[3]))
        first, stop = self.cols[:, 0] - starts, self.cols[:, 1] - starts
        return -(-stop // size) - first // size

    @cached_property
    def page_reads(self) -> int:
        """The number of KV-cache pages per visited column tile, summed over all visits."""
        return self.over_visits(self.page_counts)

    def over_visits(self, each: np.ndarray) -> int:
        """Return the sum over all visits of ``each[j]``, where j is the visit's column tile."""
        if self.row_spans is not None:
            reach = np.concatenate([[0], np.cumsum(each)])
            return int((reach[self.row_spans[:, 3]] - reach[self.row_spans[:, 0]]).sum())
        return int(each[self.row_csr[1]].sum())

    @cached_property
    def part_sums(self) -> PartSums:
        """The sums of rows, and of rows x parts, over this schedule's row tiles (`PartSums`)."""
        several = (self.part_counts > 1) | (self.prefix_tiles > 0)
        return PartSums(
            whole_rows=int(self.heights[~several].sum()),
            part_rows=int((self.heights * self.part_counts)[several].sum()),
        )

    def extents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays: each outer tile's size, and each largest visited inner tile's size.

        If tables of all tiles would be slow or too large, only the largest outer tiles are
        returned.
        """
        bands = self._bands(self.outer)
        if bands is not None:
            own, largest = np.array([pair for b in bands for pair in b.extents()], np.int64).T
            return own, largest
        by_row = self.outer == "queries"
        own, sizes = (self.heights, self.widths) if by_row else (self.widths, self.heights)
        spans = self.row_spans if by_row else self.col_spans
        if spans is not None:  # only the last tile of a sequence is ragged, so the first is largest
            some = spans[:, 3] > spans[:, 0]
            largest = np.where(some, sizes[np.minimum(spans[:, 0], len(sizes) - 1)], 0)
        else:
            ptr, inner, _ = self.row_csr if by_row else self.col_csr
            some = ptr[1:] > ptr[:-1]
            largest = np.zeros(len(own), np.int64)
            if some.any():
                largest[some] = np.maximum.reduceat(sizes[inner], ptr[:-1][some])
        return own, largest


def check_visits(stages: Iterable[Stage], problem: Problem, tiling: Tiling) -> None:
    """Raise `TilingError` if a stage needs one visit per row tile, but the tiling prevents that."""
    if any(stage.once for stage in stages) and not Schedule(problem, tiling).visited_once:
        longest = max(s.k_stop - s.k_start for s in problem.sequences)
        raise TilingError(
            "this algorithm needs query tiles that each see keys of exactly one key tile, but with "
            f"{tiling} tiles some see none or several; use algorithm='flash2-fused', or, if every "
            f"query sees a key, a block_k of at least {longest}"
        )


def _band(problem: Problem) -> Problem:
    """Return a copy of the problem without masks, except causality and the window."""
    return replace(problem, block_mask=None, mask=None, mask_mod=None)
