"""The deterministic Hopper backward's Q-outer kernel for dQ, in Python, without atomics.

The kernel is structured like kernels/hopper/dq.cu. Each of the two consumer warpgroups keeps dQ of
64 query rows in registers. In each visit (one query tile times one key tile), a warpgroup
recomputes S = Q K^T and dP = dO V^T. A warpgroup computes dS = P (dP - delta). In registers, dS
already has the layout of a left operand for dQ += dS K. If row tiles have 64 rows, the warpgroups
divide the keys of each visit, and their two sums are added at the end. One producer thread keeps a
ring buffer of K and V tiles full.
"""

from types import SimpleNamespace
from typing import Any

from numba import cuda
from numba.cuda import types

from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu import mma_tiles
from flashsim.backends.numba_gpu.hopper import row_gradients as gradients
from flashsim.backends.numba_gpu.hopper import smem_layout as word
from flashsim.backends.numba_gpu.hopper import wgmma_tiles as hopper
from flashsim.backends.numba_gpu.hopper.smem_layout import ITEM, DqAlone, registers
from flashsim.backends.numba_gpu.hopper.work_tiles import item_functions
from flashsim.backends.numba_gpu.tensor import softmax
from flashsim.backends.numba_gpu.tensor.functions import first_rows_of, fragment_functions
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E
from flashsim.backends.numba_gpu.traversal import SLOTS, constants, device, quotient, shared_base

int32, int64, float32 = types.int32, types.int64, types.float32


def hopper_dq_kernel(kernel: Kernel) -> Any:
    """Return the kernel's Python function, specialised for the constants of `kernel`.

    The parameters are tensor maps of q, k, v and dout, a `launch.ARGS`, and the address of a work
    counter that is 0 at the start. The counter's address is 0 if no block gets more than one work
    tile.
    """
    c = constants(kernel)
    at = DqAlone(c.block_q, c.block_k, c.d)
    w = item_functions(c, at)
    produce, consume = _producer(c, at, w), _consumer(kernel, at, w)
    barriers_begin = hopper.barriers_begin(at.barrier_arrivals)
    give, take = registers(at.groups)
    give_registers = hopper.registers(give, more=False)
    take_registers = hopper.registers(take, more=True)
    warpgroup = hopper.warpgroup

    def hopper_dq(map_q, map_k, map_v, map_dout, a, counter):
        shared = shared_base()
        if cuda.threadIdx.x == 0:
            barriers_begin(shared)
        cuda.syncthreads()  # no thread uses a barrier before it is initialised
        role = warpgroup()
        if role == 0:
            give_registers()
            if cuda.threadIdx.x == 0:
                produce(map_q, map_k, map_v, map_dout, a, counter, shared)
        else:
            take_registers()
            consume(a, shared, int32(role - 1))

    return hopper_dq


def _producer(c: SimpleNamespace, at: DqAlone, w: Any) -> Any:
    """Return the producer ``produce(map_q, map_k, map_v, map_dout, a, counter, shared)``."""
    block_k, pieces = c.block_k, at.pieces
    row_bytes, row_bytes_v, packed = c.counted * 2, c.counted_v * 2, bool(c.varlen)
    q_at, dout_at, k_at, v_at, _ = map(at.region, at.regions)
    own_bytes, key_bytes = at.own_bytes, at.key_bytes
    own_full, own_free = at.barrier("own_full"), at.barrier("own_free")
    full, free = at.barrier("full"), at.barrier("free")
    item_full, item_free, items = at.barrier("item_full"), at.barrier("item_free"), at.items
    expect_own, expect_keys = hopper.expect(2 * own_bytes), hopper.expect(2 * key_bytes)
    copy_own = hopper.copy_tile(64, at.chunks, packed=packed)
    copy_keys = hopper.copy_tile(block_k, at.chunks, packed=packed)
    put, get, map_address = hopper.put, hopper.get, hopper.map_address
    wait, wait_free, arrive, stage = hopper.wait, hopper.wait_free, hopper.arrive, hopper.stage

    @device
    def bring_own(map_q, map_dout, a, shared, slot, item, head, batch):
        """Start the copies of a work tile's rows of Q and dO."""
        piece = int32(0)
        while piece < pieces:
            # the last work tile's readers are done
            wait(shared + own_free + piece * 8, (item & 1) ^ 1)
            barrier = int32(shared + own_full + piece * 8)
            expect_own(barrier)
            row, last = w.place(get(slot + word.START) + 64 * piece, get(slot + word.STOP), batch)
            shift = int32(piece * own_bytes)
            copy_own(shared + q_at + shift, map_address(map_q), barrier, row, head, last)
            copy_own(shared + dout_at + shift, map_address(map_dout), barrier, row, head, last)
            piece = int32(piece + 1)
        tile_count = w.tile_count(a, get(slot + word.WALK), get(slot + word.OUTER))
        rows = int32(get(slot + word.STOP) - get(slot + word.START))
        w.report_one(tile_count, int32(rows * row_bytes))
        w.report_one(tile_count + 4, int32(rows * row_bytes_v))

    @device
    def produce(map_q, map_k, map_v, map_dout, a, counter, shared):
        # `item` counts the block's work tiles, `done` their visits so far.
        item, done, number = int32(0), int32(0), int32(cuda.blockIdx.x)
        while True:
            slot = int32(shared + items + (item & 1) * ITEM)
            # every warp is done with the slot's previous work tile
            wait_free(shared + item_free, item)
            if number >= a.walks * a.tiles:
                put(slot + word.WALK, int32(-1))
                arrive(stage(shared + item_full, item), True)
                break
            w.write(a, slot, number)
            arrive(stage(shared + item_full, item), True)  # releases the work tile to its readers
            walk, count = get(slot + word.WALK), get(slot + word.COUNT)
            batch, head = w.batch_and_head(walk, a.heads)
            kv_head = quotient(head, a.group)
            tile_stamp = w.tile_stamps(a, walk, get(slot + word.OUTER), 0)
            visit_stamp = w.visit_stamps(a, walk, get(slot + word.FIRST), 0)
            visit_count = w.visit_count(a, walk, get(slot + word.FIRST), 0)
            w.stamp_block(tile_stamp, False)
            bring_own(map_q, map_dout, a, shared, slot, item, head, batch)
            n = int32(0)
            while n < count:
                tile, _ = w.visit(a, w.visits(slot), n)
                key = int32(get(slot + word.BASE) + tile * block_k)
                w.stamp(visit_stamp, n * w.visit_words)
                wait_free(shared + free, done)  # its last readers are done
                w.stamp(visit_stamp, n * w.visit_words + 1)
                barrier = stage(shared + full, done)
                expect_keys(barrier)
                row, last = w.place(key, get(slot + word.END), batch)
                shift = int32((done & 1) * key_bytes)
                copy_keys(shared + k_at + shift, map_address(map_k), barrier, row, kv_head, last)
                copy_keys(shared + v_at + shift, map_address(map_v), barrier, row, kv_head, last)
                w.stamp(visit_stamp, n * w.visit_words + 4)
                keys = int32(min(block_k, get(slot + word.END) - key))
                w.report_one(visit_count + n * (SLOTS * 4), int32(keys * row_bytes))
                w.report_one(visit_count + n * (SLOTS * 4) + 4, int32(keys * row_bytes_v))
                done, n = int32(done + 1), int32(n + 1)
            w.stamp_block(tile_stamp, True)
            item, number = int32(item + 1), w.after(a, counter)

    return produce


def _consumer(kernel: Kernel, at: DqAlone, w: Any) -> Any:
    """Return ``consume(a, shared, group)``, the loop with which a warpgroup computes dQ."""
    c = constants(kernel)
    block_k, d = c.block_k, c.d
    bf16, scaled, softcap = bool(c.bf16), bool(c.scaled), bool(c.softcap)
    split = at.pieces == 1  # the warpgroups divide the keys
    keys = block_k // 2 if split else block_k
    q_at, dout_at, k_at, v_at, scratch_at = map(at.region, at.regions)
    own_bytes, key_bytes = at.own_bytes, at.key_bytes
    own_full, own_free = at.barrier("own_full"), at.barrier("own_free")
    full, free = at.barrier("full"), at.barrier("free")

    # -- Fragments
    new_dq = mma_tiles.zeros(d // 2)
    queue_scores = hopper.queue_scores(bf16, keys, d, of=block_k)  # also for dP
    queue_dq = hopper.queue_output(bf16, of=block_k)
    all_done = hopper.product_wait(0)
    scores_done = hopper.product_wait(1)  # dP's product may be pending
    scale_scores = softmax.scale_scores(softcap)
    mask = softmax.mask_rows(1, bool(c.left), bool(c.right))
    f = fragment_functions(kernel, 1, keys, by_row=True)
    has_mask, has_score, apply_score, apply_mask = f.has_mask, f.has_score, f.score, f.mask
    slope_of, first_rows = f.slope_alone, first_rows_of(kernel)
    # With a score function, the softcap's slope is part of `slope_of`.
    probabilities = gradients.row_probabilities(softcap and not has_score)
    round_scores = hopper.round_operand(bf16)
    store_dq = hopper.store_output(bf16, c.key_row)
    get, speaks, wait, stage = hopper.get, hopper.speaks, hopper.wait, hopper.stage
    wait_full, arrive = hopper.wait_full, hopper.arrive

    @device
    def store(a, slot, query, dq, row_bytes, stop):
        """Store dQ (times the scale) from registers to HBM."""
        walk = get(slot + word.WALK)
        batch, head = w.batch_and_head(walk, a.heads)
        tile_count = w.tile_count(a, walk, get(slot + word.OUTER))
        to, factors = a.dq_data + (batch * a.dq_batch + head * a.dq_head) * 2, (a.scale, a.scale)
        stored = store_dq(to, a.dq_row * 2, dq, factors, query, stop)
        w.report(tile_count + 8, row_bytes)
        w.report(tile_count + 12, row_bytes)
        w.report(tile_count + 16, stored)

    @device
    def consume(a, shared, group):
        speaking = speaks()  # one arrival per warp
        to_log2 = float32(LOG2E) if scaled else a.scale * float32(LOG2E)  # exponents in base 2
        part = int32(0 if split else group)
        my_key = int32(keys * group if split else 0)
        # First row of the warp in the tile.
        row0 = int32(int32(cuda.threadIdx.x) % 128 // 32 * 16 + 64 * part)
        q = int32(shared + q_at + part * own_bytes)
        dout = int32(shared + dout_at + part * own_bytes)
        k, v = int32(shared + k_at + my_key * 128), int32(shared + v_at + my_key * 128)
        item, done = int32(0), int32(0)  # as in the producer
        while True:
            slot = w.take(shared, item)
            walk = get(slot + word.WALK)
            if walk < 0:
                break
            steps = w.visits(slot)
            first, count = steps[0], steps[1]
            query = int32(get(slot + word.START) + row0)
            tile_stamp = w.tile_stamps(a, walk, get(slot + word.OUTER), 1 + group)
            visit_stamp = w.visit_stamps(a, walk, first, 1 + group)
            w.stamp_block(tile_stamp, False)
            own = int64(walk) * a.n_q * 4
            lse, delta, row_bytes = gradients.own_statistics(
                a.lse + own, a.delta + own, query, get(slot + word.STOP)
            )
            dq = new_dq()
            wait(shared + own_full + part * 8, item & 1)
            n = int32(0)
            while n < count:
                tile, masked = w.visit(a, steps, n)
                shift = int32((done & 1) * key_bytes)
                w.stamp(visit_stamp, n * w.visit_words)
                wait_full(shared + full, done)
                w.stamp(visit_stamp, n * w.visit_words + 1)
                s = queue_scores(q, k + shift)
                dp = queue_scores(dout, v + shift)
                s = scores_done(s)
                w.stamp(visit_stamp, n * w.visit_words + 2)
                if scaled:
                    s = scale_scores(s, a.scale, a.softcap)
                if has_score or has_mask:
                    batch, head = w.batch_and_head(walk, a.heads)
                    q_first, k_first = first_rows(a, get(slot + word.OUTER))  # of the sequence
                    q_pos = query - q_first
                    k_pos = get(slot + word.BASE) + tile * block_k + my_key - k_first
                    ends = get(slot + word.STOP) - 1 - q_first, get(slot + word.END) - 1 - k_first
                    place = q_pos, k_pos, ends[0], ends[1]
                t = s
                if has_score:
                    t = apply_score(a, batch, head, s, *place)
                if masked:
                    key = int32(get(slot + word.BASE) + tile * block_k + my_key)
                    limits = get(slot + word.OFFSET), get(slot + word.END)
                    t = mask(t, query, key, limits[0], limits[1], a.left, a.right)
                    if has_mask:
                        t = apply_mask(a, batch, head, t, *place)
                p = probabilities(t, lse, to_log2, a.softcap)
                w.stamp(visit_stamp, n * w.visit_words + 3)
                dp = all_done(dp)
                ds = gradients.row_gradients(p, dp, delta)
                if has_score:
                    ds = slope_of(a, batch, head, s, ds, *place)
                dq = all_done(queue_dq(dq, round_scores(ds), k + shift))
                arrive(stage(shared + free, done), speaking)
                w.stamp(visit_stamp, n * w.visit_words + 4)
                done, n = int32(done + 1), int32(n + 1)
            # the next work tile's Q and dO may be loaded
            arrive(shared + own_free + part * 8, speaking)
            stop = get(slot + word.STOP)
            if split:  # the first warpgroup adds, always in this order
                dq = gradients.add_halves(dq, shared + scratch_at, group)
                if group == 1:
                    stop, row_bytes = int32(0), int32(0)
            store(a, slot, query, dq, row_bytes, stop)
            w.leave(shared, item, speaking)
            w.stamp_block(tile_stamp, True)
            item = int32(item + 1)
        # dK and dV, which this kernel does not read, are computed at the same time: their kernel
        # let this one start when delta was complete (`kv_outer.statistics`). But a kernel that
        # waits for this one waits for both.
        w.wait_for_what_ran_before()

    return consume
