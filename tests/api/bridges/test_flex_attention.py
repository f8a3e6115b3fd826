"""`flashsim.torch.flex_attention` takes functions written for torch's FlexAttention, unchanged."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import flex_attention as flex  # noqa: E402

from flashsim.errors import FunctionError, OptionError, ShapeError  # noqa: E402
from flashsim.torch import flex_attention  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")

B, H, N, M, D = 2, 4, 70, 90, 8
torch.manual_seed(0)
SLOPES = torch.randn(H, dtype=torch.float64, requires_grad=True)
TABLE = torch.randn(H, N + M, dtype=torch.float64, requires_grad=True)
BIAS = torch.randn(B, H, N, M, dtype=torch.float64, requires_grad=True)
SCALE = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
DOCS = (torch.arange(M) // 20).repeat(B, 1)
LENGTHS = torch.tensor([M, 41])


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


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


CAPTURED = {"alibi": [SLOPES], "relative": [TABLE], "biased": [SCALE, BIAS]}


CASES = [
    *((score, None, "numba") for score in (alibi, relative, biased, capped, squared)),
    *((score, documents, "simulator") for score in (alibi, relative, biased, capped, squared)),
    *((None, mask, "numba") for mask in (causal, documents, by_head)),
    *((relative, mask, "numba") for mask in (causal, by_head)),
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
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)


def _loss(out, lse, weight, of_lse):
    return (out * weight).sum() + torch.where(torch.isinf(lse), 0, lse * of_lse).sum()


def _reference(q, k, v, score, mask):
    """Attention by torch's own operations on whole matrices, with its vmap over the function."""
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
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
    wide = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    out = flex_attention(q, k, v, alibi, enable_gqa=True)
    torch.testing.assert_close(out, _reference(q, *wide, alibi, None)[0])


def test_blocks_that_are_left_out_are_masked():
    q, k, v = inputs()
    counts = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1, 2], [2, 1, 0], [1, 0, 2]]]], dtype=torch.int32)
    blocks = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32, seq_lengths=(N, M))
    grid = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 1, 0]], dtype=torch.bool)
    listed = lambda b, h, i, j: grid[i // 32, j // 32]  # noqa: E731
    out = flex_attention(q, k, v, None, blocks)
    torch.testing.assert_close(out, _reference(q, k, v, None, listed)[0])


def test_a_mask_of_other_lengths_is_refused():
    q, k, v = inputs()
    blocks = flex.create_block_mask(causal, None, None, N, M + 128, device="cpu")
    with pytest.raises(ShapeError, match="70 x 218"):
        flex_attention(q, k, v, None, blocks)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_code_calls_it():
    q, k, v = inputs()
    compiled = torch.compile(lambda *x: flex_attention(*x, alibi) * 2, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), 2 * flex_attention(q, k, v, alibi))


def test_a_line_that_cannot_be_traced_is_named():
    def wrong(score, b, h, q_idx, kv_idx):
        if q_idx > kv_idx:
            return score
        return score + 1

    with pytest.raises(FunctionError, match=r"test_flex_attention.py:\d+: if q_idx > kv_idx"):
        flex_attention(*inputs(), wrong)


def test_sinks_have_a_gradient():
    q, k, v = inputs()
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    S = q @ k.mT / D**0.5
    S = torch.cat([S, sinks[:, None, None].expand(B, H, N, 1)], dim=-1)
    expected = torch.softmax(S, dim=-1)[..., :-1] @ v
    out = flex_attention(q, k, v, sinks=sinks)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    (ours,), (theirs,) = (torch.autograd.grad((x * weight).sum(), [sinks]) for x in (out, expected))
    torch.testing.assert_close(ours, theirs)
