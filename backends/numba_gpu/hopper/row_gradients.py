"""Numba intrinsics for the Q-outer dQ kernel on Hopper, in which rows of scores are queries."""

from numba.cuda import types

from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import FRAGMENT, Like, emitted, f32, floats, i32
from flashsim.backends.numba_gpu.hopper import ptx as ptx_hopper
from flashsim.backends.numba_gpu.mma_tiles import elements_of, lane_of
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E, NEG_INF

int32, int64, float32 = types.int32, types.int64, types.float32


@emitted([floats(2), floats(2), int32], int64, int64, int32, int32)
def own_statistics(b, lse, delta, row, stop):
    """Return ``own_statistics``, which loads the log-sum-exp and delta of a thread's rows.

    The signature is ``own_statistics(lse, delta, row, stop) -> lse, delta, bytes``. The returned
    log-sum-exp is in base 2. If a row does not exist or sees no key, the log-sum-exp is +inf, so
    that P is exactly 0. `row` is the warp's first row. `lse` and `delta` are addresses of the
    values of row 0. `bytes` counts each row once, although several threads load it.
    """
    tops, deltas, moved = [], [], i32(0)
    lane = lane_of(b)
    first = b.icmp_unsigned("==", b.and_(lane, i32(3)), i32(0))
    for half in range(2):
        mine = b.add(row, b.add(b.lshr(lane, i32(2)), i32(8 * half)))
        exists = b.icmp_signed("<", mine, stop)
        far = b.sext(b.shl(mine, i32(2)), lse.type)
        x = ptx.load_float_if(b, b.add(lse, far), exists)
        none = b.or_(b.fcmp_ordered("==", x, f32(NEG_INF)), b.not_(exists))
        tops.append(b.select(none, f32(-NEG_INF), b.fmul(x, f32(LOG2E))))
        deltas.append(ptx.load_float_if(b, b.add(delta, far), exists))
        moved = b.add(moved, b.select(b.and_(exists, first), i32(4), i32(0)))
    return [tops, deltas, moved]


@emitted(Like(0), FRAGMENT, FRAGMENT, float32, float32)
def row_probabilities(b, s, lse, to_log2, cap, *, softcap):
    """Return P = exp2(c S - lse); with a softcap, times its derivative, 1 - tanh^2."""
    minus, p = [b.fmul(x, f32(-1.0)) for x in lse], list(s)
    inverse = ptx.reciprocal(b, cap) if softcap else None
    for at, _, _, x in elements_of(s, lse):
        p[at] = ptx.exp2(b, b.fma(s[at], to_log2, minus[x // 2]))
        if softcap:  # S may be -inf
            t = ptx.maximum(b, b.fmul(s[at], inverse), f32(-1.0))
            p[at] = b.fmul(p[at], b.fsub(f32(1.0), b.fmul(t, t)))
    return p


@emitted(Like(0), *[FRAGMENT] * 3)
def row_gradients(b, p, dp, delta):
    """Return dS = P (dP - delta)."""
    return [b.fmul(p[at], b.fsub(dp[at], delta[x // 2])) for at, _, _, x in elements_of(p, delta)]


@emitted(Like(0), FRAGMENT, int32, int32)
def add_halves(b, dq, scratch, group):
    """Return the sum of the dQ of two warpgroups.

    Only warpgroup 0 gets the sum. Warpgroup 1 passes its dQ through `scratch` (16 KiB of shared
    memory), 64 columns at a time. Named barrier 1 signals both that `scratch` is free and that it
    is full.
    """
    thread = b.and_(ptx.special(b, "tid.x"), i32(127))
    mine, total = b.add(scratch, b.shl(thread, i32(2))), list(dq)
    gives = b.icmp_unsigned("==", group, i32(1))
    for first in range(0, len(dq), 32):
        ptx_hopper.named_sync(b, i32(1), threads=256)  # warpgroup 0 has read the last columns
        with b.if_then(gives):
            for e in range(32):
                ptx_hopper.store_float(b, b.add(mine, i32(512 * e)), dq[first + e])
        ptx_hopper.named_sync(b, i32(1), threads=256)  # the other half's columns are complete
        for e in range(32):  # warpgroup 1's sums are not used
            other = ptx.load_shared_float(b, b.add(mine, i32(512 * e)))
            total[first + e] = b.fadd(dq[first + e], other)
    return total
