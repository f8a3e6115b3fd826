"""`flashsim.torch.flex_attention` takes functions written for torch's FlexAttention, unchanged."""

import shutil
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from bridge_cases import plain  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402

from flashsim.errors import (  # noqa: E402
    DTypeError,
    FlashSimError,
    FunctionError,
    OptionError,
    ShapeError,
    UnsupportedError,
)
from flashsim.torch import attention, decode, flex_attention  # noqa: E402

pytestmark = [
    pytest.mark.promise("bridges equal their library"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

B, H, N, M, D = 2, 4, 70, 90, 8
torch.manual_seed(0)
SLOPES = torch.randn(H, dtype=torch.float64, requires_grad=True)
TABLE = torch.randn(H, N + M, dtype=torch.float64, requires_grad=True)
BIAS = torch.randn(B, H, N, M, dtype=torch.float64, requires_grad=True)
SCALE = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
DOCS = (torch.arange(M) // 20).repeat(B, 1)
LENGTHS = torch.tensor([M, 41])
MODEL = SimpleNamespace(slopes=SLOPES)


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def of_an_object(score, b, h, q_idx, kv_idx):
    return score + MODEL.slopes[h] * (kv_idx - q_idx)


def relative(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, kv_idx - q_idx + N]


def biased(score, b, h, q_idx, kv_idx):
    return SCALE * score + BIAS[b, h, q_idx, kv_idx]


def capped(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx + 20 >= kv_idx, 5.0 * torch.tanh(score / 5.0), -float("inf"))


def squared(score, b, h, q_idx, kv_idx):
    return score * torch.sigmoid(score) + torch.abs(score).clamp(max=2.0)


def causal(b, h, q_idx, kv_idx):
    return q_idx + (M - N) >= kv_idx


def documents(b, h, q_idx, kv_idx):
    return (DOCS[b, q_idx] == DOCS[b, kv_idx]) & (kv_idx < LENGTHS[b])


def by_head(b, h, q_idx, kv_idx):
    return torch.logical_or(q_idx - kv_idx < 3 * h + 1, kv_idx % 7 == 0)


def inputs(heads=H):
    like = {"dtype": torch.float64, "requires_grad": True}
    q = torch.randn(B, H, N, D, **like)
    return q, torch.randn(B, heads, M, D, **like), torch.randn(B, heads, M, D, **like)


CAPTURED = {
    "alibi": [SLOPES],
    "of_an_object": [SLOPES],
    "relative": [TABLE],
    "biased": [SCALE, BIAS],
}


CASES = [
    *((score, None, "numba") for score in (alibi, relative, biased, capped, squared)),
    *((score, documents, "simulator") for score in (alibi, relative, biased, capped, squared)),
    *((None, mask, "numba") for mask in (causal, documents, by_head)),
    *((relative, mask, "numba") for mask in (causal, by_head)),
    (of_an_object, None, "simulator"),
]


@pytest.mark.parametrize(("score", "mask", "backend"), CASES)
def test_equals_torch(score, mask, backend):
    q, k, v = inputs()
    blocks = None
    if mask is not None:
        blocks = flex.create_block_mask(mask, B, H, N, M, device="cpu", BLOCK_SIZE=32)
    theirs = _reference(q, k, v, score, mask)
    out, lse = flex_attention(q, k, v, score, blocks, return_lse=True, backend=backend)
    torch.testing.assert_close(out, theirs[0], rtol=1e-9, atol=1e-9)
    seen = ~torch.isinf(theirs[1])
    torch.testing.assert_close(lse[seen], theirs[1][seen], rtol=1e-9, atol=1e-9)
    moved = [q, k, v, *CAPTURED.get(getattr(score, "__name__", ""), [])]
    weight, of_lse = torch.randn_like(out), torch.randn_like(lse)
    ours = torch.autograd.grad(_loss(out, lse, weight, of_lse), moved)
    expected = torch.autograd.grad(_loss(*theirs, weight, of_lse), moved)
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


def _loss(out, lse, weight, of_lse):
    return (out * weight).sum() + torch.where(torch.isinf(lse), 0, lse * of_lse).sum()


def _reference(q, k, v, score, mask, heads=H):
    """Attention by torch's own operations on whole matrices, with its vmap over the function."""
    b, h = torch.arange(B)[:, None, None, None], torch.arange(heads)[:, None, None]
    i, j = torch.arange(N)[:, None], torch.arange(M)
    S = q @ k.mT / D**0.5
    S = S if score is None else score(S, b, h, i, j)
    if mask is not None:
        S = torch.where(mask(b, h, i, j), S, -float("inf"))
    lse = torch.logsumexp(S, dim=-1)
    safe = torch.where(torch.isinf(lse), 0, lse)
    return torch.exp(S - safe[..., None]) @ v, lse


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_equals_torchs_own_flex_attention():
    q, k, v = (x.detach() for x in inputs())  # torch has no backward on a CPU
    blocks = flex.create_block_mask(by_head, B, H, N, M, device="cpu")
    theirs = flex.flex_attention(q, k, v, squared, blocks)
    torch.testing.assert_close(flex_attention(q, k, v, squared, blocks), theirs)


def test_grouped_heads_are_asked_for():
    q, k, v = inputs(heads=2)
    with pytest.raises(OptionError, match="enable_gqa=True"):
        flex_attention(q, k, v, alibi)
    for name in ("enable_gqa", "return_lse"):
        with pytest.raises(DTypeError, match=f"{name} must be True or False, got tensor"):
            flex_attention(q, k, v, **{name: torch.ones(2)})
    wide = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    out = flex_attention(q, k, v, alibi, enable_gqa=True)
    torch.testing.assert_close(out, _reference(q, *wide, alibi, None)[0])


@pytest.mark.parametrize("how", [lambda f: f, lambda f: whole(f)], ids=["eager", "compiled"])
def test_other_outputs_are_requested_as_in_torch(how):
    q, k, v = inputs()
    out, lse = flex_attention(q, k, v, alibi, return_lse=True)
    attend = how(partial(flex_attention, q, k, v, alibi))
    for wants in (True, False):
        got, aux = attend(return_aux=flex.AuxRequest(lse=wants))
        torch.testing.assert_close((got, aux.lse), (out, lse if wants else None))
        assert aux.max_scores is None
    for text, told in (
        ("must be an AuxRequest, got True", {"return_aux": True}),
        ("both passed", {"return_aux": flex.AuxRequest(), "return_lse": True}),
        ("largest scores", {"return_aux": flex.AuxRequest(max_scores=True)}),
    ):
        with pytest.raises(FlashSimError, match=text):
            flex_attention(q, k, v, **told)


GRID = [[[1, 0, 0], [0, 1, 1], [0, 1, 0]], [[0, 1, 1], [1, 1, 1], [1, 1, 1]]]
CAUSAL_GRID = [[[1, 1, 0], [1, 1, 1], [1, 1, 1]]]  # the blocks in which `causal` keeps a score


@pytest.mark.parametrize("full", [None, "whole"], ids=["masked", "full"])
@pytest.mark.parametrize(
    "grid", [GRID[:1], GRID, CAUSAL_GRID], ids=["alike", "by head", "as the mask"]
)
def test_blocks_that_are_left_out_are_masked(grid, full):
    """Also blocks that only some heads list; the mask function does not apply to full blocks."""
    q, k, v = inputs(heads=2)
    q, grid = q[:, :2], torch.tensor([grid], dtype=torch.bool)
    lists = grid.sum(-1).int(), grid.int().argsort(stable=True, descending=True).int()
    none = torch.zeros_like(lists[0]), lists[1]
    given = (*none, *lists) if full else lists
    blocks = flex.BlockMask.from_kv_blocks(
        *given, BLOCK_SIZE=32, mask_mod=causal if full else None, seq_lengths=(N, M)
    )
    listed = lambda b, h, i, j: grid[0, h % grid.shape[1], i // 32, j // 32]  # noqa: E731
    out = flex_attention(q, k, v, None, blocks)
    torch.testing.assert_close(out, _reference(q, k, v, None, listed, heads=2)[0])


def test_the_default_device_of_new_tensors_does_not_matter():
    """`torch.set_default_device("cuda")` is common, also where tensors lie on the CPU."""
    q, k, v = (x.detach()[:1] for x in inputs())
    blocks = flex.create_block_mask(causal, None, None, N, M, device="cpu", BLOCK_SIZE=32)
    cuts = {"cu_seqlens_q": [0, N], "cu_seqlens_k": [0, M]}
    calls = (
        lambda: flex_attention(q, k, v, None, blocks),
        lambda: attention(q, k, v, **cuts),
        lambda: decode(q[:, :, :1], k, v, cache_seqlens=[5], cache_batch_idx=[0]),
    )
    for call in calls:
        expected = call()
        with torch.device("meta"):
            found = call()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_mask_of_other_lengths_is_refused():
    q, k, v = inputs()
    blocks = flex.create_block_mask(causal, None, None, N, M + 128, device="cpu")
    with pytest.raises(ShapeError, match="70 x 218"):
        flex_attention(q, k, v, None, blocks)


def whole(function, backend="aot_eager"):
    """Compile without a graph break; what an earlier test compiled is forgotten."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


class Biased(torch.nn.Module):
    """Its score function is made in `forward`, and captures a result, a parameter and a number."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(H, N + M, dtype=torch.float64))
        self.factor = 1.5

    def forward(self, q, k, v, blocks):
        doubled = 2 * self.table

        def score(s, b, h, q_idx, kv_idx):
            return s * self.factor + doubled[h, kv_idx - q_idx + N]

        return flex_attention(q, k, v, score, blocks)


INDUCTOR = pytest.param(
    "inductor",
    marks=[
        pytest.mark.thorough,
        pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which inductor needs"),
        pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch's, of its own
    ],
)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_fullgraph_with_a_module_and_a_block_mask(backend):
    """Gradients too, of inputs and of the parameter."""
    q, k, v = inputs()
    model, blocks = Biased(), flex.create_block_mask(documents, B, H, N, M, device="cpu")
    weight = torch.randn(B, H, N, D, dtype=torch.float64)
    expected = model(q, k, v, blocks)

    out = whole(model, backend)(q, k, v, blocks)

    torch.testing.assert_close(out, expected)
    of = [q, k, v, model.table]
    ours, theirs = (torch.autograd.grad((x * weight).sum(), of) for x in (out, expected))
    torch.testing.assert_close(ours, theirs)
    model.factor = 0.5
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True, backend=backend)(q, k, v, blocks),
        model(q, k, v, blocks),
    )


@pytest.mark.parametrize("score", [alibi, biased])
def test_fullgraph_with_sinks_grouped_heads_and_captured_parameters(score):
    q, k, v = inputs(heads=2)
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)

    def loss(q, k, v, sinks):
        out, lse = flex_attention(
            q, k, v, score, causal, enable_gqa=True, sinks=sinks, scale=0.3, return_lse=True
        )
        return (out**2).sum() + lse.clamp(min=-9).sum()

    of = [q, k, v, sinks, *CAPTURED[score.__name__]]
    expected = torch.autograd.grad(loss(q, k, v, sinks), of)
    found = torch.autograd.grad(whole(loss)(q, k, v, sinks), of)
    torch.testing.assert_close(found, expected)


def test_fullgraph_with_blocks_that_are_left_out_and_other_lengths():
    q, k, v = inputs()
    counts = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1, 2], [2, 1, 0], [1, 0, 2]]]], dtype=torch.int32)
    blocks = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32, seq_lengths=(N, M))
    masked = lambda q: flex_attention(q, k, v, None, blocks)  # noqa: E731
    torch.testing.assert_close(whole(masked)(q), masked(q))
    with pytest.raises(Exception, match="block_mask was made for 70 x 90 scores"):
        whole(masked)(q[:, :, :30])
    plain = torch.compile(lambda q: flex_attention(q, k, v), backend="eager", dynamic=True)
    for n in (70, 41, 16):
        torch.testing.assert_close(plain(q[:, :, :n]), flex_attention(q[:, :, :n], k, v))


def test_compiled_code_masks_every_score():
    q, k, v = inputs()
    out = whole(lambda q, k, v: flex_attention(q, k, v, block_mask=flex.or_masks()))(q, k, v)
    assert not out.any()


def test_an_exported_program_is_traced_strictly():
    class Attends(torch.nn.Module):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, squared)

    given = tuple(x.detach() for x in inputs())
    with pytest.raises(UnsupportedError, match="strict=True"):
        torch.export.export(Attends(), given, strict=False)
    program = torch.export.export(Attends(), given, strict=True)
    torch.testing.assert_close(program.module()(*given), Attends()(*given))


def test_compiled_code_names_what_cannot_be_traced():
    """Without fullgraph, the error is that of uncompiled code; with it, the compiler's own."""
    q, k, v = inputs()

    def wrong(score, b, h, q_idx, kv_idx):
        return score if q_idx > kv_idx else score + 1

    call = lambda: flex_attention(q, k, v, wrong)  # noqa: E731
    torch._dynamo.reset()
    with pytest.raises(FunctionError, match=r"return score if q_idx > kv_idx"):
        torch.compile(call, backend="eager")()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Data-dependent branching"):
        whole(call)()
    with pytest.raises(Exception, match="the function cumsum cannot be traced"):
        whole(lambda: flex_attention(q, k, v, lambda s, b, h, i, j: torch.cumsum(s, 0)))()


def test_a_line_that_cannot_be_traced_is_named():
    def wrong(score, b, h, q_idx, kv_idx):
        if q_idx > kv_idx:
            return score
        return score + 1

    with pytest.raises(FunctionError, match=r"test_flex_attention.py:\d+: if q_idx > kv_idx"):
        flex_attention(*inputs(), wrong)


def test_torchs_transforms():
    """A second derivative would be zero, as of a constant, if it were not refused."""
    q, k, v = inputs()
    scales = torch.rand(H, dtype=torch.float64, requires_grad=True)

    def loss(q, scales):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * scales[h]).square().sum()

    expected = torch.autograd.grad(loss(q, scales), (q, scales), create_graph=True)
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(q, scales), expected)
    for x in expected:
        with pytest.raises(UnsupportedError, match="no second derivatives"):
            x.sum().backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="make the mapped axis part of the batch"):
        torch.vmap(lambda q: loss(q, scales))(torch.stack([q, q]))


def test_a_captured_tensor_may_be_lazily_negated():
    q, k, v = inputs()
    negated = torch.randn(H, dtype=torch.complex128).conj().imag
    plus = flex_attention(q, k, v, lambda s, b, h, i, j: s + negated[h] * i)
    minus = flex_attention(q, k, v, lambda s, b, h, i, j: s + negated.resolve_neg()[h] * i)
    assert negated.is_neg()
    torch.testing.assert_close(plus, minus)


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 2, 0, 8)])
def test_nothing_to_attend_to(shape):
    q = torch.ones(shape, requires_grad=True)
    per_row, sinks = torch.ones(4, requires_grad=True), torch.ones(2, requires_grad=True)
    out = flex_attention(q, q, q, lambda s, b, h, i, j: s * per_row[i], sinks=sinks)
    out.sum().backward()
    for x in (q, per_row, sinks):
        assert x.grad.shape == x.shape
        assert not x.grad.any()


def test_sinks_have_a_gradient():
    q, k, v = inputs()
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    expected = plain(q, k, v, sinks=sinks)
    out = flex_attention(q, k, v, sinks=sinks)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    (ours,), (theirs,) = (torch.autograd.grad((x * weight).sum(), [sinks]) for x in (out, expected))
    torch.testing.assert_close(ours, theirs)
