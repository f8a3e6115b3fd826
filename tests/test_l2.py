"""The L2 model: the right requests, an exact cache, exact distances, derivable behaviour."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashsim
from flashsim import Device, OptionError, Problem, Tiling, UnsupportedError, l2
from flashsim.events import OPS, TENSORS, TRANSFERS
from flashsim.l2 import kernels, requests
from flashsim.l2.launch import occupancy
from flashsim.plans import ALGORITHMS, DIRECTIONS

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


def small_device(l2_bytes, *, sms=3, partitions=1):
    return Device(
        *("toy", 1 << 20, 1 << 20), sm_count=sms, l2_bytes=l2_bytes, l2_partitions=partitions
    )


def streams(traffic, model):
    tiles, parts = l2.model._streams(traffic, model)
    return tiles, list(parts)


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize(("algorithm", "direction"), RUNS)
def test_requests_add_up_to_the_traffic(problem, algorithm, direction):
    traffic = flashsim.count(
        problem, algorithm=algorithm, direction=direction, tiling=Tiling(16, 24)
    )
    tiles, parts = streams(traffic, l2.L2Model())
    found = {}
    for part in parts:
        for op, code in kernels.OPS.items():
            ids = part.ids[part.codes & 3 == code]
            per_tile = np.bincount(ids, minlength=len(tiles.size)) * tiles.size
            for tensor, nbytes in tiles.by_tensor(per_tile).items():
                found[part.stage.name, op, tensor] = nbytes
    assert found == traffic.transfers


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
    for number, stage in enumerate(trace.stages):
        schedule = predicted.schedule(stage.stage)
        part = requests.stream(
            stage.stage, schedule, tiles, algorithm, direction,
            small_device(1, sms=1), l2.L2Model(skew=0, blocks_per_sm=1),
        )  # fmt: skip
        events = stage.expand(number)  # of every head, one after the other
        expected = [
            (kernels.OPS[OPS[e["op"]]], tile_number(tiles, schedule, e))
            for e in events[np.isin(events["op"], TRANSFERS)]
        ]
        assert list(zip((part.codes & 3).tolist(), part.ids.tolist(), strict=True)) == expected


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


def test_sms_take_turns_between_the_partitions():
    """In lock-step, blocks 0, 1, 2, ... are on SMs 0, 1, 2, ..., of alternating partitions."""
    traffic = flashsim.count(
        Problem(64, head_dim=8), tiling=Tiling(16, 64), device=small_device(1 << 20, sms=4)
    )
    for partitions, sides in ((1, [0, 0, 0, 0]), (2, [0, 1, 0, 1])):
        model = l2.L2Model(skew=0, blocks_per_sm=1, partitions=partitions)
        tiles, (part,) = streams(traffic, model)
        asks_q = part.ids < tiles.first["K"]
        assert part.ids[asks_q].tolist() == [0, 1, 2, 3]
        assert (part.codes[asks_q] // kernels.SIDE).tolist() == sides


def test_all_blocks_run_once_whatever_the_order():
    traffic = flashsim.count(PROBLEMS["causal GQA, bf16"], tiling=Tiling(16, 16))
    want = None
    for launch in l2.launch.ORDERS:
        for walk in l2.launch.WALKS:
            _, (part,) = streams(traffic, l2.L2Model(launch=launch, walk=walk, blocks_per_sm=1))
            found = np.sort(part.ids)
            want = found if want is None else want
            assert np.array_equal(found, want), (launch, walk)


def test_longest_first_starts_with_the_last_causal_rows():
    traffic = flashsim.count(Problem(64, head_dim=8, heads=2, causal=True), tiling=Tiling(16, 16))
    stage = traffic.stages[0]
    schedule = traffic.schedule(stage)
    visits = np.diff(schedule.row_csr[0])
    walks, tiles = l2.L2Model(launch="longest-first").order(stage, schedule, visits, traffic.device)
    assert tiles.tolist() == [3, 3, 2, 2, 1, 1, 0, 0]
    assert walks.tolist() == [0, 1] * 4


def test_groups_of_heads_run_one_after_the_other():
    traffic = flashsim.count(Problem(32, head_dim=8, heads=4, causal=True), tiling=Tiling(16, 16))
    stage = traffic.stages[0]
    schedule, visits = traffic.schedule(stage), np.array([1, 2])
    model = l2.L2Model(launch="grouped", heads_in_group=2)
    walks, tiles = model.order(stage, schedule, visits, traffic.device)
    assert walks.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert tiles.tolist() == [1, 1, 0, 0] * 2
    # By default as many heads as keep K and V (2 KiB a head) in half of L2.
    by_size = l2.L2Model(launch="grouped").order(stage, schedule, visits, small_device(8 * 1024))
    assert by_size[0].tolist() == walks.tolist()


def test_keys_outside_start_where_the_key_order_says():
    orders = []
    for key_order in ("ascending", "descending"):
        traffic = flashsim.count(
            Problem(48, head_dim=8), algorithm="flash1", tiling=Tiling(16, 16), key_order=key_order
        )
        stage = traffic.stages[1]
        order = l2.L2Model().order(stage, traffic.schedule(stage), np.ones(3), traffic.device)
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


# -- the cache -------------------------------------------------------------------------------------


class BruteForce:
    """An LRU cache of pieces, written out: what the kernels must equal."""

    def __init__(self, capacity, size):
        self.capacity, self.size, self.held = capacity, size, OrderedDict()
        self.read = self.written = 0

    def touch(self, piece, dirty):
        self.held[piece] = self.held.pop(piece, False) or dirty
        while sum(self.size[p] for p in self.held) > self.capacity:
            last, was_dirty = self.held.popitem(last=False)
            self.written += self.size[last] * was_dirty

    def access(self, piece, op):
        if op != kernels.STORE and piece not in self.held:
            self.read += self.size[piece]
        self.touch(piece, op != kernels.LOAD)


SIZE = st.lists(st.integers(1, 9), min_size=2, max_size=8)
REQUESTS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2), st.integers(0, 1)), max_size=60)


def arrays(size, asked):
    ids = np.array([tile % len(size) for tile, _, _ in asked], np.int32)
    codes = np.array([op + kernels.SIDE * side for _, op, side in asked], np.uint8)
    return np.array(size, np.int64), ids, codes


def replayed(size, ids, codes, capacity):
    cache = l2.model._Cache(len(size), 1)
    fetched, lost = np.zeros((2, len(size)), np.int64)
    kernels.replay(ids, codes, size, capacity, cache.links, cache.state, cache.used, fetched, lost)
    return fetched.sum(), lost.sum()


@settings(max_examples=150, deadline=None)
@given(SIZE, REQUESTS, st.integers(0, 40))
def test_replay_equals_a_cache_written_out(size, asked, capacity):
    size, ids, codes = arrays(size, asked)
    brute = BruteForce(capacity, size)
    for tile, code in zip(ids, codes, strict=True):
        brute.access(tile, code & 3)
    assert replayed(size, ids, codes, capacity) == (brute.read, brute.written)


@settings(max_examples=100, deadline=None)
@given(SIZE, REQUESTS, st.integers(0, 30))
def test_two_partitions_equal_two_caches_written_out(size, asked, capacity):
    size, ids, codes = arrays(size, asked)
    pieces = l2.model._pieces(size, 2)
    assert pieces.sum() == size.sum()
    parts = BruteForce(capacity, pieces), BruteForce(capacity, pieces)
    read = 0
    for tile, code in zip(ids, codes, strict=True):
        op, side = code & 3, code // kernels.SIDE
        for home in (0, 1):
            piece = 2 * tile + home
            if op == kernels.LOAD and side != home and piece in parts[side].held:
                parts[side].touch(piece, False)
                continue
            read += pieces[piece] * (op != kernels.STORE and piece not in parts[home].held)
            parts[home].touch(piece, op != kernels.LOAD)
            if op == kernels.LOAD and side != home:
                parts[side].touch(piece, False)
            if op != kernels.LOAD:
                parts[1 - home].held.pop(piece, None)
    cache = l2.model._Cache(len(pieces), 2)
    fetched, lost = np.zeros((2, len(pieces)), np.int64)
    kernels.replay_two(
        ids, codes, pieces, capacity, cache.links, cache.state, cache.used, fetched, lost
    )
    assert (fetched.sum(), lost.sum()) == (read, sum(p.written for p in parts))


@settings(max_examples=150, deadline=None)
@given(SIZE, REQUESTS)
def test_stack_distances_give_every_cache_size_at_once(size, asked):
    size, ids, codes = arrays(size, asked)
    traffic = flashsim.count(Problem(8, head_dim=8))
    curve = l2.Curve.measure(requests.Stream(traffic.stages[0], ids, codes), size)
    for capacity in range(int(size.sum()) + 2):
        assert (curve.reads(capacity), curve.writes(capacity)) == replayed(
            size, ids, codes, capacity
        )


def test_distances_survive_renumbering():
    """More requests than the table of times holds at once."""
    rng = np.random.default_rng(1)
    size = rng.integers(1, 50, 40)
    ids = rng.integers(0, 40, 6000).astype(np.int32)
    codes = rng.integers(0, 3, 6000).astype(np.uint8)
    traffic = flashsim.count(Problem(8, head_dim=8))
    curve = l2.Curve.measure(requests.Stream(traffic.stages[0], ids, codes), size)
    for capacity in (0, 100, 400, 700, 2000):
        assert (curve.reads(capacity), curve.writes(capacity)) == replayed(
            size, ids, codes, capacity
        )


# -- behaviour one can derive ----------------------------------------------------------------------

LONG = Problem(1024, head_dim=16, heads=2)
KEYS = 2 * 1024 * 16 * 4  # K and V of one head, bytes


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize(("algorithm", "direction"), RUNS)
def test_a_large_cold_cache_reads_each_input_once(algorithm, direction, partitions):
    traffic = flashsim.count(
        LONG, algorithm=algorithm, direction=direction, tiling=Tiling(64, 64),
        device=small_device(1 << 40, partitions=partitions),
    )  # fmt: skip
    dram = l2.dram(traffic)
    for stage in dram.stages:
        loaded = {
            tensor
            for (name, op, tensor) in traffic.transfers
            if name == stage.name and op in ("load", "reduce")
        }
        # A tensor that the stage writes before it reads (O, l, m of FlashAttention-1) is in L2.
        own = {t for (n, op, t) in traffic.transfers if n == stage.name and op == "store"}
        once = {t: nbytes for t, nbytes in _whole(traffic).items() if t in loaded}
        if stage.name not in ("forward", "backward"):
            once = {t: nbytes for t, nbytes in once.items() if t not in own}
        assert stage.read == once
        assert not stage.write


def _whole(traffic):
    tiles, _ = l2.model._streams(traffic, l2.L2Model())
    return tiles.by_tensor(tiles.size)


def test_warm_stages_find_what_the_last_one_left():
    traffic = flashsim.count(
        LONG, direction="backward", tiling=Tiling(64, 64), device=small_device(1 << 40)
    )
    cold, warm = (l2.dram(traffic, l2.L2Model(flush=flush)) for flush in (True, False))
    whole = _whole(traffic)
    inputs = sum(whole[name] for name in ("Q", "K", "V", "O", "dO", "L"))
    outputs = sum(whole[name] for name in ("dQ", "dK", "dV", "delta"))
    assert warm.bytes("read") == inputs
    assert warm.bytes("pending") == outputs
    assert warm.bytes("write") == 0
    assert cold.bytes("read") > inputs


def test_lock_step_waves_read_the_keys_once_a_wave():
    """Keys twice the size of L2, scanned in turn: LRU keeps nothing from one wave to the next."""
    n, slots = 4096, 4
    keys = n * 16 * 4  # K of one head, bytes; V takes as much
    device = small_device(keys, sms=slots)
    traffic = flashsim.count(Problem(n, head_dim=16), tiling=Tiling(64, 64), device=device)
    model = {"skew": 0, "blocks_per_sm": 1}
    straight = l2.dram(traffic, l2.L2Model(**model)).bytes("read", "K")
    waves = n // 64 // slots
    assert straight == waves * keys

    sawtooth = l2.dram(traffic, l2.L2Model(walk="sawtooth", **model)).bytes("read", "K")
    # Each later wave finds what L2 kept of K and V: half of them, less what Q and O of two waves
    # take up.
    other = 2 * slots * 2 * 64 * 16 * 4
    kept = (keys - other) // 2
    assert keys + (waves - 1) * keys / 2 <= sawtooth <= keys + (waves - 1) * (keys - kept)


def test_two_partitions_keep_what_all_sms_read_twice():
    """K and V of one head fit one L2, but not each half of it."""
    keys = 2 * 4096 * 16 * 4
    problem, model = Problem(4096, head_dim=16), {"skew": 0, "blocks_per_sm": 1}
    reads = [
        l2.dram(
            flashsim.count(
                problem,
                tiling=Tiling(64, 64),
                device=small_device(int(1.3 * keys), sms=4, partitions=partitions),
            ),
            l2.L2Model(**model),
        ).bytes("read", "K")
        for partitions in (1, 2)
    ]
    assert reads[0] == keys // 2
    assert reads[1] > 2 * reads[0]


def test_reductions_read_what_left_the_cache():
    """A fused backward in a tiny L2: every reduction fetches its tile and dirties it again."""
    problem = Problem(1024, head_dim=16, dtype="bfloat16")
    traffic = flashsim.count(
        problem, algorithm="flash2-fused", direction="backward", tiling=Tiling(64, 64),
        device=small_device(8192, sms=1),
    )  # fmt: skip
    dram = l2.dram(traffic, l2.L2Model(blocks_per_sm=1))
    reduced = traffic.bytes("reduce", "dQ_acc")
    assert dram.bytes("read", "dQ_acc", "fused") == reduced
    assert (
        dram.bytes("write", "dQ_acc", "fused") + dram.bytes("pending", "dQ_acc", "fused") == reduced
    )


def test_curve_equals_the_replay_at_the_devices_size():
    for size in (KEYS // 3, KEYS, 4 * KEYS):
        traffic = flashsim.count(
            LONG, tiling=Tiling(64, 64), device=small_device(size), direction="backward"
        )
        dram, curves = l2.dram(traffic), l2.curves(traffic)
        for stage in dram.stages:
            assert curves[stage.name].reads(size) == sum(stage.read.values())
            assert curves[stage.name].writes(size) == sum(stage.write.values())


def test_curve_ends_at_first_reads_only():
    curve = l2.curves(flashsim.count(LONG, tiling=Tiling(64, 64)))["forward"]
    assert curve.reads(curve.enough()) == curve.cold < curve.reads(curve.enough() - 1)
    assert np.array_equal(curve.reads(np.array([0, 1 << 40])), [curve.most, curve.cold])
    with pytest.raises(OptionError, match="at least 0"):
        curve.reads(-1)


# -- the front door --------------------------------------------------------------------------------


def test_count_and_trace_speak_of_dram():
    q = np.ones((1, 2, 64, 8), np.float32)
    trace = flashsim.run(q, q, q, tiling=Tiling(16, 16), trace=True).trace
    problem = Problem(64, head_dim=8, heads=2)
    counted = flashsim.count(problem, tiling=Tiling(16, 16), level="dram")
    assert trace.dram().stages == counted.stages
    other = trace.dram("T4", l2.L2Model(launch="tile-first"))
    assert other.requested.device.name == "T4"
    assert counted.bytes() == problem.heads * 64 * 4 * (4 * 8 + 1)  # Q, K, V, O and LSE, once
    assert counted.intensity() == counted.requested.flops() / counted.bytes()
    assert "not yet calibrated" in str(counted)
    assert f"{counted.bytes():,} B of {counted.requested.bytes():,} B" in repr(counted)
    assert counted.hit_rate() == 1 - counted.bytes("read") / counted.requested.bytes("load")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launch": "head-frist"}, "did you mean 'head-first'"),
        ({"walk": "zigzag"}, "possible: straight, sawtooth"),
        ({"partitions": 3}, "partitions must be between 1 and 2, got 3"),
        ({"blocks_per_sm": 0}, "blocks_per_sm must be at least 1, got 0"),
        ({"skew": 1.5}, "skew must be at least 0 and below 1, got 1.5"),
    ],
)
def test_bad_models_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        l2.L2Model(**options)


def test_bad_questions_are_refused():
    counted = flashsim.count(Problem(64, head_dim=8), level="dram")
    with pytest.raises(OptionError, match="possible: read, write, pending"):
        counted.bytes("load")
    with pytest.raises(OptionError, match="no stage 'backward'"):
        counted.bytes("read", stage="backward")
    with pytest.raises(OptionError, match="possible: requested, dram"):
        flashsim.count(Problem(64, head_dim=8), level="l2")
    with pytest.raises(OptionError, match="give level='dram' as well"):
        flashsim.count(Problem(64, head_dim=8), l2=l2.L2Model())


def test_too_much_to_replay_is_refused():
    problem = Problem(1 << 20, head_dim=64, heads=8)
    with pytest.raises(UnsupportedError, match="larger tiles or fewer heads"):
        flashsim.count(problem, tiling=Tiling(128, 128), level="dram")
    scores = Problem(1 << 14, head_dim=8, heads=64)
    with pytest.raises(UnsupportedError, match="at most 50,000,000 tiles, and S takes it to"):
        flashsim.count(scores, algorithm="standard", tiling=Tiling(16, 16), level="dram")
