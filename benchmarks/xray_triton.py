"""A FlashAttention-2 forward in Triton with any BLOCK sizes, for benchmarks/xray.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def attention_forward(  # type: ignore[no-untyped-def]
    q, k, v, o, n, scale, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One query tile of one head; all tensors are (heads, n, D), contiguous."""
    first = tl.program_id(0) * BLOCK_Q
    head = tl.program_id(1).to(tl.int64) * n * D
    rows, columns = first + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    places = head + rows[:, None] * D + columns[None, :]
    mine = tl.load(q + places, mask=rows[:, None] < n, other=0.0)
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    stop = tl.minimum(first + BLOCK_Q, n) if CAUSAL else n
    for start in range(0, stop, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        there = head + keys[:, None] * D + columns[None, :]
        tile = tl.load(k + there, mask=keys[:, None] < n, other=0.0)
        s = tl.dot(mine, tl.trans(tile)) * scale
        seen = keys[None, :] < n
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None])
        s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        share = tl.exp2(m - top)
        l = l * share + tl.sum(p, 1)
        values = tl.load(v + there, mask=keys[:, None] < n, other=0.0)
        acc = acc * share[:, None] + tl.dot(p.to(values.dtype), values)
        m = top
    out = (acc / l[:, None]).to(o.dtype.element_ty)
    tl.store(o + places, out, mask=rows[:, None] < n)


def attend(q: Any, k: Any, v: Any, causal: bool, block_q: int, block_k: int) -> Any:
    """Return attention on (batch, heads, n, d) tensors on the GPU, with the given tile."""
    batch, heads, n, d = q.shape
    out = torch.empty_like(q)
    grid = (triton.cdiv(n, block_q), batch * heads)
    attention_forward[grid](
        q, k, v, out, n, d**-0.5 * 1.4426950408889634, causal, d, block_q, block_k
    )  # fmt: skip
    return out
