"""The decode kernel of the CPU engine, for one query per head, as in text generation.

Memory bandwidth limits this kernel, so it processes all query heads of a key head together, and
reads K and V once, in memory order (`micro_kernels.decode_gemv`). As in FlashDecoding, each head's
keys are split into parts, so that several threads can work on one head. The thread that finishes a
head's last part merges the parts. The number of parts depends only on the shape, so results do not
depend on the number of threads.
"""

import math

import numpy as np

from flashsim.engines.cpu.bf16_dot.operations import begin_tiles, end_tiles
from flashsim.engines.cpu.kernels_forward import stopped
from flashsim.engines.cpu.micro_kernels.plain import (
    dots,
    narrow,
    side_by_side,
    softmax_along,
    weigh,
    widen,
)
from flashsim.engines.cpu.primitives.arrays import panel_array
from flashsim.engines.cpu.primitives.atomics import arrive, fetch_add
from flashsim.engines.cpu.primitives.borrowed_args import borrow
from flashsim.engines.cpu.primitives.inline_jit import part
from flashsim.engines.cpu.primitives.packing import SIDE, copy_rows, fill, look, room_for, widened
from flashsim.engines.cpu.scores import Place, finish_scores, visible_rows
from flashsim.engines.cpu.tables import NOTE
from flashsim.schedule.schedule import MASKED

#: The fewest visits per part, and the number of work tiles to aim for, if there are enough keys.
VISITS, WORK_TILES = 4, 64
#: The heads whose scores are computed at once: all that an AMX tile holds.
HEADS = SIDE


def parts_of(loops: int, visits: int) -> int:
    """Return the number of parts into which a key head's `visits` key tiles are split."""
    return max(1, min(visits // VISITS, -(-WORK_TILES // loops)))


@part
def decode(cpu, q, k, v, out, lse, parts, shape, tiles, rules, notes, counter):
    """Run FlashAttention-2's Algorithm 1 for one query per head; write flat out and lse.

    Unflattened, out has shape (heads, dv), and lse has shape (heads,). `parts` holds four flat
    arrays: O (parts, heads, dv), m and l (parts, heads) of each part of the keys, and the number of
    finished parts per key head (loops,), initially 0.
    """
    group, d, t, w = shape.heads // shape.kv_heads, shape.d, q.dtype, max(cpu.width, 2 * SIDE)
    rows = (group + HEADS - 1) // HEADS * HEADS
    Q, O = panel_array(rows * padded(d), t), panel_array(rows * padded(shape.dv), t)
    S = panel_array(HEADS * ((shape.block_k + w - 1) // w * w), t)  # whole panels of keys
    m, l, alpha = panel_array(group, t), panel_array(group, t), panel_array(group, t)
    floats = room_for(group * max(d, shape.dv), t, rules.rounding)  # of Q and of O
    factor = panel_array(1, t)
    own, arrays = (Q, O, m, l, alpha, S, floats, factor), (q, k, v, out, lse)
    take_parts(cpu, arrays, parts, shape, tiles, rules, notes, counter, own)


@part
def take_parts(cpu, arrays, parts, shape, tiles, rules, notes, counter, own):
    """Process parts of the keys until none is left; threads take parts by a shared counter."""
    state = borrow(own)  # the caller keeps the arrays alive
    (q, k, v, out, lse), (Q, O, m, l, _, _, floats, factor) = arrays, state
    sums, tops, totals, arrived = parts
    d, dv, lo = shape.d, shape.dv, padded(shape.dv)
    group, heads, n = shape.heads // shape.kv_heads, tiles.sets.size, tops.size // tiles.sets.size
    real = O.dtype.type
    # Q is multiplied by a power of two of the scale, which is exact and keeps scores in range.
    factor[0], power = math.frexp(rules.scale)
    begin, visits = tiles.ptr[0], tiles.ptr[1] - tiles.ptr[0]
    begin_tiles(cpu, Q)
    while True:
        work_tile = fetch_add(counter, 0)
        if work_tile >= arrived.size * n or stopped(counter):
            break
        loop, number = work_tile // n, work_tile % n
        h0 = tiles.sets[tiles.set_ptr[loop]]
        head0 = h0 // group * shape.n_kv
        of_q, q0 = widened(cpu, floats, q, h0 * d, group * d, rules.rounding)
        copy_rows(Q, padded(d), of_q, q0, group, d, real(math.ldexp(1.0, power)))
        side_by_side(cpu, Q, padded(d), group, rules.rounding)
        fill(O, real(0))
        fill(m, real(-np.inf))
        fill(l, real(0))
        for at in range(begin + visits * number // n, begin + visits * (number + 1) // n):
            if stopped(counter):
                break
            decode_visit(cpu, k, v, shape, tiles, rules, state, at, h0, group, head0)
            if notes.visits.size > 0:
                j = tiles.inner[at]
                for h in range(h0, h0 + group):
                    notes.visits[h, at] = NOTE + tiles.other[j, 1] - tiles.other[j, 0]
        for c in range(group):
            row = number * heads + h0 + c
            tops[row], totals[row] = m[c], l[c]
            for x in range(dv):
                sums[np.uint64(row * dv + x)] = O[np.uint64(c * lo + x)]
            if notes.steps.size > 0:
                notes.steps[h0 + c, 0] = 1
        if arrive(arrived, loop) < n - 1:
            continue
        to, first = (out, h0 * dv) if rules.rounding is None else (floats, 0)
        put_together(to, first, lse, sums, tops, totals, n, heads, h0, group, dv)
        if rules.rounding is not None:  # in 16 bits, numbers that are too large become infinite
            narrow(cpu, floats, 0, out, h0 * dv, group * dv, rules.rounding)
            widen(cpu, floats, 0, out, h0 * dv, group * dv, rules.rounding)
        look(counter, to, first, group * dv)
    end_tiles(cpu, Q)


@part
def put_together(out, o0, lse, sums, tops, totals, parts, heads, h0, group, dv):
    """Merge the key parts of heads h0 .. h0 + group - 1 in order, and write out and lse."""
    for h in range(h0, h0 + group):
        base, total, o = tops[h], totals.dtype.type(0), o0 + (h - h0) * dv
        for row in range(h, parts * heads, heads):
            base = max(base, tops[row])
        for row in range(h, parts * heads, heads):  # the maxima are replaced by weights
            tops[row] = np.exp(tops[row] - base) if totals[row] != 0 else totals.dtype.type(0)
            total += tops[row] * totals[row]
        seen = total != 0  # no key seen: out = 0, lse = -inf
        lse[h] = base + np.log(total) if seen else -np.inf
        for x in range(dv):
            out[np.uint64(o + x)] = 0
        for row in range(h, parts * heads, heads):
            weight = tops[row] / total if seen else total
            for x in range(dv):
                out[np.uint64(o + x)] += weight * sums[np.uint64(row * dv + x)]


@part
def decode_visit(cpu, k, v, shape, tiles, rules, state, at, h0, group, head0):
    """Process one key tile for query heads h0 .. h0 + group - 1, which share a key head."""
    Q, O, m, l, alpha, S, _, factor = state
    w, d, dv, j = cpu.width, shape.d, shape.dv, tiles.inner[at]
    lq, lo, ld = padded(d), padded(dv), S.size // HEADS
    k0, k1 = tiles.other[j, 0], tiles.other[j, 1]
    first, last = 0, k1 - k0
    if tiles.kind[at] == MASKED and rules.banded:  # the band keeps one run of keys
        first, last = visible_rows(rules, k0 - (tiles.own[0, 0] + tiles.own[0, 2]), 1, last, 1)
        if last <= first:
            return
    rows, key0 = last - first, head0 + k0 + first
    lanes = padded(rows)
    plain = rules.softcap[0] == 0 and rules.bias.size == 0 and tiles.keep_at[at] < 0
    for h in range(0, group, HEADS):
        heads = min(HEADS, group - h)
        dots(cpu, S, ld, k, key0 * d, d, Q, h * lq, lq, rows, heads, factor, rules.rounding)
        for c in range(0, 0 if plain else rows, w):
            head = h0 + h
            bias = head // shape.heads * rules.bias_batch + head % shape.heads * rules.bias_head
            keep = -1 if tiles.keep_at[at] < 0 else tiles.keep_at[at] + first + c
            strides = bias + k0 + first + c, rules.bias_head, 1, keep, 0
            position = Place(0, 0, 0, *strides, 0, 0, 0, 0, 0, 0, heads)
            finish_scores(
                *(cpu, S, c, ld, 0, heads, min(w, rows - c)),
                *(rules, position, False, tiles.keep, None, None),
            )
        for r in range(heads):
            for c in range(rows, lanes):
                S[r * ld + c] = -np.inf
        softmax_along(cpu, S, ld, heads, lanes, m, l, alpha, h, rules.rounding)
        for r in range(h, h + heads):
            if alpha[r] != 1:
                for x in range(r * lo, r * lo + lo):
                    O[np.uint64(x)] *= alpha[r]
        weigh(cpu, O, h * lo, lo, S, ld, v, key0 * dv, dv, rows, heads, rules.rounding)


@part
def padded(n):
    """Return n rounded up to a multiple of 32, so that floats and pairs fill registers."""
    return (n + 2 * SIDE - 1) // (2 * SIDE) * (2 * SIDE)
