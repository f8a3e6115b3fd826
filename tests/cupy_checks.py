"""What the tests of the CUDA C++ kernels on a GPU share: problems, inputs, the oracle's judgement.

Outputs are filled with NaN before every kernel, so what is not written shows.
"""

import numpy as np
import pytest

import flashsim
from flashsim import Tiling, oracle
from flashsim.problem import BlockMask, numpy_dtype

cupy = pytest.importorskip("cupy")


def gpus():
    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


MARKS = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="no NVIDIA GPU")]
#: Everything a mask or a shape can be, small enough for the simulator.
FEATURES = {
    "gqa": dict(n_q=113, n_kv=203, heads=4, kv_heads=2, causal=True),
    "mqa": dict(n_q=97, n_kv=61, heads=3, kv_heads=1),
    "batch": dict(n_q=65, n_kv=127, batch=3, heads=2, causal=True),
    "window": dict(n_q=203, n_kv=150, heads=2, window=(40, 7)),
    "left window": dict(n_q=150, n_kv=203, heads=2, window=(17, -1)),
    "causal window": dict(n_q=203, n_kv=203, heads=2, window=(33, 0), causal=True),
    "softcap": dict(n_q=113, n_kv=90, heads=2, softcap=2.0, causal=True),
    "negative scale": dict(n_q=70, n_kv=70, heads=2, scale=-0.2),
    "varlen": dict(
        n_q=200,
        n_kv=230,
        heads=2,
        causal=True,
        cu_seqlens_q=(0, 30, 30, 131, 200),
        cu_seqlens_k=(0, 50, 81, 81, 230),
    ),
    "no keys": dict(n_q=150, n_kv=40, heads=2, causal=True),
    "blocks": dict(
        n_q=192,
        n_kv=256,
        heads=2,
        causal=True,
        block_mask=BlockMask(np.array([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]], bool), 64, 64),
    ),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every output starts as NaN (all bits set)."""
    poison_outputs(monkeypatch)


def poison_outputs(monkeypatch):
    from flashsim.backends import arrays

    for space in (arrays.CupySpace, arrays.NumpySpace):
        empty = space.empty

        def filled(self, shape, like=None, empty=empty):
            made = empty(self, shape, like)
            made.view(cupy.uint8).fill(0xFF)
            return made

        monkeypatch.setattr(space, "empty", filled)


def make(problem, seed=0, kind="normal"):
    """q, k, v and dout; scores rise or fall along the keys, or a few are huge ("outliers")."""
    p, rng = problem, np.random.default_rng(seed)
    shapes = {
        "q": (p.batch, p.heads, p.n_q, p.head_dim),
        "k": (p.batch, p.kv_heads, p.n_kv, p.head_dim),
        "v": (p.batch, p.kv_heads, p.n_kv, p.head_dim_v),
        "dout": (p.batch, p.heads, p.n_q, p.head_dim_v),
    }
    x = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if kind in ("rising", "falling"):
        slope = np.linspace(-2, 2, p.n_kv)[:, None] * (1 if kind == "rising" else -1)
        x["q"] = np.abs(x["q"])
        x["k"] = 0.1 * x["k"] + slope
    if kind == "outliers":
        x["k"] *= np.where(rng.random(shapes["k"][:-1]) < 0.02, 8, 1)[..., None]
    return {name: array.astype(numpy_dtype(p.dtype)) for name, array in x.items()}


def options(problem):
    names = ("causal", "window", "softcap", "scale", "block_mask", "cu_seqlens_q", "cu_seqlens_k")
    return {name: getattr(problem, name) for name in names}


def budget(exact, plain, problem):
    """Twice plain attention's error in the same type, one rounding, and float32 sums' own."""
    # With tf32, `plain` has rounded operands; results are float32.
    u = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24}[problem.dtype]
    size = np.abs(exact).max()
    sums = 2**-24 * (problem.n_kv + problem.n_q + problem.head_dim) * problem.group
    return 2 * np.abs(plain - exact).max() + (u + sums) * max(size, 1)


def check_lse(got, exact, plain):
    """Log-sum-exps, of which `plain` are those of rounded operands. A row that sees no key has -inf
    in all three, of which there are no differences to take.
    """
    seen = np.isfinite(exact)
    np.testing.assert_array_equal(got[~seen], exact[~seen])
    off = 2 * np.abs(plain[seen] - exact[seen]).max(initial=0)
    np.testing.assert_allclose(got[seen], exact[seen], rtol=2e-6, atol=2e-5 + off)


def check(problem, tiling=None, backward_tiling=None, kind="normal", backward=True, tf32=False):
    p, x = problem, make(problem, kind=kind)
    given = (x["q"], x["k"], x["v"])
    exact, lse = oracle.attention(*given, p)
    kind = "tf32" if tf32 else p.dtype
    rounded = {name: oracle.tf32(a) if tf32 else a for name, a in x.items()}
    coarse = (rounded["q"], rounded["k"], rounded["v"])
    plain, plain_lse = oracle.attention(*coarse, p, dtype=kind)
    result = flashsim.run(
        *given, backend="cupy", kernel="portable", tiling=tiling, allow_tf32=tf32, **options(p)
    )
    assert result.out.dtype == numpy_dtype(p.dtype)
    assert result.lse.dtype == np.float32
    assert result.kernel == ("portable, tf32" if tf32 else "portable")
    error = np.abs(result.out.astype(np.float64) - exact).max()
    assert error <= budget(exact, plain, p)
    check_lse(result.lse, lse, plain_lse if tf32 else lse)
    if not backward:
        return
    exact = oracle.gradients(*given, x["dout"], p)
    plain = oracle.gradients(*coarse, rounded["dout"], p, dtype=kind)
    for deterministic in (True, False):
        grads = result.backward(x["dout"], deterministic=deterministic, tiling=backward_tiling)
        for name in ("dq", "dk", "dv"):
            got = getattr(grads, name).astype(np.float64)
            error = np.abs(got - exact[name]).max()
            assert error <= budget(exact[name], plain[name], p), (name, deterministic)


def check_counts(problem, backend, algorithm, key_order, **extra):
    """What a backend counts, forward and backward, is what the simulator counts, visit by visit."""
    x = make(problem)
    traces = []
    for name, more in (("numpy", {}), (backend, extra)):
        result = flashsim.run(
            *(x["q"], x["k"], x["v"]),
            backend=name,
            algorithm=algorithm,
            tiling=Tiling(32, 64),
            key_order=key_order,
            trace=True,
            **more,
            **options(problem),
        )
        traces.append([result.trace, result.backward(x["dout"], tiling=Tiling(64, 32)).trace])
    for simulated, counted in zip(*traces, strict=True):
        assert counted.diff(simulated) == {}
        assert counted.same_events(simulated)
        assert counted.transfers == counted.predicted().transfers
