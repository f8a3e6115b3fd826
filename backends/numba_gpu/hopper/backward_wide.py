"""The KV-outer backward for head dims of 192 and 256 on Hopper, in Python.

The kernel is structured like kernels/hopper/backward_wide.cu. The accumulators of dK and dV for 64
keys fill both consumer warpgroups' registers. So each warpgroup has half of the columns of dK and
dV. Each warpgroup computes the scores of all 64 keys and half of the queries. The warpgroups
exchange P^T and dS^T through shared memory. Each warpgroup uses all of P^T and dS^T to compute its
own columns of dV, dK and dQ. With 256 columns, shared memory has no space for dQ, so the warpgroups
add dQ to the accumulator from registers. Without FUSED, the kernel in the module `dq` computes dQ.
With many work tiles, the fused backward in the module `backward_roles` is faster. The thread blocks
of a CLUSTER share the visits of a work tile.
"""

from functools import partial
from typing import Any

from numba import cuda
from numba.cuda import types

from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu import mma_tiles
from flashsim.backends.numba_gpu.hopper import gradients, wide_gradients
from flashsim.backends.numba_gpu.hopper import smem_layout as word
from flashsim.backends.numba_gpu.hopper import wgmma_tiles as hopper
from flashsim.backends.numba_gpu.hopper.key_gradients import key_gradients
from flashsim.backends.numba_gpu.hopper.kv_outer import roles, share_of
from flashsim.backends.numba_gpu.hopper.smem_layout import ColumnsDivided, columns_taken
from flashsim.backends.numba_gpu.hopper.work_tiles import item_functions
from flashsim.backends.numba_gpu.tensor import gradients as tensor_gradients
from flashsim.backends.numba_gpu.tensor import softmax
from flashsim.backends.numba_gpu.tensor.functions import first_rows_of, fragment_functions
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E
from flashsim.backends.numba_gpu.traversal import SLOTS, constants, device, quotient

int32, int64, float32 = types.int32, types.int64, types.float32
#: Named barriers: P and dS are written; each warpgroup's piece of dQ is free, and full.
_SCORES_READY, _DQ_FREE, _DQ_FULL = 1, 2, 4


def hopper_backward_wide_kernel(kernel: Kernel) -> Any:
    """Return the kernel's Python function, with the parameters of `hopper_backward_kernel`."""
    c = constants(kernel)
    at = ColumnsDivided(c.block_q, c.block_k, c.d, bool(c.fused))
    w = item_functions(c, at, by_row=False)
    return roles(
        *(c, at, w, _consumer(kernel, at, w)),
        piece_barriers=(_DQ_FREE, _DQ_FULL),
        sends=at.staged,
        start=False,
    )


def _consumer(kernel: Kernel, at: ColumnsDivided, w: Any) -> Any:
    """Return ``consume(a, shared, group)``, the loop of a consumer warpgroup."""
    c = constants(kernel)
    block_q, bf16, fused, staged = c.block_q, bool(c.bf16), bool(c.fused), at.staged
    dq_row_bytes = c.head_dim * 4  # of the accumulator
    scaled, softcap = bool(c.scaled), bool(c.softcap)
    queries, columns = block_q // 2, at.wide + at.narrow
    k_at, v_at, q_at, dout_at, p_at, ds_at, dq_at, lse_at, delta_at = map(at.region, at.regions)
    query_bytes, scores_bytes, dq_bytes = at.query_bytes, at.scores_bytes, at.dq_bytes
    kv_full, k_free, v_free = at.barrier("kv_full"), at.barrier("k_free"), at.barrier("v_free")
    full, free = at.barrier("full"), at.barrier("free")

    # -- Fragments
    depth = columns_taken(c.head_dim, c.head_dim_v, 16)
    new_sums, load_columns = mma_tiles.zeros(columns // 2), tensor_gradients.load_columns(queries)
    queue_scores = hopper.queue_scores(bf16, queries, depth, rows=c.block_k, of=block_q)
    all_done = hopper.product_wait(0)
    scores_done = hopper.product_wait(1)  # dP's product may be pending
    scale_scores = softmax.scale_scores(softcap)
    mask = gradients.mask_columns(bool(c.left), bool(c.right))
    probabilities = wide_gradients.column_probabilities(softcap)
    score_gradients = wide_gradients.column_gradients(bf16)
    round_scores = hopper.round_operand(bf16)
    f = fragment_functions(kernel, 1, queries, by_row=False)
    has_mask, has_score, apply_mask = f.has_mask, f.has_score, f.mask
    probabilities_of, masked_probabilities = f.probabilities, f.masked_probabilities
    slope_of, first_rows = f.slope, first_rows_of(kernel)
    score_products = gradients.score_products(bf16)
    scores_place = wide_gradients.scores_place
    store_scores = gradients.store_ds(c.block_k, 64)
    queue_sums = wide_gradients.queue_columns(bf16, at, down=False, more=True)
    queue_dq = wide_gradients.queue_columns(bf16, at, down=True, more=False)
    groups = 2 if at.narrow else 1  # of products, for all columns of a warpgroup
    dq_done = hopper.product_wait(2 * groups)
    # Without a staged dQ: everything except dK.
    dv_done = hopper.product_wait(groups)
    add_dq = wide_gradients.add_columns(at, c.key_row) if fused and not staged else None
    rows_place = wide_gradients.rows_place
    stage_dq = wide_gradients.stage_rows(block_q)
    get, speaks, wait, stage = hopper.get, hopper.speaks, hopper.wait, hopper.stage
    wait_full, arrive = hopper.wait_full, hopper.arrive
    fence_shared = gradients.fence_shared
    scores_ready = hopper.named_sync(128 * at.groups)
    piece_free, piece_full = hopper.named_sync(160), hopper.named_arrive(160)

    store_sums = partial(wide_gradients.store_columns, bf16, at)
    share, pieces, wide_pieces = share_of(c), columns // 32, at.wide // 32

    @device
    def place_of(piece, which, group):
        part = int32(piece - which * pieces)
        column = int32(128 * group + 32 * part)
        if part >= wide_pieces:  # the narrow columns
            column = int32(64 + 32 * group)
        return piece * 16, column

    put_gradients = key_gradients(c, at, w, columns, pieces, store_sums, place_of)

    @device
    def consume(a, shared, group):
        speaking = speaks()  # one arrival per warp
        to_log2 = float32(LOG2E) if scaled else a.scale * float32(LOG2E)  # exponents in base 2
        kv_heads = quotient(a.heads, a.group)
        row0 = int32(int32(cuda.threadIdx.x) % 128 // 32 * 16)  # first row of the warp in the tile
        k, v = int32(shared + k_at), int32(shared + v_at)
        mine = int32(queries * group)  # first query of the warpgroup in the tile
        p_mine = scores_place(shared + p_at, group)
        ds_mine = scores_place(shared + ds_at, group)
        dq_mine = rows_place(shared + dq_at + group * dq_bytes)
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
            dk, dv = new_sums(), new_sums()
            wait(shared + kv_full, item & 1)
            while left > 0:
                visit_stamp = w.visit_stamps(a, member, get(slot + word.FIRST) + n, 1 + group)
                tile, masked = w.visit(a, w.visits(slot), n)
                shift, now = int32((done & 1) * query_bytes), int32((done & 1) * (block_q * 4))
                turn = int32((done & 1) * scores_bytes)
                # -- S^T = K Q^T and dP^T = V dO^T, queued after the last visit's products --------
                w.stamp(visit_stamp, 0)
                wait_full(shared + full, done)
                w.stamp(visit_stamp, 1)
                lse = load_columns(shared + lse_at + now + mine * 4)
                deltas = load_columns(shared + delta_at + now + mine * 4)
                s = queue_scores(k, shared + q_at + shift + mine * 128)
                dp = queue_scores(v, shared + dout_at + shift + mine * 128)
                s = scores_done(s)  # and dV and dK of the last visit
                arrive(stage(shared + free, done + 1), speaking & (left < total))
                w.stamp(visit_stamp, 2)
                # -- P^T = exp2(c S^T - lse), under dP --------------------------------------------
                if scaled:
                    s = scale_scores(s, a.scale, a.softcap)
                if has_score or has_mask:
                    batch = quotient(walk, kv_heads)
                    head = int32(member - batch * a.heads)
                    q_first, k_first = first_rows(a, get(slot + word.OUTER))  # of the sequence
                    q_pos = get(slot + word.BASE) + tile * block_q + mine - q_first
                    k_pos = get(slot + word.START) + row0 - k_first
                    ends = get(slot + word.END) - 1 - q_first, get(slot + word.STOP) - 1 - k_first
                    place = q_pos, k_pos, ends[0], ends[1]
                if has_score:
                    if masked:
                        reach = get(slot + word.OFFSET) + q_first - k_first
                        p = masked_probabilities(a, batch, head, s, lse, *place, reach)
                    else:
                        p = probabilities_of(a, batch, head, s, lse, *place)
                else:
                    if masked:
                        query = int32(get(slot + word.BASE) + tile * block_q + mine)
                        key = int32(get(slot + word.START) + row0)
                        limits = get(slot + word.OFFSET), get(slot + word.STOP)
                        s = mask(s, key, query, limits[0], limits[1], a.left, a.right)
                        if has_mask:
                            s = apply_mask(a, batch, head, s, *place)
                    p, sloped = probabilities(s, lse, to_log2, a.softcap)
                    p = round_scores(p)
                # The other warpgroup may still read the other stage's P and dS. It finished reading
                # this stage before it reached the last visit's _SCORES_READY, which this warpgroup
                # has passed.
                store_scores(p_mine + turn, p)
                dp = all_done(dp)
                w.stamp(visit_stamp, 3)
                # -- dS^T = P^T (dP^T - delta) ----------------------------------------------------
                if has_score:
                    ds = score_products(p, wide_gradients.add_to_columns(dp, deltas))
                    ds = round_scores(slope_of(a, batch, head, s, ds, *place))
                else:
                    ds = score_gradients(sloped, dp, deltas)
                store_scores(ds_mine + turn, ds)
                fence_shared()
                scores_ready(int32(_SCORES_READY))
                # -- dV += P^T dO, dQ = dS K, dK += dS^T Q ----------------------------------------
                p_now, ds_now = int32(shared + p_at + turn), int32(shared + ds_at + turn)
                if staged:  # first, so that it is sent while the others run
                    dq = queue_dq(ds_now, k, group)
                dv = queue_sums(dv, p_now, shared + dout_at + shift, group)
                if fused and not staged:
                    dq = queue_dq(ds_now, k, group)
                dk = queue_sums(dk, ds_now, shared + q_at + shift, group)
                if staged:
                    dq = dq_done(dq)  # dV and dK continue into the next visit
                    piece_free(_DQ_FREE + group)  # the previous piece is sent
                    stage_dq(dq_mine, dq)
                    fence_shared()
                    piece_full(_DQ_FULL + group)
                else:
                    dv = dv_done(dv)  # dK continues into the next visit
                    if fused:
                        dq = dv_done(dq)
                        query = int32(get(slot + word.BASE) + tile * block_q)
                        row = int64(member) * a.n_q + query
                        rows = int32(get(slot + word.END) - query)
                        added = add_dq(a.dq_acc + row * dq_row_bytes, dq, rows, group)
                        number = int64(member) * a.n_visits + get(slot + word.FIRST) + n
                        w.report(a.visit_counts + number * (SLOTS * 4) + 16, added)
                w.stamp(visit_stamp, 4)
                done, left, n = int32(done + 1), int32(left - 1), int32(n + 1)
                if n == count:
                    member, n = int32(member + 1), int32(0)
            if total > 0:
                dk, dv = all_done(dk), all_done(dv)
                arrive(stage(shared + free, done + 1), speaking)
            # the next work tile's V and K may be loaded
            arrive(shared + v_free, speaking)
            arrive(shared + k_free, speaking)
            put_gradients(a, shared, slot, kv_heads, row0, group, dk, dv)
            w.leave(shared, item, speaking)
            w.stamp_block(tile_stamp, True)
            item = int32(item + 1)
        if staged:
            # the block must not exit before the copies have read its shared memory
            piece_free(_DQ_FREE + group)

    return consume
