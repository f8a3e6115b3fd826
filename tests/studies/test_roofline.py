"""Roofline: which bytes, which roof, what bounds."""

from dataclasses import replace

import numpy as np
import pytest

import flashsim
from flashsim import Device, Problem, Tiling
from flashsim.studies.roofline import ridge_points, roofline, textbook_bytes

pytestmark = pytest.mark.promise("predictions are judged")

TOY = Device(
    *("toy", 1 << 20, 1 << 20), hbm_bandwidth=100.0, l2_bandwidth=400.0, l2_bytes=1 << 30,
    cuda_flops={"float32": 1000.0},
)  # fmt: skip


def counted(n=64, algorithm="flash2", direction="forward", device=TOY, d=8):
    problem = Problem(n, head_dim=d)
    return flashsim.count(
        problem, algorithm=algorithm, direction=direction, tiling=Tiling(16, 16), device=device
    )


def test_each_count_has_its_own_bytes_and_roof():
    points = roofline(counted())
    flops = 4 * 64 * 64 * 8
    once, lse = 4 * 64 * 8 * 4, 64 * 4
    expected = {
        "requested": 64 * 8 * 4 * (2 + 2 * 4) + lse,  # K and V for each of 4 row tiles
        "dram": once + lse,  # all of it fits in L2
        "compulsory": once + lse,
        "textbook": once,
    }
    for count, nbytes in expected.items():
        point = points[count]
        assert (point.flops, point.bytes) == (flops, nbytes)
        assert point.intensity == flops / nbytes
        assert point.ridge == (1000 / 400 if count == "requested" else 1000 / 100)
        assert point.attainable == min(1000, point.intensity * point.bandwidth)


@pytest.mark.parametrize(("d", "n", "bound"), [(8, 16, "HBM"), (8, 256, "arithmetic")])
def test_what_bounds_changes_at_the_ridge(d, n, bound):
    point = roofline(counted(n, d=d))["compulsory"]
    assert point.bound == bound
    assert (point.attainable == 1000) == (bound == "arithmetic")
    assert (point.intensity >= point.ridge) == (bound == "arithmetic")


def test_achieved_comes_from_a_measured_time():
    point = roofline(counted(), seconds=2.0, measured_bytes=12_345)["measured"]
    assert point.bytes == 12_345
    assert point.achieved == point.flops / 2
    assert roofline(counted())["dram"].achieved is None
    row = roofline(counted(), seconds=2.0).table().records()[0]
    assert row["% of peak"] == pytest.approx(100 * point.flops / 2 / 1000)


def test_textbook_counts_one_score_matrix_once_for_standard_attention():
    p = Problem(128, 256, head_dim=16, head_dim_v=8, heads=4, kv_heads=2, dtype="float16")
    tensors = 2 * (4 * 128 * (16 + 8) + 2 * 256 * (16 + 8))
    assert textbook_bytes(p, "flash2") == tensors
    assert textbook_bytes(p, "standard") == tensors + 2 * 4 * 128 * 256
    assert textbook_bytes(p, "flash2", "backward") == 2 * tensors
    # The real thing writes S and P and reads both.
    real = flashsim.count(p, algorithm="standard", tiling=Tiling(128, 256))
    assert real.bytes(tensor="S") + real.bytes(tensor="P") == 4 * 2 * 4 * 128 * 256


def test_captured_arrays_are_bytes_of_the_points():
    """A bias of 64 x 64 float32, read by both heads: requested twice, from DRAM once."""
    bias = np.zeros((64, 64), np.float32)
    plain = Problem(64, head_dim=8, heads=2)
    biased = replace(plain, score_mod=lambda s, b, h, q, k: s + bias[q, k])
    how = {"tiling": Tiling(16, 16), "device": TOY}
    without, points = (roofline(flashsim.count(p, **how)) for p in (plain, biased))
    more = {name: points[name].bytes - without[name].bytes for name in ("requested", "dram")}
    assert more == {"requested": 2 * bias.nbytes, "dram": bias.nbytes}
    assert points["compulsory"].bytes - without["compulsory"].bytes == bias.nbytes
    assert points["dram"].flops == without["dram"].flops  # those of the matrix products


def test_without_an_l2_bandwidth_the_requested_point_has_no_roof():
    device = Device("bare", 1 << 20, 1 << 20, cuda_flops={"float32": 1.0})
    point = roofline(counted(device=device))["requested"]
    assert (point.ridge, point.attainable, point.bound) == (None, None, "unknown")
    assert "requested" in str(roofline(counted(device=device)))


def test_ridge_points_of_a_preset():
    h100 = Device.get("H100")
    rows = {row["dtype"]: row for row in ridge_points("H100").records()}
    assert rows["bfloat16"]["HBM FLOP/B"] == h100.peak("bfloat16") / h100.hbm_bandwidth
    assert rows["float32"]["L2 FLOP/B"] == h100.peak("float32") / h100.l2_bandwidth
