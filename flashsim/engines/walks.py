"""The forward walk of the CPU engine: what one thread does.

Threads take items (an outer tile and a set of heads) from a shared counter until none is left;
every item is computed the same way whoever takes it. Tile order, skipping and masks come from the
schedule's tables alone; a walk notes the size of every tile it visited, and the trace is made of
these notes. `walks_backward.py` holds the backward walks, built the same way.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from flashsim.engines.atomics import fetch_add
from flashsim.engines.packing import pack, panels_of, unpack
from flashsim.engines.panels import online_softmax, product_rescale, product_set
from flashsim.engines.scores import (
    NO_ROUNDING,
    finish_scores,
    is_plain,
    place_of,
    round_panel,
    visible_rows,
)
from flashsim.engines.tables import NOTE
from flashsim.schedule import MASKED


@njit
def forward(cpu, q, k, v, out, lse, shape, tiles, rules, notes, counter):
    """FlashAttention-2's Algorithm 1 with queries in the lanes: S^T = K Q^T, O^T += V^T P^T.

    q, k, v, out and lse are flat; out and lse are written. On chip: Q^T, O^T, m, l and alpha of
    the row tile, and one panel of S^T, which becomes P^T.
    """
    w, d, dv, real = cpu.width, shape.d, shape.dv, q.dtype.type
    group = shape.heads // shape.kv_heads
    panels = panels_of(cpu, shape.block_q)
    Q, O = np.empty(panels * w * d, q.dtype), np.empty(panels * w * dv, q.dtype)
    S, none = np.empty(shape.block_k * w, q.dtype), np.empty(0, q.dtype)
    m, l = np.empty(panels * w, q.dtype), np.empty(panels * w, q.dtype)
    alpha, inverse = np.empty_like(m), np.empty_like(m)
    n_sets = tiles.set_ptr.size - 1
    while True:
        item = fetch_add(counter)
        if item >= tiles.order.size * n_sets:
            break
        i, s = tiles.order[item // n_sets], item % n_sets
        q0, q1, offset = tiles.own[i, 0], tiles.own[i, 1], tiles.own[i, 2]
        for h in tiles.sets[tiles.set_ptr[s] : tiles.set_ptr[s + 1]]:
            batch, head = h // shape.heads, h % shape.heads
            kv = (batch * shape.kv_heads + head // group) * shape.n_kv
            bias0 = batch * rules.bias_batch + head * rules.bias_head
            row0 = h * shape.n_q + q0
            pack(cpu, Q, q, row0 * d, q1 - q0, d, rules.scale)
            O[:] = 0
            m[:] = -np.inf
            l[:] = 0
            for at in range(tiles.ptr[i], tiles.ptr[i + 1]):
                j = tiles.inner[at]
                k0, k1 = tiles.other[j, 0], tiles.other[j, 1]
                masked = tiles.kind[at] == MASKED
                for p in range(panels_of(cpu, q1 - q0)):
                    lanes, first, last = min(w, q1 - q0 - p * w), 0, k1 - k0
                    if masked and rules.banded:
                        rel = k0 - (q0 + p * w + offset)
                        first, last = visible_rows(rules, rel, 1, last, lanes)
                        if last <= first:
                            continue
                    s0, rows = first * w, last - first
                    product_set(
                        cpu, S, s0, w, k, (kv + k0 + first) * d, d, 1, Q, p * d * w, w, rows, d
                    )
                    if not is_plain(cpu, rules, masked, lanes):
                        place = place_of(
                            *(rules, tiles, at, bias0, q0, k0),
                            *(shape.n_kv, offset, k1 - k0, True, 0, p * w),
                        )
                        finish_scores(
                            *(cpu, S, 0, w, first, last, lanes),
                            *(rules, place, masked, tiles.keep, none),
                        )
                    online_softmax(cpu, S, s0, rows, m, l, alpha, p * w)
                    if rules.rounding != NO_ROUNDING:
                        round_panel(cpu, S, s0, w, rows, rules.rounding)
                    v0 = (kv + k0 + first) * dv
                    product_rescale(
                        cpu, O, p * dv * w, w, v, v0, 1, dv, S, s0, w, dv, rows, alpha, p * w
                    )
                if notes.visits.size > 0:
                    notes.visits[h, at] = (q1 - q0) * NOTE + (k1 - k0)
            for r in range(q1 - q0):  # no key seen: out = 0, lse = -inf
                inverse[r] = real(0) if l[r] == 0 else real(1) / l[r]
                lse[row0 + r] = -np.inf if l[r] == 0 else m[r] * np.log(2.0) + np.log(l[r])
            unpack(cpu, O, out, row0 * dv, q1 - q0, dv, inverse)
            if notes.steps.size > 0:
                notes.steps[h, i] = q1 - q0
