"""Numba intrinsics for tile operations of the KV-outer backward on Hopper.

Scores are transposed: a fragment's rows are keys, and the columns are queries. So each column of a
fragment has a log-sum-exp and a delta. The module `row_gradients` has the same operations for the
Q-outer dQ kernel.
"""

from llvmlite import ir
from numba.cuda import types

from flashsim.backends.launch.kernel import ROUND
from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import (
    F32,
    FRAGMENT,
    I32,
    Like,
    Rounded,
    emitted,
    f32,
    floats,
    i32,
)
from flashsim.backends.numba_gpu.hopper import ptx as ptx_hopper
from flashsim.backends.numba_gpu.hopper.wgmma_tiles import rounded
from flashsim.backends.numba_gpu.mma_tiles import lane_of
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E, NEG_INF, masked

int32, int64, float32 = types.int32, types.int64, types.float32


# -- statistics: a warp loads them; the consumers' accumulators start at them ---------------------


@emitted(lambda c: [floats(-(-c.block_q // 32))] * 2, *(int64, int64, int32, float32))
def load_statistics(b, lse, delta, rows, unit, *, block_q):
    """Load the initial scores and the initial dP of a row tile, in a warp.

    Lane l loads rows l, l + 32, and so on. The initial scores of a row are the log-sum-exp times
    `unit` (see `unit_of_starts`), and the initial dP is -delta. If a row does not exist or sees no
    key, the initial scores are -inf, so that P is exactly 0.
    """
    starts, deltas = [], []
    for first in range(0, block_q, 32):
        row = b.add(lane_of(b), i32(first))
        exists = b.icmp_signed("<", row, rows)
        if first + 32 > block_q:
            exists = b.and_(exists, b.icmp_signed("<", row, i32(block_q)))
        far = b.zext(b.shl(row, i32(2)), lse.type)
        x = ptx.load_float_if(b, b.add(lse, far), exists)
        empty = b.fcmp_ordered("==", x, f32(NEG_INF))
        none = b.or_(empty, b.not_(exists))
        starts.append(b.select(none, f32(NEG_INF), b.fmul(x, unit)))
        x = ptx.load_float_if(b, b.add(delta, far), exists)
        deltas.append(b.fmul(x, f32(-1.0)))
    return [starts, deltas]


@emitted(None, int32, FRAGMENT)
def put_rows(b, address, values, *, block_q):
    """Store a result of `load_statistics` in shared memory."""
    mine = b.add(address, b.shl(lane_of(b), i32(2)))
    for step, value in enumerate(values):
        at = b.add(mine, i32(128 * step))
        if (step + 1) * 32 <= block_q:
            ptx_hopper.store_float(b, at, value)
            continue
        with b.if_then(b.icmp_unsigned("<", lane_of(b), i32(block_q - 32 * step))):
            ptx_hopper.store_float(b, at, value)


@emitted(Like(0, times=2), FRAGMENT)
def start_columns(b, values):
    """Return an accumulator with one initial value per column."""
    return [x for c in range(0, len(values), 2) for x in ptx_hopper.twice(b, *values[c : c + 2])]


def _column_pair(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return the address of the two float32 numbers for this thread's first two columns."""
    return b.add(address, b.shl(b.and_(lane_of(b), i32(3)), i32(3)))


# -- scores and their gradients -------------------------------------------------------------------


@emitted(Like(0), FRAGMENT, *[int32] * 6)
def mask_columns(b, s, *where, left, right):
    """Return ``mask_columns(s, key, query, offset, key_stop, left, right)``.

    The rows of S^T are keys, and the columns are queries; masked scores become -inf. Query q sees
    key k if ``k - offset - right <= q <= k - offset + left``. No query sees key `key_stop` or any
    later key. A limit (`left` or `right`) that is off adds no instructions. `key` and `query` are
    the first key and query of the warp.
    """
    key, query, offset, key_stop, window_left, window_right = where
    lane, limits, n = lane_of(b), [], 2 * len(s)
    first = b.add(query, b.shl(b.and_(lane, i32(3)), i32(1)))
    for half in range(2):
        mine = b.add(key, b.add(b.lshr(lane, i32(2)), i32(8 * half)))
        centre = b.sub(b.sub(mine, offset), first)  # compared with constants below
        low = b.sub(centre, window_right) if right else i32(0)
        low = b.select(b.icmp_signed("<", mine, key_stop), low, i32(n))
        high = [("<=", b.add(centre, window_left))] if left else []
        limits.append([(">=", low), *high])
    return masked(b, s, limits)


@emitted([Like(0), Like(1), Like(2)], *[FRAGMENT] * 3, float32, int32, float32, int32)
def queue_dv(b, s, dp, dv, to_log2, lse, cap, dout, *, bf16, slices, softcap, start):
    """Compute P = exp2(c S), and queue the product dV += P dO; return P, dP and dV.

    The queries are divided into `slices` slices. Each slice's product is queued as soon as the
    slice's part of P is ready. So the exponentials overlap with products of earlier slices, and
    with the product dP. The function returns after the product dP is complete.

    With 128 queries, the function waits for dP after half of the slices; the second half computes a
    part of dS = P dP. If there is a softcap, p is P times the softcap's derivative, 1 - tanh^2. If
    `start` is true, the initial scores include the log-sum-exp, and `lse` is not used. If `start`
    is false, `lse` is the shared-memory address of each column's negative log-sum-exp in base 2.
    """
    n, d = 2 * len(s), 2 * len(dv)
    size = n // slices  # queries per slice
    halfway = waits_halfway(n)
    p = list(s)
    inverse = ptx.reciprocal(b, cap) if softcap else None
    # Otherwise the assembler moves the multiplications of all slices before the first exponential,
    # which is slow if there are many slices. It does not know that no exponential is negative. So
    # each slice's factor, which never changes, gets a false dependency on an exponential of the
    # previous slice.
    unit, early = b.bitcast(to_log2, I32), i32(0)
    for first in range(0, n, size):
        if halfway:
            unit = b.or_(unit, b.and_(early, i32(0x80000000)))
        factor, powers = b.bitcast(unit, F32), []
        for e in range(first // 2, (first + size) // 2, 2):
            if not start:
                starts = ptx.load_shared_pair(b, b.add(_column_pair(b, lse), i32(e // 4 * 32)))
            for x in range(2):
                y = s[e + x]
                exponent = b.fmul(y, factor) if start else b.fma(y, factor, starts[x])
                powers.append(ptx.exp2(b, exponent))
                p[e + x] = powers[-1]
                if softcap:  # S may be -inf
                    t = ptx.maximum(b, b.fmul(y, inverse), f32(-1.0))
                    p[e + x] = b.fmul(powers[-1], b.fsub(f32(1.0), b.fmul(t, t)))
        early = b.bitcast(powers[0], I32)
        where = b.add(ptx_hopper.descriptor(b, dout, n * 128), i32(_sixteens(first)))
        steps = [_sixteens(x) for x in range(0, size, 16)]
        left = rounded(b, powers, bf16=bf16)
        dv = ptx_hopper.wgmma(b, bf16, d, dv, left, where, [], steps, right_down=True)
        if not halfway:
            continue
        if first + size == n // 2:
            dp = ptx_hopper.wgmma_wait(b, dp, pending=slices // 2)
        if first >= n // 2:  # dS of the slices of the first half
            for e in range((first - n // 2) // 2, (first - n // 2 + size) // 2):
                dp[e] = b.fmul(dp[e], p[e])
    if not halfway:
        dp = ptx_hopper.wgmma_wait(b, dp, pending=slices)
    return [p, dp, dv]


def waits_halfway(n: int) -> bool:
    """Return whether a tile's exponentials take longer than the product dP."""
    return n == 128


@emitted(Rounded(0), FRAGMENT, FRAGMENT)
def score_gradients(b, p, dp, *, bf16):
    """Return dS = P dP as a left operand."""
    begun = len(p) // 2 if waits_halfway(2 * len(p)) else 0
    ds = [x if e < begun else b.fmul(x, p[e]) for e, x in enumerate(dp)]
    return rounded(b, ds, bf16=bf16)


@emitted(Like(1), FRAGMENT, FRAGMENT)
def score_products(b, p, dp, *, bf16):
    """Return P dP in float32, from a rounded P."""
    p = [x for pair in p for x in ptx.unpack(b, bf16, pair)]
    return [b.fmul(x, y) for x, y in zip(p, dp, strict=True)]


def _sixteens(row: int) -> int:
    return ptx_hopper.down_rows(row // 16)


# -- dQ: staged in shared memory, then sent -------------------------------------------------------


@emitted(int32, int32, int32)
def ds_place(b, ds, group, *, wide):
    """Return the address of this thread's swizzled row of dS^T."""
    lane, warp = lane_of(b), b.and_(b.lshr(ptx.special(b, "tid.x"), i32(5)), i32(3))
    row = b.add(b.shl(group, i32(6)), b.shl(warp, i32(4)))
    row = b.add(row, b.and_(lane, i32(15)))
    turn = b.and_(b.lshr(row, i32(2)), i32(1)) if wide == 16 else b.and_(row, i32(7))
    piece = b.xor(b.lshr(lane, i32(4)), turn)
    return b.add(b.add(ds, b.mul(row, i32(wide * 2))), b.shl(piece, i32(4)))


@emitted(None, int32, FRAGMENT)
def store_ds(b, to, ds, *, block_k, wide):
    """Store a warpgroup's dS^T, whose rows are 64 keys."""
    for x in range(len(ds) // 4):
        if wide == 16:
            at = b.add(to, i32(x * block_k * 32))
        else:
            at = b.add(b.xor(to, i32(x % 4 * 32)), i32(x // 4 * block_k * 128))
        ptx_hopper.store_matrices(b, at, ds[4 * x : 4 * x + 4])


@emitted(lambda c: floats(c.rows // 2), int32, int32)
def queue_dq(b, k, ds, *, bf16, rows, block_k, wide):
    """Queue dQ^T = K^T dS^T (64 columns, `rows` queries).

    The caller must wait for dQ^T. `k` is a chunk of K, and `ds` is the address in dS^T of the first
    query. `wide` is the number of queries per chunk of dS^T.
    """
    steps = range(block_k // 16)
    return ptx_hopper.wgmma(
        *(b, bf16, rows, None),
        ptx_hopper.descriptor(b, k, 0),
        ptx_hopper.descriptor(b, ds, block_k * wide * 2),
        [ptx_hopper.down_rows(x) for x in steps],
        [x * wide * 2 for x in steps],
        left_down=True,
        right_down=True,
        right_narrow=wide == 16,
    )


@emitted(int32, int32)
def dq_place(b, dq, *, rows):
    """Return the address at which this thread stages dQ for TMA.

    A row of dQ's staging area is one query, with 32 columns per box. The 16-byte pieces of a row
    are swizzled with the row number.
    """
    lane, warp = lane_of(b), b.and_(b.lshr(ptx.special(b, "tid.x"), i32(5)), i32(3))
    row = b.shl(b.and_(lane, i32(3)), i32(1))
    piece = b.add(b.shl(b.and_(warp, i32(1)), i32(2)), b.lshr(lane, i32(4)))
    box = b.add(dq, b.mul(b.lshr(warp, i32(1)), i32(rows * 128)))
    near = b.shl(b.and_(b.lshr(lane, i32(2)), i32(3)), i32(2))
    at = b.add(b.add(box, b.shl(row, i32(7))), near)
    return b.add(at, b.shl(b.xor(piece, row), i32(4)))


@emitted(None, int32, FRAGMENT)
def stage_dq(b, to, dq):
    """Write a warpgroup's piece of dQ to shared memory.

    The 32 elements that a warp stores at the same time fall into 32 different banks.
    """
    for x in range(4):
        # Rows 8 j + (lane % 4) 2 + p; the thread's next 8 h columns are 2 h pieces further.
        p, h = x % 2, x // 2
        at = b.xor(ptx.again(b, to), i32(16 * p + 32 * h))  # recomputed, to save four registers
        for j in range(len(dq) // 4):
            ptx_hopper.store_float(b, b.add(at, i32(128 * (8 * j + p))), dq[4 * j + x])


@emitted(None, int64, *[int32] * 5)
def reduce_dq(b, tensor_map, source, column, row, head, batch, *, rows, wide, packed):
    """Add part of dQ in shared memory to the accumulator in HBM.

    The part has `wide` columns. All reductions that a thread starts form one group. `packed` is as
    in `wgmma_tiles.copy_tile`.
    """
    for box in range(wide // 32):
        where = [b.add(column, i32(32 * box)), row, head, *([i32(ROUND)] if packed else []), batch]
        at = b.add(source, i32(box * rows * 128))
        ptx_hopper.reduce_box(b, tensor_map, at, where)
    ptx_hopper.reduce_commit(b)


#: ``reduce_wait_read()`` waits until the sources of this thread's reductions may be overwritten.
reduce_wait_read = emitted(None)(ptx_hopper.reduce_wait)(read=True)


@emitted(None, int64, int32)
def wait_turn(b, turn, mine):
    """Wait until `mine` blocks have added to a piece of dQ, so that this block may add to it."""
    ptx_hopper.wait_equal(b, turn, mine)
    ptx_hopper.fence_async(b, space="global")


@emitted(None, int64)
def pass_turn(b, turn):
    """Wait until this thread's reductions are done, then increment `turn` for the next block."""
    ptx_hopper.reduce_wait(b, read=False)
    ptx_hopper.fence_async(b, space="global")
    ptx_hopper.count_on(b, turn)


#: ``fence_shared()`` makes this thread's writes to shared memory visible to products and copies.
fence_shared = emitted(None)(ptx_hopper.fence_async)(space="shared::cta")


# -- dK and dV of a cluster: exchanged through shared memory --------------------------------------


@emitted(None, int32, FRAGMENT)
def lay_down(b, to, sums, *, apart):
    """Store a thread's sums at steps of `apart` bytes."""
    for e, x in enumerate(sums):
        ptx_hopper.store_float(b, b.add(to, i32(e * apart)), x)


@emitted(Like(0), FRAGMENT, int32, int32)
def add_from(b, sums, source, block, *, apart):
    """Add another block's stored sums."""
    there = ptx_hopper.address_in(b, source, block)
    return [b.fadd(x, ptx_hopper.load_float_from(b, there, e * apart)) for e, x in enumerate(sums)]


@emitted(float32, float32)
def unit_of_starts(b, scale, *, start):
    """Return the factor for the log-sum-exp in `load_statistics`.

    With `start`, the factor is -1 / scale, because the log-sum-exp is part of the unscaled initial
    scores. Without `start`, the factor is -log2 e, because the result is added to the exponent of
    exp2.
    """
    return b.fmul(ptx.reciprocal(b, scale), f32(-1.0)) if start else f32(-LOG2E)
