"""The backward walks over pairs: `walks_backward`, whose products sum pairs of bfloat16."""

from __future__ import annotations

import numpy as np

from flashsim.engines.cpu.micro_kernels.plain import (
    grad_scores_by_lane,
    grad_scores_by_row,
)
from flashsim.engines.cpu.pairs.operations import (
    add_scaled,
    begin_tiles,
    end_tiles,
    pairs_add,
    pairs_of_lanes,
    pairs_of_rows,
    pairs_set,
    scale_panel,
)
from flashsim.engines.cpu.pairs.packing import (
    clear_pairs,
    left_of_columns,
    left_of_rows,
    pair_tiles_of,
    right_of_columns,
    right_of_rows,
    tiles_of,
    unpack_bits,
)
from flashsim.engines.cpu.pairs.tiles import SIDE
from flashsim.engines.cpu.primitives.arrays import panel_array, rest
from flashsim.engines.cpu.primitives.atomics import fetch_add, give_way, load_acquire, store_release
from flashsim.engines.cpu.primitives.packing import clear_rows, fill, filled, panels_of
from flashsim.engines.cpu.primitives.parts import part
from flashsim.engines.cpu.scores import (
    add_bias_gradient,
    apply_gate,
    finish_scores,
    is_plain,
    place_of,
    visible_rows,
)
from flashsim.engines.cpu.tables import NOTE
from flashsim.engines.cpu.walks import next_inner, stopped
from flashsim.schedule.schedule import MASKED


@part
def grad_keys(cpu, inputs, grads, shape, tiles, rules, notes, counter, fused, turns):
    """As `walks_backward.grad_keys`; inputs, dK and dV are bits of bfloat16, the rest float32.

    Q and dO of a row tile are packed once for all column tiles of a run: by rows for S and dP, by
    columns for dK and dV. A tile's part of dQ is computed before its turn comes, and added then.
    """
    w, d, dv, real, pair = cpu.width, shape.d, shape.dv, np.float32, np.uint32
    group = shape.heads // shape.kv_heads
    most, ld, padded = tiles.longest, panels_of(cpu, shape.block_k) * w, grads.dq_stride
    d_pairs, dv_pairs, d_rows, dv_rows = sizes_of(shape)
    k_pairs, q_pairs = pair_tiles_of(ld), pair_tiles_of(shape.block_q)
    K, V = panel_array(most * ld * d_pairs, pair), panel_array(most * ld * dv_pairs, pair)
    dK, dV = panel_array(most * ld * d_rows, real), panel_array(most * ld * dv_rows, real)
    K_rows = panel_array(most * k_pairs * padded if fused else 0, pair)
    Q, dO = panel_array(2 * q_pairs * d_pairs, pair), panel_array(2 * q_pairs * dv_pairs, pair)
    Q_T, dO_T = panel_array(d_rows * q_pairs, pair), panel_array(dv_rows * q_pairs, pair)
    S, dS = panel_array(2 * q_pairs * ld, real), panel_array(2 * q_pairs * ld, real)
    P = panel_array(q_pairs * w, pair)
    dS_left = panel_array(2 * q_pairs * k_pairs if fused else 0, pair)
    part_dq = panel_array(2 * q_pairs * padded if fused else 0, real)
    gate = panel_array(S.size if rules.softcap[0] > 0 else 0, real)
    scales, ones = filled(shape.block_k, rules.scale, real), filled(shape.block_k, 1, real)
    at = panel_array(most, np.int64)  # the next visit of each column tile
    n_sets = tiles.set_ptr.size - 1
    begin_tiles(cpu, S)
    while True:
        item = fetch_add(counter)
        if item >= len(tiles.runs) * n_sets or stopped(counter):
            break
        begin, end, s = tiles.runs[item // n_sets, 0], tiles.runs[item // n_sets, 1], item % n_sets
        for at_head in range(tiles.set_ptr[s], tiles.set_ptr[s + 1]):
            kv_head = tiles.sets[at_head]
            batch = kv_head // shape.kv_heads
            for j in range(begin, end):
                x, n = (j - begin) * ld, tiles.own[j, 1] - tiles.own[j, 0]
                col0 = kv_head * shape.n_kv + tiles.own[j, 0]
                right_of_rows(cpu, rest(K, x * d_pairs), inputs.k, col0 * d, n, d)
                right_of_rows(cpu, rest(V, x * dv_pairs), inputs.v, col0 * dv, n, dv)
                if fused:
                    to = (j - begin) * k_pairs * padded
                    right_of_columns(rest(K_rows, to), padded, inputs.k, col0 * d, n, d)
            fill(dK, real(0))
            fill(dV, real(0))
            for member in range(group):
                h = batch * shape.heads + kv_head % shape.kv_heads * group + member
                for j in range(begin, end):
                    at[j - begin] = tiles.ptr[j]
                while True:
                    i = next_inner(tiles, at, begin, end, False)
                    if i < 0 or stopped(counter):
                        break
                    rows, row0 = tiles.other[i, 1] - tiles.other[i, 0], h * shape.n_q
                    row0 += tiles.other[i, 0]
                    left_of_rows(cpu, Q, d_pairs, inputs.q, row0 * d, rows, d)
                    left_of_rows(cpu, dO, dv_pairs, inputs.dout, row0 * dv, rows, dv)
                    left_of_columns(cpu, Q_T, q_pairs, q_pairs, inputs.q, row0 * d, rows, d)
                    left_of_columns(cpu, dO_T, q_pairs, q_pairs, inputs.dout, row0 * dv, rows, dv)
                    for place in range(end - begin):
                        j = end - 1 - place if tiles.descending else begin + place
                        x, now = (j - begin) * ld, at[j - begin]
                        if now == tiles.ptr[j + 1] or tiles.inner[now] != i:
                            continue
                        at[j - begin] += 1
                        own = (rest(K, x * d_pairs), rest(V, x * dv_pairs))
                        sums = (rest(dK, x * d_rows), rest(dV, x * dv_rows))
                        work = (S, dS, P, dS_left, gate)
                        key_visit(
                            *(cpu, inputs, grads, shape, tiles, rules, own, sums),
                            *((Q, dO, Q_T, dO_T), work, scales, j, now, h, fused),
                        )
                        if fused:
                            to = (j - begin) * k_pairs * padded
                            n = tiles.own[j, 1] - tiles.own[j, 0]
                            for y in range(0, padded, w):
                                pairs_set(
                                    *(cpu, part_dq, y, padded, dS_left, 0, k_pairs),
                                    *(K_rows, to + y, padded, tiles_of(rows), pair_tiles_of(n)),
                                )
                            add_to_dq(
                                *(cpu, grads, tiles, part_dq, scales, row0, rows, now),
                                *(h * tiles.other.shape[0] + i, turns, counter),
                            )
                        if notes.visits.size > 0:
                            notes.visits[h, now] = rows * NOTE + tiles.own[j, 1] - tiles.own[j, 0]
            for j in range(begin, end):
                x, n = (j - begin) * ld, tiles.own[j, 1] - tiles.own[j, 0]
                col0 = kv_head * shape.n_kv + tiles.own[j, 0]
                for c in range(0, n, w):
                    lanes, to = min(w, n - c), col0 + c
                    unpack_bits(cpu, rest(dK, (x + c) * d_rows), grads.dk, to * d, lanes, d, scales)
                    unpack_bits(
                        cpu, rest(dV, (x + c) * dv_rows), grads.dv, to * dv, lanes, dv, ones
                    )
                if notes.steps.size > 0:
                    notes.steps[kv_head, j] = n
    end_tiles(cpu, S)


@part
def sizes_of(shape):
    """Pairs and rows that head_dim and head_dim_v take: along a sum, and as rows of C."""
    d, dv = shape.d, shape.dv
    return pair_tiles_of(d), pair_tiles_of(dv), tiles_of(d), tiles_of(dv)


@part
def key_visit(
    cpu, inputs, grads, shape, tiles, rules, own, sums, others, work, scales, j, at, h, fused
):
    """One tile of dK and dV, a panel of keys at a time; if `fused`, `dS_left` is complete after."""
    (K, V), (dK, dV), (Q, dO, Q_T, dO_T) = own, sums, others
    S, dS, P, dS_left, gate = work
    w, i = cpu.width, tiles.inner[at]
    d_pairs, dv_pairs, d_rows, dv_rows = sizes_of(shape)
    k0, n, offset = tiles.own[j, 0], tiles.own[j, 1] - tiles.own[j, 0], tiles.own[j, 2]
    q0, rows = tiles.other[i, 0], tiles.other[i, 1] - tiles.other[i, 0]
    ld, masked = panels_of(cpu, shape.block_k) * w, tiles.kind[at] == MASKED
    q_pairs, k_pairs = pair_tiles_of(shape.block_q), pair_tiles_of(ld)
    bias0 = h // shape.heads * rules.bias_batch + h % shape.heads * rules.bias_head
    for p in range(panels_of(cpu, n)):
        lanes, first, last = min(w, n - p * w), 0, rows
        if masked and rules.banded:
            rel = k0 + p * w - (q0 + offset)
            first, last = visible_rows(rules, rel, -1, rows, lanes)
        if last > first:
            first -= first % (2 * SIDE)  # whole tiles of pairs; the mask hides what comes before
            x0, row0, kept = first * ld + p * w, h * shape.n_q + q0 + first, last - first
            pairs, start = pair_tiles_of(kept), first // 2
            pairs_set(
                *(cpu, S, x0, ld, Q, first * d_pairs, d_pairs),
                *(K, p * d_pairs * w, w, tiles_of(kept), d_pairs),
            )
            scale_panel(cpu, S, x0, ld, kept, scales)
            place = place_of(
                *(rules, tiles, at, bias0, q0, k0),
                *(shape.n_kv, offset, n, False, 0, p * w),
            )
            if not is_plain(cpu, rules, masked, lanes):
                finish_scores(
                    *(cpu, S, p * w, ld, first, last, lanes),
                    *(rules, place, masked, tiles.keep, gate),
                )
            pairs_set(
                *(cpu, dS, x0, ld, dO, first * dv_pairs, dv_pairs),
                *(V, p * dv_pairs * w, w, tiles_of(kept), dv_pairs),
            )
            grad_scores_by_row(cpu, S, x0, dS, x0, ld, kept, inputs.lse, inputs.delta, row0)
            if fused and grads.dbias.size > 0:
                add_bias_gradient(grads.dbias, dS, p * w, ld, first, last, lanes, place)
            if rules.softcap[0] > 0:
                apply_gate(dS, gate, p * w, ld, first, last, lanes)
            for X, left, C, c_rows in ((S, dO_T, dV, dv_rows), (dS, Q_T, dK, d_rows)):
                pairs_of_rows(cpu, X, x0, ld, kept, P, 0)
                clear_pairs(cpu, P, 0, w, (kept + 1) // 2, pairs)
                pairs_add(cpu, C, p * c_rows * w, w, left, start, q_pairs, P, 0, w, c_rows, pairs)
        if fused:  # what lies outside, products wrote there or not, adds nothing
            clear_rows(cpu, dS, p * w, ld, 0, min(first, rows))
            clear_rows(cpu, dS, p * w, ld, max(last, 0), rows)
            pairs_of_lanes(cpu, dS, p * w, ld, rows, dS_left, p * w // 2, k_pairs)


@part
def add_to_dq(cpu, grads, tiles, part_dq, scales, row0, rows, at, turn, turns, counter):
    """DQ += scale dS K for one tile, when its turn has come."""
    padded = grads.dq_stride
    while load_acquire(turns, turn) != tiles.turn[at]:
        if stopped(counter):  # whose turn it is may have left
            return
        give_way()
    for x in range(0, padded, cpu.width):
        add_scaled(cpu, grads.dq, row0 * padded + x, part_dq, x, padded, rows, scales)
    store_release(turns, turn, tiles.turn[at] + 1)


@part
def grad_queries(cpu, inputs, grads, shape, tiles, rules, notes, counter):
    """As `walks_backward.grad_queries`; inputs and dQ are bits of bfloat16."""
    w, d, dv, real, pair = cpu.width, shape.d, shape.dv, np.float32, np.uint32
    group, panels = shape.heads // shape.kv_heads, panels_of(cpu, shape.block_q)
    d_pairs, dv_pairs, d_rows, _ = sizes_of(shape)
    k_pairs = pair_tiles_of(shape.block_k)
    Q, dO = panel_array(panels * w * d_pairs, pair), panel_array(panels * w * dv_pairs, pair)
    K, V = panel_array(2 * k_pairs * d_pairs, pair), panel_array(2 * k_pairs * dv_pairs, pair)
    K_T, dQ = panel_array(d_rows * k_pairs, pair), panel_array(panels * w * d_rows, real)
    S, dS = panel_array(2 * k_pairs * w, real), panel_array(2 * k_pairs * w, real)
    P = panel_array(k_pairs * w, pair)
    L, delta = filled(panels * w, 0, real), filled(panels * w, 0, real)
    gate = panel_array(S.size if rules.softcap[0] > 0 else 0, real)
    scales = filled(shape.block_q, rules.scale, real)
    n_sets = tiles.set_ptr.size - 1
    begin_tiles(cpu, S)
    while True:
        item = fetch_add(counter)
        if item >= len(tiles.runs) * n_sets or stopped(counter):
            break
        i, s = tiles.runs[item // n_sets, 0], item % n_sets  # runs of one
        q0, rows, offset = tiles.own[i, 0], tiles.own[i, 1] - tiles.own[i, 0], tiles.own[i, 2]
        for at_head in range(tiles.set_ptr[s], tiles.set_ptr[s + 1]):
            h = tiles.sets[at_head]
            batch, head = h // shape.heads, h % shape.heads
            kv = (batch * shape.kv_heads + head // group) * shape.n_kv
            bias0 = batch * rules.bias_batch + head * rules.bias_head
            row0 = h * shape.n_q + q0
            right_of_rows(cpu, Q, inputs.q, row0 * d, rows, d)
            right_of_rows(cpu, dO, inputs.dout, row0 * dv, rows, dv)
            for r in range(rows):
                L[r], delta[r] = inputs.lse[row0 + r], inputs.delta[row0 + r]
            fill(dQ, real(0))
            for at in range(tiles.ptr[i], tiles.ptr[i + 1]):
                if stopped(counter):
                    break
                j = tiles.inner[at]
                k0, n = tiles.other[j, 0], tiles.other[j, 1] - tiles.other[j, 0]
                masked = tiles.kind[at] == MASKED
                left_of_rows(cpu, K, d_pairs, inputs.k, (kv + k0) * d, n, d)
                left_of_rows(cpu, V, dv_pairs, inputs.v, (kv + k0) * dv, n, dv)
                left_of_columns(cpu, K_T, k_pairs, k_pairs, inputs.k, (kv + k0) * d, n, d)
                for p in range(panels_of(cpu, rows)):
                    lanes, first, last = min(w, rows - p * w), 0, n
                    if masked and rules.banded:
                        rel = k0 - (q0 + p * w + offset)
                        first, last = visible_rows(rules, rel, 1, n, lanes)
                        if last <= first:
                            continue
                        first -= first % (2 * SIDE)  # whole tiles of pairs
                    x0, kept, start = first * w, last - first, first // 2
                    pairs = pair_tiles_of(kept)
                    pairs_set(
                        *(cpu, S, x0, w, K, first * d_pairs, d_pairs),
                        *(Q, p * d_pairs * w, w, tiles_of(kept), d_pairs),
                    )
                    scale_panel(cpu, S, x0, w, kept, scales)
                    place = place_of(
                        *(rules, tiles, at, bias0, q0, k0),
                        *(shape.n_kv, offset, n, True, 0, p * w),
                    )
                    if not is_plain(cpu, rules, masked, lanes):
                        finish_scores(
                            *(cpu, S, 0, w, first, last, lanes),
                            *(rules, place, masked, tiles.keep, gate),
                        )
                    pairs_set(
                        *(cpu, dS, x0, w, V, first * dv_pairs, dv_pairs),
                        *(dO, p * dv_pairs * w, w, tiles_of(kept), dv_pairs),
                    )
                    grad_scores_by_lane(cpu, S, x0, dS, x0, w, kept, L, delta, p * w)
                    if grads.dbias.size > 0:
                        add_bias_gradient(grads.dbias, dS, 0, w, first, last, lanes, place)
                    if rules.softcap[0] > 0:
                        apply_gate(dS, gate, 0, w, first, last, lanes)
                    pairs_of_rows(cpu, dS, x0, w, kept, P, 0)
                    clear_pairs(cpu, P, 0, w, (kept + 1) // 2, pairs)
                    pairs_add(
                        *(cpu, dQ, p * d_rows * w, w, K_T, start, k_pairs),
                        *(P, 0, w, d_rows, pairs),
                    )
                if notes.visits.size > 0:
                    notes.visits[h, at] = rows * NOTE + n
            for r in range(0, rows, w):
                to, lanes = (row0 + r) * d, min(w, rows - r)
                unpack_bits(cpu, rest(dQ, r * d_rows), grads.dq, to, lanes, d, scales)
            if notes.steps.size > 0:
                notes.steps[h, i] = rows
    end_tiles(cpu, S)
