"""The fused backward for head dims of 129 to 192 on Hopper, in Python, with warpgroup roles.

The kernel is structured like kernels/hopper/backward_roles.cu. The kernel is KV-outer, and each
warpgroup computes different products. One consumer warpgroup computes the scores, P and dS of a
tile pair (64 queries by 96 keys), followed by dQ. A second warpgroup accumulates dV^T, and a third
one dK^T, for all keys and columns of a tile. P and dS are transposed when they pass through shared
memory. Each row of the scores belongs to one query.
"""

from types import SimpleNamespace
from typing import Any

from numba import cuda
from numba.cuda import types

from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu import mma_tiles
from flashsim.backends.numba_gpu.hopper import gradients, wide_gradients
from flashsim.backends.numba_gpu.hopper import smem_layout as word
from flashsim.backends.numba_gpu.hopper import wgmma_tiles as hopper
from flashsim.backends.numba_gpu.hopper.kv_outer import producer, sender, statistics
from flashsim.backends.numba_gpu.hopper.smem_layout import ROLES_REGISTERS, Roles, columns_taken
from flashsim.backends.numba_gpu.hopper.work_tiles import item_functions
from flashsim.backends.numba_gpu.tensor import softmax
from flashsim.backends.numba_gpu.tensor.functions import first_rows_of, fragment_functions
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E
from flashsim.backends.numba_gpu.traversal import SLOTS, constants, device, quotient, shared_base

int32, int64, float32 = types.int32, types.int64, types.float32
#: Named barriers. P is written; dS is written; dK's warpgroup has read dS; dS is written, for dQ;
#: dQ is sent, and is staged. P needs no barrier for its readers: a visit's P is written after its
#: dO has arrived, and for that dV's warpgroup was done with the last visit's dO, and P.
_P_FULL, _DS_FULL, _DS_FREE, _DS_WRITTEN, _DQ_FREE, _DQ_FULL = range(1, 7)


def hopper_backward_roles_kernel(kernel: Kernel) -> Any:
    """Return the kernel's Python function, with the parameters of `hopper_backward_kernel`."""
    c = constants(kernel)
    c.cluster = 1
    at = Roles(c.block_q, c.block_k, c.d, columns_taken(c.head_dim, c.head_dim_v, 32))
    w = item_functions(c, at, by_row=False)
    produce = producer(c, at, w)
    produce_statistics = statistics(c, at, w, start=False)
    send_dq = sender(c, at, w, (_DQ_FREE, _DQ_FULL))
    make_scores = _scores(kernel, at, w)
    add_values, add_keys = (_sums(c, at, w, values=x) for x in (True, False))
    barriers_begin = hopper.barriers_begin(at.barrier_arrivals)
    give, scores, sums = ROLES_REGISTERS
    give_registers = hopper.registers(give, more=False)
    # The block's threads begin with 128 registers each.
    take_scores, take_sums = (hopper.registers(x, more=True) for x in (scores, sums))
    warpgroup, warp_of = hopper.warpgroup, hopper.warp

    def hopper_backward_roles(map_q, map_k, map_v, map_dout, map_dq, a, counter):
        shared = shared_base()
        if cuda.threadIdx.x == 0:
            barriers_begin(shared)
        cuda.syncthreads()  # no thread uses a barrier before it is initialised
        role = warpgroup()
        if role == 0:
            give_registers()
            warp = warp_of()
            if warp == 1:
                produce_statistics(a, shared)
            elif warp == 2:
                send_dq(map_dq, a, shared, int32(0))
            elif cuda.threadIdx.x == 0:
                produce(map_q, map_k, map_v, map_dout, a, counter, shared)
        elif role == 1:
            take_scores()
            make_scores(a, shared)
        else:
            take_sums()
            if role == 2:
                add_values(a, shared)
            else:
                add_keys(a, shared)

    return hopper_backward_roles


def _scores(kernel: Kernel, at: Roles, w: Any) -> Any:
    """Return ``make_scores(a, shared)``, the loop of the warpgroup that computes P, dS and dQ."""
    c = constants(kernel)
    block_q, block_k, bf16 = c.block_q, c.block_k, bool(c.bf16)
    scaled, softcap, wide, chunks = bool(c.scaled), bool(c.softcap), at.dq_wide, at.chunks
    k_at, v_at, q_at, dout_at, p_at, ds_at, dq_at, lse_at, delta_at = map(at.region, at.regions)
    query_bytes = at.query_bytes
    kv_full, k_free, v_free = at.barrier("kv_full"), at.barrier("k_free"), at.barrier("v_free")
    full, dout_full, dout_free = map(at.barrier, ("full", "dout_full", "dout_free"))

    # -- Fragments
    depth = columns_taken(c.head_dim, c.head_dim_v, 16)
    queue_scores = hopper.queue_scores(bf16, block_k, depth, rows=block_q)
    all_done = hopper.product_wait(0)
    scores_done = hopper.product_wait(1)  # dP's product may be pending
    scale_scores = softmax.scale_scores(softcap)
    mask = softmax.mask_rows(1, bool(c.left), bool(c.right))
    f = fragment_functions(kernel, 1, block_k, by_row=True)
    assert not f.has_score, "there are no registers for a score function"
    has_mask, apply_mask, first_rows = f.has_mask, f.mask, first_rows_of(kernel)
    load_rows, keys_place = wide_gradients.load_rows, wide_gradients.keys_place
    store_probabilities = wide_gradients.store_probabilities(bf16, softcap)
    store_gradients = wide_gradients.store_gradients(bf16)
    queue_dq = wide_gradients.queue_dq(bf16, wide, block_k)
    rows_place, stage_dq = wide_gradients.rows_place, wide_gradients.stage_rows(block_q)
    get, speaks, wait = hopper.get, hopper.speaks, hopper.wait
    wait_full, arrive = hopper.wait_full, hopper.arrive
    fence_shared = gradients.fence_shared
    sums_sync, sums_arrive = hopper.named_sync(256), hopper.named_arrive(256)
    own_sync = hopper.named_sync(128)
    piece_free, piece_full = hopper.named_sync(160), hopper.named_arrive(160)

    @device
    def make_scores(a, shared):
        speaking, kv_heads = speaks(), quotient(a.heads, a.group)  # one arrival per warp
        to_log2 = float32(LOG2E) if scaled else a.scale * float32(LOG2E)  # exponents in base 2
        row0 = int32(int32(cuda.threadIdx.x) % 128 // 32 * 16)  # first row of the warp in the tile
        p_mine, ds_mine = keys_place(shared + p_at), keys_place(shared + ds_at)
        dq_mine = rows_place(shared + dq_at)
        item, done = int32(0), int32(0)  # as in the producer
        while True:
            slot = w.take(shared, item)
            walk = get(slot + word.WALK)
            if walk < 0:
                break
            tile_stamp = w.tile_stamps(a, walk, get(slot + word.OUTER), 1)
            w.stamp_block(tile_stamp, False)
            member, n = int32(walk * a.group), int32(0)  # index of the query head, its visit
            left = int32(a.group * get(slot + word.COUNT))
            wait(shared + kv_full, item & 1)
            if left == 0:
                arrive(shared + v_free, speaking)
            while left > 0:
                visit_stamp = w.visit_stamps(a, member, get(slot + word.FIRST) + n, 1)
                tile, masked = w.visit(a, w.visits(slot), n)
                now = int32((done & 1) * (block_q * 4))
                # -- S = Q K^T and dP = dO V^T ----------------------------------------------------
                w.stamp(visit_stamp, 0)
                wait_full(shared + full, done)
                s = queue_scores(shared + q_at + (done & 1) * query_bytes, shared + k_at)
                for chunk in range(chunks):
                    wait(shared + dout_full + 8 * chunk, done & 1)
                w.stamp(visit_stamp, 1)
                dp = queue_scores(shared + dout_at, shared + v_at)
                lse = load_rows(shared + lse_at + now)
                s = scores_done(s)
                w.stamp(visit_stamp, 2)
                # -- P = exp2(c S - lse), under dP ------------------------------------------------
                if scaled:
                    s = scale_scores(s, a.scale, a.softcap)
                if masked:
                    query = int32(get(slot + word.BASE) + tile * block_q + row0)
                    start, stop = get(slot + word.START), get(slot + word.STOP)
                    s = mask(s, query, start, get(slot + word.OFFSET), stop, a.left, a.right)
                    if has_mask:
                        batch = quotient(walk, kv_heads)
                        head = int32(member - batch * a.heads)
                        q_first, k_first = first_rows(a, get(slot + word.OUTER))
                        q_last = get(slot + word.END) - 1 - q_first
                        k_last, q_pos, k_pos = stop - 1 - k_first, query - q_first, start - k_first
                        s = apply_mask(a, batch, head, s, q_pos, k_pos, q_last, k_last)
                p = store_probabilities(p_mine, s, lse, to_log2, a.softcap)
                fence_shared()
                sums_arrive(int32(_P_FULL))
                # -- dS = P (dP - delta) ----------------------------------------------------------
                delta = load_rows(shared + delta_at + now)
                dp = all_done(dp)
                for chunk in range(chunks):
                    arrive(shared + dout_free + 8 * chunk, speaking)
                # the next work tile's V may be loaded
                arrive(shared + v_free, speaking & (left == 1))
                w.stamp(visit_stamp, 3)
                # dK's warpgroup has read the last visit's dS; this one waited for dQ
                sums_sync(int32(_DS_FREE))
                store_gradients(ds_mine, p, dp, delta)
                fence_shared()
                own_sync(int32(_DS_WRITTEN))
                sums_arrive(int32(_DS_FULL))
                # -- dQ = dS K --------------------------------------------------------------------
                dq = all_done(queue_dq(shared + ds_at, shared + k_at))
                piece_free(int32(_DQ_FREE))  # the last visit's dQ is sent
                stage_dq(dq_mine, dq)
                fence_shared()
                piece_full(int32(_DQ_FULL))
                w.stamp(visit_stamp, 4)
                done, left, n = int32(done + 1), int32(left - 1), int32(n + 1)
                if n == get(slot + word.COUNT):
                    member, n = int32(member + 1), int32(0)
            arrive(shared + k_free, speaking)  # the next work tile's K may be loaded
            w.leave(shared, item, speaking)
            w.stamp_block(tile_stamp, True)
            item = int32(item + 1)
        sums_sync(int32(_DS_FREE))  # as many waits as arrivals
        # the block must not exit before the copies have read its shared memory
        piece_free(int32(_DQ_FREE))

    return make_scores


def _sums(c: SimpleNamespace, at: Roles, w: Any, *, values: bool) -> Any:
    """Return ``add_up(a, shared)``, the loop of a warpgroup that accumulates dV^T or dK^T.

    With `values`, the product is dV^T = dO^T P, and otherwise dK^T = Q^T dS. Each product has 64
    columns of dV or dK.
    """
    block_q, block_k, bf16 = c.block_q, c.block_k, bool(c.bf16)
    tile_at, scores_at = (at.region(x) for x in (("dout", "p") if values else ("q", "ds")))
    query_bytes, chunk_bytes = 0 if values else at.query_bytes, block_q * 128
    full, free = at.barrier("full"), at.barrier("free")
    dout_full, dout_free = at.barrier("dout_full"), at.barrier("dout_free")
    role, counter = (2, 12) if values else (3, 8)
    scores_full = _P_FULL if values else _DS_FULL
    assert at.chunks == 3, "the sums are three fragments"

    new_sum, queue_sum = mma_tiles.zeros(block_k // 2), wide_gradients.queue_sum(bf16)
    first_done, second_done, last_done = (hopper.product_wait(n) for n in (2, 1, 0))
    store_sums = wide_gradients.store_sums(bf16, c.value_row if values else c.key_row)
    get, speaks, wait, stage = hopper.get, hopper.speaks, hopper.wait, hopper.stage
    wait_full, arrive = hopper.wait_full, hopper.arrive
    sums_sync, sums_arrive = hopper.named_sync(256), hopper.named_arrive(256)

    @device
    def add_up(a, shared):
        speaking, kv_heads = speaks(), quotient(a.heads, a.group)
        scores = int32(shared + scores_at)
        item, done = int32(0), int32(0)  # as in the producer
        if not values:
            sums_arrive(int32(_DS_FREE))  # dS is free at first
        while True:
            slot = w.take(shared, item)
            walk = get(slot + word.WALK)
            if walk < 0:
                break
            tile_stamp = w.tile_stamps(a, walk, get(slot + word.OUTER), role)
            w.stamp_block(tile_stamp, False)
            member, n = int32(walk * a.group), int32(0)  # index of the query head, its visit
            left = int32(a.group * get(slot + word.COUNT))
            low, middle, high = new_sum(), new_sum(), new_sum()
            while left > 0:
                visit_stamp = w.visit_stamps(a, member, get(slot + word.FIRST) + n, role)
                w.stamp(visit_stamp, 0)
                if values:
                    wait(shared + dout_full, done & 1)
                    wait(shared + dout_full + 8, done & 1)
                    wait(shared + dout_full + 16, done & 1)
                else:
                    wait_full(shared + full, done)
                sums_sync(int32(scores_full))
                for number in range(1, 4):  # this warpgroup computes no scores
                    w.stamp(visit_stamp, number)
                tile = int32(shared + tile_at + (done & 1) * query_bytes)
                low = queue_sum(low, tile, scores)
                middle = queue_sum(middle, tile + chunk_bytes, scores)
                high = queue_sum(high, tile + 2 * chunk_bytes, scores)
                low = first_done(low)
                if values:  # a chunk of dO has been read
                    arrive(shared + dout_free, speaking)
                middle = second_done(middle)
                if values:
                    arrive(shared + dout_free + 8, speaking)
                high = last_done(high)
                if values:
                    arrive(shared + dout_free + 16, speaking)
                else:
                    arrive(stage(shared + free, done), speaking)
                    sums_arrive(int32(_DS_FREE))
                w.stamp(visit_stamp, 4)
                done, left, n = int32(done + 1), int32(left - 1), int32(n + 1)
                if n == get(slot + word.COUNT):
                    member, n = int32(member + 1), int32(0)
            batch, head = w.batch_and_head(walk, kv_heads)
            if values:
                to = a.dv_data + (batch * a.dv_batch + head * a.dv_head) * 2
                row_bytes, factor = a.dv_row * 2, float32(1.0)
            else:
                to = a.dk_data + (batch * a.dk_batch + head * a.dk_head) * 2
                row_bytes, factor = a.dk_row * 2, a.scale
            start, stop = get(slot + word.START), get(slot + word.STOP)
            stored = store_sums(to, row_bytes, low, middle, high, factor, start, stop)
            tile_count = int64(walk) * a.tiles + get(slot + word.OUTER)
            w.report(a.tile_counts + tile_count * (SLOTS * 4) + counter, stored)
            w.leave(shared, item, speaking)
            w.stamp_block(tile_stamp, True)
            item = int32(item + 1)

    return add_up
