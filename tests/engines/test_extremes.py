"""Scores at the edges of their type: -inf and the largest finite numbers, caps that saturate."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DTYPES, ENGINES, Judge, run_both, tensors

import flashsim
from flashsim import Tiling
from flashsim.problem import oracle

LARGEST = float(np.finfo(np.float32).max)


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


@pytest.mark.parametrize("value", [-LARGEST, LARGEST])
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("numpy", {}),
        ("numba", {}),
        pytest.param("numba", {"micro_kernel": "plain"}, marks=pytest.mark.kernels),
    ],
    ids=["numpy", "vector", "plain"],
)
def test_a_row_of_the_largest_finite_scores_is_a_mean(backend, options, value):
    """As model code pads: a whole row of bias at finfo.min, in which every score is the same.

    Walks of plain definitions take long to compile; test_panels.py has each of these.
    """
    x = tensors(20, 37, 8, bias=(1, 1))
    x.bias[..., 3, :] = value
    result = flashsim.run(
        x.q, x.k, x.v, bias=x.bias, backend=backend, tiling=Tiling(16, 16), **options
    )
    np.testing.assert_allclose(result.out[:, :, 3], x.v.mean(axis=2), atol=1e-6)
    np.testing.assert_array_equal(result.lse[:, :, 3], np.float32(value))
