"""The precision laboratory."""

import numpy as np
import pytest
from commands import ok, refused, rows
from helpers import KINDS, tensors

import flashsim
from flashsim import Problem, precision


def test_inputs_are_the_four_kinds_of_the_suite_and_the_outliers_of_the_paper():
    assert set(precision.KINDS) == {*KINDS, "outliers"}
    for kind in KINDS:
        ours, theirs = precision.draw(kind, 200, 16), tensors(200, 200, 16, kind=kind, heads=1)
        for name in ("q", "k"):
            mine, his = getattr(ours, name), getattr(theirs, name)
            assert np.abs(mine).max() == pytest.approx(np.abs(his).max(), rel=0.2), kind
    x = precision.draw("outliers", 2000, 64).v
    assert x.std() == pytest.approx(np.sqrt(1 + 0.001 * 100), rel=0.02)
    assert 5e-4 < (np.abs(x) > 5).mean() < 8e-4  # P(|N(0, 101)| > 5) = 0.62 of one in a thousand


def test_each_point_alone_against_float64():
    found = precision.laboratory((64, 128), kinds=("normal", "rising"))
    points = flashsim.problem.precision.POINTS["flash2"]
    assert [one.point for one in found.findings[:12]] == ["float32", *points]
    assert len(found.findings) == 2 * 2 * 12
    for kind in ("normal", "rising"):
        nothing, lse = (found.of(point, kind, 128) for point in ("float32", "lse"))
        assert lse.errors["out"] == nothing.errors["out"] < 1e-5
        assert lse.errors["dv"] > 1e-3
        assert lse.row_sum > 1e-3 > 10 * nothing.row_sum
    m = found.of("m", "normal").errors
    assert all(error < 2e-6 for error in m.values())  # m is divided out again
    # by hand: out's error where the inputs are rounded
    x = precision.draw("normal", 64)
    x = x._make(part.astype(np.float32) for part in x)
    exact, _ = flashsim.oracle.attention(x.q, x.k, x.v, Problem(64))
    low = flashsim.run(*x[:3], precision=flashsim.Precision(inputs="bfloat16")).out
    error = np.sqrt(((low - exact) ** 2).mean() / (exact**2).mean())
    assert found.of("inputs", "normal", 64).errors["out"] == pytest.approx(error, rel=1e-3)


def test_float16_scores_overflow_and_say_so_in_the_table():
    found = precision.laboratory((32,), kinds=("normal",), points=("o",), dtype="float16")
    assert "one rounding point at a time in float16" in str(found)


def test_the_command(tmp_path):
    words = ("-n", "32,64", "-d", "16", "--kinds", "normal,heavy", "--points", "lse,ds")
    plot = tmp_path / "precision.png"
    said = ok("study precision", *words, "--plot", plot)
    assert "as N grows, normal inputs" in said
    assert "by inputs, N = 64" in said
    assert plot.stat().st_size > 5000
    table = rows("study precision", *words)
    assert len(table) == 2 * 2 * 3
    assert {row["lowered"] for row in table} == {"float32", "lse", "ds"}
    assert "flash-attention-2" in ok("study precision", "-n", 32, "-d", 16, "--published")
    refused("study precision", "--published", "--plot", plot)
