"""FlashAttention-3 forward (arXiv:2407.08608, Algorithms 1 and 2) for Hopper, in Python.

The kernel is structured like kernels/hopper/forward.cu. One producer thread keeps ring buffers of K
and V tiles full with TMA. Each consumer warpgroup computes 64 query rows, and keeps S, P and O in
registers. The schedule's tables list each row tile's key tiles, and say which of them need a mask.
Blocks are persistent: a block's producer takes one work tile (a row tile of a head) after another.
The producer passes the work tile to the consumers through slots in shared memory.
"""

from types import SimpleNamespace
from typing import Any

from numba import cuda
from numba.cuda import types

from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu import mma_tiles
from flashsim.backends.numba_gpu.hopper import smem_layout as word
from flashsim.backends.numba_gpu.hopper import wgmma_tiles as hopper
from flashsim.backends.numba_gpu.hopper.smem_layout import ITEM, OnChip, registers
from flashsim.backends.numba_gpu.hopper.work_tiles import item_functions
from flashsim.backends.numba_gpu.tensor import output, softmax
from flashsim.backends.numba_gpu.tensor.functions import first_rows_of, fragment_functions, sink_of
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E, NEG_INF
from flashsim.backends.numba_gpu.traversal import SLOTS, constants, device, quotient, shared_base

int32, int64, float32 = types.int32, types.int64, types.float32


def hopper_forward_kernel(kernel: Kernel) -> Any:
    """Return the kernel's Python function, specialised for the constants of `kernel`.

    The parameters are tensor maps of q, k and v, a `launch.ARGS`, and the address of a work counter
    that is 0 at the start. The counter's address is 0 if no block gets more than one work tile.
    """
    c = constants(kernel)
    at = OnChip(c.block_q, c.block_k, c.d, c.dv, c.stages)
    w = item_functions(c, at)
    produce, consume = _producer(c, at, w), _consumer(kernel, at, w)
    barriers_begin = hopper.barriers_begin(at.barrier_arrivals)
    give, take = registers(at.groups)
    give_registers = hopper.registers(give, more=False)
    take_registers = hopper.registers(take, more=True)
    warpgroup = hopper.warpgroup

    def hopper_forward(map_q, map_k, map_v, a, counter):
        shared = shared_base()
        if cuda.threadIdx.x == 0:
            barriers_begin(shared)
        cuda.syncthreads()  # no thread uses a barrier before it is initialised
        role = warpgroup()
        if role == 0:
            give_registers()
            if cuda.threadIdx.x == 0:
                produce(map_q, map_k, map_v, a, counter, shared)
        else:
            take_registers()
            consume(a, shared, int32(role - 1))

    return hopper_forward


def _producer(c: SimpleNamespace, at: OnChip, w: Any) -> Any:
    """Return ``produce(map_q, map_k, map_v, a, counter, shared)``, the producer's loop."""
    block_k, groups = c.block_k, at.groups
    row_bytes, row_bytes_v = c.counted * 2, c.counted_v * 2
    k_full, k_free = at.barrier("k_full"), at.barrier("k_free")
    v_full, v_free = at.barrier("v_full"), at.barrier("v_free")
    q_full, q_free = at.barrier("q_full"), at.barrier("q_free")
    item_full, item_free, items = at.barrier("item_full"), at.barrier("item_free"), at.items
    q_bytes = at.q_bytes
    packed = bool(c.varlen)
    expect_q, copy_q = hopper.expect(q_bytes), hopper.copy_tile(64, at.chunks, packed=packed)
    copy_k = hopper.copy_tile(block_k, at.chunks, packed=packed)
    copy_v = hopper.copy_tile(block_k, at.chunks_v, packed=packed)
    ring = hopper.Ring(at.stages)
    bring_k = _bring(at.region("k"), at.k_bytes, copy_k, ring.place, w)
    bring_v = _bring(at.region("v"), at.v_bytes, copy_v, ring.place, w)
    after_tile, tile_free, tile_barrier = ring.after, ring.wait_free, ring.stage
    put, get, map_address = hopper.put, hopper.get, hopper.map_address
    wait, wait_free, arrive, stage = hopper.wait, hopper.wait_free, hopper.arrive, hopper.stage

    @device
    def bring_q(map_q, a, shared, slot, start, item, head, batch):
        group = int32(0)
        while group < groups:
            # The last work tile's scores are complete:
            wait(shared + q_free + group * 8, (item & 1) ^ 1)
            barrier = int32(shared + q_full + group * 8)
            expect_q(barrier)
            to, row = int32(shared + group * q_bytes), int32(start + 64 * group)
            row, last = w.place(row, get(slot + word.STOP), batch)
            copy_q(to, map_address(map_q), barrier, row, head, last)
            group = int32(group + 1)

    @device
    def produce(map_q, map_k, map_v, a, counter, shared):
        # `item` counts the block's work tiles; K of visit n is `now` in its ring, V of n - 1 is
        # `last`.
        item, now, number = int32(0), int32(0), int32(cuda.blockIdx.x)
        # the previous kernel may have written Q, K and V, and used the counter
        w.wait_for_what_ran_before()
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
            walk, base, count = get(slot + word.WALK), get(slot + word.BASE), get(slot + word.COUNT)
            batch, head = w.batch_and_head(walk, a.heads)
            kv_head = quotient(head, a.group)
            tile_count = w.tile_count(a, walk, get(slot + word.OUTER))
            visit_count = w.visit_count(a, walk, get(slot + word.FIRST), 0)
            visit_stamp = w.visit_stamps(a, walk, get(slot + word.FIRST), 0)
            tile_stamp = w.tile_stamps(a, walk, get(slot + word.OUTER), 0)
            w.stamp_block(tile_stamp, False)
            n, last = int32(0), now
            while n <= count:  # in the order in which consumers need them: K0 Q, K1 V0, ...
                if n < count:
                    tile, _ = w.visit(a, w.visits(slot), n)
                    key = int32(base + tile * block_k)
                    barrier = tile_barrier(shared + k_full, now)
                    w.stamp(visit_stamp, n * w.visit_words)
                    tile_free(shared + k_free, now)  # its last reader is done
                    w.stamp(visit_stamp, n * w.visit_words + 1)
                    bring_k(map_k, a, shared, slot, barrier, now, key, kv_head, batch)
                    moved = int32(min(block_k, get(slot + word.END) - key) * row_bytes)
                    w.report_one(visit_count + n * (SLOTS * 4), moved)
                if n > 0:
                    tile, _ = w.visit(a, w.visits(slot), n - 1)
                    key = int32(base + tile * block_k)
                    barrier = tile_barrier(shared + v_full, last)
                    tile_free(shared + v_free, last)  # its last reader is done
                    bring_v(map_v, a, shared, slot, barrier, last, key, kv_head, batch)
                    w.stamp(visit_stamp, (n - 1) * w.visit_words + 4)
                    moved = int32(min(block_k, get(slot + word.END) - key) * row_bytes_v)
                    w.report_one(visit_count + n * (SLOTS * 4) - (SLOTS * 4 - 4), moved)
                else:
                    start = get(slot + word.START)
                    bring_q(map_q, a, shared, slot, start, item, head, batch)
                    w.report_one(tile_count, int32((get(slot + word.STOP) - start) * row_bytes))
                if n < count:
                    last, now = now, after_tile(now)
                n = int32(n + 1)
            w.stamp_block(tile_stamp, True)
            item, number = int32(item + 1), w.after(a, counter)

    return produce


def _bring(ring: int, nbytes: int, copy: Any, stage_of: Any, w: Any) -> Any:
    """Return a function that starts to copy a tile of K or V to a stage of the ring buffer.

    `position` selects the stage (see `Ring`), and `key` is the tile's first key. The mbarrier
    `barrier` counts the bytes that arrive.
    """
    expect = hopper.expect(nbytes)
    get, map_address = hopper.get, hopper.map_address

    @device
    def bring(tensor_map, a, shared, slot, barrier, position, key, head, batch):
        expect(barrier)
        to = int32(shared + ring + stage_of(position) * nbytes)
        row, last = w.place(key, get(slot + word.END), batch)
        copy(to, map_address(tensor_map), barrier, row, head, last)

    return bring


def _consumer(kernel: Kernel, at: OnChip, w: Any) -> Any:
    """Return ``consume(a, shared, group)``, a warpgroup's loop with 64 rows per work tile."""
    c = constants(kernel)
    block_k, d, dv, groups = c.block_k, c.d, c.dv, at.groups
    bf16, scaled, softcap = bool(c.bf16), bool(c.scaled), bool(c.softcap)
    turns = bool(c.turns)  # as TURNS of kernels/hopper/forward.cu
    late = dv > 128  # as RESCALE_LATE of kernels/hopper/forward.cu
    q_bytes, k_bytes, v_bytes = at.q_bytes, at.k_bytes, at.v_bytes
    k_at, v_at = at.region("k"), at.region("v")
    q_full, q_free = at.barrier("q_full"), at.barrier("q_free")
    k_full, k_free = at.barrier("k_full"), at.barrier("k_free")
    v_full, v_free = at.barrier("v_full"), at.barrier("v_free")

    # -- Fragments
    new_o, new_sum = mma_tiles.zeros(dv // 2), mma_tiles.zeros(2)
    new_max = mma_tiles.full(2, NEG_INF)
    queue_scores = hopper.queue_scores(bf16, block_k, d)
    queue_output = hopper.queue_output(bf16)
    all_done = hopper.product_wait(0)
    scores_first = hopper.product_wait(1)  # the output's product, queued later, may be pending
    scale_scores = softmax.scale_scores(softcap)
    mask = softmax.mask_rows(1, bool(c.left), bool(c.right))
    f = fragment_functions(kernel, 1, block_k, by_row=True)
    has_mask, has_score, apply_score, apply_mask = f.has_mask, f.has_score, f.score, f.mask
    first_rows = first_rows_of(kernel)
    sinks, sink_of_head = kernel.sinks, sink_of(kernel)
    round_operand = hopper.round_operand(bf16)
    store_output = hopper.store_output(bf16, c.value_row)
    get, speaks, wait, arrive = hopper.get, hopper.speaks, hopper.wait, hopper.arrive
    arrive_behind = hopper.arrive_behind
    ring = hopper.Ring(at.stages)
    after, stage_number, stage, wait_full = ring.after, ring.place, ring.stage, ring.wait_full
    my_turn, pass_turn = hopper.my_turn, hopper.pass_turn

    @device
    def shaped(s, a, slot, steps, n, query):
        """Return visit n's masked scores; they are scaled unless the exponentials do that."""
        tile, masked = w.visit(a, steps, n)
        if scaled:
            s = scale_scores(s, a.scale, a.softcap)
        if has_score or has_mask:
            walk = get(slot + word.WALK)
            batch, head = w.batch_and_head(walk, a.heads)
            q_first, k_first = first_rows(a, get(slot + word.OUTER))  # of the packed sequence
            q_pos, q_last = query - q_first, get(slot + word.STOP) - 1 - q_first
            k_pos = get(slot + word.BASE) + tile * block_k - k_first
            k_last = get(slot + word.END) - 1 - k_first
        if has_score:
            s = apply_score(a, batch, head, s, q_pos, k_pos, q_last, k_last)
        if masked:
            key = int32(get(slot + word.BASE) + tile * block_k)
            limits = get(slot + word.OFFSET), get(slot + word.END)
            s = mask(s, query, key, limits[0], limits[1], a.left, a.right)
            if has_mask:
                s = apply_mask(a, batch, head, s, q_pos, k_pos, q_last, k_last)
        return s

    @device
    def store(a, slot, query, o, m, l, to_log2):
        """Store O / l and the log-sum-exp m + log l from registers to HBM."""
        walk, outer, stop = get(slot + word.WALK), get(slot + word.OUTER), get(slot + word.STOP)
        batch, head = w.batch_and_head(walk, a.heads)
        tile_count = w.tile_count(a, walk, outer)
        if sinks:
            sink = sink_of_head(a, head)
            inverse, lse = softmax.finish_rows_with_sink(m, l, to_log2 * float32(1 / LOG2E), sink)
        else:
            inverse, lse = softmax.finish_rows(m, l, to_log2 * float32(1 / LOG2E))
        to = a.lse + int64(walk) * a.n_q * 4
        w.report(tile_count + 8, output.store_rows(to, lse, query, stop))
        out = a.o_data + (batch * a.o_batch + head * a.o_head) * 2
        w.report(tile_count + 4, store_output(out, a.o_row * 2, o, inverse, query, stop))

    @device
    def consume(a, shared, group):
        speaking = speaks()  # one arrival per warp
        turn, next_turn = int32(1 + group), int32(1 + (group + 1) % groups)  # named barriers
        to_log2 = float32(LOG2E) if scaled else a.scale * float32(LOG2E)  # exponents in base 2
        warp = int32(cuda.threadIdx.x) % 128 // 32
        row0 = int32(warp * 16 + 64 * group)  # first row of the warp in the tile
        q = int32(shared + group * q_bytes)
        if turns and group == groups - 1:
            pass_turn(next_turn)  # warpgroup 0 goes first
        item, now = int32(0), int32(0)  # as in the producer
        while True:
            slot = w.take(shared, item)
            walk = get(slot + word.WALK)
            if walk < 0:
                break
            steps = w.visits(slot)
            first, count = steps[0], steps[1]
            query = int32(get(slot + word.START) + row0)
            outer = get(slot + word.OUTER)
            tile_stamp = w.tile_stamps(a, walk, outer, 1 + group)
            visit_stamp = w.visit_stamps(a, walk, first, 1 + group)
            w.stamp_block(tile_stamp, False)
            o, m, l = new_o(), new_max(), new_sum()
            alpha = l
            wait(shared + q_full + group * 8, item & 1)
            if count > 0:
                # -- The first visit: scores and softmax ----------------------------------------
                w.stamp(visit_stamp, 0)
                wait_full(shared + k_full, now)
                w.stamp(visit_stamp, 1)
                s = all_done(queue_scores(q, shared + k_at + stage_number(now) * k_bytes))
                arrive(stage(shared + k_free, now), speaking)
                # The last scores are complete: the next work tile's Q may be loaded.
                arrive(shared + q_free + group * 8, speaking and count == 1)
                w.stamp(visit_stamp, 2)
                s = shaped(s, a, slot, steps, int32(0), query)
                m = softmax.row_max(m, s)
                base = softmax.softmax_base(m, to_log2)
                s, l = softmax.exponentials(s, base, l, l, to_log2)
                p = round_operand(s)
                w.stamp(visit_stamp, 3)
                n = int32(1)
                # A visit's K is waited for at the end of the previous visit: arithmetic hides the
                # wait and the computation of K's address.
                if count > 1:
                    w.stamp(visit_stamp, w.visit_words)
                    wait_full(shared + k_full, after(now))
                    w.stamp(visit_stamp, w.visit_words + 1)
                while n < count:
                    # The scores of visit n and the output of visit n - 1 are queued together. The
                    # softmax of n then runs while the tensor cores compute that output and,
                    # alternating, the other warpgroups' products.
                    last, now = now, after(now)
                    if turns:
                        my_turn(turn)  # the previous warpgroup has queued its products
                    queued = queue_scores(q, shared + k_at + stage_number(now) * k_bytes)
                    if late:
                        o = softmax.scale_rows(o, alpha)
                    wait_full(shared + v_full, last)
                    growing = queue_output(o, p, shared + v_at + stage_number(last) * v_bytes)
                    if turns:
                        pass_turn(next_turn)
                    s = scores_first(queued)
                    arrive(shared + q_free + group * 8, speaking and n == count - 1)
                    w.stamp(visit_stamp, n * w.visit_words + 2)
                    s = shaped(s, a, slot, steps, n, query)
                    top, again = softmax.row_max_of_bits(m, s)
                    if again:
                        top = softmax.row_max(m, s)
                    s, l, alpha = softmax.row_by_row(m, top, s, l, to_log2)
                    m = top
                    arrive_behind(stage(shared + k_free, now), speaking, alpha[1])
                    w.stamp(visit_stamp, n * w.visit_words + 3)
                    o = all_done(growing)
                    w.stamp(visit_stamp, (n - 1) * w.visit_words + 4)
                    arrive(stage(shared + v_free, last), speaking)
                    p = round_operand(s)
                    if not late:
                        o = softmax.scale_rows(o, alpha)
                    n = int32(n + 1)
                    more = n < count
                    if more:
                        w.stamp(visit_stamp, n * w.visit_words)
                    # After the last visit, the wait is for V, which is needed next anyway. (K's
                    # barrier may be one lap ahead by then, and waiting for it could hang.) Written
                    # so that LLVM emits a select: for `x if more else y` it emits a branch, after
                    # which P is rounded in one piece.
                    following, full, which = after(now), int32(shared + v_full), now
                    if more:
                        full = int32(shared + k_full)
                    if more:
                        which = following
                    wait_full(full, which)
                    if more:
                        w.stamp(visit_stamp, n * w.visit_words + 1)
                # -- The last visit's output ----------------------------------------------------
                if late:
                    o = softmax.scale_rows(o, alpha)
                wait_full(shared + v_full, now)
                o = all_done(queue_output(o, p, shared + v_at + stage_number(now) * v_bytes))
                w.stamp(visit_stamp, (count - 1) * w.visit_words + 4)
                arrive(stage(shared + v_free, now), speaking)
                now = after(now)
            else:
                arrive(shared + q_free + group * 8, speaking)
            store(a, slot, query, o, m, l, to_log2)
            w.leave(shared, item, speaking)
            w.stamp_block(tile_stamp, True)
            item = int32(item + 1)

    return consume
