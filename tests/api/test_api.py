"""What run, Result.backward, count and compare return and refuse."""

import copy
import os
import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import tensors
from refusals import refusals, refused

import flashsim
from flashsim import BlockMask, Device, FlashSimError, Problem, Tiling, UnknownArgumentError
from flashsim.api.dispatch import BACKENDS
from flashsim.api.inputs import Request
from flashsim.backends.launch_policy.family import fastest_backward


@pytest.fixture
def x():
    return tensors(40, 50, 8, heads=4, kv_heads=2, batch=2, bias=(1, 1))


def run(x, **options):
    return flashsim.run(x.q, x.k, x.v, **options)


def test_numpy_is_the_simulators_older_name(x):
    for name in ("simulator", "numpy", "numpy"):  # checked, and known from the call before
        result = run(x, backend=name, trace=True)
        assert (result.kernel, result.trace.backend) == ("simulator", "simulator")
        assert result.backward(result.out).trace.backend == "simulator"
        np.testing.assert_array_equal(result.out, run(x).out)
    again = flashsim.backward(x.q, x.k, x.v, result.out, result.lse, result.out, backend="numpy")
    np.testing.assert_array_equal(again.dq, result.backward(result.out).dq)
    assert flashsim.compare(x.q, x.k, x.v, backend="numpy").traces[0].backend == "simulator"
    assert flashsim.quantize(x.q, x.k, x.v, backend="numpy").q.dtype.name == "float8_e4m3fn"
    assert BACKENDS == ("simulator", "numba", "cupy", "numba_cuda")
    with pytest.raises(UnknownArgumentError, match="only with backend='numba'"):
        run(x, backend="numpy", threads=1)


def test_run_returns_arrays_of_the_same_kind(x):
    result = run(x)
    assert type(result.out) is type(result.lse) is np.ndarray
    assert result.out.shape == (2, 4, 40, 8)
    assert result.lse.shape == (2, 4, 40)
    assert not result.traced
    assert result.kernel == "simulator"
    expected = Problem(40, 50, 8, batch=2, heads=4, kv_heads=2)
    assert result.problem == expected


def test_inputs_are_left_alone(x):
    before = [a.copy() for a in (x.q, x.k, x.v, x.bias, x.dout)]
    run(x, bias=x.bias).backward(x.dout)
    for array, kept in zip((x.q, x.k, x.v, x.bias, x.dout), before, strict=True):
        np.testing.assert_array_equal(array, kept)


def test_outputs_are_not_the_inputs_memory(x):
    result = run(x)
    gradients = result.backward(x.dout)
    for array in (result.out, result.lse, gradients.dq, gradients.dk, gradients.dv):
        assert not any(np.shares_memory(array, given) for given in (x.q, x.k, x.v, x.dout))


def test_tracing_changes_no_result(x):
    quiet, traced = (run(x, causal=True, trace=trace) for trace in (False, True))
    np.testing.assert_array_equal(quiet.out, traced.out)
    silent = quiet.backward(x.dout)
    assert not silent.traced
    np.testing.assert_array_equal(silent.dq, traced.backward(x.dout).dq)


def test_backward_can_be_asked_for_its_own_trace_and_tiling(x):
    result = run(x, trace=True)
    assert result.backward(x.dout).trace.direction == "backward"
    assert not result.backward(x.dout, trace=False).traced
    assert run(x).backward(x.dout, trace=True, tiling=Tiling(7, 9)).trace.tiling == Tiling(7, 9)


@pytest.mark.promise("deterministic")
def test_backward_may_run_twice_with_the_same_result(x):
    result = run(x, bias=x.bias, algorithm="flash1")
    once, twice = (result.backward(x.dout) for _ in range(2))
    for name in ("dq", "dk", "dv", "dbias"):
        np.testing.assert_array_equal(getattr(once, name), getattr(twice, name))


@pytest.mark.parametrize(
    ("algorithm", "deterministic", "stages"),
    [
        ("flash2", None, ["delta", "dkdv", "dq"]),
        ("flash2-fused", None, ["delta", "fused"]),
        ("flash2", False, ["delta", "fused"]),
        ("flash2-fused", True, ["delta", "dkdv", "dq"]),
    ],
)
def test_deterministic_chooses_the_form(x, algorithm, deterministic, stages):
    result = run(x, algorithm=algorithm, trace=True)
    trace = result.backward(x.dout, deterministic=deterministic).trace
    assert [stage.name for stage in trace.stages] == stages


@pytest.mark.parametrize(
    ("algorithm", "tiling", "fused"),
    [("flash2", None, False), ("flash2-fused", None, True), ("flash2", Tiling(16, 16), True)],
)
def test_where_any_order_will_do_an_engine_may_choose_the_form(
    x, monkeypatch, algorithm, tiling, fused
):
    from flashsim.engines import simulator

    def fastest(job, saved, *how):
        three = SimpleNamespace(fuses=lambda *_: False, stores_dq=lambda *_, **__: False)
        tiled = job.tiling is not None
        return fastest_backward(job.problem, None, lambda _: three, *how, tiled=tiled)

    monkeypatch.setattr(simulator, "fastest_backward", fastest, raising=False)
    result = run(x, algorithm=algorithm, trace=True)
    trace = result.backward(x.dout, deterministic=False, tiling=tiling).trace
    assert trace.algorithm == ("flash2-fused" if fused else "flash2")


class OnGpu:
    """An array as far as the checks look, without NumPy's."""

    def __init__(self, *shape, dtype="float16"):
        self.shape, self.ndim, self.dtype = shape, len(shape), dtype

    def reshape(self, shape):
        return OnGpu(*shape, dtype=self.dtype)


@pytest.fixture
def jobs(monkeypatch):
    """The jobs that an engine behind backend "cupy" gets; it computes nothing."""
    from flashsim.api import dispatch
    from flashsim.api import request as requests
    from flashsim.engines.protocol import Outcome

    asked = []

    def forward(job):
        asked.append(job)
        out = np.zeros((1, *job.q.shape[1:]), np.float16)
        return Outcome({"out": out, "lse": out[..., 0]}, Tiling(16, 16), None, "none")

    def backward(job, saved, dout, dlse=None):
        asked.append(job)
        return Outcome({"dq": job.q, "dk": job.k, "dv": job.v}, Tiling(16, 16), None, "none")

    engine = SimpleNamespace(
        OPTIONS={"kernel", "cache_seqlens", "pack_gqa"},
        forward=forward,
        backward=backward,
        recall=lambda *_: {},
    )
    monkeypatch.setattr(dispatch, "engine", lambda backend: engine)
    monkeypatch.setattr(requests, "_KEPT", {})
    monkeypatch.setattr(requests, "_MOST_KEPT", 3)
    return asked


def test_what_was_checked_once_is_not_checked_again_on_a_gpu(jobs):
    def ask(q, **more):
        flashsim.run(q, q, q, backend="cupy", **more)
        return jobs[-1]

    q = OnGpu(2, 40, 8)
    first, again = ask(q, causal=True), ask(OnGpu(2, 40, 8), causal=True)
    assert again.memo is first.memo
    assert again.problem is first.problem
    assert (first.q.shape, again.q.shape) == ((1, 2, 40, 8), (1, 2, 40, 8))
    assert again.q is not first.q
    others = [
        *(ask(q), ask(q, causal=True, kernel="hopper"), ask(q, causal=True, scale=1)),
        *(ask(q, causal=True, scale=1.0), ask(OnGpu(2, 41, 8), causal=True)),
        ask(OnGpu(1, 2, 40, 8), causal=True),
        ask(q, causal=True, cu_seqlens_q=(0, 40), cu_seqlens_k=(0, 40)),
    ]
    assert len({id(job.memo) for job in (first, *others)}) == 1 + len(others)
    packed, apart = (ask(q, causal=True, pack_gqa=flag) for flag in (True, False))
    assert len({id(job.memo) for job in (first, packed, apart)}) == 3
    assert ask(q, causal=True, pack_gqa=False).memo is apart.memo
    with pytest.raises(FlashSimError, match="causal"):
        ask(q, causal=1)
    with pytest.raises(FlashSimError, match="window"):
        ask(q, window=[1, 2, 3])  # has no hash


def test_lengths_of_a_cache_are_read_at_every_call(jobs):
    q, given = OnGpu(2, 4, 1, 8), {"algorithm": "flash-decode", "backend": "cupy"}
    for lengths in (np.array([1, 1]), np.array([1, 0]), None):
        flashsim.run(q, q, q, cache_seqlens=lengths, **given)
    first, again, none = jobs
    assert again.problem is first.problem
    assert again.memo is not first.memo
    assert again.options["cache_seqlens"].tolist() == [1, 0]
    assert "cache_seqlens" not in none.options


@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_a_bias_is_read_at_every_call(x, backend):
    given = {"backend": backend, "tiling": Tiling(16, 16)}
    for bias in (x.bias, -x.bias, x.bias[0, 0], -x.bias[0, 0]):
        for q, k, v, dout in ((x.q, x.k, x.v, x.dout), (x.q[0], x.k[0], x.v[0], x.dout[0])):
            alone = flashsim.run(q, k, v, bias=bias, nan_policy="raise", **given)  # checked anew
            again = flashsim.run(q, k, v, bias=bias, **given)
            np.testing.assert_array_equal(again.out, alone.out)
            np.testing.assert_array_equal(again.backward(dout).dbias, alone.backward(dout).dbias)
            assert again.backward(dout).dbias.shape == bias.shape


def test_a_request_has_the_keywords_of_run():
    keywords = dict(flashsim.run.__kwdefaults__)
    assert keywords.pop("bias") is None
    assert keywords.pop("decode") is None  # its fields are options
    assert Request()._asdict() == {**keywords, "options": ()}


def test_a_gradient_that_looks_different_is_checked_anew(jobs):
    q = OnGpu(1, 2, 40, 8)
    result = flashsim.run(q, q, q, backend="cupy")
    dout = OnGpu(1, 2, 40, 8, dtype="float16")
    result = replace(result, out=dout)  # the engine that computes nothing made a NumPy array
    again, other = (result.backward(dout, deterministic=True) for _ in range(2))
    assert again.dq is other.dq
    assert jobs[-1].memo is jobs[-2].memo  # known
    wrong = [
        (OnGpu(1, 2, 41, 8, dtype="float16"), True, "dout must have the same shape as out"),
        (OnGpu(1, 2, 40, 8, dtype="float32"), True, "dout must have the same dtype as out"),
        (np.ones((1, 2, 41, 8), np.float16), True, "dout must have the same shape as out"),
        (object(), True, "dout must be an array"),
        (dout, 1, "deterministic"),
        (dout, [1], "deterministic"),
    ]
    for given, deterministic, said in wrong:
        with pytest.raises(FlashSimError, match=said):
            result.backward(given, deterministic=deterministic)
    with pytest.raises(FlashSimError, match="tiling"):
        result.backward(dout, deterministic=True, tiling=(64, 64))
    with pytest.raises(FlashSimError, match="trace"):
        result.backward(dout, deterministic=True, trace="no")
    lse, wide = OnGpu(1, 2, 40, dtype="float32"), OnGpu(1, 2, 41, dtype="float32")
    result = replace(result, lse=lse)
    for _ in range(2):
        result.backward(dout, dlse=lse, deterministic=True)
        assert jobs[-1].problem == replace(result.problem, dlse=True)
    assert jobs[-1].memo is jobs[-2].memo
    with pytest.raises(FlashSimError, match="dlse must have the same shape as lse"):
        result.backward(dout, dlse=wide, deterministic=True)
    result.backward(dout, deterministic=True)
    assert jobs[-1].problem == result.problem
    before = jobs[-1]
    assert result.backward(dout, deterministic=False).dq is again.dq
    assert jobs[-1].memo is not before.memo
    assert jobs[-1].algorithm == "flash2-fused"


def test_nor_is_a_backward_pass_whose_forward_pass_was_forgotten(jobs):
    from flashsim.api import execution

    def ask(q, **more):
        lse = OnGpu(*q.shape[:-1], dtype="float32")
        execution.backward(q, q, q, q, lse, q, backend="cupy", **more)
        return jobs[-1]

    q, other = OnGpu(1, 2, 40, 8), OnGpu(1, 2, 40, 8)
    first, again = ask(q, causal=True), ask(other, causal=True)
    assert again.memo is first.memo
    assert (first.q, again.q) == (q, other)
    assert ask(q).memo is not first.memo
    assert ask(OnGpu(1, 2, 41, 8), causal=True).memo is not first.memo
    with pytest.raises(FlashSimError, match="causal"):
        ask(q, causal=1)
    with pytest.raises(FlashSimError, match=r"lse must have .* \(1, 2, 40\), got"):
        execution.backward(
            *[q] * 4, OnGpu(1, 2, 39, dtype="float32"), q, backend="cupy", causal=True
        )


def test_a_result_says_on_which_tiles_it_was_made(x):
    result = run(x, tiling=Tiling(16, 8))
    assert result.tiling == Tiling(16, 8)
    assert result.backward(x.dout, tiling=Tiling(8, 16)).tiling == Tiling(8, 16)
    chosen = run(x, trace=True, device="T4")
    assert chosen.tiling == chosen.trace.tiling
    assert chosen.tiling == flashsim.count(chosen.problem, device="T4").tiling
    assert (grads := chosen.backward(x.dout)).tiling == grads.trace.tiling


def test_a_pickled_result_holds_nothing_of_an_engines_own():
    x = np.ones((2, 64, 16), np.float32)
    for _ in range(2):
        result = flashsim.run(x, x, x, backend="numba")
        result.backward(x)
    assert b"flashsim.engines.cpu" not in pickle.dumps(result)


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_result_can_be_copied_and_sent_to_another_process(x, again):
    result = run(x, bias=x.bias, trace=True)
    other = again(result)
    np.testing.assert_array_equal(other.out, result.out)
    assert other.trace.transfers == result.trace.transfers
    there, here = again(other.backward(x.dout)), result.backward(x.dout)
    for name in ("dq", "dk", "dv", "dbias"):
        np.testing.assert_array_equal(getattr(there, name), getattr(here, name))


def test_bias_gradient_has_the_bias_s_shape():
    x = tensors(9, 10, 4, heads=3, bias=(1, 1))
    for shape in ((9, 10), (1, 9, 10), (1, 1, 9, 10)):
        result = flashsim.run(x.q, x.k, x.v, bias=x.bias.reshape(shape))
        assert result.backward(x.dout).dbias.shape == shape
    assert run(x).backward(x.dout).dbias is None


@pytest.mark.parametrize("kind", ["numpy", "list"])
def test_sequence_offsets_may_be_lists_or_arrays(kind):
    x = tensors(40, 50, 8)
    cu_q, cu_k = ([0, 10, 40], [0, 30, 50])
    if kind == "numpy":
        cu_q, cu_k = np.array(cu_q), np.array(cu_k, np.int32)
    result = run(x, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    alone = flashsim.run(x.q[:, :, :10], x.k[:, :, :30], x.v[:, :, :30])
    np.testing.assert_allclose(result.out[:, :, :10], alone.out, rtol=1e-5, atol=1e-6)


def test_a_bare_grid_is_one_value_a_tile(x):
    grid = np.array([[True, False], [True, True]])
    given = run(x, block_mask=grid, tiling=Tiling(20, 25)).out
    cells = BlockMask(grid, 20, 25)
    np.testing.assert_array_equal(given, run(x, block_mask=cells, tiling=Tiling(20, 25)).out)


class Foreign:
    """An array of an unknown library that only looks like one."""

    def __init__(self, a):
        self.shape, self.dtype, self.a = a.shape, a.dtype, a

    def reshape(self, shape):
        return Foreign(self.a.reshape(shape))


REFUSED = refusals(r"""
flashsim.run(*map(Foreign, (x.q, x.k, x.v)))
    -> DTypeError: backend 'simulator' takes arrays in the CPU's ... Foreign; mo
run(x, nan_policy="raise") -> OptionError: k contains 1 NaN or infinite values
run(x, device=Device("tiny", sram_bytes=64, sram_per_sm=64))
    -> SramOverflow: even with a 1 x 1 tile ... use a device with more SRAM
run(x, algorithm="standard").backward(x.dout, deterministic=True)
    -> OptionError: 'standard' has only one form, which is deterministic
result.backward(x.dout, dlse=result.lse[0])
    -> ShapeError: dlse must have the same shape as lse, which is (2, 4, 40), got (4, 40)
result.backward(x.dout, dlse=result.lse.astype(np.float64))
    -> DTypeError: dlse must have the same dtype as lse, which is float32, got float64
result.backward(x.dout, dlse=1.0) -> DTypeError: dlse must be an array
result.backward(x.dout[0, 0])
    -> ShapeError: dout must have the same shape as out, which is (2, 4, 40, 8), got (40,
result.backward(x.dout.astype(np.float64))
    -> DTypeError: dout must have the same dtype as out, which is float32, got float64
result.backward(1.0) -> DTypeError: dout must be an array
result.backward(x.dout, tiling=64) -> DTypeError: tiling must be
result.backward(x.dout, trace="all") -> OptionError: trace must be
""")


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_run_and_backward_refuse(x, call, said):
    x.k[0, 0, 3, 2] = np.nan
    refused(call, said, {**globals(), "x": x, "result": run(x)})


def test_infinite_inputs_spread(x):
    x.k[0, 0, 3, 2] = np.nan
    assert np.isnan(run(x).out[0, 0]).all()
    assert np.isfinite(run(x).out[1]).all()


def test_a_device_of_your_own(x):
    small = Device("small", sram_bytes=4096, sram_per_sm=8192)
    result = run(x, device=small, trace=True)
    assert result.trace.device is small
    assert result.trace.peak_sram() <= 4096


# -- count ----------------------------------------------------------------------------------------


def test_a_repeated_call_of_a_small_problem_goes_a_short_way():
    """Fewer than 300 Python calls outside the algorithm's own modules."""
    q = np.random.default_rng(0).standard_normal((1, 1, 64, 16), np.float32)
    outside = []

    def note(frame, event, _):
        if event == "call" and f"{os.sep}algorithms{os.sep}" not in frame.f_code.co_filename:
            outside.append(frame.f_code.co_qualname)

    flashsim.run(q, q, q)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        flashsim.run(q, q, q)
    finally:
        sys.setprofile(before)
    assert 50 < len(outside) < 300
    assert "Schedule.__post_init__" not in outside
