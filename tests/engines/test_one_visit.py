"""`"flash2-once"`: a backward in one pass, for schedules in which each row tile has one visit."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import JUDGED, KINDS, Judge, Target, run_both, tensors, with_lse_gradient
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_engines import OPTION_CASES
from test_traffic import assert_counted, problems

import flashsim
from flashsim import BlockMask, Device, Problem, SramOverflow, Tiling, TilingError
from flashsim.backends.launch_policy.family import fastest_backward
from flashsim.engines import simulator
from flashsim.errors import OptionError, UnsupportedError
from flashsim.schedule.schedule import Schedule

pytestmark = pytest.mark.promise("twice plain attention's error")

ONCE = "flash2-once"
NUMPY = Target("simulator", (ONCE,))
ROOMY = replace(Device.get("H100"), name="roomy", sram_bytes=1 << 24)
#: Of `OPTION_CASES` those of which some row tile sees no key, or more cells than one.
ELSEWHERE = {"varlen", "varlen-bias"}


def judged(x, **options):
    result, gradients, got = run_both(x, NUMPY, ONCE, device=ROOMY, **options)
    Judge.of(x, result.problem).check(got)
    return gradients


@pytest.mark.parametrize("dtype", JUDGED)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_and_types(kind, dtype):
    judged(tensors(113, 203, 16, kind=kind, dtype=dtype), tiling=Tiling(32, 203))


@pytest.mark.parametrize("case", OPTION_CASES)
def test_options(case):
    shape, options = OPTION_CASES[case]
    x = tensors(113, 203, 16, dtype="bfloat16", **shape)
    if case == "block-mask-of-tiles":  # whose cells are the tiles'
        options = {**options, "block_mask": BlockMask(options["block_mask"], 32, 48)}
    options = {"tiling": Tiling(32, 203), **options}
    if case in ELSEWHERE:
        with pytest.raises(TilingError, match="keys of exactly one key tile"):
            judged(x, **options)
    else:
        judged(x, **options)


@pytest.mark.parametrize("case", ["gqa", "softcap", "bias"])
def test_a_gradient_of_the_lse(case):
    shape, options = OPTION_CASES[case]
    x = tensors(113, 203, 16, dtype="bfloat16", **shape)
    with_lse_gradient(x)
    judged(x, tiling=Tiling(32, 203), **options)


def test_cells_that_each_row_tile_has_one_of_need_no_tile_of_all_keys():
    grid = np.zeros((4, 5), bool)
    grid[range(4), (3, 0, 1, 0)] = True
    judged(tensors(113, 203, 16), tiling=Tiling(32, 48), block_mask=BlockMask(grid, 32, 48))


@settings(max_examples=80, deadline=None, suppress_health_check=[*HealthCheck])
@given(p=problems(), block_q=st.integers(5, 64), order=st.sampled_from(["ascending", "descending"]))
def test_count_equals_measurement(p, block_q, order):
    tiling = Tiling(block_q, p.n_kv)
    assume(Schedule(p, tiling).visited_once)
    assert_counted(p, ONCE, tiling, Device.get("H100"), order)


def test_by_hand():
    """Two heads on one of 100 queries and keys, float16: each row of anything once."""
    p = Problem(100, 100, 16, 24, heads=2, kv_heads=1, dtype="float16", causal=True)
    t = flashsim.count(p, algorithm=ONCE, direction="backward", tiling=Tiling(32, 128))
    q, o, k, v = 200 * 16 * 2, 200 * 24 * 2, 100 * 16 * 2, 100 * 24 * 2
    moved = {"Q": q, "dO": o, "L": 200 * 4, "K": k, "V": v}
    stored = {"dQ": q, "dK": k, "dV": v}
    assert t.transfers == {
        **{("fused", "load", name): n for name, n in moved.items()},
        **{("fused", "store", name): n for name, n in stored.items()},
    }
    assert t.compulsory() - t.bytes() == o  # it does without O
    assert t.workspace() == 0
    assert t.saved() == q + k + v + 200 * 4
    assert t.flops("matmul") == 2 * 100 * 100 * 2 * (3 * 16 + 2 * 24)  # S dQ dK, dP dV


@pytest.mark.parametrize(
    ("p", "tiling"),
    [
        (Problem(100, 100), Tiling(32, 96)),  # two column tiles
        (Problem(100, 30, causal=True), Tiling(32, 64)),  # the first rows see no key
        (Problem(100, 100, cu_seqlens_q=(0, 40, 100), cu_seqlens_k=(0, 0, 100)), Tiling(64, 128)),
    ],
)
def test_other_schedules_are_refused(p, tiling):
    assert not Schedule(p, tiling).visited_once
    with pytest.raises(TilingError, match="algorithm='flash2-fused'"):
        flashsim.count(p, algorithm=ONCE, direction="backward", tiling=tiling)
    flashsim.count(p, algorithm=ONCE, tiling=tiling)  # its forward is FlashAttention-2's


def test_the_tile_that_fits_has_all_keys_of_a_sequence():
    assert Tiling.fit(Problem(4096, 130), "H100", ONCE, "backward").block_k == 130
    packed = Problem(100, 300, cu_seqlens_q=(0, 60, 100), cu_seqlens_k=(0, 100, 300))
    assert Tiling.fit(packed, "H100", ONCE, "backward").block_k == 200
    with pytest.raises(SramOverflow, match="even with a 1 x 5000 tile"):
        Tiling.fit(Problem(4096, 5000), "H100", ONCE, "backward")


def test_who_has_it():
    x = tensors(40, 40, 8)
    with pytest.raises(UnsupportedError, match="'flash2-once'"):
        flashsim.run(x.q, x.k, x.v, backend="numba", algorithm=ONCE)
    with pytest.raises(OptionError, match="one form, which is deterministic"):
        flashsim.run(x.q, x.k, x.v, algorithm=ONCE).backward(x.dout, deterministic=True)


@pytest.mark.parametrize(
    ("algorithm", "deterministic", "tiling", "expected"),
    [
        ("flash2", False, None, ONCE),
        ("flash2", True, None, ONCE),
        ("flash2", None, None, "flash2"),
        ("flash2", False, Tiling(64, 64), "flash2-fused"),
        ("flash2-fused", False, None, "flash2-fused"),
    ],
)
def test_an_engine_may_choose_it(monkeypatch, algorithm, deterministic, tiling, expected):
    asked = []

    def fastest(job, saved, *how):
        once = SimpleNamespace(stores_dq=lambda *_, **__: True, stores_first=lambda *_: False)

        def family_of(form):
            asked.append(form)
            return once

        tiled = job.tiling is not None
        return fastest_backward(job.problem, None, family_of, *how, tiled=tiled)

    monkeypatch.setattr(simulator, "fastest_backward", fastest, raising=False)
    x = tensors(40, 40, 8)
    result = flashsim.run(x.q, x.k, x.v, algorithm=algorithm, trace=True)
    trace = result.backward(x.dout, deterministic=deterministic, tiling=tiling).trace
    assert trace.algorithm == expected
    if expected == ONCE:
        assert asked == ["flash2" if deterministic else "flash2-fused"]
