"""softmax(X) V: values, bytes as predicted, and what does not fit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsim import errors, softmax_matmul

pytestmark = pytest.mark.promise("three counts equal")

SIZES = st.integers(1, 40)


def make(batch, d1, d2, d3, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    x = scale * rng.standard_normal((batch, d1, d2))
    return x.astype(np.float32), rng.standard_normal((batch, d2, d3)).astype(np.float32)


def exact(x, v):
    S = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        P = np.exp(S - S.max(axis=-1, keepdims=True))
        return P / P.sum(axis=-1, keepdims=True) @ v


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), SIZES, SIZES, SIZES, SIZES, SIZES)
def test_what_is_moved_is_what_is_predicted(batch, d1, d2, d3, block, block_2):
    x, v = make(batch, d1, d2, d3)
    result = softmax_matmul.run(x, v, block=block, block_2=block_2)
    expected = softmax_matmul.count(batch, d1, d2, d3, block=block, block_2=block_2)
    assert result.moved == expected.moved
    tiles = -(-d1 // block)
    by_hand = 4 * batch * (d1 * d2 + tiles * d2 * d3 + d1 * d3)
    assert result.bytes() == expected.bytes() == by_hand


@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_values_are_those_of_softmax(scale):
    x, v = make(2, 37, 83, 19, scale)
    blocks = {"block": 16, "block_2": 24}
    ours = [softmax_matmul.run(x, v, backend=b, **blocks).out for b in ("simulator", "numba")]
    for out in (*ours, softmax_matmul.plain(x, v)):
        np.testing.assert_allclose(out, exact(x, v), atol=2e-6)


def test_minus_infinity_takes_a_score_out_and_a_row_of_it_is_nan():
    x, v = make(1, 3, 64, 8)
    x[0, 0, :40] = -np.inf  # more than a block
    x[0, 1] = -np.inf
    for backend in ("simulator", "numba"):
        out = softmax_matmul.run(x, v, block=16, backend=backend).out
        np.testing.assert_allclose(out, exact(x, v), atol=2e-6)
        assert np.isnan(out[0, 1]).all()
        assert np.isfinite(out[0, [0, 2]]).all()


def test_two_kernels_move_p_as_well():
    fused, two = (softmax_matmul.count(2, 64, 96, 32, fused=f) for f in (True, False))
    scores = 4 * 2 * 64 * 96
    assert two.bytes() - fused.bytes() == 3 * scores  # X once more, P stored and loaded
    assert two.bytes("store", "P") == two.bytes("load", "P") == scores
    assert fused.compulsory() == 4 * 2 * (64 * 96 + 96 * 32 + 64 * 32)
    assert "two kernels" in str(two)
    assert "on chip per block" in str(softmax_matmul.run(*make(1, 8, 8, 8)))


def test_the_courses_own_size_is_counted_at_once():
    fused = softmax_matmul.count(16, 2048, 8192, 512, block=64)
    assert fused.bytes("load", "X") == 16 * 2048 * 8192 * 4
    assert fused.bytes("load", "V") == 32 * 16 * 8192 * 512 * 4  # once for each of 32 row tiles


def test_torch_takes_the_plain_way_by_its_own_softmax():
    class Tensor(np.ndarray):
        def softmax(self, dim):
            assert dim == -1
            return np.full(self.shape, 1 / self.shape[-1], np.float32)

    Tensor.__module__ = "torch"
    x, v = (a.view(Tensor) for a in make(1, 2, 4, 3))
    np.testing.assert_allclose(softmax_matmul.plain(x, v)[0, 0], v[0].mean(axis=0), rtol=1e-5)


def test_without_a_gpu_it_says_what_is_missing(monkeypatch):
    from flashsim.backends import failures

    def missing(backend):
        raise errors.BackendUnavailable(f"backend={backend!r} needs CuPy")

    monkeypatch.setattr(failures, "require_cupy", missing)
    with pytest.raises(errors.BackendUnavailable, match="needs CuPy"):
        softmax_matmul.run(*make(1, 2, 2, 2), backend="cupy")
