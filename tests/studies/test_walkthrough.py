"""Walkthroughs: every value that a table shows is the one that the algorithm has."""

import numpy as np
import pytest

import flashsim
from flashsim import Problem, Tiling, walkthrough
from flashsim.problem import oracle

pytestmark = pytest.mark.promise("doc examples run")


def steps(table, way):
    return {row["step"]: row["value"] for row in table.records() if row["way"] == way}


def numbers(text):
    return [float(x) for x in text.split(", ")]


@pytest.mark.parametrize("subnormals", [False, True])
def test_naive_softmax_overflows_and_the_others_do_not(subnormals):
    table = walkthrough.softmax([70, 80, 90], subnormals=subnormals)
    assert steps(table, "naive")["l = sum e"] == "inf"
    exact = np.exp([-20.0, -10.0, 0.0]) / np.exp([-20.0, -10.0, 0.0]).sum()
    for way, step in (("stable", "weights e / l"), ("online", "weights exp(x - m) / l")):
        np.testing.assert_allclose(numbers(steps(table, way)[step]), exact, rtol=1e-5)
        assert float(steps(table, way)["largest error"]) < 1e-7


def test_subnormals_are_flushed_as_on_a_gpu_unless_kept():
    flushed, kept = (walkthrough.softmax([-90, -95], subnormals=s) for s in (False, True))
    assert steps(flushed, "naive")["e = exp(x)"] == "0, 0"
    assert steps(flushed, "naive")["weights e / l"] == "nan, nan"
    assert numbers(steps(kept, "naive")["e = exp(x)"])[0] == pytest.approx(np.exp(-90), rel=1e-4)


def test_the_online_softmax_takes_chunks():
    rows = steps(walkthrough.softmax([1, 2, 3], chunk=2), "online")
    assert list(rows)[:2] == ["after 1, 2", "after 3"]
    assert rows["after 3"].startswith(f"m 3, alpha {np.exp(-1):.6g}")


@pytest.mark.parametrize(
    ("row", "causal", "visits"), [(None, False, 2), (20, True, 2), (3, True, 1)]
)
def test_the_last_lines_of_a_row_are_attention(row, causal, visits):
    table = walkthrough.tiles(row=row, causal=causal)
    problem = Problem(32, head_dim=4, causal=causal)
    q, k, v, _ = flashsim.random_inputs(problem)
    out, lse = oracle.attention(q, k, v, problem)
    at = 31 if row is None else row
    records = table.records()
    assert len(records) == visits + 2
    np.testing.assert_allclose(numbers(records[-2]["O"]), out[0, 0, at], atol=6e-5)
    assert records[-1]["m"] == pytest.approx(lse[0, 0, at], abs=6e-5)
    assert float(table.note.split("in float64 by ")[1].split(";")[0]) < 1e-6


def test_a_tile_rescales_what_was_there():
    first, second, *_ = walkthrough.tiles(tiling=Tiling(16, 16)).records()
    assert first["alpha"] == 0
    assert second["alpha"] == pytest.approx(np.exp(first["m"] - second["m"]), abs=1e-3)


def test_row_sums_are_equal():
    rows = walkthrough.delta(40, 8).records()
    assert len(rows) == 8
    assert all(row["difference"] < 1e-14 for row in rows)
    assert len({row["rowsum(P dP)"] for row in rows}) == 8


def test_divisions_once_a_row_and_once_a_tile():
    first, second = walkthrough.corrections(256, 32, tiling=Tiling(32, 64)).records()
    assert (first["per row"], second["per row"]) == (32 * 256 // 64, 32)
    assert first["divisions"] == 256 * first["per row"]


def test_reading_p_once_takes_its_bytes_over_the_bandwidth():
    rows = {row["device"]: row for row in walkthrough.reread(1024, dtype="bfloat16").records()}
    assert "V100" not in rows  # no bfloat16 there
    assert rows["A100"]["P once, µs"] == pytest.approx(1e6 * 1024 * 1024 * 2 / 1555e9)
    products = 1e6 * 4 * 1024 * 1024 * 64 / 312e12
    assert rows["A100"]["products, µs"] == pytest.approx(products)
