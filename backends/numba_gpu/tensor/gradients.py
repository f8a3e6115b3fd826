"""Numba intrinsics for the gradients of scores, on fragments in the layout of `mma_tiles`."""

from llvmlite import ir
from numba.cuda import types

from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import FRAGMENT, Like, Values, emitted, f32, floats, i32
from flashsim.backends.numba_gpu.mma_tiles import elements, lane_of
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E, tanh


@emitted(lambda c: floats(2 * c.blocks), types.int32)
def load_rows(b, address, *, blocks):
    """Load a float32 for each of a lane's rows."""
    mine = b.add(address, b.shl(b.lshr(lane_of(b), i32(2)), i32(2)))
    return [
        ptx.load_shared_float(b, b.add(mine, i32((i * 16 + half * 8) * 4)))
        for i in range(blocks)
        for half in range(2)
    ]


@emitted(lambda c: floats(c.n // 4), types.int32)
def load_columns(b, address, *, n):
    """Load one float32 per column of a lane, of `n` columns of a tile."""
    mine = b.add(address, b.shl(b.and_(lane_of(b), i32(3)), i32(3)))
    return [
        value for c in range(n // 8) for value in ptx.load_shared_pair(b, b.add(mine, i32(c * 32)))
    ]


def _per_element(values: Values, by_row: bool, i: int, c: int, x: int) -> ir.Value:
    return values[2 * i + x // 2] if by_row else values[2 * c + x % 2]


@emitted(
    lambda c: [Like(0), Like(0) if c.softcap else floats(1)],
    *(FRAGMENT, FRAGMENT, types.float32, types.float32, types.float32),
)
def probabilities(b, s, lse, scale, cap, to_log2, *, blocks, by_row, scaled, softcap):
    """Return P = exp(S - L), and the softcap's derivative, 1 - tanh^2, unused without a softcap.

    `s` is Q K^T, neither scaled nor softcapped. `lse` holds one value for each of the lane's rows
    (for S) or columns (for S^T).
    """
    minus = [b.fmul(x, f32(-LOG2E)) for x in lse]
    inverse = ptx.reciprocal(b, cap) if softcap else None
    p, slope = list(s), []
    for at, i, c, x in elements(blocks, 2 * len(s) // blocks):
        score = b.fmul(s[at], scale) if scaled else s[at]
        if softcap:
            y = tanh(b, b.fmul(score, inverse))
            slope.append(b.fsub(f32(1.0), b.fmul(y, y)))
            score = b.fmul(cap, y)
        p[at] = ptx.exp2(b, b.fma(score, to_log2, _per_element(minus, by_row, i, c, x)))
    return [p, slope or [f32(0.0)]]


@emitted(Like(0), *[FRAGMENT] * 4)
def score_gradients(b, p, dp, delta, slope, *, blocks, by_row, softcap):
    """Return dS = P (dP - delta) slope."""
    ds = list(p)
    for at, i, c, x in elements(blocks, 2 * len(p) // blocks):
        ds[at] = b.fmul(p[at], b.fsub(dp[at], _per_element(delta, by_row, i, c, x)))
        if softcap:
            ds[at] = b.fmul(ds[at], slope[at])
    return ds


@emitted(Like(0), FRAGMENT, *[types.int32] * 6)
def mask_probabilities(b, p, *where, blocks, by_row, left, right):
    """Return ``mask_probabilities(p, query, key, offset, key_stop, left, right)``.

    The function sets probabilities to 0 where `mask_rows` would mask the scores. The fragment is P
    if `by_row` is true, and otherwise P^T. In a row that sees no key, L = -inf makes exp(S - L)
    infinite, so 0 is selected, not multiplied.
    """
    query, key, offset, key_stop, window_left, window_right = where
    lane = lane_of(b)
    down, across = b.lshr(lane, i32(2)), b.shl(b.and_(lane, i32(3)), i32(1))
    q, k = (down, across) if by_row else (across, down)
    q, k = b.add(b.add(query, q), offset), b.add(key, k)
    distance = b.sub(k, q)  # key - (query + offset) at the lane's first element
    room = b.sub(key_stop, k)  # number of keys from the lane's first to the end
    kept = list(p)
    for at, i, c, x in elements(blocks, 2 * len(p) // blocks):
        rows, cols = i * 16 + x // 2 * 8, c * 8 + x % 2
        dq, dk = (rows, cols) if by_row else (cols, rows)
        keep = b.icmp_signed(">", room, i32(dk))
        here = b.add(distance, i32(dk - dq))
        if right:
            keep = b.and_(keep, b.icmp_signed("<=", here, window_right))
        if left:
            limit = b.sub(i32(0), window_left)
            keep = b.and_(keep, b.icmp_signed(">=", here, limit))
        kept[at] = b.select(keep, p[at], f32(0.0))
    return kept
