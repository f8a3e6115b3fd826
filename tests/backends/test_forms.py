"""Which form of the Hopper backward is taken, beside times of both (benchmarks/forms.py)."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from repository import page, script

pytestmark = pytest.mark.promise("predictions are judged")


@pytest.fixture
def forms():
    return script("forms")


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_of_shapes_not_fitted_to_the_faster_form_is_taken(forms, gpu):
    """But where they differ little, and of a few; either form alone would lose far more."""
    path = forms.DATA.with_stem(f"forms-{gpu}")
    gpu = forms.gpu_of(path)
    rows = [row for row in forms.read(path) if row.held_out and forms.as_measured(row, gpu)]
    lost = np.array([forms.lost(row, gpu) for row in rows])
    times = np.array([(row.three, row.fused) for row in rows])
    either = (times / times.min(axis=1, keepdims=True) - 1).mean(axis=0)
    assert len(rows) > 20
    assert lost.mean() < either.min() / 5
    assert (lost > 0.02).mean() < 0.08


def test_held_out_are_what_was_drawn(forms):
    """And none of them is one of those fitted to."""
    rows = forms.read(forms.DATA)
    drawn, fitted = list(forms.held_out()), dict.fromkeys(forms.fitted())
    assert [row.shape for row in rows if row.held_out] == drawn
    assert [row.shape for row in rows if not row.held_out] == list(fitted)
    assert not fitted.keys() & set(drawn)


def test_a_rule_that_takes_the_other_form_is_judged_so(forms, monkeypatch, capsys):
    gpu = forms.gpu_of(forms.DATA)
    row = next(row for row in forms.read(forms.DATA) if row.fused > 1.3 * row.three)
    assert forms.lost(row, gpu) == 0
    monkeypatch.setattr(type(forms.HOPPER), "fuses", lambda *_: True)
    assert forms.lost(row, gpu) == pytest.approx(row.fused / row.three - 1)
    forms.judge([row._replace(held_out=kept) for kept in (False, True)], gpu)
    assert f"on 1; {forms.lost(row, gpu):.2%} in the mean" in capsys.readouterr().out


def test_memory_of_less_bandwidth_makes_three_passes_of_what_passes_through_it(forms):
    """An H100's memory has 0.7 of an H200's: the same launches otherwise, L2 but for a sixth."""
    h200, h100 = (forms.gpu_of(Path(f"forms-{name}.csv")) for name in ("h200", "h100"))
    p = forms.Shape(128, False, 512, 512, 32, 16, 16).problem
    assert (forms.HOPPER.fuses(p, h200), forms.HOPPER.fuses(p, h100)) == (True, False)
    slower = dataclasses.replace(h200, hbm_bandwidth=h100.hbm_bandwidth)
    assert not forms.HOPPER.fuses(p, slower)


def test_gains_of_storing_first_are_those_of_the_page():
    """The table of docs/notebooks/hopper.md, "The first visit stores dQ"."""
    forms = script("backward_forms")
    path = Path(forms.__file__).parents[1] / "docs/data/backward-forms-h100.csv"
    table = page("notebooks/hopper.md").partition("| shapes | number | gain, geometric mean |")[2]
    for kind, gains in forms.gains_of_first(forms.read(path)[0], forms.gpu_of(path)):
        mean = np.exp(np.log(gains).mean())
        slower = sum(x < 1 for x in gains)
        least, most = (f"{x:.3f}" if x < 1.1 else f"{x:.2f}" for x in (min(gains), max(gains)))
        assert f"| {kind} | {len(gains)} | {mean:.3f} | {least} | {most} | {slower} |" in table
