"""Which form of the Hopper backward is taken, beside times of both (benchmarks/forms.py)."""

import importlib
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def forms(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("forms")


def test_of_shapes_not_fitted_to_the_faster_form_is_taken(forms):
    """But where they differ little, and of a few; either form alone would lose far more."""
    rows = [row for row in forms.read(forms.DATA) if row.held_out]
    lost = np.array([forms.lost(row) for row in rows])
    times = np.array([(row.three, row.fused) for row in rows])
    either = (times / times.min(axis=1, keepdims=True) - 1).mean(axis=0)
    assert len(rows) > 90
    assert lost.mean() < either.min() / 5
    assert (lost > 0.02).mean() < 0.05


def test_held_out_are_what_was_drawn(forms):
    """And none of them is one of those fitted to."""
    rows = forms.read(forms.DATA)
    drawn, fitted = list(forms.held_out()), dict.fromkeys(forms.fitted())
    assert [row.shape for row in rows if row.held_out] == drawn
    assert [row.shape for row in rows if not row.held_out] == list(fitted)
    assert not fitted.keys() & set(drawn)


def test_a_rule_that_takes_the_other_form_is_judged_so(forms, monkeypatch, capsys):
    row = next(row for row in forms.read(forms.DATA) if row.fused > 1.3 * row.three)
    assert forms.lost(row) == 0
    monkeypatch.setattr(type(forms.HOPPER), "fuses", lambda *_: True)
    assert forms.lost(row) == pytest.approx(row.fused / row.three - 1)
    forms.judge([row._replace(held_out=kept) for kept in (False, True)])
    assert f"on 1; {forms.lost(row):.2%} in the mean" in capsys.readouterr().out
