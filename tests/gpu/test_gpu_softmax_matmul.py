"""softmax(X) V on a GPU: values against float64, bytes the simulator's, every library's arrays."""

import cupy
import numpy as np
import pytest
from cupy_checks import MARKS, poisoned  # noqa: F401

from flashsim import DTypeError, softmax_matmul
from flashsim.errors import TilingError

pytestmark = [*MARKS, pytest.mark.promise("three counts equal", "twice plain attention's error")]


def make(batch, d1, d2, d3, scale=1.0):
    rng = np.random.default_rng(0)
    x = (scale * rng.standard_normal((batch, d1, d2))).astype(np.float32)
    return x, rng.standard_normal((batch, d2, d3)).astype(np.float32)


def exact(x, v):
    S = x.astype(np.float64)
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    return P / P.sum(axis=-1, keepdims=True) @ v


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1), (2, 37, 45, 40), (3, 130, 257, 100), (2, 64, 64, 512), (16, 256, 512, 64)],
)
def test_values_and_bytes(sizes, block):
    x, v = make(*sizes, scale=4.0)
    result = softmax_matmul.run(x, v, block=block, backend="cupy")
    np.testing.assert_allclose(result.out, exact(x, v), atol=1e-5)
    assert dict(result.moved) == dict(softmax_matmul.count(*sizes, block=block).moved)
    again = softmax_matmul.run(x, v, block=block, backend="cupy", trace=False)
    np.testing.assert_array_equal(again.out, result.out)


def test_the_courses_own_size():
    x, v = make(16, 2048, 8192, 512)
    out = softmax_matmul.run(cupy.asarray(x), cupy.asarray(v), backend="cupy", trace=False).out
    assert isinstance(out, cupy.ndarray)
    np.testing.assert_allclose(out[3, :64].get(), exact(x[3:4, :64], v[3:4])[0], atol=1e-5)


def test_minus_infinity():
    x, v = make(1, 20, 100, 24)
    x[0, 0, :70] = -np.inf
    x[0, 1] = -np.inf
    out = softmax_matmul.run(x, v, block=32, backend="cupy").out
    assert np.isnan(out[0, 1]).all()
    rest = [n for n in range(20) if n != 1]
    np.testing.assert_allclose(out[0, rest], exact(x[:, rest], v)[0], atol=1e-5)


def test_torch_tensors_come_back_as_such():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    x, v = (torch.from_numpy(a).cuda() for a in make(2, 50, 70, 33))
    out = softmax_matmul.run(x, v, block=16, backend="cupy").out
    torch.testing.assert_close(out, softmax_matmul.plain(x, v), atol=1e-5, rtol=1e-5)


def test_what_it_has_no_kernel_for():
    with pytest.raises(TilingError, match="one of 16, 32, 64, got 8 x 8"):
        softmax_matmul.run(*make(1, 4, 4, 4), block=8, backend="cupy")
    x, v = make(1, 4, 4, 4)
    with pytest.raises(DTypeError, match="all arrays must be on one device"):
        softmax_matmul.run(cupy.asarray(x), v, block=16, backend="cupy")
