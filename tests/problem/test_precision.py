"""`Precision`: which type each rounding point has, and how tensor cores sum FP8 products."""

import numpy as np
import pytest
from helpers import tensors
from refusals import refuses

import flashsim
from flashsim import Precision, Tiling
from flashsim.problem.precision import POINTS, PRESETS, Roundings, round_to, tensor_core_sum
from flashsim.problem.problem import Problem

pytestmark = pytest.mark.promise("twice plain attention's error")

TILING = Tiling(32, 32)


def both(x, algorithm="flash2", **options):
    result = flashsim.run(x.q, x.k, x.v, algorithm=algorithm, tiling=TILING, **options)
    g = result.backward(x.dout, tiling=TILING)
    return {"out": result.out, "lse": result.lse, "dq": g.dq, "dk": g.dk, "dv": g.dv}


#: What a point's rounding reaches, and nothing else; m's is divided out again wherever it is used.
REACHES = {
    "inputs": ("out", "lse", "dq", "dk", "dv"),
    "s": ("out", "lse", "dq", "dk", "dv"),
    "p": ("out", "dv", "dq", "dk"),
    "m": ("out", "lse", "dq", "dk", "dv"),
    "l": ("out", "lse", "dq", "dk", "dv"),
    "o": ("out", "dq", "dk"),
    "lse": ("lse", "dq", "dk", "dv"),
    "delta": ("dq", "dk"),
    "ds": ("dq", "dk"),
    "dq": ("dq",),
    "dkv": ("dk", "dv"),
    "o_hbm": ("out", "dq", "dk"),
    "l_hbm": ("out", "lse", "dq", "dk", "dv"),
    "m_hbm": ("out", "lse", "dq", "dk", "dv"),
}
SAVES_P = {"o": ("out",)}  # standard attention's backward reads P, not O


@pytest.mark.parametrize("algorithm", ["standard", "flash1", "flash2", "flash2-fused"])
def test_each_point_reaches_what_is_computed_from_it_and_nothing_else(algorithm):
    x = tensors(80, 80, 16, kind="rising")
    plain = both(x, algorithm, precision=Precision())
    for point in POINTS[algorithm]:
        got = both(x, algorithm, precision=Precision(**{point: "bfloat16"}))
        changed = {name for name in got if (got[name] != plain[name]).any()}
        reached = REACHES | (SAVES_P if algorithm == "standard" else {})
        assert changed == set(reached[point]), point
        same = both(x, algorithm, precision=Precision(**{point: "float32"}))
        assert all((same[name] == plain[name]).all() for name in plain), point


def test_an_algorithm_that_is_not_listed_rounds_its_inputs():
    Precision(inputs="float16").check("mine")


def test_a_bfloat16_lse_makes_rows_of_p_that_do_not_sum_to_1():
    x = tensors(96, 96, 32)
    lse = both(x)["lse"].astype(np.float64)
    low = both(x, precision=Precision(lse="bfloat16"))["lse"].astype(np.float64)
    np.testing.assert_array_equal(low, round_to(lse, "bfloat16"))
    assert np.abs(np.exp(lse - low) - 1).max() > 2**-8  # LSE is from 4 to 8: off by up to 2**-6


def test_what_is_given_beside_narrow_inputs():
    """P stays in float32 if told to; without being told, it has the inputs' type."""
    x = tensors(64, 64, 16, dtype="float16")
    usual, told = both(x), both(x, precision=Precision(p="float16", ds="float16"))
    assert all((usual[name] == told[name]).all() for name in usual)
    wide = both(x, precision=Precision(p="float32"))["out"]
    exact = flashsim.oracle.attention(x.q, x.k, x.v, Problem(64, head_dim=16, heads=2))[0]
    errors = [np.abs(out.astype(float) - exact).mean() for out in (wide, usual["out"])]
    assert errors[0] < errors[1]


# -- the accumulator ------------------------------------------------------------------------------


def summed(into, a, b):
    total = np.full((1, 1), into, np.float32)
    tensor_core_sum(total, np.array([a], np.float32), np.array(b, np.float32)[:, None])
    return float(total[0, 0])


def test_a_tensor_core_keeps_14_bits_of_what_it_adds():
    tiny = 2.0**-14  # beyond the 13 bits behind a leading 1
    assert summed(1, [1.0], [2 * tiny]) == 1 + 2 * tiny
    assert summed(1, [1.0] * 32, [tiny] * 32) == 1  # each of them is cut off
    assert summed(0, [1.0] * 32, [tiny] * 32) == 32 * tiny  # but not beside their like
    assert summed(0, [1.0] * 33, [1.0, *[tiny] * 32]) == 1  # the 33rd comes to a sum of 1
    assert summed(-1, [1.0], [-3 * tiny]) == -1 - 2 * tiny  # towards zero
    assert summed(0, [0.0], [0.0]) == 0


def test_it_is_a_product_up_to_what_is_cut_off():
    rng = np.random.default_rng(0)
    a, b = (round_to(rng.standard_normal(s).astype(np.float32), "float8_e4m3fn")
            for s in ((3, 40, 70), (3, 70, 24)))  # fmt: skip
    into = np.zeros((3, 40, 24), np.float32)
    tensor_core_sum(into, a, b)
    exact = a.astype(np.float64) @ b
    largest = np.abs(a[..., None] * b[:, None]).max(axis=2).max()
    error = np.abs(into - exact)
    # 33 terms and the sum itself, each cut off below 2**-13 of what is at most 32 of the largest
    assert 0 < error.max() <= 3 * 34 * 2.0**-13 * 32 * largest
    assert error.mean() < 2**-10 * np.abs(exact).mean()


@pytest.mark.parametrize("flush", [1, 2, 3])
def test_what_is_flushed_is_one_tensor_core_sum(flush):
    """P V over `flush` tiles at a time, with equal scores: no rescaling, and P exact."""
    rng = np.random.default_rng(1)
    q, k = np.zeros((1, 1, 8, 32), np.float32), np.zeros((1, 1, 192, 32), np.float32)
    v = (1 + rng.random((1, 1, 192, 16))).astype(np.float32)
    precision = Precision(p="float8_e4m3fn", accumulator="hopper-fp8", flush=flush)
    out = flashsim.run(q, k, v, tiling=TILING, precision=precision).out
    total = np.zeros((8, 16), np.float32)
    for first in range(0, 192, 32 * flush):
        part = np.zeros_like(total)
        ones = np.ones((8, min(32 * flush, 192 - first)), np.float32)
        tensor_core_sum(part, ones, v[0, 0, first : first + 32 * flush])
        total += part
    np.testing.assert_allclose(out[0, 0], total / 192, rtol=1e-6)
    never = Precision(p="float8_e4m3fn", accumulator="hopper-fp8")
    cut = flashsim.run(q, k, v, tiling=TILING, precision=never).out
    exact = v.astype(np.float64).mean(axis=2, keepdims=True)
    assert np.abs(out - exact).mean() < np.abs(cut - exact).mean()  # flushing helps


def test_what_is_not_flushed_yet_is_rescaled():
    """Scores climb by 20 a tile: beside the first tile's sum as it was, later ones were cut off."""
    k = np.repeat(np.arange(4.0), 32)[None, None, :, None].astype(np.float32)
    q = np.full((1, 1, 8, 1), 20, np.float32)
    v = np.repeat([4096.0, 1, 1, 1], 32)[None, None, :, None].astype(np.float32)
    precision = Precision(p="float8_e4m3fn", accumulator="hopper-fp8", flush=4)
    out = flashsim.run(q, k, v, tiling=TILING, precision=precision).out
    np.testing.assert_allclose(out, 1, rtol=1e-3)


# -- what is refused ------------------------------------------------------------------------------


X = tensors(32, 32, 16)


def run(**options):
    return flashsim.run(X.q, X.k, X.v, **options)


test_what_is_no_precision = refuses(r"""
Precision(stats="float16") -> UnknownArgumentError: Precision() has no argument 'stats'
Precision(p="float8") -> DTypeError: dtype 'float8' is not supported
Precision(flush=2) -> OptionError: needs accumulator='hopper-fp8'
Precision(accumulator="hopper-fp8", flush=0) -> ShapeError: flush must be at least 1
Precision(p="float16").check("mine")
    -> OptionError: 'mine' has no rounding point 'p'; choose from inputs$
Precision.preset("flash") -> OptionError: unknown precision preset 'flash'
Precision.preset("standard", "float64") -> OptionError: unknown dtype 'float64'
run(precision=Precision(m_hbm="float16"))
    -> OptionError: 'flash2' has no rounding point 'm_hbm'; choose from inputs
run(precision=Precision(m="float16"), trace=True)
    -> UnsupportedError: changes the results, but not the traced bytes
run(precision=Precision(m="float16"), backend="numba")
    -> UnsupportedError: takes no precision=; use backend='simulator'
run(precision="float16") -> DTypeError: precision must be a flashsim.Precision
""")


def test_none_is_the_usual_precision():
    assert (run(precision=None).out == run().out).all()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run_and_round_what_their_type_is(name):
    made = Precision.preset(name, "float16")
    assert made.points["p"] == ("float8_e4m3fn" if "fp8" in name else "float16")
    assert Precision.preset(name).points["inputs"] != "float16"
    algorithm = {"standard": "standard", "flash-attention-1": "flash1"}.get(name, "flash2")
    x = tensors(40, 40, 16)
    error = np.abs(both(x, algorithm, precision=made)["out"] - both(x)["out"]).max()
    assert 0 < error < (0.5 if "fp8" in name else 0.01)


def test_a_stage_without_rounding_rounds_nothing():
    problem = Problem(8, dtype="float64")
    assert Roundings.of(problem, "flash2", "forward", "forward", Precision()) == Roundings()
