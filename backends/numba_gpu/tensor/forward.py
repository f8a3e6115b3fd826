"""FlashAttention-2 forward on tensor cores, in Python (arXiv:2307.08691, Algorithm 1).

A thread block computes one row tile of a head, in a loop over the column tiles that the schedule
lists. K and V have two stages of shared memory each, so that copies overlap with the previous
visit. O, m, l, S and P are in registers. Q stays in registers if there are enough, and otherwise in
shared memory.
"""

from typing import Any

from numba import cuda
from numba.cuda import types

from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu import mma_tiles
from flashsim.backends.numba_gpu.mma_tiles import Operand, Tile
from flashsim.backends.numba_gpu.tensor import output, softmax
from flashsim.backends.numba_gpu.tensor.functions import first_rows_of, fragment_functions, sink_of
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E, NEG_INF
from flashsim.backends.numba_gpu.traversal import (
    SLOTS,
    TILE_STAMPS,
    VISIT_STAMPS,
    constants,
    copies_wait,
    shared_base,
    tile_copies,
    walk_functions,
)

int32, int64, float32 = types.int32, types.int64, types.float32


def flash_forward_kernel(kernel: Kernel) -> Any:
    """Return the kernel's Python function of a `launch.ARGS`, for the constants of `kernel`."""
    c = constants(kernel)
    w = walk_functions(c)
    block_q, block_k, d, dv, threads = c.block_q, c.block_k, c.d, c.dv, kernel.threads
    bf16, blocks = bool(c.bf16), block_q // (16 * c.warps)  # 16-row blocks per warp
    q_regs, scaled, softcap = bool(c.q_regs), bool(c.scaled), bool(c.softcap)

    # Shared memory: Q for the whole block; a stage of K, V for one visit; O over them at the end
    tile_q, tile_k = Tile(block_q, d), Tile(block_k, d)
    tile_v, tile_o = Tile(block_k, dv), Tile(block_q, dv)
    k_bytes, v_bytes = tile_k.nbytes, tile_v.nbytes
    k_at = tile_q.nbytes
    v_at = k_at + 2 * k_bytes
    load_q = tile_copies(tile_q, c.key_row, threads).load
    load_k = tile_copies(tile_k, c.key_row, threads).load
    load_v = tile_copies(tile_v, c.value_row, threads).load
    store_o = tile_copies(tile_o, c.value_row, threads).store

    # -- Fragments
    new_scores, new_o = mma_tiles.zeros(blocks * block_k // 2), mma_tiles.zeros(blocks * dv // 2)
    new_max, new_sum = mma_tiles.full(2 * blocks, NEG_INF), mma_tiles.zeros(2 * blocks)
    pieces_q, pieces_v = (mma_tiles.pieces(x, transposed=False) for x in (tile_q, tile_v))
    pieces_k = mma_tiles.pieces(tile_k, transposed=True)
    keep_q = mma_tiles.load_fragments(blocks, d, tile_q)
    left = "registers" if q_regs else Operand(tile_q)
    multiply_qk = mma_tiles.multiply(bf16, blocks, d, left, Operand(tile_k, swapped=True))
    multiply_pv = mma_tiles.multiply(bf16, blocks, block_k, "accumulators", Operand(tile_v))
    scale_scores = softmax.scale_scores(softcap)
    mask = softmax.mask_rows(blocks, bool(c.left), bool(c.right))
    f = fragment_functions(kernel, blocks, block_k, by_row=True)
    has_mask, has_score = f.has_mask, f.has_score
    apply_score, apply_mask, first_rows = f.score, f.mask, first_rows_of(kernel)
    sinks, sink_of_head = kernel.sinks, sink_of(kernel)
    stage_o = output.stage(bf16, blocks, tile_o)

    def flash_forward(a):
        # -- Phase 0: what this block owns ------------------------------------------------------
        walk, outer = w.take_work(a)
        head, batch = walk % a.heads, walk // a.heads
        kv_head = head // a.group
        start, stop, offset = w.row_tile(a, outer)
        steps = w.begin(a, outer)
        first, count = steps[0], steps[1]
        row0 = int32(cuda.threadIdx.x) // 32 * (16 * blocks)  # the warp's first row in the tile
        shared = shared_base()
        q = a.q_data + (batch * a.q_batch + head * a.q_head + start * a.q_row) * 2
        k = a.k_data + (batch * a.k_batch + kv_head * a.k_head) * 2
        v = a.v_data + (batch * a.v_batch + kv_head * a.v_head) * 2
        tile_count = w.tile_count(a, walk, outer)
        visit_count = w.visit_count(a, walk, first, 0)
        tile_stamp = a.tile_stamps + (int64(walk) * a.tiles + outer) * (TILE_STAMPS * 8)
        visit_stamp = a.visit_stamps + (int64(walk) * a.n_visits + first) * (VISIT_STAMPS * 8)
        w.stamp_block(tile_stamp, False)

        # -- Phase 1: start copying Q and the first K, V ----------------------------------------
        w.report(tile_count, load_q(shared, q, a.q_row * 2, stop - start))
        tile, masked = int32(0), False
        if count > 0:
            tile, masked = w.visit(a, steps, 0)
            key, key_stop, _ = w.col_tile(a, tile)
            moved = load_k(shared + k_at, k + key * a.k_row * 2, a.k_row * 2, key_stop - key)
            w.report(visit_count, moved)
            moved = load_v(shared + v_at, v + key * a.v_row * 2, a.v_row * 2, key_stop - key)
            w.report(visit_count + 4, moved)

        o, m, l = new_o(), new_max(), new_sum()
        q_left = pieces_q(shared) + row0 * (d * 2)
        if q_regs:
            copies_wait()
            cuda.syncthreads()  # B0: Q is complete before any warp reads it
            q_left = keep_q(q_left)
        k_pieces, v_pieces = pieces_k(shared + k_at), pieces_v(shared + v_at)
        to_log2 = float32(LOG2E) if scaled else a.scale * float32(LOG2E)  # exponents in base 2
        q_first, k_first = first_rows(a, outer)  # of the packed sequence

        for n in range(count):
            now = n & 1
            key, key_stop, _ = w.col_tile(a, tile)
            masked_now = masked
            w.stamp(visit_stamp, n * VISIT_STAMPS)
            copies_wait()
            cuda.syncthreads()  # B1: this visit's K, V are complete (on the first one Q too), and
            # all warps have read the stage that the next copies overwrite
            w.stamp(visit_stamp, n * VISIT_STAMPS + 1)
            if n + 1 < count:
                tile, masked = w.visit(a, steps, n + 1)
                to, next_stop, _ = w.col_tile(a, tile)
                slot = visit_count + (n + 1) * (SLOTS * 4)
                at = shared + (1 - now) * k_bytes + k_at
                w.report(slot, load_k(at, k + to * a.k_row * 2, a.k_row * 2, next_stop - to))
                at = shared + (1 - now) * v_bytes + v_at
                w.report(slot + 4, load_v(at, v + to * a.v_row * 2, a.v_row * 2, next_stop - to))

            # -- Phase 2: S = Q K^T -------------------------------------------------------------
            s = multiply_qk(new_scores(), q_left, k_pieces + now * k_bytes)
            w.stamp(visit_stamp, n * VISIT_STAMPS + 2)
            # -- Phase 3: scale and cap (if the exponent cannot apply the scale), mask ----------
            if scaled:
                s = scale_scores(s, a.scale, a.softcap)
            if has_score or has_mask:
                q_pos, q_last = start + row0 - q_first, stop - 1 - q_first
                k_pos, k_last = key - k_first, key_stop - 1 - k_first
            if has_score:
                s = apply_score(a, batch, head, s, q_pos, k_pos, q_last, k_last)
            if masked_now:
                s = mask(s, start + row0, key, offset, key_stop, a.left, a.right)
                if has_mask:
                    s = apply_mask(a, batch, head, s, q_pos, k_pos, q_last, k_last)
            # -- Phase 4: m_new = max(m, rowmax S); O, l rescaled; P = exp(S - m_new) -----------
            # The rescaling precedes the exponentials, so that these can overlap with the first
            # products of phase 5.
            top = softmax.row_max(m, s)
            base = softmax.softmax_base(top, to_log2)
            alpha = softmax.rescaling(m, base, to_log2)
            m = top
            o = softmax.scale_rows(o, alpha)
            p, l = softmax.exponentials(s, base, l, alpha, to_log2)
            w.stamp(visit_stamp, n * VISIT_STAMPS + 3)
            # -- Phase 5: O += P V --------------------------------------------------------------
            o = multiply_pv(o, p, v_pieces + now * v_bytes)
            w.stamp(visit_stamp, n * VISIT_STAMPS + 4)

        # -- Phase 6: O /= l, L = m + log l -----------------------------------------------------
        copies_wait()  # a block without visits still has a copy of Q in flight
        cuda.syncthreads()  # B2: all warps have read K, V and Q; O is staged over them
        if sinks:
            sink = sink_of_head(a, head)
            inverse, lse = softmax.finish_rows_with_sink(m, l, to_log2 * float32(1 / LOG2E), sink)
        else:
            inverse, lse = softmax.finish_rows(m, l, to_log2 * float32(1 / LOG2E))
        moved = output.store_rows(a.lse + int64(walk) * a.n_q * 4, lse, start + row0, stop)
        w.report(tile_count + 8, moved)
        stage_o(shared, row0, 0, softmax.scale_rows(o, inverse))
        cuda.syncthreads()  # B3: O is complete; a thread stores rows that other warps staged
        out = a.o_data + (batch * a.o_batch + head * a.o_head + start * a.o_row) * 2
        w.report(tile_count + 4, store_o(shared, out, a.o_row * 2, stop - start))
        w.stamp_block(tile_stamp, True)

    return flash_forward
