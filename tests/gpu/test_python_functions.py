"""Functions and other options in the Python kernels of a Hopper GPU; test_functions.py has more."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from compiled import thorough  # noqa: E402
from cupy_checks import ON_HOPPER, gradients, make  # noqa: E402
from function_cases import causal  # noqa: E402

import flashsim  # noqa: E402
from flashsim import Problem  # noqa: E402

pytest.importorskip("numba_cuda")

#: torch's, at the first matrix product of a thread.
_FIRST = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
pytestmark = [*ON_HOPPER, _FIRST, pytest.mark.promise("twice plain attention's error")]
HOPPER = {"backend": "numba_cuda", "kernel": "hopper"}


@pytest.mark.parametrize("window", [None, (70, 0), (30, 20)])
@pytest.mark.parametrize("d", [64, thorough(128)])
def test_named_masks_and_packed_sequences(window, d):
    """With a score function of positions, which begin at 0 in each sequence; with a softcap."""
    ends_q, ends_k = (0, 0, 131, 200, 430), (0, 50, 181, 250, 430)
    p = Problem(
        *(430, 430, d),
        **{"heads": 4, "kv_heads": 2, "dtype": "bfloat16", "window": window, "softcap": 20.0},
        **{"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k},
    )
    slopes = np.repeat(np.array([[0.1], [0.02], [0.3], [0.05]], np.float32), 230, axis=1)

    def score(s, b, h, q, k):
        return s + slopes[h, q] * (k - q) + s * q / 200

    def mask(b, h, q, k):
        return (q + k) % 5 != 0

    given = {
        **{"score_mod": score, "mask_mod": mask, "window": window, "softcap": 20.0},
        **{"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k},
    }
    x = make(p)
    inputs = [x[name] for name in "qkv"]
    exact = flashsim.run(*(np.asarray(y, np.float64) for y in inputs), **given, backend="numba")
    wide = exact.backward(np.asarray(x["dout"], np.float64), captured=("slopes",))
    portable = flashsim.run(*inputs, **given, backend="cupy", kernel="portable")
    rough = portable.backward(x["dout"], captured=("slopes",))
    mine = flashsim.run(*inputs, **given, **HOPPER)
    threes = {"out": (mine.out, portable.out, exact.out)}
    for form in (None, True):  # three passes, and one fused pass
        got = gradients(mine, x["dout"], form, captured=("slopes",))
        for name in ("dq", "dk", "dv"):
            threes[name, form] = tuple(getattr(g, name) for g in (got, rough, wide))
        threes["slopes", form] = tuple(g.captured["slopes"] for g in (got, rough, wide))
    for name, three in threes.items():
        got, other, true = (np.asarray(y, np.float64) for y in three)
        # Rounding errors of long sums cancel by chance, so a largest error says little.
        size = np.linalg.norm if "slopes" in name else partial(np.linalg.norm, ord=np.inf)
        error, budget = (size((y - true).ravel()) for y in (got, other))
        assert error <= 2 * budget + 1e-3, (name, error, budget)


@pytest.mark.parametrize("kernel", ["auto", "tensor"])
def test_a_bias(kernel):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(1, 4, 200, 200, device="cuda", dtype=torch.bfloat16)
    results = []
    for how in ({"backend": "cupy"}, {"backend": "numba_cuda", "kernel": kernel}):
        result = flashsim.run(q, k, v, bias=bias, **how)
        back = result.backward(q)
        results.append((result.out, back.dq, back.dk, back.dv, back.dbias))
    assert result.kernel == ("tensor" if kernel == "tensor" else "hopper")
    for mine, other in zip(*results, strict=True):
        assert torch.allclose(mine.float(), other.float(), rtol=0.05, atol=0.05)


def test_the_choice_of_kernels():
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    result = flashsim.run(q, k, v, mask_mod=causal, backend="numba_cuda")
    assert result.kernel == result.backward(q).kernel == "hopper"
