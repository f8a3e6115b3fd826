"""Numba intrinsics for Hopper: ring buffers of tiles, warpgroup products and output rows.

A ring buffer has two or three pipeline stages (`Ring`). The functions of a two-stage ring buffer
are also attributes of this module. Accumulator fragments have the layout of `mma_tiles`, with one
block of 16 rows per warp. `ptx.wgmma` says which of a warpgroup's 64 rows belong to which warp.
"""

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
    Rounded,
    Values,
    emitted,
    floats,
    i32,
)
from flashsim.backends.numba_gpu.hopper import ptx as ptx_hopper
from flashsim.backends.numba_gpu.mma_tiles import lane_of

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


#: ``registers(count, more=...)()`` gives each thread of the warpgroup `count` registers.
registers = emitted(None)(ptx_hopper.registers)


# -- barriers -------------------------------------------------------------------------------------


@emitted(None, int32)
def barriers_begin(b, base, *, counts):
    """Initialize barriers, in one thread.

    `counts` maps a barrier's offset from `base` to the number of arrivals per phase.
    """
    for at, arrivals in counts.items():
        ptx_hopper.barrier_init(b, b.add(base, i32(at)), arrivals)
    ptx_hopper.barrier_init_fence(b)


#: ``wait(barrier, parity)`` and ``arrive(barrier, condition)`` are the PTX instructions.
wait = emitted(None, int32, int32)(ptx_hopper.barrier_wait)
arrive = emitted(None, int32, types.boolean)(ptx_hopper.barrier_arrive)
#: ``expect(count)(barrier)`` arrives, and makes the barrier wait for `count` bytes.
expect = emitted(None, int32)(ptx_hopper.barrier_expect)


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


#: ``named_sync(threads)(barrier)`` waits at a named barrier for `threads` threads, and
#: ``named_arrive(threads)(barrier)`` arrives there without waiting.
named_sync = emitted(None, int32)(ptx_hopper.named_sync)
named_arrive = emitted(None, int32)(ptx_hopper.named_arrive)
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


@emitted(None, int32, int64, *[int32] * 4)
def copy_tile(b, to, tensor_map, barrier, row, head, batch, *, rows, chunks, packed, blocks=1):
    """Copy a tile by TMA, box by box, in the order of 64-column chunks.

    For `packed` sequences, tensor maps have one more axis, on which every box has coordinate
    `ROUND`. In a cluster of `blocks`, each block copies some boxes to every block's shared memory.
    """

    def copy(chunk: int) -> None:
        at, column = b.add(to, i32(chunk * rows * 128)), i32(chunk * ptx_hopper.CHUNK)
        where = [column, row, head, *([i32(ROUND)] if packed else []), batch]
        ptx_hopper.copy_box(b, at, tensor_map, barrier, where, blocks)

    if blocks > 1:
        rank = b.and_(ptx.special(b, "ctaid.x"), i32(blocks - 1))
    for chunk in range(chunks):
        if blocks == 1:
            copy(chunk)
        else:
            with b.if_then(b.icmp_unsigned("==", rank, i32(chunk % blocks))):
                copy(chunk)


@emitted(None, int32, int64, *[int32] * 6)
def copy_chunks(b, to, tensor_map, full, free, parity, row, head, batch, *, rows, chunks, packed):
    """Copy a tile by TMA, with separate barriers per chunk.

    The copy of a chunk starts when the readers of the previous tile have released it. `parity` is
    the parity of the tile's number. `packed` is as in `copy_tile`.
    """
    for chunk in range(chunks):
        barrier = b.add(full, i32(chunk * _BARRIER))
        ptx_hopper.barrier_wait(b, b.add(free, i32(chunk * _BARRIER)), b.xor(parity, i32(1)))
        ptx_hopper.barrier_expect(b, barrier, count=rows * 128)
        column, back = i32(chunk * ptx_hopper.CHUNK), [i32(ROUND)] if packed else []
        at = b.add(to, i32(chunk * rows * 128))
        ptx_hopper.copy_box(b, at, tensor_map, barrier, [column, row, head, *back, batch])


#: ``uncounted(value)`` returns a loop's counter unchanged. LLVM cannot know that, so does not
#: unroll.
uncounted = emitted(int32, int32)(ptx.again)


# -- products -------------------------------------------------------------------------------------


@emitted(lambda c: floats(c.n // 2), lambda c: [*[floats(c.n // 2)] * c.more, int32, int32])
def queue_scores(b, *operands, bf16, n, depth, rows=64, of=0, more=False):
    """Queue S = Q K^T for 64 queries and `n` keys; the operands are the tiles of Q and K.

    The caller must wait for S. The tiles have `depth` columns. `rows` is the number of rows of the
    Q tile in shared memory, of which 64 are used. The K tile has `of` rows (n rows if `of` is 0),
    of which n are used. With `more`, the first operand is a fragment to which Q K^T is added.
    """
    *s, q, k = operands
    tiles = ptx_hopper.descriptor(b, q, 0), ptx_hopper.descriptor(b, k, 0)
    left_at = [ptx_hopper.along_row(x, rows) for x in range(depth // 16)]
    right_at = [ptx_hopper.along_row(x, of or n) for x in range(depth // 16)]
    return ptx_hopper.wgmma(b, bf16, n, s[0] if more else None, *tiles, left_at, right_at)


@emitted(Like(0), FRAGMENT, FRAGMENT, int32)
def queue_output(b, o, p, v, *, bf16, of=0):
    """Queue o + P V (`p`: from `round_operand`).

    The caller must wait for the product. P has one column per row of V that the product uses. The
    V tile has `of` rows, of which the product uses the first ones, or all if `of` is 0.
    """
    n, depth = 2 * len(o), 4 * len(p)
    right = ptx_hopper.descriptor(b, v, (of or depth) * 128)
    right_at = [ptx_hopper.down_rows(x) for x in range(depth // 16)]
    return ptx_hopper.wgmma(b, bf16, n, o, p, right, [], right_at, right_down=True)


#: ``product_wait(pending)(c)`` waits for all groups except the last `pending`, and returns `c`.
product_wait = emitted(Like(0), FRAGMENT)(ptx_hopper.wgmma_wait)


def rounded(b: ir.IRBuilder, s: Values, *, bf16: bool) -> Values:
    """Emit the rounding of elements to 16 bits, two neighbours per register."""
    return [ptx.pack(b, bf16, s[x], s[x + 1]) for x in range(0, len(s), 2)]


#: ``round_operand(bf16)(s)`` rounds sums to 16-bit numbers, as a left operand.
round_operand = emitted(Rounded(0), FRAGMENT)(rounded)


# -- output ---------------------------------------------------------------------------------------


@emitted(int32, int64, int32, FRAGMENT, FRAGMENT, lambda c: [int32] * (3 if c.later else 2))
def store_output(b, address, row_bytes, o, factors, row, stop, *begin, bf16, row_of, later=False):
    """Round and store 64 rows of output, and return the number of bytes.

    Rows from `stop` on and columns past the row width `row_of` are not stored. `row` is the warp's
    first row, and `address` is the address of row 0. A quad's four lanes exchange pairs of columns,
    so that each lane stores 16 bytes of a row. With `later`, there is one more parameter: the
    column at which o begins.
    """
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
        for first in range(0, 2 * len(o), 32):
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
