"""Numba intrinsics that store accumulators through shared memory, or add them to HBM."""

from llvmlite import ir
from numba.cuda import types

from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import F32, FRAGMENT, I1, I32, I64, Values, emitted, i32
from flashsim.backends.numba_gpu.mma_tiles import lane_of


@emitted(None, types.int32, types.int32, types.int32, FRAGMENT)
def stage(b, address, row, col, c, *, bf16, blocks, tile):
    """Round accumulators, and store them in a tile."""
    lane, pieces = lane_of(b), len(c) // (4 * blocks)
    first = b.add(row, b.lshr(lane, i32(2)))
    base = b.add(address, b.shl(b.and_(lane, i32(3)), i32(2)))
    chunk = b.lshr(col, i32(3))
    for i in range(blocks):
        for half in range(2):
            r = b.add(first, i32(i * 16 + half * 8))
            for piece in range(pieces):
                at = (i * pieces + piece) * 4 + half * 2
                to = b.add(base, tile.offset(b, r, b.add(chunk, i32(piece))))
                ptx.store_shared(b, to, ptx.pack(b, bf16, c[at], c[at + 1]))


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


@emitted(types.int32, types.int64, FRAGMENT, *[types.int32] * 3)
def reduce_tile(b, address, c, row, col, rows, *, blocks, row_of, wide):
    """Add a fragment to float32 numbers in HBM, atomically, and return the number of bytes.

    Columns past the row width `row_of` are not added. With `wide`, one instruction adds four
    neighbours (sm_90), and two lanes exchange values: the even lane adds four values of the left
    8-column piece, and the odd lane adds the right piece's.
    """
    n = 2 * len(c) // blocks
    fits_down = b.icmp_signed("<=", b.add(row, i32(16 * blocks)), rows)
    whole = b.and_(fits_down, b.icmp_signed("<=", b.add(col, i32(n)), i32(row_of.width)))

    def add_all(rows: ir.Value | None) -> ir.Value:
        """Add the rows before `rows` or, where it is None, all rows and columns."""
        lane, added = lane_of(b), i32(0)
        odd, pair = b.trunc(lane, I1), b.and_(lane, i32(3))
        for i in range(blocks):
            for half in range(2):
                r = b.add(row, b.add(b.lshr(lane, i32(2)), i32(i * 16 + half * 8)))
                line = b.add(address, b.sext(b.mul(r, i32(row_of.width * 4)), I64))
                for piece in range(0, n // 8, 2):
                    at = (i * (n // 8) + piece) * 4 + half * 2
                    four = [c[at], c[at + 1], c[at + 4], c[at + 5]]
                    first = b.add(col, i32(piece * 8))
                    for column, values in additions(first, four, odd, pair):
                        size = row_of.counted(b, column, len(values), 4)
                        to = b.add(line, b.sext(b.shl(column, i32(2)), I64))
                        if rows is None:
                            ptx.add_float(b, to, values)
                        else:
                            inside = b.icmp_signed("<", r, rows)
                            fits = b.icmp_signed("<", column, i32(row_of.width))
                            inside = b.and_(inside, fits)
                            with b.if_then(inside):
                                ptx.add_float(b, to, values)
                            size = b.select(inside, size, i32(0))
                        added = b.add(added, size)
        return added

    def additions(
        first: ir.Value, four: Values, odd: ir.Value, pair: ir.Value
    ) -> list[tuple[ir.Value, Values]]:
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

    with b.if_else(whole) as (then, otherwise):
        with then:  # nearly every tile needs no comparison
            all_added = add_all(None)
            after_whole = b.block
        with otherwise:
            some_added = add_all(rows)
            after_part = b.block
    added = b.phi(I32)
    added.add_incoming(all_added, after_whole)
    added.add_incoming(some_added, after_part)
    return added
