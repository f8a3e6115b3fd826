"""The time model of Hopper's fused backward: several launches, deferred dQ, one visit."""

import re
from dataclasses import replace

import numpy as np
import pytest
from repository import page

from flashsim import Device, OptionError, Problem, Tiling, TilingError, UnsupportedError
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy.family import fastest_backward
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.studies.predict import Constants, calibration, predict
from flashsim.studies.predict.blocks import in_launches
from flashsim.studies.predict.calibration import CALIBRATED
from flashsim.studies.predict.units import zeros

pytestmark = pytest.mark.promise("predictions are judged")

PROBLEM = Problem(4096, head_dim=128, batch=4, heads=16, dtype="bfloat16")


def test_a_launch_begins_where_the_one_before_has_run_out():
    """Four SMs, two of which share an item of 3 at first."""
    assert in_launches([(3.0, 1, 2, 2), (2.0, 4, 1, 4)], 4) == (4.0, 3.5)  # 2 2 | 2 2 | 3 | 3
    assert in_launches([(3.0, 1, 2, 2), (2.0, 5, 1, 4)], 4) == (5.0, 4.0)  # 2 2 | 2 2 | 3 2 | 3
    assert in_launches([(3.0, 1, 2, 1), (1.0, 1, 4, 1)], 4) == (4.0, 4.0)  # all four together
    assert in_launches([(3.0, 1, 2, 1), (1.0, 2, 2, 1)], 4) == (3.0, 2.5)  # on those that are free


def test_half_of_a_waves_own_bytes_overlap_with_nothing(monkeypatch):
    """Four waves of work tiles with one visit, whose first tiles are all that they load."""
    p = Problem(64, 128, 128, batch=4, heads=132, dtype="bfloat16")
    how = {"direction": "backward", "algorithm": "flash2-fused-first", "device": "H100"}
    constants, took = {"fused, 128": Constants(item=30e-6, launch=0.0)}, []
    for exposed in (0.0, 0.5):
        monkeypatch.setattr(calibration, "EXPOSED", exposed)
        took.append(predict(p, **how, constants=constants).stages[1])
    assert took[0].waves == 4
    hbm, waits = took[0].units["HBM"], took[0].units["HBM"] / 4 / 2
    tiles = (took[0].seconds ** 3 - hbm**3) ** (1 / 3)
    overlapped = (tiles**3 + (hbm - waits) ** 3) ** (1 / 3)
    assert took[1].seconds == pytest.approx(waits + overlapped, rel=1e-9)


def test_clusters_take_what_whole_rounds_leave(monkeypatch):
    """2,048 items are 15 rounds of 132 SMs, and 68: two by clusters of 8, 66 by clusters of 2."""
    monkeypatch.setattr(calibration, "EXPOSED", 0.0)
    visits = Constants(tensor=1.0, visit=1e-6, launch=0.0, cluster=3e-6, doubling=1e-6)
    options = {"direction": "backward", "algorithm": "flash2-fused"}
    found = predict(PROBLEM, **options, constants={"fused, deferred": visits}).stages[1]
    # of S, dP, dV, dK and dQ; S and dP have 16 more columns
    product = 2 * 64 * 128 * (5 * 128 + 2 * 16) / (989.4e12 / 132)
    item = 64 * (product + 1e-6)  # 4,096 queries, 64 at a time
    # 58 pairs begin at once, the 8 others where the two clusters of 8 were.
    last = item / 8 + (3e-6 + 3 * 1e-6) + item / 2 + (3e-6 + 1e-6)
    tiles, hbm = 15 * item + last, found.units["HBM"]
    _, fetched = zeros(predict(PROBLEM, **options).traffic)
    waits = fetched / (calibration.STREAMED[True][1] * 4.8e12) * hbm / tiles  # for zeros of dQ
    together = (tiles**3 + (hbm - waits) ** 3) ** (1 / 3)
    assert found.seconds == pytest.approx(waits + together, rel=1e-9)
    assert found.seconds < 16 * item
    assert found.waves == pytest.approx((1980 + 2 * 66 + 8 * 2) / 132)
    assert found.units["tensor cores"] == pytest.approx(2048 * 64 * product / 132)


def test_loading_the_statistics_costs_instructions_that_a_product_saves():
    """In float16, a kernel for dK and dV loads the log-sum-exp and delta; in bfloat16 up to 128
    columns products add them; beyond, every kernel loads them."""
    loads = Constants(loads=1000.0, launch=0.0)
    for d, stage, bfloat16 in ((128, "dkdv", False), (192, "dkdv, wide", True)):
        found = {}
        for dtype in ("bfloat16", "float16"):
            p = replace(PROBLEM, head_dim=d, head_dim_v=d, dtype=dtype)
            given = {stage: loads, stage.replace("dkdv", "dq"): Constants(launch=0.0)}
            both = (
                predict(p, direction="backward", constants=given | {stage: c}).stages[1].seconds
                for c in (loads, Constants(launch=0.0))
            )
            found[dtype] = next(both) > 3 * next(both)
        assert found == {"bfloat16": bfloat16, "float16": True}


def test_l2_keeps_a_part_of_what_just_fits():
    """Up to two thirds of L2 nothing crosses HBM again; beyond, a growing part, then all."""
    none, full = {"forward": Constants(launch=0.0)}, calibration.FORWARD_L2_FULL
    l2_bytes, found = Device.get("H200").l2_bytes, {}
    for share in (0.6, 0.7, 0.8, 1.1):  # Q, K, V and O have 4 x 128 bytes per row, LSE has 4
        p = Problem(round(share * l2_bytes / 516 / 16), head_dim=64, heads=16, dtype="bfloat16")
        (stage,) = predict(p, constants=none).stages
        found[share] = stage.units["HBM"] * Device.get("H200").hbm_bandwidth / (share * l2_bytes)
    assert found[0.6] == 0
    for share in (0.7, 0.8):
        part = (share - 2 / 3) / (full - 2 / 3)
        assert found[share] == pytest.approx(part * found[1.1], rel=2e-3)
    assert 0.8 < full < 1.1


def test_fused_kernels_that_work_otherwise_have_constants_of_their_own():
    """Long walks compute dQ of a visit in the next one; of one visit there is no next one."""
    short = replace(PROBLEM, n_q=512, n_kv=512)
    asked = {
        "flash2-fused": {"fused, 128": short, "fused, deferred, 128": PROBLEM},
        "flash2-once": {"fused, once, 128": replace(PROBLEM, n_q=128, n_kv=128)},
    }
    for algorithm, each in asked.items():
        for name, problem in each.items():
            options = {"direction": "backward", "algorithm": algorithm}
            with pytest.raises(OptionError, match=f"an entry for '{name}'"):
                predict(problem, **options, constants={"other": Constants()})
            if without := name.removesuffix(", 128"):  # for every width
                any_width = {without: Constants(launch=1.0)}
                assert predict(problem, **options, constants=any_width).seconds > 1
            later = {name: CALIBRATED["hopper"][name]._replace(launch=1.0)}
            assert predict(problem, **options, constants=later).seconds > 1


def test_a_backward_of_one_visit_takes_what_was_measured():
    """Fourteen passes, 7.5 to 74 us, of another run: docs/notebooks/hopper.md.

    They are means of three calls, to which two events add 2.6 us.
    """
    row = r"\| (\d+)(, causal)? \| (\d+) \| (\d+) × (\d+) \| \S+ \| \**([\d.]+)\** \|"
    table = (
        page("notebooks/hopper.md").partition("| before | flash2-once |")[2].partition("\n\n")[0]
    )
    errors = []
    for d, causal, n, batch, heads, us in re.findall(row, table):
        p = Problem(
            *(int(n), int(n), int(d)),
            batch=int(batch), heads=int(heads), causal=bool(causal), dtype="bfloat16",
        )  # fmt: skip
        found = predict(p, direction="backward", algorithm="flash2-once")
        assert [stage.name for stage in found.stages] == ["fused"]
        errors.append(1e6 * found.seconds / (float(us) - 2.6 / 3) - 1)
    assert len(errors) == 14
    assert np.mean(np.abs(errors)) < 0.06
    assert np.max(np.abs(errors)) < 0.17  # one sequence, d = 128


#: Problems whose fastest backward on an H200 is a form of its own.
FORMS = {
    "flash2-once": Problem(128, head_dim=64, batch=512, heads=12, dtype="bfloat16"),
    "flash2": Problem(300, head_dim=128, heads=16, dtype="bfloat16"),
    "flash2-fused": PROBLEM,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_that_runs_is_predicted_and_named(form):
    """The engine asks the same rules where it runs `backward(deterministic=False)`."""
    p, gpu = FORMS[form], Gpu.like(Device.get("H200"))
    runs = fastest_backward(p, gpu, lambda _: HOPPER, "flash2", False, tiled=False)
    found = predict(p, direction="backward", deterministic=False)
    assert (found.traffic.algorithm, False) == runs == (form, False)
    assert found.seconds == predict(p, direction="backward", algorithm=form).seconds
    assert str(found).startswith(f"{form} backward, ")


def test_clusters_of_an_h100_are_those_that_its_driver_runs_at_once():
    """A GPU plans with the driver's numbers; 16 clusters of eight would need a second wave."""
    h100 = Device.get("H100")
    assert Gpu.like(h100).clusters == ((2, 66), (4, 30), (8, 15))
    p = Problem(464, head_dim=128, batch=2, heads=16, kv_heads=2, causal=True, dtype="bfloat16")

    def blocks(device):
        given = p, None, Gpu.like(device), "ascending", "", "flash2"
        return HOPPER.backward_passes(*given)[1].kernel.cluster

    assert blocks(h100) == 4
    assert blocks(replace(h100, clusters=())) == 8


def test_clusters_that_all_run_at_once_are_predicted_so():
    """28 clusters of four are one wave on an H100. If 26 ran at once, pairs would be faster."""
    p, h100 = Problem(864, head_dim=64, batch=2, heads=8, kv_heads=2, dtype="bfloat16"), "H100"
    how = {"direction": "backward", "algorithm": "flash2"}
    fours = predict(p, **how, device=h100).stages[1]
    pairs = predict(p, **how, device=replace(Device.get(h100), clusters=())).stages[1]
    assert (fours.waves, pairs.waves) == (pytest.approx(112 / 132), pytest.approx(56 / 132))
    assert fours.seconds < 0.7 * pairs.seconds  # 4 of 7 visits per block


def test_a_form_that_is_asked_for_by_its_tile_or_name_stays():
    p = FORMS["flash2"]
    how = {"direction": "backward", "deterministic": False}
    named = predict(p, **how, algorithm="flash2-fused").traffic
    tiled = predict(p, **how, tiling=named.tiling).traffic
    assert named.algorithm == tiled.algorithm == "flash2-fused"
    assert predict(p, **how, kernels="portable").traffic.algorithm == "flash2-fused"
    three = predict(p, **how | {"deterministic": True}, kernels="portable")
    assert three.traffic.algorithm == "flash2"
    with pytest.raises(UnsupportedError, match="a fused backward pass in a fixed order"):
        predict(p, **how | {"deterministic": True})


def test_the_family_is_the_one_that_the_backend_chooses():
    """Hopper's kernels run neither float32 nor 64 x 64 tiles of a backward pass."""
    assert predict(Problem(256), device="H200").kernels == "portable"
    half = Problem(256, dtype="float16")
    assert predict(half, device="H200").kernels == "hopper"
    tiled = {"direction": "backward", "tiling": Tiling(64, 64)}
    assert predict(half, **tiled, device="H200").kernels == "portable"
    with pytest.raises(TilingError, match="on H200, and no tile is possible"):
        predict(Problem(256, head_dim=576, dtype="float16"), device="H200")
