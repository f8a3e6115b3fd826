"""torch's tests of FlexAttention, from their published text, on `flashsim.torch.flex_attention`.

https://github.com/pytorch/pytorch/blob/main/test/inductor/test_flex_attention.py
https://github.com/pytorch/pytorch/blob/main/test/inductor/test_flex_decoding.py
"""

from collections.abc import Sequence
from typing import Any

import torch
from function_cases import Case
from torch.nn.attention import flex_attention as torchs

from flashsim.torch import flex_attention
from outside.cases import Point, Test, one_of_each, product
from outside.functions_judged import judged

TITLE = "torch, FlexAttention"
SIZES = (2, 4, 4), (2, 8, 2)


def functions(batch: int, heads: int, n_q: int, n_kv: int, device: str) -> dict[str, Case]:
    """Return the score functions and masks of torch's tests, by their names there."""
    draw, far = torch.Generator(device).manual_seed(3), max(n_q, n_kv)

    def rand(*shape: int) -> torch.Tensor:
        return 0.5 * torch.randn(shape, generator=draw, device=device)

    def whole(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=draw, device=device)

    by_batch, by_all = rand(batch, n_q, n_kv), rand(batch, heads, n_q, n_kv)
    matrix, per_head, gate = rand(n_q, n_kv), rand(heads, n_q, n_kv), rand(heads)
    distances, scale, rows = rand(2 * far), rand(heads), rand(n_q)
    keys, window, first = rand(n_kv), rand(33), rand(n_kv)
    marks, lengths = whole(2, far).bool(), whole(n_kv, batch) + 1
    documents = whole(5, far).sort().values
    offsets = whole(far, n_kv)
    square = max(int(n_kv**0.5), 1)
    minus = -float("inf")

    def masked(mask: Any) -> Any:
        return lambda s, b, h, q, k: torch.where(mask(b, h, q, k), s, minus)

    def natten(b, h, q, k):  # a neighbourhood in an image of `square` columns
        near_x = abs(q % square - k % square) <= 3
        return near_x & (abs(q // square - k // square) <= 3)

    def both_ways(b, h, q, k):  # causal after a prefix that all queries see
        return (q >= k) | ((q < lengths[b]) & (k < lengths[b]))

    causal = lambda b, h, q, k: q >= k  # noqa: E731
    near = lambda b, h, q, k: abs(q - k) <= 50  # noqa: E731
    of_documents = lambda b, h, q, k: documents[q] == documents[k]  # noqa: E731
    both = torchs.and_masks(causal, near)
    either = torchs.or_masks(both, of_documents)
    return {
        "builtin: causal": Case(None, masked(causal)),
        "builtin: relative bias": Case(None, lambda s, b, h, q, k: s + (q - k)),
        "builtin: ALiBi": Case(
            None, lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / heads))
        ),
        "builtin: relative causal": Case(
            None, lambda s, b, h, q, k: torch.where(q <= k, s + (q - k), minus)
        ),
        "function_composition": Case(
            None, lambda s, b, h, q, k: torch.where(q <= k, torch.tanh(s / 3) * 3 + h, minus)
        ),
        "captured_buffers": Case(None, lambda s, b, h, q, k: s + gate[h], {"gate": gate}),
        "captured_scale": Case(None, lambda s, b, h, q, k: s * scale[h], {"scale": scale}),
        "seq_masking": Case(None, masked(lambda b, h, q, k: marks[q] == marks[k])),
        "load_from_bias_seq_only": Case(
            None, lambda s, b, h, q, k: s + matrix[q, k], {"matrix": matrix}
        ),
        "load_from_bias_seq_batch": Case(
            None, lambda s, b, h, q, k: s + by_batch[b, q, k], {"by_batch": by_batch}
        ),
        "load_from_bias_head_seq_batch": Case(
            None, lambda s, b, h, q, k: s + by_all[b, h, q, k], {"by_all": by_all}
        ),
        "load_rel_bias": Case(
            None, lambda s, b, h, q, k: s + distances[q - k + far], {"distances": distances}
        ),
        "dependent_causal_bidirectional": Case(None, masked(both_ways)),
        "natten_2d": Case(natten),
        "silu_on_score": Case(None, lambda s, b, h, q, k: torch.nn.functional.silu(s)),
        "padded_dense_causal": Case(lambda b, h, q, k: (q >= k) & (k < lengths[b])),
        "head_dependent_mask_mod": Case(lambda b, h, q, k: (h % 2 == 0) | (q >= k)),
        "mask_mod_combiners": Case(either),
        "document_masking": Case(torchs.and_masks(causal, of_documents)),
        "fully_masked_out_rows": Case(lambda b, h, q, k: (q > 40) & (k <= q)),
        "score and mask": Case(causal, lambda s, b, h, q, k: s + rows[q] * 2, {"rows": rows}),
        "tanh softcap": Case(causal, lambda s, b, h, q, k: 20 * torch.tanh(s / 20)),
        "relative_1d_bias": Case(
            None,
            lambda s, b, h, q, k: s + torch.abs(distances[torch.abs(q - k)]),
            {"distances": distances},
        ),
        "head_specific_bias": Case(
            None, lambda s, b, h, q, k: s + per_head[h, q, k], {"per_head": per_head}
        ),
        "multiplicative_bias": Case(
            None, lambda s, b, h, q, k: s * (1 + matrix[q, k]), {"matrix": matrix}
        ),
        "local_window_bias": Case(
            None,
            lambda s, b, h, q, k: s + window[torch.clamp(q - k, -16, 16) + 16],
            {"window": window},
        ),
        "global_tokens_bias": Case(None, lambda s, b, h, q, k: s + first[k], {"first": first}),
        "weird_bias": Case(
            None, lambda s, b, h, q, k: s + by_all[b, h, 0, k] * gate[h], {"gate": gate}
        ),
        "indirect_bias": Case(
            None, lambda s, b, h, q, k: s + distances[offsets[k]], {"distances": distances}
        ),
        "symmetric_bias": Case(
            None, lambda s, b, h, q, k: s + keys[k] + rows[q], {"keys": keys, "rows": rows}
        ),
        "flipped_indexed_bias": Case(
            None, lambda s, b, h, q, k: s + matrix[n_q - 1 - q, k], {"matrix": matrix}
        ),
        "head_specific_gate": Case(
            None, lambda s, b, h, q, k: s * torch.sigmoid(gate[h]), {"gate": gate}
        ),
    }


def tests(device: str, whole: bool) -> list[Test]:
    """Return the tests, with each function once and one of the sizes; `whole`: with each size."""
    gpu = device == "cuda"
    lengths = (
        ((2048, 2048), (1025, 1025), (100, 100)) if gpu else ((200, 200), (129, 257), (1, 100))
    )
    few = ((1, 2048), (7, 1000)) if gpu else ((1, 300), (7, 200))
    names = functions(1, 1, 1, 1, "cpu")
    like = {"heads": SIZES, "dtype": ("bfloat16", "float16", "float32"), "device": [device]}

    def choose(points: Sequence[Point]) -> Sequence[Point]:
        return (
            points if whole else [*one_of_each("name")(points), *one_of_each("n", "dtype")(points)]
        )

    return [
        Test("test_flex_attention", one, product(name=names, n=lengths, **like), chosen=choose),
        Test("test_flex_decoding", one, product(name=names, n=few, **like), chosen=choose),
        Test("test_block_mask_non_divisible", blocks,
             product(n=((1025, 1025), (100, 100), (130, 70)), block=(32, 128), device=[device])),
        Test("test_captured_score_mod_gradcheck", checked, product(name=names), _no_float64(gpu)),
        Test("test_return_lse", of_lse, product(device=[device])),
        Test("test_empty_sequence", empty, product(n=((0, 5), (5, 0)), device=[device])),
    ]  # fmt: skip


def _no_float64(gpu: bool) -> Any:
    return lambda point: "the GPU kernels take no float64" if gpu else ""


def one(
    name: str, n: tuple[int, int], heads: tuple[int, int, int], dtype: str, device: str
) -> None:
    """Check O, LSE and gradients, also of captured tensors."""
    batch, many, few = heads
    case = functions(batch, many, *n, device)[name]
    judged(case, (batch, many, few, *n), d=64, dtype=dtype, device=device)


def blocks(n: tuple[int, int], block: int, device: str) -> None:
    """Check torch's BlockMask for lengths that its blocks do not divide, and its sparsity."""
    case = functions(2, 4, *n, device)["document_masking"]
    made = torchs.create_block_mask(case.mask, 2, 4, *n, device=device, BLOCK_SIZE=block)
    judged(case, (2, 4, 4, *n), d=64, dtype="float32", device=device, blocks=made)


def checked(name: str) -> None:
    """Check gradients against finite differences, in float64."""
    case = functions(1, 2, 5, 7, "cpu")[name]
    wide = {"dtype": torch.float64, "requires_grad": True}
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, m, 4, **wide) for m in (5, 7, 7)]
    held = [x.requires_grad_() for x in case.wanted.values()]

    def attend(*x: torch.Tensor) -> Any:
        return flex_attention(*x[:3], case.score, case.mask, backend="simulator")

    torch.autograd.gradcheck(attend, inputs)
    out = attend(*inputs)
    weight = torch.randn_like(out)
    if not held:
        return
    gradients = torch.autograd.grad((out * weight).sum(), held)
    for x, gradient in zip(held, gradients, strict=True):
        x.requires_grad_(False)
        move, values = torch.randn_like(x), x.clone()
        sides = []
        # float32 tensors need long steps, which limit the accuracy to their square
        for step in (1e-2, -1e-2):
            x.copy_(values + step * move)
            sides.append((attend(*inputs) * weight).sum().detach())
        x.copy_(values)
        difference = float((sides[0] - sides[1]) / 2e-2)
        got = float((gradient * move).sum().detach())
        assert abs(got - difference) <= 1e-2 * (1 + abs(difference)), f"{got} for {difference}"


def of_lse(device: str) -> None:
    """Check the LSE and its gradient."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 128, 64, device=device, requires_grad=True) for _ in range(3))
    _, lse = flex_attention(q, k, v, lambda s, b, h, i, j: s * 2, return_lse=True)
    exact = torch.logsumexp(2 * q @ k.mT / 8, dim=-1)
    torch.testing.assert_close(lse, exact, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(x.sin().sum(), (q, k)) for x in (lse, exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def empty(n: tuple[int, int], device: str) -> None:
    """Check that no queries, or no keys, give zeros, and gradients of zeros."""
    q, k, v = (
        torch.randn(1, 2, m, 64, device=device, requires_grad=True) for m in (n[0], n[1], n[1])
    )
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + 1, lambda b, h, i, j: i >= j)
    assert out.shape == q.shape
    assert not out.any()
    for x in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not x.any()
