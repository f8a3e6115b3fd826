"""The warps of the KV-outer backward that load tiles and send dQ (see kv_outer.cuh)."""

from types import SimpleNamespace
from typing import Any

from numba import cuda
from numba.cuda import types

from flashsim.backends.numba_gpu.hopper import gradients
from flashsim.backends.numba_gpu.hopper import smem_layout as word
from flashsim.backends.numba_gpu.hopper import wgmma_tiles as hopper
from flashsim.backends.numba_gpu.hopper.smem_layout import ITEM, KEYS_OUTSIDE_REGISTERS, ByKeys
from flashsim.backends.numba_gpu.traversal import SLOTS, device, quotient, read_int, shared_base

int32, int64 = types.int32, types.int64


def share_of(c: SimpleNamespace) -> Any:
    """Return ``share(group, count) -> member, n, left``, which selects a block's visits.

    A visit is one query tile times one key tile. A work tile has `count` visits per query head of
    the GQA group, one head after another. The blocks of a cluster divide the visits of a work tile.
    A block takes `left` consecutive visits, beginning with visit n of head number `member` in the
    group.
    """
    blocks = c.cluster

    @device
    def whole(group, count):
        return int32(0), int32(0), int32(group * count)

    @device
    def share(group, count):
        steps, rank = int32(group * count), int32(cuda.blockIdx.x & (blocks - 1))
        first, stop = quotient(steps * rank, blocks), quotient(steps * (rank + 1), blocks)
        member = quotient(first, max(count, 1))
        return member, int32(first - member * count), int32(stop - first)

    return whole if blocks == 1 else share


def roles(
    c: SimpleNamespace,
    at: ByKeys,
    w: Any,
    consume: Any,
    *,
    piece_barriers: tuple[int, int],
    sends: bool,
    start: bool,
) -> Any:
    """Return the kernel ``run(map_q, map_k, map_v, map_dout, map_dq, a, counter)``.

    One warpgroup produces. Every consumer warpgroup runs ``consume(a, shared, group)``, where
    `group` is its number. `piece_barriers` are two named barriers, for "dQ's staging area is free"
    and "it is full". With `sends`, two warps send dQ from shared memory to HBM. `start` is as in
    the function `statistics`.
    """
    produce = producer(c, at, w)
    produce_statistics = statistics(c, at, w, start=start)
    send_dq = sender(c, at, w, piece_barriers)
    barriers_begin = hopper.barriers_begin(at.barrier_arrivals)
    give, take = KEYS_OUTSIDE_REGISTERS
    give_registers = hopper.registers(give, more=False)
    take_registers = hopper.registers(take, more=True)
    warpgroup, warp_of = hopper.warpgroup, hopper.warp
    clustered, cluster_sync = c.cluster > 1, hopper.cluster_sync

    def run(map_q, map_k, map_v, map_dout, map_dq, a, counter):
        shared = shared_base()
        if cuda.threadIdx.x == 0:
            barriers_begin(shared)
        if clustered:
            cluster_sync()  # no block copies to another block whose barriers do not exist yet
        cuda.syncthreads()  # no thread uses a barrier before it is initialised
        role = warpgroup()
        if role == 0:
            give_registers()
            warp = warp_of()
            if warp == 1:
                produce_statistics(a, shared)
            elif warp >= 2:
                if sends:
                    send_dq(map_dq, a, shared, int32(warp - 2))
            elif cuda.threadIdx.x == 0:
                produce(map_q, map_k, map_v, map_dout, a, counter, shared)
        else:
            take_registers()
            consume(a, shared, int32(role - 1))

    return run


def producer(c: SimpleNamespace, at: ByKeys, w: Any) -> Any:
    """Return the producer ``produce(map_q, map_k, map_v, map_dout, a, counter, shared)``."""
    block_q, packed = c.block_q, bool(c.varlen)
    row_bytes, row_bytes_v = c.counted * 2, c.counted_v * 2
    k_at, v_at, q_at, dout_at = map(at.region, ("k", "v", "q", "dout"))
    query_bytes = at.query_bytes
    kv_full, k_free, v_free = at.barrier("kv_full"), at.barrier("k_free"), at.barrier("v_free")
    full, free = at.barrier("full"), at.barrier("free")
    item_full, item_free, items = at.barrier("item_full"), at.barrier("item_free"), at.items
    expect_kv = hopper.expect(2 * at.key_bytes)
    # Of dO there are as many stages as of Q, or one whose chunks have barriers of their own.
    one_dout = "dout_full" in at.arrivals
    expect_q = hopper.expect((1 if one_dout else 2) * query_bytes)
    blocks, share = c.cluster, share_of(c)
    again = blocks == 1  # a block may process several work tiles
    copy_k = hopper.copy_tile(c.block_k, at.chunks, packed=packed, blocks=blocks)
    copy_q = hopper.copy_tile(block_q, at.chunks, packed=packed)
    if one_dout:
        dout_full, dout_free = at.barrier("dout_full"), at.barrier("dout_free")
        copy_chunks = hopper.copy_chunks(block_q, at.chunks, packed=packed)
    put, get, map_address = hopper.put, hopper.get, hopper.map_address
    wait, wait_free, arrive, stage = hopper.wait, hopper.wait_free, hopper.arrive, hopper.stage

    @device
    def bring_stage(map_dout, shared, barrier, done, row, head, last):
        to = int32(shared + dout_at + (done & 1) * query_bytes)
        copy_q(to, map_address(map_dout), barrier, row, head, last)

    @device
    def bring_chunks(map_dout, shared, barrier, done, row, head, last):
        parity, to = int32(done & 1), int32(shared + dout_at)
        here, gone = int32(shared + dout_full), int32(shared + dout_free)
        copy_chunks(to, map_address(map_dout), here, gone, parity, row, head, last)

    bring_dout = bring_chunks if one_dout else bring_stage

    @device
    def bring_queries(map_q, map_dout, a, shared, slot, done, n, head, batch):
        """Load Q and dO for visit n of a query head, after `done` earlier visits of this block."""
        tile, _ = w.visit(a, w.visits(slot), n)
        query = int32(get(slot + word.BASE) + tile * block_q)
        number = int64(batch * a.heads + head) * a.n_visits + get(slot + word.FIRST) + n
        walk = int32(batch * a.heads + head)
        visit_stamp = w.visit_stamps(a, walk, get(slot + word.FIRST) + n, 0)
        w.stamp(visit_stamp, 0)
        wait_free(shared + free, done)  # its last readers are done
        w.stamp(visit_stamp, 1)
        barrier = stage(shared + full, done)
        expect_q(barrier)
        row, last = w.place(query, get(slot + word.END), batch)
        shift = int32((done & 1) * query_bytes)
        copy_q(shared + q_at + shift, map_address(map_q), barrier, row, head, last)
        bring_dout(map_dout, shared, barrier, done, row, head, last)
        w.stamp(visit_stamp, 4)
        rows = int32(min(block_q, get(slot + word.END) - query))
        visit_count = a.visit_counts + number * (SLOTS * 4)
        w.report_one(visit_count, int32(rows * row_bytes))
        w.report_one(visit_count + 4, int32(rows * row_bytes_v))

    @device
    def bring_keys(map_k, map_v, a, shared, slot, item, head, batch):
        """Load a work tile's V before its K, because V's buffer becomes free first.

        In a cluster, a block has only one work tile, so the producer need not wait for free
        buffers. In a cluster, the producer must not wait for free buffers. Blocks of a cluster load
        each other's tiles, so a block without visits may be done with K and V before its producer
        starts to wait. A late wait would take the barrier's current phase for the previous one, and
        never end.
        """
        start, stop = get(slot + word.START), get(slot + word.STOP)
        barrier, parity = int32(shared + kv_full), int32((item & 1) ^ 1)
        row, last = w.place(start, stop, batch)
        if again:
            wait(shared + v_free, parity)
        expect_kv(barrier)
        copy_k(shared + v_at, map_address(map_v), barrier, row, head, last)
        if again:
            wait(shared + k_free, parity)
        copy_k(shared + k_at, map_address(map_k), barrier, row, head, last)
        number = int64(get(slot + word.WALK)) * a.tiles + get(slot + word.OUTER)
        tile_count = a.tile_counts + number * (SLOTS * 4)
        keys = int32(stop - start)
        if blocks > 1 and cuda.blockIdx.x & (blocks - 1) > 0:  # counted once per cluster
            keys = int32(0)
        w.report_one(tile_count, int32(keys * row_bytes))
        w.report_one(tile_count + 4, int32(keys * row_bytes_v))

    @device
    def produce(map_q, map_k, map_v, map_dout, a, counter, shared):
        # `item` counts the block's work tiles, `done` their visits so far.
        item, done = int32(0), int32(0)
        number, kv_heads = int32(cuda.blockIdx.x), quotient(a.heads, a.group)
        number = int32(w.first(a) + quotient(number, blocks))
        while True:
            slot = int32(shared + items + (item & 1) * ITEM)
            # every warp is done with the slot's previous work tile
            wait_free(shared + item_free, item)
            if number >= w.stop(a):
                put(slot + word.WALK, int32(-1))
                arrive(stage(shared + item_full, item), True)
                break
            w.write(a, slot, number)
            arrive(stage(shared + item_full, item), True)  # releases the work tile to its readers
            walk, count = get(slot + word.WALK), get(slot + word.COUNT)
            batch, kv_head = w.batch_and_head(walk, kv_heads)
            tile_stamp = w.tile_stamps(a, walk, get(slot + word.OUTER), 0)
            w.stamp_block(tile_stamp, False)
            # The consumers release the last work tile's stages before its V, and its V before its
            # K. So the tiles of the first visit are loaded first.
            head = int32(kv_head * a.group)
            member, n, left = share(a.group, count)
            head, first = int32(head + member), True
            while first or left > 0:
                if left > 0:
                    bring_queries(map_q, map_dout, a, shared, slot, done, n, head, batch)
                    done, left, n = int32(done + 1), int32(left - 1), int32(n + 1)
                    if n == count:
                        head, n = int32(head + 1), int32(0)
                if first:
                    bring_keys(map_k, map_v, a, shared, slot, item, kv_head, batch)
                    first = False
            w.stamp_block(tile_stamp, True)
            item, number = int32(item + 1), w.after(a, counter)

    return produce


def statistics(c: SimpleNamespace, at: ByKeys, w: Any, *, start: bool) -> Any:
    """Return ``produce_statistics(a, shared)``, the loop of the warp that loads statistics.

    For each visit, the warp loads initial values for the scores and dP. The warp arrives at the
    barriers of the copies of Q and dO. If `start` is true, the initial scores include the
    log-sum-exp. If `start` is false, the initial scores are 0, and the warp loads the negative
    log-sum-exp in base 2.
    """
    block_q, fused, share = c.block_q, bool(c.fused), share_of(c)
    # The launches of one pass do not depend on each other. Each lets the next one begin, and before
    # it ends waits for the previous one, and through it for all earlier kernels.
    first, lets = not c.after, not fused or bool(c.more)
    lse_at, delta_at = at.region("lse"), at.region("delta")
    full, free = at.barrier("full"), at.barrier("free")
    load_statistics, put_rows = gradients.load_statistics(block_q), gradients.put_rows(block_q)
    unit_of_starts = gradients.unit_of_starts(start)
    get, speaks, wait_free = hopper.get, hopper.speaks, hopper.wait_free
    arrive, stage = hopper.arrive, hopper.stage

    @device
    def produce_statistics(a, shared):
        item, done, speaking = int32(0), int32(0), speaks()
        unit, kv_heads = unit_of_starts(a.scale), quotient(a.heads, a.group)
        # All other accesses to what the previous kernel wrote depend on these reads.
        if first:
            w.wait_for_what_ran_before()
        # Lets dQ's kernel start, whose blocks need a whole SM each. The conversion kernel is not
        # started early: its blocks would crowd on the few SMs that are idle by now.
        if lets:
            w.let_what_runs_next_start()
        while True:
            slot = w.take(shared, item)
            if get(slot + word.WALK) < 0:
                break
            batch, count = quotient(get(slot + word.WALK), kv_heads), get(slot + word.COUNT)
            kv_head = int32(get(slot + word.WALK) - batch * kv_heads)
            walk = int32(batch * a.heads + kv_head * a.group)  # index of the query head
            member, n, left = share(a.group, count)
            walk = int32(walk + member)
            while left > 0:
                tile, _ = w.visit(a, w.visits(slot), n)
                query = int32(get(slot + word.BASE) + tile * block_q)
                rows = int32(min(block_q, get(slot + word.END) - query))
                row = (int64(walk) * a.n_q + query) * 4
                # Loaded before the wait, to hide their latency:
                starts, deltas = load_statistics(a.lse + row, a.delta + row, rows, unit)
                wait_free(shared + free, done)  # its last readers are done
                put_rows(shared + lse_at + (done & 1) * (block_q * 4), starts)
                put_rows(shared + delta_at + (done & 1) * (block_q * 4), deltas)
                arrive(stage(shared + full, done), True)  # every lane arrives for what it wrote
                if speaking:
                    number = int64(walk) * a.n_visits + get(slot + word.FIRST) + n
                    visit_count = a.visit_counts + number * (SLOTS * 4)
                    w.report_one(visit_count + 8, int32(rows * 4))
                    w.report_one(visit_count + 12, int32(rows * 4))
                done, left, n = int32(done + 1), int32(left - 1), int32(n + 1)
                if n == count:
                    walk, n = int32(walk + 1), int32(0)
            w.leave(shared, item, speaking)
            item = int32(item + 1)
        if not first:
            w.wait_for_what_ran_before()

    return produce_statistics


def sender(c: SimpleNamespace, at: ByKeys, w: Any, barriers: tuple[int, int]) -> Any:
    """Return ``send_dq(map_dq, a, shared, group)``, the loop of a warp that sends dQ to HBM.

    The warp adds each piece of dQ that a warpgroup has written to shared memory to the accumulator
    in HBM. `barriers` are two named barriers of the first warpgroup, for "the staging area is free"
    and "it is full".
    """
    block_q, ordered, dq_rows = c.block_q, bool(c.ordered), at.dq_rows
    dq_at, dq_bytes, counted = at.region("dq"), at.dq_bytes, c.counted
    further = 0 if dq_rows == block_q else dq_rows  # rows between the warpgroups' pieces
    (first, apart, wide), *more = at.dq_columns
    two = bool(more)
    first_2, apart_2, wide_2 = more[0] if two else (0, 0, 0)
    packed, second_at = bool(c.varlen), wide * dq_rows * 4
    reduce_dq = gradients.reduce_dq(dq_rows, wide, packed=packed)
    reduce_second = gradients.reduce_dq(dq_rows, wide_2, packed=packed)
    reduce_wait = gradients.reduce_wait_read
    wait_turn, pass_turn, share = gradients.wait_turn, gradients.pass_turn, share_of(c)
    dq_free, dq_full = barriers
    piece_free, piece_full = hopper.named_arrive(160), hopper.named_sync(160)
    get, speaks = hopper.get, hopper.speaks
    map_address, uncounted = hopper.map_address, hopper.uncounted

    @device
    def send_dq(map_dq, a, shared, group):
        item, leads, kv_heads = int32(0), speaks(), quotient(a.heads, a.group)
        source, column = int32(shared + dq_at + group * dq_bytes), int32(first + apart * group)
        column_2 = int32(first_2 + apart_2 * group)
        below = int32(further * group)  # rows of the tile above the piece
        piece_free(dq_free + group)
        while True:
            slot = w.take(shared, item)
            if get(slot + word.WALK) < 0:
                break
            batch, count = quotient(get(slot + word.WALK), kv_heads), get(slot + word.COUNT)
            kv_head = int32(get(slot + word.WALK) - batch * kv_heads)
            head = int32(kv_head * a.group)
            member, n, left = share(a.group, count)
            head = int32(head + member)
            while left > 0:
                tile, _ = w.visit(a, w.visits(slot), n)
                query = int32(get(slot + word.BASE) + tile * block_q)
                walk = int32(batch * a.heads + head)
                turn = a.turns + ((int64(walk) * a.n_q + query) * 2 + group) * 4
                piece_full(dq_full + group)  # the piece is complete
                if leads:
                    if ordered:
                        rank = read_int(a.ptr, get(slot + word.OUTER)) + n
                        wait_turn(turn, read_int(a.ranks, rank))
                    row, last = w.place(query + below, get(slot + word.END), batch)
                    reduce_dq(map_address(map_dq), source, column, row, head, last)
                    number = int64(walk) * a.n_visits + get(slot + word.FIRST) + n
                    rows = max(0, min(dq_rows, get(slot + word.END) - query - below))
                    columns = max(0, min(wide, counted - column))
                    if two:
                        to = map_address(map_dq)
                        reduce_second(to, source + second_at, column_2, row, head, last)
                        columns += max(0, min(wide_2, counted - column_2))
                    w.report_one(a.visit_counts + number * (SLOTS * 4) + 16, rows * columns * 4)
                    reduce_wait()
                cuda.syncwarp()
                piece_free(dq_free + group)  # the piece may be overwritten
                if ordered and leads:
                    pass_turn(turn)
                left, n = uncounted(left - 1), int32(n + 1)
                if n == count:
                    head, n = int32(head + 1), int32(0)
            w.leave(shared, item, leads)
            item = int32(item + 1)

    return send_dq
