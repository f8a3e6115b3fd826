"""The L2 model's requests: the right tiles, in the order in which the blocks would ask."""

from dataclasses import replace

import numpy as np
import pytest
from l2_cases import small_device, streams

import flashsim
from flashsim import Device, Problem, Tiling, l2
from flashsim.api import cost
from flashsim.l2 import requests
from flashsim.l2.launch import SIDE, L2Launch
from flashsim.schedule.names import OPS, TENSORS, TRANSFERS
from flashsim.schedule.plans import DIRECTIONS
from flashsim.schedule.plans import GENERAL as ALGORITHMS
from flashsim.schedule.split_kv import occupancy

pytestmark = pytest.mark.promise("three counts equal")

PROBLEMS = {
    "plain": Problem(50, 70, head_dim=8, batch=2, heads=2),
    "causal GQA, bf16": Problem(
        64, 64, head_dim=8, batch=2, heads=4, kv_heads=2, dtype="bfloat16", causal=True
    ),
    "window, value width": Problem(40, 56, head_dim=8, head_dim_v=4, heads=2, window=(9, 3)),
    "shared bias, softcap": Problem(
        33, 47, head_dim=8, batch=2, heads=2, dtype="float16", bias=(1, 2), softcap=5.0
    ),
    "packed": Problem(
        60, 60, head_dim=8, cu_seqlens_q=(0, 20, 60), cu_seqlens_k=(0, 31, 60), causal=True
    ),
}
RUNS = [(a, d) for a in ALGORITHMS for d in DIRECTIONS]


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize(("algorithm", "direction"), RUNS)
@pytest.mark.parametrize("dq_rows", [None, 32])
def test_requests_add_up_to_the_traffic(problem, algorithm, direction, dq_rows):
    traffic = flashsim.count(
        problem, algorithm=algorithm, direction=direction, tiling=Tiling(16, 24, dq_rows)
    )
    tiles, parts = streams(traffic, l2.L2Model())
    found = {}
    for part in parts:
        for op, code in zip(OPS, TRANSFERS, strict=False):
            ids = part.ids[part.codes & 3 == code]
            per_tile = np.bincount(ids, minlength=len(tiles.size)) * tiles.size
            for tensor, nbytes in tiles.by_tensor(per_tile).items():
                stored_first = part.stage.stores_first and tensor.startswith("dQ")
                # The account calls the first write of a tile of dQ a reduction, like all others.
                key = part.stage.name, "reduce" if stored_first else op, tensor
                found[key] = found.get(key, 0) + nbytes
    assert found == traffic.transfers
    each = sum(len(part.ids) for part in parts)
    assert cost.replay_cost([traffic]).seconds == pytest.approx(each * cost.REQUEST)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_first_write_of_a_dq_tile_is_a_store_and_no_later_one(problem):
    traffic = flashsim.count(
        problem, algorithm="flash2-fused-first", direction="backward", tiling=Tiling(16, 24)
    )
    tiles, parts = streams(traffic, l2.L2Model())
    (fused,) = (part for part in parts if part.stage.name == "fused")
    of_dq = tiles.range_of("dQ_acc" if "dQ_acc" in tiles.names else "dQ")
    written = [
        (tile, OPS[code & 3])
        for tile, code in zip(fused.ids, fused.codes, strict=True)
        if of_dq.start <= tile < of_dq.stop
    ]
    seen = set()
    for tile, op in written:
        assert op == ("reduce" if tile in seen else "store")
        seen.add(tile)
    assert len(written) > len(seen) > 1


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "flash2-fused"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_block_asks_in_the_order_the_simulator_moves(algorithm, direction):
    """One SM, one block at a time: the requests are the simulator's transfers, one by one."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 40, 8))
    k, v = rng.standard_normal((2, 2, 2, 40, 8))  # a key head for two query heads
    tiling = Tiling(16, 12)
    result = flashsim.run(
        q.astype(np.float16), k.astype(np.float16), v.astype(np.float16),
        causal=True, algorithm=algorithm, tiling=tiling, trace=True,
    )  # fmt: skip
    trace = result.trace
    if direction == "backward":
        trace = result.backward(np.ones_like(result.out), tiling=tiling).trace
    predicted = trace.predicted()
    tiles, _ = streams(predicted, l2.L2Model())
    assert len(predicted.stages) == len(trace.stages)
    predicted.device = small_device(1, sms=1)
    for number, stage in enumerate(trace.stages):
        schedule = predicted.schedule(stage.stage)
        launch = L2Launch(l2.L2Model(jitter=0, blocks_per_sm=1), predicted, stage.stage)
        part = requests.stream(launch, tiles)
        events = stage.expand(number)  # of every head, one after the other
        expected = [
            (e["op"], tile_number(tiles, schedule, e))
            for e in events[np.isin(events["op"], TRANSFERS)]
        ]
        assert list(zip((part.codes & 3).tolist(), part.ids.tolist(), strict=True)) == expected


CACHE = {"heads": 4, "kv_heads": 2, "dtype": "bfloat16"}
CACHE |= {"cu_seqlens_q": (0, 2, 4), "cu_seqlens_k": (0, 50, 61), "page_size": 6}


@pytest.mark.parametrize("pack_gqa", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_decoding_asks_for_parts_in_the_order_the_simulator_moves(splits, pack_gqa):
    """One SM, one block at a time, which owns a part of a row tile's keys, or merges a tile's."""
    how = {"algorithm": "flash-decode", "tiling": Tiling(4, 8), "splits": splits}
    traffic = flashsim.count(Problem(4, 61, 8, **CACHE), pack_gqa=pack_gqa, **how)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 2, 8)).astype(flashsim.problem.problem.numpy_dtype("bfloat16"))
    pool = rng.standard_normal((18, 2, 6, 8)).astype(q.dtype)
    trace = flashsim.run(
        *(q, pool, pool), block_table=np.arange(18).reshape(2, 9), cache_seqlens=[50, 11],
        pack_gqa=pack_gqa, trace=True, **how,
    ).trace  # fmt: skip
    model = l2.L2Model(jitter=0, blocks_per_sm=1)
    traffic.device = small_device(1, sms=1)
    tiles, streamed = streams(traffic, model)
    for stage, part in zip(trace.stages, streamed, strict=True):
        events = stage.events[np.isin(stage.events["op"], TRANSFERS)]
        names = [TENSORS[code] for code in events["tensor"]] * stage.repeat
        edges = list(tiles.first.values())
        asked = [tiles.names[n] for n in np.searchsorted(edges, part.ids, "right") - 1]
        assert asked == names
        assert tiles.size[part.ids].tolist() == events["bytes"].tolist() * stage.repeat
        assert (part.codes & 3).tolist() == events["op"].tolist() * stage.repeat
    split, combine = streamed
    first, last = tiles.first["O_part"], tiles.first["L_part"]
    if splits == 1:
        assert len(combine.ids) == 0
        return
    written, read = (s.ids[(s.ids >= first) & (s.ids < last)].tolist() for s in (split, combine))
    assert written == read  # each part once, those of a row tile in their order
    assert len(set(written)) == len(written)


def test_packed_heads_have_one_q_and_unpacked_ones_share_k():
    p = Problem(1, 512, 8, heads=4, kv_heads=2, dtype="bfloat16")
    how = {"algorithm": "flash-decode", "tiling": Tiling(4, 64), "splits": 4}
    for pack_gqa in (False, True):
        traffic = flashsim.count(p, pack_gqa=pack_gqa, device=small_device(1 << 20), **how)
        assert traffic.bytes("load", "K") == 512 * 8 * 2 * (2 if pack_gqa else 4)
        read = l2.dram(traffic)  # K and V fit: from DRAM they come once
        assert read.bytes("read", "K") == 512 * 8 * 2 * 2
        assert read.bytes("read", "Q") == 4 * 8 * 2
        assert read.bytes("read", "O_part", "combine") == traffic.bytes("store", "O_part")
    biased = flashsim.count(Problem(1, 512, 8, heads=4, kv_heads=2, bias=(1, 4)), **how)
    with pytest.raises(flashsim.UnsupportedError, match="a bias of packed heads; pass pack_gqa="):
        l2.dram(biased)


def tile_number(tiles, schedule, event):
    """Where the tile of an event stands: K, V and their gradients by key head and column tile."""
    name, head = TENSORS[event["tensor"]], event["head"]
    if name in ("K", "V", "dK", "dV"):
        place = head // schedule.problem.group * schedule.t_c + event["j"]
    else:
        place = head * schedule.t_r + event["i"]
    number = tiles.first[name] + place
    assert tiles.size[number] == event["bytes"]
    return number


def test_half_of_the_sms_ask_each_partition():
    traffic = flashsim.count(
        Problem(640, head_dim=8), tiling=Tiling(16, 640), device=small_device(1 << 20, sms=40)
    )
    sides = {}
    for partitions in (1, 2):
        tiles, (part,) = streams(traffic, l2.L2Model(blocks_per_sm=1, partitions=partitions))
        of_sm = part.codes[part.ids < tiles.first["K"]] // SIDE  # one row tile each
        sides[partitions] = of_sm.tolist()
    assert sides[1] == [0] * 40
    assert sum(sides[2]) == 20
    assert sides[2] != sorted(sides[2])


def test_jitter_is_a_share_of_the_time_of_a_visit():
    """Lock-step blocks ask for K tile by tile; with much jitter they do not; no peak, no jitter."""
    device = Device.get("H100")
    traffic = flashsim.count(
        Problem(2048, head_dim=64, dtype="bfloat16"), tiling=Tiling(64, 64), device=device
    )
    seconds = 4 * 64 * 64 * 64 / (device.tensor_flops["bfloat16"] / (132 * 2))  # of a visit
    model = l2.L2Model(jitter=0.25 * seconds, blocks_per_sm=2)
    assert L2Launch(model, traffic, traffic.stages[0]).shares().jitter == pytest.approx(0.25)
    unknown = flashsim.count(traffic.problem, tiling=Tiling(64, 64), device=small_device(1 << 20))
    assert not any(L2Launch(model, unknown, unknown.stages[0]).shares())
    orders = {}
    for jitter in (0, 0.25 * seconds):
        tiles, (part,) = streams(traffic, l2.L2Model(jitter=jitter, blocks_per_sm=2))
        asked = part.ids[(part.ids >= tiles.first["K"]) & (part.ids < tiles.first["V"])]
        orders[jitter] = np.abs(np.diff(asked)).sum()
    assert orders[0] == 31  # from tile 0 to tile 31, once
    assert orders[0.25 * seconds] > 100


def test_a_visit_with_a_mask_takes_longer():
    """The second key tile ends inside the tile, so all its visits are masked: its block lags."""
    p = Problem(1024, 100, head_dim=64, dtype="bfloat16")
    traffic = flashsim.count(p, direction="backward", tiling=Tiling(64, 64), device="H100")
    stage = next(stage for stage in traffic.stages if stage.name == "dkdv")
    given = {"jitter": 0, "blocks_per_sm": 1}
    shares = L2Launch(l2.L2Model(masked=1, **given), traffic, stage).shares()
    once = 1 / shares.masked  # doubles a visit's time
    before = {}
    for masked in (0, once):
        tiles, parts = streams(traffic, l2.L2Model(masked=masked, **given))
        ids = next(part.ids for part in parts if part.stage.name == "dkdv")
        asked = ids[(ids >= tiles.first["Q"]) & (ids < tiles.first["Q"] + 16)] - tiles.first["Q"]
        before[masked] = int((asked == 15).argmax())  # requests before one for the last row tile
    assert before[0] == 30  # both blocks asked for the 15 others
    assert before[once] in (22, 23)  # the other block is half as far


def test_a_block_that_no_other_block_helps_waits_for_dram():
    """Two blocks share head 0 and miss alternately; the only block of head 1 misses always."""
    p = Problem(128, 2048, head_dim=64, heads=2, dtype="bfloat16")
    traffic = flashsim.count(p, tiling=Tiling(64, 64), device="H100")
    traffic.device = replace(traffic.device, sm_count=3)
    stage, tiles = traffic.stages[0], requests.TileNumbers.of(traffic)
    given = {"jitter": 0, "blocks_per_sm": 1}
    seconds = L2Launch(l2.L2Model(**given), traffic, stage).visit_seconds()
    others = {}
    for wait in (0, seconds):
        model = l2.L2Model(wait=wait, **given)
        cache = l2.model._Sets(tiles, traffic.device, model).copy()
        ids = requests.stream(L2Launch(model, traffic, stage), tiles, cache).ids
        head = (ids - tiles.first["K"]) // 32
        keys = head[(ids >= tiles.first["K"]) & (head < 2)]
        others[wait] = int((keys[: np.flatnonzero(keys == 0)[-1]] == 1).sum())
    assert others[0] == 31  # of 32 tiles of keys, the last is to come
    assert others[seconds] == pytest.approx(24, abs=1)  # a visit takes 2 instead of 1.5


def test_all_blocks_run_once_whatever_the_order():
    traffic = flashsim.count(PROBLEMS["causal GQA, bf16"], tiling=Tiling(16, 16))
    want = None
    for launch in l2.launch.ORDERS:
        for walk in l2.launch.WALKS:
            _, (part,) = streams(traffic, l2.L2Model(launch=launch, walk=walk, blocks_per_sm=1))
            found = np.sort(part.ids)
            want = found if want is None else want
            assert np.array_equal(found, want), (launch, walk)


def test_in_step_the_heads_of_a_group_are_at_a_tile_in_turn():
    """On one SM every other block goes back, the first one does; queries outside, nobody."""
    p = Problem(48, 32, head_dim=8, heads=2, kv_heads=1, dtype="bfloat16")
    traffic = flashsim.count(p, algorithm="flash2", direction="backward", tiling=Tiling(16, 16))
    traffic.device = small_device(1, sms=1)
    model = l2.L2Model("grouped", walk="in-step", jitter=0, blocks_per_sm=1)
    tiles, (_, dkdv, dq) = streams(traffic, model)

    def order(part, name):
        first, count = tiles.first[name], tiles.tiles(tiles.tensors[name])
        ids = part.ids[(part.ids >= first) & (part.ids < first + 2 * count)] - first
        return [divmod(int(x), count) for x in ids]  # head, tile

    back = [(head, tile) for tile in (2, 1, 0) for head in (0, 1)]
    assert order(dkdv, "Q") == back + sorted(back, key=lambda x: x[1])
    straight = streams(traffic, l2.L2Model("grouped", jitter=0, blocks_per_sm=1))[1][2]
    assert np.array_equal(dq.ids, straight.ids)


def test_blocks_of_a_cluster_divide_the_visits_of_a_tile():
    """Six visits, of two heads with three row tiles: two blocks begin three visits apart."""
    p = Problem(48, 16, head_dim=8, heads=2, kv_heads=1, dtype="bfloat16")
    traffic = flashsim.count(p, algorithm="flash2", direction="backward", tiling=Tiling(16, 16))
    traffic.device = small_device(1, sms=2)
    given = {"jitter": 0, "blocks_per_sm": 1}
    tiles, (_, shared, dq) = streams(traffic, l2.L2Model("grouped", cluster=2, **given))
    _, (_, alone, dq_alone) = streams(traffic, l2.L2Model("grouped", **given))
    first, count = tiles.first["Q"], tiles.tiles(tiles.tensors["Q"])

    def order(part):
        ids = part.ids[(part.ids >= first) & (part.ids < first + 2 * count)] - first
        return [divmod(int(x), count) for x in ids]  # head, tile

    assert order(alone) == [(head, tile) for head in (0, 1) for tile in (0, 1, 2)]
    assert order(shared) == [(head, tile) for tile in (0, 1, 2) for head in (0, 1)]
    assert np.array_equal(np.sort(shared.ids), np.sort(alone.ids))  # K, V, dK and dV once
    assert np.array_equal(dq.ids, dq_alone.ids)  # a cluster is for KV-outer kernels


def test_longest_first_starts_with_the_last_causal_rows():
    traffic = flashsim.count(Problem(64, head_dim=8, heads=2, causal=True), tiling=Tiling(16, 16))
    launch = L2Launch(l2.L2Model("longest-first"), traffic, traffic.stages[0])
    walks, tiles = launch.order(np.diff(launch.schedule.row_csr[0]))
    assert tiles.tolist() == [3, 3, 2, 2, 1, 1, 0, 0]
    assert walks.tolist() == [0, 1] * 4


def test_groups_of_heads_run_one_after_the_other():
    traffic = flashsim.count(Problem(32, head_dim=8, heads=4, causal=True), tiling=Tiling(16, 16))
    stage, visits = traffic.stages[0], np.array([1, 2])
    model = l2.L2Model("grouped", heads_in_group=2)
    walks, tiles = L2Launch(model, traffic, stage).order(visits)
    assert walks.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert tiles.tolist() == [1, 1, 0, 0] * 2
    # By default as many heads as keep K and V (2 KiB a head) in 0.4 of L2.
    traffic.device = small_device(11 * 1024)
    by_size = L2Launch(l2.L2Model("grouped"), traffic, stage).order(visits)
    assert by_size[0].tolist() == walks.tolist()


def test_keys_outside_start_where_the_key_order_says():
    orders = []
    for key_order in ("ascending", "descending"):
        traffic = flashsim.count(
            Problem(48, head_dim=8), algorithm="flash1", tiling=Tiling(16, 16), key_order=key_order
        )
        order = L2Launch(l2.L2Model(), traffic, traffic.stages[1]).order(np.ones(3))
        orders.append(order[1].tolist())
    assert orders == [[0, 1, 2], [2, 1, 0]]


def test_occupancy_follows_the_shared_memory_of_an_sm():
    traffic = flashsim.count(Problem(512, head_dim=64), tiling=Tiling(64, 64))
    stage = traffic.stages[0]
    held = sum(b.nbytes(64, 64) for b in stage.buffers)
    fits = [
        occupancy(stage, traffic.schedule(stage), Device("d", held, n)) for n in (held, 3 * held)
    ]
    assert fits == [1, 2]  # 3 * held minus what CUDA reserves holds two


def test_blocks_that_share_an_sm_are_slower():
    """Of 168 blocks on 132 SMs, 72 share one: those read Q and dO again, far behind the others.

    An H100 read 391 MB of a portable kernel for dK and dV with 56 heads on 7; of equally fast
    blocks L2 would hold all but the 187 MB that are read once.
    """
    p = Problem(4096, 1000, head_dim=64, batch=3, heads=56, kv_heads=7, dtype="float16")
    traffic = flashsim.count(
        p, algorithm="flash2", direction="backward", tiling=Tiling(64, 128), device="H100"
    )
    model = l2.L2Model("grouped", blocks_per_sm=2)
    uneven = l2.dram(traffic, model).bytes("read", stage="dkdv")
    assert uneven == pytest.approx(391_310_080, rel=0.15)
    even = l2.dram(traffic, replace(model, blocks_per_sm=1)).bytes("read", stage="dkdv")
    assert even != uneven
    few = requests._pace(132, Device.get("H100"))
    assert set(few) == {1.0}
    assert set(requests._pace(264, Device.get("H100"))) == {1.0}
    assert sorted(requests._pace(168, Device.get("H100"))) == [0.5] * 96 + [1.0] * 72
