"""The CPU engine's forward kernel: the code that each thread runs.

Threads take work tiles (runs of neighbouring outer tiles, for a set of heads) by a shared counter.
Results do not depend on which thread takes which work tile. The schedule's tables determine which
tiles are visited, in which order, and with which masks. For a trace, a kernel writes down each
visited tile's size, and the module `notes` builds the trace.
"""

import numpy as np

from flashsim.engines.cpu import operands, scores
from flashsim.engines.cpu.bf16_dot.operations import begin_tiles, end_tiles
from flashsim.engines.cpu.primitives.arrays import panel_array, rest
from flashsim.engines.cpu.primitives.atomics import fetch_add, load_acquire
from flashsim.engines.cpu.primitives.inline_jit import part
from flashsim.engines.cpu.primitives.packing import fill, filled, panels_of
from flashsim.engines.cpu.tables import NOTE, STOP
from flashsim.schedule.schedule import MASKED


@part
def forward(cpu, q, k, v, out, lse, shape, tiles, rules, notes, counter):
    """Run FlashAttention-2's Algorithm 1 with one query per lane: S^T = K Q^T, O^T += V^T P^T.

    All arrays are flat; out and lse are written. Each thread keeps Q^T, O^T, m, l and alpha of its
    query tiles, and a panel of S^T, which P^T overwrites. For 16-bit inputs, each thread also keeps
    K and V of one or more (`slots_of`) key tiles as operands of matrix products. A thread processes
    neighbouring query tiles together (a run), so it reads each key tile's K and V from memory once
    per run. Each query tile visits only the key tiles in the schedule, in the schedule's order.
    """
    w, d, dv, dtype, rounding = cpu.width, shape.d, shape.dv, lse.dtype, rules.rounding
    real, group = dtype.type, shape.heads // shape.kv_heads
    lanes = panels_of(cpu, shape.block_q) * w  # of a row tile, padding included
    most, d_terms, o_rows = tiles.longest, operands.terms(cpu, d), operands.rows_of(cpu, dv)
    slots, keys = operands.slots_of(cpu, shape.block_k), operands.whole(cpu, shape.block_k)
    k_terms = operands.terms(cpu, shape.block_k)
    Q = operands.operand_room(cpu, most * lanes * d_terms, dtype)
    O = panel_array(most * lanes * o_rows, dtype)
    K = operands.left_room(cpu, slots * keys, d, dtype, rounding)
    V = operands.left_room(cpu, o_rows, slots * keys, dtype, rounding)
    S = panel_array(operands.chunk_of(cpu, shape.block_k) * w, dtype)
    P = operands.pairs_room(cpu, slots * k_terms * w, np.uint32)
    m, l = panel_array(most * lanes, dtype), panel_array(most * lanes, dtype)
    alpha, inverse = panel_array(lanes, dtype), panel_array(lanes, dtype)
    rows = operands.wide_room(cpu, shape.block_q * max(d, dv), dtype, rounding)  # of Q and of O
    factors, scales = filled(lanes, rules.scale, dtype), filled(2, 1, dtype)
    scales[0] = rules.scale
    at, then = panel_array(most, np.int64), panel_array(most, np.int64)  # visits of each row tile
    near = panel_array(slots, np.int64)  # the column tile in each slot
    begin_tiles(cpu, S)
    while True:
        begin, end, first_head, last_head = next_work_tile(tiles, counter)
        if begin == end:
            break
        for at_head in range(first_head, last_head):
            h = tiles.sets[at_head]
            batch, head = h // shape.heads, h % shape.heads
            kv = (batch * shape.kv_heads + head // group) * shape.n_kv
            for i in range(begin, end):
                q0, n, x = tiles.own[i, 0], tiles.own[i, 1] - tiles.own[i, 0], (i - begin) * lanes
                start = (h * shape.n_q + q0) * d
                operands.right_of_rows(
                    cpu, rest(Q, x * d_terms), q, start, n, d, factors, rows, rounding
                )
                at[i - begin] = tiles.ptr[i]
            fill(O, real(0))
            fill(m, real(-np.inf))
            fill(l, real(0))
            while True:
                count = next_tiles(tiles, at, then, begin, end, near)
                if count == 0 or stopped(counter):
                    break
                for slot in range(count):
                    j, first = near[slot], slot * keys
                    key0, n = kv + tiles.other[j, 0], tiles.other[j, 1] - tiles.other[j, 0]
                    of_k = operands.left_of_rows(cpu, K, first, k, key0 * d, n, d, rounding)
                    of_v = operands.left_of_columns(
                        *(cpu, V, first, slots * k_terms, k_terms, v, key0 * dv, n, dv), rounding
                    )
                for i in range(begin, end):
                    x, visits = (i - begin) * lanes, (at[i - begin], then[i - begin])
                    sums = operands.RowSums(rest(O, x * o_rows), rest(m, x), rest(l, x), alpha)
                    forward_visits(
                        *(cpu, shape, tiles, rules, rest(Q, x * d_terms), of_k, of_v, S, P),
                        *(sums, scales, i, visits, near, h),
                    )
                    at[i - begin] = then[i - begin]
                    if notes.visits.size > 0:
                        for now in range(visits[0], visits[1]):
                            j = tiles.inner[now]
                            note = (tiles.own[i, 1] - tiles.own[i, 0]) * NOTE
                            notes.visits[h, now] = note + tiles.other[j, 1] - tiles.other[j, 0]
            for i in range(begin, end):
                q0, n, x = tiles.own[i, 0], tiles.own[i, 1] - tiles.own[i, 0], (i - begin) * lanes
                row0 = h * shape.n_q + q0
                for r in range(n):  # no key seen: out = 0, lse = -inf
                    if rules.sinks.size > 0 and rules.sinks[head] != -np.inf:
                        top = max(m[x + r], rules.sinks[head])
                        weight = np.exp(m[x + r] - top) if l[x + r] != 0 else real(0)
                        total = weight * l[x + r] + np.exp(rules.sinks[head] - top)
                        inverse[r] = weight / total
                        lse[row0 + r] = top + np.log(total)
                        continue
                    seen = l[x + r] != 0
                    inverse[r] = real(1) / l[x + r] if seen else real(0)
                    lse[row0 + r] = m[x + r] + np.log(l[x + r]) if seen else -np.inf
                operands.write_rows(
                    *(cpu, rest(O, x * o_rows), out, row0 * dv, n, dv, inverse),
                    *(rows, rounding, counter),
                )
                if notes.steps.size > 0:
                    notes.steps[h, i] = n
    end_tiles(cpu, S)


@part
def forward_visits(cpu, shape, tiles, rules, Q, K, V, S, P, sums, scales, i, visits, near, h):
    """Process some visits of a query tile, one panel of queries at a time.

    For each key tile, this computes S = scale Q K^T, the softmax P of S, and O = alpha O + P V.
    `near` holds the number of the key tile in each slot of K and V.
    """
    w, d, dv, d_terms = cpu.width, shape.d, shape.dv, operands.terms(cpu, shape.d)
    keys, chunk = operands.whole(cpu, shape.block_k), operands.chunk_of(cpu, shape.block_k)
    q0, q1, offset = tiles.own[i, 0], tiles.own[i, 1], tiles.own[i, 2]
    for p in range(panels_of(cpu, q1 - q0)):
        lanes, slot, waiting = min(w, q1 - q0 - p * w), 0, (0, 0)
        for at in range(visits[0], visits[1]):
            j, masked = tiles.inner[at], tiles.kind[at] == MASKED
            while near[slot] != j:
                slot += 1
            k0, k1 = tiles.other[j, 0], tiles.other[j, 1]
            rel, banded = k0 - (q0 + p * w + offset), masked and rules.banded
            first, last = scores.rows_in_mask(
                *(cpu, rules, shape, tiles, at, h, i, j, True, p, k1 - k0, lanes)
            )
            if last <= first:
                continue
            for c in range(first, last, chunk):
                n, key = min(chunk, last - c), slot * keys + c
                operands.set_product(cpu, S, 0, w, K, key, 0, Q, p * d_terms * w, w, n, d)
                hidden = scores.hides(rules, rel + c, n, lanes) if banded else masked
                position = scores.place_of(cpu, rules, shape, tiles, at, h, i, j, True, c, p)
                hidden = scores.only_if_hiding(rules, position, hidden, 0, n)
                plain = scores.is_plain(cpu, rules, hidden, lanes)
                scale = operands.scaled(cpu, S, n, plain, scales)
                if not plain:
                    scores.finish_scores(
                        *(cpu, S, 0, w, 0, n, lanes),
                        *(rules, position, hidden, tiles.keep, None, None),
                    )
                waiting = operands.take_scores(
                    cpu, sums, S, n, scale, P, V, key, p, dv, rules.rounding, waiting
                )
        operands.weigh(cpu, sums.O, P, V, p, dv, waiting)


@part
def next_work_tile(tiles, counter):
    """Take the next work tile; return a range of outer tiles, and a range of heads.

    A range consists of two numbers, first and last + 1. The heads' numbers are indices into
    `tiles.sets`. An empty range of outer tiles means that no work is left, or that the call was
    interrupted.
    """
    n_sets, number = tiles.set_ptr.size - 1, fetch_add(counter, 0)
    if number >= len(tiles.runs) * n_sets or stopped(counter):
        return 0, 0, 0, 0
    run, s = number // n_sets, number % n_sets
    return tiles.runs[run, 0], tiles.runs[run, 1], tiles.set_ptr[s], tiles.set_ptr[s + 1]


@part
def stopped(counter):
    """Return whether the user interrupted the call, whose results are discarded."""
    return load_acquire(counter, STOP) != 0


@part
def next_tiles(tiles, at, then, begin, end, near):
    """Write the numbers of a run's next key tiles to `near`; return how many were written.

    `at` holds the position of each query tile's next visit. `then` receives each query tile's
    position after the key tiles in `near`.
    """
    for i in range(end - begin):
        then[i] = at[i]
    count = 0
    while count < near.size:
        j = next_inner(tiles, then, begin, end, tiles.descending)
        if j < 0:
            break
        near[count] = j
        count += 1
        for i in range(end - begin):
            now = then[i]
            if now < tiles.ptr[begin + i + 1] and tiles.inner[now] == j:
                then[i] = now + 1
    return count


@part
def next_inner(tiles, at, begin, end, descending):
    """Return a run's next inner tile, or -1 at the end; `at` has each outer tile's next visit."""
    best = -1
    for i in range(begin, end):
        if at[i - begin] < tiles.ptr[i + 1]:
            j = tiles.inner[at[i - begin]]
            if best < 0 or (j > best if descending else j < best):
                best = j
    return best
