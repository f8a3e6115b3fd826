"""Numba intrinsics that store accumulators through shared memory, or add them to HBM."""

from typing import Any

from llvmlite import ir
from numba.cuda import types

from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import F32, FRAGMENT, I1, I32, I64, emitted, floats, i32
from flashsim.backends.numba_gpu.mma_tiles import RowWidth, Tile, lane_of


def stage(bf16: bool, blocks: int, n: int, tile: Tile) -> Any:
    """Return ``stage(address, row, col, c)``, which rounds and stores accumulators in a tile."""

    @emitted(None, types.int32, types.int32, types.int32, floats(blocks * n // 2))
    def stage_(b, address, row, col, c):
        lane = lane_of(b)
        first = b.add(row, b.lshr(lane, i32(2)))
        base = b.add(address, b.shl(b.and_(lane, i32(3)), i32(2)))
        chunk = b.lshr(col, i32(3))
        for i in range(blocks):
            for half in range(2):
                r = b.add(first, i32(i * 16 + half * 8))
                for piece in range(n // 8):
                    at = (i * (n // 8) + piece) * 4 + half * 2
                    to = b.add(base, tile.offset(b, r, b.add(chunk, i32(piece))))
                    ptx.store_shared(b, to, ptx.pack(b, bf16, c[at], c[at + 1]))

    return stage_


@emitted(types.int32, types.int64, FRAGMENT, types.int32, types.int32)
def store_rows(b, address, values, first, stop):
    """Store one float32 per row in HBM, and return the number of bytes.

    Each quad's first lane stores the values of rows before `stop`. `first` is the warp's first row,
    and `address` is row 0's address.
    """
    lane, stored = lane_of(b), i32(0)
    leads = b.icmp_unsigned("==", b.and_(lane, i32(3)), i32(0))
    for at, value in enumerate(values):
        row = b.add(first, b.add(b.lshr(lane, i32(2)), i32(at * 8)))
        inside = b.and_(leads, b.icmp_signed("<", row, stop))
        with b.if_then(inside):
            to = b.add(address, b.sext(b.mul(row, i32(4)), I64))
            ptr = b.inttoptr(to, ir.PointerType(F32, 1))
            b.store(value, ptr)
        stored = b.add(stored, b.select(inside, i32(4), i32(0)))
    return stored


def reduce_tile(blocks: int, n: int, row_of: RowWidth, wide: bool) -> Any:
    """Return ``reduce_tile(address, c, row, col, rows) -> bytes``, which adds a fragment to HBM.

    The additions to float32 numbers in HBM are atomic. Columns past the row width `row_of` are not
    added. With `wide`, one instruction adds four neighbours (sm_90). With `wide`, two lanes
    exchange values: the even lane adds four values of the left 8-column piece, and the odd lane
    adds the right piece's.
    """

    width = row_of.width

    @emitted(types.int32, types.int64, floats(blocks * n // 2), *[types.int32] * 3)
    def reduce_tile_(b, address, c, row, col, rows):
        fits_down = b.icmp_signed("<=", b.add(row, i32(16 * blocks)), rows)
        whole = b.and_(fits_down, b.icmp_signed("<=", b.add(col, i32(n)), i32(width)))
        with b.if_else(whole) as (then, otherwise):
            with then:  # nearly every tile needs no comparison
                all_added = add_all(b, address, c, row, col, None)
                after_whole = b.block
            with otherwise:
                some_added = add_all(b, address, c, row, col, rows)
                after_part = b.block
        added = b.phi(I32)
        added.add_incoming(all_added, after_whole)
        added.add_incoming(some_added, after_part)
        return added

    def add_all(b, address, c, row, col, rows):
        lane, added = lane_of(b), i32(0)
        odd, pair = b.trunc(lane, I1), b.and_(lane, i32(3))
        for i in range(blocks):
            for half in range(2):
                r = b.add(row, b.add(b.lshr(lane, i32(2)), i32(i * 16 + half * 8)))
                line = b.add(address, b.sext(b.mul(r, i32(width * 4)), I64))
                for piece in range(0, n // 8, 2):
                    at = (i * (n // 8) + piece) * 4 + half * 2
                    four = [c[at], c[at + 1], c[at + 4], c[at + 5]]
                    first = b.add(col, i32(piece * 8))
                    for column, values in additions(b, first, four, odd, pair):
                        size = row_of.counted(b, column, len(values), 4)
                        to = b.add(line, b.sext(b.shl(column, i32(2)), I64))
                        if rows is None:
                            ptx.add_float(b, to, values)
                        else:
                            inside = b.icmp_signed("<", r, rows)
                            inside = b.and_(inside, b.icmp_signed("<", column, i32(width)))
                            with b.if_then(inside):
                                ptx.add_float(b, to, values)
                            size = b.select(inside, size, i32(0))
                        added = b.add(added, size)
        return added

    def additions(b, first, four, odd, pair):
        """Return the columns and the four values of a row that this lane adds."""
        if not wide:
            own = b.add(first, b.shl(pair, i32(1)))
            return [(b.add(own, i32(e // 2 * 8 + e % 2)), [x]) for e, x in enumerate(four)]
        left, right = four[:2], four[2:]
        got = [ptx.shuffle_xor(b, b.select(odd, x, z), 1) for x, z in zip(left, right, strict=True)]
        lower = [b.select(odd, g, x) for g, x in zip(got, left, strict=True)]
        upper = [b.select(odd, z, g) for z, g in zip(right, got, strict=True)]
        own = b.add(b.shl(b.lshr(pair, i32(1)), i32(2)), b.select(odd, i32(8), i32(0)))
        return [(b.add(first, own), lower + upper)]

    return reduce_tile_
