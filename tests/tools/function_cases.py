"""Mask and score functions on torch tensors, and attention with them in torch's operators."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import flashsim


class Case(NamedTuple):
    """A mask and a score function, and the captured arrays that get a gradient, by name."""

    mask: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None
    wanted: dict[str, Any] = {}  # noqa: RUF012 (never written to)


def _seeded(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(7)


def causal(b, h, q, k):
    return q >= k


def masks(batch: int, heads: int, n_q: int, n_kv: int, device: str = "cuda") -> dict[str, Any]:
    """Return masks by name. Some have rows without keys; some differ between sequences or heads."""
    longest = max(n_q, n_kv)
    document = torch.arange(longest, device=device) // 97
    documents = torch.stack([document + b for b in range(batch)])
    lengths = torch.tensor([max(1, n_kv - 61 * b) for b in range(batch)], device=device)

    return {
        "causal": causal,
        "window": lambda b, h, q, k: (q >= k) & (q - k < 70),
        "prefix": lambda b, h, q, k: (k < 90) | (q >= k),
        "of_documents": lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q >= k),
        "dilated": lambda b, h, q, k: (q - k) % 3 == 0,
        "strided": lambda b, h, q, k: ((q >= k) & (q - k < 32)) | (k % 64 < 4),
        "by_head": lambda b, h, q, k: (q >= k) | (h == 0),
        "lengths_of_keys": lambda b, h, q, k: k < lengths[b],
        "late": lambda b, h, q, k: k + 40 <= q,  # the first rows see no key
        "chunked": lambda b, h, q, k: (q // 128 == k // 128) & (q >= k),
        "of_extremes": lambda b, h, q, k: (  # see flash_same in flashsim/functions/emit.py
            (torch.maximum(torch.minimum(q, k), 0 * k) == k) | (h == 1)
        ),
    }


def scores(batch: int, heads: int, n_q: int, n_kv: int, device: str = "cuda") -> dict[str, Case]:
    """Return score functions by name, with what they capture."""
    g = _seeded(device)
    slopes = torch.rand(heads, generator=g, device=device) / 16
    table = torch.randn(heads, n_q + n_kv, generator=g, device=device)
    bias = torch.randn(heads, n_q, n_kv, generator=g, device=device)
    rows = torch.randn(batch, n_kv, generator=g, device=device).to(torch.float16)

    lost = torch.rand(heads, n_q + n_kv, generator=g, device=device) < 0.3
    gaps = table.masked_fill(lost, -float("inf"))
    holes = bias.masked_fill(lost[:, n_kv:, None] | lost[:, None, :n_kv], -float("inf"))

    def curved(s, b, h, q, k):
        return s * (1 + slopes[h]) + torch.where(q > k, s * s / 16, rows[b, k])

    def with_poles(s, b, h, q, k):  # where no query or key exists
        return 0.2 * s * torch.log(n_kv - k) + torch.log(n_q - q)

    found: dict[str, tuple[Any, dict[str, Any]]] = {
        "alibi": (lambda s, b, h, q, k: s - slopes[h] * abs(q - k), {"slopes": slopes}),
        "relative": (lambda s, b, h, q, k: s + table[h, q - k + n_kv], {"table": table}),
        "biased": (lambda s, b, h, q, k: s + bias[h, q, k], {"bias": bias}),
        "capped": (lambda s, b, h, q, k: 5 * torch.tanh(s / 5), {}),
        "curved": (curved, {"slopes": slopes, "rows": rows}),
        # a mask in a score function
        "dropped": (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), {}),
        "with_poles": (with_poles, {}),
        # a mask in captured distances
        "with_gaps": (lambda s, b, h, q, k: s + gaps[h, q - k + n_kv], {"gaps": gaps}),
        # a mask in a bias, with rows without keys
        "with_holes": (lambda s, b, h, q, k: s + holes[h, q, k], {"holes": holes}),
    }
    return {name: Case(None, *one) for name, one in found.items()}


def plain(q, k, v, mask, score, sinks=None):
    """Return attention in torch's operators, in the inputs' type: O, and the LSE in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    at = [torch.arange(n, device=q.device) for n in s.shape]
    b, h, i, j = at[0][:, None, None, None], at[1][:, None, None], at[2][:, None], at[3]
    if score is not None:
        s = score(s, b, h, i, j).to(q.dtype)
    if mask is not None:
        s = torch.where(mask(b, h, i, j), s, -float("inf"))
    top = s.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(q.dtype)[:, None, None]
        top = torch.maximum(top, sinks.detach())
    top = torch.where(top == -float("inf"), torch.zeros_like(top), top)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    p = e / torch.where(total == 0, torch.ones_like(total), total)
    return p @ v, (top.double() + torch.log(total.double()))[..., 0]


def with_gradients(q, k, v, dout, mask, score, wanted, sinks=None):
    """Return O, LSE and the gradients of q, k, v, of the captured arrays `wanted`, and of sinks.

    The tensors of `wanted` keep their identity, since their type differs from that of q.
    """
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    held = [*wanted.values(), *(() if sinks is None else (sinks,))]
    for x in held:
        x.requires_grad_(True)
    out, lse = plain(*inputs, mask, score, sinks)
    found = torch.autograd.grad(out, [*inputs, *held], dout.to(out.dtype))
    for x in held:
        x.requires_grad_(False)
    names = ("dq", "dk", "dv", *wanted, *(() if sinks is None else ("dsinks",)))
    return {"out": out.detach(), **dict(zip(names, found, strict=True))}, lse.detach()


def allowed(exact, rough):
    """Return the allowed error: twice plain attention's in the same type, plus rounding.

    With one key dS is 0, but kernels subtract two equal float32 sums: hence 2e-5.
    """
    error = (rough.double() - exact).abs().max()
    rounding = (exact.to(rough.dtype) + 0.3 - 0.3 - exact.to(rough.dtype)).abs().max()
    return float(2 * error + 2 * rounding.double()) + 2e-5


def judge(
    mask,
    score,
    wanted,
    sizes,
    *,
    d=64,
    dtype=torch.bfloat16,
    kernel="auto",
    backend="cupy",
    sinks=None,
    forms=(False, True),
):
    """Check O, LSE and all gradients against the error budget of their type."""
    batch, heads, kv_heads, n_q, n_kv = sizes
    torch.manual_seed(0)
    shapes = (batch, heads, n_q, d), *((batch, kv_heads, n_kv, d),) * 2
    q, k, v = (torch.randn(s, device="cuda", dtype=dtype) for s in shapes)
    dout = torch.randn(shapes[0], device="cuda", dtype=dtype)
    given = mask, score, wanted, sinks
    exact, lse = with_gradients(*(x.double() for x in (q, k, v, dout)), *given)
    rough, _ = with_gradients(q, k, v, dout, *given)
    result = flashsim.run(
        *(q, k, v), mask_mod=mask, score_mod=score, sinks=sinks, backend=backend, kernel=kernel
    )
    assert ((result.lse.double() - lse).nan_to_num(0).abs() < 1e-3).all()
    assert (result.lse.isinf() == lse.isinf()).all()
    problems = []
    for form in forms:
        back = result.backward(dout, deterministic=form, captured=list(wanted))
        found = {"out": result.out, "dq": back.dq, "dk": back.dk, "dv": back.dv, **back.captured}
        if sinks is not None:
            found["dsinks"] = back.dsinks
        assert found.keys() == exact.keys()
        for name, got in found.items():
            error = float((got.double() - exact[name]).abs().max())
            budget = allowed(exact[name], rough[name])
            if not error <= budget:
                problems.append(f"{name}, deterministic={form}: {error:.3g} > {budget:.3g}")
    assert not problems, problems
