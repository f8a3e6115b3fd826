"""FlashAttention-3 backward (arXiv:2407.08608, Algorithm 3) for Hopper, in Python: keys outside.

The structure is that of kernels/hopper_backward.cu. A block owns one tile of keys of one key head;
each of two consumer warpgroups owns 64 of its keys and keeps their dK and dV in registers. Scores
are computed transposed, keys by queries, so that P^T is already the left operand of dV = P^T dO.
Only dS passes through shared memory, for dK = dS^T Q and dQ = dS K; dQ is added into a float32
accumulator by the copy engine. One producer thread loads tiles, another warp the rows' statistics.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from flashsim.backends.launch import Kernel
from flashsim.backends.numba_gpu import gradients, hopper_gradients, tiles
from flashsim.backends.numba_gpu import hopper_tiles as hopper
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
from flashsim.backends.numba_gpu.softmax import LOG2E
from flashsim.backends.numba_gpu.walk import (
    SLOTS,
    TILE_STAMPS,
    VISIT_STAMPS,
    constants,
    device,
    shared_base,
    walk_functions,
)

int32, int64, float32 = types.int32, types.int64, types.float32
_DQ_COLUMNS = 64  # of dQ's tile, which the warpgroups share out in pieces of 64 rows


def shared_memory(block_q: int, block_k: int, d: int) -> Shared:
    """K and V live for one item; q, dout, ds and the statistics are rings, one visit a stage.

    dS^T is kept with a key to a row. `dq` is each warpgroup's piece of dQ, leaving.
    """
    groups = block_k // 64
    return Shared(
        {
            **{"k": block_k * d * 2, "v": block_k * d * 2},
            **{"q": 2 * block_q * d * 2, "dout": 2 * block_q * d * 2},
            **{"ds": 2 * block_q * block_k * 2, "dq": groups * 64 * _DQ_COLUMNS * 4},
            **{"lse": 2 * block_q * 4, "delta": 2 * block_q * 4},
        },
        {
            **{"kv_full": (1, 1), "kv_free": (1, 4 * groups)},
            # Full takes the copies, and each lane of the warp with the statistics.
            **{"full": (2, 1 + 32), "free": (2, 4 * groups)},
        },
        4 * groups + 1,
    )


def hopper_backward_kernel(kernel: Kernel) -> Any:
    """The kernel, as a Python function, for compile-time constants.

    Its arguments are tensor maps of q, k, v, dout and dQ's accumulator (without FUSED, one that is
    not used), a `launch.ARGS`, and the address of a work counter that starts at 0.
    """
    c = constants(kernel)
    block_q, block_k, d, groups = c.block_q, c.block_k, c.d, c.block_k // 64
    head_dim, row_bytes, row_bytes_v = c.head_dim, c.head_dim * 2, c.head_dim_v * 2
    bf16, scaled, softcap, fused = bool(c.bf16), bool(c.scaled), bool(c.softcap), bool(c.fused)
    # Registers enough to start dV before dS is computed, and to load statistics before their use.
    ahead = block_q == 64

    # -- Shared memory
    at = shared_memory(block_q, block_k, d)
    chunks, q_chunks = d // 64, block_q // 64
    k_chunk, tile_k, tile_q = block_k * 128, block_k * d * 2, block_q * d * 2
    ds_bytes, dq_bytes, statistic = block_q * block_k * 2, 64 * _DQ_COLUMNS * 4, block_q * 4
    k_at, v_at, q_at, dout_at = at["k"], at["v"], at["q"], at["dout"]
    ds_at, dq_at, lse_at, delta_at = at["ds"], at["dq"], at["lse"], at["delta"]
    kv_full, kv_free, full, free = at["kv_full"], at["kv_free"], at["full"], at["free"]
    barriers_begin = hopper.barriers_begin(at.arrivals)
    expect_kv, copy_k = hopper.expect(2 * tile_k), hopper.copy_tile(block_k, chunks)
    expect_q, copy_q = hopper.expect(2 * tile_q), hopper.copy_tile(block_q, chunks)
    # 65,536 registers go to 384 threads.
    give_registers = hopper.registers(24, more=False)
    take_registers = hopper.registers(240, more=True)

    # -- Fragments
    new_grad = tiles.zeros(d // 2)
    queue_scores = hopper.queue_scores(bf16, block_q, d, rows=block_k)
    queue_dv = hopper.queue_accumulated(bf16, d, block_q)
    queue_dk = hopper.queue_accumulated(bf16, d, block_q, rows=block_k)
    queue_dq = hopper.queue_transposed(bf16, _DQ_COLUMNS, block_k)
    scores_done = hopper.product_wait(1, block_q)  # and the last visit's dK; dP is not
    dp_done = hopper.product_wait(1 if ahead else 0, block_q)  # dV may be queued behind it
    dq_done = hopper.product_wait(1, _DQ_COLUMNS)  # and dV; dK goes on into the next visit
    dv_done = hopper.product_wait(1, d)  # the same, without dQ
    grads_done = hopper.products_wait(0, d)
    load_columns = gradients.load_columns(block_q)
    probabilities = gradients.transposed_probabilities(block_q, scaled, softcap, ahead)
    score_gradients = gradients.transposed_score_gradients(block_q, softcap, ahead)
    mask = gradients.mask_probabilities(1, block_q, False, bool(c.left), bool(c.right))
    round_operand = hopper.round_operand(bf16, block_q)
    store_ds = hopper_gradients.store_left(block_k, block_q)
    stage_dq = hopper_gradients.stage_sums(_DQ_COLUMNS)
    reduce_dq = hopper_gradients.reduce_chunks(_DQ_COLUMNS)
    reduce_wait, fence_async = hopper_gradients.reduce_wait, hopper_gradients.fence_async
    load_statistics = hopper_gradients.load_statistics(block_q)
    put_statistics = hopper_gradients.put_statistics(block_q)
    store_dk = hopper.store_output(bf16, d, c.head_dim)
    store_dv = hopper.store_output(bf16, d, c.head_dim_v)
    w = walk_functions(c, stamper=128)  # the first consumer's first thread
    visit_of, report, report_one = w.visit, w.report, w.report_one
    stamp, stamp_block = w.stamp, w.stamp_block
    i = item_functions(c, w, at, by_row=False)
    offer, take, done_with, slot_of = i.offer, i.take, i.done, i.slot
    visits_of, next_number, place = i.visits_of, i.next_number, i.place
    get, map_address = hopper.get, hopper.map_address
    wait, arrive, stage = hopper.wait, hopper.arrive, hopper.stage
    wait_full, wait_free = hopper.wait_full, hopper.wait_free
    both_sync, group_sync = hopper.named_sync(128 * groups), hopper.named_sync(128)
    warpgroup, warp, speaks = hopper.warpgroup, hopper.warp, hopper.speaks
    uncounted = hopper.uncounted

    # In all three roles, `item` counts the block's items, `done` the visits of those before this
    # one; (member, n) is a query head of the group and a visit of its walk.

    @device
    def produce(map_q, map_k, map_v, map_dout, a, counter, shared):
        item, done, number = int32(0), int32(0), int32(cuda.blockIdx.x)
        while offer(a, shared, item, number):
            slot = slot_of(shared, item)
            walk, start = get(slot + WALK), get(slot + START)
            batch, kv_head = place(a, walk)
            wait(shared + kv_free, (item & 1) ^ 1)  # the last item is done with K and V
            barrier = int32(shared + kv_full)
            expect_kv(barrier)
            copy_k(shared + k_at, map_address(map_k), barrier, start, kv_head, batch)
            copy_k(shared + v_at, map_address(map_v), barrier, start, kv_head, batch)
            tile_count = a.tile_counts + (int64(walk) * a.tiles + get(slot + OUTER)) * (SLOTS * 4)
            report_one(tile_count, int32((get(slot + STOP) - start) * row_bytes))
            report_one(tile_count + 4, int32((get(slot + STOP) - start) * row_bytes_v))
            head, n = int32(kv_head * a.group), int32(0)
            last = int32(done + a.group * get(slot + COUNT))
            while done < uncounted(last):
                tile, _ = visit_of(a, visits_of(slot), n)
                query = int32(get(slot + BASE) + tile * block_q)
                wait_free(shared + free, done)  # its last readers are done
                barrier = stage(shared + full, done)
                expect_q(barrier)
                to = int32(shared + q_at + (done & 1) * tile_q)
                copy_q(to, map_address(map_q), barrier, query, head, batch)
                to = int32(shared + dout_at + (done & 1) * tile_q)
                copy_q(to, map_address(map_dout), barrier, query, head, batch)
                visit_count = int64(batch * a.heads + head) * a.n_visits + get(slot + FIRST) + n
                visit_count = a.visit_counts + visit_count * (SLOTS * 4)
                rows = int32(min(block_q, get(slot + END) - query))
                report_one(visit_count, int32(rows * row_bytes))
                report_one(visit_count + 4, int32(rows * row_bytes_v))
                done, n = int32(done + 1), int32(n + 1)
                if n == get(slot + COUNT):
                    head, n = int32(head + 1), int32(0)
            item = int32(item + 1)
            number = next_number(counter)

    @device
    def produce_statistics(a, shared):
        # A warp: log-sum-exp and delta of each visit's rows, on the tiles' barriers.
        item, done, speaking = int32(0), int32(0), speaks()
        while True:
            slot = take(shared, item)
            if get(slot + WALK) < 0:
                break
            batch, kv_head = place(a, get(slot + WALK))
            walk, n = int32(batch * a.heads + kv_head * a.group), int32(0)  # of the query head
            last = int32(done + a.group * get(slot + COUNT))
            while done < uncounted(last):
                tile, _ = visit_of(a, visits_of(slot), n)
                query = int32(get(slot + BASE) + tile * block_q)
                rows = int32(min(block_q, get(slot + END) - query))
                row = (int64(walk) * a.n_q + query) * 4
                minus, delta = load_statistics(a.lse + row, a.delta + row, rows)
                wait_free(shared + free, done)  # its last readers are done
                put_statistics(shared + lse_at + (done & 1) * statistic, minus)
                put_statistics(shared + delta_at + (done & 1) * statistic, delta)
                arrive(stage(shared + full, done), True)  # every lane for what it wrote
                visit_count = int64(walk) * a.n_visits + get(slot + FIRST) + n
                visit_count = a.visit_counts + visit_count * (SLOTS * 4)
                if speaking:
                    report_one(visit_count + 8, int32(rows * 4))
                    report_one(visit_count + 12, int32(rows * 4))
                done, n = int32(done + 1), int32(n + 1)
                if n == get(slot + COUNT):
                    walk, n = int32(walk + 1), int32(0)
            done_with(shared, item, speaking)
            item = int32(item + 1)

    @device
    def add_dq(map_dq, a, shared, slot, group, dq, query, head, batch, visit_count):
        # dQ leaves: staged, then added to the accumulator by the copy engine.
        leads = int32(cuda.threadIdx.x) & 127 == 0  # owns the warpgroup's copies out
        to = int32(shared + dq_at + group * dq_bytes)
        if leads:
            reduce_wait()
        group_sync(2 + group)  # the copy engine has read the last visit's piece
        stage_dq(to, dq)
        fence_async()
        group_sync(2 + group)  # the piece is complete
        if leads:
            column = int32(64 * group) if q_chunks == 1 else int32(0)
            row = query if q_chunks == 1 else int32(query + 64 * group)
            reduce_dq(to, map_address(map_dq), column, row, head, batch)
            rows = max(0, min(64, get(slot + END) - row))
            columns = max(0, min(_DQ_COLUMNS, head_dim - column))
            report_one(visit_count + 16, int32(rows * columns * 4))

    @device
    def consume(map_dq, a, shared, group):
        speaking = speaks()  # one arrival a warp
        to_log2 = float32(LOG2E) if scaled else a.scale * float32(LOG2E)  # exponents in base 2
        row0 = int32(
            int32(cuda.threadIdx.x) % 128 // 32 * 16 + 64 * group
        )  # the warp's, in the tile
        mine = int32(group * (64 * 128))  # the warpgroup's first row in a chunk
        item, done = int32(0), int32(0)
        while True:
            slot = take(shared, item)
            walk = get(slot + WALK)
            if walk < 0:
                break
            steps = visits_of(slot)
            batch, head = place(a, walk)
            head, n = int32(head * a.group), int32(0)
            tile_stamp = a.tile_stamps + (int64(walk) * a.tiles + get(slot + OUTER)) * (
                TILE_STAMPS * 8
            )
            stamp_block(tile_stamp, False)
            dk, dv = new_grad(), new_grad()
            wait(shared + kv_full, item & 1)
            begun, last = done, int32(done + a.group * steps[1])
            if done < last:
                while done < last:
                    number = int64(batch * a.heads + head) * a.n_visits + steps[0] + n
                    visit_stamp = a.visit_stamps + number * (VISIT_STAMPS * 8)
                    tile, masked = visit_of(a, steps, n)
                    now = done & 1
                    q, dout = shared + q_at + now * tile_q, shared + dout_at + now * tile_q
                    ds = int32(shared + ds_at + now * ds_bytes)
                    # -- S^T = K Q^T and dP^T = V dO^T, queued behind the last visit's dK ----------
                    stamp(visit_stamp, 0)
                    wait_full(shared + full, done)
                    stamp(visit_stamp, 1)
                    s = queue_scores(shared + k_at + mine, q)
                    dp = queue_scores(shared + v_at + mine, dout)
                    lse = int32(shared + lse_at + now * statistic)
                    delta = int32(shared + delta_at + now * statistic)
                    minus = load_columns(lse) if ahead else lse  # under the products
                    s = scores_done(s)
                    if done > begun:  # of two stages, the next one is also the last visit's
                        arrive(stage(shared + free, done + 1), speaking)
                    stamp(visit_stamp, 2)
                    # -- P^T = exp2(c S^T - lse) ---------------------------------------------------
                    p, slope = probabilities(s, minus, a.scale, a.softcap, to_log2)
                    query = int32(get(slot + BASE) + tile * block_q)
                    if masked:
                        key = int32(get(slot + START) + row0)
                        limits = get(slot + OFFSET), get(slot + STOP)
                        p = mask(p, query, key, limits[0], limits[1], a.left, a.right)
                    # -- dV += P^T dO, and under it dS^T = P^T (dP^T - delta) ----------------------
                    rounded = round_operand(p)
                    if ahead:
                        deltas = load_columns(delta)
                        dv = queue_dv(dv, rounded, dout)
                    else:
                        deltas = delta
                    dp = dp_done(dp)
                    stamp(visit_stamp, 3)
                    store_ds(ds, 64 * group, round_operand(score_gradients(p, dp, deltas, slope)))
                    if not ahead:
                        dv = queue_dv(dv, rounded, dout)
                    fence_async()
                    # All of dS is written. The other stage's dS is free from here on: its products
                    # were waited for before this visit's scores were used.
                    both_sync(1)
                    # -- dQ = dS K, dK += dS^T Q ---------------------------------------------------
                    if fused:
                        if q_chunks == 1:
                            dq = queue_dq(ds, shared + k_at + group * k_chunk)
                        else:
                            dq = queue_dq(ds + group * k_chunk, shared + k_at)
                        dk = queue_dk(dk, ds + mine, q)
                        dq = dq_done(dq)
                        visit_count = a.visit_counts + number * (SLOTS * 4)
                        add_dq(map_dq, a, shared, slot, group, dq, query, head, batch, visit_count)
                    else:
                        dk = queue_dk(dk, ds + mine, q)
                        dv = dv_done(dv)
                    stamp(visit_stamp, 4)
                    done, n = int32(done + 1), int32(n + 1)
                    if n == steps[1]:
                        head, n = int32(head + 1), int32(0)
                # Here, not behind the `if`: where ways meet, registers may be moved, and products
                # are still adding to these.
                dk, dv = grads_done(dk, dv)
                arrive(stage(shared + free, done + 1), speaking)
            arrive(shared + kv_free, speaking)  # the next item's K and V may come

            # -- dK and dV, straight from registers ---------------------------------------------
            walk = get(slot + WALK)
            batch, kv_head = place(a, walk)
            row, stop = int32(get(slot + START) + row0), get(slot + STOP)
            tile_count = a.tile_counts + (int64(walk) * a.tiles + get(slot + OUTER)) * (SLOTS * 4)
            to = a.dk_data + (batch * a.dk_batch + kv_head * a.dk_head) * 2
            factors = a.scale, a.scale
            report(tile_count + 8, store_dk(to, a.dk_row * 2, dk, factors, row, stop))
            to = a.dv_data + (batch * a.dv_batch + kv_head * a.dv_head) * 2
            ones = float32(1.0), float32(1.0)
            report(tile_count + 12, store_dv(to, a.dv_row * 2, dv, ones, row, stop))
            done_with(shared, item, speaking)
            stamp_block(tile_stamp, True)
            item = int32(item + 1)
        if fused:
            reduce_wait()  # shared memory must outlive the copies that read it

    def hopper_backward(map_q, map_k, map_v, map_dout, map_dq, a, counter):
        shared = shared_base()
        if cuda.threadIdx.x == 0:
            barriers_begin(shared)
        cuda.syncthreads()  # nobody touches a barrier before it exists
        role = warpgroup()
        if role == 0:
            give_registers()
            if warp() == 1:
                produce_statistics(a, shared)
            elif cuda.threadIdx.x == 0:
                produce(map_q, map_k, map_v, map_dout, a, counter, shared)
        else:
            take_registers()
            consume(map_dq, a, shared, int32(role - 1))

    return hopper_backward
