"""Joules: sums by hand, where they are printed, and that nothing is made up for other devices."""

from dataclasses import replace

import pytest
from repository import ROOT, page, script

import flashsim
from flashsim import Device, Problem
from flashsim.studies.energy import ENERGIES, Energy, Use, energy_of
from flashsim.studies.predict import predict
from flashsim.studies.roofline import roofline

pytestmark = pytest.mark.promise("predictions are judged")

RESULTS, MODELS = page("notebooks/predictions.md"), page("reference/predictions.md")
PROBLEM = Problem(4096, head_dim=128, batch=4, heads=16, dtype="bfloat16", causal=True)
ROUND = Energy(100.0, 500.0, (1.0, 2.0), 10.0, 0.5, (3.0, 4.0), 5.0, 6.0)


def test_joules_by_hand():
    use = Use(flops=1, scores=2, shared=4, moved=8, added=16, hbm=32)
    rest = 0.5 * 100 + 2 * 10 + 4 * 0.5 + 16 * 5 + 32 * 6
    assert ROUND.joules(use, 0.5) == rest + 1 + 8 * 3
    assert ROUND.joules(replace(use, by_threads=True), 0.5) == rest + 2 + 8 * 4


@pytest.mark.parametrize(("flops", "hbm"), [(800, 0), (3200, 0), (500, 100), (0, 1000)])
def test_the_clock_falls_until_the_power_fits(flops, hbm):
    """400 W are left of a second: 800 J of SMs fit at the root of a half of the clock."""
    found = ROUND.sustained([Use(flops=flops), Use(hbm=hbm)], 1.0)
    inside, outside = flops, 6 * hbm
    assert found.joules / found.seconds == pytest.approx(500)
    assert found.seconds == pytest.approx(1 / found.clock)
    expected = 100 * found.seconds + found.clock * inside + outside
    assert found.joules == pytest.approx(expected)
    if not hbm:
        assert found.clock == pytest.approx((400 / flops) ** 0.5)


def test_a_light_kernel_keeps_its_clock():
    found = ROUND.sustained([Use(flops=100)], 1.0)
    assert found == (1.0, 200.0, 1.0)


def test_what_a_fused_backward_uses():
    """Whole tiles of 64 x 128, five products of each, two of which have 16 columns more; bytes as
    they are counted."""
    found = predict(PROBLEM, direction="backward", algorithm="flash2-fused", kernels="hopper")
    fused = next(stage for stage in found.stages if stage.name == "fused")
    tiles = 64 * sum(range(2, 65, 2))  # of the columns of 128 keys, causal, from the last
    assert fused.use.scores == 64 * 128 * tiles
    assert fused.use.flops == pytest.approx(2 * (5 * 128 + 2 * 16) * fused.use.scores)
    counted = found.traffic.transfers
    each = {op: sum(n for (s, o, _), n in counted.items() if (s, o) == ("fused", op)) for op in
            ("load", "store", "reduce")}  # fmt: skip
    assert (fused.use.moved, fused.use.added) == (each["load"] + each["store"], each["reduce"])
    assert found.joules == pytest.approx(sum(stage.joules for stage in found.stages))
    assert f"{found.joules:.3g} J" in str(found.table().title)
    held = found.sustained
    assert held.clock < 1
    assert f"{held.joules:.3g} J, at {held.clock:.0%} of the highest clock" in str(
        found.table().note
    )


def test_devices_that_nobody_measured_have_no_joules():
    assert energy_of("H200") is ENERGIES["H200"]
    assert energy_of("A100") is None
    assert predict(PROBLEM, device="A100").joules is None
    assert predict(PROBLEM, device="A100").sustained is None
    assert " J" not in predict(PROBLEM, device="A100").table().title
    counted = flashsim.count(PROBLEM, device="A100")
    assert roofline(counted)["requested"].joules is None


def test_the_least_joules_under_a_roof():
    energy, device = ENERGIES["H200"], Device.get("H200")
    points = roofline(flashsim.count(PROBLEM, device=device))
    requested, compulsory = points["requested"], points["compulsory"]
    seconds = requested.flops / device.peak("bfloat16")
    products = energy.waiting * seconds + energy.flop[0] * requested.flops
    assert requested.joules == pytest.approx(products + energy.moved[0] * requested.bytes)
    assert compulsory.joules == pytest.approx(products + energy.hbm * compulsory.bytes)
    slow = roofline(flashsim.count(PROBLEM, device=device), seconds=1.0)
    more = slow["compulsory"].joules - compulsory.joules
    assert more == pytest.approx(energy.waiting * (1 - seconds))


def test_docs_print_the_joules_of_passes():
    """The aim of 10 % holds, of those that were fitted and of those held out."""
    tables = script("doc_tables")
    table, off = tables.power_tables()
    assert table.markdown() in RESULTS
    assert off.markdown() in RESULTS
    assert [row[1] for row in off.rows] == [10, 14]
    worst = off.rows[1][3].lstrip("+-")
    assert f"worst of 14 passes not fitted: {worst} %" in MODELS
    assert all(abs(float(row[3])) < 10 and abs(float(row[5])) < 10 for row in off.rows)


def test_constants_that_made_the_joules_are_found_again():
    power = script("power")
    units, passes = power.read(ROOT / "docs" / "data" / "power-h200.csv")
    ours, fitted = ENERGIES["H200"], power.fit(units, passes)
    for name in ("waiting", "most", "score", "shared", "added", "hbm"):
        assert getattr(fitted, name) == pytest.approx(getattr(ours, name), rel=0.01), name
    assert (*fitted.flop, *fitted.moved) == pytest.approx((*ours.flop, *ours.moved), rel=0.01)
    spoilt = [
        one if one.fitted else one._replace(row=one.row | {"joules": "9", "us": "9", "watts": "9"})
        for one in passes
    ]
    assert power.fit(units, spoilt).flop == fitted.flop  # it sees none of those held out
