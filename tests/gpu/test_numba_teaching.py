"""The teaching kernels against the float64 oracle and the simulated memory's trace.

They run on a GPU, or in Numba's CUDA simulator if NUMBA_ENABLE_CUDASIM=1 was set when Python began
(test_numba_kernels.py sees to that). The simulator takes a thread of the operating system a
row, so shapes are small.
"""

import numpy as np
import pytest
from compiled import thorough
from function_fuzz import expected, found
from helpers import tensors

import flashsim
from flashsim import Problem, Tiling
from flashsim.errors import BackendUnavailable, UnsupportedError
from flashsim.problem import oracle
from flashsim.problem.masks import BlockMask

try:
    from flashsim.backends.numba_gpu import engine
    from flashsim.backends.numba_gpu.teaching import run as teaching_run
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


def can_run():
    from numba import cuda

    return teaching_run.simulated() or cuda.is_available()


pytestmark = [
    pytest.mark.skipif(not can_run(), reason="neither a GPU nor NUMBA_ENABLE_CUDASIM=1"),
    pytest.mark.promise("three counts equal", "twice plain attention's error"),
]
if not teaching_run.simulated():
    pytestmark.append(pytest.mark.gpu)

PROBLEMS = {
    "plain": Problem(9, 9, 6, 5, batch=2, heads=1),
    "one": Problem(1, 1, 4, heads=1),
    "causal gqa": Problem(9, 10, 4, heads=4, kv_heads=2, causal=True),
    "no keys": Problem(20, 9, 4, heads=1, causal=True),
    "window softcap": Problem(17, 19, 4, heads=1, window=(5, 2), softcap=1.5),
    "varlen": Problem(
        *(12, 17, 4), causal=True, cu_seqlens_q=(0, 3, 3, 12), cu_seqlens_k=(0, 5, 8, 17)
    ),
    "blocks": Problem(
        *(16, 24, 4),
        causal=True,
        block_mask=BlockMask(np.array([[1, 0, 1], [0, 1, 1]], bool), 8, 8),
    ),
}


CASES = [
    *(("one", "float32", "normal"), ("plain", "float32", "falling")),
    *(("causal gqa", "float16", "normal"), ("window softcap", "float16", "normal")),
    *(("varlen", "float32", "normal"), ("blocks", "float32", "normal")),
    *(thorough(name, "float32", "normal") for name in ("causal gqa", "no keys", "window softcap")),
    *(thorough("plain", "float32", kind) for kind in ("normal", "rising")),
    thorough("varlen", "float16", "normal"),
]


def test_backward_from_what_was_kept():
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 1, n, 4), np.float32) for n in (9, 12, 12, 9))
    asked = {"backend": "numba_cuda", "kernel": "teaching", "causal": True}
    result = flashsim.run(q, k, v, **asked)
    got = flashsim.backward(q, k, v, result.out, result.lse, dout, **asked)
    expected = result.backward(dout)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


@pytest.mark.parametrize(("name", "dtype", "kind"), CASES)
def test_kernels_agree_with_float64_and_count_what_the_simulator_counts(name, dtype, kind):
    p, rng = PROBLEMS[name], np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((p.batch, heads, n, d))
        for heads, n, d in (
            (p.heads, p.n_q, p.head_dim),
            (p.kv_heads, p.n_kv, p.head_dim),
            (p.kv_heads, p.n_kv, p.head_dim_v),
            (p.heads, p.n_q, p.head_dim_v),
        )
    )
    if kind != "normal":
        slope = np.linspace(-2, 2, p.n_kv)[:, None] * (1 if kind == "rising" else -1)
        q, k = np.abs(q), 0.1 * k + slope
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    names = ("causal", "window", "softcap", "scale", "block_mask", "cu_seqlens_q", "cu_seqlens_k")
    options = {option: getattr(p, option) for option in names}
    problem = Problem(
        *(p.n_q, p.n_kv, p.head_dim, p.head_dim_v),
        batch=p.batch,
        heads=p.heads,
        kv_heads=p.kv_heads,
        dtype=dtype,
        **options,
    )
    tiles = {"tiling": Tiling(8, 4)}
    runs = [
        flashsim.run(q, k, v, backend=backend, trace=True, **tiles, **options, **kernel)
        for backend, kernel in (("numba_cuda", {"kernel": "teaching"}), ("simulator", {}))
    ]
    exact, lse = oracle.attention(q, k, v, problem)
    # Scores of size 10 rounded to float32, then one rounding to the result's type.
    tolerance = 1e-5 if dtype == "float32" else 2**-10
    scale = max(1, np.abs(exact).max())
    np.testing.assert_allclose(runs[0].out, exact, rtol=0, atol=tolerance * scale)
    np.testing.assert_allclose(runs[0].lse, lse, rtol=1e-6, atol=1e-5)
    assert runs[0].kernel == "teaching"
    assert runs[0].out.dtype == dtype
    assert runs[0].trace.same_events(runs[1].trace)
    # The simulator is slow: both values of each there, and all four pairs on a GPU.
    forms = [(True, False), (False, True), (False, False), (True, True)]
    for deterministic, of_lse in forms[: 2 if teaching_run.simulated() else 4]:
        dlse = 3 * rng.standard_normal(lse.shape, np.float32) if of_lse else None
        exact = oracle.gradients(q, k, v, dout, problem, dlse=dlse)
        grads, simulated = (
            run.backward(dout, dlse=dlse, deterministic=deterministic, **tiles) for run in runs
        )
        for name in ("dq", "dk", "dv"):
            scale = max(1, np.abs(exact[name]).max())
            got = getattr(grads, name)
            np.testing.assert_allclose(got, exact[name], rtol=0, atol=2 * tolerance * scale)
        assert grads.trace.same_events(simulated.trace)


_RNG = np.random.default_rng(1)
SLOPES, TABLE = _RNG.standard_normal(4), _RNG.standard_normal((4, 32)).astype(np.float16)
DOCUMENTS, KEPT = np.sort(_RNG.integers(0, 3, 13)), _RNG.random(13) < 0.7


def score(s, b, h, q, k):
    return 3 * np.tanh((s + SLOPES[h] * (k - q) + TABLE[h, k - q]) / 3)


def mask(b, h, q, k):
    return ((DOCUMENTS[q] == DOCUMENTS[k]) | (k <= q)) & (KEPT[k] | (k < 3))


FUNCTIONS = {
    "all": {"score_mod": score, "mask_mod": mask, "sinks": _RNG.standard_normal(4)},
    "score": {"score_mod": score, "softcap": 2.0},
    "mask": {"mask_mod": mask, "causal": True},
}


@pytest.mark.parametrize("fused", [False, thorough(True)])
@pytest.mark.parametrize("name", ["all", thorough("score"), thorough("mask")])
def test_functions_and_sinks(name, fused):
    """Of two tiles each way, with gradients of captured arrays: float32's error, and no more. The
    trace is the simulator's."""
    how = FUNCTIONS[name] | {"tiling": Tiling(8, 8), "trace": True}
    x = tensors(11, 13, 4, heads=4, kv_heads=2)
    result = flashsim.run(x.q, x.k, x.v, backend="numba_cuda", kernel="teaching", **how)
    simulated = flashsim.run(x.q, x.k, x.v, **how)
    assert result.trace.same_events(simulated.trace)
    captured = () if result.problem.score_mod is None else ("SLOPES", "TABLE")
    given = {"captured": captured, "deterministic": not fused, "tiling": Tiling(8, 8)}
    gradients = result.backward(x.dout, **given)
    assert gradients.trace.same_events(simulated.backward(x.dout, **given).trace)
    none = np.zeros_like(result.lse)
    exact = expected(result, x.dout, none, captured, sinks=how.get("sinks"))
    got = found(result, gradients)
    assert got.keys() == exact.keys()
    for key, value in got.items():
        tolerance = 2e-3 if key == "d:TABLE" else 2e-5  # its type is float16
        np.testing.assert_allclose(value, exact[key], rtol=tolerance, atol=tolerance)


def test_what_functions_cannot_do_here():
    x = tensors(9, 9, 4, heads=1)
    given = {"backend": "numba_cuda", "kernel": "teaching", "mask_mod": lambda b, h, q, k: k <= q}
    with pytest.raises(UnsupportedError, match="cannot run packed sequences"):
        flashsim.run(x.q, x.k, x.v, cu_seqlens_q=(0, 9), cu_seqlens_k=(0, 9), **given)


def test_inputs_are_left_alone():
    x = [np.random.default_rng(n).standard_normal((1, 1, 9, 4)) for n in range(3)]
    x = [array.astype(np.float32) for array in x]
    before = [array.copy() for array in x]
    flashsim.run(*x, backend="numba_cuda", causal=True)
    for array, copy in zip(x, before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_the_default_tiling_fits():
    for head_dim in (1, 64, 128, 256):
        problem = Problem(64, 64, head_dim, dtype="float32")
        for direction in ("forward", "backward"):
            tiling = teaching_run.choose(problem, None, direction)
            need = teaching_run.shared_bytes(problem, tiling, direction)
            assert need <= teaching_run.SHARED_BYTES


def test_the_tensor_kernels_are_refused_in_the_simulator():
    if not teaching_run.simulated():
        pytest.skip("a GPU has tensor cores")
    x = [np.ones((1, 1, 4, 8), np.float16)] * 3
    with pytest.raises(engine.UnsupportedError, match=r"simulator .* has no tensor cores"):
        flashsim.run(*x, backend="numba_cuda", kernel="tensor")
