"""`flashsim.torch.watch`: every attention call seen once, as what it is, and no result changed."""

import contextlib
import json
import sys
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import flashsim  # noqa: E402
from flashsim.cli.app import app  # noqa: E402
from flashsim.errors import (  # noqa: E402
    BackendUnavailable,
    DTypeError,
    OptionError,
    ShapeError,
    UnsupportedError,
)
from flashsim.torch import FlashAttention, attention, signatures, watch  # noqa: E402
from flashsim.torch.masks import top_left  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")

F = nn.functional


def heads(*shape, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=dtype, **options)


def seen_in(call, *args, **kwargs):
    """What one function call is seen as; its result is the same to the bit."""
    torch.manual_seed(1)
    want = call(*args, **kwargs)
    torch.manual_seed(1)
    with watch() as seen:
        got = call(*args, **kwargs)
    assert torch.equal(got, want)
    assert not seen.missed
    (one,) = seen
    return one


Q, K, V = heads(2, 4, 6, 8), heads(2, 4, 9, 8), heads(2, 4, 9, 8)
SQUARE = heads(2, 4, 6, 8)


# -- scaled_dot_product_attention -----------------------------------------------------------------


SDPA = F.scaled_dot_product_attention
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def shaped(*shape):
    return [heads(*shape)] * 3


#: Calls of torch's attention, and what the recorded call and its `Problem` must hold.
CALLS = {
    "sizes, type and device": (
        lambda: SDPA(Q, K, value=V[..., :5], scale=0.5),
        {
            **{"batch": 2, "heads": 4, "kv_heads": 4, "n_q": 6, "n_kv": 9, "head_dim": 8},
            **{"head_dim_v": 5, "dtype": "float32", "scale": 0.5, "device": "cpu", "name": ""},
            **{"note": "", "causal": False, "backward": False},
        },
    ),
    "(n, d)": (lambda: SDPA(*shaped(6, 8)), {"batch": 1, "heads": 1, "n_q": 6, "head_dim": 8}),
    "(heads, n, d)": (lambda: SDPA(*shaped(3, 6, 8)), {"batch": 1, "heads": 3, "n_q": 6}),
    "5-D": (lambda: SDPA(*shaped(2, 3, 5, 6, 8)), {"batch": 6, "heads": 5, "n_q": 6}),
    "grouped heads": (
        lambda: SDPA(SQUARE, *shaped(2, 2, 6, 8)[1:], enable_gqa=True),
        {"heads": 4, "kv_heads": 2},
    ),
    "causal": (lambda: SDPA(SQUARE, SQUARE, SQUARE, None, 0.0, True), {"causal": True}),
    "causal from the top left": (
        lambda: SDPA(Q, K, V, is_causal=True),
        {"causal": False, "mask": top_left},
    ),
    "bias": (lambda: SDPA(Q, K, V, attn_mask=heads(4, 6, 9)), {"bias": (1, 4)}),
    "dropout": (
        lambda: SDPA(Q, K, V, dropout_p=0.25),
        {"dropout": 0.25, "note": "dropout 0.25: its random numbers are not counted"},
    ),
    "autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16)(SDPA)(Q, K, V),
        {"dtype": "bfloat16", "inputs": None},
    ),
    "an operator": (lambda: torch.ops.aten.scaled_dot_product_attention(Q, K, V), {"n_kv": 9}),
    "an overload": (
        lambda: torch.ops.aten.scaled_dot_product_attention.default(Q, K, V),
        {"n_kv": 9},
    ),
    "a kernel's operator": (lambda: FLASH(Q, K, V)[0], {"n_kv": 9}),
}


@pytest.mark.parametrize(("call", "wanted"), CALLS.values(), ids=CALLS)
def test_a_call_of_torchs_attention(call, wanted):
    one = seen_in(call)
    p = one.problem
    found = {n: getattr(p if hasattr(p, n) else one, n) for n in wanted}
    assert found == wanted


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_operators_called_from_torchscript():
    traced = torch.jit.trace(lambda q, k, v: SDPA(q, k, v), (Q, K, V))
    assert seen_in(traced, Q, K, V).problem.n_kv == 9


def test_a_mask_from_the_top_left_keeps_the_lower_triangle():
    p = seen_in(SDPA, Q, K, V, is_causal=True).problem
    kept = p.keep(p.sequences[0], *map(_indices, (6, 9)))
    assert (kept == torch.ones(6, 9, dtype=torch.bool).tril().numpy()).all()


def _indices(n):
    return torch.arange(n).numpy()


def band(n_q, n_kv, left, right):
    offset = torch.arange(n_kv) - torch.arange(n_q)[:, None] - (n_kv - n_q)
    return (offset >= -left) & (offset <= right)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(
    ("mask", "causal", "window", "note"),
    [
        (band(6, 9, 99, 0), True, None, ""),
        (band(6, 9, 3, 0), True, (3, 0), ""),
        (band(6, 9, 2, 1), False, (2, 1), ""),
        (torch.ones(6, 9, dtype=torch.bool), False, None, ""),
        (band(6, 9, 99, 0).expand(2, 1, 6, 9), True, None, ""),
        (torch.arange(9).expand(6, 9) != 4, False, None, "keeps 89% of the scores"),
        (torch.arange(9)[None, None, None] != 4, False, None, "keeps 89% of the scores"),
    ],
)
def test_a_mask_is_read(mask, causal, window, note, additive):
    if additive:
        least = torch.finfo(torch.float32).min
        mask = torch.zeros(mask.shape).masked_fill(~mask, least)

    call = seen_in(F.scaled_dot_product_attention, Q, K, V, attn_mask=mask)

    assert (call.problem.causal, call.problem.window) == (causal, window)
    assert note in call.note
    assert bool(note) == bool(call.note)


def test_a_mask_that_differs_between_heads_is_not_taken_for_its_first():
    mask = band(6, 9, 99, 0).repeat(2, 4, 1, 1)
    mask[1, 2, 0, 8] = True

    call = seen_in(F.scaled_dot_product_attention, Q, K, V, attn_mask=mask)

    assert not call.problem.causal
    assert "counted as dense" in call.note


def test_a_bias_is_not_recorded():
    call = seen_in(SDPA, Q, K, V, attn_mask=heads(4, 6, 9))
    with pytest.raises(UnsupportedError, match="has bias, but watch does not record its values"):
        call.trace()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_packed_sequences():
    x = torch.nested.nested_tensor([heads(3, 32), heads(5, 32)], layout=torch.jagged)
    x = x.unflatten(-1, (4, 8)).transpose(1, 2)
    with torch.no_grad(), watch() as seen:
        F.scaled_dot_product_attention(x, x, x)

    p = seen[0].problem
    assert p.cu_seqlens_q == p.cu_seqlens_k == (0, 3, 8)
    assert (p.batch, p.heads, p.n_q, p.head_dim) == (1, 4, 8, 8)


# -- other attention ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("mask", "causal", "window", "note"),
    [
        (None, False, None, ""),
        (lambda b, h, q, k: q >= k, True, None, ""),
        (lambda b, h, q, k: (q >= k) & (q - k <= 20), True, (20, 0), ""),
        (lambda b, h, q, k: (q // 7) == (k // 7), False, None, "counted as dense"),
    ],
)
def test_flex_attention(mask, causal, window, note):
    x = heads(1, 2, 128, 16)
    blocks = mask and create_block_mask(mask, None, None, 128, 128, device="cpu")

    call = seen_in(flex_attention, x, x, x, block_mask=blocks)

    assert call.api == "flex_attention"
    assert (call.problem.causal, call.problem.window) == (causal, window)
    assert note in call.note


@pytest.mark.parametrize("given", [{}, {"score_mod": None}])
def test_flex_attention_is_read_without_torchs_private_identity(given, monkeypatch):
    monkeypatch.delattr(signatures.flex, "_identity")
    x = heads(1, 2, 128, 16)
    found = signatures.bind(flex_attention, "flex_attention", (x, x, x), given)
    assert signatures._flex(found).notes == []
    found = signatures.bind(flex_attention, "flex_attention", (x, x, x), {"score_mod": max})
    assert "score_mod" in signatures._flex(found).notes[0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(training, need_weights):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, batch_first=True).train(training)
    x, mask = heads(2, 6, 32), ~band(6, 6, 99, 0)

    def call(x):
        with contextlib.nullcontext() if training else torch.no_grad():
            return layer(x, x, x, attn_mask=mask, need_weights=need_weights)[0]

    one = seen_in(call, x)

    p = one.problem
    assert (p.batch, p.heads, p.n_q, p.n_kv, p.head_dim, p.causal) == (2, 4, 6, 6, 8, True)
    assert ("probabilities" in one.note) == need_weights
    assert ("fast path" in one.api) == (not training)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [False, True])
def test_the_encoder_keeps_its_fast_path(padded):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = heads(2, 6, 32)
    padding = torch.arange(6) >= torch.tensor([[6], [4]]) if padded else None
    with torch.no_grad():
        want = model(x, src_key_padding_mask=padding)
        with watch(model) as seen:
            got = model(x, src_key_padding_mask=padding)

    assert torch.equal(got, want)
    assert [call.name for call in seen] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert all("fast path" in call.api for call in seen)
    assert seen[0].problem.cu_seqlens_q == ((0, 6, 10) if padded else None)


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def published(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
) -> torch.Tensor:
    """As flash_attn registers it, in front of torch's own attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def test_flash_attn_by_its_operator():
    q, k = heads(2, 6, 4, 8), heads(2, 9, 2, 8)

    call = seen_in(lambda q: published(q, q, q, 0.0, 0.3, True, 5, 0, 30.0), q)
    p = call.problem

    assert (p.batch, p.heads, p.kv_heads, p.n_q, p.n_kv) == (2, 4, 4, 6, 6)
    assert (p.head_dim, p.scale, p.softcap) == (8, 0.3, 30)
    assert p.causal
    assert p.window == (5, 0)
    with watch() as seen, contextlib.suppress(RuntimeError):
        published(q, k, k, 0.0, 0.3, False, -1, -1, 0.0)
    assert not seen.calls, "a call that failed is none"


def test_our_own_attention():
    x = SQUARE.clone().requires_grad_()
    k = heads(2, 2, 9, 8)
    bias = heads(1, 4, 6, 9)
    options = {"window": (3, -1), "causal": True, "softcap": 2.0, "backend": "simulator"}
    with watch() as seen:
        attention(x, k, k, bias=bias, **options).sum().backward()
        attention(x[:1], x[:1], x[:1], cu_seqlens_q=(0, 2, 6), cu_seqlens_k=(0, 2, 6))

    one, packed = (call.problem for call in seen)
    assert (one.heads, one.kv_heads, one.n_q, one.n_kv) == (4, 2, 6, 9)
    assert (one.causal, one.window, one.softcap, one.bias) == (True, (3, 0), 2.0, (1, 4))
    assert packed.cu_seqlens_q == (0, 2, 6)
    assert [call.backward for call in seen] == [True, False]


# -- names, gradients, exceptions -----------------------------------------------------------------


class Attend(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"a": Attend(), "b": nn.Sequential(Attend())})

    def forward(self, x):
        return self.inner["b"](self.inner["a"](self.inner["a"](x)))


def test_names_are_the_models():
    with watch(model := Twice()) as seen:
        model(SQUARE)

    assert [call.name for call in seen] == ["inner.a", "inner.a", "inner.b.0"]
    assert seen["b.0"] is seen[2]
    assert len(seen.named("a")) == 2
    with pytest.raises(OptionError, match="'a' made 2 calls"):
        seen["a"]
    with pytest.raises(OptionError, match=r"did you mean 'inner\.a'"):
        seen["inner.aa"]


def test_without_a_model_the_outermost_names():
    with watch() as seen:
        Twice()(SQUARE)
        F.scaled_dot_product_attention(SQUARE, SQUARE, SQUARE)

    assert [call.name for call in seen] == ["inner.a", "inner.a", "inner.b.0", ""]


def test_an_exception_leaves_what_was_seen_and_no_watch():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("broken")

    model = nn.ModuleDict({"a": Attend(), "broken": nn.Sequential(Broken())})
    asked = torch.overrides.has_torch_function
    with contextlib.suppress(ValueError), watch(model) as seen:
        model["a"](SQUARE)
        with contextlib.suppress(ValueError):
            model["broken"](SQUARE)
        model["a"](SQUARE)
        model["broken"](SQUARE)
        raise AssertionError("the watch keeps no exception to itself")
    model["a"](SQUARE)

    assert [call.name for call in seen] == ["a", "a"]
    assert torch.overrides.has_torch_function is asked
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_backward_is_seen_where_it_ran():
    x = SQUARE.clone().requires_grad_()
    with watch(model := Twice()) as seen:
        first = model(x)
        model(x)
    assert not any(call.backward for call in seen)

    first.sum().backward()
    assert [call.backward for call in seen] == [True] * 3 + [False] * 3

    alone = x.grad.clone()
    x.grad = None
    model(x).sum().backward()
    assert torch.equal(alone, x.grad)
    passes = {(row["pass"], row["algorithm"]) for row in seen.rows()}
    assert passes == {(d, a) for d in ("forward", "backward") for a in ("standard", "flash2")}


def test_checkpointing_makes_calls_in_the_backward():
    x = SQUARE.clone().requires_grad_()
    with watch() as seen:
        torch.utils.checkpoint.checkpoint(Attend(), x, use_reentrant=False).sum().backward()

    assert ["checkpointing" in call.note for call in seen] == [False, True]


def test_functions_in_a_graph_of_the_compiler_are_noted():
    """Our operator has a score and a mask function as a text."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def attend(x):
        halved, lower = lambda s, b, h, i, j: s / 2, lambda b, h, i, j: i >= j
        return flashsim.torch.flex_attention(x, x, x, halved, lower)

    torch.compile(attend, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(SQUARE)
    call = seen_in(lambda x: graphs[0](x)[0], SQUARE)
    assert "score_mod: what it computes is not counted" in call.note
    assert "mask_mod, which is not read: counted as dense" in call.note


def test_a_compiled_model_is_seen_uncompiled():
    model = Twice()
    compiled = torch.compile(model, backend="eager")
    with watch(compiled) as seen:
        got = compiled(SQUARE)

    assert [call.name for call in seen] == ["inner.a", "inner.a", "inner.b.0"]
    assert torch.equal(got, model(SQUARE))


def test_what_cannot_be_read_is_said_and_the_model_goes_on(monkeypatch):
    def fails(*_):
        raise KeyError("query")

    monkeypatch.setitem(
        flashsim.torch.signatures._READERS, "aten::scaled_dot_product_attention", fails
    )
    with watch() as seen:
        out = Attend()(SQUARE)

    assert out.shape == SQUARE.shape
    assert not seen.calls
    assert seen.missed == ["Attend: KeyError: 'query'"]
    assert "not read, Attend" in seen.table().note


def test_what_is_no_model_is_refused():
    with pytest.raises(DTypeError, match=r"takes a torch\.nn\.Module, got str"), watch("model"):
        pass


# -- without numbers ------------------------------------------------------------------------------


def test_meta_and_fake_tensors():
    with watch() as seen:
        x = torch.empty(1, 64, 4096, 128, dtype=torch.bfloat16, device="meta")
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
        F.scaled_dot_product_attention(x, x, x, attn_mask=x[0, 0, :, :1] > 0)
        with FakeTensorMode():
            y = torch.empty(1, 64, 4096, 128, dtype=torch.bfloat16)
            F.scaled_dot_product_attention(y, y, y, is_causal=True)

    assert [call.device for call in seen] == ["meta", "meta", "cpu (fake)"]
    assert [call.problem.causal for call in seen] == [True, False, True]
    assert "without values" in seen[1].note
    assert not seen[2].note
    assert all(call.inputs is None for call in seen)


# -- what they move -------------------------------------------------------------------------------


def test_rows_are_what_count_says():
    with watch(model := Twice()) as seen:
        model(SQUARE)
    one, two, *totals = (r for r in seen.rows(device="A100"))
    p = flashsim.Problem(6, head_dim=8, batch=2, heads=4, causal=True)

    assert (one["module"], one["calls"]) == ("inner.a and 1 more", 3)
    assert [r["module"] for r in totals] == ["total", "total"]
    for row, total, algorithm in zip((one, two), totals, ("standard", "flash2"), strict=True):
        counted = flashsim.count(p, algorithm=algorithm, device="A100")
        assert row["requested B"] == counted.bytes()
        assert row["DRAM B"] == flashsim.l2.dram(counted).bytes()
        assert row["compulsory B"] == counted.compulsory()
        assert row["FLOPs"] == counted.flops()
        assert row["saved B"] == counted.saved()
        for name in ("requested B", "DRAM B", "compulsory B", "FLOPs", "saved B"):
            assert total[name] == 3 * row[name]
        assert total["scores B"] == row["scores B"]
    assert one["scores B"] == 2 * (2 * 4 * 6 * 6) * 4
    assert two["scores B"] == 0
    assert one["ms by"] == "roofline"


def test_time_is_predicted_where_a_kernel_runs_and_a_roofline_elsewhere():
    x = heads(1, 4, 256, 64, dtype=torch.bfloat16)
    with watch() as seen:
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
    standard, flash2 = seen.rows(device="H200")[:2]
    p = seen[0].problem

    predicted = flashsim.predict.predict(p, device="H200").seconds
    dram = flashsim.l2.dram(flashsim.count(p, algorithm="standard", device="H200")).bytes()
    assert (flash2["ms by"], standard["ms by"]) == ("predict", "roofline")
    assert flash2["ms"] == pytest.approx(1e3 * predicted)
    assert standard["bound"] == "HBM"
    bandwidth = flashsim.Device.get("H200").hbm_bandwidth
    assert standard["ms"] == pytest.approx(1e3 * dram / bandwidth)
    without = seen.rows(device="H200", l2=False)[0]
    assert without["DRAM B"] is None
    assert "tensors once" in without["ms by"]


def test_a_call_that_cannot_be_counted_says_why():
    x = heads(1, 1, 4, 1024)
    with watch() as seen:
        F.scaled_dot_product_attention(x, x, x)
        Attend()(SQUARE)

    with pytest.raises(ShapeError, match="head_dim must be between"):
        seen[0].problem  # noqa: B018
    first, *rest = seen.rows()
    assert "not counted: head_dim" in first["note"]
    assert first["requested B"] is None
    assert [r["calls"] for r in rest] == [1, 1, 1, 1]


def test_the_forms_of_the_table(monkeypatch):
    with watch(model := Twice()) as seen:
        model(SQUARE)

    rows = seen.rows()
    assert json.loads(seen.json()) == rows
    assert seen.csv().splitlines()[0].startswith("module,calls,api,shape")
    assert "inner.a and 1 more" in str(seen)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pandas", None)
        with pytest.raises(BackendUnavailable, match=r"pip install 'flashsim-attention\[pandas\]'"):
            seen.to_pandas()
    pandas = pytest.importorskip("pandas")
    frame = seen.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["calls"]) == [3, 3, 3, 3]


def test_nothing_seen_is_an_empty_table():
    with watch() as seen:
        pass

    assert len(seen) == 0
    assert seen.rows() == []
    with pytest.raises(OptionError, match="nothing to plot"):
        seen.plot()
    table = seen.table()
    assert "0 attention calls" in table.title
    assert "nothing was seen: attention written out by hand" in table.note
    with pytest.raises(OptionError, match=r"in 'attn'; nothing was seen"):
        seen["attn"]


def test_a_call_is_run_on_its_own_numbers():
    x = heads(1, 2, 32, 16, dtype=torch.bfloat16)
    with watch(keep=2**20) as seen:
        out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    with watch(keep=0) as none_kept:
        F.scaled_dot_product_attention(x, x, x, is_causal=True)

    tiling = flashsim.Tiling(16, 16)
    trace = seen[0].trace(tiling=tiling)
    assert trace.bytes() == flashsim.count(seen[0].problem, tiling=tiling).bytes()
    assert torch.equal(seen[0].inputs[0], x)
    assert seen[0].inputs[0] is not x
    again = flashsim.run(*(t.float().numpy() for t in seen[0].inputs), causal=True).out
    assert abs(again - out.float().numpy()).max() < 0.02
    assert none_kept[0].inputs is None
    assert none_kept[0].trace(tiling=tiling).bytes() == trace.bytes()


def test_bars_are_what_was_counted():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    with watch() as seen:
        Attend()(SQUARE)

    axes = seen.plot(log=True)

    counted = flashsim.count(seen[0].problem, algorithm="standard", device="H100")
    heights = {bar.get_height() for bar in axes.patches}
    assert {counted.bytes("load"), counted.bytes("store")} <= heights


def test_threads_are_watched_apart():
    """Who begins first may end first; names are of modules that run in the same thread."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, modules = heads(2, 6, 8), [nn.Sequential(attention, nn.Identity()) for _ in range(2)]
    before = torch.overrides.has_torch_function, nn.modules.module._global_forward_hooks.copy()
    turns = [threading.Barrier(2, timeout=60) for _ in range(4)]
    seen = []

    def first():
        with watch(modules[0]) as mine:
            turns[0].wait()  # the other watches, too
            turns[1].wait()  # and is inside of its module
            modules[0][0](x, x, x)
            turns[2].wait()
        seen.append(mine)
        turns[3].wait()

    class Inside(nn.Module):
        def forward(self, x):
            turns[1].wait()
            turns[2].wait()
            turns[3].wait()  # the first has ended
            return F.scaled_dot_product_attention(x, x, x)

    def second():
        with watch(outer) as mine:
            turns[0].wait()
            outer(x)
        seen.append(mine)

    outer = nn.Sequential(nn.Identity(), Inside())
    threads = [threading.Thread(target=one) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [[call.name for call in one] for one in seen] == [["0"], ["1"]]
    after = torch.overrides.has_torch_function, nn.modules.module._global_forward_hooks.copy()
    assert after == before
    compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
    assert compiled(x), "compiled code is no longer run uncompiled"


def test_mapped_calls_are_counted_each():
    x = heads(3, 2, 4, 6, 8)
    mask = torch.ones(3, 6, 6, dtype=torch.bool)
    with watch() as seen, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        torch.vmap(lambda q: F.scaled_dot_product_attention(q, x[0], x[0]))(x)
        torch.vmap(lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m))(x, mask)
        torch.vmap(torch.vmap(lambda q: F.scaled_dot_product_attention(q, q, q)))(x)
        torch.vmap(lambda q: attention(q, q, q))(x)

    assert [(call.problem.batch, call.problem.heads) for call in seen] == [(6, 4)] * 4
    assert ["without values" in call.note for call in seen] == [False, True, False, False]
    assert not seen.missed
    assert seen[0].trace().bytes("load", "Q") == x.numel() * 4


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_our_backward_is_seen_inside_an_autograd_function(device):
    q = heads(2, 6, 8).to(device).requires_grad_()
    with watch() as seen:
        first = FlashAttention.apply(q, q, q)
        FlashAttention.apply(q, q, q)
        first.sum().backward()
        torch.func.grad(lambda q: attention(q, q, q).sum())(q.detach())

    assert [call.backward for call in seen] == [True, False, True]


# -- the command ----------------------------------------------------------------------------------

PROGRAM = """
import sys, torch, torch.nn.functional as F
x = torch.ones(1, 2, 32, 16)
F.scaled_dot_product_attention(x, x, x, is_causal=True)
print("said", sys.argv[1:], __name__)
"""


def command(tmp_path, text, *options, own=()):
    """Run `flashsim watch` with these options on a program that has its `own` arguments."""
    script = tmp_path / "script.py"
    script.write_text(text)
    return CliRunner().invoke(app, ["watch", *options, str(script), *own])


def test_a_script_is_run_and_counted(tmp_path):
    people = command(tmp_path, PROGRAM, "--device", "A100", own=["--own", "3", "--", "--n"])
    programs = command(tmp_path, PROGRAM, "--json", "--measure")

    assert people.exit_code == 0, people.output
    assert "said ['--own', '3', '--', '--n'] __main__" in people.stdout
    assert "1 attention call of script.py on A100" in people.stdout
    standard, flash2, *_ = json.loads(programs.stdout)
    assert "said [] __main__" in programs.stderr
    p = flashsim.Problem(32, head_dim=16, heads=2, causal=True)
    assert flash2["measured ms"] > 0
    assert flash2["requested B"] == flashsim.count(p).bytes()
    assert standard["requested B"] == flashsim.count(p, algorithm="standard").bytes()


def test_an_option_of_both_after_the_program_is_refused_except_after_two_dashes(tmp_path):
    unclear = command(tmp_path, PROGRAM, own=["--device=A100"])
    clear = command(tmp_path, PROGRAM, own=["--", "--device=A100"])
    later = command(tmp_path, PROGRAM, own=["1", "--", "--json"])

    assert "said ['1', '--', '--json']" in later.stdout
    assert unclear.exit_code == 2
    assert "--device=A100 after the program could be an option of flashsim" in unclear.stderr
    assert "said ['--device=A100']" in clear.stdout


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("exit('no')", 1, "no"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_an_error_of_the_script_is_its_own(tmp_path, end, code, said):
    result = command(tmp_path, f"{PROGRAM}\n{end}", "--csv")

    assert result.exit_code == code
    assert said in result.stderr
    assert len(result.stdout.splitlines()) == 5, "a header, two rows, two totals"


def test_a_device_that_is_none_is_refused_before_the_script_runs(tmp_path):
    result = command(tmp_path, PROGRAM, "--device", "H1000")

    assert result.exit_code == 2
    assert "said" not in result.output
