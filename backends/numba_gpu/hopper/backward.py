"""FlashAttention-3 backward (arXiv:2407.08608, Algorithm 3) for Hopper, in Python: KV-outer.

The kernel is structured like kernels/hopper/backward.cu. A thread block computes one tile of keys
of one KV head. Each of two consumer warpgroups has 64 of the tile's keys, and keeps these keys' dK
and dV in registers. Scores are transposed, so that P^T and dS^T already have a left operand's
layout in dV = P^T dO and dK = dS^T Q. Only the product dQ^T = K^T dS^T needs all keys of the tile,
so dS^T is written to shared memory for this product alone. A visit is one query tile times one key
tile. With DEFERRED, a visit's dQ is computed in the next visit, so that no warpgroup waits for the
other's dS.

TMA adds dQ to a float32 accumulator in HBM. With ORDERED, blocks add to dQ in the order of the key
tiles. One thread loads tiles, a second warp loads the rows' log-sum-exp and delta, and two more
warps send dQ to HBM. Without FUSED, the kernel in the module `dq` computes dQ. The blocks of a
CLUSTER divide the visits of a work tile, and add up dK and dV through shared memory.
"""

from typing import Any

from numba import cuda
from numba.cuda import types

from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu import mma_tiles
from flashsim.backends.numba_gpu.hopper import gradients
from flashsim.backends.numba_gpu.hopper import smem_layout as word
from flashsim.backends.numba_gpu.hopper import wgmma_tiles as hopper
from flashsim.backends.numba_gpu.hopper.key_gradients import key_gradients
from flashsim.backends.numba_gpu.hopper.kv_outer import roles, share_of
from flashsim.backends.numba_gpu.hopper.smem_layout import KeysOutside
from flashsim.backends.numba_gpu.hopper.work_tiles import item_functions
from flashsim.backends.numba_gpu.tensor import gradients as tensor_gradients
from flashsim.backends.numba_gpu.tensor import softmax
from flashsim.backends.numba_gpu.tensor.functions import first_rows_of, fragment_functions
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E
from flashsim.backends.numba_gpu.traversal import constants, device, quotient

int32, int64, float32 = types.int32, types.int64, types.float32
#: Named barriers (0 is syncthreads, and `key_gradients` uses 6): dS is written (if deferred,
#: mbarriers are used instead); each warpgroup's piece of dQ is free, and full.
_DS_READY, _DQ_FREE, _DQ_FULL = 1, 2, 4


def hopper_backward_kernel(kernel: Kernel) -> Any:
    """Return the kernel's Python function, specialised for the constants of `kernel`.

    The parameters are tensor maps of q, k, v, dout and dQ's accumulator (unused without FUSED), a
    `launch.ARGS`, and the address of a work counter that is 0 at the start. The counter's address
    is 0 if no block gets more than one work tile.
    """
    c = constants(kernel)
    at = KeysOutside(c.block_q, c.block_k, c.d, bool(c.fused), bool(c.deferred))
    assert c.cluster == 1 or not (c.ordered or c.timeline), "items have one block there"
    w = item_functions(c, at, by_row=False, part=bool(c.after or c.more))
    return roles(
        *(c, at, w, _consumer(kernel, at, w)),
        piece_barriers=(_DQ_FREE, _DQ_FULL),
        sends=bool(c.fused),
        start=not c.scaled,
    )


def _consumer(kernel: Kernel, at: KeysOutside, w: Any) -> Any:
    """Return ``consume(a, shared, group)``, a warpgroup's loop with 64 keys per work tile."""
    c = constants(kernel)
    block_q, block_k, d = c.block_q, c.block_k, c.d
    bf16, fused, scaled, softcap = bool(c.bf16), bool(c.fused), bool(c.scaled), bool(c.softcap)
    deferred = at.deferred  # dQ of a visit is computed in the next visit
    start = not scaled  # the scores' accumulators start at the statistics
    # dK of a visit is waited for in the next visit, if registers suffice.
    carry = d == 128 and block_q == 64 and start
    # The initial values of the next visit's scores are loaded while this visit's last products run:
    # for this many rows, the load takes long.
    early = fused and start and block_q == 128
    late = start and not early
    # dV is queued in slices of queries. There are few slices, since a wait counts at most 7 groups.
    slices = 4 if block_q == 128 else block_q // 16
    k_at, v_at, q_at, dout_at, ds_at, dq_at, lse_at, delta_at = map(at.region, at.regions)
    query_bytes, ds_bytes, dq_bytes = at.query_bytes, at.ds_bytes, at.dq_bytes
    ds_wide, dq_rows = at.ds_wide, at.dq_rows
    # Offsets of a warpgroup's columns of K and of its queries of dS.
    k_part = block_k * 128 if at.split_columns else 0
    ds_part = at.ds_part
    kv_full, k_free, v_free = at.barrier("kv_full"), at.barrier("k_free"), at.barrier("v_free")
    full, free = at.barrier("full"), at.barrier("free")
    # Two mbarriers for deferred dQ. One signals that all keys of a visit's dS are written, so that
    # the next visit may read them. The other signals that both warpgroups' products have read them,
    # so that the visit after that may overwrite them. Each dS is read once (a work tile's last dS
    # at the work tile's end), so a phase of each barrier ends once per visit of its stage. Hence
    # `done`, which counts visits across work tiles, gives the phase.
    ds_full, ds_free = (at.barrier(x) if deferred else 0 for x in ("ds_full", "ds_free"))

    # -- Fragments
    new_grad, load_columns = mma_tiles.zeros(d // 2), tensor_gradients.load_columns(block_q)
    queue_scores = hopper.queue_scores(bf16, block_q, d, rows=block_k, more=start)
    queue_dp = hopper.queue_scores(bf16, block_q, d, rows=block_k, more=True)
    # A later product may be pending: dP after the scores, dV after dP, dK after dQ and dV.
    first_done, all_done = hopper.product_wait(1), hopper.product_wait(0)
    scale_scores = softmax.scale_scores(softcap)
    mask = gradients.mask_columns(bool(c.left), bool(c.right))
    queue_dv = gradients.queue_dv(bf16, slices, softcap=softcap, start=start)
    score_gradients = gradients.score_gradients(bf16)
    f = fragment_functions(kernel, 1, block_q, by_row=False)
    has_mask, has_score, apply_mask = f.has_mask, f.has_score, f.mask
    probabilities, masked_probabilities = f.probabilities, f.masked_probabilities
    slope_of, first_rows = f.slope, first_rows_of(kernel)
    queue_whole_dv = hopper.queue_output(bf16)  # a score function takes no slices
    score_products = gradients.score_products(bf16)
    round_scores = hopper.round_operand(bf16)
    ds_place, dq_place = gradients.ds_place(ds_wide), gradients.dq_place(dq_rows)
    store_ds, stage_dq = gradients.store_ds(block_k, ds_wide), gradients.stage_dq
    queue_dq = gradients.queue_dq(bf16, dq_rows, block_k, ds_wide)
    queue_dk = hopper.queue_output(bf16)
    get, speaks, wait, stage = hopper.get, hopper.speaks, hopper.wait, hopper.stage
    wait_full, wait_free, arrive = hopper.wait_full, hopper.wait_free, hopper.arrive
    fence_shared = gradients.fence_shared
    ds_ready = hopper.named_sync(128 * at.groups)
    piece_free, piece_full = hopper.named_sync(160), hopper.named_arrive(160)

    def store_sums(row_of: Any) -> Any:
        store = hopper.store_output(bf16, row_of)

        @device
        def store_rows(to, row_bytes, sums, factors, key, stop, group):
            return store(to, row_bytes, sums, factors, key, stop)

        return store_rows

    share = share_of(c)
    pieces = -(-max(c.head_dim, c.head_dim_v) // 32)  # existing columns only

    @device
    def place_of(piece, which, group):
        column = int32((piece - which * pieces) * 32)
        return (which * d + column) // 2, column

    put_gradients = key_gradients(c, at, w, d, pieces, store_sums, place_of)

    @device
    def load_starts(shared, number):
        """Return the initial scores of the block's visit number `number`."""
        return gradients.start_columns(load_columns(shared + lse_at + (number & 1) * (block_q * 4)))

    @device
    def queue_piece(shared, group, number):
        """Queue this warpgroup's product dQ^T = K^T dS^T of the block's visit number `number`."""
        ds = int32(shared + ds_at + (number & 1) * ds_bytes + group * ds_part)
        return queue_dq(shared + k_at + group * k_part, ds)

    @device
    def hand_over(group, dq_mine, dq):
        """Write a piece of dQ to shared memory, and signal the warp that sends dQ to HBM."""
        piece_free(_DQ_FREE + group)  # the previous piece is sent
        stage_dq(dq_mine, dq)
        fence_shared()
        piece_full(_DQ_FULL + group)

    @device
    def consume(a, shared, group):
        speaking = speaks()  # one arrival per warp
        to_log2 = float32(LOG2E) if scaled else a.scale * float32(LOG2E)  # exponents in base 2
        kv_heads = quotient(a.heads, a.group)
        warp = int32(cuda.threadIdx.x) % 128 // 32
        row0 = int32(warp * 16 + 64 * group)  # first row of the warp in the tile
        k, v = int32(shared + k_at + group * 8192), int32(shared + v_at + group * 8192)
        ds_mine = ds_place(shared + ds_at, group)
        dq_mine = dq_place(shared + dq_at + group * dq_bytes)
        item, done = int32(0), int32(0)  # as in the producer
        while True:
            slot = w.take(shared, item)
            walk = get(slot + word.WALK)
            if walk < 0:
                break
            count = get(slot + word.COUNT)
            tile_stamp = w.tile_stamps(a, walk, get(slot + word.OUTER), 1 + group)
            w.stamp_block(tile_stamp, False)
            member = int32(walk * a.group)  # index of the query head
            further, n, total = share(a.group, count)
            member = int32(member + further)
            left = total
            dk, dv = new_grad(), new_grad()
            wait(shared + kv_full, item & 1)
            if early:
                if total > 0:
                    wait_full(shared + full, done)
                s = load_starts(shared, done)
            while left > 0:
                visit_stamp = w.visit_stamps(a, member, get(slot + word.FIRST) + n, 1 + group)
                tile, masked = w.visit(a, w.visits(slot), n)
                shift, now = int32((done & 1) * query_bytes), int32((done & 1) * (block_q * 4))
                lse = int32(shared + lse_at + now)
                dout = int32(shared + dout_at + shift)
                # -- S^T = K Q^T - lse / scale and dP^T = V dO^T - delta --------------------------
                # Both are loaded before either product is queued: otherwise the assembler makes the
                # second load wait for the first product.
                w.stamp(visit_stamp, 0)
                if not early:
                    wait_full(shared + full, done)
                w.stamp(visit_stamp, 1)
                if late:
                    starts = load_columns(lse)
                deltas = load_columns(shared + delta_at + now)
                if carry:
                    dk = all_done(dk)
                if late:
                    s = gradients.start_columns(starts)
                dp = gradients.start_columns(deltas)
                if start:
                    s = queue_scores(s, k, shared + q_at + shift)
                else:
                    s = queue_scores(k, shared + q_at + shift)
                dp = queue_dp(dp, v, dout)
                if carry:
                    arrive(stage(shared + free, done + 1), speaking & (left < total))
                s = first_done(s)
                w.stamp(visit_stamp, 2)
                # -- P^T = exp2(c S^T), under dP; dV += P^T dO, slice by slice --------------------
                if scaled:
                    s = scale_scores(s, a.scale, a.softcap)
                if has_score or has_mask:
                    batch = quotient(walk, kv_heads)
                    head = int32(member - batch * a.heads)
                    q_first, k_first = first_rows(a, get(slot + word.OUTER))  # of the sequence
                    q_pos = get(slot + word.BASE) + tile * block_q - q_first
                    k_pos = get(slot + word.START) + row0 - k_first
                    ends = get(slot + word.END) - 1 - q_first, get(slot + word.STOP) - 1 - k_first
                    place = q_pos, k_pos, ends[0], ends[1]
                if has_score:
                    starts = load_columns(lse)
                    if masked:
                        reach = get(slot + word.OFFSET) + q_first - k_first
                        p = masked_probabilities(a, batch, head, s, starts, *place, reach)
                    else:
                        p = probabilities(a, batch, head, s, starts, *place)
                    dv = queue_whole_dv(dv, p, dout)
                    dp = first_done(dp)
                else:
                    if masked:
                        query = int32(get(slot + word.BASE) + tile * block_q)
                        key = int32(get(slot + word.START) + row0)
                        limits = get(slot + word.OFFSET), get(slot + word.STOP)
                        s = mask(s, key, query, limits[0], limits[1], a.left, a.right)
                        if has_mask:
                            s = apply_mask(a, batch, head, s, *place)
                    p, dp, dv = queue_dv(s, dp, dv, to_log2, lse, a.softcap, dout)
                # the next work tile's V may be loaded
                arrive(shared + v_free, speaking & (left == 1))
                w.stamp(visit_stamp, 3)
                # -- dS^T = P^T dP^T, under dV ----------------------------------------------------
                if has_score:
                    ds = slope_of(a, batch, head, s, score_products(p, dp), *place)
                    ds = round_scores(ds)
                else:
                    ds = score_gradients(p, dp)
                if fused:
                    if deferred:  # both warpgroups' dQ products of two visits ago have read it
                        wait_free(shared + ds_free, done)
                    store_ds(ds_mine + (done & 1) * ds_bytes, ds)
                    fence_shared()
                    # -- dQ^T = K^T dS^T, dK += dS^T Q --------------------------------------------
                    # With deferral, this is the last visit's dQ. In a work tile's first visit the
                    # product is computed from whatever the buffer holds, and its result is not
                    # used: behind a branch, the assembler would serialize asynchronous products.
                    due = left < total if deferred else True
                    if deferred:
                        cuda.syncwarp()  # all lanes have written dS, and read the statistics
                        arrive(stage(shared + ds_full, done), speaking)
                        if due:  # both warpgroups' dS of the last visit is written
                            wait_full(shared + ds_full, done - 1)
                    else:
                        # All of dS is written. The other stage's dS is free from here on: both
                        # warpgroups waited for the last visit's products before this barrier.
                        ds_ready(int32(_DS_READY))
                    dq = queue_piece(shared, group, done - 1 if deferred else done)
                    dk = queue_dk(dk, ds, shared + q_at + shift)
                    dq = first_done(dq)  # and dV
                    if not deferred:  # the next work tile's K may be loaded
                        arrive(shared + k_free, speaking & (left == 1))
                    # -- dQ is sent while dK runs: staged here, sent by another warp --------------
                    if due:
                        if deferred:  # this warpgroup has read the last visit's dS
                            arrive(stage(shared + ds_free, done + 1), speaking)
                        hand_over(group, dq_mine, dq)
                else:
                    dk = queue_dk(dk, ds, shared + q_at + shift)
                    dv = first_done(dv)
                    arrive(shared + k_free, speaking & (left == 1))
                if early:  # if no visit follows, the values are loaded from this stage and not used
                    if left > 1:
                        wait_full(shared + full, done + 1)
                    s = load_starts(shared, done + 1)
                if not carry:
                    dk = all_done(dk)
                    arrive(stage(shared + free, done), speaking)
                w.stamp(visit_stamp, 4)
                done, left, n = int32(done + 1), int32(left - 1), int32(n + 1)
                if n == count:
                    member, n = int32(member + 1), int32(0)
            if total > 0:
                if deferred:  # the last visit's dQ
                    wait_full(shared + ds_full, done - 1)
                    dq = all_done(queue_piece(shared, group, done - 1))
                dk, dv = all_done(dk), all_done(dv)
                if carry:
                    arrive(stage(shared + free, done + 1), speaking)
                if deferred:
                    arrive(stage(shared + ds_free, done + 1), speaking)
                    arrive(shared + k_free, speaking)
                    hand_over(group, dq_mine, dq)
            else:
                arrive(shared + v_free, speaking)
                arrive(shared + k_free, speaking)
            put_gradients(a, shared, slot, kv_heads, row0, group, dk, dv)
            w.leave(shared, item, speaking)
            w.stamp_block(tile_stamp, True)
            item = int32(item + 1)
        if fused:
            # the block must not exit before the copies have read its shared memory
            piece_free(_DQ_FREE + group)

    return consume
