"""Numba intrinsics for Hopper: ring buffers of tiles, warpgroup products and output rows.

A ring buffer has two or three pipeline stages (`Ring`). The functions of a two-stage ring buffer
are also attributes of this module. Accumulator fragments have the layout of `mma_tiles`, with one
block of 16 rows per warp. `ptx.wgmma` says which of a warpgroup's 64 rows belong to which warp.
"""

from functools import partial
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from flashsim.backends.launch.kernel import ROUND
from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import (
    FRAGMENT,
    I1,
    I32,
    I64,
    Like,
    Values,
    emitted,
    floats,
    i32,
    words,
)
from flashsim.backends.numba_gpu.hopper import ptx as ptx_hopper
from flashsim.backends.numba_gpu.mma_tiles import RowWidth, lane_of

int32, int64 = types.int32, types.int64
_BARRIER = 8  # bytes


# -- thread indices -------------------------------------------------------------------------------


@emitted(int32)
def warpgroup(b):
    """Return the number of this thread's warpgroup in the block, uniform over a warp."""
    mine = b.lshr(ptx.special(b, "tid.x"), i32(7))
    text = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
    return ptx.asm(b, text, "=r,r", [mine], I32, effects=True, together=True)


@emitted(int32)
def warp(b):
    """Return the number of this thread's warp in the block, uniform over a warp."""
    mine = b.lshr(ptx.special(b, "tid.x"), i32(5))
    text = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
    return ptx.asm(b, text, "=r,r", [mine], I32, effects=True, together=True)


@emitted(types.boolean)
def speaks(b):
    """Return whether this thread arrives at barriers on behalf of its warp."""
    return b.icmp_unsigned("==", lane_of(b), i32(0))


def registers(count: int, *, more: bool) -> Any:
    """Return ``registers()``, which gives each thread of the warpgroup `count` registers."""
    return emitted(None)(partial(ptx_hopper.registers, count=count, more=more))


# -- barriers -------------------------------------------------------------------------------------


def barriers_begin(counts: dict[int, int]) -> Any:
    """Return ``barriers_begin(base)``, in which one thread initializes the barriers.

    `counts` maps a barrier's offset from `base` to the number of arrivals per phase.
    """

    @emitted(None, int32)
    def barriers_begin_(b, base):
        for at, arrivals in counts.items():
            ptx_hopper.barrier_init(b, b.add(base, i32(at)), arrivals)
        ptx_hopper.barrier_init_fence(b)

    return barriers_begin_


#: ``wait(barrier, parity)`` and ``arrive(barrier, condition)`` are the PTX instructions.
wait = emitted(None, int32, int32)(ptx_hopper.barrier_wait)
arrive = emitted(None, int32, types.boolean)(ptx_hopper.barrier_arrive)


def expect(count: int) -> Any:
    """Return ``expect(barrier)``, which arrives and makes the barrier wait for `count` bytes."""
    return emitted(None, int32)(partial(ptx_hopper.barrier_expect, count=count))


class Ring:
    """The device functions of a ring buffer with two or three stages.

    A tile is identified by its *position*. The first tile has position 0, and ``after(position)``
    returns the position of the next tile. The lowest bits of a position are the pipeline stage,
    which ``place(position)`` returns. The next bit is the parity of the lap, that is, of the number
    of passes over all stages. With three stages, positions are 0, 1, 2, 4, 5, 6, 8, and so on.

    Each stage has one mbarrier for "full" and one for "free". One phase of each of these barriers
    ends per lap. ``stage(barriers, position)`` returns the barrier of a tile's stage; `barriers`
    are all of one kind. ``wait_full(barriers, position)`` waits until a tile is in its stage.
    ``wait_free(barriers, position)`` waits until all readers of the stage's previous tile are done.
    On the first lap, ``wait_free`` returns immediately.
    """

    def __init__(self, stages: int) -> None:
        lap = {2: 1, 3: 2}[stages]  # the index of its bit
        low = i32((1 << lap) - 1)

        def barrier_of(b, barriers, position):
            return b.add(barriers, b.shl(b.and_(position, low), i32(3)))

        def lap_of(b, position):
            return b.and_(b.lshr(position, i32(lap)), i32(1))

        @emitted(int32, int32)
        def after(b, position):
            following = b.add(position, i32(1))
            if stages == 2:
                return following
            none = b.icmp_unsigned("==", b.and_(following, low), i32(3))  # there is no such stage
            return b.select(none, b.add(position, i32(2)), following)

        @emitted(int32, int32)
        def place(b, position):
            return b.and_(position, low)

        @emitted(int32, int32, int32)
        def stage(b, barriers, position):
            return barrier_of(b, barriers, position)

        @emitted(None, int32, int32)
        def wait_full(b, barriers, position):
            ptx_hopper.barrier_wait(b, barrier_of(b, barriers, position), lap_of(b, position))

        @emitted(None, int32, int32)
        def wait_free(b, barriers, position):
            barrier = barrier_of(b, barriers, position)
            ptx_hopper.barrier_wait(b, barrier, b.xor(lap_of(b, position), i32(1)))

        self.after, self.place, self.stage = after, place, stage
        self.wait_full, self.wait_free = wait_full, wait_free


#: The functions for two stages, where positions count the tiles so far.
_TWO = Ring(2)
stage, wait_full, wait_free = _TWO.stage, _TWO.wait_full, _TWO.wait_free


@emitted(None, int32, types.boolean, types.float32)
def arrive_behind(b, barrier, condition, alpha):
    """Arrive at a barrier, where `condition` holds, after `alpha` of row 1 has been computed.

    `alpha` rescales row 1 of O. `alpha` is an exponential, so a test whether `alpha` is negative
    has no effect. The test only makes the arrival and the following wait depend on the maxima and
    first exponentials. Without this false dependency, the assembler moves maxima and exponentials
    after the wait.
    """
    never = b.fcmp_ordered("<", alpha, ir.Constant(alpha.type, 0.0))
    ptx_hopper.barrier_arrive(b, barrier, b.and_(condition, b.not_(never)))


def named_sync(threads: int) -> Any:
    """Return ``named_sync(barrier)``, which waits at a named barrier for `threads` threads."""
    return emitted(None, int32)(partial(ptx_hopper.named_sync, threads=threads))


def named_arrive(threads: int) -> Any:
    """Return ``named_arrive(barrier)``, which arrives at a named barrier without waiting."""
    return emitted(None, int32)(partial(ptx_hopper.named_arrive, threads=threads))


#: Ping-pong scheduling with a named barrier of two warpgroups: ``my_turn(barrier)`` waits until the
#: previous warpgroup has queued its products; ``pass_turn(barrier)`` lets the next one queue its
#: own.
my_turn, pass_turn = named_sync(256), named_arrive(256)


cluster_sync = emitted(None)(ptx_hopper.cluster_sync)


# -- work tiles: messages from the producer to the consumers --------------------------------------


#: ``put(address, integer)`` stores an integer in shared memory.
put = emitted(None, int32, int32)(ptx.store_shared)


@emitted(int32, int32)
def get(b, address):
    """Load a 32-bit integer from shared memory."""
    return ptx.asm(b, "ld.shared.b32 $0, [$1];", "=r,r", [address], I32, effects=True)


#: ``fetch_count(address, last) -> int32`` increments an integer in HBM, or resets it after `last`.
fetch_count = emitted(int32, int64, int32)(ptx_hopper.fetch_count)


# -- TMA ------------------------------------------------------------------------------------------


@intrinsic
def map_address(typing_context, tensor_map):
    """Return the address of a tensor map that is a kernel parameter."""

    def generate(context, builder, signature, args):
        return ptx_hopper.parameter_address(builder, tensor_map.parameter)

    return types.int64(tensor_map), generate


def copy_tile(rows: int, chunks: int, *, packed: bool, blocks: int = 1) -> Any:
    """Return ``copy_tile(to, map, barrier, row, head, batch)``, which copies a tile by TMA.

    The copy proceeds box by box, in the order of 64-column chunks. For `packed` sequences, tensor
    maps have one more axis, on which every box has coordinate `ROUND`. In a cluster of `blocks`,
    each block copies some boxes to every block's shared memory.
    """
    back = [i32(ROUND)] if packed else []

    @emitted(None, int32, int64, int32, int32, int32, int32)
    def copy_tile_(b, to, tensor_map, barrier, *coordinates):
        row, head, batch = coordinates

        def copy(chunk: int) -> None:
            at = b.add(to, i32(chunk * rows * 128))
            column = i32(chunk * ptx_hopper.CHUNK)
            where = [column, row, head, *back, batch]
            ptx_hopper.copy_box(b, at, tensor_map, barrier, where, blocks)

        if blocks > 1:
            rank = b.and_(ptx.special(b, "ctaid.x"), i32(blocks - 1))
        for chunk in range(chunks):
            if blocks == 1:
                copy(chunk)
            else:
                with b.if_then(b.icmp_unsigned("==", rank, i32(chunk % blocks))):
                    copy(chunk)

    return copy_tile_


def copy_chunks(rows: int, chunks: int, *, packed: bool) -> Any:
    """Return a function that copies a tile by TMA, with separate barriers per chunk.

    The signature is ``copy_chunks(to, map, full, free, parity, row, head, batch)``. The copy of a
    chunk starts when the readers of the previous tile have released it. `parity` is the parity of
    the tile's number. `packed` is as in `copy_tile`.
    """
    back = [i32(ROUND)] if packed else []

    @emitted(None, int32, int64, *[int32] * 6)
    def copy_chunks_(b, to, tensor_map, full, free, parity, *coordinates):
        row, head, batch = coordinates
        for chunk in range(chunks):
            barrier = b.add(full, i32(chunk * _BARRIER))
            ptx_hopper.barrier_wait(b, b.add(free, i32(chunk * _BARRIER)), b.xor(parity, i32(1)))
            ptx_hopper.barrier_expect(b, barrier, rows * 128)
            where = [i32(chunk * ptx_hopper.CHUNK), row, head, *back, batch]
            ptx_hopper.copy_box(b, b.add(to, i32(chunk * rows * 128)), tensor_map, barrier, where)

    return copy_chunks_


#: ``uncounted(value)`` returns a loop's counter unchanged. LLVM cannot know that, so does not
#: unroll.
uncounted = emitted(int32, int32)(ptx.again)


# -- products -------------------------------------------------------------------------------------


def queue_scores(
    bf16: bool, n: int, depth: int, *, rows: int = 64, of: int = 0, more: bool = False
) -> Any:
    """Return ``queue_scores(q, k) -> s``, which queues S = Q K^T for 64 queries and `n` keys.

    The caller must wait for S. The tiles of Q and K have `depth` columns. `rows` is the number of
    rows of the Q tile in shared memory, of which 64 are used. The K tile has `of` rows (n rows if
    `of` is 0), of which n are used. With `more`, the function is ``queue_scores(s, q, k) -> s + Q
    K^T``.
    """
    steps = range(depth // 16)
    left_at = [ptx_hopper.along_row(x, rows) for x in steps]
    right_at = [ptx_hopper.along_row(x, of or n) for x in steps]
    kind = floats(n // 2)

    @emitted(kind, *[kind] * more, int32, int32)
    def queue_scores_(b, *operands):
        *s, q, k = operands
        tiles = ptx_hopper.descriptor(b, q, 0), ptx_hopper.descriptor(b, k, 0)
        return ptx_hopper.wgmma(b, bf16, n, s[0] if more else None, *tiles, left_at, right_at)

    return queue_scores_


def queue_output(bf16: bool, n: int, depth: int, *, of: int = 0) -> Any:
    """Return ``queue_output(o, p, v) -> o``, which queues o + P V (`p`: from `round_operand`).

    The caller must wait for the product. The product uses `n` columns and `depth` rows of V. The V
    tile has `of` rows (`depth` rows if `of` is 0).
    """

    @emitted(floats(n // 2), floats(n // 2), words(depth // 4), int32)
    def queue_output_(b, o, p, v):
        right = ptx_hopper.descriptor(b, v, (of or depth) * 128)
        right_at = [ptx_hopper.down_rows(x) for x in range(depth // 16)]
        return ptx_hopper.wgmma(b, bf16, n, o, p, right, [], right_at, right_down=True)

    return queue_output_


def product_wait(pending: int) -> Any:
    """Return ``product_wait(c) -> c``, which waits for all groups except the last `pending`."""
    return emitted(Like(0), FRAGMENT)(partial(ptx_hopper.wgmma_wait, pending=pending))


def round_operand(bf16: bool, n: int) -> Any:
    """Return ``round_operand(s) -> p``, which rounds sums to 16-bit numbers, as a left operand."""
    return emitted(words(n // 4), floats(n // 2))(partial(rounded, bf16=bf16))


def rounded(b: ir.IRBuilder, s: Values, *, bf16: bool) -> Values:
    """Emit the rounding of elements to 16 bits, two neighbours per register."""
    return [ptx.pack(b, bf16, s[x], s[x + 1]) for x in range(0, len(s), 2)]


# -- output ---------------------------------------------------------------------------------------


def store_output(bf16: bool, n: int, row_of: RowWidth, *, later: bool = False) -> Any:
    """Return ``store_output(address, row_bytes, o, factors, row, stop) -> bytes`` for 64 rows.

    The function rounds and stores output, without rows from `stop` on and columns past the row
    width `row_of`. `row` is the warp's first row, and `address` is the address of row 0. A quad's
    four lanes exchange pairs of columns, so that each lane stores 16 bytes of a row. With `later`,
    there is one more parameter: the column at which o begins.
    """

    @emitted(int32, int64, int32, floats(n // 2), floats(2), *[int32] * (3 if later else 2))
    def store_output_(b, address, row_bytes, o, factors, row, stop, *begin):
        lane, stored = lane_of(b), i32(0)
        column = b.shl(b.and_(lane, i32(3)), i32(3))
        for first in begin:
            column = b.add(column, first)
        odd, high = b.trunc(lane, I1), b.trunc(b.lshr(lane, i32(1)), I1)
        for half in range(2):
            mine = b.add(row, b.add(b.lshr(lane, i32(2)), i32(8 * half)))
            exists = b.icmp_signed("<", mine, stop)
            far = b.mul(b.sext(mine, I64), b.sext(row_bytes, I64))
            line = b.add(b.add(address, far), b.sext(b.shl(column, i32(1)), I64))
            for first in range(0, n, 32):
                four = []
                for piece in range(4):
                    at = (first // 8 + piece) * 4 + 2 * half
                    pair = [b.fmul(x, factors[half]) for x in o[at : at + 2]]
                    four.append(ptx.pack(b, bf16, *pair) if pair else i32(0))
                four = transposed_quad(b, four, odd, high)
                inside = exists
                if later or first + 32 > row_of.width:
                    fits = b.icmp_unsigned("<", b.add(column, i32(first)), i32(row_of.width))
                    inside = b.and_(exists, fits)
                with b.if_then(inside):
                    ptx.store_16(b, b.add(line, ir.Constant(I64, first * 2)), four)
                count = row_of.counted(b, b.add(column, i32(first)), 8, 2)
                stored = b.add(stored, b.select(inside, count, i32(0)))
        return stored

    return store_output_


def transposed_quad(b: ir.IRBuilder, x: Values, odd: ir.Value, high: ir.Value) -> Values:
    """Transpose 4 x 4 words in a quad: lane t sends word s to lane s, and gets word t of lane s."""
    for mask, mine, pairs in ((1, odd, ((0, 1), (2, 3))), (2, high, ((0, 2), (1, 3)))):
        x = list(x)
        for low, up in pairs:
            got = _traded(b, b.select(mine, x[low], x[up]), mask)
            x[low], x[up] = b.select(mine, got, x[low]), b.select(mine, x[up], got)
    return x


def _traded(b: ir.IRBuilder, word: ir.Value, mask: int) -> ir.Value:
    kind = word.type
    text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;"
    return ptx.asm(b, text, "=r,r", [word], kind, effects=True, together=True)
