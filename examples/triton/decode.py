"""Decode one query per head in Triton, with the keys split over several programs.

q is (heads, d); k and v are (heads, n, d). The first kernel stores one partial result per part of
the keys, and the second kernel merges the partial results by their LSE.
"""

import triton
import triton.language as tl


@triton.jit
def decode_split(
    q_ptr, k_ptr, v_ptr, o_part_ptr, lse_part_ptr, n, part, scale,
    BLOCK_K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    split, head = tl.program_id(0), tl.program_id(1)
    heads, d = tl.num_programs(1), tl.arange(0, D)
    q = tl.load(q_ptr + head * D + d).to(tl.float32)
    acc = tl.zeros([D], tl.float32)
    m, l = float("-inf"), 0.0
    for first in range(split * part, tl.minimum((split + 1) * part, n), BLOCK_K):
        cols = first + tl.arange(0, BLOCK_K)
        at = head * n * D + cols[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=cols[:, None] < n, other=0.0).to(tl.float32)
        s = tl.where(cols < n, tl.sum(q[None, :] * k, 1) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp(s - m_new)
        alpha = tl.exp(m - m_new)
        v = tl.load(v_ptr + at, mask=cols[:, None] < n, other=0.0).to(tl.float32)
        acc = alpha * acc + tl.sum(p[:, None] * v, 0)
        l = alpha * l + tl.sum(p, 0)
        m = m_new
    where = split * heads + head
    tl.store(o_part_ptr + where * D + d, acc / l)
    tl.store(lse_part_ptr + where, m + tl.log(l))


@triton.jit
def decode_combine(o_part_ptr, lse_part_ptr, o_ptr, lse_ptr, SPLITS: tl.constexpr, D: tl.constexpr):
    head, heads, d = tl.program_id(0), tl.num_programs(0), tl.arange(0, D)
    parts = tl.arange(0, SPLITS)
    lse_part = tl.load(lse_part_ptr + parts * heads + head)
    m = tl.max(lse_part, 0)
    weight = tl.exp(lse_part - m)
    total = tl.sum(weight, 0)
    at = (parts[:, None] * heads + head) * D + d[None, :]
    o = tl.sum(tl.load(o_part_ptr + at) * weight[:, None], 0) / total
    tl.store(o_ptr + head * D + d, o.to(o_ptr.dtype.element_ty))
    tl.store(lse_ptr + head, m + tl.log(total))


def decode(q, k, v, splits=4, block_k=64):
    """Return O (heads, d) and LSE (heads,); `splits` must be a power of two."""
    heads, n, d = k.shape
    if hasattr(q, "new_empty"):
        import torch

        make = lambda *shape: q.new_empty(shape, dtype=torch.float32)  # noqa: E731
    else:
        import numpy as np

        make = lambda *shape: np.empty(shape, np.float32)  # noqa: E731
    part = triton.cdiv(triton.cdiv(n, splits), block_k) * block_k
    o_part, lse_part = make(splits, heads, d), make(splits, heads)
    o, lse = q * 0, make(heads)
    decode_split[splits, heads](q, k, v, o_part, lse_part, n, part, d**-0.5, BLOCK_K=block_k, D=d)
    decode_combine[(heads,)](o_part, lse_part, o, lse, SPLITS=splits, D=d)
    return o, lse
