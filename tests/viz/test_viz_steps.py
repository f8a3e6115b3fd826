"""`Steps`, `row_statistics` and the places of tensors: what is drawn, before it is drawn."""

import numpy as np
import pytest
import viz_cases as cases

import flashsim
from flashsim import Tiling, viz
from flashsim.problem import oracle
from flashsim.trace.steps import Steps
from flashsim.viz.data.diagram import first_touch, sides

pytestmark = pytest.mark.promise("pictures show the counts")


@pytest.mark.parametrize(("algorithm", "direction"), cases.PASSES)
def test_totals_are_the_traces(algorithm, direction):
    trace = cases.trace(algorithm, direction)
    walk = Steps(trace)
    for column, op in enumerate(("load", "store", "reduce")):
        assert walk.hbm_bytes[-1, column] == trace.bytes(op)
    assert walk.flops[-1] == trace.flops()
    assert walk.on_chip.sum(axis=1).max() == trace.peak_sram()


@pytest.mark.parametrize(("algorithm", "direction"), cases.PASSES)
def test_every_visit_agrees_with_frame(algorithm, direction):
    trace = cases.trace(algorithm, direction)
    walk = Steps(trace)
    visits = np.flatnonzero(walk.visit >= 0)
    assert len(visits) == trace.n_visits
    for step in (0, len(visits) // 3, len(visits) - 1):
        frame, at = trace.frame(step), visits[step]
        assert (frame.i, frame.j) == (walk.i[at], walk.j[at])
        assert frame.hbm_bytes == walk.hbm_bytes[at].sum()
        held = dict(zip(walk.buffers, walk.on_chip[at].tolist(), strict=True))
        assert frame.on_chip == {name: size for name, size in held.items() if size}
        assert np.nanmax(frame.order) == walk.order[at]


def test_moves_of_a_step():
    walk = Steps(cases.trace(causal=False))
    first = [(e["op"], e["tensor"], e["bytes"]) for e in walk.moves(0)]
    assert first == [(0, 1, 512), (0, 2, 512), (0, 3, 512)]  # load Q, K, V: 16 x 8 x 4 B
    end = [(e["op"], e["tensor"], e["bytes"]) for e in walk.moves(6)]
    assert end == [(1, 4, 512), (1, 5, 64)]  # after six tiles: store O and L
    assert walk.visit[6] == -1
    assert walk.j[6] == -1


@pytest.mark.parametrize("algorithm", ["flash1", "flash2"])
@pytest.mark.parametrize("row", [0, 17, 95])
def test_statistics_end_at_the_log_sum_exp(algorithm, row):
    q, k, v = cases.arrays()
    stats = viz.row_statistics(cases.trace(algorithm), q, k, row=row)
    trace = cases.trace(algorithm)
    _, lse = oracle.attention(q[None], k[None], v[None], trace.problem)
    assert stats.m[-1] + np.log(stats.l[-1]) == pytest.approx(lse[0, 0, row], abs=1e-5)
    assert len(stats.steps) == row // 16 + 1  # causal: tiles up to the diagonal
    assert np.all(np.diff(stats.m) >= 0)


def test_the_row_that_is_followed_is_one_whose_maximum_moves():
    trace = cases.trace(causal=False)
    for seed in range(8):
        q, k = np.random.default_rng(seed).standard_normal((2, 1, 96, 8))
        moved = [
            np.count_nonzero(np.diff(viz.row_statistics(trace, q, k, row=row).m))
            for row in range(48, 64)  # the row tile half-way down
        ]
        chosen = viz.row_statistics(trace, q, k)
        assert np.count_nonzero(np.diff(chosen.m)) == max(moved) > 0
        assert chosen.row == 48 + max(n for n in range(16) if moved[n] == max(moved))


def test_alpha_is_what_the_visit_rescales_by():
    q, k, _ = cases.arrays()
    stats = viz.row_statistics(cases.trace(), q, k)
    assert stats.alpha[0] == 0  # nothing to rescale yet
    assert stats.alpha[1:] == pytest.approx(np.exp(stats.m[:-1] - stats.m[1:]))
    assert (stats.alpha[1:] < 1).any()
    assert stats.j.tolist() == list(range(stats.tile + 1))
    assert "alpha" in stats._repr_html_()
    assert "\n" not in repr(stats)


def test_statistics_with_groups_softcap_and_a_row_without_keys():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, 40, 8), dtype=np.float32)
    k, v = rng.standard_normal((2, 1, 2, 24, 8), dtype=np.float32)
    run = flashsim.run(q, k, v, causal=True, softcap=3.0, tiling=Tiling(8, 8), trace=True)
    stats = viz.row_statistics(run.trace, q, k, row=39, head=3)
    assert stats.m[-1] + np.log(stats.l[-1]) == pytest.approx(run.lse[0, 3, 39], abs=1e-5)
    none = viz.row_statistics(run.trace, q, k, row=17, head=0)  # sees keys 0 and 1 only
    assert none.l[-1] == pytest.approx(np.exp(run.lse[0, 0, 17] - none.m[-1]), rel=1e-5)
    assert len(viz.row_statistics(run.trace, q, k, row=3).steps) == 0


def test_sides():
    forward = sides(cases.trace())
    assert forward["left"] == ("Q",)
    assert set(forward["right"]) == {"O", "L"}
    assert forward["top"] == ("K", "V")
    assert forward["grid"] == ()
    assert set(sides(cases.trace("standard"))["grid"]) == {"S", "P"}
    backward = sides(cases.trace("flash2-fused", "backward"))
    assert set(backward["bottom"]) == {"dK", "dV"}
    assert "dQ" in backward["right"]


def test_first_touch():
    walk = Steps(cases.trace(causal=False))
    touched = first_touch(walk)
    assert touched["Q"].tolist() == [0, 7, 14, 21, 28, 35]  # six visits and an end each
    assert touched["K"].tolist() == [0, 1, 2, 3, 4, 5]
    assert touched["O"].tolist() == [6, 13, 20, 27, 34, 41]
    scores = first_touch(Steps(cases.trace("standard", causal=False)))
    assert scores["S"][1, 2] == 7 + 2
    assert scores["P"][0].tolist() == [42] * 6  # softmax works on whole rows, after all scores
