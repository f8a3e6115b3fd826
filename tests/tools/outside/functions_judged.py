"""Judge a score and a mask function under `flashsim.torch.flex_attention`.

The rule is flash-attention's: an error of at most twice that of plain attention in the same type,
plus two roundings of the exact result. Kernels recompute P from the LSE, a float32, so its rounding
counts too. A captured element's gradient is a float32 sum over all scores that read it, in any
order; the roundings of n terms add up to about sqrt(n) roundings.
"""

from typing import Any

import torch
from function_cases import Case, allowed, with_gradients

from flashsim.torch import flex_attention

#: Batch, heads, KV heads, queries, keys.
Sizes = tuple[int, int, int, int, int]


def judged(
    case: Case, sizes: Sizes, *, d: int, dtype: str, device: str, blocks: Any = None
) -> None:
    """Check O, LSE and all gradients; `blocks` replaces the case's mask, if it is given."""
    batch, heads, kv_heads, n_q, n_kv = sizes
    torch.manual_seed(0)
    like: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype)}
    q, dout = torch.randn(2, batch, heads, n_q, d, **like)
    k, v = torch.randn(2, batch, kv_heads, n_kv, d, **like)
    exact, lse = with_gradients(*(x.double() for x in (q, k, v, dout)), *case)
    rough, _ = with_gradients(q, k, v, dout, *case)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    held = [x.requires_grad_() for x in case.wanted.values()]
    mask = case.mask if blocks is None else blocks
    out, ours = flex_attention(*inputs, case.score, mask, enable_gqa=True, return_lse=True)
    found = torch.autograd.grad(out, [*inputs, *held], dout)
    for x in held:
        x.requires_grad_(False)
    got = {"out": out.detach(), **dict(zip((*exact,)[1:], found, strict=True))}
    seen = ~lse.isinf()
    assert (ours.isinf() == ~seen).all(), "LSE: other rows without keys"
    largest = float(lse[seen].abs().max()) if seen.any() else 0.0
    assert ((ours.double() - lse)[seen].abs() <= 1e-3 * (1 + largest)).all(), "LSE"
    for name, x in got.items():
        right = exact[name]
        error, budget = float((x.double() - right).abs().max()), allowed(right, rough[name])
        terms = batch * heads * n_q * n_kv / right.numel() if name in case.wanted else 0
        budget += (2 * largest + terms**0.5) * 2**-24 * float(right.abs().max())
        assert error <= budget, f"{name}: {error:.3g} > {budget:.3g}"
