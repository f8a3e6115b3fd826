"""FlashAttention-2 backward, KV-outer, on tensor cores (arXiv:2307.08691, Algorithm 2).

A thread block computes column tile j of one KV head. For every query head of the GQA group, the
thread block loops over the row tiles that the schedule lists. The block computes transposed scores,
S^T = K Q^T. So the registers of P^T and dS^T are already a left operand of dV += P^T dO and dK +=
dS^T Q.

The fused backward also adds dS K to a float32 accumulator of dQ in HBM. The additions to dQ have no
fixed order, so the last bits of dQ vary. In the three-pass backward, the kernel in the module
`backward_dq` computes dQ. A visit's dQ product is computed in the next visit. With `halves`, half
of the warps compute dQ before their scores, and the other half after them. So while one of a
scheduler's warps computes exponentials, another warp keeps the tensor cores busy.

K and V stay in shared memory until the thread block ends. Q, dO, the log-sum-exp L and delta are in
one or two stages of shared memory. The matrices dK, dV, S^T, P^T and dP^T are in registers. The
matrix dS is also written to shared memory, because the dQ product needs the dS of several warps.
"""

from typing import Any

from numba import cuda
from numba.cuda import types

from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu import mma_tiles
from flashsim.backends.numba_gpu.mma_tiles import Operand, Tile
from flashsim.backends.numba_gpu.tensor import gradients, output, softmax
from flashsim.backends.numba_gpu.tensor.functions import first_rows_of, fragment_functions
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E
from flashsim.backends.numba_gpu.traversal import (
    SLOTS,
    TILE_STAMPS,
    VISIT_STAMPS,
    constants,
    copies_wait,
    device,
    shared_base,
    tile_copies,
    vector_load,
    walk_functions,
)

int32, int64, float32 = types.int32, types.int64, types.float32


def flash_dkdv_kernel(kernel: Kernel, *, wide: bool) -> Any:
    """Return the kernel as a Python function; `wide` (from sm_90 on) allows 16-byte additions."""
    c = constants(kernel)
    w = walk_functions(c)
    block_q, block_k, d, dv, threads = c.block_q, c.block_k, c.d, c.dv, kernel.threads
    bf16, fused, two_stages = bool(c.bf16), bool(c.fused), c.stages == 2
    scaled, softcap, head_dim = bool(c.scaled), bool(c.softcap), c.head_dim
    parts = c.parts  # warps that share 16 `blocks` keys; each has its columns of dK and dV
    blocks, chunk = block_k * parts // (16 * c.warps), c.chunk  # queries in registers at a time
    d_part, dv_part = d // parts, dv // parts

    # Shared memory: K, V for the whole block (at the end dK, dV); stages of Q, dO, L, delta; dS,
    # which is written in one visit and read in the next
    tile_k, tile_v = Tile(block_k, d), Tile(block_k, dv)
    tile_q, tile_do, tile_ds = Tile(block_q, d), Tile(block_q, dv), Tile(block_k, block_q)
    q_bytes, do_bytes, ds_bytes = tile_q.nbytes, tile_do.nbytes, tile_ds.nbytes
    v_at = tile_k.nbytes
    q_at = v_at + tile_v.nbytes
    do_at = q_at + c.stages * q_bytes
    ds_at = do_at + c.stages * do_bytes
    lse_at = ds_at + (2 * ds_bytes if fused else 0)
    delta_at = lse_at + c.stages * block_q * 4
    copies_k = tile_copies(tile_k, c.key_row, threads)
    copies_v = tile_copies(tile_v, c.value_row, threads)
    load_q = tile_copies(tile_q, c.key_row, threads).load
    load_do = tile_copies(tile_do, c.value_row, threads).load
    load_k, load_v, store_k, store_v = copies_k.load, copies_v.load, copies_k.store, copies_v.store
    load_vector = vector_load(block_q, threads)

    # -- Fragments
    new_scores = mma_tiles.zeros(blocks * chunk // 2)
    new_dk, new_dv = mma_tiles.zeros(blocks * d_part // 2), mma_tiles.zeros(blocks * dv_part // 2)
    pieces_k, pieces_v = (mma_tiles.pieces(x, transposed=False) for x in (tile_k, tile_v))
    pieces_q, pieces_do = (mma_tiles.pieces(x, transposed=True) for x in (tile_q, tile_do))
    columns_q, columns_do = (mma_tiles.pieces(x, transposed=False) for x in (tile_q, tile_do))
    pieces_ds = mma_tiles.pieces(tile_ds, transposed=True)
    columns_k = mma_tiles.pieces(tile_k, transposed=False)
    swapped_q, swapped_do = Operand(tile_q, swapped=True), Operand(tile_do, swapped=True)
    multiply_kq = mma_tiles.multiply(bf16, blocks, d, Operand(tile_k), swapped_q)
    multiply_vdo = mma_tiles.multiply(bf16, blocks, dv, Operand(tile_v), swapped_do)
    right_q, right_do = Operand(tile_q, extra=True), Operand(tile_do, extra=True)
    multiply_dsq = mma_tiles.multiply(bf16, blocks, chunk, "accumulators", right_q)
    multiply_pdo = mma_tiles.multiply(bf16, blocks, chunk, "accumulators", right_do)
    load_columns = gradients.load_columns(chunk)
    f = fragment_functions(kernel, blocks, chunk, by_row=False)
    has_mask, has_score = f.has_mask, f.has_score
    apply_score, keep, alive = f.score, f.keep, f.alive
    slope_of, slope_alone, first_rows = f.slope, f.slope_alone, first_rows_of(kernel)
    scale_scores = softmax.scale_scores(softcap)
    own = not has_score  # the softcap's slope is that of `probabilities`
    probabilities = gradients.probabilities(blocks, False, scaled and own, softcap and own)
    mask = gradients.mask_probabilities(blocks, False, bool(c.left), bool(c.right))
    score_gradients = gradients.score_gradients(blocks, False, softcap and own)
    stage_dk = output.stage(bf16, blocks, tile_k)
    stage_dv = output.stage(bf16, blocks, tile_v)
    stage_ds = output.stage(bf16, blocks, tile_ds)
    # dQ: the block's warps form a warps_q x warps_d grid over its (block_q, d) tile
    warps_q, warps_d = c.warps_q, c.warps // c.warps_q
    halves, half = bool(c.halves), (c.warps + 1) // 2
    dq_blocks, dq_cols = block_q // (16 * warps_q), -(-(d // 16) // warps_d) * 16
    new_dq = mma_tiles.zeros(dq_blocks * dq_cols // 2)
    left_ds = Operand(tile_ds, swapped=True, extra=True)
    right_k = Operand(tile_k, extra=True)
    multiply_dsk = mma_tiles.multiply(bf16, dq_blocks, block_k, left_ds, right_k)
    reduce_dq = output.reduce_tile(dq_blocks, c.key_row, wide)

    @device
    def load_visit(a, shared, stage, walk, head, batch, start, stop, slot):
        rows, line = stop - start, int64(walk) * a.n_q + start
        q = a.q_data + (batch * a.q_batch + head * a.q_head + start * a.q_row) * 2
        dout = a.dout_data + (batch * a.dout_batch + head * a.dout_head + start * a.dout_row) * 2
        to = shared + stage * q_bytes + q_at
        w.report(slot, load_q(to, q, a.q_row * 2, rows))
        to = shared + stage * do_bytes + do_at
        w.report(slot + 4, load_do(to, dout, a.dout_row * 2, rows))
        to = shared + stage * (block_q * 4)
        w.report(slot + 8, load_vector(to + lse_at, a.lse + line * 4, rows))
        w.report(slot + 12, load_vector(to + delta_at, a.delta + line * 4, rows))

    @device
    def add_dq(a, shared, warp, step, walk, start, rows, slot):
        """Add this warp's part of dS K to dQ, for the visit before loop step `step`."""
        row, col = warp % warps_q * (16 * dq_blocks), warp // warps_q * dq_cols
        ds_base = pieces_ds(shared + ds_at) + (1 - (step & 1)) * ds_bytes
        dq = multiply_dsk(new_dq(), ds_base, row, columns_k(shared), col)
        to = a.dq_acc + (int64(walk) * a.n_q + start) * (head_dim * 4)
        reduced = reduce_dq(to, dq, row, col, rows)
        w.report(a.visit_counts + slot * (SLOTS * 4) + 16, reduced)

    def flash_dkdv(a):
        # -- Phase 0: what this block owns ------------------------------------------------------
        walk, outer = w.take_work(a)
        kv_heads = a.heads // a.group
        kv_head, batch = walk % kv_heads, walk // kv_heads
        first_walk = batch * a.heads + kv_head * a.group  # of the group's query heads
        key, key_stop, offset = w.col_tile(a, outer)
        steps = w.begin(a, outer)
        first, count = steps[0], steps[1]
        warp = int32(cuda.threadIdx.x) // 32
        my_keys, part = warp // parts * (16 * blocks), warp % parts
        early = not halves or warp < half  # this warp computes dQ before its scores
        shared = shared_base()
        tile_count = w.tile_count(a, walk, outer)
        tile_stamp = a.tile_stamps + (int64(walk) * a.tiles + outer) * (TILE_STAMPS * 8)
        w.stamp_block(tile_stamp, False)

        # -- Phase 1: start copying K, V and the first Q, dO ------------------------------------
        k = a.k_data + (batch * a.k_batch + kv_head * a.k_head + key * a.k_row) * 2
        v = a.v_data + (batch * a.v_batch + kv_head * a.v_head + key * a.v_row) * 2
        w.report(tile_count, load_k(shared, k, a.k_row * 2, key_stop - key))
        w.report(tile_count + 4, load_v(shared + v_at, v, a.v_row * 2, key_stop - key))
        total = a.group * count
        start, stop, masked = int32(0), int32(0), False
        slot = int64(first_walk) * a.n_visits + first
        if total > 0:
            tile, masked = w.visit(a, steps, 0)
            start, stop, _ = w.row_tile(a, tile)
            if two_stages:
                at = a.visit_counts + slot * (SLOTS * 4)
                load_visit(a, shared, 0, first_walk, kv_head * a.group, batch, start, stop, at)

        k_pieces = pieces_k(shared) + my_keys * (d * 2)
        v_pieces = pieces_v(shared + v_at) + my_keys * (dv * 2)
        q_pieces, q_columns = pieces_q(shared + q_at), columns_q(shared + q_at)
        do_pieces, do_columns = pieces_do(shared + do_at), columns_do(shared + do_at)
        dk, dv_sum = new_dk(), new_dv()
        to_log2 = float32(LOG2E) if scaled else a.scale * float32(LOG2E)
        q_first, k_first = first_rows(a, outer)  # of the packed sequence
        member, n = int32(0), int32(0)  # query head of the group, visit in its loop
        last_walk, last_slot, last_start, last_rows = first_walk, slot, start, int32(0)

        # The fused loop has one more step, for the last visit's dQ.
        for u in range(total + (1 if fused else 0)):
            now = (u & 1) if two_stages else 0
            walk_now, start_now, stop_now, masked_now = first_walk + member, start, stop, masked
            slot = int64(walk_now) * a.n_visits + first + n
            visit_stamp = a.visit_stamps + slot * (VISIT_STAMPS * 8)
            if u < total:
                w.stamp(visit_stamp, 0)
                if not two_stages:
                    cuda.syncthreads()  # B0: all warps have read the only stage
                    head, at = kv_head * a.group + member, a.visit_counts + slot * (SLOTS * 4)
                    load_visit(a, shared, 0, walk_now, head, batch, start, stop, at)
            copies_wait()
            cuda.syncthreads()  # B1: this visit's Q, dO (at first K, V too) are complete, and so is
            # the last visit's dS; all warps have read what this visit's copies and dS overwrite
            if u < total:
                w.stamp(visit_stamp, 1)
            n += 1
            if n == count:
                n, member = 0, member + 1
            if u + 1 < total:
                tile, masked = w.visit(a, steps, n)
                start, stop, _ = w.row_tile(a, tile)
                if two_stages:
                    head, next_walk = kv_head * a.group + member, first_walk + member
                    next_slot = int64(next_walk) * a.n_visits + first + n
                    at = a.visit_counts + next_slot * (SLOTS * 4)
                    load_visit(a, shared, 1 - now, next_walk, head, batch, start, stop, at)

            # -- Phase 2: dQ += dS K of the last visit, all warps or half of them
            if fused and u > 0 and (early or u == total):
                add_dq(a, shared, warp, u, last_walk, last_start, last_rows, last_slot)
            if u == total:
                break

            lse_now = shared + now * (block_q * 4) + lse_at
            delta_now = shared + now * (block_q * 4) + delta_at
            for q0 in range(0, block_q, chunk):
                q_shift, do_shift = now * q_bytes + q0 * (d * 2), now * do_bytes + q0 * (dv * 2)
                # -- Phase 3: S^T = K Q^T, P^T = exp(S^T - L) -----------------------------------
                s = multiply_kq(new_scores(), k_pieces, q_pieces + q_shift)
                lse = load_columns(lse_now + q0 * 4)
                if has_score or has_mask:
                    head_now = walk_now - batch * a.heads
                    q_pos, q_last = start_now + q0 - q_first, stop_now - 1 - q_first
                    k_pos, k_last = key + my_keys - k_first, key_stop - 1 - k_first
                if has_score:
                    s = scale_scores(s, a.scale, a.softcap)
                    t = apply_score(a, batch, head_now, s, q_pos, k_pos, q_last, k_last)
                    p, slope = probabilities(t, lse, a.scale, a.softcap, to_log2)
                    p = alive(t, p)
                else:
                    p, slope = probabilities(s, lse, a.scale, a.softcap, to_log2)
                if q0 == 0:
                    w.stamp(visit_stamp, 2)
                # -- Phase 4: dP^T = V dO^T -----------------------------------------------------
                dp = multiply_vdo(new_scores(), v_pieces, do_pieces + do_shift)
                if masked_now:
                    query = start_now + q0
                    p = mask(p, query, key + my_keys, offset, key_stop, a.left, a.right)
                    if has_mask:
                        p = keep(a, batch, head_now, p, q_pos, k_pos, q_last, k_last)
                # -- Phase 5: dS^T = P^T (dP^T - delta); dV += P^T dO ---------------------------
                ds = score_gradients(p, dp, load_columns(delta_now + q0 * 4), slope)
                if has_score and part == 0:
                    ds = slope_of(a, batch, head_now, s, ds, q_pos, k_pos, q_last, k_last)
                elif has_score:  # another warp adds the gradients of captured arrays
                    ds = slope_alone(a, batch, head_now, s, ds, q_pos, k_pos, q_last, k_last)
                if fused and part == 0:
                    stage_ds(shared + (u & 1) * ds_bytes + ds_at, my_keys, q0, ds)
                dv_sum = multiply_pdo(dv_sum, p, do_columns + do_shift, part * dv_part)
                # -- Phase 6: dK += dS^T Q ------------------------------------------------------
                dk = multiply_dsq(dk, ds, q_columns + q_shift, part * d_part)
            w.stamp(visit_stamp, 3)
            # -- Phase 7: dQ += dS K of the last visit, the other half
            if fused and u > 0 and not early:
                add_dq(a, shared, warp, u, last_walk, last_start, last_rows, last_slot)
            last_walk, last_slot = walk_now, slot
            last_start, last_rows = start_now, stop_now - start_now
            w.stamp(visit_stamp, 4)

        # -- Phase 8: dK *= scale; store dK, dV -------------------------------------------------
        copies_wait()  # a block without visits still has copies of K, V in flight
        cuda.syncthreads()  # B2: all warps have read K and V; dK and dV are staged over them
        stage_dk(shared, my_keys, part * d_part, mma_tiles.scale_all(dk, a.scale))
        stage_dv(shared + v_at, my_keys, part * dv_part, dv_sum)
        cuda.syncthreads()  # B3: dK, dV are complete; a thread stores rows that other warps staged
        to = a.dk_data + (batch * a.dk_batch + kv_head * a.dk_head + key * a.dk_row) * 2
        w.report(tile_count + 8, store_k(shared, to, a.dk_row * 2, key_stop - key))
        to = a.dv_data + (batch * a.dv_batch + kv_head * a.dv_head + key * a.dv_row) * 2
        w.report(tile_count + 12, store_v(shared + v_at, to, a.dv_row * 2, key_stop - key))
        w.stamp_block(tile_stamp, True)

    return flash_dkdv
