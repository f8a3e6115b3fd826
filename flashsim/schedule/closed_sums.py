"""Closed-form sums over visits (tile pairs), exact for any length and without a table.

The formulas require that each outer tile visits contiguous inner tiles lo .. hi - 1. The numbers lo
and hi are floors of linear functions of the outer tile's number, clipped to the existing tiles. So
every sum in this module is a sum of floors.
"""

from typing import NamedTuple


class Strip(NamedTuple):
    """The tiles of one sequence: outer tiles of `block` rows, inner tiles of `inner` positions.

    A position is a query or a key. The inner axis of the score matrix has `n` positions. The outer
    axis has `rows` rows: `members` rows for each outer position. The outer position p sees the
    inner positions p + offset - left .. p + offset + right, as far as they exist.
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
        """Return an outer tile's number of rows, and the range (lo, hi) of its inner tiles."""
        start = tile * self.block
        stop = min(start + self.block, self.rows)
        begin = max(start // self.members + self.offset - self.left, 0)
        end = min((stop - 1) // self.members + self.offset + self.right, self.n - 1)
        seen = (begin // self.inner, end // self.inner + 1) if begin <= end else (0, 0)
        return stop - start, *seen

    def full(self, tile: int) -> tuple[int, int]:
        """Return the range (lo, hi) of an outer tile's FULL inner tiles, (0, 0) if it has none."""
        start = tile * self.block
        first = start // self.members + self.offset
        last = (min(start + self.block, self.rows) - 1) // self.members + self.offset
        begin, end = max(last - self.left, 0), min(first + self.right, self.n - 1)
        lo, hi = -(-begin // self.inner), max(end + 1, 0) // self.inner
        return (lo, hi) if lo < hi else (0, 0)

    def width(self, lo: int, hi: int) -> int:
        """Return the number of positions in the inner tiles lo .. hi - 1."""
        return min(hi * self.inner, self.n) - lo * self.inner if hi > lo else 0

    def sums(self) -> tuple[int, int, int, int]:
        """Return four sums over visits (tile pairs): the count, positions, rows and scores."""
        if not self.tiles:
            return 0, 0, 0, 0
        wide = self.members * self.inner
        # Of all outer tiles except the last, tiles first .. stop - 1 see at least one position.
        # From tile `right` on, they visit the last inner tile too. From tile `left` on, they no
        # longer see the first position.
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
        """Return the number of FULL visits (all scores are kept) over all outer tiles."""
        if not self.tiles:
            return 0
        lo, hi = self.full(self.tiles - 1)
        total, reach = hi - lo, self.offset + self.right + 1
        if (self.rows - 1) // self.members + self.offset > self.left:  # lo and hi both change
            for tile in range(0, self.tiles - 1):
                lo, hi = self.full(tile)
                total += hi - lo
            return total
        # Of all outer tiles except the last, tiles first .. stop - 1 have the FULL inner tiles
        # 0 .. hi - 1, and in later ones every whole inner tile is FULL.
        first, stop = self._beyond(-reach), self._beyond(self.n - reach)
        stop = max(first, stop)
        total += _floors(first, stop, self.block, self.members * reach, self.members * self.inner)
        return total + (self.tiles - 1 - stop) * (self.n // self.inner)

    def extents(self) -> list[tuple[int, int]]:
        """Return, for the largest outer tiles, the rows and the largest inner tile's positions.

        Only the last inner tile of a sequence is smaller than the others. A later outer tile never
        starts at an earlier inner tile. So the first outer tile that sees any position visits the
        largest inner tile.
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
        """Return the first outer tile with any row at `position` or later, else the last tile."""
        return self._within(-(-(self.members * position - self.block + 1) // self.block))

    def _beyond(self, position: int) -> int:
        """Return the first outer tile with all rows at `position` or later, else the last tile."""
        return self._within(-(-(self.members * position) // self.block))

    def _within(self, tile: int) -> int:
        return min(max(tile, 0), self.tiles - 1)


def _floors(first: int, stop: int, step: int, shift: int, over: int) -> int:
    """Return the sum of floor((step i + shift) / over) for i = first .. stop - 1.

    The algorithm takes O(log over) divisions. The integer parts of step / over and shift / over add
    an arithmetic series to the sum. The remaining sum counts lattice points under a line.
    Repeatedly swapping the axes, which keeps the count, is Euclid's algorithm on `step` and `over`.
    """
    count, shift, total = stop - first, shift + step * first, 0
    while count > 0:
        total += count * (count - 1) // 2 * (step // over) + count * (shift // over)
        step, shift = step % over, shift % over
        count, shift = divmod(step * count + shift, over)
        step, over = over, step
    return total
