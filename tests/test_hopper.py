"""The Hopper kernels on a GPU: against the float64 oracle, the closed-form counts, and themselves.

What `test_cupy.py` asks of the portable kernels, at the Hopper kernels' tiles. Races hide, and the
sanitizer sees no asynchronous copies: so results are compared bit by bit over many runs, and shared
memory is filled with NaN in between.
"""

from dataclasses import replace

import numpy as np
import pytest
from cupy_checks import poison_outputs

import flashsim
from flashsim import Device, Problem, Tiling, oracle
from flashsim.errors import UnsupportedError
from flashsim.events import PHASES, ROLES
from flashsim.problem import BlockMask, numpy_dtype

cupy = pytest.importorskip("cupy")


def hoppers():
    try:
        return cupy.cuda.runtime.getDeviceProperties(0)["major"] == 9
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hoppers(), reason="no Hopper GPU")]

#: A device without the limit of `sram_bytes`, which does not know of Hopper's registers.
ROOMY = replace(Device.get("H100"), name="roomy", sram_bytes=1 << 24)
RNG = np.random.default_rng(0)
FEATURES = {
    "one tile": dict(n_q=128, n_kv=128),
    "1 x 1": dict(n_q=1, n_kv=1),
    "ragged": dict(n_q=333, n_kv=517, batch=2, heads=2),
    "causal": dict(n_q=700, n_kv=700, heads=4, kv_heads=2, causal=True),
    "more queries": dict(n_q=700, n_kv=300, heads=4, kv_heads=1, causal=True),
    "more keys": dict(n_q=300, n_kv=1111, heads=2, causal=True),
    "window": dict(n_q=900, n_kv=1000, heads=3, window=(100, 50)),
    "left window": dict(n_q=600, n_kv=500, heads=2, window=(77, -1), causal=True),
    "softcap": dict(n_q=300, n_kv=500, heads=2, softcap=3.0, causal=True),
    "negative scale": dict(n_q=300, n_kv=200, heads=2, scale=-0.2),
    "blocks": dict(
        n_q=640, n_kv=768, heads=2, block_mask=BlockMask(RNG.random((5, 6)) < 0.4, 128, 128)
    ),
    "varlen": dict(
        n_q=700,
        n_kv=900,
        heads=2,
        kv_heads=1,
        causal=True,
        cu_seqlens_q=(0, 100, 101, 400, 700),
        cu_seqlens_k=(0, 300, 300, 643, 900),
    ),
    "many items": dict(n_q=200, n_kv=200, batch=8, heads=40, causal=True),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every output starts as NaN (all bits set), and so does shared memory."""
    poison_outputs(monkeypatch)
    poison_shared_memory()


def poison_shared_memory():
    kernel = cupy.RawKernel(
        'extern "C" __global__ void poison(int n) { extern __shared__ int s[];'
        " for (int i = threadIdx.x; i < n; i += blockDim.x) ((volatile int*)s)[i] = -1; }",
        "poison",
    )
    kernel.max_dynamic_shared_size_bytes = 227 * 1024
    kernel((1056,), (256,), (np.int32(227 * 256),), shared_mem=227 * 1024)


def make(p, kind="normal"):
    """q, k, v and dout; scores rise or fall along the keys, or a few are huge."""
    rng = np.random.default_rng(1)
    shapes = {
        "q": (p.batch, p.heads, p.n_q, p.head_dim),
        "k": (p.batch, p.kv_heads, p.n_kv, p.head_dim),
        "v": (p.batch, p.kv_heads, p.n_kv, p.head_dim_v),
        "dout": (p.batch, p.heads, p.n_q, p.head_dim_v),
    }
    x = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if kind in ("rising", "falling"):
        slope = np.linspace(-2, 2, p.n_kv)[:, None] * (1 if kind == "rising" else -1)
        x["q"], x["k"] = np.abs(x["q"]), 0.1 * x["k"] + slope
    if kind == "outliers":
        x["k"] *= np.where(rng.random(shapes["k"][:-1]) < 0.02, 8, 1)[..., None]
    return {name: array.astype(numpy_dtype(p.dtype)) for name, array in x.items()}


def run(p, x, **more):
    names = ("causal", "window", "softcap", "scale", "block_mask", "cu_seqlens_q", "cu_seqlens_k")
    given = {name: getattr(p, name) for name in names} | {"kernel": "hopper"}
    return flashsim.run(x["q"], x["k"], x["v"], backend="cupy", **{**given, **more})


def within(got, exact, plain, p, name):
    """Twice plain attention's error in the same type, one rounding, and float32 sums' own."""
    u = {"float16": 2**-11, "bfloat16": 2**-8}[p.dtype]
    sums = 2**-24 * (p.n_kv + p.n_q + p.head_dim) * p.group
    budget = 2 * np.abs(plain - exact).max() + (u + sums) * max(np.abs(exact).max(), 1)
    error = np.abs(got.astype(np.float64) - exact).max()
    assert error <= budget, name


def check(p, kind="normal", **more):
    x = make(p, kind)
    given = (x["q"], x["k"], x["v"])
    exact, lse = oracle.attention(*given, p)
    plain, _ = oracle.attention(*given, p, dtype=p.dtype)
    result = run(p, x, **more)
    assert result.kernel == "hopper"
    within(result.out, exact, plain, p, "out")
    np.testing.assert_allclose(result.lse, lse, rtol=2e-6, atol=2e-5)
    exact = oracle.gradients(*given, x["dout"], p)
    plain = oracle.gradients(*given, x["dout"], p, dtype=p.dtype)
    for deterministic in (None, True, False):  # three passes, dQ in a fixed order, in any order
        grads = result.backward(x["dout"], deterministic=deterministic)
        assert grads.kernel == "hopper"
        for name in ("dq", "dk", "dv"):
            within(getattr(grads, name), exact[name], plain[name], p, (name, deterministic))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, head_dim):
    check(Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "head_dims", [(40, 40), (64, 128), (80, 80), (96, 96), (192, 128), (136, 200)]
)
def test_head_dims(head_dims, dtype):
    check(Problem(300, 500, *head_dims, heads=2, dtype=dtype, causal=True))


@pytest.mark.parametrize("kind", ["rising", "falling", "outliers"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kinds_of_scores(head_dim, kind):
    check(Problem(333, 517, head_dim, heads=2, dtype="bfloat16"), kind)


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("head_dim", [96, 200])
@pytest.mark.parametrize("name", FEATURES)
def test_counts_are_the_closed_forms(name, head_dim, order):
    check_counts(Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name]), order)


@pytest.mark.parametrize("head_dims", [(37, 61), (101, 75), (203, 133)])
def test_counts_leave_out_what_rows_are_padded_with(head_dims):
    check_counts(Problem(333, 517, *head_dims, heads=2, dtype="bfloat16", causal=True))


def check_counts(p, order="ascending"):
    x = make(p)
    for algorithm in ("flash2", "flash2-fused"):
        result = run(p, x, algorithm=algorithm, key_order=order, trace=True)
        for trace in (result.trace, result.backward(x["dout"]).trace):
            expected = flashsim.count(
                p,
                algorithm=algorithm,
                direction=trace.direction,
                tiling=trace.tiling,
                key_order=order,
                device=ROOMY,
            )
            for op in ("load", "store", "reduce"):
                assert trace.bytes(op) == expected.bytes(op), (algorithm, trace.direction, op)


def test_timeline_has_every_visit_in_order():
    p = Problem(700, 700, 128, heads=4, dtype="bfloat16", causal=True)
    x = make(p)
    result = run(p, x, trace="timeline")
    traces = [result.trace]
    for deterministic in (True, False):
        traces.append(result.backward(x["dout"], deterministic=deterministic).trace)
    for trace in traces:
        stages = [n for n, s in enumerate(trace.stages) if s.name not in ("delta", "convert")]
        assert set(trace.timeline["stage"]) == set(stages)
        for stage in stages:
            spans = trace.timeline[trace.timeline["stage"] == stage]
            assert {ROLES[r] for r in spans["role"]} == {"producer", "consumer 0", "consumer 1"}
            for role in set(spans["role"]):
                check_spans(trace, stage, spans[spans["role"] == role], ROLES[role])


def check_spans(trace, stage, spans, role):
    """One role's spans of a stage: every visit once, each phase inside its visit."""
    visits = spans[spans["phase"] == PHASES.index("visit")]
    ordered = trace.stages[stage].schedule.sums.visits
    assert len(visits) == trace.problem.batch * trace.problem.heads * ordered
    assert (visits["end_ns"] > visits["start_ns"]).all()
    phases = ("load",) if role == "producer" else ("load", "scores", "softmax", "output")
    for phase in phases:
        part = spans[spans["phase"] == PHASES.index(phase)]
        assert len(part) == len(visits)
        assert (part["start_ns"] >= visits["start_ns"]).all()
        assert (part["end_ns"] <= visits["end_ns"]).all()
    stores = spans["phase"] == PHASES.index("store")
    assert stores.any() == (role != "producer")


def test_a_producer_runs_ahead_of_its_consumers():
    p = Problem(2048, 2048, 128, heads=16, dtype="bfloat16")
    spans = run(p, make(p), trace="timeline").trace.timeline
    visits = spans[spans["phase"] == PHASES.index("visit")]
    order = np.lexsort((visits["visit"], visits["head"], visits["role"]))
    producer, *consumers = np.split(visits[order], 3)
    for consumer in consumers:
        assert (producer["visit"] == consumer["visit"]).all()
        assert (producer["start_ns"] <= consumer["start_ns"]).mean() > 0.99
        assert (producer["end_ns"] < consumer["end_ns"]).all()


def test_a_packed_sequence_never_meets_its_neighbours():
    """Copies end where a sequence does: NaN beyond would reach an output as 0 x NaN."""
    ends = (0, 100, 163, 400)
    p = Problem(400, 400, 64, dtype="bfloat16", causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends)
    x = make(p)
    clean = run(p, x)
    kept = {fused: clean.backward(x["dout"], deterministic=not fused) for fused in (False, True)}
    for array in x.values():
        array[..., 100:163, :] = np.nan
    result = run(p, x)
    rest = np.r_[0:100, 163:400]
    assert (result.out[..., rest, :] == clean.out[..., rest, :]).all()
    for fused, expected in kept.items():
        grads = result.backward(x["dout"], deterministic=not fused)
        for name in ("dq", "dk", "dv"):
            got, want = (getattr(g, name)[..., rest, :] for g in (grads, expected))
            if fused and name == "dq":  # reduced in any order
                assert np.isfinite(got.astype(np.float32)).all()
            else:
                assert (got == want).all(), (name, fused)


def test_traces_of_packed_sequences_are_hoppers():
    p = Problem(head_dim=64, dtype="bfloat16", **FEATURES["varlen"])
    x = make(p)
    result = run(p, x, kernel="auto", trace=True)
    grads = result.backward(x["dout"])
    assert result.kernel == grads.kernel == "hopper"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("n", [1024, 4096])
def test_two_hundred_runs_give_the_same_bits(n, head_dim, causal):
    p = Problem(n, n, head_dim, heads=4, dtype="float16", causal=causal)
    x = {name: cupy.asarray(array) for name, array in make(p).items()}
    first = run(p, x)
    forms = (None, True, False)  # three passes, dQ in a fixed order, in any order
    expected = {form: first.backward(x["dout"], deterministic=form) for form in forms}
    for repeat in range(200):
        if repeat % 20 == 0:
            poison_shared_memory()
        again = run(p, x)
        assert (again.out.view(cupy.uint16) == first.out.view(cupy.uint16)).all()
        for form in forms:
            grads = again.backward(x["dout"], deterministic=form)
            for name in ("dq", "dk", "dv") if form is not False else ("dk", "dv"):
                same = getattr(grads, name) == getattr(expected[form], name)
                assert same.all(), (form, name, repeat)


def test_auto_takes_what_runs():
    p = Problem(256, 256, 64, dtype="bfloat16")
    x = make(p)
    assert run(p, x, kernel="auto").kernel == "hopper"
    assert run(p, x, kernel="auto", tiling=Tiling(64, 64)).kernel == "portable"
    assert run(p, x, kernel="portable").kernel == "portable"
    q = x["q"].astype(np.float32)
    assert flashsim.run(q, q, q, backend="cupy").kernel == "portable"
    with pytest.raises(UnsupportedError, match="64 x 64"):
        run(p, x, tiling=Tiling(64, 64))
    large = Problem(256, 256, 192, dtype="bfloat16")
    result = run(large, make(large), kernel="auto")
    assert result.kernel == result.backward(make(large)["dout"]).kernel == "hopper"


def test_views_are_read_where_they_lie():
    p = Problem(300, 300, 64, heads=4, dtype="float16", causal=True)
    x = make(p)
    expected = run(p, x).out
    moved = {k: cupy.asarray(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for k, a in x.items()}
    assert not moved["q"].flags.c_contiguous
    assert (run(p, moved).out.get() == expected).all()
