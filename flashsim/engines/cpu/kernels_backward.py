"""The CPU engine's backward kernels, similar to the forward kernel in `kernels_forward.py`."""

import numpy as np

from flashsim.engines.cpu.bf16_dot.operations import begin_tiles, end_tiles
from flashsim.engines.cpu.functions import SCORE
from flashsim.engines.cpu.kernels_decode import padded as whole_lines
from flashsim.engines.cpu.kernels_forward import next_inner, next_work_tile, stopped
from flashsim.engines.cpu.micro_kernels.plain import dots, grad_scores_by_lane, grad_scores_by_row
from flashsim.engines.cpu.operands import (
    add_dq,
    add_product,
    left_of_lanes,
    left_of_rows,
    left_room,
    operand_room,
    or_pairs,
    pairs_room,
    prepare_dq,
    right_of_columns,
    right_of_panel,
    right_of_rows,
    rows_of,
    scale_scores,
    set_product,
    terms,
    turned,
    whole,
    wide_room,
    write_rows,
)
from flashsim.engines.cpu.primitives.arrays import panel_array, rest
from flashsim.engines.cpu.primitives.atomics import give_way, load_acquire, store_release
from flashsim.engines.cpu.primitives.inline_jit import part
from flashsim.engines.cpu.primitives.packing import (
    clear_rows,
    fill,
    filled,
    panels_of,
    room_for,
    widened,
)
from flashsim.engines.cpu.scores import (
    add_bias_gradient,
    apply_derivative,
    apply_gate,
    finish_scores,
    is_plain,
    only_if_hiding,
    place_of,
    rows_in_mask,
)
from flashsim.engines.cpu.tables import NOTE
from flashsim.schedule.schedule import MASKED


@part
def grad_keys(cpu, inputs, grads, shape, tiles, rules, notes, counter, fused, turns):
    """Compute dK, dV and, if `fused`, dQ; each lane of a panel is one key.

    In each visit (tile pair), a thread computes S = Q K^T, dP = dO V^T, dV^T += dO^T P and dK^T +=
    Q^T dS. If `fused`, the thread also adds dS K to the query tile's dQ in memory (``grads.dq``).
    ``turns[head, row tile]`` counts the additions to dQ; threads wait for their turns, so every sum
    has a fixed order. Threads cannot deadlock, because they process key tiles in the order of the
    turns. A thread processes neighbouring key tiles together (a run), so it reads a query tile's Q,
    dO and dQ from memory once per run.
    """
    w, d, dv, dtype, rounding = cpu.width, shape.d, shape.dv, inputs.lse.dtype, rules.rounding
    group, most, padded = shape.heads // shape.kv_heads, tiles.longest, grads.dq_stride
    ld = panels_of(cpu, shape.block_k) * w
    d_terms, dv_terms = terms(cpu, d), terms(cpu, dv)
    q_terms, k_terms = terms(cpu, shape.block_q), terms(cpu, ld)
    d_rows, dv_rows, q_rows = rows_of(cpu, d), rows_of(cpu, dv), whole(cpu, shape.block_q)
    K = operand_room(cpu, most * ld * d_terms, dtype)
    V = operand_room(cpu, most * ld * dv_terms, dtype)
    dK, dV = panel_array(most * ld * d_rows, dtype), panel_array(most * ld * dv_rows, dtype)
    K_rows = operand_room(cpu, most * k_terms * padded if fused else 0, dtype)
    Q = left_room(cpu, q_rows, d, dtype, rounding)
    dO = left_room(cpu, q_rows, dv, dtype, rounding)
    Q_T = pairs_room(cpu, d_rows * q_terms, np.uint32)
    dO_T = pairs_room(cpu, dv_rows * q_terms, np.uint32)
    S, dS = panel_array(q_rows * ld, dtype), panel_array(q_rows * ld, dtype)
    P = pairs_room(cpu, q_terms * w, np.uint32)
    dS_left = pairs_room(cpu, q_rows * k_terms if fused else 0, np.uint32)
    part_dq = pairs_room(cpu, q_rows * padded if fused else 0, dtype)
    gate = panel_array(S.size if rules.softcap[0] > 0 else 0, dtype)
    raw = panel_array(S.size if rules.calls[SCORE] != 0 else 0, dtype)
    # Of K, V and their gradients.
    rows = wide_room(cpu, shape.block_k * max(d, dv), dtype, rounding)
    scales, ones = filled(ld, rules.scale, dtype), filled(ld, 1, dtype)
    at = panel_array(most, np.int64)  # the next visit of each column tile
    begin_tiles(cpu, S)
    while True:
        begin, end, first_head, last_head = next_work_tile(tiles, counter)
        if begin == end:
            break
        for at_head in range(first_head, last_head):
            kv_head = tiles.sets[at_head]
            batch = kv_head // shape.kv_heads
            for j in range(begin, end):
                x, n = (j - begin) * ld, tiles.own[j, 1] - tiles.own[j, 0]
                k0 = (kv_head * shape.n_kv + tiles.own[j, 0]) * d
                v0 = (kv_head * shape.n_kv + tiles.own[j, 0]) * dv
                right_of_rows(cpu, rest(V, x * dv_terms), inputs.v, v0, n, dv, ones, rows, rounding)
                right_of_rows(cpu, rest(K, x * d_terms), inputs.k, k0, n, d, scales, rows, rounding)
                if fused:
                    to = rest(K_rows, (j - begin) * k_terms * padded)
                    right_of_columns(
                        *(cpu, to, padded, inputs.k, k0, n, d), *(rules.scale, rows, rounding)
                    )
            fill(dK, dtype.type(0))
            fill(dV, dtype.type(0))
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
                    of_q = left_of_rows(cpu, Q, 0, inputs.q, row0 * d, n, d, rounding)
                    of_do = left_of_rows(cpu, dO, 0, inputs.dout, row0 * dv, n, dv, rounding)
                    others = (
                        *(of_q, turned(cpu, of_q, Q_T, q_terms, inputs.q, row0 * d, n, d)),
                        *(of_do, turned(cpu, of_do, dO_T, q_terms, inputs.dout, row0 * dv, n, dv)),
                    )
                    for nth in range(end - begin):
                        j = end - 1 - nth if tiles.descending else begin + nth
                        x, now = (j - begin) * ld, at[j - begin]
                        if now == tiles.ptr[j + 1] or tiles.inner[now] != i:
                            continue
                        at[j - begin] += 1
                        own = rest(K, x * d_terms), rest(V, x * dv_terms)
                        sums = rest(dK, x * d_rows), rest(dV, x * dv_rows)
                        key_visit(
                            *(cpu, inputs, grads, shape, tiles, rules, own, sums, others),
                            *((S, dS, P, dS_left, gate, raw), scales, j, now, h, fused),
                        )
                        if fused:
                            dq_visit(
                                *(cpu, grads, shape, tiles, (dS, dS_left, part_dq), K_rows),
                                *((j - begin) * k_terms * padded, scales, j, now, h),
                                *(turns, counter),
                            )
                        if notes.visits.size > 0:
                            notes.visits[h, now] = n * NOTE + tiles.own[j, 1] - tiles.own[j, 0]
            for j in range(begin, end):
                x, n = (j - begin) * ld, tiles.own[j, 1] - tiles.own[j, 0]
                col0 = kv_head * shape.n_kv + tiles.own[j, 0]
                write_rows(
                    *(cpu, rest(dK, x * d_rows), grads.dk, col0 * d, n, d, scales),
                    *(rows, rounding, counter),
                )
                write_rows(
                    *(cpu, rest(dV, x * dv_rows), grads.dv, col0 * dv, n, dv, ones),
                    *(rows, rounding, counter),
                )
                if notes.steps.size > 0:
                    notes.steps[kv_head, j] = n
    end_tiles(cpu, S)


@part
def key_visit(
    cpu, inputs, grads, shape, tiles, rules, own, sums, others, work, scales, j, at, h, fused
):
    """Add a tile pair's terms to dK and dV, panel by panel; if `fused`, keep dS for `dq_visit`."""
    (K, V), (dK, dV), (Q, Q_T, dO, dO_T) = own, sums, others
    S, dS, P, dS_left, gate, raw = work
    w, d, dv, i = cpu.width, shape.d, shape.dv, tiles.inner[at]
    group = shape.heads // shape.kv_heads
    k0, n = tiles.own[j, 0], tiles.own[j, 1] - tiles.own[j, 0]
    q0, rows = tiles.other[i, 0], tiles.other[i, 1] - tiles.other[i, 0]
    ld, masked = panels_of(cpu, shape.block_k) * w, tiles.kind[at] == MASKED
    for p in range(panels_of(cpu, n)):
        lanes = min(w, n - p * w)
        first, last = rows_in_mask(*(cpu, rules, shape, tiles, at, h, j, i, False, p, rows, lanes))
        if last > first:
            x0, row0, kept = first * ld + p * w, h * shape.n_q + q0 + first, last - first
            if inputs.along.size > 0:
                key0 = h // shape.heads * shape.kv_heads + h % shape.heads // group
                key0 = key0 * shape.n_kv + k0 + p * w
                scores_of_one(cpu, rest(S, x0), inputs, key0, lanes, h, shape, rules)
            else:
                set_product(cpu, S, x0, ld, Q, first, 0, K, p * terms(cpu, d) * w, w, kept, d)
                scale_scores(cpu, S, x0, ld, kept, scales)
            position = place_of(cpu, rules, shape, tiles, at, h, j, i, False, 0, p)
            hidden = only_if_hiding(rules, position, masked, first, last)
            if not is_plain(cpu, rules, hidden, lanes):
                finish_scores(
                    *(cpu, S, p * w, ld, first, last, lanes),
                    *(rules, position, hidden, tiles.keep, gate, raw),
                )
            set_product(cpu, dS, x0, ld, dO, first, 0, V, p * terms(cpu, dv) * w, w, kept, dv)
            grad_scores_by_row(cpu, S, x0, dS, x0, ld, kept, inputs.lse, inputs.delta, row0)
            apply_derivative(rules, dS, raw, p * w, ld, first, last, lanes, position, fused)
            if fused and grads.dbias.size > 0:
                add_bias_gradient(grads.dbias, dS, p * w, ld, first, last, lanes, position)
            if rules.softcap[0] > 0:
                apply_gate(dS, gate, p * w, ld, first, last, lanes)
            right, b0, ldb = right_of_panel(cpu, S, x0, ld, kept, P, rules.rounding)
            dv0 = p * rows_of(cpu, dv) * w
            add_product(cpu, dV, dv0, w, dO_T, 0, first, right, b0, ldb, dv, kept)
            right, b0, ldb = right_of_panel(cpu, dS, x0, ld, kept, P, rules.rounding)
            dk0 = p * rows_of(cpu, d) * w
            add_product(cpu, dK, dk0, w, Q_T, 0, first, right, b0, ldb, d, kept)
        if fused:  # set dS outside the kept rows to 0, so that it adds nothing to dQ
            clear_rows(cpu, dS, p * w, ld, 0, min(first, rows))
            clear_rows(cpu, dS, p * w, ld, max(last, 0), rows)
            left_of_lanes(cpu, dS, p * w, ld, rows, dS_left, terms(cpu, ld))


@or_pairs(lambda cpu, S, inputs, key0, keys, h, shape, rules: None)
def scores_of_one(cpu, S, inputs, key0, keys, h, shape, rules):
    """Write the scores of a head's single query and `keys` keys to S[0], S[1] and so on.

    Each score's terms are added in the same order as in the forward pass (`decode`). Another order
    would change the scores' last bits, and rows of P would not sum to exactly 1. A component that
    all keys share cancels in dQ only if rows of P sum to exactly 1.
    """
    d, ld = shape.d, whole_lines(shape.d)
    dots(
        *(cpu, S, shape.block_k, inputs.k, key0 * d, d, inputs.along, h * ld, ld, keys, 1),
        *(inputs.factor, rules.rounding),
    )


@part
def dq_visit(cpu, grads, shape, tiles, of_ds, K, k0, scales, j, at, h, turns, counter):
    """Wait for this thread's turn, and add one tile pair's product dS K to dQ."""
    dS, dS_left, part_dq = of_ds
    i, padded, ld = tiles.inner[at], grads.dq_stride, panels_of(cpu, shape.block_k) * cpu.width
    rows, n = tiles.other[i, 1] - tiles.other[i, 0], tiles.own[j, 1] - tiles.own[j, 0]
    prepare_dq(cpu, part_dq, padded, dS_left, terms(cpu, ld), K, k0, rows, n)
    turn = h * tiles.other.shape[0] + i
    while load_acquire(turns, turn) != tiles.turn[at]:
        if stopped(counter):  # after an interrupt, the thread whose turn it is may have ended
            return
        give_way()
    to = (h * shape.n_q + tiles.other[i, 0]) * padded
    is_last = tiles.turn[at] == -1
    add_dq(
        *(cpu, grads.dq, to, padded, dS, ld, part_dq, K, k0, rows, n), *(scales, is_last, counter)
    )
    store_release(turns, turn, tiles.turn[at] + 1)


@part
def grad_queries(cpu, inputs, grads, shape, tiles, rules, notes, counter):
    """Compute dQ and the bias's gradient; each lane of a panel is one query.

    In each visit (tile pair), a thread computes S^T = K Q^T, dP^T = V dO^T and dQ^T += K^T dS^T.
    """
    w, d, dv, dtype, rounding = cpu.width, shape.d, shape.dv, inputs.lse.dtype, rules.rounding
    group, most = shape.heads // shape.kv_heads, panels_of(cpu, shape.block_q) * w
    d_terms, dv_terms, k_terms = terms(cpu, d), terms(cpu, dv), terms(cpu, shape.block_k)
    d_rows, k_rows = rows_of(cpu, d), whole(cpu, shape.block_k)
    Q = operand_room(cpu, most * d_terms, dtype)
    dO = operand_room(cpu, most * dv_terms, dtype)
    dQ = panel_array(most * d_rows, dtype)
    K = left_room(cpu, k_rows, d, dtype, rounding)
    V = left_room(cpu, k_rows, dv, dtype, rounding)
    K_T, P = pairs_room(cpu, d_rows * k_terms, np.uint32), pairs_room(cpu, k_terms * w, np.uint32)
    S, dS = panel_array(k_rows * w, dtype), panel_array(k_rows * w, dtype)
    L, delta = filled(most, 0, dtype), filled(most, 0, dtype)
    wide = wide_room(cpu, shape.block_q * max(d, dv), dtype, rounding)  # of Q, dO and dQ
    gate = panel_array(S.size if rules.softcap[0] > 0 else 0, dtype)
    raw = panel_array(S.size if rules.calls[SCORE] != 0 else 0, dtype)
    scales, ones = filled(most, rules.scale, dtype), filled(most, 1, dtype)
    scores = panel_array(whole_lines(shape.block_k) if inputs.along.size > 0 else 0, dtype)
    begin_tiles(cpu, S)
    while True:
        i, end, first_head, last_head = next_work_tile(tiles, counter)  # runs of one
        if i == end:
            break
        q0, rows = tiles.own[i, 0], tiles.own[i, 1] - tiles.own[i, 0]
        for at_head in range(first_head, last_head):
            h = tiles.sets[at_head]
            batch, head = h // shape.heads, h % shape.heads
            kv = (batch * shape.kv_heads + head // group) * shape.n_kv
            row0 = h * shape.n_q + q0
            right_of_rows(cpu, Q, inputs.q, row0 * d, rows, d, scales, wide, rounding)
            right_of_rows(cpu, dO, inputs.dout, row0 * dv, rows, dv, ones, wide, rounding)
            for r in range(rows):
                L[r], delta[r] = inputs.lse[row0 + r], inputs.delta[row0 + r]
            fill(dQ, dtype.type(0))
            for at in range(tiles.ptr[i], tiles.ptr[i + 1]):
                if stopped(counter):
                    break
                j = tiles.inner[at]
                k0, n = tiles.other[j, 0], tiles.other[j, 1] - tiles.other[j, 0]
                masked, key0 = tiles.kind[at] == MASKED, kv + k0
                of_k = left_of_rows(cpu, K, 0, inputs.k, key0 * d, n, d, rounding)
                of_v = left_of_rows(cpu, V, 0, inputs.v, key0 * dv, n, dv, rounding)
                columns = turned(cpu, of_k, K_T, k_terms, inputs.k, key0 * d, n, d)
                for p in range(panels_of(cpu, rows)):
                    lanes = min(w, rows - p * w)
                    first, last = rows_in_mask(
                        *(cpu, rules, shape, tiles, at, h, i, j, True, p, n, lanes)
                    )
                    if last <= first:
                        continue
                    x0, kept = first * w, last - first
                    if inputs.along.size > 0:
                        scores_of_one(cpu, scores, inputs, key0 + first, kept, h, shape, rules)
                        for r in range(kept):  # the query's lane; other lanes are padding
                            S[np.uint64(x0 + r * w)] = scores[np.uint64(r)]
                    else:
                        set_product(cpu, S, x0, w, of_k, first, 0, Q, p * d_terms * w, w, kept, d)
                        scale_scores(cpu, S, x0, w, kept, scales)
                    position = place_of(cpu, rules, shape, tiles, at, h, i, j, True, 0, p)
                    hidden = only_if_hiding(rules, position, masked, first, last)
                    if not is_plain(cpu, rules, hidden, lanes):
                        finish_scores(
                            *(cpu, S, 0, w, first, last, lanes),
                            *(rules, position, hidden, tiles.keep, gate, raw),
                        )
                    set_product(cpu, dS, x0, w, of_v, first, 0, dO, p * dv_terms * w, w, kept, dv)
                    grad_scores_by_lane(cpu, S, x0, dS, x0, w, kept, L, delta, p * w)
                    apply_derivative(rules, dS, raw, 0, w, first, last, lanes, position, True)
                    if grads.dbias.size > 0:
                        add_bias_gradient(grads.dbias, dS, 0, w, first, last, lanes, position)
                    if rules.softcap[0] > 0:
                        apply_gate(dS, gate, 0, w, first, last, lanes)
                    right, b0, ldb = right_of_panel(cpu, dS, x0, w, kept, P, rounding)
                    dq0 = p * d_rows * w
                    add_product(cpu, dQ, dq0, w, columns, 0, first, right, b0, ldb, d, kept)
                if notes.visits.size > 0:
                    notes.visits[h, at] = rows * NOTE + n
            write_rows(cpu, dQ, grads.dq, row0 * d, rows, d, scales, wide, rounding, counter)
            if notes.steps.size > 0:
                notes.steps[h, i] = rows
    end_tiles(cpu, S)


@part(fastmath={"reassoc"})
def row_dot(a, a0, b, b0, n):
    """Return the dot product of two rows; the compiler may reorder the sum to vectorise it."""
    total = a.dtype.type(0)
    for x in range(n):
        total += a[np.uint64(a0 + x)] * b[np.uint64(b0 + x)]  # as in `packing.copy_rows`
    return total


@part
def delta_rows(cpu, out, dout, dlse, delta, shape, tiles, rules, notes, counter):
    """Compute delta = rowsum(dO o O) - dlse, the first stage of a backward pass.

    `dlse`, the gradient of the LSE, may be empty. The derivative of the LSE by a score is P, so dS
    = P (dP - delta) includes the LSE's gradient.
    """
    dv, size = shape.dv, shape.block_q * shape.dv
    room_a = room_for(size, delta.dtype, rules.rounding)
    room_b = room_for(size, delta.dtype, rules.rounding)
    while True:
        begin, end, first_head, last_head = next_work_tile(tiles, counter)
        if begin == end:
            break
        for at_head in range(first_head, last_head):
            h = tiles.sets[at_head]
            for i in range(begin, end):
                row0, rows = h * shape.n_q + tiles.own[i, 0], tiles.own[i, 1] - tiles.own[i, 0]
                a, a0 = widened(cpu, room_a, out, row0 * dv, rows * dv, rules.rounding)
                b, b0 = widened(cpu, room_b, dout, row0 * dv, rows * dv, rules.rounding)
                for r in range(rows):
                    delta[row0 + r] = row_dot(a, a0 + r * dv, b, b0 + r * dv, dv)
                    if dlse.size > 0:
                        delta[row0 + r] -= dlse[row0 + r]
                if notes.steps.size > 0:
                    notes.steps[h, i] = tiles.own[i, 1] - tiles.own[i, 0]
