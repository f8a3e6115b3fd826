"""Numba intrinsics for tile operations of the KV-outer backward on Hopper.

Scores are transposed: a fragment's rows are keys, and the columns are queries. So each column of a
fragment has a log-sum-exp and a delta. The module `row_gradients` has the same operations for the
Q-outer dQ kernel.
"""

from functools import partial
from typing import Any

from llvmlite import ir
from numba.cuda import types

from flashsim.backends.launch.kernel import ROUND
from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import (
    F32,
    FRAGMENT,
    I32,
    Like,
    emitted,
    f32,
    floats,
    i32,
    words,
)
from flashsim.backends.numba_gpu.hopper import ptx as ptx_hopper
from flashsim.backends.numba_gpu.hopper.wgmma_tiles import rounded
from flashsim.backends.numba_gpu.mma_tiles import elements, lane_of
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E, NEG_INF

int32, int64, float32 = types.int32, types.int64, types.float32


# -- statistics: a warp loads them; the consumers' accumulators start at them ---------------------


def load_statistics(block_q: int) -> Any:
    """Return ``load_statistics(lse, delta, rows, unit) -> starts, deltas``, called by a warp.

    Lane l loads rows l, l + 32, and so on. The initial scores of a row are the log-sum-exp times
    `unit` (see `unit_of_starts`), and the initial dP is -delta. If a row does not exist or sees no
    key, the initial scores are -inf, so that P is exactly 0.
    """
    kind = floats(-(-block_q // 32))

    @emitted([kind, kind], int64, int64, int32, float32)
    def load_statistics_(b, lse, delta, rows, unit):
        starts, deltas = [], []
        for step in range(kind.count):
            row = b.add(lane_of(b), i32(32 * step))
            exists = b.icmp_signed("<", row, rows)
            if (step + 1) * 32 > block_q:
                exists = b.and_(exists, b.icmp_signed("<", row, i32(block_q)))
            far = b.zext(b.shl(row, i32(2)), lse.type)
            x = ptx.load_float_if(b, b.add(lse, far), exists)
            empty = b.fcmp_ordered("==", x, f32(NEG_INF))
            none = b.or_(empty, b.not_(exists))
            starts.append(b.select(none, f32(NEG_INF), b.fmul(x, unit)))
            x = ptx.load_float_if(b, b.add(delta, far), exists)
            deltas.append(b.fmul(x, f32(-1.0)))
        return [starts, deltas]

    return load_statistics_


def put_rows(block_q: int) -> Any:
    """Return ``put_rows(address, values)``, which stores a result of `load_statistics`."""
    kind = floats(-(-block_q // 32))

    @emitted(None, int32, kind)
    def put_rows_(b, address, values):
        mine = b.add(address, b.shl(lane_of(b), i32(2)))
        for step, value in enumerate(values):
            at = b.add(mine, i32(128 * step))
            if (step + 1) * 32 <= block_q:
                ptx_hopper.store_float(b, at, value)
                continue
            with b.if_then(b.icmp_unsigned("<", lane_of(b), i32(block_q - 32 * step))):
                ptx_hopper.store_float(b, at, value)

    return put_rows_


@emitted(Like(0, times=2), FRAGMENT)
def start_columns(b, values):
    """Return an accumulator with one initial value per column."""
    return [x for c in range(0, len(values), 2) for x in ptx_hopper.twice(b, *values[c : c + 2])]


def _column_pair(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return the address of the two float32 numbers for this thread's first two columns."""
    return b.add(address, b.shl(b.and_(lane_of(b), i32(3)), i32(3)))


# -- scores and their gradients -------------------------------------------------------------------


def mask_columns(n: int, left: bool, right: bool) -> Any:
    """Return ``mask_columns(s, key, query, offset, key_stop, left, right) -> s``.

    The rows of S^T are keys, and the columns are queries; masked scores become -inf. Query q sees
    key k if ``k - offset - right <= q <= k - offset + left``. No query sees key `key_stop` or any
    later key. A limit (`left` or `right`) that is off adds no instructions. `key` and `query` are
    the first key and query of the warp.
    """
    kind = floats(n // 2)

    @emitted(kind, kind, *[int32] * 6)
    def mask_columns_(b, s, *where):
        key, query, offset, key_stop, window_left, window_right = where
        lane, limits = lane_of(b), []
        first = b.add(query, b.shl(b.and_(lane, i32(3)), i32(1)))
        for half in range(2):
            mine = b.add(key, b.add(b.lshr(lane, i32(2)), i32(8 * half)))
            centre = b.sub(b.sub(mine, offset), first)  # compared with constants below
            low = b.sub(centre, window_right) if right else i32(0)
            low = b.select(b.icmp_signed("<", mine, key_stop), low, i32(n))
            limits.append((low, b.add(centre, window_left) if left else None))
        masked = list(s)
        for at, _, c, x in elements(1, n):
            low, high = limits[x // 2]
            where = i32(c * 8 + x % 2)
            keep = b.icmp_signed(">=", where, low)
            if high is not None:
                keep = b.and_(keep, b.icmp_signed("<=", where, high))
            masked[at] = b.select(keep, s[at], f32(NEG_INF))
        return masked

    return mask_columns_


def queue_dv(bf16: bool, n: int, d: int, slices: int, *, softcap: bool, start: bool) -> Any:
    """Return a function that computes P = exp2(c S) and queues the product dV += P dO.

    The function's signature is ``queue_dv(s, dp, dv, to_log2, lse, cap, dout) -> p, dp, dv``. The
    tile has `n` queries, and dO has `d` columns. The `n` queries are divided into `slices` slices.
    Each slice's product is queued as soon as the slice's part of P is ready. So the exponentials
    overlap with products of earlier slices, and with the product dP. The function returns after the
    product dP is complete.

    If n = 128, the function waits for dP after half of the slices; the second half computes a part
    of dS = P dP. If there is a softcap, p is P times the softcap's derivative, 1 - tanh^2. If
    `start` is true, the initial scores include the log-sum-exp, and `lse` is not used. If `start`
    is false, `lse` is the shared-memory address of each column's negative log-sum-exp in base 2.
    """
    size = n // slices  # queries per slice
    halfway = waits_halfway(n)
    kind, grad = floats(n // 2), floats(d // 2)

    @emitted([kind, kind, grad], kind, kind, grad, float32, int32, float32, int32)
    def queue_dv_(b, s, dp, dv, to_log2, lse, cap, dout):
        p = list(s)
        inverse = ptx.reciprocal(b, cap) if softcap else None
        # Otherwise the assembler moves the multiplications of all slices before the first
        # exponential, which is slow if there are many slices. It does not know that no exponential
        # is negative. So each slice's factor, which never changes, gets a false dependency on an
        # exponential of the previous slice.
        unit, early = b.bitcast(to_log2, I32), i32(0)
        for first in range(0, n, size):
            if halfway:
                unit = b.or_(unit, b.and_(early, i32(0x80000000)))
            factor, powers = b.bitcast(unit, F32), []
            for e in range(first // 2, (first + size) // 2, 2):
                if not start:
                    starts = ptx.load_shared_pair(b, b.add(_column_pair(b, lse), i32(e // 4 * 32)))
                for x in range(2):
                    if start:
                        exponent = b.fmul(s[e + x], factor)
                    else:
                        exponent = b.fma(s[e + x], factor, starts[x])
                    powers.append(ptx.exp2(b, exponent))
                    p[e + x] = powers[-1]
                    if softcap:  # S may be -inf
                        t = ptx.maximum(b, b.fmul(s[e + x], inverse), f32(-1.0))
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

    return queue_dv_


def waits_halfway(n: int) -> bool:
    """Return whether a tile's exponentials take longer than the product dP."""
    return n == 128


def score_gradients(bf16: bool, n: int) -> Any:
    """Return ``score_gradients(p, dp) -> ds``, which computes dS = P dP as a left operand."""
    kind, begun = floats(n // 2), n // 4 if waits_halfway(n) else 0

    @emitted(words(n // 4), kind, kind)
    def score_gradients_(b, p, dp):
        ds = [x if e < begun else b.fmul(x, p[e]) for e, x in enumerate(dp)]
        return rounded(b, ds, bf16=bf16)

    return score_gradients_


def score_products(bf16: bool, n: int) -> Any:
    """Return ``score_products(p, dp) -> ds``, which computes P dP in float32 from a rounded P."""
    kind = floats(n // 2)

    @emitted(kind, words(n // 4), kind)
    def score_products_(b, p, dp):
        p = [x for pair in p for x in ptx.unpack(b, bf16, pair)]
        return [b.fmul(x, y) for x, y in zip(p, dp, strict=True)]

    return score_products_


def _sixteens(row: int) -> int:
    return ptx_hopper.down_rows(row // 16)


# -- dQ: staged in shared memory, then sent -------------------------------------------------------


def ds_place(wide: int) -> Any:
    """Return ``ds_place(ds, group) -> address``, this thread's swizzled row of dS^T."""

    @emitted(int32, int32, int32)
    def ds_place_(b, ds, group):
        lane, warp = lane_of(b), b.and_(b.lshr(ptx.special(b, "tid.x"), i32(5)), i32(3))
        row = b.add(b.shl(group, i32(6)), b.shl(warp, i32(4)))
        row = b.add(row, b.and_(lane, i32(15)))
        turn = b.and_(b.lshr(row, i32(2)), i32(1)) if wide == 16 else b.and_(row, i32(7))
        piece = b.xor(b.lshr(lane, i32(4)), turn)
        return b.add(b.add(ds, b.mul(row, i32(wide * 2))), b.shl(piece, i32(4)))

    return ds_place_


def store_ds(block_k: int, n: int, wide: int) -> Any:
    """Return ``store_ds(place, ds)``, which stores a warpgroup's dS^T, 64 keys by `n` queries."""

    @emitted(None, int32, words(n // 4))
    def store_ds_(b, to, ds):
        for x in range(n // 16):
            if wide == 16:
                at = b.add(to, i32(x * block_k * 32))
            else:
                at = b.add(b.xor(to, i32(x % 4 * 32)), i32(x // 4 * block_k * 128))
            ptx_hopper.store_matrices(b, at, ds[4 * x : 4 * x + 4])

    return store_ds_


def queue_dq(bf16: bool, rows: int, block_k: int, wide: int) -> Any:
    """Return ``queue_dq(k, ds) -> dq``, which queues dQ^T = K^T dS^T (64 columns, `rows` queries).

    The caller must wait for dQ^T. `k` is a chunk of K, and `ds` is the address in dS^T of the first
    query. `wide` is the number of queries per chunk of dS^T.
    """
    steps = range(block_k // 16)

    @emitted(floats(rows // 2), int32, int32)
    def queue_dq_(b, k, ds):
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

    return queue_dq_


def dq_place(rows: int) -> Any:
    """Return ``dq_place(dq) -> address``, where this thread stages dQ for TMA.

    A row of dQ's staging area is one query, with 32 columns per box. The 16-byte pieces of a row
    are swizzled with the row number.
    """

    @emitted(int32, int32)
    def dq_place_(b, dq):
        lane, warp = lane_of(b), b.and_(b.lshr(ptx.special(b, "tid.x"), i32(5)), i32(3))
        row = b.shl(b.and_(lane, i32(3)), i32(1))
        piece = b.add(b.shl(b.and_(warp, i32(1)), i32(2)), b.lshr(lane, i32(4)))
        box = b.add(dq, b.mul(b.lshr(warp, i32(1)), i32(rows * 128)))
        near = b.shl(b.and_(b.lshr(lane, i32(2)), i32(3)), i32(2))
        at = b.add(b.add(box, b.shl(row, i32(7))), near)
        return b.add(at, b.shl(b.xor(piece, row), i32(4)))

    return dq_place_


def stage_dq(rows: int) -> Any:
    """Return ``stage_dq(place, dq)``, which writes a warpgroup's piece of dQ to shared memory.

    The 32 elements that a warp stores at the same time fall into 32 different banks.
    """

    @emitted(None, int32, floats(rows // 2))
    def stage_dq_(b, to, dq):
        for x in range(4):
            # Rows 8 j + (lane % 4) 2 + p; the thread's next 8 h columns are 2 h pieces further.
            p, h = x % 2, x // 2
            at = b.xor(ptx.again(b, to), i32(16 * p + 32 * h))  # recomputed, to save four registers
            for j in range(rows // 8):
                ptx_hopper.store_float(b, b.add(at, i32(128 * (8 * j + p))), dq[4 * j + x])

    return stage_dq_


def reduce_dq(rows: int, wide: int, *, packed: bool) -> Any:
    """Return the function that adds part of dQ in shared memory to the accumulator in HBM.

    The part has `wide` columns.

    The signature is ``reduce_dq(map, source, column, row, head, batch)``. All reductions that a
    thread starts form one group. `packed` is as in `wgmma_tiles.copy_tile`.
    """
    back = [i32(ROUND)] if packed else []

    @emitted(None, int64, int32, int32, int32, int32, int32)
    def reduce_dq_(b, tensor_map, source, column, *place_in_tensor):
        row, head, batch = place_in_tensor
        for box in range(wide // 32):
            where = [b.add(column, i32(32 * box)), row, head, *back, batch]
            at = b.add(source, i32(box * rows * 128))
            ptx_hopper.reduce_box(b, tensor_map, at, where)
        ptx_hopper.reduce_commit(b)

    return reduce_dq_


#: ``reduce_wait_read()`` waits until the sources of this thread's reductions may be overwritten.
reduce_wait_read = emitted(None)(partial(ptx_hopper.reduce_wait, read=True))


@emitted(None, int64, int32)
def wait_turn(b, turn, mine):
    """Wait until `mine` blocks have added to a piece of dQ, so that this block may add to it."""
    ptx_hopper.wait_equal(b, turn, mine)
    ptx_hopper.fence_async(b, "global")


@emitted(None, int64)
def pass_turn(b, turn):
    """Wait until this thread's reductions are done, then increment `turn` for the next block."""
    ptx_hopper.reduce_wait(b, read=False)
    ptx_hopper.fence_async(b, "global")
    ptx_hopper.count_on(b, turn)


#: ``fence_shared()`` makes this thread's writes to shared memory visible to products and copies.
fence_shared = emitted(None)(partial(ptx_hopper.fence_async, space="shared::cta"))


# -- dK and dV of a cluster: exchanged through shared memory --------------------------------------


def lay_down(n: int, apart: int) -> Any:
    """Return ``lay_down(place, sums)``, which stores a thread's sums at steps of `apart` bytes."""

    @emitted(None, int32, floats(n // 2))
    def lay_down_(b, to, sums):
        for e, x in enumerate(sums):
            ptx_hopper.store_float(b, b.add(to, i32(e * apart)), x)

    return lay_down_


def add_from(n: int, apart: int) -> Any:
    """Return ``add_from(sums, place, block) -> sums``, which adds another block's stored sums."""
    kind = floats(n // 2)

    @emitted(kind, kind, int32, int32)
    def add_from_(b, sums, source, block):
        there = ptx_hopper.address_in(b, source, block)
        return [
            b.fadd(x, ptx_hopper.load_float_from(b, there, e * apart)) for e, x in enumerate(sums)
        ]

    return add_from_


def unit_of_starts(start: bool) -> Any:
    """Return ``unit(scale)``, the factor for the log-sum-exp in `load_statistics`.

    With `start`, the factor is -1 / scale, because the log-sum-exp is part of the unscaled initial
    scores. Without `start`, the factor is -log2 e, because the result is added to the exponent of
    exp2.
    """

    @emitted(float32, float32)
    def unit(b, scale):
        return b.fmul(ptx.reciprocal(b, scale), f32(-1.0)) if start else f32(-LOG2E)

    return unit
