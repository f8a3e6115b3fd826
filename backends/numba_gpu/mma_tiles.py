"""Numba intrinsics for tiles in shared memory, fragments in registers, and matrix products.

A warp computes `blocks` blocks of 16 rows each. If a tile has n columns, an accumulator fragment is
a tuple of ``blocks * n / 8 * 4`` float32 numbers. In a lane, element ``(i * n / 8 + c) * 4 + x``
belongs to block i, 8-column piece c, row ``x // 2 * 8 + lane / 4`` and column ``c * 8 + lane % 4 *
2 + x % 2`` (`ptx.mma`). So a *quad* of four lanes holds elements of the same rows. In each block, a
lane has elements of two rows, called *halves*.

A score tile's accumulators already have the layout of the next product's left operand, and only
need rounding to 16 bits. P and dS therefore stay in registers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.cuda import types

from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import (
    FRAGMENT,
    Like,
    Values,
    emitted,
    f32,
    floats,
    i32,
    words,
)


@dataclass(frozen=True)
class Tile:
    """A rows x cols tile of 16-bit elements in shared memory, without padding.

    A row is divided into 16-byte chunks. Chunk c of row r is stored at position c XOR f(r), where f
    spreads 8 consecutive rows over all 32 banks. So `ldmatrix`, which reads one chunk from each of
    8 rows at once, has no bank conflicts.
    """

    rows: int
    cols: int

    @property
    def nbytes(self) -> int:
        """The number of bytes that the tile takes in shared memory."""
        return self.rows * self.cols * 2

    @property
    def chunks(self) -> int:
        """The number of 16-byte chunks per row."""
        return self.cols // 8

    @property
    def spread(self) -> int:
        """The number of neighbouring chunks among which the swizzle permutes."""
        return next(s for s in (8, 4, 2) if self.chunks % s == 0)

    @property
    def shift(self) -> int:
        """Log2 of the number of consecutive rows with the same swizzle."""
        return {8: 0, 4: 1, 2: 2}[self.spread]

    def offset(self, b: ir.IRBuilder, row: ir.Value, chunk: ir.Value) -> ir.Value:
        """Emit the byte offset, from the tile's start, of chunk `chunk` of row `row`."""
        swizzle = b.and_(b.lshr(row, i32(self.shift)), i32(self.spread - 1))
        return b.add(b.mul(row, i32(self.cols * 2)), b.shl(b.xor(chunk, swizzle), i32(4)))

    def at(
        self, b: ir.IRBuilder, base: ir.Value, row: int, col: int, extra: Any = None
    ) -> ir.Value:
        """Emit the address of the 16 x 16 piece at (row, col), given that of the piece at (0, 0).

        If `extra` is passed, the piece begins at column col + extra. `row` must be a multiple of 8,
        and `col` a multiple of 16. The swizzle of row r depends on r % 8 alone, so one XOR and one
        addition suffice.
        """
        if extra is None:
            low = col // 8 & (self.spread - 1)
            at = b.xor(base, i32(low << 4)) if low else base
            return b.add(at, i32(row * self.cols * 2 + (col // 8 - low << 4)))
        chunk = b.add(b.lshr(extra, i32(3)), i32(col // 8))
        part = b.and_(chunk, i32(self.spread - 1))
        at = b.xor(base, b.shl(part, i32(4)))
        return b.add(b.add(at, b.shl(b.sub(chunk, part), i32(4))), i32(row * self.cols * 2))


@dataclass(frozen=True)
class RowWidth:
    """The width of a row in HBM: `width` elements, of which the first `exist` are data.

    `width` elements fill a whole number of 16-byte pieces. Kernels move whole pieces, but count
    only the bytes of existing elements.
    """

    width: int
    exist: int

    @property
    def padded(self) -> bool:
        """Whether only a part of the last piece is data."""
        return self.exist < self.width

    def counted(self, b: ir.IRBuilder, column: ir.Value, n: int, itemsize: int) -> ir.Value:
        """Emit how many bytes of `n` elements, from a column on, are data and not padding."""
        if not self.padded:
            return i32(n * itemsize)
        left = b.sub(i32(self.exist), column)
        least = b.select(b.icmp_signed("<", left, i32(n)), left, i32(n))
        there = b.select(b.icmp_signed(">", least, i32(0)), least, i32(0))
        return b.mul(there, i32(itemsize))

    def piece_bytes(self, b: ir.IRBuilder, piece: ir.Value) -> ir.Value:
        """Emit how many bytes of a 16-byte piece of 16-bit elements are data."""
        return self.counted(b, b.shl(piece, i32(3)), 8, 2)


def lane_of(b: ir.IRBuilder) -> ir.Value:
    """Emit the thread's index in its warp (lane)."""
    return b.and_(ptx.special(b, "tid.x"), i32(31))


def elements(blocks: int, n: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each element of an accumulator fragment as (index, block, 8-column piece, x)."""
    for i in range(blocks):
        for c in range(n // 8):
            for x in range(4):
                yield (i * (n // 8) + c) * 4 + x, i, c, x


def elements_of(fragment: Values, rows: Sequence[object]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the `elements` of a fragment, where `rows` has one number per row of a lane."""
    blocks = len(rows) // 2
    return elements(blocks, 2 * len(fragment) // blocks)


@emitted(lambda c: floats(c.count))
def full(b, *, count, value=0.0):
    """Return a fragment of `count` elements, which are all `value`."""
    return [f32(value)] * count


#: ``zeros(count)()`` returns a fragment of `count` zeros.
zeros = full


@emitted(Like(0), FRAGMENT, types.float32)
def scale_all(b, c, factor):
    """Return `c` with every element multiplied by the factor."""
    return [b.fmul(x, factor) for x in c]


# -- products -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """An operand of a matrix product, stored in shared memory.

    If `swapped` is true, the tile is stored transposed. Tiles A [k][m] and B [n][k] (such as K in Q
    K^T) count as swapped. If `extra` is true, the operand begins at a column that is known only at
    run time.
    """

    tile: Tile
    swapped: bool = False
    extra: bool = False

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The Numba types of the lane's first address and, with `extra`, the first column."""
        return (types.int32, types.int32) if self.extra else (types.int32,)


@emitted(types.int32, types.int32)
def pieces(b, address, *, tile, transposed):
    """Return the address of a lane's row in a tile's first 16 x 16 piece, to pass to `ldmatrix`.

    With `transposed`, `ldmatrix` loads the fragments of a swapped tile (`Operand`). Without
    `transposed`, `ldmatrix` loads an A fragment, or two B fragments, of a tile that is not swapped.
    """
    lane = lane_of(b)
    if transposed:
        row = b.add(b.and_(lane, i32(7)), b.shl(b.lshr(lane, i32(4)), i32(3)))
        chunk = b.and_(b.lshr(lane, i32(3)), i32(1))
    else:
        row, chunk = b.and_(lane, i32(15)), b.lshr(lane, i32(4))
    return b.add(address, tile.offset(b, row, chunk))


@emitted(lambda c: words(c.blocks * c.depth // 4), types.int32)
def load_fragments(b, base, *, blocks, depth, tile):
    """Load all of A into registers; `base` is the result of `pieces`."""
    return [
        word
        for kk in range(depth // 16)
        for i in range(blocks)
        for word in ptx.ldmatrix(b, tile.at(b, base, i * 16, kk * 16), transposed=False)
    ]


@emitted(Like(0), FRAGMENT, lambda c: [*_parameters(c.a), *c.right.parameters])
def multiply(b, c, *operands, bf16, blocks, depth, a, right):
    """Return c + A B, for 16 `blocks` rows; `operands` are those of A, then of B.

    A (16 `blocks`, depth) is an `Operand` in shared memory, or the fragment that `load_fragments`
    returns ("registers"). A may also be the accumulators of an earlier product ("accumulators"),
    which are rounded to 16 bits. `right` is the matrix B (depth, n).
    """

    def left_rows(i: int, kk: int):
        if isinstance(a, Operand):
            at_tile = (kk * 16, i * 16) if a.swapped else (i * 16, kk * 16)
            return ptx.ldmatrix(b, a.tile.at(b, left[0], *at_tile, *left[1:]), transposed=a.swapped)
        if a == "registers":
            at = (kk * blocks + i) * 4
            return left[0][at : at + 4]
        at = (i * (depth // 8) + 2 * kk) * 4
        eight = left[0][at : at + 8]
        return [ptx.pack(b, bf16, eight[x], eight[x + 1]) for x in (0, 2, 4, 6)]

    c, n, count = list(c), 2 * len(c) // blocks, len(_parameters(a))
    left, base = operands[:count], operands[count:]
    for kk in range(depth // 16):
        rows = [left_rows(i, kk) for i in range(blocks)]
        for piece in range(n // 16):
            at_tile = (piece * 16, kk * 16) if right.swapped else (kk * 16, piece * 16)
            address = right.tile.at(b, base[0], *at_tile, *base[1:])
            w = ptx.ldmatrix(b, address, transposed=not right.swapped)
            for i, row in enumerate(rows):
                for half in range(2):
                    at = (i * (n // 8) + 2 * piece + half) * 4
                    pair = w[2 * half], w[2 * half + 1]
                    c[at : at + 4] = ptx.mma(b, bf16, c[at : at + 4], row, *pair)
    return c


def _parameters(a: Operand | str) -> tuple[Any, ...]:
    return a.parameters if isinstance(a, Operand) else (FRAGMENT,)
