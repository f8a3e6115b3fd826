"""Formulas for the tiles that a prefix mask and a block-sparse mask keep.

In every row tile, each of these masks keeps two ranges of key tiles: tiles at the start of the
sequence, and tiles around the diagonal. `schedule.Schedule` finds the same tiles by evaluating the
mask at every score, which is slow. The tile-lab page uses the formulas, translated to JavaScript.
"""

from __future__ import annotations

from typing import NamedTuple


class Prefix(NamedTuple):
    """A prefix-LM mask: every query sees the first `prefix` keys; the rest is causal."""

    rows: int
    members: int
    block: int
    n: int
    inner: int
    offset: int
    prefix: int

    def tile(self, tile: int) -> tuple[int, int, int, int, int, int, int]:
        """Return a row tile's number of rows, and the two ranges of key tiles that it visits.

        The result is (rows, first, start, stop, full_first, full_start, full_stop). The first range
        has `first` key tiles, and the second range is from `start` to `stop`. The full ranges, 0 to
        `full_first` and `full_start` to `full_stop`, have only key tiles without any masked score.
        """
        start = tile * self.block
        stop = min(start + self.block, self.rows)
        first = start // self.members + self.offset
        last = (stop - 1) // self.members + self.offset
        some = min(max(last + 1, self.prefix), self.n)
        every = min(max(first + 1, self.prefix), self.n)
        return stop - start, -(-some // self.inner), 0, 0, every // self.inner, 0, 0


class Cells(NamedTuple):
    """A block-sparse mask of square cells with `cell` scores per side.

    The mask keeps the cells within `reach` of the diagonal, and the first `shared` rows and columns
    of cells. The diagonal is shifted by `shift`, the number of cell columns minus that of cell
    rows, so that the diagonal ends in the lower right corner.
    """

    rows: int
    members: int
    block: int
    n: int
    inner: int
    cell: int
    reach: int
    shared: int
    shift: int

    def tile(self, tile: int) -> tuple[int, int, int, int, int, int, int]:
        """Return a row tile's number of rows and the visited key tiles, like `Prefix.tile`."""
        start = tile * self.block
        stop = min(start + self.block, self.rows)
        top = start // self.members // self.cell
        bottom = (stop - 1) // self.members // self.cell
        whole = -(-self.n // self.inner)
        if bottom < self.shared:  # the rows that see all keys
            return stop - start, whole, 0, 0, self.n // self.inner, 0, 0
        head = min(self.shared * self.cell, self.n)
        # Every row of the tile keeps begin .. end - 1, besides the head.
        upper = max(top, self.shared)
        begin = max(bottom + self.shift - self.reach, 0) * self.cell
        end = min(max(upper + self.shift + self.reach + 1, 0) * self.cell, self.n)
        if end <= begin:
            begin, end = 0, 0
        if begin <= head:
            full = max(head, end) // self.inner, 0, 0
        else:
            lo, hi = max(-(-begin // self.inner), head // self.inner), end // self.inner
            full = head // self.inner, min(lo, hi), hi
        if top < self.shared:
            return stop - start, whole, 0, 0, full[0], full[1], full[2]
        # And some row keeps each of low .. high - 1.
        low = max(top + self.shift - self.reach, 0) * self.cell
        high = min(max(bottom + self.shift + self.reach + 1, 0) * self.cell, self.n)
        first = -(-head // self.inner)
        lo = max(low // self.inner, first)
        hi = max(-(-high // self.inner), lo) if low < high else lo
        return stop - start, first, lo, hi, full[0], full[1], full[2]
