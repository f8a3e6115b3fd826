"""backend="numba_cuda" on a GPU, as tests/test_cupy.py asks of the CUDA C++ kernels.

Its inputs, error budget and list of features are used here; outputs begin as NaN, too.
"""

import numpy as np
import pytest
import test_cupy
from cupy_checks import (  # noqa: F401
    FEATURES,
    budget,
    check_counts,
    cupy,
    gpus,
    make,
    options,
    poisoned,
)

import flashsim
from flashsim import Problem, Tiling, oracle
from flashsim.errors import BackendUnavailable
from flashsim.events import PHASES
from flashsim.problem import numpy_dtype

try:
    import flashsim.backends.numba_gpu.engine
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="no NVIDIA GPU")]


def check(problem, tiling=None, backward_tiling=None, kind="normal"):
    p, x = problem, make(problem, kind=kind)
    given = (x["q"], x["k"], x["v"])
    exact, lse = oracle.attention(*given, p)
    plain, _ = oracle.attention(*given, p, dtype=p.dtype)
    result = flashsim.run(
        *given, backend="numba_cuda", kernel="tensor", tiling=tiling, **options(p)
    )
    assert result.out.dtype == numpy_dtype(p.dtype)
    assert result.kernel == "tensor"
    assert np.abs(result.out.astype(np.float64) - exact).max() <= budget(exact, plain, p)
    np.testing.assert_allclose(result.lse, lse, rtol=2e-6, atol=2e-5)
    exact = oracle.gradients(*given, x["dout"], p)
    plain = oracle.gradients(*given, x["dout"], p, dtype=p.dtype)
    for deterministic in (True, False):
        grads = result.backward(x["dout"], deterministic=deterministic, tiling=backward_tiling)
        for name in ("dq", "dk", "dv"):
            error = np.abs(getattr(grads, name).astype(np.float64) - exact[name]).max()
            assert error <= budget(exact[name], plain[name], p), (name, deterministic)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", test_cupy.SHAPES)
def test_shapes(shape, head_dim, causal):
    check(Problem(*shape, head_dim, heads=2, dtype="bfloat16", causal=causal))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [32, 40, 80, 96, 160, 256])
def test_head_dims(head_dim, dtype):
    p = Problem(113, 203, head_dim, heads=4, kv_heads=2, dtype=dtype, causal=True)
    check(p, kind="outliers")


@pytest.mark.parametrize("sides", [(64, 128), (128, 40), (37, 5)])
def test_value_dims_and_padding(sides):
    check(Problem(97, 129, *sides, heads=2, dtype="bfloat16", causal=True))


@pytest.mark.parametrize("name", FEATURES)
def test_features(name):
    check(Problem(head_dim=64, dtype="float16", **FEATURES[name]))


@pytest.mark.parametrize("kind", ["rising", "falling", "outliers"])
def test_kinds_of_scores(kind):
    check(Problem(300, 700, 64, heads=2, dtype="bfloat16"), kind=kind)


@pytest.mark.parametrize("sides", [(16, 16), (48, 16), (96, 48), (128, 128), (16, 128)])
def test_the_tiling_given_is_the_one_that_runs(sides):
    p, tiling = Problem(150, 201, 64, heads=2, dtype="bfloat16", causal=True), Tiling(*sides)
    check(p, tiling, Tiling(*(min(side, 64) for side in sides)))
    x = make(p)
    given = (x["q"], x["k"], x["v"])
    result = flashsim.run(*given, backend="numba_cuda", tiling=tiling, causal=True, trace=True)
    assert result.trace.tiling == tiling


@pytest.mark.parametrize("key_order", ["ascending", "descending"])
@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("sides", [(40, 24), (64, 64)])  # padded rows; rows as wide as a tile's
def test_counted_bytes_are_the_simulators(sides, name, algorithm, key_order):
    head_dim, head_dim_v = sides
    p = Problem(head_dim=head_dim, head_dim_v=head_dim_v, dtype="bfloat16", **FEATURES[name])
    check_counts(p, "numba_cuda", algorithm, key_order)


def test_two_hundred_runs_give_the_same_bits():
    p = Problem(300, 400, 64, heads=3, dtype="float16", causal=True)
    x = {name: cupy.asarray(a) for name, a in make(p).items()}
    first = None
    for _ in range(200):
        result = flashsim.run(
            *(x["q"], x["k"], x["v"]), backend="numba_cuda", kernel="tensor", causal=True
        )
        grads = result.backward(x["dout"], deterministic=True)
        got = [a.view("i2") for a in (result.out, grads.dq, grads.dk, grads.dv)]
        first = first or got
        assert all(bool((a == b).all()) for a, b in zip(got, first, strict=True))


@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
def test_timeline_covers_every_visit_of_every_head(algorithm):
    p = Problem(1000, 1000, 64, heads=8, dtype="bfloat16", causal=True)
    x = make(p)
    result = flashsim.run(
        *(x["q"], x["k"], x["v"]),
        backend="numba_cuda",
        kernel="tensor",
        algorithm=algorithm,
        causal=True,
        trace="timeline",
    )
    for trace in (result.trace, result.backward(x["dout"]).trace):
        spans = trace.timeline
        assert (spans["end_ns"] >= spans["start_ns"]).all()
        assert 0 < spans["end_ns"].max() < 100_000_000
        for number in np.unique(spans["stage"]):
            visits = (spans["stage"] == number) & (spans["phase"] == PHASES.index("visit"))
            assert visits.sum() == p.heads * trace.stages[number].schedule.n_visits


def test_torch_tensors_come_back_as_torch_with_the_same_values():
    torch = pytest.importorskip("torch")
    p = Problem(100, 120, 64, batch=2, heads=2, dtype="float16", causal=True)
    x = make(p)
    host = flashsim.run(x["q"], x["k"], x["v"], backend="numba_cuda", causal=True)
    x = {name: torch.as_tensor(a, device="cuda") for name, a in x.items()}
    result = flashsim.run(x["q"], x["k"], x["v"], backend="numba_cuda", causal=True)
    assert isinstance(result.out, torch.Tensor)
    assert result.out.dtype == torch.float16
    np.testing.assert_array_equal(result.out.cpu().numpy(), host.out)


@pytest.mark.parametrize("library", ["numpy", "cupy", "torch"])
def test_teaching_kernels_give_back_what_they_were_given(library):
    p = Problem(70, 90, 32, heads=2, dtype="float32", causal=True)
    host = make(p)
    if library == "torch":
        torch = pytest.importorskip("torch")
        x = {name: torch.as_tensor(a, device="cuda") for name, a in host.items()}
    else:
        x = host if library == "numpy" else {name: cupy.asarray(a) for name, a in host.items()}
    result = flashsim.run(x["q"], x["k"], x["v"], backend="numba_cuda", causal=True)
    grads = result.backward(x["dout"])
    assert result.kernel == "teaching"
    exact = oracle.gradients(host["q"], host["k"], host["v"], host["dout"], p)
    for name in ("dq", "dk", "dv"):
        got = getattr(grads, name)
        assert type(got) is type(x["q"])
        got = got.cpu().numpy() if library == "torch" else cupy.asnumpy(got)
        np.testing.assert_allclose(got, exact[name], rtol=0, atol=1e-4)
