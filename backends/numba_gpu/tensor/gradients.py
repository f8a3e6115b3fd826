"""Numba intrinsics for the gradients of scores, on fragments in the layout of `mma_tiles`."""

from typing import Any

from llvmlite import ir
from numba.cuda import types

from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import Values, emitted, f32, floats, i32
from flashsim.backends.numba_gpu.mma_tiles import elements, lane_of
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E, tanh


def load_rows(blocks: int) -> Any:
    """Return ``load_rows(address) -> values``, which loads a float32 for each of a lane's rows."""

    @emitted(floats(2 * blocks), types.int32)
    def load_rows_(b, address):
        mine = b.add(address, b.shl(b.lshr(lane_of(b), i32(2)), i32(2)))
        return [
            ptx.load_shared_float(b, b.add(mine, i32((i * 16 + half * 8) * 4)))
            for i in range(blocks)
            for half in range(2)
        ]

    return load_rows_


def load_columns(n: int) -> Any:
    """Return ``load_columns(address) -> values``, which loads one float32 per column of a lane."""

    @emitted(floats(n // 4), types.int32)
    def load_columns_(b, address):
        mine = b.add(address, b.shl(b.and_(lane_of(b), i32(3)), i32(3)))
        return [
            value
            for c in range(n // 8)
            for value in ptx.load_shared_pair(b, b.add(mine, i32(c * 32)))
        ]

    return load_columns_


def _per_element(values: Values, by_row: bool, i: int, c: int, x: int) -> ir.Value:
    return values[2 * i + x // 2] if by_row else values[2 * c + x % 2]


def probabilities(blocks: int, n: int, by_row: bool, scaled: bool, softcap: bool) -> Any:
    """Return ``probabilities(s, lse, scale, cap, to_log2) -> p, slope``, where P = exp(S - L).

    `s` is Q K^T, neither scaled nor softcapped. `lse` holds one value for each of the lane's rows
    (for S) or columns (for S^T). `slope` is the softcap's derivative, 1 - tanh^2. `slope` is unused
    without a softcap.
    """
    kind = floats(blocks * n // 2)
    per = floats(2 * blocks if by_row else n // 4)
    slope_kind = kind if softcap else floats(1)

    @emitted([kind, slope_kind], kind, per, *[types.float32] * 3)
    def probabilities_(b, s, lse, scale, cap, to_log2):
        minus = [b.fmul(x, f32(-LOG2E)) for x in lse]
        inverse = ptx.reciprocal(b, cap) if softcap else None
        p, slope = list(s), []
        for at, i, c, x in elements(blocks, n):
            score = b.fmul(s[at], scale) if scaled else s[at]
            if softcap:
                y = tanh(b, b.fmul(score, inverse))
                slope.append(b.fsub(f32(1.0), b.fmul(y, y)))
                score = b.fmul(cap, y)
            p[at] = ptx.exp2(b, b.fma(score, to_log2, _per_element(minus, by_row, i, c, x)))
        return [p, slope or [f32(0.0)]]

    return probabilities_


def score_gradients(blocks: int, n: int, by_row: bool, softcap: bool) -> Any:
    """Return ``score_gradients(p, dp, delta, slope) -> ds``, where dS = P (dP - delta) slope."""
    kind = floats(blocks * n // 2)
    per = floats(2 * blocks if by_row else n // 4)

    @emitted(kind, kind, kind, per, kind if softcap else floats(1))
    def score_gradients_(b, p, dp, delta, slope):
        ds = list(p)
        for at, i, c, x in elements(blocks, n):
            ds[at] = b.fmul(p[at], b.fsub(dp[at], _per_element(delta, by_row, i, c, x)))
            if softcap:
                ds[at] = b.fmul(ds[at], slope[at])
        return ds

    return score_gradients_


def mask_probabilities(blocks: int, n: int, by_row: bool, left: bool, right: bool) -> Any:
    """Return ``mask_probabilities(p, query, key, offset, key_stop, left, right) -> p``.

    The function sets probabilities to 0 where `mask_rows` would mask the scores. The fragment is P
    if `by_row` is true, and otherwise P^T. In a row that sees no key, L = -inf makes exp(S - L)
    infinite, so 0 is selected, not multiplied.
    """
    kind = floats(blocks * n // 2)

    @emitted(kind, kind, *[types.int32] * 6)
    def mask_probabilities_(b, p, *where):
        query, key, offset, key_stop, window_left, window_right = where
        lane = lane_of(b)
        down, across = b.lshr(lane, i32(2)), b.shl(b.and_(lane, i32(3)), i32(1))
        q, k = (down, across) if by_row else (across, down)
        q, k = b.add(b.add(query, q), offset), b.add(key, k)
        distance = b.sub(k, q)  # key - (query + offset) at the lane's first element
        room = b.sub(key_stop, k)  # number of keys from the lane's first to the end
        kept = list(p)
        for at, i, c, x in elements(blocks, n):
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

    return mask_probabilities_
