"""FlashAttention-2 in Triton: a forward pass with LSE, and a backward pass in three kernels.

q, k and v are (heads, n, d). The host functions take NumPy arrays or torch tensors, and return the
same kind. These commands trace the kernels on a machine without a GPU:

    flashsim kernel examples/triton/flash_attention.py:forward --causal
    flashsim kernel examples/triton/flash_attention.py:backward --causal
"""

import triton
import triton.language as tl


@triton.jit
def attention_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, n, scale,
    causal: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1)
    rows, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    base = head * n * D
    at = base + rows[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=rows[:, None] < n, other=0.0)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    end = tl.minimum((i + 1) * BLOCK_Q, n) if causal else n
    for first in range(0, end, BLOCK_K):
        cols = first + tl.arange(0, BLOCK_K)
        inside = cols[:, None] < n
        k = tl.load(k_ptr + base + cols[:, None] * D + d[None, :], mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        keep = cols[None, :] < n
        if causal:
            keep = keep & (rows[:, None] >= cols[None, :])
        s = tl.where(keep, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = alpha * l + tl.sum(p, 1)
        v = tl.load(v_ptr + base + cols[:, None] * D + d[None, :], mask=inside, other=0.0)
        acc = alpha[:, None] * acc + tl.dot(p.to(v.dtype), v)
        m = m_new
    tl.store(o_ptr + at, (acc / l[:, None]).to(q.dtype), mask=rows[:, None] < n)
    tl.store(lse_ptr + head * n + rows, m + tl.log(l), mask=rows < n)


@triton.jit
def attention_delta(o_ptr, do_ptr, delta_ptr, n, BLOCK_Q: tl.constexpr, D: tl.constexpr):
    i, head = tl.program_id(0), tl.program_id(1)
    rows, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    at = head * n * D + rows[:, None] * D + d[None, :]
    o = tl.load(o_ptr + at, mask=rows[:, None] < n, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + at, mask=rows[:, None] < n, other=0.0).to(tl.float32)
    tl.store(delta_ptr + head * n + rows, tl.sum(o * do, 1), mask=rows < n)


@triton.jit
def attention_dkdv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n, scale,
    causal: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    j, head = tl.program_id(0), tl.program_id(1)
    cols, d = j * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, D)
    base = head * n * D
    at = base + cols[:, None] * D + d[None, :]
    k = tl.load(k_ptr + at, mask=cols[:, None] < n, other=0.0)
    v = tl.load(v_ptr + at, mask=cols[:, None] < n, other=0.0)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    begin = (j * BLOCK_K) // BLOCK_Q * BLOCK_Q if causal else 0
    for first in range(begin, n, BLOCK_Q):
        rows = first + tl.arange(0, BLOCK_Q)
        here = base + rows[:, None] * D + d[None, :]
        q = tl.load(q_ptr + here, mask=rows[:, None] < n, other=0.0)
        do = tl.load(do_ptr + here, mask=rows[:, None] < n, other=0.0)
        lse = tl.load(lse_ptr + head * n + rows, mask=rows < n, other=0.0)
        delta = tl.load(delta_ptr + head * n + rows, mask=rows < n, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        keep = (rows[:, None] < n) & (cols[None, :] < n)
        if causal:
            keep = keep & (rows[:, None] >= cols[None, :])
        p = tl.where(keep, tl.exp(s - lse[:, None]), 0.0)
        dv += tl.dot(tl.trans(p.to(do.dtype)), do)
        dp = tl.dot(do, tl.trans(v))
        ds = p * (dp - delta[:, None])
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q) * scale
    tl.store(dk_ptr + at, dk.to(k.dtype), mask=cols[:, None] < n)
    tl.store(dv_ptr + at, dv.to(k.dtype), mask=cols[:, None] < n)


@triton.jit
def attention_dq(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, n, scale,
    causal: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1)
    rows, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    base = head * n * D
    at = base + rows[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=rows[:, None] < n, other=0.0)
    do = tl.load(do_ptr + at, mask=rows[:, None] < n, other=0.0)
    lse = tl.load(lse_ptr + head * n + rows, mask=rows < n, other=0.0)
    delta = tl.load(delta_ptr + head * n + rows, mask=rows < n, other=0.0)
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    end = tl.minimum((i + 1) * BLOCK_Q, n) if causal else n
    for first in range(0, end, BLOCK_K):
        cols = first + tl.arange(0, BLOCK_K)
        here = base + cols[:, None] * D + d[None, :]
        k = tl.load(k_ptr + here, mask=cols[:, None] < n, other=0.0)
        v = tl.load(v_ptr + here, mask=cols[:, None] < n, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        keep = cols[None, :] < n
        if causal:
            keep = keep & (rows[:, None] >= cols[None, :])
        p = tl.where(keep, tl.exp(s - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(v))
        ds = p * (dp - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k) * scale
    tl.store(dq_ptr + at, dq.to(q.dtype), mask=rows[:, None] < n)


def like(array, shape=None, dtype=None):
    """Return an uninitialised array of the same kind and device as `array`."""
    if hasattr(array, "new_empty"):  # torch
        import torch

        dtype = array.dtype if dtype is None else getattr(torch, dtype)
        return array.new_empty(array.shape if shape is None else shape, dtype=dtype)
    import numpy as np

    return np.empty_like(array, dtype, shape=shape)


def forward(q, k, v, causal=False, block_q=64, block_k=64):
    """Return O and LSE."""
    heads, n, d = q.shape
    o, lse = like(q), like(q, (heads, n), "float32")
    grid = (triton.cdiv(n, block_q), heads)
    attention_forward[grid](
        q, k, v, o, lse, n, d**-0.5, causal, BLOCK_Q=block_q, BLOCK_K=block_k, D=d
    )
    return o, lse


def backward(q, k, v, o, lse, do, causal=False, block_q=64, block_k=64):
    """Return dQ, dK and dV."""
    heads, n, d = q.shape
    delta = like(q, (heads, n), "float32")
    dq, dk, dv = like(q), like(k), like(v)
    rows, cols = (triton.cdiv(n, block_q), heads), (triton.cdiv(n, block_k), heads)
    attention_delta[rows](o, do, delta, n, BLOCK_Q=block_q, D=d)
    attention_dkdv[cols](
        q, k, v, do, lse, delta, dk, dv, n, d**-0.5, causal, BLOCK_Q=block_q, BLOCK_K=block_k, D=d
    )
    attention_dq[rows](
        q, k, v, do, lse, delta, dq, n, d**-0.5, causal, BLOCK_Q=block_q, BLOCK_K=block_k, D=d
    )
    return dq, dk, dv
