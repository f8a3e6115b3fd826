"""Numba intrinsics for the online softmax, on score fragments in the layout of `mma_tiles`."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

from llvmlite import ir
from numba.cuda import types

from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import F32, FRAGMENT, I32, Like, Values, emitted, f32, i32
from flashsim.backends.numba_gpu.mma_tiles import elements_of, lane_of

LOG2E = 1.4426950408889634
NEG_INF = float("-inf")


def tanh(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return tanh(x) as 1 - 2 / (1 + e^2x), with an error of a few 1e-7."""
    power = ptx.exp2(b, b.fmul(x, f32(2 * LOG2E)))
    return b.fsub(f32(1.0), b.fmul(f32(2.0), ptx.reciprocal(b, b.fadd(power, f32(1.0)))))


@emitted(Like(0), FRAGMENT, types.float32, types.float32)
def scale_scores(b, s, scale, cap, *, softcap):
    """Return cap tanh(scale s / cap) or, without a softcap, scale s."""
    s = [b.fmul(x, scale) for x in s]
    if not softcap:
        return s
    inverse = ptx.reciprocal(b, cap)
    return [b.fmul(cap, tanh(b, b.fmul(x, inverse))) for x in s]


def masked(b: ir.IRBuilder, s: Values, limits: Sequence[Any]) -> Values:
    """Return scores with -inf wherever a comparison of the element's column with a limit is false.

    For each row of a lane, `limits` has the comparisons: an operator and a number, the limit.
    """
    kept = list(s)
    for at, i, c, x in elements_of(s, limits):
        column = i32(c * 8 + x % 2)
        tests = (b.icmp_signed(operator, column, n) for operator, n in limits[2 * i + x // 2])
        kept[at] = b.select(reduce(b.and_, tests), s[at], f32(NEG_INF))
    return kept


@emitted(Like(0), FRAGMENT, *[types.int32] * 6)
def mask_rows(b, s, *place, blocks, left, right):
    """Return ``mask_rows(s, query, key, offset, key_stop, left, right)``, with masked scores -inf.

    Query q sees keys ``q + offset - left <= k <= q + offset + right`` with k < key_stop. `query`
    and `key` are the first query and key of the warp. A limit (`left` or `right`) that is off adds
    no instructions.
    """
    query, key, offset, key_stop, window_left, window_right = place
    lane, limits = lane_of(b), []
    column = b.add(key, b.shl(b.and_(lane, i32(3)), i32(1)))
    last = b.sub(b.sub(key_stop, i32(1)), column)  # compared with constants below
    centre = b.sub(b.add(b.add(query, b.lshr(lane, i32(2))), offset), column)
    for i in range(blocks):
        for half in range(2):
            here = b.add(centre, i32(i * 16 + half * 8))
            end = b.add(here, window_right)
            high = b.select(b.icmp_signed("<", end, last), end, last) if right else last
            low = [(">=", b.sub(here, window_left))] if left else []
            limits.append([("<=", high), *low])
    return masked(b, s, limits)


@emitted(Like(0), FRAGMENT, FRAGMENT)
def row_max(b, m, s):
    """Return the running maximum of the lane's rows, `m`, updated by the scores `s`."""
    top = list(m)
    for at, i, _, x in elements_of(s, m):
        if x % 2 == 0:  # two neighbours first: halves the dependency chain
            row, pair = 2 * i + x // 2, ptx.maximum(b, s[at], s[at + 1])
            top[row] = ptx.maximum(b, top[row], pair)
    for mask in (1, 2):  # the quad's four lanes share the row
        top = [ptx.maximum(b, t, ptx.shuffle_xor(b, t, mask)) for t in top]
    return top


@emitted([Like(0), types.boolean], FRAGMENT, FRAGMENT)
def row_max_of_bits(b, m, s):
    """Return the new maxima of a block of 16 rows faster than `row_max`, and `again`.

    The function compares floats as integers, three per instruction (from sm_90 on). Unless two
    floats are both negative, they have the same order as the integers with their bits. If a lane
    has seen only negative floats in a row, `again` is true, and the warp must call `row_max`.
    """

    def larger(x: ir.Value, y: ir.Value) -> ir.Value:
        return b.select(b.icmp_signed(">", x, y), x, y)

    top = []
    for row in range(2):
        chains = [b.bitcast(m[row], I32), i32(-(1 << 31))]
        scores = [b.bitcast(s[at], I32) for at, _, _, x in elements_of(s, m) if x // 2 == row]
        for c in range(0, len(scores), 2):
            chain = larger(larger(chains[c // 2 % 2], scores[c]), scores[c + 1])
            chains[c // 2 % 2] = chain
        top.append(larger(*chains))
    again = ptx.any_lane(b, b.icmp_signed("<", b.or_(*top), i32(0)))
    for mask in (1, 2):  # the quad's four lanes share the row
        others = [ptx.shuffle_xor(b, b.bitcast(t, F32), mask) for t in top]
        top = [larger(t, b.bitcast(o, I32)) for t, o in zip(top, others, strict=True)]
    return [[b.bitcast(t, F32) for t in top], again]


@emitted(Like(0), FRAGMENT, types.float32)
def softmax_base(b, top, to_log2):
    """Return the row maxima `top`, converted to base 2.

    The base is 0 until a row has seen a key. A base of 0 avoids inf - inf: a row without keys has
    scores of -inf, and 2^(-inf - 0) = 0.
    """
    none = [b.fcmp_ordered("==", t, f32(NEG_INF)) for t in top]
    return [b.select(e, f32(0.0), b.fmul(t, to_log2)) for e, t in zip(none, top, strict=True)]


@emitted(Like(0), FRAGMENT, FRAGMENT, types.float32)
def rescaling(b, m, base, to_log2):
    """Return alpha = exp(m - m_new), a factor for old sums."""
    return [ptx.exp2(b, b.fsub(b.fmul(x, to_log2), y)) for x, y in zip(m, base, strict=True)]


@emitted(Like(0), FRAGMENT, FRAGMENT)
def scale_rows(b, c, factors):
    """Return `c` with a lane's rows multiplied by their factors."""
    return [b.fmul(c[at], factors[2 * i + x // 2]) for at, i, _, x in elements_of(c, factors)]


@emitted([Like(0), Like(1)], *[FRAGMENT] * 4, types.float32)
def exponentials(b, s, base, l, alpha, to_log2):
    """Return P = exp(S - m_new), and l: alpha l plus the row sums of P.

    Each lane sums only its own columns of P. The four lanes of a quad add up their sums after the
    last visit.
    """
    p, l = list(s), [b.fmul(x, y) for x, y in zip(l, alpha, strict=True)]
    minus = [b.fsub(f32(-0.0), x) for x in base]
    for at, i, _, x in elements_of(s, base):
        row = 2 * i + x // 2
        p[at] = ptx.exp2(b, b.fma(s[at], to_log2, minus[row]))
        if x % 2:  # two neighbours first: halves the dependency chain
            l[row] = b.fadd(l[row], b.fadd(p[at - 1], p[at]))
    return [p, l]


@emitted([Like(2), Like(0), Like(0)], *[FRAGMENT] * 4, types.float32)
def row_by_row(b, m, top, s, l, to_log2):
    """Return P, l and alpha of one online-softmax step, for a block of 16 rows.

    Row 0 of a lane is computed before row 1. The function combines `softmax_base`, `rescaling` and
    `exponentials`; `m` and `top` are the maxima before and after this visit. The assembler ptxas
    first schedules the instructions that begin the longest dependency chain. Exponentials take
    longest, so they should begin early and never wait. So row 0's sums form two chains, and row 1's
    sums one chain.
    """
    p, sums, alphas = list(s), [], []
    for row in range(2):
        none = b.fcmp_ordered("==", top[row], f32(NEG_INF))
        base = b.select(none, f32(0.0), b.fmul(top[row], to_log2))
        minus = b.fsub(f32(-0.0), base)
        alpha = ptx.exp2(b, b.fma(m[row], to_log2, minus))
        chains = [b.fmul(l[row], alpha), f32(0.0)]
        for at, _, c, x in elements_of(s, m):
            if x // 2 != row:
                continue
            p[at] = ptx.exp2(b, b.fma(s[at], to_log2, minus))
            if x % 2:  # two neighbours first: halves the dependency chain
                chain = 0 if row else c % 2
                chains[chain] = b.fadd(chains[chain], b.fadd(p[at - 1], p[at]))
        sums.append(chains[0] if row else b.fadd(*chains))
        alphas.append(alpha)
    return [p, sums, alphas]


@emitted([Like(0), Like(0)], FRAGMENT, FRAGMENT, types.float32)
def finish_rows(b, m, l, to_natural):
    """Return 1 / l and the log-sum-exp of each row, which end the row's softmax.

    For a row that sees no key, the results are 0 and -inf.
    """
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


@emitted([Like(0), Like(0)], FRAGMENT, FRAGMENT, types.float32, types.float32)
def finish_rows_with_sink(b, m, l, to_natural, sink):
    """Return the results of `finish_rows` with one more score, `sink`.

    The score `sink` has no value: it adds to the row sum alone. For a row that sees no key, the
    results are 0 and `sink`.
    """
    inverse, lse = finish_rows.__wrapped__(b, m, l, to_natural)
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
