"""The forward walk over pairs: `walks.forward`, whose products sum pairs of bfloat16.

Inputs stay as they lie in memory: a thread packs K and V of a column tile once for all row tiles of
its run, Q once for all of a row tile's visits. Scores, softmax and sums are float32; P is rounded
where it becomes an operand.
"""

from __future__ import annotations

import numpy as np

from flashsim.engines.cpu.pairs.operations import (
    begin_tiles,
    end_tiles,
    online_softmax_pairs,
    pairs_add,
    pairs_set,
    scale_lanes,
    scale_panel,
)
from flashsim.engines.cpu.pairs.packing import (
    clear_pairs,
    left_of_columns,
    left_of_rows,
    look_at_bits,
    pair_tiles_of,
    right_of_rows,
    tiles_of,
    unpack_bits,
)
from flashsim.engines.cpu.pairs.tiles import SIDE
from flashsim.engines.cpu.primitives.arrays import panel_array, rest
from flashsim.engines.cpu.primitives.atomics import fetch_add
from flashsim.engines.cpu.primitives.packing import fill, panels_of
from flashsim.engines.cpu.primitives.parts import part
from flashsim.engines.cpu.scores import finish_scores, hides, is_plain, place_of, visible_rows
from flashsim.engines.cpu.tables import NOTE
from flashsim.engines.cpu.walks import next_inner, stopped
from flashsim.schedule.schedule import MASKED

#: Keys whose scores exist at a time: a panel of them, P and Q fit the first-level cache.
CHUNK = 64
#: Keys whose P is kept: a row tile takes as many, of several column tiles, and multiplies P of all
#: of them with V at once, unless a maximum moves in between. So O, which is larger than what is
#: multiplied, is loaded and stored once for eight tiles along the sum in place of two.
KEPT = 256


@part
def forward(cpu, q, k, v, out, lse, shape, tiles, rules, notes, counter):
    """As `walks.forward`: S^T = K Q^T, O^T += V^T P^T; q, k, v and out are bits of bfloat16."""
    w, d, dv, real, pair = cpu.width, shape.d, shape.dv, np.float32, np.uint32
    group = shape.heads // shape.kv_heads
    panels, most = panels_of(cpu, shape.block_q), tiles.longest
    height, q_pairs, o_rows = panels * w, pair_tiles_of(d), tiles_of(dv)
    Q, O = panel_array(most * height * q_pairs, pair), panel_array(most * height * o_rows, real)
    v_pairs = pair_tiles_of(shape.block_k)
    slots = max(1, KEPT // (2 * v_pairs))  # each has room for a column tile
    all_pairs = slots * v_pairs
    K, V = panel_array(2 * all_pairs * q_pairs, pair), panel_array(o_rows * all_pairs, pair)
    S, P = panel_array(min(2 * v_pairs, CHUNK) * w, real), panel_array(all_pairs * w, pair)
    m, l = panel_array(most * height, real), panel_array(most * height, real)
    alpha, inverse = panel_array(height, real), panel_array(height, real)
    scales = panel_array(2, real)  # of scores as the product leaves them, and of finished ones
    scales[0], scales[1] = rules.scale, 1
    at, then = panel_array(most, np.int64), panel_array(most, np.int64)  # visits of each row tile
    near = panel_array(slots, np.int64)  # the column tile in each slot
    n_sets = tiles.set_ptr.size - 1
    begin_tiles(cpu, S)
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
                right_of_rows(cpu, rest(Q, x * q_pairs), q, (h * shape.n_q + q0) * d, n, d)
                at[i - begin] = tiles.ptr[i]
            fill(O, real(0))
            fill(m, real(-np.inf))
            fill(l, real(0))
            while True:
                count = next_tiles(tiles, at, then, begin, end, near)
                if count == 0 or stopped(counter):
                    break
                for slot in range(count):
                    j = near[slot]
                    k0, n = tiles.other[j, 0], tiles.other[j, 1] - tiles.other[j, 0]
                    K_slot, V_slot = rest(K, 2 * slot * v_pairs * q_pairs), rest(V, slot * v_pairs)
                    left_of_rows(cpu, K_slot, q_pairs, k, (kv + k0) * d, n, d)
                    left_of_columns(cpu, V_slot, all_pairs, v_pairs, v, (kv + k0) * dv, n, dv)
                for i in range(begin, end):
                    x, visits = (i - begin) * height, (at[i - begin], then[i - begin])
                    state = rest(Q, x * q_pairs), rest(O, x * o_rows), rest(m, x), rest(l, x), alpha
                    forward_visits(
                        *(cpu, shape, tiles, rules, state, (K, V, S, P)),
                        *(scales, i, visits, near, bias0),
                    )
                    at[i - begin] = then[i - begin]
                    if notes.visits.size > 0:
                        for now in range(visits[0], visits[1]):
                            j = tiles.inner[now]
                            note = (tiles.own[i, 1] - tiles.own[i, 0]) * NOTE
                            notes.visits[h, now] = note + tiles.other[j, 1] - tiles.other[j, 0]
            for i in range(begin, end):
                q0, n, x = tiles.own[i, 0], tiles.own[i, 1] - tiles.own[i, 0], (i - begin) * height
                row0 = h * shape.n_q + q0
                for r in range(n):  # no key seen: out = 0, lse = -inf
                    seen = l[x + r] != 0
                    inverse[r] = real(1) / l[x + r] if seen else real(0)
                    lse[row0 + r] = m[x + r] + np.log(l[x + r]) if seen else -np.inf
                for r in range(0, n, w):
                    O_panel, out0 = rest(O, (x + r) * o_rows), (row0 + r) * dv
                    unpack_bits(cpu, O_panel, out, out0, min(w, n - r), dv, rest(inverse, r))
                look_at_bits(counter, out, row0 * dv, n * dv)
                if notes.steps.size > 0:
                    notes.steps[h, i] = n
    end_tiles(cpu, S)


@part
def next_tiles(tiles, at, then, begin, end, near):
    """The column tiles that come next for a run at visits `at`, into `near`: how many there are.

    `then` is where each row tile is after them.
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
def forward_visits(cpu, shape, tiles, rules, state, operands, scales, i, visits, near, bias0):
    """Some tiles of a row: S = scale Q K^T, its softmax, O = alpha O + P V, panel by panel.

    `near` says in which slot of K and V each column tile is.
    """
    Q, O, m, l, alpha = state
    K, V, S, P = operands
    w, q_pairs, o_rows = cpu.width, pair_tiles_of(shape.d), tiles_of(shape.dv)
    v_pairs = pair_tiles_of(shape.block_k)
    of_o = V, P, near.size * v_pairs, o_rows
    q0, q1, offset = tiles.own[i, 0], tiles.own[i, 1], tiles.own[i, 2]
    for p in range(panels_of(cpu, q1 - q0)):
        lanes, O0 = min(w, q1 - q0 - p * w), p * o_rows * w
        slot, begin, end = 0, 0, 0  # pairs of keys begin .. end - 1: their P waits for its product
        for at in range(visits[0], visits[1]):
            j, masked = tiles.inner[at], tiles.kind[at] == MASKED
            while near[slot] != j:
                slot += 1
            k0, k1 = tiles.other[j, 0], tiles.other[j, 1]
            first, last, rel = 0, k1 - k0, k0 - (q0 + p * w + offset)
            banded = masked and rules.banded
            if banded:
                first, last = visible_rows(rules, rel, 1, last, lanes)
                if last <= first:
                    continue
                first -= first % (2 * SIDE)  # whole tiles of pairs; the mask hides what is before
            for c in range(first, last, CHUNK):
                rows, start = min(CHUNK, last - c), slot * v_pairs + c // 2
                pairs_set(
                    *(cpu, S, 0, w, K, (2 * slot * v_pairs + c) * q_pairs, q_pairs),
                    *(Q, p * q_pairs * w, w, tiles_of(rows), q_pairs),
                )
                scale = scales
                hidden = hides(rules, rel + c, rows, lanes) if banded else masked
                if not is_plain(cpu, rules, hidden, lanes) or rules.scale < 0:
                    scale = rest(scales, 1)
                    scale_panel(cpu, S, 0, w, rows, scales)
                    place = place_of(
                        *(rules, tiles, at, bias0, q0, k0),
                        *(shape.n_kv, offset, k1 - k0, True, c, p * w),
                    )
                    finish_scores(
                        *(cpu, S, 0, w, 0, rows, lanes, rules, place),
                        *(hidden, tiles.keep, None),
                    )
                online_softmax_pairs(
                    *(cpu, S, 0, rows, m, l, alpha, p * w),
                    *(scale, P, start * w),
                )
                clear_pairs(cpu, P, start * w, w, (rows + 1) // 2, pair_tiles_of(rows))
                if end != start or moved(cpu, alpha, p * w):
                    weigh(cpu, O, O0, of_o, begin, end)
                    begin = start
                    scale_lanes(cpu, O, O0, w, o_rows, alpha, p * w)
                end = start + pair_tiles_of(rows)
        weigh(cpu, O, O0, of_o, begin, end)


@part
def weigh(cpu, O, O0, operands, begin, end):
    """O^T += V^T P^T, by pairs of keys begin .. end - 1, if there are any."""
    V, P, row, o_rows = operands
    w = cpu.width
    if begin < end:
        pairs_add(cpu, O, O0, w, V, begin, row, P, begin * w, w, o_rows, end - begin)


@part
def moved(cpu, alpha, at):
    """Whether any lane's sums have to be scaled anew."""
    found = False
    for c in range(cpu.width):
        found |= alpha[np.uint64(at + c)] != 1
    return found
