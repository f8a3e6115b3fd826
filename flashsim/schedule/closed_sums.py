"""Sums over a contiguous walk in closed form: in exact integers, however long, without a table.

A tile of the outer axis visits the tiles lo .. hi - 1 of the inner one, and both ends are floors of
linear functions of its number, cut off at 0 and at the last tile. So every sum is one of floors.
"""

from __future__ import annotations

from typing import NamedTuple


class Strip(NamedTuple):
    """One sequence: outer tiles of `block` rows each, inner tiles of `inner` of `n` positions.

    There are `rows` rows, `members` for each outer position; position p sees p + offset - left ..
    p + offset + right, as far as they exist.
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
        """Outer tiles."""
        return -(-self.rows // self.block)

    def visit(self, tile: int) -> tuple[int, int, int]:
        """Rows of an outer tile, the first inner tile that it visits, and one past the last."""
        start = tile * self.block
        stop = min(start + self.block, self.rows)
        begin = max(start // self.members + self.offset - self.left, 0)
        end = min((stop - 1) // self.members + self.offset + self.right, self.n - 1)
        seen = (begin // self.inner, end // self.inner + 1) if begin <= end else (0, 0)
        return stop - start, *seen

    def width(self, lo: int, hi: int) -> int:
        """Positions of the inner tiles lo .. hi - 1."""
        return min(hi * self.inner, self.n) - lo * self.inner if hi > lo else 0

    def sums(self) -> tuple[int, int, int, int]:
        """Visits; over them, positions of inner tiles, rows of outer tiles, rows x positions."""
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

    def extents(self) -> list[tuple[int, int]]:
        """Rows of an outer tile and the largest inner tile it visits, of tiles that have the most.

        The largest inner tile of a visit is its first, and that only moves on along the walk: no
        outer tile has more than the first that sees anything, if that is not the last and ragged.
        """
        if not self.tiles:
            return []
        numbers = {0, self._reaching(-self.offset - self.right), self.tiles - 1}
        found = []
        for tile in sorted(numbers):
            height, lo, hi = self.visit(tile)
            found.append((height, self.width(lo, lo + 1) if hi > lo else 0))
        return found

    def _reaching(self, position: int) -> int:
        """The first tile, the last left out, with a row of `position` or one past it."""
        return self._within(-(-(self.members * position - self.block + 1) // self.block))

    def _beyond(self, position: int) -> int:
        """The first tile, the last left out, all of whose rows are of `position` or past it."""
        return self._within(-(-(self.members * position) // self.block))

    def _within(self, tile: int) -> int:
        return min(max(tile, 0), self.tiles - 1)


def _floors(first: int, stop: int, step: int, shift: int, over: int) -> int:
    """Sum of floor((step i + shift) / over) for i = first .. stop - 1, in O(log) divisions.

    Whole parts are sums of arithmetic series; what is left counts lattice points under a line,
    which are as many with the axes swapped: Euclid's algorithm on step and over.
    """
    count, shift, total = stop - first, shift + step * first, 0
    while count > 0:
        total += count * (count - 1) // 2 * (step // over) + count * (shift // over)
        step, shift = step % over, shift % over
        count, shift = divmod(step * count + shift, over)
        step, over = over, step
    return total
