"""Joules: sums by hand, where they are printed, and that nothing is made up for other devices."""

import pytest

import flashsim
from flashsim import Device, Problem
from flashsim.studies.energy import ENERGIES, Energy, Use, energy_of
from flashsim.studies.predict import predict
from flashsim.studies.roofline import roofline

PROBLEM = Problem(4096, head_dim=128, batch=4, heads=16, dtype="bfloat16", causal=True)
ROUND = Energy(100.0, (1.0, 2.0), 10.0, 0.5, (3.0, 4.0), (5.0, 7.0), 6.0)


def test_joules_by_hand():
    use = Use(flops=1, scores=2, shared=4, moved=8, added=16, hbm=32)
    rest = 0.5 * 100 + 2 * 10 + 4 * 0.5 + 32 * 6
    assert ROUND.joules(use, 0.5, by_threads=False) == rest + 1 + 8 * 3 + 16 * 5
    assert ROUND.joules(use, 0.5, by_threads=True) == rest + 2 + 8 * 4 + 16 * 7


def test_what_a_fused_backward_uses():
    """Whole tiles of 64 x 128, five products of each; bytes as they are counted."""
    found = predict(PROBLEM, direction="backward", algorithm="flash2-fused", kernels="hopper")
    fused = next(stage for stage in found.stages if stage.name == "fused")
    tiles = 64 * sum(range(2, 65, 2))  # of the columns of 128 keys, causal, from the last
    assert fused.use.scores == 64 * 128 * tiles
    assert fused.use.flops == pytest.approx(10 * 128 * fused.use.scores)
    counted = found.traffic.transfers
    each = {op: sum(n for (s, o, _), n in counted.items() if (s, o) == ("fused", op)) for op in
            ("load", "store", "reduce")}  # fmt: skip
    assert (fused.use.moved, fused.use.added) == (each["load"] + each["store"], each["reduce"])
    assert found.joules == pytest.approx(sum(stage.joules for stage in found.stages))
    assert f"{found.joules:.3g} J" in str(found.table().title)


def test_devices_that_nobody_measured_have_no_joules():
    assert energy_of("H200") is ENERGIES["H200"]
    assert energy_of("A100") is None
    assert predict(PROBLEM, device="A100").joules is None
    assert " J" not in predict(PROBLEM, device="A100").table().title
    counted = flashsim.count(PROBLEM, device="A100")
    assert roofline(counted)["requested"].joules is None


def test_the_least_joules_under_a_roof():
    energy, device = ENERGIES["H200"], Device.get("H200")
    points = roofline(flashsim.count(PROBLEM, device=device))
    requested, compulsory = points["requested"], points["compulsory"]
    seconds = requested.flops / device.peak("bfloat16")
    products = energy.idle * seconds + energy.flop[0] * requested.flops
    assert requested.joules == pytest.approx(products + energy.moved[0] * requested.bytes)
    assert compulsory.joules == pytest.approx(products + energy.hbm * compulsory.bytes)
    slow = roofline(flashsim.count(PROBLEM, device=device), seconds=1.0)
    more = slow["compulsory"].joules - compulsory.joules
    assert more == pytest.approx(energy.idle * (1 - seconds))
