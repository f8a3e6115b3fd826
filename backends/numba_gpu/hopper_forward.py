"""FlashAttention-3 forward (arXiv:2407.08608, Algorithms 1 and 2) for Hopper, in Python.

The structure is that of kernels/hopper_forward.cu: one producer thread keeps rings of K and V tiles
full through the copy engine; each consumer warpgroup owns 64 query rows, with S, P and O in
registers. Which tiles a row of tiles visits, and which of them need a mask, is read from the
schedule's tables.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from flashsim.backends.launch import Kernel
from flashsim.backends.numba_gpu import hopper_tiles as hopper
from flashsim.backends.numba_gpu import output, softmax, tiles
from flashsim.backends.numba_gpu.hopper_work import (
    BASE,
    COUNT,
    END,
    FIRST,
    OFFSET,
    OUTER,
    START,
    STOP,
    WALK,
    Shared,
    item_functions,
)
from flashsim.backends.numba_gpu.softmax import LOG2E, NEG_INF
from flashsim.backends.numba_gpu.walk import (
    SLOTS,
    TILE_STAMPS,
    VISIT_STAMPS,
    constants,
    device,
    quotient,
    shared_base,
    walk_functions,
)

int32, int64, float32 = types.int32, types.int64, types.float32


def shared_memory(block_q: int, block_k: int, d: int, dv: int) -> Shared:
    """Q lives for one item, a stage of K or V for one visit; each warpgroup has its rows of Q.

    A full barrier takes the producer's arrival, and its copies' bytes; a free one takes one of each
    warp that reads.
    """
    groups, chunks, chunks_v = block_q // 64, -(-d // 64), -(-dv // 64)
    return Shared(
        {
            "q": groups * chunks * 64 * 128,
            "k": 2 * chunks * block_k * 128,
            "v": 2 * chunks_v * block_k * 128,
        },
        {
            **{"q_full": (groups, 1), "q_free": (groups, 4)},
            **{"k_full": (2, 1), "k_free": (2, 4 * groups)},
            **{"v_full": (2, 1), "v_free": (2, 4 * groups)},
        },
        4 * groups,
    )


def hopper_forward_kernel(kernel: Kernel) -> Any:
    """The kernel, as a Python function, for compile-time constants.

    Its arguments are tensor maps of q, k and v, a `launch.ARGS`, and the address of a work counter
    that starts at 0.
    """
    c = constants(kernel)
    block_k, d, dv, groups = c.block_k, c.d, c.dv, c.block_q // 64
    row_bytes, row_bytes_v = c.head_dim * 2, c.head_dim_v * 2
    bf16, scaled, softcap = bool(c.bf16), bool(c.scaled), bool(c.softcap)

    # -- Shared memory
    at = shared_memory(c.block_q, block_k, d, dv)
    chunks, chunks_v = -(-d // 64), -(-dv // 64)
    q_bytes, k_bytes, v_bytes = chunks * 64 * 128, chunks * block_k * 128, chunks_v * block_k * 128
    q_at, k_at, v_at = at["q"], at["k"], at["v"]
    q_full, k_full, v_full = at["q_full"], at["k_full"], at["v_full"]
    q_free, k_free, v_free = at["q_free"], at["k_free"], at["v_free"]
    barriers_begin = hopper.barriers_begin(at.arrivals)
    expect_q, copy_q = hopper.expect(q_bytes), hopper.copy_tile(64, chunks)
    expect_k, copy_k = hopper.expect(k_bytes), hopper.copy_tile(block_k, chunks)
    expect_v, copy_v = hopper.expect(v_bytes), hopper.copy_tile(block_k, chunks_v)
    # 65,536 registers go to 128 (groups + 1) threads.
    give_registers = hopper.registers(32 if groups == 3 else 40, more=False)
    take_registers = hopper.registers(160 if groups == 3 else 232, more=True)

    # -- Fragments
    new_o, new_sum = tiles.zeros(dv // 2), tiles.zeros(2)
    new_max = tiles.full(2, NEG_INF)
    queue_scores = hopper.queue_scores(bf16, block_k, d, rows=64)
    queue_output = hopper.queue_accumulated(bf16, dv, block_k)
    scores_done = hopper.product_wait(0, block_k)  # nothing else is under way
    scores_first = hopper.product_wait(1, block_k)  # the output queued behind them is
    output_done = hopper.product_wait(0, dv)
    scale_scores = softmax.scale_scores(1, block_k, softcap)
    mask = softmax.mask_rows(1, block_k, bool(c.left), bool(c.right))
    row_max, softmax_base = softmax.row_max(1, block_k), softmax.softmax_base(1)
    rescaling, scale_o = softmax.rescaling(1), softmax.scale_rows(1, dv)
    exponentials, finish_rows = softmax.exponentials(1, block_k), softmax.finish_rows(1)
    round_operand = hopper.round_operand(bf16, block_k)
    store_lse = output.store_rows(1)
    store_output = hopper.store_output(bf16, dv, c.head_dim_v)
    w = walk_functions(c, stamper=128)  # the first consumer's first thread
    visit_of, report, report_one = w.visit, w.report, w.report_one
    stamp, stamp_block = w.stamp, w.stamp_block
    i = item_functions(c, w, at, by_row=True)
    offer, take, done_with, slot_of = i.offer, i.take, i.done, i.slot
    visits_of, next_number, place = i.visits_of, i.next_number, i.place
    get, map_address = hopper.get, hopper.map_address
    wait, arrive, stage = hopper.wait, hopper.arrive, hopper.stage
    wait_full, wait_free, arrive_behind = hopper.wait_full, hopper.wait_free, hopper.arrive_behind
    my_turn, pass_turn = hopper.named_sync(256), hopper.named_arrive(256)  # two warpgroups' threads
    warpgroup, speaks, uncounted = hopper.warpgroup, hopper.speaks, hopper.uncounted

    @device
    def produce(map_q, map_k, map_v, a, counter, shared):
        # `item` counts the block's items, `done` the visits of those before this one.
        item, done, number = int32(0), int32(0), int32(cuda.blockIdx.x)
        while offer(a, shared, item, number):
            slot = slot_of(shared, item)
            walk, base, count = get(slot + WALK), get(slot + BASE), get(slot + COUNT)
            batch, head = place(a, walk)
            kv_head = quotient(head, a.group)
            tile_count = a.tile_counts + (int64(walk) * a.tiles + get(slot + OUTER)) * (SLOTS * 4)
            visit_count = int64(walk) * a.n_visits + get(slot + FIRST)
            visit_count = a.visit_counts + visit_count * (SLOTS * 4)
            n = int32(0)
            while n <= uncounted(count):  # in the order of need: K0 Q, K1 V0, K2 V1, ...
                if n < count:
                    tile, _ = visit_of(a, visits_of(slot), n)
                    key, position = int32(base + tile * block_k), int32(done + n)
                    barrier = stage(shared + k_full, position)
                    wait_free(shared + k_free, position)  # its last reader is done
                    expect_k(barrier)
                    to = int32(shared + k_at + (position & 1) * k_bytes)
                    copy_k(to, map_address(map_k), barrier, key, kv_head, batch)
                    moved = int32(min(block_k, get(slot + END) - key) * row_bytes)
                    report_one(visit_count + n * (SLOTS * 4), moved)
                if n > 0:
                    tile, _ = visit_of(a, visits_of(slot), n - 1)
                    key, position = int32(base + tile * block_k), int32(done + n - 1)
                    barrier = stage(shared + v_full, position)
                    wait_free(shared + v_free, position)  # its last reader is done
                    expect_v(barrier)
                    to = int32(shared + v_at + (position & 1) * v_bytes)
                    copy_v(to, map_address(map_v), barrier, key, kv_head, batch)
                    moved = int32(min(block_k, get(slot + END) - key) * row_bytes_v)
                    report_one(visit_count + n * (SLOTS * 4) - (SLOTS * 4 - 4), moved)
                else:
                    start, group = get(slot + START), int32(0)
                    while group < uncounted(groups):
                        # The last item's scores are all computed:
                        wait(shared + q_free + group * 8, (item & 1) ^ 1)
                        barrier = int32(shared + q_full + group * 8)
                        expect_q(barrier)
                        to, row = int32(shared + q_at + group * q_bytes), int32(start + 64 * group)
                        copy_q(to, map_address(map_q), barrier, row, head, batch)
                        group = int32(group + 1)
                    report_one(tile_count, int32((get(slot + STOP) - start) * row_bytes))
                n = int32(n + 1)
            done = int32(done + count)
            item = int32(item + 1)
            number = next_number(counter)

    @device
    def consume(a, shared, group):
        speaking = speaks()  # one arrival a warp
        turn, next_turn = int32(1 + group), int32(1 + (group + 1) % groups)  # named barriers
        to_log2 = float32(LOG2E) if scaled else a.scale * float32(LOG2E)  # exponents in base 2
        row0 = int32(
            int32(cuda.threadIdx.x) % 128 // 32 * 16 + 64 * group
        )  # the warp's, in the tile
        q = int32(shared + q_at + group * q_bytes)
        if group == groups - 1:
            pass_turn(next_turn)  # warpgroup 0 has the first turn
        item, done = int32(0), int32(0)  # as the producer's
        while True:
            slot = take(shared, item)
            walk = get(slot + WALK)
            if walk < 0:
                break
            steps = visits_of(slot)
            first, count = steps[0], steps[1]
            query = int32(get(slot + START) + row0)
            outer = get(slot + OUTER)
            tile_stamp = a.tile_stamps + (int64(walk) * a.tiles + outer) * (TILE_STAMPS * 8)
            visit_stamp = a.visit_stamps + (int64(walk) * a.n_visits + first) * (VISIT_STAMPS * 8)
            stamp_block(tile_stamp, False)
            o, m, l = new_o(), new_max(), new_sum()
            wait(shared + q_full + group * 8, item & 1)
            if count > 0:
                # -- The first visit: scores and softmax ----------------------------------------
                stamp(visit_stamp, 0)
                wait_full(shared + k_full, done)
                stamp(visit_stamp, 1)
                s = scores_done(queue_scores(q, shared + k_at + (done & 1) * k_bytes))
                arrive(stage(shared + k_free, done), speaking)
                stamp(visit_stamp, 2)
                tile, masked = visit_of(a, steps, int32(0))
                if scaled:
                    s = scale_scores(s, a.scale, a.softcap)
                if masked:
                    key = int32(get(slot + BASE) + tile * block_k)
                    limits = get(slot + OFFSET), get(slot + END)
                    s = mask(s, query, key, limits[0], limits[1], a.left, a.right)
                m = row_max(m, s)
                base = softmax_base(m, to_log2)
                s, l = exponentials(s, base, l, l, to_log2)
                p = round_operand(s)
                stamp(visit_stamp, 3)
                n = int32(1)
                while n < count:
                    # Scores of visit n and the output of visit n - 1 are queued together; the
                    # softmax of n then runs while the tensor cores work on the output and, turn
                    # and turn about, on the other warpgroups' products.
                    now, last = int32(done + n), int32(done + n - 1)
                    stamp(visit_stamp, n * VISIT_STAMPS)
                    wait_full(shared + k_full, now)
                    stamp(visit_stamp, n * VISIT_STAMPS + 1)
                    my_turn(turn)  # the warpgroup before has queued its products
                    queued = queue_scores(q, shared + k_at + (now & 1) * k_bytes)
                    wait_full(shared + v_full, last)
                    growing = queue_output(o, p, shared + v_at + (last & 1) * v_bytes)
                    pass_turn(next_turn)
                    s = scores_first(queued)
                    stamp(visit_stamp, n * VISIT_STAMPS + 2)
                    tile, masked = visit_of(a, steps, n)
                    if scaled:
                        s = scale_scores(s, a.scale, a.softcap)
                    if masked:
                        key = int32(get(slot + BASE) + tile * block_k)
                        limits = get(slot + OFFSET), get(slot + END)
                        s = mask(s, query, key, limits[0], limits[1], a.left, a.right)
                    top = row_max(m, s)
                    base = softmax_base(top, to_log2)
                    alpha = rescaling(m, base, to_log2)
                    m = top
                    s, l = exponentials(s, base, l, alpha, to_log2)
                    arrive_behind(stage(shared + k_free, now), speaking, l)
                    stamp(visit_stamp, n * VISIT_STAMPS + 3)
                    o = output_done(growing)
                    stamp(visit_stamp, n * VISIT_STAMPS - 1)
                    arrive(stage(shared + v_free, last), speaking)
                    p = round_operand(s)
                    o = scale_o(o, alpha)
                    n = int32(n + 1)
                # -- The last visit's output ----------------------------------------------------
                arrive(shared + q_free + group * 8, speaking)  # the next item's Q may come
                last = int32(done + count - 1)
                wait_full(shared + v_full, last)
                o = output_done(queue_output(o, p, shared + v_at + (last & 1) * v_bytes))
                stamp(visit_stamp, count * VISIT_STAMPS - 1)
                arrive(stage(shared + v_free, last), speaking)
            else:
                arrive(shared + q_free + group * 8, speaking)

            # -- O / l and L = m + log l, straight from registers -------------------------------
            walk, outer, stop = get(slot + WALK), get(slot + OUTER), get(slot + STOP)
            batch, head = place(a, walk)
            tile_count = a.tile_counts + (int64(walk) * a.tiles + outer) * (SLOTS * 4)
            inverse, lse = finish_rows(m, l, to_log2 * float32(1 / LOG2E))
            report(tile_count + 8, store_lse(a.lse + int64(walk) * a.n_q * 4, lse, query, stop))
            out = a.o_data + (batch * a.o_batch + head * a.o_head) * 2
            report(tile_count + 4, store_output(out, a.o_row * 2, o, inverse, query, stop))
            done_with(shared, item, speaking)
            stamp_block(tile_stamp, True)
            done = int32(done + count)
            item = int32(item + 1)

    def hopper_forward(map_q, map_k, map_v, a, counter):
        shared = shared_base()
        if cuda.threadIdx.x == 0:
            barriers_begin(shared)
        cuda.syncthreads()  # nobody touches a barrier before it exists
        role = warpgroup()
        if role == 0:
            give_registers()
            if cuda.threadIdx.x == 0:
                produce(map_q, map_k, map_v, a, counter, shared)
        else:
            take_registers()
            consume(a, shared, int32(role - 1))

    return hopper_forward
