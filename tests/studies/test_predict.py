"""The time model: its parts by hand, its behaviour, and how far it is from measured kernels."""

from dataclasses import replace

import numpy as np
import pytest
from repository import recorded

import flashsim
from flashsim import Device, OptionError, Problem, Tiling, functions
from flashsim.backends.launch_policy import family
from flashsim.backends.launch_policy.cost_model import Queue
from flashsim.backends.launch_policy.hopper import Hopper
from flashsim.l2 import L2Model, dram
from flashsim.schedule import tables
from flashsim.studies.predict import Constants, calibration, model, predict, stage_time
from flashsim.studies.predict.blocks import makespan
from flashsim.studies.predict.units import (
    L2_PORT,
    PAIR,
    SCALED,
    _first_visits,
    _waves_per_row,
    bytes_again,
    clock,
    once_bytes,
    work_of,
    zeros,
)

pytestmark = pytest.mark.promise("predictions are judged")

PROBLEM = Problem(4096, head_dim=128, batch=4, heads=16, dtype="bfloat16")
PLAIN = {"forward": Constants(tensor=1.0, launch=0.0)}
H200 = Device.get("H200")
HERTZ = 66.9e12 / (2 * 128 * 132)


def prepared(p, stage="forward", algorithm="flash2", kernels="hopper", tiling=None, device=H200):
    """The launch of a stage, and its pass."""
    direction = "forward" if stage == "forward" else "backward"
    passes, traffic = model._prepare(p, direction, algorithm, kernels, tiling, device)
    return next(one for one in passes if one.stage.name == stage), traffic


def work(problem, kernels="hopper", algorithm="flash2", stage="forward", tiling=None):
    return work_of(*prepared(problem, stage, algorithm, kernels, tiling))


def test_units_of_a_visit_by_hand():
    """Forward, 128 x 176, d = 128, on an H200: 1.98 GHz, 132 SMs, 9.8 TB/s of L2."""
    assert clock(H200) == pytest.approx(HERTZ)
    found = work(PROBLEM)
    scores, l2 = 128 * 176, 9.8e12 / 132
    assert found.visit["tensor cores"] == pytest.approx(4 * scores * 128 / (989.4e12 / 132))
    assert found.visit["exponentials"] == pytest.approx((scores + 128) / (16 * HERTZ))
    assert found.visit["scores"] == pytest.approx(scores / (128 * HERTZ))
    assert found.visit["L2"] == pytest.approx(2 * 176 * 128 * 2 / l2)
    assert found.visit["shared memory"] == found.visit["reductions"] == 0
    assert found.own == pytest.approx((2 * 128 * 128 * 2 + 128 * 4) / l2)  # Q; O and LSE
    assert found.blocks == 1  # persistent
    assert found.visits.tolist() == [24] * 32  # 4096 keys, 176 a visit
    assert found.masked.tolist() == [1] * 32  # the last one, ragged


def test_a_head_dim_costs_what_the_kernel_makes_of_it():
    """Whole sixteens of columns, and of fused dQ, transposed, the tile's 128; rows as they are.
    S and dP of a KV-outer kernel have 16 columns more, which add the log-sum-exp and delta."""
    narrow = replace(PROBLEM, head_dim=80, head_dim_v=80)
    dkdv = (4 * 80 + 32) / (4 * 128 + 32)  # of S, dP, dK and dV
    fused = (4 * 80 + 128 + 32) / (5 * 128 + 32)  # and of dQ
    shares = {"forward": 80, "dkdv": 128 * dkdv, "dq": 80, "fused": 128 * fused}
    for stage, share in shares.items():
        algorithm = "flash2-fused" if stage == "fused" else "flash2"
        tiling = Tiling(128, 176) if stage == "forward" else Tiling(64, 128)
        thin, full = (work(p, "hopper", algorithm, stage, tiling).visit for p in (narrow, PROBLEM))
        assert thin["tensor cores"] == pytest.approx(share / 128 * full["tensor cores"])
        assert thin["reductions"] == pytest.approx(80 / 128 * full["reductions"])
    odd = replace(PROBLEM, head_dim=59, head_dim_v=59)
    assert work(odd, tiling=Tiling(192, 128)).visit["L2"] == 2 * 128 * 64 * 2 / (9.8e12 / 132)


def test_hopper_kernels_in_python_load_the_log_sum_exp_and_delta(monkeypatch):
    """Their products add none, so they have no more columns than tiles have."""
    pytest.importorskip("numba_cuda")
    from flashsim.backends.numba_gpu import launch_policy

    given = "flash2", "dkdv", Tiling(64, 128)
    added = work(PROBLEM, "hopper", *given).visit
    monkeypatch.setattr(model, "_family", lambda kernels, direction: launch_policy.HOPPER)
    loaded = work(PROBLEM, "python", *given).visit
    assert loaded["statistics"] > added["statistics"] == 0
    share = loaded["tensor cores"] / added["tensor cores"]
    assert share == pytest.approx(4 * 128 / (4 * 128 + 32))


def test_portable_kernels_read_shared_memory_and_place_pieces():
    """dQ, 64 x 128, d = 128: four warps each read K twice and V once."""
    found = work(PROBLEM, "portable", stage="dq", tiling=Tiling(64, 128))
    assert found.visit["shared memory"] == pytest.approx(4 * 3 * 128 * 128 * 2 / (128 * HERTZ))
    assert found.visit["pieces"] == 0  # 128 threads, 16 pieces a row: eight rows at a time
    assert found.blocks == 1  # shared memory holds no second one
    uneven = work(replace(PROBLEM, head_dim=80, head_dim_v=64), "portable", stage="dq")
    assert uneven.visit["pieces"] == pytest.approx(128 * 10 / (128 * HERTZ))  # of K alone
    assert uneven.blocks == 2
    group = Problem(256, head_dim=64, heads=4, kv_heads=2, dtype="bfloat16")
    keys_outside = work(group, "portable", "flash2-fused", "fused")
    assert keys_outside.visits.tolist() == [2 * 4] * 2  # both heads of a group, four row tiles


def test_masked_visits_are_counted_tile_by_tile():
    causal = work(
        Problem(512, head_dim=128, dtype="bfloat16", causal=True), tiling=Tiling(128, 128)
    )
    assert causal.visits.tolist() == [4, 3, 2, 1]  # the longest first
    assert causal.masked.tolist() == [1, 1, 1, 1]


def test_blocks_take_the_places_that_become_free():
    nothing = [0.0, 0.0]
    assert makespan([3.0, 1.0], nothing, 2, 2, 2, 1) == (4.0, 4.0)  # 3 1 | 3 1
    assert makespan([3.0, 1.0], nothing, 1, 1, 4, 1) == (3.0, 1.0)
    assert makespan([2.0], [0.0], 5, 2, 2, 1) == (6.0, 5.0)  # the third wave is half full
    assert makespan([], [], 3, 1, 2, 1) == (0.0, 0.0)


def test_what_dq_adds_beside_dk_and_dv():
    """Blocks of dQ take the SMs that are idle; on others they begin late."""
    p = Problem(1024, head_dim=128, heads=32, kv_heads=8, dtype="bfloat16", causal=True)
    few = Problem(128, head_dim=128, batch=6, heads=16, dtype="bfloat16")
    fewest = replace(few, batch=2)
    adds = {}
    for name, shape in (("some", p), ("few", few), ("fewest", fewest)):
        works = stage_time.works_of(*prepared(shape, "dq"))
        its = stage_time._constants(
            works[-1].one, works[-1].traffic, calibration.CALIBRATED["hopper"]
        )
        alone = stage_time.stage_seconds(works, its)[0]
        adds[name] = predict(shape, direction="backward").stages[-1].seconds / alone
    assert adds["some"] < 0.8  # most SMs have nothing else to do
    # 36 SMs are idle; 60 of 96 blocks have a tile each by their numbers, and begin `launch` after
    # the last block of dK and dV: the pass gains nothing from running beside it.
    assert adds["few"] == pytest.approx(1)
    assert adds["fewest"] == 0  # 32 tiles of keys, and 32 of queries on the 100 other SMs


def test_a_block_that_waits_for_an_sm_holds_its_first_tile_back():
    """Three SMs, one of them free after 10: its block has the third tile, not whoever is done."""
    assert stage_time._held_back(Queue([2.0], 3, 3), [0.0, 0.0, 10.0]) == 12
    # the fourth to sixth do not wait
    assert stage_time._held_back(Queue([2.0], 6, 6), [0.0, 0.0, 10.0]) == 12
    assert stage_time._held_back(Queue([2.0], 2, 2), [0.0, 0.0, 10.0]) == 2  # no third block
    # head by head: 3 3 1 | 1 at 5
    assert stage_time._held_back(Queue([3.0, 1.0], 2, 1), [0.0, 5.0]) == 7


def test_blocks_that_share_an_sm_wait_side_by_side():
    """Work is shared out, latency is not; who is left has the SM for itself."""
    assert makespan([2.0], [1.0], 2, 2, 1, 2) == (5.0, 5.0)  # 2 x 2 + 1, both
    assert makespan([2.0], [1.0], 2, 2, 2, 2) == (3.0, 3.0)  # one SM each
    last, _ = makespan([2.0], [1.0], 3, 3, 1, 2)
    assert last == pytest.approx(5 + 3)  # the third is alone
    last, _ = makespan([4.0, 2.0], [0.0, 0.0], 1, 1, 1, 2)
    assert last == pytest.approx(4 + 2)  # the shorter ends at 4, when half of the longer is done


def test_perfect_overlap_is_bound_by_the_tensor_cores():
    found = predict(PROBLEM, constants=PLAIN).stages[0]
    assert found.bound == "tensor cores"
    assert found.seconds > found.units["tensor cores"]
    assert found.seconds < 1.1 * found.units["tensor cores"]  # a tail, and a ragged last tile


def test_every_second_that_a_tile_waits_counts():
    without, with_it = (
        predict(PROBLEM, constants={"forward": PLAIN["forward"]._replace(item=x)}).stages[0]
        for x in (0.0, 1e-6)
    )
    # The tiles alone: HBM's part in the root of the powers grows less.
    busy = [(x.seconds**6 - x.units["HBM"] ** 6) ** (1 / 6) for x in (without, with_it)]
    assert busy[1] - busy[0] == pytest.approx(1e-6 * np.ceil(without.waves))


@pytest.mark.parametrize(("heads", "more"), [(16, 0.0), (17, 5e-6)])
def test_taking_the_places_of_others_costs_once(heads, more):
    """Two portable blocks on each of 132 SMs: 16 heads of 16 tiles fill 256 of 264 places."""
    p = Problem(2048, head_dim=64, heads=heads, dtype="bfloat16")
    later = {"forward": PLAIN["forward"]._replace(changeover=5e-6)}
    without, others = (
        predict(p, kernels="portable", constants=constants, tiling=Tiling(128, 96)).seconds
        for constants in (PLAIN, later)
    )
    assert others - without == pytest.approx(more, abs=1e-12)


def test_a_long_kernel_runs_at_the_clock_that_its_power_allows():
    long = replace(PROBLEM, n_q=32_768, n_kv=32_768)
    at_once, limited = (
        predict(long, constants={"forward": PLAIN["forward"]._replace(throttle=x)}).seconds
        for x in (0.0, 0.1)
    )
    assert limited == pytest.approx(at_once + 0.1 * (at_once - calibration.POWER_AFTER), rel=1e-6)


SHARED = {"batch": 2, "heads": 32, "kv_heads": 4, "dtype": "bfloat16"}


def again(**problem):
    """What crosses HBM again in the fused kernel, as a share of what is asked of L2 and added."""
    p = Problem(**SHARED | {"n_q": 4096, "head_dim": 128, "causal": True} | problem)
    one, traffic = prepared(p, "fused", "flash2-fused")
    asked = traffic.bytes("load") + 2 * traffic.bytes("reduce")
    return bytes_again(one, traffic) / asked


@pytest.fixture
def out_of_step(monkeypatch):
    """Blocks of grouped heads that go through these one after the other."""

    def forget():
        model._prepare.cache_clear()
        family._passes.cache_clear()

    monkeypatch.setattr(Hopper, "in_step", lambda *_: False)
    forget()
    yield
    forget()


@pytest.mark.usefixtures("out_of_step")
def test_what_l2_does_not_hold_crosses_hbm_again():
    """134 MB are in use at a time, of 32 heads on 4, and 62.9 fit; the L2 model reads 3.8 GB."""
    every = again() / calibration.DRIFTED
    assert every == pytest.approx(1 - 62.9 / 134.2, abs=0.07)
    assert again(kv_heads=32) == 0  # each block has one query head
    assert again(causal=False) == 0  # all blocks are at the same head
    assert again(n_q=512, n_kv=512) == 0  # everything fits
    # of a long head, blocks that run together are equally long: once per wave, of each of which
    # 512 tiles of 128 keys make four
    assert 0 < again(n_q=65_536) < 4 / 512


@pytest.mark.parametrize(
    "shape",
    [
        # one head group of all heads: co-scheduled, five waves; under a window; two waves
        {"n_q": 3776, "head_dim": 192, "batch": 2, "heads": 32, "kv_heads": 8},
        {"n_q": 1025, "head_dim": 96, "batch": 32, "heads": 16, "kv_heads": 2, "window": (364, 0)},
        {"n_q": 2007, "head_dim": 192, "batch": 1, "heads": 44, "kv_heads": 11},
    ],
)
def test_each_wave_reads_row_tiles_again(shape):
    p = Problem(**shape, dtype="bfloat16", causal=True)
    one, traffic = prepared(p, "fused", "flash2-fused", device=Device.get("H100"))
    one = replace(one, clump=one.walks)
    walk = "in-step" if dict(one.kernel.constants)["FS_IN_STEP"] else "straight"
    l2 = L2Model("grouped", walk=walk, heads_in_group=one.clump, blocks_per_sm=1, flush=False)
    replayed = dram(traffic, l2)
    moved = sum(replayed.bytes(op, stage="fused") for op in ("read", "write"))
    found = once_bytes(traffic, "fused") + bytes_again(one, traffic)
    assert moved > 1.2 * once_bytes(traffic, "fused")
    assert found == pytest.approx(moved, rel=0.06)


def test_last_column_tiles_without_visits_are_no_part_of_a_wave():
    """Keys that a mask hides from every query count like keys that are not there."""
    waves = []
    for n_kv, mask_mod in (
        (20_480, lambda b, h, q, k: (q >= k) & (k < 9000)),
        (9000, lambda b, h, q, k: q >= k),
    ):
        p = Problem(20_480, n_kv, 128, **SHARED, mask_mod=mask_mod)
        one, _ = prepared(p, "fused", "flash2-fused")
        waves.append(_waves_per_row(one, heads=4, processors=132))
    assert waves[0] == waves[1] > 1


def test_in_step_no_bytes_cross_hbm_again():
    assert again() == 0


@pytest.mark.usefixtures("out_of_step")
def test_bytes_that_cross_hbm_again_take_time():
    p = Problem(4096, head_dim=128, causal=True, **SHARED)
    options = {"direction": "backward", "algorithm": "flash2-fused", "kernels": "hopper"}
    found = predict(p, **options).stages[1]
    alike = predict(replace(p, kv_heads=32), **options).stages[1]
    assert found.units["HBM"] > 3 * alike.units["HBM"]
    assert 1.05 < found.seconds / alike.seconds < 1.4


FIRST = "flash2-fused-first"


@pytest.mark.parametrize(
    ("problem", "places", "expected"),
    [
        # no mask: all four blocks of the head reach each row tile together; in waves of two blocks,
        # those of the first wave do
        ({}, 132, [8, 8, 8, 8]),
        ({}, 2, [8, 8, 0, 0]),
        # causal: block k begins at row tile 2 k; alone, the longest one visits all row tiles first
        ({"causal": True}, 132, [2, 2, 2, 2]),
        ({"causal": True}, 1, [8, 0, 0, 0]),
        ({"causal": True}, 2, [2, 6, 0, 0]),
    ],
)
def test_first_visits_of_row_tiles(problem, places, expected):
    p = Problem(512, head_dim=128, dtype="bfloat16", **problem)
    one, _ = prepared(p, "fused", FIRST, tiling=Tiling(64, 128))
    assert _first_visits(one, places).tolist() == expected


def test_a_first_visit_and_a_flag_take_time(monkeypatch):
    """One wave of one head without a mask: 8 visits, each of which may be the first."""
    p = Problem(512, head_dim=128, dtype="bfloat16", heads=32)
    how = {"direction": "backward", "algorithm": FIRST, "tiling": Tiling(64, 128)}
    one, _ = prepared(p, "fused", FIRST, tiling=how["tiling"])
    assert one.kernel.cluster == 1
    took = []
    for flag, stored in ((0.0, 0.0), (1e-6, 0.0), (1e-6, 2e-6)):
        monkeypatch.setattr(calibration, "FIRST", (flag, stored))
        took.append(predict(p, **how).stages[1].seconds)
    assert np.diff(took) == pytest.approx([8e-6, 16e-6], rel=1e-3)


def test_l2_keeps_the_last_zeros_of_dq():
    """Of O, dO and the zeros, L2 keeps the last part: 4 of 8 bytes per element are zeros."""
    few, many = (Problem(1024, head_dim=128, dtype="bfloat16", heads=n) for n in (16, 1024))
    for p, device in ((few, "H200"), (many, "H200"), (many, "H100")):
        device = Device.get(device)
        _, traffic = prepared(p, "fused", "flash2-fused", device=device)
        kept, fetched = zeros(traffic)
        nbytes = 4 * p.heads * 1024 * 128
        assert kept + fetched == nbytes
        room = calibration.L2_KEEPS * device.l2_bytes / 2
        assert kept == pytest.approx(min(nbytes, room), rel=0.02)  # delta and the LSE take 1 %
    for algorithm in ("flash2", FIRST):
        assert zeros(prepared(many, "delta", algorithm)[1]) == (0.0, 0.0)


def test_dq_without_zeros_is_not_read():
    """The form that stores first writes dQ, and the other one also reads it."""
    p = Problem(1024, head_dim=128, dtype="bfloat16", heads=64, causal=True)
    first, added = (
        once_bytes(prepared(p, "fused", algorithm)[1], "fused")
        for algorithm in (FIRST, "flash2-fused")
    )
    assert added - first == 4 * 64 * 1024 * 128


def test_the_wide_backward_is_another_kernel():
    wide = replace(PROBLEM, head_dim=160, head_dim_v=160)
    stages = predict(wide, direction="backward").stages
    assert [stage.name for stage in stages] == ["delta", "dkdv", "dq"]
    with pytest.raises(OptionError, match=r"an entry for 'dkdv, wide', got .*dkdv, dq"):
        predict(wide, direction="backward", constants={"dkdv": Constants(), "dq": Constants()})


def test_heads_worked_on_one_by_one_leave_a_longer_tail():
    causal = Problem(2048, head_dim=128, heads=16, dtype="bfloat16", causal=True)
    together, alone = (
        predict(causal, heads_in_group={"forward": size}).stages[0] for size in (16, 1)
    )
    assert alone.seconds > together.seconds
    assert alone.units == together.units  # the same work


def test_a_device_with_little_bandwidth_is_bound_by_it():
    slow = Device(**{**H200.to_dict(), "hbm_bandwidth": 1e9})
    found = predict(PROBLEM, device=slow).stages[0]
    assert found.bound == "HBM"
    traffic = flashsim.count(PROBLEM, tiling=Tiling(128, 128))
    assert once_bytes(traffic, "forward") == traffic.compulsory()
    assert found.seconds >= traffic.compulsory() / 1e9


def test_fp8_is_the_16_bit_forward_with_other_tiles_and_peak():
    p = replace(PROBLEM, dtype="float8_e4m3fn", scales=(64, 128))
    found, wide = predict(p), predict(PROBLEM, tiling=Tiling(128, 128))
    assert found.traffic.tiling == Tiling(192, 128)
    products = [x.stages[0].units["tensor cores"] for x in (found, wide)]
    assert products[0] == pytest.approx(products[1] / 2 * 4224 / 4096, rel=1e-3)  # 22 x 192 rows
    assert wide.seconds / 2 < found.seconds < wide.seconds
    assert found.joules is None


def test_what_stays_in_l2_waits_for_no_hbm():
    slow = replace(H200, hbm_bandwidth=1e10)
    small, large = (replace(PROBLEM, n_q=n, n_kv=n, batch=1) for n in (1024, 4096))
    assert predict(small, device=slow).seconds == predict(small).seconds  # 17 MB
    assert predict(large, device=slow).seconds > 5 * predict(large).seconds  # 67 MB


def test_the_first_tiles_of_a_wave_wait_for_hbm():
    """Two waves of 132 blocks with four visits: Q, O, LSE and a quarter of K and V of one wave."""
    p = Problem(256, 704, 128, batch=4, heads=33, dtype="bfloat16")
    works = stage_time.works_of(*prepared(p, tiling=Tiling(128, 176)))
    q_o, k_v, lse = 2 * 132 * 256 * 128 * 2, 2 * 132 * 704 * 128 * 2, 132 * 256 * 4
    none = Constants(launch=0.0)
    assert works[-1].visits.tolist() == [4, 4]
    seconds, last, _, hbm = stage_time.stage_seconds(works, none)
    speed = calibration.STREAMED[True][1] * H200.hbm_bandwidth  # as fast as kernels that stream
    assert hbm == pytest.approx((q_o + k_v + lse) / speed)
    alone = (q_o + lse + k_v / 4) / 2 / speed
    assert seconds == pytest.approx(alone + (last**6 + (hbm - alone) ** 6) ** (1 / 6))


def test_a_row_tile_whose_warpgroups_compute_their_own_visits_takes_longer(monkeypatch):
    """Once per row tile, in the time in which it waits."""
    p = Problem(2000, head_dim=64, heads=1, dtype="bfloat16", causal=True)
    (work,) = stage_time.works_of(*prepared(p, tiling=Tiling(192, 128)))
    assert work.one.tables.shares is not None
    found = []
    for seconds in (0.0, 3e-6):
        monkeypatch.setattr(calibration, "SHARES", seconds)
        found.append(stage_time.durations(work, Constants())[1])
    assert found[1] - found[0] == pytest.approx(3e-6)
    even = replace(p, n_q=1920, causal=False)  # without a mask, all compute all visits
    (whole,) = stage_time.works_of(*prepared(even, tiling=Tiling(192, 128)))
    assert whole.one.tables.shares is None
    assert stage_time.durations(whole, Constants())[1].max() == 0


def test_units_work_for_the_mean_of_the_warpgroups_and_the_longest_ends_last():
    """Three warpgroups of 64 rows: 1, 1 and 2 key tiles of 128, of which each masks one."""
    p = Problem(192, head_dim=64, heads=1, dtype="bfloat16", causal=True)
    (work,) = stage_time.works_of(*prepared(p, tiling=Tiling(192, 128)))
    assert work.one.tables.shares is not None
    assert (work.visits.tolist(), work.longest.tolist()) == ([4 / 3], [2])
    assert work.masked.tolist() == [1]
    shared, waiting = stage_time.durations(work, Constants(scores=1.0, masked=10.0, visit=1e-6))
    scores, scaled = work.visit["scores"], work.visit["scores"] + SCALED * work.visit["O"]
    assert shared.tolist() == pytest.approx([4 / 3 * scaled + 10 * scores])
    assert waiting.tolist() == pytest.approx([2 * 1e-6 * PAIR / 3 + calibration.SHARES])


def test_sms_without_a_work_tile_leave_their_part_of_l2_to_others():
    whole = Problem(128, head_dim=128, heads=132, kv_heads=132, dtype="bfloat16")
    times = {}
    for heads in (132, 99, 12):
        (work,) = stage_time.works_of(*prepared(replace(whole, heads=heads, kv_heads=heads)))
        times[heads] = work.visit["L2"], work.own[0]
    for each in range(2):
        assert times[99][each] == pytest.approx(0.75 * times[132][each])
        least = H200.l2_bandwidth / H200.sm_count / (L2_PORT * clock(H200))
        assert times[12][each] == pytest.approx(least * times[132][each])
    assert 0 < least < 0.75


def test_backward_blocks_share_l2_too_but_not_those_in_python():
    found = {}
    for kernels in ("hopper", "python"):
        few, whole = (
            work(Problem(128, head_dim=128, heads=heads, dtype="bfloat16"), kernels, stage="dkdv")
            for heads in (99, 132)
        )
        found[kernels] = few.visit["L2"] / whole.visit["L2"]
    assert found == pytest.approx({"hopper": 0.75, "python": 1})


@pytest.mark.parametrize("stage", ["forward", "dkdv", "dq"])
def test_a_window_compares_each_column_with_two_limits(stage):
    """So a mask costs twice the instructions of a causal one."""
    causal = replace(PROBLEM, causal=True)
    one, two = (work(p, stage=stage).visit for p in (causal, replace(causal, window=(512, 0))))
    assert one["masks"] == one["scores"]
    assert two["masks"] == 2 * two["scores"]
    constants = Constants(masked=1.0)
    (window,) = stage_time.works_of(*prepared(replace(causal, window=(512, 0)), stage))
    shared, _ = stage_time.durations(replace(window, own=0 * window.own), constants)
    visits = window.visits * window.visit["L2"]
    assert shared - visits == pytest.approx(window.masked * 2 * window.visit["scores"])


def test_wide_fused_kernels_overlap_less_with_hbm(monkeypatch):
    """Above head_dim 128 the squares of both times are added, below it their cubes."""
    monkeypatch.setattr(calibration, "EXPOSED", 0.0)
    for d, power in ((128, 3), (192, 2)):
        p = Problem(4096, head_dim=d, heads=32, dtype="bfloat16", causal=True)
        works = stage_time.works_of(*prepared(p, "fused", "flash2-fused-first"))
        constants = Constants(tensor=1.0, launch=0.0)
        seconds, last, _, hbm = stage_time.stage_seconds(works, constants)
        assert hbm > 0.05 * last
        assert seconds == pytest.approx((last**power + hbm**power) ** (1 / power))


@pytest.mark.parametrize("kernels", ["hopper", "portable"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_long_sequences_are_predicted_without_a_list_of_their_visits(
    direction, kernels, monkeypatch
):
    """2 x 10^8 of them at N = 2^20: a minute and gigabytes."""

    def listed(_):
        raise AssertionError("visits were listed")

    monkeypatch.setattr(tables, "expand", listed)
    p = Problem(2**20, head_dim=128, dtype="bfloat16", causal=True)
    assert predict(p, direction=direction, kernels=kernels).seconds > 0.1


def test_the_printed_table_names_its_bound():
    found = predict(PROBLEM, direction="backward", algorithm="flash2-fused")
    assert [row[0] for row in found.table().rows] == ["delta", "fused", "convert"]
    assert found.seconds == sum(stage.seconds for stage in found.stages)
    assert "tensor cores" in str(found)


def test_standard_attention_by_hand():
    """64 heads of 4,096 x 4,096 scores: 2 GiB of S, far past L2, written once and read once."""
    found = {s.name: s for s in predict(PROBLEM, algorithm="standard").stages}
    matrix, rows, speed = 64 * 4096**2 * 2, 64 * 4096 * 128 * 2, calibration.HBM_SHARE * 4.8e12
    assert found["scores"].seconds == pytest.approx(
        calibration.LAUNCH + (2 * rows + matrix) / speed
    )
    assert found["softmax"].seconds == pytest.approx(calibration.LAUNCH + 2 * matrix / speed)
    assert found["output"].bound == "HBM"
    product = 64 * 4096**2 * 2 * 128 / (calibration.MATRIX_SHARE * 989.4e12)
    assert found["output"].units["tensor cores"] == pytest.approx(product)
    assert found["scores"].waves == 64 * 32 * 32 / 132
    assert found["output"].waves == 64 * 32 / 132


def test_standard_attention_that_stays_in_l2():
    """One head: 8 MiB of S; 16 tiles of the output leave most SMs idle."""
    small = Problem(2048, head_dim=64, dtype="bfloat16")
    _, softmax, output = predict(small, algorithm="standard").stages
    assert softmax.bound == "L2"
    assert softmax.seconds == pytest.approx(calibration.LAUNCH + 2 * 2048**2 * 2 / 9.8e12)
    assert output.waves == 16 / 132
    assert output.tail > 0


CACHE = Problem(1, 131_072, 128, heads=32, kv_heads=8, dtype="bfloat16")


def decoded(problem=CACHE, **how):
    return predict(problem, algorithm="flash-decode", **how)


def test_one_part_a_key_head_streams_as_fast_as_eight_sms_do():
    """Eight blocks of 67 MB each: an SM's rate is the bound, and nothing is merged."""
    (walk,) = decoded(splits=1).stages
    nbytes = 131_072 * 2 * 128 * 2
    own = (
        calibration.DECODING.launch + calibration.DECODING.item + calibration.DECODING.row * 4 * 128
    )
    assert walk.seconds == pytest.approx(own + nbytes / calibration.DECODING.rate)
    assert walk.waves == 8 / 132
    assert walk.units["HBM"] == pytest.approx(
        8 * nbytes / (4800e9 * calibration.DECODING.hbm_share)
    )


def test_splits_reach_the_memorys_speed_and_cost_a_merge():
    walk, combine = decoded().stages
    assert walk.bound == "HBM"
    assert walk.units["HBM"] < walk.seconds < 1.1 * walk.units["HBM"]
    assert combine.seconds == calibration.DECODING.merge
    assert decoded(splits=1).seconds > 5 * decoded().seconds
    assert "FlashDecoding" not in str(decoded())
    assert "portable kernels" in str(decoded())


def test_pages_cost_the_more_the_shorter_they_are():
    took = [decoded(replace(CACHE, page_size=size)).seconds for size in (None, 64, 16, 1)]
    assert took == sorted(took)
    assert 1.02 < took[-1] / took[0] < 1.1


def test_packed_lengths_are_a_batchs():
    cu = tuple(range(0, 5 * 4096, 4096))
    packed = Problem(
        4, 4 * 4096, 128, heads=32, kv_heads=8, dtype="bfloat16",
        cu_seqlens_q=(0, 1, 2, 3, 4), cu_seqlens_k=cu,
    )  # fmt: skip
    batch = replace(CACHE, n_kv=4096, batch=4)
    assert decoded(packed).stages == decoded(batch).stages


def test_more_rows_than_a_tile_of_the_decode_kernel_read_the_keys_again():
    """A prompt of 4,096 tokens: 64 rows a tile, so the keys 64 times."""
    prompt = decoded(Problem(4096, dtype="bfloat16")).traffic
    assert prompt.tiling.block_q == 64
    assert prompt.bytes("load", "K") == 64 * 4096 * 64 * 2


def test_many_queries_of_a_cache_take_the_tensor_cores_time():
    """64 rows share a key: more FLOPs a byte than an RTX 3090 can do while it reads the next."""
    prompt = Problem(8192, head_dim=64, heads=16, dtype="float16")
    found = decoded(prompt, device="RTX 3090")
    least = found.traffic.flops("matmul") / Device.get("RTX 3090").peak("float16")
    (walk,) = found.stages
    assert walk.bound == "tensor cores"
    factor = calibration.CALIBRATED["portable"]["forward"].tensor
    assert walk.units["tensor cores"] == pytest.approx(factor * least)
    assert found.seconds > walk.units["tensor cores"]
    token = decoded(replace(prompt, n_q=1, n_kv=8192), device="RTX 3090")
    assert token.stages[0].bound == "HBM"


def test_measured_decode_calls_are_predicted():
    """docs/data/decode-h200.csv, its contiguous calls; docs/notebooks/predictions.md has all.

    With the splits that were measured: the kernel's own choice has become another since.
    """
    errors = []
    for r in recorded("decode-h200.csv"):
        if r["implementation"] != "flashsim":
            continue
        shape = (int(r[name]) for name in ("n_q", "keys", "head_dim"))
        p = Problem(*shape, batch=int(r["batch"]), heads=32, kv_heads=8, dtype="bfloat16")
        errors.append(1e6 * decoded(p, splits=int(r["splits"])).seconds / float(r["us"]) - 1)
    assert len(errors) == 60
    assert np.mean(np.abs(errors)) < 0.05
    assert np.max(np.abs(errors)) < 0.4  # a cache that L2 holds from call to call
    assert np.sort(np.abs(errors))[-3] < 0.15  # the two of 8 x 1,024 at head_dim 128


# -- mask and score functions ---------------------------------------------------------------------

MASKS = {
    "causal": functions.causal(),
    "window 1024": functions.window(1023, 0),
    "documents of 700": functions.documents(np.arange(4096) // 700) & functions.causal(),
    "prefix 1024": functions.prefix_lm(1024),
}


def test_times_with_a_mask_function_against_an_h100():
    """As docs/reference/predictions.md says: 0.88 to 1.03 of the measured times."""
    ratios = []
    for row in recorded("gpu-flex-h100.csv"):
        if (row["implementation"], row["n"]) != ("functions", "4096") or row["row"] not in MASKS:
            continue
        d, heads = int(row["head_dim"]), int(row["heads"])
        p = Problem(
            *(4096, 4096, d), batch=4, heads=heads, dtype="bfloat16", mask_mod=MASKS[row["row"]]
        )
        how = {} if row["direction"] == "forward" else {"deterministic": False}
        found = predict(p, direction=row["direction"], device="H100", **how)
        ratios.append(found.seconds * 1e3 / float(row["ms"]))
    assert len(ratios) == 16
    assert min(ratios) == pytest.approx(0.88, abs=0.005)
    assert max(ratios) == pytest.approx(1.03, abs=0.005)


def test_captured_elements_are_not_padded():
    """Rows of Q, K, V are padded to 16 bytes; an element of a captured array has no row."""
    keys, tiling = np.zeros(4096, np.int32), Tiling(128, 128)
    p = replace(PROBLEM, mask_mod=lambda b, h, q, k: (k >= 0) | (q >= 0))
    marked = replace(PROBLEM, mask_mod=lambda b, h, q, k: (keys[k] >= 0) | (q >= 0))
    plain, reads = (work(x, tiling=tiling).visit["L2"] for x in (p, marked))
    assert reads - plain == pytest.approx(128 * 4 / (9.8e12 / 132))
