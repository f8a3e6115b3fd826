"""Decoding on a GPU: values against the float64 oracle, equal bits each time, CUDA graphs, pages
that no sequence uses, bytes that the kernel counts.
"""

import cupy
import numpy as np
import pytest
from cupy_checks import MARKS, bits, poisoned  # noqa: F401
from decode_cases import Case, moved, simulated

import flashsim
from flashsim import Device, Problem
from flashsim.backends.cupy_gpu import arrays, decode, engine
from flashsim.backends.launch_policy import decode_plan as family
from flashsim.engines.protocol import Job
from flashsim.errors import OptionError, UnsupportedError
from flashsim.trace.events import PHASES

pytestmark = [*MARKS, pytest.mark.promise("twice plain attention's error")]


def run(case, x, **more):
    """Decode a case, of latent attention, too, whose values are part of the keys."""
    p = case.problem
    given = {name: getattr(p, name) for name in ("causal", "window", "softcap", "scale")}
    given |= {"algorithm": "flash-decode", "backend": "cupy", "cache_seqlens": case.lengths, **more}
    if case.page:
        given["block_table"] = x["table"]
    if p.latent:
        given["head_dim_v"] = p.head_dim_v
    return flashsim.run(x["q"], x["k"], x.get("v"), **given)


def check(case, **more):
    x = case.make()
    result = run(case, x, **more)
    assert result.kernel == "decode"
    case.check(x, result.out, result.lse)


def ragged(batch, n, n_q=1, d=64, dtype="bfloat16", heads=8, kv_heads=2, page=0, **more):
    """Live lengths from all of the room down to a few keys."""
    p = Problem(n_q, n, d, batch=batch, heads=heads, kv_heads=kv_heads, dtype=dtype, **more)
    lengths = tuple(max(n_q, n - b * (n // batch)) for b in range(batch))
    return Case(p, lengths, page)


@pytest.mark.parametrize("group", [1, 4, 8, 32])
@pytest.mark.parametrize("n_q", [1, 4, 17])
@pytest.mark.parametrize("splits", ["auto", 1, 5])
def test_heads_packed_with_queries(n_q, group, splits):
    check(ragged(3, 1500, n_q, heads=32, kv_heads=32 // group, causal=True), splits=splits)


@pytest.mark.parametrize(
    "head_dim", [(64, 64), (128, 128), (256, 256), (80, 48), (72, 37), (16, 160)]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widths(head_dim, dtype):
    d, dv = head_dim
    check(ragged(2, 3000, 2, d, dtype, head_dim_v=dv))


@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize("d", [64, 128, 80])
@pytest.mark.parametrize("splits", ["auto", 7])
def test_pages(page, d, splits):
    check(ragged(3, 2000, 4, d, page=page, causal=True), splits=splits)


@pytest.mark.parametrize(
    "more",
    [
        {"window": (300, 0)},
        {"window": (70, 3)},
        {"softcap": 5.0},
        {"scale": -0.1},
        {"causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("page", [0, 16])
def test_masks_and_scales(more, page):
    check(ragged(2, 1700, 4, page=page, **more))


@pytest.mark.parametrize(("batch", "n"), [(1, 131072), (8, 32768), (200, 700), (3, 1), (1, 17)])
def test_shapes(batch, n):
    check(ragged(batch, n, 1, 128, heads=8, kv_heads=1))


def test_no_keys_at_all():
    check(Case(Problem(1, 600, 64, batch=4, heads=4, dtype="float16"), (0, 600, 0, 1)))


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_arrays_on_the_gpu(library):
    case = ragged(2, 1000, 1, 128, "float16", page=16)
    x = case.make()
    if library == "cupy":
        given = {name: cupy.asarray(a) for name, a in x.items()}
        back = cupy.asnumpy
    else:
        torch = pytest.importorskip("torch")
        given = {name: torch.as_tensor(a, device="cuda") for name, a in x.items()}
        back = lambda a: a.cpu().numpy()  # noqa: E731
    result = run(case, given)
    case.check(x, back(result.out), back(result.lse))


def shared(batch, prefix, own, n_q=1, d=64, page=0, **more):
    """Sequences that begin with the same keys; their own are from `own` down to n_q."""
    given = {"heads": 8, "kv_heads": 2, "dtype": "bfloat16", **more}
    p = Problem(n_q, prefix + own, d, batch=batch, **given)
    lengths = tuple(prefix + max(n_q, own - b * (own // batch)) for b in range(batch))
    return Case(p, lengths, page, prefix)


@pytest.mark.parametrize("page", [0, 1, 16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("n_q", [1, 4])
@pytest.mark.parametrize("splits", ["auto", 1, 5])
def test_a_shared_prefix(splits, n_q, d, page):
    case = shared(5, 1600, 500, n_q, d, page, causal=n_q > 1)
    x = case.make()
    result = run(case, x, splits=splits, shared_prefix=case.prefix)
    case.check(x, result.out, result.lse)
    counted, launched = counted_bytes(case, splits)
    assert counted == simulated(launched, case)


def test_a_batch_that_shares_nearly_all():
    case = shared(40, 1008, 24, 1, 128, 16, heads=16, kv_heads=4)
    x = case.make()
    result = run(case, x, shared_prefix=case.prefix)
    case.check(x, result.out, result.lse)


@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("n_q", [1, 4, 9])
def test_clusters_merge_what_blocks_apart_do(n_q, d, splits, monkeypatch):
    case = ragged(2, 3000, n_q, d, causal=True)
    case = Case(case.problem, (3000, 2900))
    x = case.make()
    apart = family.plan.__wrapped__
    made = apart(case.problem, case.lengths, engine.gpu_of(0), splits)
    together = run(case, x, splits=splits)
    case.check(x, together.out, together.lse)
    if engine.gpu_of(0).compute_capability >= (9, 0):
        assert made.cluster == splits
    monkeypatch.setattr(family, "CLUSTERS", (1,))
    monkeypatch.setattr(family, "plan", apart)
    alone = run(case, x, splits=splits)
    case.check(x, alone.out, alone.lse)


@pytest.mark.parametrize("splits", [1, 4, 6])
@pytest.mark.parametrize("page", [0, 16])
def test_a_timeline_has_every_visit_and_the_merge(page, splits, tmp_path):
    case = ragged(2, 3000, 4, 128, page=page)
    trace = run(case, case.make(), splits=splits, trace="timeline").trace
    assert trace.diff(trace.predicted()) == {}
    spans = trace.timeline
    assert (spans["end_ns"] >= spans["start_ns"]).all()
    visits = spans[spans["phase"] == PHASES.index("visit")]
    assert len(visits) == trace.stages[0].repeat * trace.n_visits
    assert len({tuple(v) for v in visits[["head", "visit"]].tolist()}) == len(visits)
    merging = spans[spans["stage"] == 1]
    assert (len(merging) > 0) == (splits > 1)
    if splits > 1:
        for i in np.unique(merging["i"]):
            ours = visits[visits["i"] == i]
            for head in np.unique(ours["head"]):
                last = ours[ours["head"] == head]["end_ns"].max()
                mine = merging[(merging["i"] == i) & (merging["head"] == head)]
                assert mine["end_ns"].max() >= last
    assert trace.to_perfetto(tmp_path / "t.json").stat().st_size > 1000


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.promise("deterministic")
def test_equal_bits_in_50_runs(page):
    case = ragged(5, 20000, 1, 128, "float16", heads=32, kv_heads=8, page=page)
    x = {name: cupy.asarray(a) for name, a in case.make().items()}
    first = run(case, x)
    assert bool((first.out == first.out).all())
    for number in range(50):
        again = run(case, x)
        for name in ("out", "lse"):
            same = bits(getattr(again, name)) == bits(getattr(first, name))
            assert bool(same.all()), (number, name)


def test_a_cuda_graph_replays_with_what_the_cache_then_holds():
    case = ragged(4, 9000, 1, 128, "float16", heads=32, kv_heads=8)
    x = {name: cupy.asarray(a) for name, a in case.make().items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    workspace = decode.Workspace()
    with stream:
        run(case, x, workspace=workspace)  # compiles, uploads, allocates
        stream.synchronize()
        stream.begin_capture()
        result = run(case, x, workspace=workspace)
        graph = stream.end_capture()
        for seed in (1, 2):
            new = case.make(seed)
            for name, array in new.items():
                x[name].set(array)
            result.out.fill(0)
            graph.launch()
            stream.synchronize()
            case.check(new, cupy.asnumpy(result.out), cupy.asnumpy(result.lse))


def test_a_workspace_that_is_given_needs_no_memory_twice():
    case = ragged(4, 9000, 1, 128, "float16", heads=32, kv_heads=8)
    x = {name: cupy.asarray(a) for name, a in case.make().items()}
    workspace = decode.Workspace()
    run(case, x, workspace=workspace)

    class Counting(cupy.cuda.MemoryHook):
        name = "counting"
        times = 0

        def malloc_preprocess(self, **_):
            self.times += 1

    with Counting() as hook:
        result = run(case, x, workspace=workspace)
    assert hook.times == 0
    case.check(case.make(), cupy.asnumpy(result.out), cupy.asnumpy(result.lse))


def test_a_page_that_the_pool_has_not():
    case = ragged(2, 1000, 1, 64, "float16", page=16)
    x = case.make()
    x["table"][1, 3] = len(x["k"])
    with pytest.raises(OptionError, match=r"block_table\[1, 3\] must be a page of the pool"):
        run(case, x)
    result = run(case, {name: cupy.asarray(a) for name, a in x.items()})
    out = cupy.asnumpy(result.out)
    assert np.isnan(out[1]).all(), "not waited for, not read, and it shows"
    assert np.isfinite(out[0]).all()


def counted_bytes(case, splits):
    """The bytes that a launch's kernels report, and its plan."""
    x, p = {name: cupy.asarray(a) for name, a in case.make().items()}, case.problem
    given = {"cache_seqlens": case.lengths, "splits": splits}
    given |= {"block_table": x["table"]} if case.page else {}
    given |= {"shared_prefix": case.prefix} if case.prefix else {}
    v = x["k"][..., : p.head_dim_v] if p.latent else x["v"]
    job = Job(p, x["q"], x["k"], v, algorithm=family.ALGORITHM, options=given)
    space = arrays.space_of({"q": x["q"]}, p.dtype)
    gpu = engine.gpu_of(space.device)
    n = None if splits == "auto" else splits
    how = {"counts": True, "prefix": case.prefix}
    return decode.counted(job, gpu, space), family.plan(p, case.lengths, gpu, n, case.page, **how)


@pytest.mark.parametrize("page", [0, 1, 3, 16])
@pytest.mark.parametrize("splits", [1, 6, "auto"])
def test_counted_bytes(page, splits):
    case = ragged(3, 3000, 4, 128, "float16", page=page, causal=True)
    counted, launched = counted_bytes(case, splits)
    assert counted == moved(launched, case)


COUNTED = {
    "one query": {},
    "four queries, causal": {"n_q": 4, "causal": True},
    "window": {"n_q": 4, "window": (700, 0)},
    "softcap": {"softcap": 5.0},
    "32 heads on 8": {"heads": 32, "kv_heads": 8},
    "one head on one": {"heads": 2, "kv_heads": 2},
    "widths": {"d": 80, "head_dim_v": 48},
    "narrow": {"d": 64},
    "many rows": {"n_q": 40, "heads": 16, "kv_heads": 2},
}


@pytest.mark.parametrize("page", [0, 1, 3, 16, 64])
@pytest.mark.parametrize("splits", [1, 6, "auto"])
@pytest.mark.parametrize("name", COUNTED)
def test_counted_bytes_are_the_simulators(name, splits, page):
    more = {"n_q": 1, "d": 128, "dtype": "bfloat16", **COUNTED[name]}
    case = ragged(5, 3000, page=page, **more)
    case = Case(case.problem, (0, *case.lengths[1:]), page)
    counted, launched = counted_bytes(case, splits)
    assert counted == simulated(launched, case)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("splits", [1, 6])
@pytest.mark.parametrize("name", ["one query", "four queries, causal", "widths", "many rows"])
def test_a_trace_is_the_simulators(name, splits, page):
    more = {"n_q": 1, "d": 128, "dtype": "bfloat16", **COUNTED[name]}
    case = ragged(3, 2500, page=page, **more)
    check_trace(case, splits)


def check_trace(case, splits):
    """Check that a trace has the closed form's bytes, and the simulator's events."""
    x = case.make()
    trace = run(case, x, splits=splits, trace=True).trace
    assert trace.backend == "cupy"
    assert trace.diff(trace.predicted()) == {}
    device = Device.get("H200").with_sram(1 << 24)
    given = {"backend": "simulator", "device": device, "tiling": trace.tiling}
    simulated_one = run(case, x, splits=splits, trace=True, **given).trace
    assert trace.problem == simulated_one.problem
    assert trace.same_events(simulated_one)


def test_sequences_that_are_divided_differently_have_a_trace():
    case = ragged(2, 9000)  # lengths 9,000 and 4,500: other numbers of splits
    trace = run(case, case.make(), trace=True).trace
    assert trace.stages[0].schedule.split.part_tiles is not None
    assert trace.diff(trace.predicted()) == {}


def test_options_of_decoding_belong_to_it():
    x = ragged(1, 64).make()
    with pytest.raises(OptionError, match="'flash2' does not take splits"):
        flashsim.run(x["q"], x["k"], x["v"], backend="cupy", splits=3)
    case = ragged(1, 64)
    result = run(case, x)
    with pytest.raises(UnsupportedError, match="no backward pass"):
        result.backward(result.out)
