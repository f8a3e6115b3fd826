"""The backward walks of the CPU engine; see `walks.py`."""

from __future__ import annotations

import numpy as np

from flashsim.engines.cpu.micro_kernels.plain import (
    dots,
    grad_scores_by_lane,
    grad_scores_by_row,
    product_add,
    product_set,
)
from flashsim.engines.cpu.primitives.arrays import panel_array, rest
from flashsim.engines.cpu.primitives.atomics import fetch_add, give_way, load_acquire, store_release
from flashsim.engines.cpu.primitives.packing import (
    clear_rows,
    copy_rows,
    fill,
    filled,
    look,
    pack,
    pack_rows,
    panels_of,
    room_for,
    unpack_rows,
    widened,
)
from flashsim.engines.cpu.primitives.parts import part
from flashsim.engines.cpu.scores import (
    add_bias_gradient,
    apply_gate,
    finish_scores,
    is_plain,
    place_of,
    round_panel,
    visible_rows,
)
from flashsim.engines.cpu.tables import NOTE
from flashsim.engines.cpu.walks import next_inner, stopped
from flashsim.engines.cpu.walks_decode import padded
from flashsim.schedule.schedule import MASKED


@part
def grad_keys(cpu, inputs, grads, shape, tiles, rules, notes, counter, fused, turns):
    """dK and dV and, if `fused`, dQ: keys in the lanes, a thread owns column tiles of a key head.

    S = Q K^T, dP = dO V^T, dV^T += dO^T P, dK^T += Q^T dS and dQ += dS K, which is added to a tile
    of ``grads.dq`` in memory. Several threads add to one tile, so ``turns[head, row tile]`` counts
    the additions and each waits for its turn: the sums are the same for any number of threads.
    No two threads can wait for each other: outer tiles are handed out in the order of turns, and
    taken in that order within a run.

    A thread walks a run of column tiles together, as `walks.forward` does row tiles: Q, dO and dQ
    of a row tile, which come from far, serve all of them.
    """
    w, d, dv, t = cpu.width, shape.d, shape.dv, inputs.q.dtype
    group = shape.heads // shape.kv_heads
    most, ld, padded = tiles.longest, panels_of(cpu, shape.block_k) * w, grads.dq_stride
    K, V = panel_array(most * ld * d, t), panel_array(most * ld * dv, t)
    dK, dV = panel_array(most * ld * d, t), panel_array(most * ld * dv, t)
    K_rows = panel_array(most * ld * padded if fused else 0, t)
    S, dS = panel_array(shape.block_q * ld, t), panel_array(shape.block_q * ld, t)
    gate = panel_array(S.size if rules.softcap[0] > 0 else 0, t)
    rounding = rules.rounding
    Q, dO = (
        room_for(shape.block_q * d, t, rounding),
        room_for(shape.block_q * dv, t, rounding),
    )
    rows = room_for(shape.block_k * max(d, dv), t, rounding)  # of K, V and their gradients
    scales, ones = filled(shape.block_k, rules.scale, t), filled(shape.block_k, t.type(1), t)
    at = panel_array(most, np.int64)  # the next visit of each column tile
    n_sets = tiles.set_ptr.size - 1
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
                pack_rows(cpu, rest(V, x * dv), inputs.v, col0 * dv, n, dv, ones, rows, rounding)
                k, start = widened(cpu, rows, inputs.k, col0 * d, n * d, rounding)
                pack(cpu, rest(K, x * d), k, start, n, d, scales)
                if fused:
                    copy_rows(rest(K_rows, x * padded), padded, k, start, n, d, rules.scale)
            fill(dK, t.type(0))
            fill(dV, t.type(0))
            for member in range(group):
                h = batch * shape.heads + kv_head % shape.kv_heads * group + member
                for j in range(begin, end):
                    at[j - begin] = tiles.ptr[j]
                while True:
                    i = next_inner(tiles, at, begin, end, False)
                    if i < 0 or stopped(counter):
                        break
                    row0, n = tiles.other[i, 0], tiles.other[i, 1] - tiles.other[i, 0]
                    row0 += h * shape.n_q
                    others = (
                        widened(cpu, Q, inputs.q, row0 * d, n * d, rounding),
                        widened(cpu, dO, inputs.dout, row0 * dv, n * dv, rounding),
                    )
                    for place in range(end - begin):
                        j = end - 1 - place if tiles.descending else begin + place
                        x, now = (j - begin) * ld, at[j - begin]
                        if now == tiles.ptr[j + 1] or tiles.inner[now] != i:
                            continue
                        at[j - begin] += 1
                        state = (
                            rest(K, x * d),
                            rest(V, x * dv),
                            rest(dK, x * d),
                            rest(dV, x * dv),
                            S,
                            dS,
                            gate,
                        )
                        key_visit(
                            *(cpu, inputs, others, grads, shape, tiles, rules, state),
                            *(j, now, h, fused),
                        )
                        if fused:
                            add_to_dq(
                                *(cpu, grads, shape, tiles, dS, ld),
                                *(rest(K_rows, x * padded), j, now, h, turns, counter),
                            )
                        if notes.visits.size > 0:
                            notes.visits[h, now] = n * NOTE + tiles.own[j, 1] - tiles.own[j, 0]
            for j in range(begin, end):
                x, n = (j - begin) * ld, tiles.own[j, 1] - tiles.own[j, 0]
                col0 = kv_head * shape.n_kv + tiles.own[j, 0]
                unpack_rows(
                    *(cpu, rest(dK, x * d), grads.dk, col0 * d, n, d, scales),
                    *(rows, rounding, counter),
                )
                unpack_rows(
                    *(cpu, rest(dV, x * dv), grads.dv, col0 * dv, n, dv, ones),
                    *(rows, rounding, counter),
                )
                if notes.steps.size > 0:
                    notes.steps[kv_head, j] = n


@part
def key_visit(cpu, inputs, others, grads, shape, tiles, rules, state, j, at, h, fused):
    """One tile of dK and dV, a panel of keys at a time; if `fused`, dS is complete afterwards."""
    K, V, dK, dV, S, dS, gate = state
    (q, q_start), (dout, dout_start) = others
    w, d, dv, i = cpu.width, shape.d, shape.dv, tiles.inner[at]
    group = shape.heads // shape.kv_heads
    k0, n, offset = tiles.own[j, 0], tiles.own[j, 1] - tiles.own[j, 0], tiles.own[j, 2]
    q0, rows = tiles.other[i, 0], tiles.other[i, 1] - tiles.other[i, 0]
    ld, masked = panels_of(cpu, shape.block_k) * w, tiles.kind[at] == MASKED
    bias0 = h // shape.heads * rules.bias_batch + h % shape.heads * rules.bias_head
    for p in range(panels_of(cpu, n)):
        lanes, first, last = min(w, n - p * w), 0, rows
        if masked and rules.banded:
            rel = k0 + p * w - (q0 + offset)
            first, last = visible_rows(rules, rel, -1, rows, lanes)
        if fused:
            clear_rows(cpu, dS, p * w, ld, 0, min(first, rows))
            clear_rows(cpu, dS, p * w, ld, max(last, 0), rows)
        if last <= first:
            continue
        x0, row0, kept = first * ld + p * w, h * shape.n_q + q0 + first, last - first
        q0_kept, dout0 = q_start + first * d, dout_start + first * dv
        if inputs.along.size > 0:
            key0 = h // shape.heads * shape.kv_heads + h % shape.heads // group
            key0 = key0 * shape.n_kv + k0 + p * w
            scores_of_one(cpu, rest(S, x0), inputs, key0, lanes, h, shape, rules)
        else:
            product_set(cpu, S, x0, ld, q, q0_kept, d, 1, K, p * d * w, w, kept, d)
        place = place_of(
            *(rules, tiles, at, bias0, q0, k0),
            *(shape.n_kv, offset, n, False, 0, p * w),
        )
        if not is_plain(cpu, rules, masked, lanes):
            finish_scores(
                *(cpu, S, p * w, ld, first, last, lanes),
                *(rules, place, masked, tiles.keep, gate),
            )
        product_set(cpu, dS, x0, ld, dout, dout0, dv, 1, V, p * dv * w, w, kept, dv)
        grad_scores_by_row(cpu, S, x0, dS, x0, ld, kept, inputs.lse, inputs.delta, row0)
        if fused and grads.dbias.size > 0:
            add_bias_gradient(grads.dbias, dS, p * w, ld, first, last, lanes, place)
        if rules.softcap[0] > 0:
            apply_gate(dS, gate, p * w, ld, first, last, lanes)
        round_panel(cpu, S, x0, ld, kept, rules.rounding)
        round_panel(cpu, dS, x0, ld, kept, rules.rounding)
        product_add(cpu, dV, p * dv * w, w, dout, dout0, 1, dv, S, x0, ld, dv, kept)
        product_add(cpu, dK, p * d * w, w, q, q0_kept, 1, d, dS, x0, ld, d, kept)


@part
def scores_of_one(cpu, S, inputs, key0, keys, h, shape, rules):
    """Scores of a head's only query with `keys` keys, in S[0], S[1], ..: summed as `decode` does.

    Another order of summing gives other last bits. P would then not sum to 1, and what all keys
    have in common would no longer cancel in dQ.
    """
    d, ld = shape.d, padded(shape.d)
    dots(
        *(cpu, S, shape.block_k, inputs.k, key0 * d, d, inputs.along, h * ld, ld, keys, 1),
        *(inputs.factor, rules.rounding),
    )


@part
def add_to_dq(cpu, grads, shape, tiles, dS, ld, K_rows, j, at, h, turns, counter):
    """dQ += dS K for one tile, when its turn has come."""
    i, padded = tiles.inner[at], grads.dq_stride
    rows, n = tiles.other[i, 1] - tiles.other[i, 0], tiles.own[j, 1] - tiles.own[j, 0]
    turn = h * tiles.other.shape[0] + i
    while load_acquire(turns, turn) != tiles.turn[at]:
        if stopped(counter):  # whose turn it is may have left
            return
        give_way()
    to = (h * shape.n_q + tiles.other[i, 0]) * padded
    for x in range(0, padded, cpu.width):
        product_add(
            *(cpu, grads.dq, to + x, padded, dS, 0, ld, 1),
            *(K_rows, x, padded, rows, n),
        )
    if tiles.turn[at] == -1:
        look(counter, grads.dq, to, rows * padded)
    store_release(turns, turn, tiles.turn[at] + 1)


@part
def grad_queries(cpu, inputs, grads, shape, tiles, rules, notes, counter):
    """dQ and the bias's gradient: queries in the lanes, a thread owns a row tile.

    S^T = K Q^T, dP^T = V dO^T and dQ^T += K^T dS^T.
    """
    w, d, dv, t = cpu.width, shape.d, shape.dv, inputs.q.dtype
    group = shape.heads // shape.kv_heads
    lanes_all = panels_of(cpu, shape.block_q) * w
    Q, dO = panel_array(lanes_all * d, t), panel_array(lanes_all * dv, t)
    dQ = panel_array(lanes_all * d, t)
    S, dS = panel_array(shape.block_k * w, t), panel_array(shape.block_k * w, t)
    L, delta = filled(lanes_all, 0, t), filled(lanes_all, 0, t)
    rounding = rules.rounding
    K, V = room_for(shape.block_k * d, t, rounding), room_for(shape.block_k * dv, t, rounding)
    room = room_for(shape.block_q * max(d, dv), t, rounding)  # of Q, dO and dQ
    gate = panel_array(S.size if rules.softcap[0] > 0 else 0, t)
    scales, ones = filled(shape.block_q, rules.scale, t), filled(shape.block_q, t.type(1), t)
    scores = panel_array(padded(shape.block_k) if inputs.along.size > 0 else 0, t)
    n_sets = tiles.set_ptr.size - 1
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
            pack_rows(cpu, Q, inputs.q, row0 * d, rows, d, scales, room, rounding)
            pack_rows(cpu, dO, inputs.dout, row0 * dv, rows, dv, ones, room, rounding)
            for r in range(rows):
                L[r], delta[r] = inputs.lse[row0 + r], inputs.delta[row0 + r]
            fill(dQ, t.type(0))
            for at in range(tiles.ptr[i], tiles.ptr[i + 1]):
                if stopped(counter):
                    break
                j = tiles.inner[at]
                k0, n = tiles.other[j, 0], tiles.other[j, 1] - tiles.other[j, 0]
                masked, key0 = tiles.kind[at] == MASKED, kv + k0
                k, k_start = widened(cpu, K, inputs.k, key0 * d, n * d, rounding)
                v, v_start = widened(cpu, V, inputs.v, key0 * dv, n * dv, rounding)
                for p in range(panels_of(cpu, rows)):
                    lanes, first, last = min(w, rows - p * w), 0, n
                    if masked and rules.banded:
                        rel = k0 - (q0 + p * w + offset)
                        first, last = visible_rows(rules, rel, 1, n, lanes)
                        if last <= first:
                            continue
                    x0, kept, k_kept = first * w, last - first, k_start + first * d
                    if inputs.along.size > 0:
                        scores_of_one(cpu, scores, inputs, key0 + first, kept, h, shape, rules)
                        for r in range(kept):  # its lane; the others see nothing
                            S[np.uint64(x0 + r * w)] = scores[np.uint64(r)]
                    else:
                        product_set(cpu, S, x0, w, k, k_kept, d, 1, Q, p * d * w, w, kept, d)
                    place = place_of(
                        *(rules, tiles, at, bias0, q0, k0),
                        *(shape.n_kv, offset, n, True, 0, p * w),
                    )
                    if not is_plain(cpu, rules, masked, lanes):
                        finish_scores(
                            *(cpu, S, 0, w, first, last, lanes),
                            *(rules, place, masked, tiles.keep, gate),
                        )
                    v_kept = v_start + first * dv
                    product_set(cpu, dS, x0, w, v, v_kept, dv, 1, dO, p * dv * w, w, kept, dv)
                    grad_scores_by_lane(cpu, S, x0, dS, x0, w, kept, L, delta, p * w)
                    if grads.dbias.size > 0:
                        add_bias_gradient(grads.dbias, dS, 0, w, first, last, lanes, place)
                    if rules.softcap[0] > 0:
                        apply_gate(dS, gate, 0, w, first, last, lanes)
                    round_panel(cpu, dS, x0, w, kept, rules.rounding)
                    product_add(cpu, dQ, p * d * w, w, k, k_kept, 1, d, dS, x0, w, d, kept)
                if notes.visits.size > 0:
                    notes.visits[h, at] = rows * NOTE + n
            unpack_rows(cpu, dQ, grads.dq, row0 * d, rows, d, scales, room, rounding, counter)
            if notes.steps.size > 0:
                notes.steps[h, i] = rows


@part(fastmath={"reassoc"})
def row_dot(a, a0, b, b0, n):
    """Sum of products of one row, in an order that suits the vector registers."""
    total = a.dtype.type(0)
    for x in range(n):
        total += a[np.uint64(a0 + x)] * b[np.uint64(b0 + x)]  # as in `packing.copy_rows`
    return total


@part
def delta_rows(cpu, out, dout, dlse, delta, shape, tiles, rules, notes, counter):
    """delta = rowsum(dO o O), the first stage of a backward pass; less `dlse`, if it has elements.

    That is the gradient of the LSE, whose derivative by the scores is P: dS = P (dP - delta).
    """
    n_sets, dv, size = tiles.set_ptr.size - 1, shape.dv, shape.block_q * shape.dv
    rooms = (
        room_for(size, delta.dtype, rules.rounding),
        room_for(size, delta.dtype, rules.rounding),
    )
    while True:
        item = fetch_add(counter)
        if item >= len(tiles.runs) * n_sets or stopped(counter):
            break
        begin, end, s = tiles.runs[item // n_sets, 0], tiles.runs[item // n_sets, 1], item % n_sets
        for at_head in range(tiles.set_ptr[s], tiles.set_ptr[s + 1]):
            h = tiles.sets[at_head]
            for i in range(begin, end):
                row0, rows = h * shape.n_q + tiles.own[i, 0], tiles.own[i, 1] - tiles.own[i, 0]
                a, a0 = widened(cpu, rooms[0], out, row0 * dv, rows * dv, rules.rounding)
                b, b0 = widened(cpu, rooms[1], dout, row0 * dv, rows * dv, rules.rounding)
                for r in range(rows):
                    delta[row0 + r] = row_dot(a, a0 + r * dv, b, b0 + r * dv, dv)
                    if dlse.size > 0:
                        delta[row0 + r] -= dlse[row0 + r]
                if notes.steps.size > 0:
                    notes.steps[h, i] = tiles.own[i, 1] - tiles.own[i, 0]
