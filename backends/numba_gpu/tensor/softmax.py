"""Numba intrinsics for the online softmax, on score fragments in the layout of `mma_tiles`."""

from typing import Any

from llvmlite import ir
from numba.cuda import types

from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import F32, I32, Values, emitted, f32, floats, i32
from flashsim.backends.numba_gpu.mma_tiles import elements, lane_of

LOG2E = 1.4426950408889634
NEG_INF = float("-inf")


def tanh(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return tanh(x) as 1 - 2 / (1 + e^2x), with an error of a few 1e-7."""
    power = ptx.exp2(b, b.fmul(x, f32(2 * LOG2E)))
    return b.fsub(f32(1.0), b.fmul(f32(2.0), ptx.reciprocal(b, b.fadd(power, f32(1.0)))))


def scale_scores(blocks: int, n: int, softcap: bool) -> Any:
    """Return ``scale_scores(s, scale, cap) -> s``: cap tanh(scale s / cap).

    Without a softcap, ``scale_scores`` returns scale s.
    """
    kind = floats(blocks * n // 2)

    @emitted(kind, kind, types.float32, types.float32)
    def scale_scores_(b: ir.IRBuilder, s: Values, scale: ir.Value, cap: ir.Value) -> Values:
        s = [b.fmul(x, scale) for x in s]
        if not softcap:
            return s
        inverse = ptx.reciprocal(b, cap)
        return [b.fmul(cap, tanh(b, b.fmul(x, inverse))) for x in s]

    return scale_scores_


def mask_rows(blocks: int, n: int, left: bool, right: bool) -> Any:
    """Return ``mask_rows(s, query, key, offset, key_stop, left, right) -> s``.

    The function sets masked scores to -inf. Query q sees keys ``q + offset - left <= k <= q +
    offset + right`` with k < key_stop. `query` and `key` are the first query and key of the warp. A
    limit (`left` or `right`) that is off adds no instructions.
    """
    kind = floats(blocks * n // 2)

    @emitted(kind, kind, *[types.int32] * 6)
    def mask_rows_(b: ir.IRBuilder, s: Values, *place: ir.Value) -> Values:
        query, key, offset, key_stop, window_left, window_right = place
        lane, limits = lane_of(b), {}
        column = b.add(key, b.shl(b.and_(lane, i32(3)), i32(1)))
        last = b.sub(b.sub(key_stop, i32(1)), column)  # compared with constants below
        centre = b.sub(b.add(b.add(query, b.lshr(lane, i32(2))), offset), column)
        for i in range(blocks):
            for half in range(2):
                here = b.add(centre, i32(i * 16 + half * 8))
                end = b.add(here, window_right)
                high = b.select(b.icmp_signed("<", end, last), end, last) if right else last
                limits[i, half] = high, b.sub(here, window_left) if left else None
        masked = list(s)
        for at, i, c, x in elements(blocks, n):
            high, low = limits[i, x // 2]
            place = i32(c * 8 + x % 2)
            keep = b.icmp_signed("<=", place, high)
            if low is not None:
                keep = b.and_(keep, b.icmp_signed(">=", place, low))
            masked[at] = b.select(keep, s[at], f32(NEG_INF))
        return masked

    return mask_rows_


def row_max(blocks: int, n: int) -> Any:
    """Return ``row_max(m, s) -> m``, which updates the running maximum of the lane's rows."""

    @emitted(floats(2 * blocks), floats(2 * blocks), floats(blocks * n // 2))
    def row_max_(b: ir.IRBuilder, m: Values, s: Values) -> Values:
        top = list(m)
        for at, i, _, x in elements(blocks, n):
            if x % 2 == 0:  # two neighbours first: halves the dependency chain
                row, pair = 2 * i + x // 2, ptx.maximum(b, s[at], s[at + 1])
                top[row] = ptx.maximum(b, top[row], pair)
        for mask in (1, 2):  # the quad's four lanes share the row
            top = [ptx.maximum(b, t, ptx.shuffle_xor(b, t, mask)) for t in top]
        return top

    return row_max_


def row_max_of_bits(n: int) -> Any:
    """Return ``row_max_of_bits(m, s) -> m, again``: a faster `row_max` for a block of 16 rows.

    The function compares floats as integers, three per instruction (from sm_90 on). Unless two
    floats are both negative, they have the same order as the integers with their bits. If a lane
    has seen only negative floats in a row, `again` is true, and the warp must call `row_max`.
    """

    @emitted([floats(2), types.boolean], floats(2), floats(n // 2))
    def row_max_of_bits_(b: ir.IRBuilder, m: Values, s: Values) -> list[Any]:
        def larger(x: ir.Value, y: ir.Value) -> ir.Value:
            return b.select(b.icmp_signed(">", x, y), x, y)

        top = []
        for row in range(2):
            chains = [b.bitcast(m[row], I32), i32(-(1 << 31))]
            scores = [b.bitcast(s[at], I32) for at, _, _, x in elements(1, n) if x // 2 == row]
            for c in range(0, len(scores), 2):
                chain = larger(larger(chains[c // 2 % 2], scores[c]), scores[c + 1])
                chains[c // 2 % 2] = chain
            top.append(larger(*chains))
        again = ptx.any_lane(b, b.icmp_signed("<", b.or_(*top), i32(0)))
        for mask in (1, 2):  # the quad's four lanes share the row
            others = [ptx.shuffle_xor(b, b.bitcast(t, F32), mask) for t in top]
            top = [larger(t, b.bitcast(o, I32)) for t, o in zip(top, others, strict=True)]
        return [[b.bitcast(t, F32) for t in top], again]

    return row_max_of_bits_


def softmax_base(blocks: int) -> Any:
    """Return ``softmax_base(top, to_log2) -> base``, which converts the row maxima to base 2.

    `base` is 0 until a row has seen a key. A base of 0 avoids inf - inf: a row without keys has
    scores of -inf, and 2^(-inf - 0) = 0.
    """
    kind = floats(2 * blocks)

    @emitted(kind, kind, types.float32)
    def softmax_base_(b: ir.IRBuilder, top: Values, to_log2: ir.Value) -> Values:
        none = [b.fcmp_ordered("==", t, f32(NEG_INF)) for t in top]
        return [b.select(e, f32(0.0), b.fmul(t, to_log2)) for e, t in zip(none, top, strict=True)]

    return softmax_base_


def rescaling(blocks: int) -> Any:
    """Return ``rescaling(m, base, to_log2) -> alpha``: exp(m - m_new), a factor for old sums."""
    kind = floats(2 * blocks)

    @emitted(kind, kind, kind, types.float32)
    def rescaling_(b: ir.IRBuilder, m: Values, base: Values, to_log2: ir.Value) -> Values:
        return [ptx.exp2(b, b.fsub(b.fmul(x, to_log2), y)) for x, y in zip(m, base, strict=True)]

    return rescaling_


def scale_rows(blocks: int, n: int) -> Any:
    """Return ``scale_rows(c, factors) -> c``, which multiplies a lane's rows by their factors."""
    kind = floats(blocks * n // 2)

    @emitted(kind, kind, floats(2 * blocks))
    def scale_rows_(b: ir.IRBuilder, c: Values, factors: Values) -> Values:
        return [b.fmul(c[at], factors[2 * i + x // 2]) for at, i, _, x in elements(blocks, n)]

    return scale_rows_


def exponentials(blocks: int, n: int) -> Any:
    """Return ``exponentials(s, base, l, alpha, to_log2) -> p, l``, which computes P and row sums.

    P is exp(S - m_new), and l becomes alpha l plus the row sums of P. Each lane sums only its own
    columns of P. The four lanes of a quad add up their sums after the last visit.
    """
    s_kind, l_kind = floats(blocks * n // 2), floats(2 * blocks)

    @emitted([s_kind, l_kind], s_kind, l_kind, l_kind, l_kind, types.float32)
    def exponentials_(
        b: ir.IRBuilder, s: Values, base: Values, l: Values, alpha: Values, to_log2: ir.Value
    ) -> list[Values]:
        p, l = list(s), [b.fmul(x, y) for x, y in zip(l, alpha, strict=True)]
        minus = [b.fsub(f32(-0.0), x) for x in base]
        for at, i, _, x in elements(blocks, n):
            row = 2 * i + x // 2
            p[at] = ptx.exp2(b, b.fma(s[at], to_log2, minus[row]))
            if x % 2:  # two neighbours first: halves the dependency chain
                l[row] = b.fadd(l[row], b.fadd(p[at - 1], p[at]))
        return [p, l]

    return exponentials_


def row_by_row(n: int) -> Any:
    """Return ``row_by_row(m, top, s, l, to_log2) -> p, l, alpha``, one online-softmax step.

    Row 0 of a lane is computed before row 1. The function combines `softmax_base`, `rescaling` and
    `exponentials`; `m` and `top` are the maxima before and after this visit. The assembler ptxas
    first schedules the instructions that begin the longest dependency chain. Exponentials take
    longest, so they should begin early and never wait. So row 0's sums form two chains, and row 1's
    sums one chain.
    """
    s_kind, pair = floats(n // 2), floats(2)

    @emitted([s_kind, pair, pair], pair, pair, s_kind, pair, types.float32)
    def row_by_row_(
        b: ir.IRBuilder, m: Values, top: Values, s: Values, l: Values, to_log2: ir.Value
    ) -> list[Values]:
        p, sums, alphas = list(s), [], []
        for row in range(2):
            none = b.fcmp_ordered("==", top[row], f32(NEG_INF))
            base = b.select(none, f32(0.0), b.fmul(top[row], to_log2))
            minus = b.fsub(f32(-0.0), base)
            alpha = ptx.exp2(b, b.fma(m[row], to_log2, minus))
            chains = [b.fmul(l[row], alpha), f32(0.0)]
            for at, _, c, x in elements(1, n):
                if x // 2 != row:
                    continue
                p[at] = ptx.exp2(b, b.fma(s[at], to_log2, minus))
                if x % 2:  # two neighbours first: halves the dependency chain
                    chain = 0 if row else c % 2
                    chains[chain] = b.fadd(chains[chain], b.fadd(p[at - 1], p[at]))
            sums.append(chains[0] if row else b.fadd(*chains))
            alphas.append(alpha)
        return [p, sums, alphas]

    return row_by_row_


def finish_rows(blocks: int) -> Any:
    """Return ``finish_rows(m, l, to_natural) -> 1 / l, lse``, which ends each row's softmax.

    For a row that sees no key, the results are 0 and -inf.
    """
    kind = floats(2 * blocks)

    @emitted([kind, kind], kind, kind, types.float32)
    def finish_rows_(b: ir.IRBuilder, m: Values, l: Values, to_natural: ir.Value) -> list[Values]:
        for mask in (1, 2):
            l = [b.fadd(x, ptx.shuffle_xor(b, x, mask)) for x in l]
        inverse, lse = [], []
        for top, total in zip(m, l, strict=True):
            empty = b.fcmp_ordered("==", total, f32(0.0))
            inverse.append(b.select(empty, f32(0.0), ptx.reciprocal(b, total)))
            natural = b.fmul(ptx.log2(b, total), f32(1 / LOG2E))
            value = b.fadd(b.fmul(top, to_natural), natural)
            lse.append(b.select(empty, f32(NEG_INF), value))
        return [inverse, lse]

    return finish_rows_


def finish_rows_with_sink(blocks: int) -> Any:
    """Return ``finish(m, l, to_natural, sink) -> 1 / l, lse``: `finish_rows` with one more score.

    The score `sink` has no value: it adds to the row sum alone. For a row that sees no key, the
    results are 0 and `sink`.
    """
    kind, sums = floats(2 * blocks), finish_rows(blocks).__wrapped__

    @emitted([kind, kind], kind, kind, types.float32, types.float32)
    def finish(
        b: ir.IRBuilder, m: Values, l: Values, to_natural: ir.Value, sink: ir.Value
    ) -> list[Values]:
        inverse, lse = sums(b, m, l, to_natural)
        for row, of_keys in enumerate(lse):
            empty = b.fcmp_ordered("==", of_keys, f32(NEG_INF))
            top = ptx.maximum(b, of_keys, sink)
            parts = [ptx.exp2(b, b.fmul(b.fsub(x, top), f32(LOG2E))) for x in (of_keys, sink)]
            total = b.fadd(*parts)
            share = b.fmul(parts[0], ptx.reciprocal(b, total))
            inverse[row] = b.select(empty, f32(0.0), b.fmul(inverse[row], share))
            natural = b.fmul(ptx.log2(b, total), f32(1 / LOG2E))
            lse[row] = b.select(empty, sink, b.fadd(top, natural))
        return [inverse, lse]

    return finish
