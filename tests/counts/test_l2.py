"""The L2 model as a whole: behaviour one can derive, and its front door."""

import numpy as np
import pytest
from l2_cases import small_device
from refusals import refuses

import flashsim
from flashsim import OptionError, Problem, Tiling, UnsupportedError, l2
from flashsim.schedule.plans import DIRECTIONS
from flashsim.schedule.plans import GENERAL as ALGORITHMS

pytestmark = pytest.mark.promise("predictions are judged")

RUNS = [(a, d) for a in ALGORITHMS for d in DIRECTIONS]
LONG = Problem(1024, head_dim=16, heads=2)
KEYS = 2 * 1024 * 16 * 4  # K and V of one head, bytes


@pytest.mark.parametrize(("partitions", "ways"), [(1, None), (1, 16), (2, 16)])
@pytest.mark.parametrize(("algorithm", "direction"), RUNS)
def test_a_large_cold_cache_reads_each_input_once(algorithm, direction, partitions, ways):
    traffic = flashsim.count(
        LONG, algorithm=algorithm, direction=direction, tiling=Tiling(64, 64),
        device=small_device(1 << 40, partitions=partitions),
    )  # fmt: skip
    dram = l2.dram(traffic, l2.L2Model(ways=ways))
    for stage in dram.stages:
        loaded = {
            tensor
            for (name, op, tensor) in traffic.transfers
            if name == stage.name and op in ("load", "reduce")
        }
        # A tensor that the stage writes before it reads (O, l, m of FlashAttention-1) is in L2.
        own = {t for (n, op, t) in traffic.transfers if n == stage.name and op == "store"}
        if any(s.stores_first for s in traffic.stages if s.name == stage.name):
            own.add("dQ")  # its first visit is a store
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
    model = {"jitter": 0, "ways": None, "blocks_per_sm": 1}
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
    problem, model = Problem(4096, head_dim=16), {"jitter": 0, "ways": 64, "blocks_per_sm": 1}
    reads = [
        l2.dram(
            flashsim.count(
                problem,
                tiling=Tiling(64, 64),
                device=small_device(int(1.5 * keys), sms=4, partitions=partitions),
            ),
            l2.L2Model(**model),
        ).bytes("read", "K")
        for partitions in (1, 2)
    ]
    assert reads[0] == keys // 2
    assert reads[1] > 2 * reads[0]


@pytest.mark.parametrize("ways", [None, 16])
def test_reductions_read_what_left_the_cache(ways):
    """A fused backward in a tiny L2: every reduction fetches its tile and dirties it again."""
    problem = Problem(1024, head_dim=16, dtype="bfloat16")
    traffic = flashsim.count(
        problem, algorithm="flash2-fused", direction="backward", tiling=Tiling(64, 64),
        device=small_device(8192, sms=1),
    )  # fmt: skip
    dram = l2.dram(traffic, l2.L2Model(ways=ways, blocks_per_sm=1))
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
        dram, curves = l2.dram(traffic, l2.L2Model(ways=None)), l2.curves(traffic)
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
    assert "simulated" in str(counted)
    assert f"{counted.bytes():,} B of {counted.requested.bytes():,} B" in repr(counted)
    assert counted.hit_rate() == 1 - counted.bytes("read") / counted.requested.bytes("load")


DRAM = flashsim.count(Problem(64, head_dim=8), level="dram")
test_bad_models_and_questions_are_refused = refuses(r"""
DRAM.bytes("load") -> OptionError: choose from read, write, pending
DRAM.bytes("read", stage="backward") -> OptionError: unknown stage 'backward'
count(LONG, level="l2") -> OptionError: choose from requested, dram
count(LONG, l2=l2.L2Model()) -> OptionError: pass level='dram' too
l2.L2Model(launch="head-frist") -> OptionError: did you mean 'head-first'
l2.L2Model(walk="zigzag") -> OptionError: choose from straight, sawtooth
l2.L2Model(partitions=3) -> OptionError: partitions must be between 1 and 2, got 3
l2.L2Model(blocks_per_sm=0) -> OptionError: blocks_per_sm must be at least 1, got 0
l2.L2Model(jitter=1.5)
    -> OptionError: jitter must be at least 0 and below 1e-3 seconds, got 1.5
l2.L2Model(wait=-1e-9)
    -> OptionError: wait must be at least 0 and below 1e-3 seconds, got -1e-09
l2.L2Model(masked=-1) -> OptionError: masked must be between 0 and 1000, got -1
l2.L2Model(ways=0) -> OptionError: ways must be between 1 and 64, got 0
l2.L2Model(ways=None, partitions=2)
    -> OptionError: must have one partition, got partitions=2
l2.L2Model(seed=-1) -> OptionError: seed must be at least 0
""")


def test_too_much_to_replay_is_refused_before_its_visits_are_listed(monkeypatch):
    monkeypatch.setattr("flashsim.l2.requests._visits", None)
    problem = Problem(1 << 20, head_dim=64, heads=8)
    with pytest.raises(UnsupportedError, match="larger tiles or fewer heads"):
        flashsim.count(problem, tiling=Tiling(128, 128), level="dram")
    scores = Problem(1 << 14, head_dim=8, heads=64)
    with pytest.raises(UnsupportedError, match="this problem's tensors have at least"):
        flashsim.count(scores, algorithm="standard", tiling=Tiling(16, 16), level="dram")
