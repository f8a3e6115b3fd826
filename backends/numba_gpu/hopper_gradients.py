"""What only the Hopper backward does with fragments: statistics in, dS and dQ out; intrinsics."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types

from flashsim.backends.numba_gpu import ptx, ptx_hopper
from flashsim.backends.numba_gpu.emit import I1, I32, I64, Values, emitted, f32, floats, i32
from flashsim.backends.numba_gpu.emit import words as words_of
from flashsim.backends.numba_gpu.softmax import LOG2E, NEG_INF
from flashsim.backends.numba_gpu.tiles import lane_of

int32, int64 = types.int32, types.int64


def load_statistics(block_q: int) -> Any:
    """``load_statistics(lse, delta, rows) -> minus, deltas``: a warp's share of a tile's rows.

    `lse` and `delta` are the addresses of the tile's first row in HBM, of whose rows `rows` exist.
    `minus` is -L log2 e; a row that does not exist, or sees no key, gets -inf, so that its P is 0.
    """
    steps = block_q // 32

    @emitted([floats(steps), floats(steps)], int64, int64, int32)
    def load_statistics_(
        b: ir.IRBuilder, lse: ir.Value, delta: ir.Value, rows: ir.Value
    ) -> list[Values]:
        minus, deltas = [], []
        for step in range(steps):
            row = b.add(lane_of(b), i32(32 * step))
            exists = b.icmp_signed("<", row, rows)
            far = b.sext(b.shl(row, i32(2)), I64)
            found = ptx_hopper.load_float_if(b, b.add(lse, far), exists, NEG_INF)
            none = b.fcmp_ordered("==", found, f32(NEG_INF))
            minus.append(b.select(none, found, b.fmul(found, f32(-LOG2E))))
            deltas.append(ptx_hopper.load_float_if(b, b.add(delta, far), exists, 0.0))
        return [minus, deltas]

    return load_statistics_


def put_statistics(block_q: int) -> Any:
    """``put_statistics(to, values)``: one statistic of the tile's rows to shared memory."""
    steps = block_q // 32

    @emitted(None, int32, floats(steps))
    def put_statistics_(b: ir.IRBuilder, to: ir.Value, values: Values) -> None:
        for step, value in enumerate(values):
            at = b.add(to, b.shl(b.add(lane_of(b), i32(32 * step)), i32(2)))
            ptx.store_shared(b, at, b.bitcast(value, I32))

    return put_statistics_


def store_left(rows: int, n: int) -> Any:
    """``store_left(to, row, words)``: 64 rows of a rounded operand to a tile, its `row`-th first.

    The tile is `rows` x n, in swizzled chunks as the copy engine writes them (`ptx_hopper`).
    """

    @emitted(None, int32, int32, words_of(n // 4))
    def store_left_(b: ir.IRBuilder, to: ir.Value, row: ir.Value, words: Values) -> None:
        lane = lane_of(b)
        mine = b.add(b.add(row, _warp_row(b)), b.and_(lane, i32(15)))
        # Piece (2 x + lane / 16) XOR row % 8 of the row; rows are counted from a multiple of 8.
        piece = b.xor(b.lshr(lane, i32(4)), b.and_(lane, i32(7)))
        base = b.add(to, b.add(b.shl(mine, i32(7)), b.shl(piece, i32(4))))
        for x in range(n // 16):
            at = b.add(b.xor(base, i32(x % 4 * 32)), i32(x // 4 * rows * 128))
            ptx_hopper.store_matrices(b, at, words[4 * x : 4 * x + 4])

    return store_left_


def stage_sums(n: int) -> Any:
    """``stage_sums(to, c)``: a warpgroup's 64 x n float32 to shared memory, swizzled, 32 columns
    to a chunk.

    Odd rows take the 8-column group two further on, so that a half-warp's four rows fall into
    different banks.
    """

    @emitted(None, int32, floats(n // 2))
    def stage_sums_(b: ir.IRBuilder, to: ir.Value, c: Values) -> None:
        lane = lane_of(b)
        row = b.lshr(lane, i32(2))
        odd = b.trunc(row, I1)
        # Piece ((e / 4 % 4 XOR 2 odd) 2 + lane % 4 / 2) XOR row % 8 of the row.
        piece = b.xor(b.and_(b.lshr(lane, i32(1)), i32(1)), row)
        piece = b.xor(piece, b.select(odd, i32(4), i32(0)))
        base = b.add(to, b.shl(b.add(row, _warp_row(b)), i32(7)))
        base = b.add(base, b.shl(piece, i32(4)))
        near = b.shl(b.and_(lane, i32(1)), i32(3))
        for e in range(0, n // 2, 2):
            pair = [b.select(odd, c[(e ^ 8) + x], c[e + x]) for x in range(2)]
            at = b.add(b.xor(base, i32(e // 4 % 4 * 32)), near)
            ptx_hopper.store_pair(b, b.add(at, i32(e // 16 * 8192 + e // 2 % 2 * 1024)), pair)

    return stage_sums_


def reduce_chunks(n: int) -> Any:
    """``reduce_chunks(map, source, column, row, head, batch)``: add what `stage_sums` wrote."""

    @emitted(None, int64, int32, int32, int32, int32, int32)
    def reduce_chunks_(
        b: ir.IRBuilder, tensor_map: ir.Value, source: ir.Value, column: ir.Value, *place: ir.Value
    ) -> None:
        for chunk in range(n // 32):
            at, here = b.add(source, i32(chunk * 8192)), b.add(column, i32(chunk * 32))
            ptx_hopper.reduce_box(b, tensor_map, at, [here, *place])
        ptx_hopper.reduce_commit(b)

    return reduce_chunks_


@emitted(None)
def reduce_wait(b: ir.IRBuilder) -> None:
    """This thread's sources may be overwritten."""
    ptx_hopper.reduce_wait_read(b)


@emitted(None)
def fence_async(b: ir.IRBuilder) -> None:
    """What this thread wrote to shared memory is seen by products and copies."""
    ptx_hopper.fence_async_shared(b)


def _warp_row(b: ir.IRBuilder) -> ir.Value:
    """First of the warp's 16 rows of its warpgroup's 64."""
    return b.and_(b.lshr(ptx.special(b, "tid.x"), i32(1)), i32(48))
