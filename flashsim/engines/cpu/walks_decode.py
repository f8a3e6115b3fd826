"""The walk of one query a head, as in generating text: as fast as K and V come from memory.

A tile has one row of scores, so the heads that read one key head are walked together. K and V are
read along their rows, a register at a time: S by `dots`, O = alpha O + P V with the columns of V
in the lanes. Each brings near what the other reads next: V, and K of the next tile. In between,
softmax works on panels as narrow as one register (`registers.narrow`), with heads in the lanes.

The keys of a head are cut into parts, each with its own maximum, sum and output (flash-decoding's
splits), so that one head serves several threads; `merged` puts the parts together. How many there
are follows from the shape alone, and with it every result.
"""

from __future__ import annotations

import numpy as np

from flashsim.engines.cpu.micro_kernels.codegen import HEADS
from flashsim.engines.cpu.micro_kernels.plain import dots, online_softmax, weigh
from flashsim.engines.cpu.primitives.atomics import fetch_add
from flashsim.engines.cpu.primitives.packing import (
    SIDE,
    copy_rows,
    panel_array,
    panels_of,
    room_for,
    widened,
)
from flashsim.engines.cpu.primitives.parts import part
from flashsim.engines.cpu.scores import (
    Place,
    finish_scores,
    round_panel,
    visible_rows,
)
from flashsim.engines.cpu.tables import NOTE
from flashsim.engines.cpu.walks import stopped
from flashsim.schedule.schedule import MASKED

#: The least visits of a part, and how many items a walk has if keys allow.
VISITS, ITEMS = 8, 32


def parts_of(walks: int, visits: int) -> int:
    """Into how many parts each of `walks` walks of `visits` key tiles is cut."""
    return max(1, min(visits // VISITS, -(-ITEMS // walks)))


def merged(out: np.ndarray, m: np.ndarray, l: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output (heads, dv) and LSE (heads,) of parts: (parts, heads, dv) and twice (parts, heads)."""
    top = m.max(axis=0)
    weight = np.exp(m - np.where(np.isneginf(top), 0, top))
    total = (weight * l).sum(axis=0)
    empty = total == 0  # no key seen: out = 0, lse = -inf
    sums = (weight[..., None] * out).sum(axis=0)
    lse = np.where(empty, -np.inf, top + np.log(np.where(empty, 1, total)))
    return sums / np.where(empty, 1, total)[:, None], lse.astype(m.dtype)


@part
def decode(cpu, narrow, q, k, v, out, top, total, shape, tiles, rules, notes, counter):
    """Of each part: sum of P V, flat (parts, heads, dv), and m and l (parts, heads)."""
    w, d, dv, t = narrow.width, shape.d, shape.dv, q.dtype
    group, padded = shape.heads // shape.kv_heads, panels_of(cpu, dv) * cpu.width
    lanes = panels_of(narrow, group) * w
    Q, O = panel_array(lanes * d, t), panel_array(group * padded, t)
    S, V = panel_array(shape.block_k * lanes, t), panel_array(shape.block_k * padded, t)
    m, l, alpha = panel_array(lanes, t), panel_array(lanes, t), panel_array(lanes, t)
    rounding = rules.rounding
    rooms = (
        room_for(shape.block_k * d, t, rounding),
        room_for(shape.block_k * dv, t, rounding),
    )
    queries = room_for(group * d, t, rounding)
    n_sets, heads = tiles.set_ptr.size - 1, tiles.sets.size
    parts, begin = top.size // heads, tiles.ptr[0]
    visits = tiles.ptr[1] - begin
    Q[:] = 0  # lanes without a head score 0, which nobody reads
    S[:] = 0
    while True:
        item = fetch_add(counter)
        if item >= n_sets * parts or stopped(counter):
            break
        h0, number = tiles.sets[tiles.set_ptr[item // parts]], item % parts
        of_q, q0 = widened(cpu, queries, q, h0 * d, group * d, rounding)
        copy_rows(Q, d, of_q, q0, group, d, rules.scale)
        O[:] = 0
        m[:] = -np.inf
        l[:] = 0
        end = begin + visits * (number + 1) // parts
        for at in range(begin + visits * number // parts, end):
            if stopped(counter):
                break
            state = (Q, O, m, l, alpha, S, V)
            after = tiles.inner[min(at + 1, end - 1)]
            decode_visit(cpu, narrow, k, v, shape, tiles, rules, state, rooms, at, after, h0)
            if notes.visits.size > 0:
                j = tiles.inner[at]
                for h in range(h0, h0 + group):
                    notes.visits[h, at] = NOTE + tiles.other[j, 1] - tiles.other[j, 0]
        row0 = number * heads + h0
        for c in range(group):
            top[row0 + c], total[row0 + c] = m[c], l[c]
            for x in range(dv):
                out[(row0 + c) * dv + x] = O[c * padded + x]
            if notes.steps.size > 0:
                notes.steps[h0 + c, 0] = 1


@part
def decode_visit(cpu, narrow, k, v, shape, tiles, rules, state, rooms, at, after, h0):
    """One tile of keys for all heads that read it, as `walks.forward_visit`; `after` comes next."""
    Q, O, m, l, alpha, S, V = state
    w, d, dv, j = narrow.width, shape.d, shape.dv, tiles.inner[at]
    group, padded = shape.heads // shape.kv_heads, panels_of(cpu, dv) * cpu.width
    k0, k1 = tiles.other[j, 0], tiles.other[j, 1]
    first, last, masked = 0, k1 - k0, tiles.kind[at] == MASKED
    if masked and rules.banded:  # one query sees a run of keys: nothing else is left to mask
        first, last = visible_rows(rules, k0 - (tiles.own[0, 0] + tiles.own[0, 2]), 1, last, 1)
        if last <= first:
            return
    head0 = h0 // group * shape.n_kv
    rows, key0, next_k = last - first, head0 + k0 + first, (head0 + tiles.other[after, 0]) * d
    if rules.rounding is not None:
        next_k //= 2  # two of them are a float
    plain = rules.softcap[0] == 0 and rules.bias.size == 0 and tiles.keep_at[at] < 0
    from_k, k_start = widened(cpu, rooms[0], k, key0 * d, rows * d, rules.rounding)
    from_v, start = widened(cpu, rooms[1], v, key0 * dv, rows * dv, rules.rounding)
    ldv = dv
    if padded != dv:  # whole registers only: what lies beside V is not ours to read
        copy_rows(V, padded, from_v, start, rows, dv, v.dtype.type(1))
        from_v, start, ldv = V, 0, padded
    for p in range(panels_of(narrow, group)):
        heads, panel = min(w, group - p * w), S[p * shape.block_k * w :]
        scores(
            *(cpu, panel, first * w, w, from_k, k_start, Q[p * w * d :]),
            *(from_v, start, rows, heads, d),
        )
        if not plain:
            h = h0 + p * w
            bias = h // shape.heads * rules.bias_batch + h % shape.heads * rules.bias_head + k0
            place = Place(0, 0, 0, bias, 1, rules.bias_head, tiles.keep_at[at], 1, 0)
            finish_scores(
                *(narrow, panel, 0, w, first, last, heads),
                *(rules, place, False, tiles.keep, None),
            )
        online_softmax(narrow, panel, first * w, rows, m, l, alpha, p * w)
        round_panel(narrow, panel, first * w, w, rows, rules.rounding)
        for x in range(0, padded, cpu.width):
            weigh(
                *(cpu, O, p * w * padded + x, padded, panel, first * w, 1, w),
                *(from_v, start + x, ldv, heads, rows, alpha[p * w :], k, next_k + x * rows),
            )


@part
def scores(cpu, S, s0, ld, K, k0, Q, near, n0, rows, heads, d):
    """S (rows, ld) = K Q^T for `heads` of its columns, and more of them up to a multiple of 4."""
    whole, n = rows // HEADS * HEADS, d // SIDE * SIDE
    dots(cpu, S, s0, ld, K, k0, Q, near, n0, whole, (heads + HEADS - 1) // HEADS * HEADS, n, d)
    if whole == rows and n == d:
        return
    for r in range(rows):
        for h in range(heads):
            at = s0 + r * ld + h
            total = S[at] if r < whole else S.dtype.type(0)
            for x in range(n if r < whole else 0, d):
                total += K[k0 + r * d + x] * Q[h * d + x]
            S[at] = total
