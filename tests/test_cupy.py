"""backend="cupy" on a GPU: against the float64 oracle, the simulator's trace, and itself.

Outputs are filled with NaN before every kernel, so what is not written shows.
"""

import numpy as np
import pytest

import flashsim
from flashsim import Problem, Tiling, oracle
from flashsim.errors import BackendUnavailable, DTypeError, TilingError, UnsupportedError
from flashsim.events import PHASES
from flashsim.problem import BlockMask, numpy_dtype

cupy = pytest.importorskip("cupy")


def gpus():
    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="no NVIDIA GPU")]

SHAPES = [
    *((1, 1), (1, 239), (3, 799), (64, 64), (97, 97), (113, 203), (128, 217), (127, 512)),
    *((256, 512), (512, 256), (1023, 1024), (1024, 1023), (2048, 2048)),
]
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
    u = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24}[problem.dtype]
    size = np.abs(exact).max()
    sums = 2**-24 * (problem.n_kv + problem.n_q + problem.head_dim) * problem.group
    return 2 * np.abs(plain - exact).max() + (u + sums) * max(size, 1)


def check(problem, tiling=None, backward_tiling=None, kind="normal", backward=True):
    p, x = problem, make(problem, kind=kind)
    given = (x["q"], x["k"], x["v"])
    exact, lse = oracle.attention(*given, p)
    plain, _ = oracle.attention(*given, p, dtype=p.dtype)
    result = flashsim.run(*given, backend="cupy", kernel="portable", tiling=tiling, **options(p))
    assert result.out.dtype == numpy_dtype(p.dtype)
    assert result.lse.dtype == np.float32
    assert result.kernel == "portable"
    error = np.abs(result.out.astype(np.float64) - exact).max()
    assert error <= budget(exact, plain, p)
    np.testing.assert_allclose(result.lse, lse, rtol=2e-6, atol=2e-5)
    if not backward:
        return
    exact = oracle.gradients(*given, x["dout"], p)
    plain = oracle.gradients(*given, x["dout"], p, dtype=p.dtype)
    for deterministic in (True, False):
        grads = result.backward(x["dout"], deterministic=deterministic, tiling=backward_tiling)
        for name in ("dq", "dk", "dv"):
            got = getattr(grads, name).astype(np.float64)
            error = np.abs(got - exact[name]).max()
            assert error <= budget(exact[name], plain[name], p), (name, deterministic)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, head_dim, causal):
    check(Problem(*shape, head_dim, heads=2, dtype="bfloat16", causal=causal))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
def test_head_dims(head_dim, dtype, heads):
    heads, kv_heads = heads
    check(
        Problem(113, 203, head_dim, heads=heads, kv_heads=kv_heads, dtype=dtype, causal=True),
        kind="outliers",
    )


@pytest.mark.parametrize("sides", [(64, 128), (128, 40), (192, 128), (37, 5)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_value_dims_and_padding(sides, dtype):
    check(Problem(97, 129, *sides, heads=2, dtype=dtype, causal=True))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, dtype):
    check(Problem(head_dim=64, dtype=dtype, **FEATURES[name]))


@pytest.mark.parametrize("kind", ["rising", "falling", "outliers"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kinds_of_scores(kind, dtype):
    check(Problem(300, 700, 64, heads=2, dtype=dtype), kind=kind)


@pytest.mark.parametrize(
    "tiling", [(16, 16), (32, 64), (48, 16), (64, 32), (96, 48), (128, 128), (128, 64), (16, 128)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_tiling_given_is_the_one_that_runs(tiling, dtype):
    p = Problem(150, 201, 64, heads=2, dtype=dtype, causal=True)
    # float32's backward tiles are twice as large: the largest is more than a block can have.
    check(p, Tiling(*tiling), Tiling(*(min(side, 64) for side in tiling)))
    x = make(p)
    result = flashsim.run(
        x["q"], x["k"], x["v"], backend="cupy", tiling=Tiling(*tiling), causal=True, trace=True
    )
    assert result.trace.tiling == Tiling(*tiling)


@pytest.mark.parametrize("key_order", ["ascending", "descending"])
@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("sides", [(40, 24), (64, 64)])  # padded rows; rows as wide as a tile's
def test_counted_bytes_are_the_simulators(sides, name, dtype, algorithm, key_order):
    head_dim, head_dim_v = sides
    p = Problem(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, **FEATURES[name])
    x = make(p)
    traces = []
    for backend in ("numpy", "cupy"):
        result = flashsim.run(
            *(x["q"], x["k"], x["v"]),
            backend=backend,
            algorithm=algorithm,
            tiling=Tiling(32, 64),
            key_order=key_order,
            trace=True,
            **options(p),
        )
        traces.append([result.trace, result.backward(x["dout"], tiling=Tiling(64, 32)).trace])
    for simulated, counted in zip(*traces, strict=True):
        assert counted.diff(simulated) == {}
        assert counted.same_events(simulated)
        assert counted.transfers == counted.predicted().transfers


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_hundred_runs_give_the_same_bits(dtype):
    p = Problem(300, 400, 64, heads=3, dtype=dtype, causal=True)
    x = {name: cupy.asarray(a.view(f"u{a.itemsize}")) for name, a in make(p).items()}
    if dtype == "bfloat16":
        torch = pytest.importorskip("torch")
        x = {name: torch.as_tensor(a.view("i2"), device="cuda") for name, a in x.items()}
        x = {name: a.view(torch.bfloat16) for name, a in x.items()}
        bits = lambda a: a.view(torch.int16)  # noqa: E731
    else:
        x = {name: a.view("f4") for name, a in x.items()}
        bits = lambda a: a.view("i4")  # noqa: E731
    first = None
    for _ in range(200):
        result = flashsim.run(x["q"], x["k"], x["v"], backend="cupy", causal=True)
        grads = result.backward(x["dout"], deterministic=True)
        got = [bits(a) for a in (result.out, grads.dq, grads.dk, grads.dv)]
        first = first or got
        assert all(bool((a == b).all()) for a, b in zip(got, first, strict=True))


@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_timeline_nests_and_lies_on_the_chip(dtype, algorithm):
    p = Problem(1000, 1000, 64, heads=8, dtype=dtype, causal=True)
    x = make(p)
    result = flashsim.run(
        *(x["q"], x["k"], x["v"]),
        backend="cupy",
        algorithm=algorithm,
        causal=True,
        trace="timeline",
    )
    grads = result.backward(x["dout"])
    sms = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    for trace in (result.trace, grads.trace):
        spans = trace.timeline
        assert spans["sm"].min() >= 0
        assert spans["sm"].max() < sms
        assert (spans["end_ns"] >= spans["start_ns"]).all()
        assert spans["end_ns"].max() < 100_000_000
        for number in np.unique(spans["stage"]):
            stage = spans[spans["stage"] == number]
            visits = stage[stage["phase"] == PHASES.index("visit")]
            assert len(visits) == p.heads * trace.stages[number].schedule.n_visits
            order = ["head", "visit"]
            visits = np.sort(visits, order=order)
            for phase in ("load", "scores", "softmax", "output"):
                part = np.sort(stage[stage["phase"] == PHASES.index(phase)], order=order)
                assert (part["start_ns"] >= visits["start_ns"]).all()
                assert (part["end_ns"] <= visits["end_ns"]).all()
                assert (part["end_ns"] - part["start_ns"]).sum() > 0


def test_torch_tensors_come_back_as_torch_without_a_copy_and_on_their_stream():
    torch = pytest.importorskip("torch")
    p = Problem(100, 120, 64, batch=2, heads=2, dtype="bfloat16", causal=True)
    x = make(p)
    host = flashsim.run(x["q"], x["k"], x["v"], backend="cupy", causal=True)
    on_gpu = {
        name: torch.as_tensor(a.astype(np.float32), device="cuda").to(torch.bfloat16)
        for name, a in x.items()
    }
    # (batch, n, heads, d) in memory, as most models hold it
    strided = {n: a.transpose(1, 2).contiguous().transpose(1, 2) for n, a in on_gpu.items()}
    assert not strided["q"].is_contiguous()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        before = torch.cuda.memory_allocated()
        result = flashsim.run(strided["q"], strided["k"], strided["v"], backend="cupy", causal=True)
        made = torch.cuda.memory_allocated() - before
        grads = result.backward(strided["dout"])
    stream.synchronize()
    assert isinstance(result.out, torch.Tensor)
    assert result.out.dtype == torch.bfloat16
    assert made < result.out.nbytes + result.lse.nbytes + 2048  # no copies of q, k or v
    np.testing.assert_array_equal(result.out.float().cpu().numpy(), host.out.astype(np.float32))
    again = host.backward(x["dout"])
    np.testing.assert_array_equal(grads.dk.float().cpu().numpy(), again.dk.astype(np.float32))


def test_cupy_arrays_come_back_as_cupy():
    p = Problem(64, 64, 32, heads=1, dtype="float16")
    x = {name: cupy.asarray(a) for name, a in make(p).items()}
    result = flashsim.run(x["q"][0, 0], x["k"][0, 0], x["v"][0, 0], backend="cupy")
    assert isinstance(result.out, cupy.ndarray)
    assert result.out.shape == (64, 32)
    assert result.lse.shape == (64,)
    assert result.backward(x["dout"][0, 0]).dv.dtype == np.float16


def test_unaligned_rows_are_copied_not_misread():
    p = Problem(50, 60, 32, heads=1, dtype="float16")
    x = make(p)
    wide = {n: cupy.zeros((*a.shape[:-1], 33), a.dtype) for n, a in x.items()}
    for name, array in wide.items():
        array[..., 1:] = cupy.asarray(x[name])
    result = flashsim.run(*(wide[n][..., 1:] for n in "qkv"), backend="cupy")
    expected = flashsim.run(x["q"], x["k"], x["v"], backend="cupy")
    np.testing.assert_array_equal(result.out.get(), expected.out)


def test_arrays_in_two_places_are_refused():
    x = make(Problem(8, 8, 16, dtype="float32"))
    with pytest.raises(DTypeError, match="all arrays must live in one place, got q cupy"):
        flashsim.run(cupy.asarray(x["q"]), x["k"], x["v"], backend="cupy")


def test_a_gradient_from_elsewhere_is_refused():
    x = make(Problem(8, 8, 16, dtype="float32"))
    result = flashsim.run(x["q"], x["k"], x["v"], backend="cupy")
    with pytest.raises(DTypeError, match="dout must live where q, k and v do, got cupy"):
        result.backward(cupy.asarray(x["dout"]))


def test_a_tiling_no_kernel_has_names_those_that_run():
    x = make(Problem(8, 8, 16, dtype="float16"))
    with pytest.raises(TilingError, match=r"a 24 x 64 tile .*possible: .*128 x 64"):
        flashsim.run(x["q"], x["k"], x["v"], backend="cupy", tiling=Tiling(24, 64))


def test_what_gpus_cannot_do_is_refused():
    x = make(Problem(64, 64, 16, dtype="float32"))
    given = (x["q"], x["k"], x["v"])
    with pytest.raises(UnsupportedError, match="no mask function"):
        flashsim.run(*given, backend="cupy", mask=lambda q, k: q >= k)
    with pytest.raises(UnsupportedError, match="not float64"):
        flashsim.run(*(a.astype(np.float64) for a in given), backend="cupy")
    with pytest.raises(UnsupportedError, match="not 'standard'"):
        flashsim.run(*given, backend="cupy", algorithm="standard")
    mask = BlockMask(np.ones((2, 2), bool), 48, 48)
    with pytest.raises(UnsupportedError, match="tiles must divide"):
        flashsim.run(*given, backend="cupy", block_mask=mask, tiling=Tiling(32, 32))


def test_out_of_memory_says_so(monkeypatch):
    x = make(Problem(64, 64, 16, dtype="float32"))

    def full(*_):
        raise cupy.cuda.memory.OutOfMemoryError(1, 2)

    monkeypatch.setattr(cupy, "empty", full)
    with pytest.raises(BackendUnavailable, match="out of GPU memory"):
        flashsim.run(x["q"], x["k"], x["v"], backend="cupy")
