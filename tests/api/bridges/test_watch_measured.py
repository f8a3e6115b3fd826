"""`watch(model, measure=True)`: each call's time, forward and backward, by torch's profiler.

On a CPU, where the profiler times operators; tests/gpu/test_torch.py has kernels.
"""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import flashsim.torch  # noqa: E402
from flashsim.errors import OptionError  # noqa: E402
from flashsim.torch import watch  # noqa: E402
from flashsim.torch.calls import AttentionCall, Extents  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Layer(nn.Module):
    """Attention between two linear layers, which are not attention."""

    def __init__(self, attend):
        super().__init__()
        self.attend, self.before, self.after = attend, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.before(x))
        return self.after(self.attend(x, x, x))


def ours(q, k, v):
    return flashsim.torch.attention(q, k, v, causal=True, backend="simulator")


def two_layers(attend):
    torch.manual_seed(0)
    return nn.Sequential(Layer(attend), Layer(attend)), torch.randn(2, 2, 24, 8)


def step(model, x):
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("attend", "forward", "backward"),
    [
        (F.scaled_dot_product_attention, FLASH, f"{FLASH}_backward"),
        (ours, "flashsim::attention", "flashsim::attention_backward"),
    ],
    ids=["sdpa", "ours"],
)
def test_a_calls_operators_are_timed_and_no_others(attend, forward, backward):
    model, x = two_layers(attend)
    expected = step(model, x)
    with watch(model, measure=True) as seen:
        got = step(model, x)

    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert [call.name for call in seen] == ["0", "1"]
    for call in seen:
        assert call.measured["forward"][forward] > 0
        assert call.measured["backward"][backward] > 0
        names = {name for times in call.measured.values() for name in times}
        assert not {"aten::addmm", "aten::mm", "aten::relu", "aten::linear"} & names
        assert backward not in call.measured["forward"]


def test_attention_written_out_is_timed_node_by_node():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation("eager")
    with watch(model, measure=True) as seen:
        model(torch.arange(24)[None]).logits.sum().backward()

    for call in seen:
        assert {"aten::bmm", "aten::_softmax"} <= call.measured["forward"].keys()
        assert {"aten::bmm", "aten::_softmax_backward_data"} <= call.measured["backward"].keys()
        names = {name for times in call.measured.values() for name in times}
        assert not {"aten::mm", "aten::silu", "aten::embedding_dense_backward"} & names


def test_tables():
    model, x = two_layers(F.scaled_dot_product_attention)
    with watch(model, measure=True) as seen:
        step(model, x)
        with torch.no_grad():
            model(x)

    trained = [call for call in seen if call.backward]
    row, *_ = (r for r in seen.rows() if r["pass"] == "backward" and r["algorithm"] == "flash2")
    times = [1e3 * sum(call.measured["backward"].values()) for call in trained]
    assert row["measured ms"] == pytest.approx(sum(times) / 2)
    assert row["measured on"] == "cpu, operators"
    total = seen.rows()[-1]
    assert (total["module"], total["pass"]) == ("total", "backward")
    assert total["measured ms"] == pytest.approx(sum(times))
    assert "measured ms: what was run here (cpu, operators)" in seen.table().note
    assert "measured ms" in seen.table().columns
    kernels = [r for r in seen.kernels().records() if r["pass"] == "backward"]
    assert sum(r["ms"] for r in kernels) == pytest.approx(row["measured ms"])
    assert [r["ms"] for r in kernels] == sorted((r["ms"] for r in kernels), reverse=True)


def test_what_was_not_run_or_not_asked_has_no_time():
    model, x = two_layers(F.scaled_dot_product_attention)
    with watch(model.to("meta"), measure=True) as seen:
        model(x.to("meta"))
    with watch(measure=False) as other:
        F.scaled_dot_product_attention(x, x, x)

    for calls in (seen, other):
        assert len(calls) > 0
        assert {row["measured ms"] for row in calls.rows()} == {None}
        assert "measured ms" not in calls.table().columns
        with pytest.raises(OptionError, match="no times were measured; record"):
            calls.kernels()


def test_a_profiler_that_runs_already_is_left_alone():
    words = "torch's profiler is already running"
    with torch.profiler.profile() as mine:
        with pytest.raises(OptionError, match=words), watch(measure=True):
            pass
        torch.ones(3).sum()
    assert "aten::sum" in {event.name for event in mine.events()}


@pytest.mark.parametrize(
    ("device", "place"),
    [("cpu", "cpu"), ("cuda:0", "cuda"), ("cuda:3", "cuda"), ("meta", None),
     ("cpu (fake)", None), ("cuda:0 (fake)", None)],
)  # fmt: skip
def test_where_there_is_something_to_measure(device, place):
    """A GPU's name has a number, and a fake tensor lies on one that is not there."""
    call = AttentionCall("", "ours", Extents(1, 1, 1, 4, 4, 8, 8), "bfloat16", device)
    assert call.place == place
