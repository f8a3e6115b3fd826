"""Scores at the edges of their type: -inf and the largest finite numbers, caps that saturate."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from helpers import DTYPES, ENGINES, Judge, run_both, tensors

import flashsim
from flashsim import Tiling
from flashsim.problem import oracle
from flashsim.problem.problem import numpy_dtype

pytestmark = pytest.mark.promise("twice plain attention's error")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_minus_infinity_in_the_bias_masks_under_a_softcap_too(target, algorithm, dtype):
    x = tensors(33, 40, 16, dtype=dtype, bias=(1, 2), heads=2)
    x.bias[..., 3, :] = x.bias[..., 7, 5:9] = -np.inf  # a row that sees nothing, and a part of one
    result, gradients, got = run_both(x, target, algorithm, softcap=1.5, tiling=Tiling(16, 16))
    Judge.of(x, result.problem).check(got)
    np.testing.assert_array_equal(result.out[:, :, 3], 0)
    np.testing.assert_array_equal(gradients.dbias[..., 7, 5:9], 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_a_small_softcap_is_derived_as_precisely_as_plain_attention_does(target, algorithm, dtype):
    """Most scores saturate and the bias is larger than the cap: S in 16 bits has lost tanh."""
    x = tensors(64, 64, 32, dtype=dtype, bias=(1, 1), heads=1)
    x.bias *= 5
    result, gradients, _ = run_both(x, target, algorithm, softcap=0.5)
    arrays, p = (x.q, x.k, x.v, x.dout), result.problem
    exact = oracle.gradients(*arrays, p, bias=x.bias)
    plain = oracle.gradients(*arrays, p, bias=x.bias, dtype=dtype)
    for name in ("dq", "dk"):
        error = np.abs(getattr(gradients, name).astype(np.float64) - exact[name]).max()
        assert error <= 1.2 * np.abs(plain[name] - exact[name]).max(), name


BACKENDS = pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("simulator", {}),
        ("numba", {}),
        pytest.param("numba", {"micro_kernel": "plain"}, marks=pytest.mark.kernels),
    ],
    ids=["simulator", "vector", "plain"],
)


@BACKENDS
def test_a_row_of_the_largest_finite_scores_is_a_mean(backend, options):
    """Of their differences nothing is left, so every score is the same.

    Walks of plain definitions take long to compile; test_panels.py has each of these.
    """
    how = {"backend": backend, "tiling": Tiling(16, 16), **options}
    check_largest_finite_scores("float32", 1e-6, **how)


def check_largest_finite_scores(dtype, off, **how):
    x = tensors(20, 37, 8, bias=(1, 1), dtype=dtype)
    largest = x.bias[..., 3, :] = ml_dtypes.finfo(x.bias.dtype).max
    result = flashsim.run(x.q, x.k, x.v, bias=x.bias, **how)
    mean = x.v.astype(np.float32).mean(axis=2)
    np.testing.assert_allclose(result.out[:, :, 3].astype(np.float32), mean, atol=off)
    np.testing.assert_array_equal(result.lse[:, :, 3], np.float32(largest))


def least(dtype: str) -> float:
    """The lowest finite number of a type."""
    return float(ml_dtypes.finfo(numpy_dtype(dtype)).min)


def pad(bias: np.ndarray, dtype: str) -> list[int]:
    """Mask as model code does, by the least number of a type; which rows have no keys then.

    Rows are masked whole; by numbers near the least; some keys by it and the others by -inf. Or
    only the first keys are, in whole tiles, or the last ones, or every second.
    """
    low = least(dtype)
    bias[..., 3, :] = low
    bias[..., 4, :] = low * np.linspace(0.6, 1, bias.shape[-1])
    bias[..., 5, ::2], bias[..., 5, 1::2] = low, -np.inf
    bias[..., 6, :20] = bias[..., 7, 20:] = bias[..., 8, ::2] = low
    return [3, 4, 5]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_a_row_of_the_least_finite_scores_has_no_keys(target, algorithm, dtype):
    check_least_finite_scores(target, algorithm, dtype)


def check_least_finite_scores(target, algorithm, dtype):
    x = tensors(20, 40, 16, dtype=dtype, bias=(1, 2), heads=2)
    without = pad(x.bias, dtype)
    result, gradients, got = run_both(x, target, algorithm, tiling=Tiling(16, 16))
    assert (result.out[:, :, without] == 0).all()
    assert np.isneginf(result.lse[:, :, without]).all()
    assert (gradients.dq[:, :, without] == 0).all()
    assert (gradients.dbias[:, :, without] == 0).all()
    Judge.of(x, result.problem).check(got)
    masked = SimpleNamespace(**vars(x))
    masked.bias = np.where(x.bias <= x.bias.dtype.type(least(dtype) / 2), -np.inf, x.bias)
    masked.bias = masked.bias.astype(x.bias.dtype)
    _, _, same = run_both(masked, target, algorithm, tiling=Tiling(16, 16))
    for name, array in got.items():
        np.testing.assert_array_equal(array, same[name], err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_q", [20, 1])
@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_both_passes_have_one_p_where_scores_are_the_least_there_are(target, algorithm, n_q, dtype):
    """With V = 1 out is P, and dV is P^T dO. float16's least number leaves a score 3 digits."""
    x = tensors(20, 40, 40, dtype=dtype, bias=(1, 1), heads=1)
    pad(x.bias, dtype)
    if n_q == 1:
        x.q, x.dout, x.bias = x.q[..., 3:4, :], x.dout[..., 3:4, :], x.bias[..., 3:4, :]
    x.v = np.eye(40, dtype=x.v.dtype)[None, None]
    result, gradients, _ = run_both(x, target, algorithm, tiling=Tiling(16, 16))
    P, dO, dV = (a.astype(np.float64)[0, 0] for a in (result.out, x.dout, gradients.dv))
    eps = float(ml_dtypes.finfo(numpy_dtype(dtype)).eps)
    off = 3 * 2**-23 * -least("float16") if dtype == "float16" else 40 * eps
    assert (np.abs(P.T @ dO - dV) <= off * (P.T @ np.abs(dO)) + eps).all()


@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
@pytest.mark.promise("gradients equal differences")
def test_gradients_are_differences_where_scores_are_the_least_there_are(target, algorithm):
    """Of an engine's own forward pass, in float64, along one direction for each input."""
    x = tensors(20, 40, 16, dtype="float64", bias=(1, 1), heads=1)
    pad(x.bias, "float64")
    how = {"backend": target.backend, "algorithm": algorithm, "tiling": Tiling(16, 16)}
    _, _, got = run_both(x, target, algorithm, tiling=Tiling(16, 16))
    rng = np.random.default_rng(1)
    for name in ("q", "k", "v", "bias"):
        given = getattr(x, name)
        step = 1e-5 * rng.standard_normal(given.shape)
        loss = [
            float((flashsim.run(y.q, y.k, y.v, bias=y.bias, **how).out * x.dout).sum())
            for y in (SimpleNamespace(**vars(x) | {name: given + s * step}) for s in (1, -1))
        ]
        expected = float((got[f"d{name}"] * step).sum())
        assert (loss[0] - loss[1]) / 2 == pytest.approx(expected, rel=1e-6), name


def test_parts_of_the_keys_that_are_masked_by_the_least_number_weigh_nothing():
    x = tensors(20, 40, 16, bias=(1, 2), heads=2)
    without = pad(x.bias, "float32")
    how = {"tiling": Tiling(16, 16), "algorithm": "flash-decode", "splits": 3}
    result = flashsim.run(x.q, x.k, x.v, bias=x.bias, **how)
    assert (result.out[:, :, without] == 0).all()
    assert np.isneginf(result.lse[:, :, without]).all()
    exact, _ = oracle.attention(x.q, x.k, x.v, result.problem, bias=x.bias)
    np.testing.assert_allclose(result.out, exact, atol=1e-6)
