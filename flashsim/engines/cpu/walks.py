"""The forward walk of the CPU engine: what one thread does.

Threads take items (an outer tile and a set of heads) from a shared counter until none is left;
every item is computed the same way whoever takes it. Tile order, skipping and masks come from the
schedule's tables alone; a walk notes the size of every tile it visited, and the trace is made of
these notes. `walks_backward.py` holds the backward walks, built the same way.
"""

from __future__ import annotations

import numpy as np

from flashsim.engines.cpu.micro_kernels.plain import online_softmax, product_rescale, product_set
from flashsim.engines.cpu.primitives.arrays import panel_array, rest
from flashsim.engines.cpu.primitives.atomics import fetch_add, load_acquire
from flashsim.engines.cpu.primitives.packing import (
    fill,
    filled,
    pack_rows,
    panels_of,
    room_for,
    unpack_rows,
    widened,
)
from flashsim.engines.cpu.primitives.parts import part
from flashsim.engines.cpu.scores import (
    finish_scores,
    is_plain,
    place_of,
    round_panel,
    visible_rows,
)
from flashsim.engines.cpu.tables import NOTE, STOP
from flashsim.schedule.schedule import MASKED


@part
def forward(cpu, q, k, v, out, lse, shape, tiles, rules, notes, counter):
    """FlashAttention-2's Algorithm 1 with queries in the lanes: S^T = K Q^T, O^T += V^T P^T.

    q, k, v, out and lse are flat; out and lse are written. On chip: Q^T, O^T, m, l and alpha of
    the row tiles, and one panel of S^T, which becomes P^T; of 16-bit inputs also K and V of a
    column tile as floats.

    A thread walks a run of row tiles together: K and V of a column tile, which come from far, serve
    all those that visit it. Each row tile still visits its own tiles, in its own order.
    """
    w, d, dv, real = cpu.width, shape.d, shape.dv, q.dtype.type
    group = shape.heads // shape.kv_heads
    height = panels_of(cpu, shape.block_q) * w  # lanes of a row tile, padding included
    most = tiles.longest
    Q, O = panel_array(most * height * d, q.dtype), panel_array(most * height * dv, q.dtype)
    S, m = panel_array(shape.block_k * w, q.dtype), panel_array(most * height, q.dtype)
    l, alpha = panel_array(m.size, q.dtype), panel_array(height, q.dtype)
    K = room_for(shape.block_k * d, q.dtype, rules.rounding)
    V = room_for(shape.block_k * dv, q.dtype, rules.rounding)
    rows = room_for(shape.block_q * max(d, dv), q.dtype, rules.rounding)  # of Q and of O
    inverse, scales = panel_array(height, q.dtype), filled(height, rules.scale, q.dtype)
    at = panel_array(most, np.int64)  # the next visit of each row tile
    n_sets = tiles.set_ptr.size - 1
    while True:
        item = fetch_add(counter)
        if item >= len(tiles.runs) * n_sets or stopped(counter):
            break
        begin, end, s = tiles.runs[item // n_sets, 0], tiles.runs[item // n_sets, 1], item % n_sets
        for at_head in range(tiles.set_ptr[s], tiles.set_ptr[s + 1]):
            h = tiles.sets[at_head]
            batch, head = h // shape.heads, h % shape.heads
            kv = (batch * shape.kv_heads + head // group) * shape.n_kv
            bias0 = batch * rules.bias_batch + head * rules.bias_head
            for i in range(begin, end):
                q0, n, x = tiles.own[i, 0], tiles.own[i, 1] - tiles.own[i, 0], (i - begin) * height
                start = (h * shape.n_q + q0) * d
                pack_rows(cpu, rest(Q, x * d), q, start, n, d, scales, rows, rules.rounding)
                at[i - begin] = tiles.ptr[i]
            fill(O, real(0))
            fill(m, real(-np.inf))
            fill(l, real(0))
            while True:
                j = next_inner(tiles, at, begin, end, tiles.descending)
                if j < 0 or stopped(counter):
                    break
                key0, n = kv + tiles.other[j, 0], tiles.other[j, 1] - tiles.other[j, 0]
                of_k = widened(cpu, K, k, key0 * d, n * d, rules.rounding)
                of_v = widened(cpu, V, v, key0 * dv, n * dv, rules.rounding)
                for i in range(begin, end):
                    x, now = (i - begin) * height, at[i - begin]
                    if now < tiles.ptr[i + 1] and tiles.inner[now] == j:
                        state = (rest(Q, x * d), rest(O, x * dv), rest(m, x), rest(l, x), alpha, S)
                        forward_visit(cpu, of_k, of_v, shape, tiles, rules, state, i, now, bias0)
                        at[i - begin] += 1
                        if notes.visits.size > 0:
                            notes.visits[h, now] = (tiles.own[i, 1] - tiles.own[i, 0]) * NOTE + n
            for i in range(begin, end):
                q0, n, x = tiles.own[i, 0], tiles.own[i, 1] - tiles.own[i, 0], (i - begin) * height
                row0 = h * shape.n_q + q0
                for r in range(n):  # no key seen: out = 0, lse = -inf
                    seen = l[x + r] != 0
                    inverse[r] = real(1) / l[x + r] if seen else real(0)
                    lse[row0 + r] = m[x + r] + np.log(l[x + r]) if seen else -np.inf
                unpack_rows(
                    *(cpu, rest(O, x * dv), out, row0 * dv, n, dv, inverse),
                    *(rows, rules.rounding, counter),
                )
                if notes.steps.size > 0:
                    notes.steps[h, i] = n


@part
def forward_visit(cpu, of_k, of_v, shape, tiles, rules, state, i, at, bias0):
    """One tile: S = scale Q K^T, its softmax, O = alpha O + P V, a panel of queries at a time."""
    Q, O, m, l, alpha, S = state
    (k, k_start), (v, v_start) = of_k, of_v
    w, d, dv = cpu.width, shape.d, shape.dv
    q0, q1, offset = tiles.own[i, 0], tiles.own[i, 1], tiles.own[i, 2]
    k0, k1 = tiles.other[tiles.inner[at], 0], tiles.other[tiles.inner[at], 1]
    masked = tiles.kind[at] == MASKED
    for p in range(panels_of(cpu, q1 - q0)):
        lanes, first, last = min(w, q1 - q0 - p * w), 0, k1 - k0
        if masked and rules.banded:
            rel = k0 - (q0 + p * w + offset)
            first, last = visible_rows(rules, rel, 1, last, lanes)
            if last <= first:
                continue
        s0, rows = first * w, last - first
        product_set(cpu, S, s0, w, k, k_start + first * d, d, 1, Q, p * d * w, w, rows, d)
        if not is_plain(cpu, rules, masked, lanes):
            place = place_of(
                *(rules, tiles, at, bias0, q0, k0),
                *(shape.n_kv, offset, k1 - k0, True, 0, p * w),
            )
            finish_scores(cpu, S, 0, w, first, last, lanes, rules, place, masked, tiles.keep, None)
        online_softmax(cpu, S, s0, rows, m, l, alpha, p * w)
        round_panel(cpu, S, s0, w, rows, rules.rounding)
        v0 = v_start + first * dv
        product_rescale(cpu, O, p * dv * w, w, v, v0, 1, dv, S, s0, w, dv, rows, alpha, p * w)


@part
def stopped(counter):
    """Whether nobody wants the results any more; what a walk writes from then on is never read."""
    return load_acquire(counter, STOP) != 0


@part
def next_inner(tiles, at, begin, end, descending):
    """The inner tile that comes next for any tile of a run, where each is at visit ``at``; or -1.

    A walk takes inner tiles in ascending or in descending order.
    """
    best = -1
    for i in range(begin, end):
        if at[i - begin] < tiles.ptr[i + 1]:
            j = tiles.inner[at[i - begin]]
            if best < 0 or (j > best if descending else j < best):
                best = j
    return best
