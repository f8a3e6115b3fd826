"""Closed-form sums over contiguous visits: exact integers for any length, computed without a table.

An outer tile visits the inner tiles lo .. hi - 1. Both ends are floors of linear functions of the
outer tile's number, clipped to 0 and the last tile. So every sum here is a sum of floors.
"""

from __future__ import annotations

from typing import NamedTuple


class Strip(NamedTuple):
    """The tiles of one sequence: outer tiles of `block` rows, and inner tiles of `inner` positions.

    The inner axis has `n` positions. The outer axis has `rows` rows, `members` of them for each
    outer position. Outer position p sees the inner positions p + offset - left .. p + offset +
    right, as far as these exist.
    """

    rows: int
    members: int
    block: int
    n: int
    inner: int
    offset: int
    left: int
    right: int

    @property
    def tiles(self) -> int:
        """Number of outer tiles."""
        return -(-self.rows // self.block)

    def visit(self, tile: int) -> tuple[int, int, int]:
        """(rows of the outer tile, first inner tile that it visits, one past the last)."""
        start = tile * self.block
        stop = min(start + self.block, self.rows)
        begin = max(start // self.members + self.offset - self.left, 0)
        end = min((stop - 1) // self.members + self.offset + self.right, self.n - 1)
        seen = (begin // self.inner, end // self.inner + 1) if begin <= end else (0, 0)
        return stop - start, *seen

    def full(self, tile: int) -> tuple[int, int]:
        """(first inner tile of which every score is kept, one past the last); equal if none is.

        A ragged last inner tile lacks positions, so it is never full.
        """
        start = tile * self.block
        first = start // self.members + self.offset
        last = (min(start + self.block, self.rows) - 1) // self.members + self.offset
        begin, end = max(last - self.left, 0), min(first + self.right, self.n - 1)
        lo, hi = -(-begin // self.inner), max(end + 1, 0) // self.inner
        return (lo, hi) if lo < hi else (0, 0)

    def width(self, lo: int, hi: int) -> int:
        """Number of positions in the inner tiles lo .. hi - 1."""
        return min(hi * self.inner, self.n) - lo * self.inner if hi > lo else 0

    def sums(self) -> tuple[int, int, int, int]:
        """Four sums over all visits: the number of visits, and the totals of three sizes.

        The sizes are the inner tile's positions, the outer tile's rows, and rows x positions.
        """
        if not self.tiles:
            return 0, 0, 0, 0
        wide = self.members * self.inner
        # Of all tiles but the last, first .. stop - 1 see anything; from `right` on the last inner
        # tile too, and from `left` on not the first position.
        first = self._reaching(-self.offset - self.right)
        stop = self._beyond(self.n - self.offset + self.left)
        right = self._reaching(
            (-(-self.n // self.inner) - 1) * self.inner - self.offset - self.right
        )
        stop = max(first, stop)
        right = min(max(right, first), stop)
        left = min(max(self._beyond(self.left - self.offset), first), stop)
        shift = self.members * (self.offset + self.right) + self.block - 1
        ends = _floors(first, right, self.block, shift, wide) + right - first
        shift = self.members * (self.offset - self.left)
        begins = _floors(left, stop, self.block, shift, wide)
        visits = ends + (stop - right) * -(-self.n // self.inner) - begins
        positions = (ends - begins) * self.inner + (stop - right) * self.n
        height, lo, hi = self.visit(self.tiles - 1)
        return (
            visits + hi - lo,
            positions + self.width(lo, hi),
            self.block * visits + height * (hi - lo),
            self.block * positions + height * self.width(lo, hi),
        )

    def fulls(self) -> int:
        """Number of visits of which every score is kept, over all outer tiles."""
        if not self.tiles:
            return 0
        lo, hi = self.full(self.tiles - 1)
        total, reach = hi - lo, self.offset + self.right + 1
        if (self.rows - 1) // self.members + self.offset > self.left:  # both ends move
            for tile in range(0, self.tiles - 1):
                lo, hi = self.full(tile)
                total += hi - lo
            return total
        # Of all tiles but the last, first .. stop - 1 have 0 .. hi - 1, and later ones all.
        first, stop = self._beyond(-reach), self._beyond(self.n - reach)
        stop = max(first, stop)
        total += _floors(first, stop, self.block, self.members * reach, self.members * self.inner)
        return total + (self.tiles - 1 - stop) * (self.n // self.inner)

    def extents(self) -> list[tuple[int, int]]:
        """The largest outer tiles: (rows, positions of the largest inner tile visited) of each.

        The largest inner tile that an outer tile visits is its first. That first tile only moves
        forward from one outer tile to the next. So no outer tile has a larger one than the first
        outer tile that sees any position, unless that inner tile is the last and ragged.
        """
        if not self.tiles:
            return []
        numbers = {0, self._reaching(-self.offset - self.right), self.tiles - 1}
        extents = []
        for tile in sorted(numbers):
            height, lo, hi = self.visit(tile)
            extents.append((height, self.width(lo, lo + 1) if hi > lo else 0))
        return extents

    def _reaching(self, position: int) -> int:
        """The first outer tile that has a row of `position` or later; the last tile at most."""
        return self._within(-(-(self.members * position - self.block + 1) // self.block))

    def _beyond(self, position: int) -> int:
        """The first outer tile whose rows are all of `position` or later; the last tile at most."""
        return self._within(-(-(self.members * position) // self.block))

    def _within(self, tile: int) -> int:
        return min(max(tile, 0), self.tiles - 1)


def _floors(first: int, stop: int, step: int, shift: int, over: int) -> int:
    """Sum of floor((step i + shift) / over) for i = first .. stop - 1, in O(log) divisions.

    The integer parts form arithmetic series. The remainder counts lattice points under a line. That
    count stays the same when the axes are swapped, which gives Euclid's algorithm on step and over.
    """
    count, shift, total = stop - first, shift + step * first, 0
    while count > 0:
        total += count * (count - 1) // 2 * (step // over) + count * (shift // over)
        step, shift = step % over, shift % over
        count, shift = divmod(step * count + shift, over)
        step, over = over, step
    return total
