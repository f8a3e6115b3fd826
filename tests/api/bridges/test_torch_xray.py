"""The ranges by which Nsight Compute labels a program's attention kernels, and their calls."""

import json
import threading
import warnings
from contextlib import ExitStack, contextmanager

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import flex_attention as flex  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

from flashsim import Problem  # noqa: E402
from flashsim.torch import compiled_calls, watch, xray  # noqa: E402
from flashsim.torch.watch import in_ranges  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")


@pytest.fixture
def log():
    """Where `opened` notes which ranges begin and end."""
    log = []

    @contextmanager
    def opened(name):
        log.append(("begin", name))
        yield
        log.append(("end", name))

    return log, opened


def test_each_pass_of_each_call_runs_in_a_range_of_its_own(log):
    log, opened = log
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    with in_ranges(opened) as ranges:
        first, second = sdpa(q, k, v), sdpa(q, k, v, is_causal=True)
        log.append(("between", ""))
        (first.sum() + second.sum()).backward()
    names = [name for what, name in log if what == "begin"]
    between = log.index(("between", ""))
    forward = [name for what, name in log[:between] if what == "begin"]
    assert len(forward) == 2
    assert set(names[2:]) == {f"{name} backward" for name in forward}
    assert log.count(("begin", names[2])) == log.count(("end", names[2]))
    calls = {name: (call.pattern.causal, way) for name, (call, way) in ranges.calls.items()}
    assert calls[forward[1]] == (True, "forward")
    assert calls[f"{forward[0]} backward"] == (False, "backward")


def test_a_call_is_described_as_a_problem(monkeypatch):
    q = torch.randn(1, 4, 8, 4)
    k = torch.randn(1, 2, 8, 4)
    with in_ranges(torch.profiler.record_function) as ranges:
        sdpa(q, k, k, is_causal=True, enable_gqa=True)
        sdpa(q, q, q, attn_mask=torch.rand(8, 8) > 0.5)
    plain, masked = dict.fromkeys(call for call, _ in ranges.calls.values())
    about = json.loads(json.dumps(xray.described(plain)))
    assert Problem(**about["problem"]) == plain.problem
    assert xray.described(masked)["note"]


def test_without_a_gpu_the_child_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        return
    assert xray.main(str(tmp_path / "calls.json"), "program.py") == 1
    assert "no GPU" in capsys.readouterr().err


def doubled_if_compiled(score, *_):
    return score * 2 if torch.compiler.is_compiling() else score


@pytest.mark.parametrize("way", ["function", "around", "module", "in place"])
def test_flex_attention_of_compiled_code_runs_compiled_in_its_range(way, log):
    q, (log, opened) = torch.randn(1, 2, 128, 16), log
    given = {"score_mod": doubled_if_compiled}

    class Layer(torch.nn.Module):
        def forward(self, x):
            return flex.flex_attention(x, x, x, **given)

    with in_ranges(opened) as ranges:
        if way == "function":
            found = torch.compile(flex.flex_attention, backend="eager")(q, q, q, **given)
        elif way == "around":
            compiled = torch.compile(backend="eager")(
                lambda x: flex.flex_attention(x, x, x, **given)
            )
            found = compiled(q)
        else:
            layer = Layer()
            if way == "module":
                layer = torch.compile(layer, backend="eager")
            else:
                layer.compile(backend="eager")
            found = layer(q)
    torch.testing.assert_close(found, sdpa(q, q, q, scale=2 / 4))
    call, direction = ranges.calls[log[0][1]]
    assert (call.api, direction, len(log)) == ("flex_attention", "forward", 2)
    assert call.notes == ["score_mod: what it computes is not counted"]


def test_a_module_compiled_without_options_keeps_its_result():
    """Its hooks return nothing: a hook's result would replace the module's."""
    layer, around, x = torch.nn.Linear(4, 2), compiled_calls._Around(), torch.ones(3, 4)
    expected = layer(x)
    noted = []
    layer.register_forward_pre_hook(lambda *_: noted.append(len(around.options)))
    torch.testing.assert_close(compiled_calls._entered(layer, around, {})(x), expected)
    assert (noted, around.options) == ([0], [])


def test_flex_attention_outside_of_compiled_code_stays_uncompiled():
    q = torch.randn(1, 2, 128, 16)
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice to compile it
        with in_ranges(torch.profiler.record_function) as ranges:
            found = flex.flex_attention(q, q, q, score_mod=doubled_if_compiled)
            compiled = torch.compile(flex.flex_attention, backend="eager")(q, q, q, None, mask)
    torch.testing.assert_close(compiled, sdpa(q, q, q, is_causal=True))
    torch.testing.assert_close(found, sdpa(q, q, q))  # not doubled
    calls = [call for call, direction in ranges.calls.values() if direction == "forward"]
    assert [call.pattern.causal for call in calls] == [False, True]


def test_compiled_code_of_another_thread_compiles_no_call_of_this_one():
    """The other thread's flex_attention runs compiled as well, but it is not watched."""
    q, entered, leave = torch.randn(1, 2, 128, 16), threading.Event(), threading.Event()
    others = []

    def hold():
        others.append(flex.flex_attention(q, q, q, score_mod=doubled_if_compiled))
        entered.set()
        assert leave.wait(60)

    with warnings.catch_warnings(), in_ranges(torch.profiler.record_function) as ranges:
        warnings.simplefilter("ignore")  # torch's advice to compile it
        other = threading.Thread(target=torch.compile(hold, backend="eager"))
        other.start()
        try:
            assert entered.wait(60)
            found = flex.flex_attention(q, q, q, score_mod=doubled_if_compiled)
        finally:
            leave.set()
            other.join()
    torch.testing.assert_close(found, sdpa(q, q, q))  # not doubled
    torch.testing.assert_close(others, [sdpa(q, q, q, scale=2 / 4)])
    assert [way for _, way in ranges.calls.values()].count("forward") == 1


def test_flex_attention_is_compiled_once_for_the_same_options(monkeypatch):
    q, compiled, compile_ = torch.randn(1, 2, 128, 16), [], torch.compile

    def noting(function, **options):
        compiled.append((function, options["backend"]))
        return compile_(function, **options)

    monkeypatch.setattr(torch, "compile", noting)
    attend = flex.flex_attention
    with in_ranges(torch.profiler.record_function) as ranges:
        for backend in ("eager", "eager", "aot_eager"):
            run = torch.compile(lambda x: flex.flex_attention(x, x, x), backend=backend)
            run(q)
            run(q)
    assert [way for function, way in compiled if function is attend] == ["eager", "aot_eager"]
    assert [way for _, way in ranges.calls.values()].count("forward") == 6


def test_the_autograd_function_of_flash_attention_4_is_seen(monkeypatch, log):
    """FlashAttention's CuTe kernels are launched by an autograd function, not by an operator."""

    class FlashAttnFunc(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx, q, k, v, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0
        ):
            ctx.save_for_backward(q, k, v)
            return v * 1.0, q[..., 0]

        @staticmethod
        def backward(ctx, dout, _):
            return dout, dout, dout, None, None, None, None

    monkeypatch.setattr(FlashAttnFunc, "__module__", "flash_attn.cute.interface")
    log, opened = log
    q, k, v = (torch.randn(2, 8, 4, 16, requires_grad=True) for _ in range(3))
    with in_ranges(opened) as ranges:
        out, _ = FlashAttnFunc.apply(q, k, v, None, True, (5, 0))
        out.sum().backward()
    names = [name for what, name in log if what == "begin"]
    call, _ = next(iter(ranges.calls.values()))
    assert names == [names[0], f"{names[0]} backward"]
    expected = Problem(8, head_dim=16, batch=2, heads=4, causal=True, window=(5, 0))
    assert call.problem == expected
    with in_ranges(opened) as others:
        FlashAttnFunc.apply(q, k, v, None, False)
    assert next(iter(others.calls.values()))[0].pattern.window is None
    for window, noted in (((-2, 5), True), ((5, 0), False)):
        with in_ranges(opened) as signed:
            FlashAttnFunc.apply(q, k, v, None, False, window)
        call, _ = next(iter(signed.calls.values()))
        assert ("negative side" in call.note) == noted


@pytest.mark.parametrize("observers", [1, 2])
def test_an_autograd_function_takes_keywords_while_it_is_watched(observers):
    """Torch takes them if `setup_context` is defined; the names are those of our own parameters."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x, recorder=2.0, run=0.0):
            return x * recorder + run

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.factor = inputs[1]

        @staticmethod
        def backward(ctx, dout):
            return dout * ctx.factor, None, None

    x = torch.ones(2, requires_grad=True)
    with ExitStack() as stack:
        stack.enter_context(in_ranges(torch.profiler.record_function))
        for _ in range(observers - 1):
            stack.enter_context(watch())
        found = Scaled.apply(x, recorder=3.0, run=1.0)
        found.sum().backward()
    assert (found.tolist(), x.grad.tolist()) == ([4.0, 4.0], [3.0, 3.0])


def test_keywords_of_a_seen_autograd_function_are_read(monkeypatch):
    class FlashAttnFunc(torch.autograd.Function):
        @staticmethod
        def forward(q, k, v, softmax_scale=None, causal=False):
            return v * 1.0

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    monkeypatch.setattr(FlashAttnFunc, "__module__", "flash_attn.cute.interface")
    q, k, v = (torch.randn(2, 8, 4, 16) for _ in range(3))
    with watch() as seen:
        FlashAttnFunc.apply(q, k, v, softmax_scale=0.5, causal=True)
    assert not seen.missed
    (call,) = seen
    assert call.problem == Problem(8, head_dim=16, batch=2, heads=4, causal=True, scale=0.5)
