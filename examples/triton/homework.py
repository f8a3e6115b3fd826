"""FlashAttention-2's forward pass in Triton, with three deliberate mistakes.

docs/guides/triton.md finds the mistakes. flash_attention.py in this folder is correct.
"""

import triton
import triton.language as tl


@triton.jit
def flash_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, n, scale,
    causal: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1)
    rows = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, D)
    q_ptr += head * n * D
    k_ptr += head * n * D
    v_ptr += head * n * D
    out_ptr += head * n * D

    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], mask=rows[:, None] < n, other=0.0)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)

    end = tl.minimum((i + 1) * BLOCK_Q, n) if causal else n
    for first in range(0, end, BLOCK_K):
        cols = first + tl.arange(0, BLOCK_K)
        k_tile = k_ptr + cols[:, None] * D + d[None, :]
        k = tl.load(k_tile, mask=cols[:, None] < n, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        keep = cols[None, :] < n
        if causal:
            keep = keep & (rows[:, None] >= cols[None, :])
        s = tl.where(keep, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))

        # Compute the scores again, because their maximum is known now.
        k = tl.load(k_tile, mask=cols[:, None] < n, other=0.0)
        s = tl.where(keep, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = alpha * l + tl.sum(p, 1)
        v = tl.load(v_ptr + cols[:, None] * D + d[None, :])
        acc = acc + tl.dot(p, v)
        m = m_new

    out = acc / l[:, None]
    tl.store(out_ptr + rows[:, None] * D + d[None, :], out, mask=rows[:, None] < n)
    tl.store(lse_ptr + head * n + rows, m + tl.log(l), mask=rows < n)


def attention(q, k, v, causal=False, block_q=64, block_k=64):
    """Return O and LSE; q, k and v are NumPy arrays or torch tensors of shape (heads, n, d)."""
    from flash_attention import like

    heads, n, d = q.shape
    out, lse = like(q), like(q, (heads, n), "float32")
    grid = (triton.cdiv(n, block_q), heads)
    flash_forward[grid](
        q, k, v, out, lse, n, d**-0.5, causal, BLOCK_Q=block_q, BLOCK_K=block_k, D=d
    )
    return out, lse
