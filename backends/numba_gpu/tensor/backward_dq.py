"""The Q-outer kernel for dQ, the third pass of the FlashAttention-2 backward.

A thread block computes row tile i of one head. For each column tile that the schedule lists, the
block recomputes S and dP, and adds dS K in registers. The kernel uses no atomics, so equal inputs
give bitwise equal results.

Q, dO, the log-sum-exp L and delta stay in shared memory until the block ends. K and V are in one or
two stages of shared memory. The matrices dQ, S, P, dP and dS are in registers.
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


def flash_dq_kernel(kernel: Kernel) -> Any:
    """Return the kernel's Python function of a `launch.ARGS`, for the constants of `kernel`."""
    c = constants(kernel)
    w = walk_functions(c)
    block_q, block_k, d, dv, threads = c.block_q, c.block_k, c.d, c.dv, kernel.threads
    bf16, two_stages, blocks = bool(c.bf16), c.stages == 2, block_q // (16 * c.warps)
    scaled, softcap = bool(c.scaled), bool(c.softcap)
    chunk = c.chunk  # keys whose scores are in registers at a time

    # -- Shared memory: Q (at the end dQ), dO, L, delta for the whole block; stages of K, V
    tile_q, tile_do = Tile(block_q, d), Tile(block_q, dv)
    tile_k, tile_v = Tile(block_k, d), Tile(block_k, dv)
    k_bytes, v_bytes = tile_k.nbytes, tile_v.nbytes
    do_at = tile_q.nbytes
    k_at = do_at + tile_do.nbytes
    v_at = k_at + c.stages * k_bytes
    lse_at = v_at + c.stages * v_bytes
    delta_at = lse_at + block_q * 4
    copies_q = tile_copies(tile_q, c.key_row, threads)
    load_q, store_q = copies_q.load, copies_q.store
    load_do = tile_copies(tile_do, c.value_row, threads).load
    load_k = tile_copies(tile_k, c.key_row, threads).load
    load_v = tile_copies(tile_v, c.value_row, threads).load
    load_vector = vector_load(block_q, threads)

    # -- Fragments
    new_scores, new_dq = mma_tiles.zeros(blocks * chunk // 2), mma_tiles.zeros(blocks * d // 2)
    pieces_q, pieces_do = (mma_tiles.pieces(x, transposed=False) for x in (tile_q, tile_do))
    pieces_k, columns_k = (mma_tiles.pieces(tile_k, transposed=x) for x in (True, False))
    pieces_v = mma_tiles.pieces(tile_v, transposed=True)
    swapped_k, swapped_v = Operand(tile_k, swapped=True), Operand(tile_v, swapped=True)
    multiply_qk = mma_tiles.multiply(bf16, blocks, d, Operand(tile_q), swapped_k)
    multiply_dov = mma_tiles.multiply(bf16, blocks, dv, Operand(tile_do), swapped_v)
    multiply_dsk = mma_tiles.multiply(bf16, blocks, chunk, "accumulators", Operand(tile_k))
    load_rows = gradients.load_rows(blocks)
    f = fragment_functions(kernel, blocks, chunk, by_row=True)
    has_mask, has_score = f.has_mask, f.has_score
    apply_score, keep, alive, slope_of = f.score, f.keep, f.alive, f.slope_alone
    first_rows, scale_scores = first_rows_of(kernel), softmax.scale_scores(softcap)
    apart = not has_score  # the softcap's slope is that of `probabilities`
    probabilities = gradients.probabilities(blocks, True, scaled and apart, softcap and apart)
    mask = gradients.mask_probabilities(blocks, True, bool(c.left), bool(c.right))
    score_gradients = gradients.score_gradients(blocks, True, softcap and apart)
    stage_dq = output.stage(bf16, blocks, tile_q)

    @device
    def load_visit(a, shared, stage, k, v, key, key_stop, slot):
        to = shared + stage * k_bytes + k_at
        w.report(slot, load_k(to, k + key * a.k_row * 2, a.k_row * 2, key_stop - key))
        to = shared + stage * v_bytes + v_at
        w.report(slot + 4, load_v(to, v + key * a.v_row * 2, a.v_row * 2, key_stop - key))

    def flash_dq(a):
        # -- Phase 0: what this block owns ------------------------------------------------------
        walk, outer = w.take_work(a)
        head, batch = walk % a.heads, walk // a.heads
        kv_head = head // a.group
        start, stop, offset = w.row_tile(a, outer)
        rows = stop - start
        steps = w.begin(a, outer)
        first, count = steps[0], steps[1]
        row0 = int32(cuda.threadIdx.x) // 32 * (16 * blocks)
        shared = shared_base()
        k = a.k_data + (batch * a.k_batch + kv_head * a.k_head) * 2
        v = a.v_data + (batch * a.v_batch + kv_head * a.v_head) * 2
        tile_count = w.tile_count(a, walk, outer)
        visit_count = w.visit_count(a, walk, first, 0)
        tile_stamp = a.tile_stamps + (int64(walk) * a.tiles + outer) * (TILE_STAMPS * 8)
        visit_stamp = a.visit_stamps + (int64(walk) * a.n_visits + first) * (VISIT_STAMPS * 8)
        w.stamp_block(tile_stamp, False)

        # -- Phase 1: start copying Q, dO, L, delta and the first K, V --------------------------
        q = a.q_data + (batch * a.q_batch + head * a.q_head + start * a.q_row) * 2
        dout = a.dout_data + (batch * a.dout_batch + head * a.dout_head + start * a.dout_row) * 2
        line = int64(walk) * a.n_q + start
        w.report(tile_count, load_q(shared, q, a.q_row * 2, rows))
        w.report(tile_count + 4, load_do(shared + do_at, dout, a.dout_row * 2, rows))
        w.report(tile_count + 8, load_vector(shared + lse_at, a.lse + line * 4, rows))
        w.report(tile_count + 12, load_vector(shared + delta_at, a.delta + line * 4, rows))
        key, key_stop, masked = int32(0), int32(0), False
        if count > 0:
            tile, masked = w.visit(a, steps, 0)
            key, key_stop, _ = w.col_tile(a, tile)
            if two_stages:
                load_visit(a, shared, 0, k, v, key, key_stop, visit_count)

        q_pieces = pieces_q(shared) + row0 * (d * 2)
        do_pieces = pieces_do(shared + do_at) + row0 * (dv * 2)
        k_pieces, k_columns = pieces_k(shared + k_at), columns_k(shared + k_at)
        v_pieces = pieces_v(shared + v_at)
        dq = new_dq()
        to_log2 = float32(LOG2E) if scaled else a.scale * float32(LOG2E)
        q_first, k_first = first_rows(a, outer)  # of the packed sequence

        for n in range(count):
            now = (n & 1) if two_stages else 0
            key_now, stop_now, masked_now = key, key_stop, masked
            w.stamp(visit_stamp, n * VISIT_STAMPS)
            if not two_stages:
                cuda.syncthreads()  # B0: all warps have read the only stage
                load_visit(a, shared, 0, k, v, key, key_stop, visit_count + n * (SLOTS * 4))
            copies_wait()
            cuda.syncthreads()  # B1: this visit's K, V (at first Q, dO, L, delta too) are complete;
            # all warps have read the stage that the next copies overwrite
            w.stamp(visit_stamp, n * VISIT_STAMPS + 1)
            if n + 1 < count:
                tile, masked = w.visit(a, steps, n + 1)
                key, key_stop, _ = w.col_tile(a, tile)
                if two_stages:
                    slot = visit_count + (n + 1) * (SLOTS * 4)
                    load_visit(a, shared, 1 - now, k, v, key, key_stop, slot)
            lse = load_rows(shared + lse_at + row0 * 4)
            delta = load_rows(shared + delta_at + row0 * 4)

            for k0 in range(0, block_k, chunk):
                k_shift, v_shift = now * k_bytes + k0 * (d * 2), now * v_bytes + k0 * (dv * 2)
                # -- Phase 2: S = Q K^T, dP = dO V^T --------------------------------------------
                s = multiply_qk(new_scores(), q_pieces, k_pieces + k_shift)
                dp = multiply_dov(new_scores(), do_pieces, v_pieces + v_shift)
                if k0 == 0:
                    w.stamp(visit_stamp, n * VISIT_STAMPS + 2)
                # -- Phase 3: P = exp(S - L), dS = P (dP - delta) -------------------------------
                if has_score or has_mask:
                    q_pos, q_last = start + row0 - q_first, stop - 1 - q_first
                    k_pos, k_last = key_now + k0 - k_first, stop_now - 1 - k_first
                if has_score:
                    s = scale_scores(s, a.scale, a.softcap)
                    t = apply_score(a, batch, head, s, q_pos, k_pos, q_last, k_last)
                    p, slope = probabilities(t, lse, a.scale, a.softcap, to_log2)
                    p = alive(t, p)
                else:
                    p, slope = probabilities(s, lse, a.scale, a.softcap, to_log2)
                if masked_now:
                    p = mask(p, start + row0, key_now + k0, offset, stop_now, a.left, a.right)
                    if has_mask:
                        p = keep(a, batch, head, p, q_pos, k_pos, q_last, k_last)
                ds = score_gradients(p, dp, delta, slope)
                if has_score:
                    ds = slope_of(a, batch, head, s, ds, q_pos, k_pos, q_last, k_last)
                if k0 == 0:
                    w.stamp(visit_stamp, n * VISIT_STAMPS + 3)
                # -- Phase 4: dQ += dS K --------------------------------------------------------
                dq = multiply_dsk(dq, ds, k_columns + k_shift)
            w.stamp(visit_stamp, n * VISIT_STAMPS + 4)

        # -- Phase 5: dQ *= scale; store --------------------------------------------------------
        copies_wait()  # a block without visits still has copies of Q, dO in flight
        cuda.syncthreads()  # B2: all warps have read Q, and no copy into it is under way
        stage_dq(shared, row0, 0, mma_tiles.scale_all(dq, a.scale))
        cuda.syncthreads()  # B3: dQ is complete; a thread stores rows that other warps staged
        to = a.dq_data + (batch * a.dq_batch + head * a.dq_head + start * a.dq_row) * 2
        w.report(tile_count + 16, store_q(shared, to, a.dq_row * 2, rows))
        w.stamp_block(tile_stamp, True)

    return flash_dq
