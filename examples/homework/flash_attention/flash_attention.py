"""FlashAttention-2 as two autograd functions: in PyTorch, tile by tile, and in Triton."""

import math

import torch
import triton
import triton.language as tl

TILE = 32


class FlashAttentionPytorch(torch.autograd.Function):
    """Part (a): the tiled forward pass, and a backward pass that recomputes P."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        """Return O, and save the inputs, O and L for the backward pass."""
        n, scale = q.shape[-2], 1 / math.sqrt(q.shape[-1])
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
        at = torch.arange(n, device=q.device)
        for i in range(0, n, TILE):
            q_i = q[..., i : i + TILE, :]
            acc = torch.zeros_like(q_i)
            m = torch.full(q_i.shape[:-1], -torch.inf, device=q.device)
            l = torch.zeros_like(m)
            for j in range(0, min(i + TILE, n) if is_causal else n, TILE):
                s = q_i @ k[..., j : j + TILE, :].mT * scale
                if is_causal:
                    hidden = at[i : i + TILE, None] < at[None, j : j + TILE]
                    s = s.masked_fill(hidden, -torch.inf)
                m_new = torch.maximum(m, s.amax(-1))
                p, alpha = torch.exp(s - m_new[..., None]), torch.exp(m - m_new)
                l = alpha * l + p.sum(-1)
                acc = alpha[..., None] * acc + p @ v[..., j : j + TILE, :]
                m = m_new
            o[..., i : i + TILE, :] = acc / l[..., None]
            lse[..., i : i + TILE] = m + torch.log(l)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, do):
        """Return dQ, dK, dV, and None for the argument `is_causal`."""
        q, k, v, o, lse = ctx.saved_tensors
        n, scale = q.shape[-2], 1 / math.sqrt(q.shape[-1])
        s = q @ k.mT * scale
        if ctx.is_causal:
            s = s.masked_fill(torch.ones(n, n, device=q.device).triu(1).bool(), -torch.inf)
        p = torch.exp(s - lse[..., None])
        ds = p * (do @ v.mT - (o * do).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q, p.mT @ do, None


@triton.jit
def flash_fwd_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
    stride_qb, stride_qq, stride_qd, stride_kb, stride_kk, stride_kd,
    stride_vb, stride_vk, stride_vd, stride_ob, stride_oq, stride_od, stride_lb, stride_lq,
    N_QUERIES, N_KEYS, scale,
    D: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    query_tile, batch = tl.program_id(0), tl.program_id(1)
    Q_block = tl.make_block_ptr(
        Q_ptr + batch * stride_qb, (N_QUERIES, D), (stride_qq, stride_qd),
        (query_tile * Q_TILE_SIZE, 0), (Q_TILE_SIZE, D), (1, 0),
    )  # fmt: skip
    K_block = tl.make_block_ptr(
        K_ptr + batch * stride_kb, (N_KEYS, D), (stride_kk, stride_kd),
        (0, 0), (K_TILE_SIZE, D), (1, 0),
    )  # fmt: skip
    V_block = tl.make_block_ptr(
        V_ptr + batch * stride_vb, (N_KEYS, D), (stride_vk, stride_vd),
        (0, 0), (K_TILE_SIZE, D), (1, 0),
    )  # fmt: skip
    O_block = tl.make_block_ptr(
        O_ptr + batch * stride_ob, (N_QUERIES, D), (stride_oq, stride_od),
        (query_tile * Q_TILE_SIZE, 0), (Q_TILE_SIZE, D), (1, 0),
    )  # fmt: skip
    L_block = tl.make_block_ptr(
        L_ptr + batch * stride_lb, (N_QUERIES,), (stride_lq,),
        (query_tile * Q_TILE_SIZE,), (Q_TILE_SIZE,), (0,),
    )  # fmt: skip
    Q = tl.load(Q_block, boundary_check=(0,), padding_option="zero")
    O_i = tl.zeros((Q_TILE_SIZE, D), dtype=tl.float32)
    l_i = tl.zeros((Q_TILE_SIZE,), dtype=tl.float32)
    m_i = tl.full((Q_TILE_SIZE,), float("-inf"), dtype=tl.float32)
    queries = query_tile * Q_TILE_SIZE + tl.arange(0, Q_TILE_SIZE)
    last = N_KEYS
    if is_causal:
        last = tl.minimum((query_tile + 1) * Q_TILE_SIZE, N_KEYS)
    for start in range(0, last, K_TILE_SIZE):
        K_j = tl.load(K_block, boundary_check=(0,), padding_option="zero")
        V_j = tl.load(V_block, boundary_check=(0,), padding_option="zero")
        S = tl.dot(Q, tl.trans(K_j)) * scale
        keys = start + tl.arange(0, K_TILE_SIZE)
        seen = keys[None, :] < N_KEYS
        if is_causal:
            seen = seen & (queries[:, None] >= keys[None, :])
        S = tl.where(seen, S, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(S, axis=1))
        P = tl.exp(S - m_new[:, None])
        alpha = tl.exp(m_i - m_new)
        l_i = alpha * l_i + tl.sum(P, axis=1)
        O_i = alpha[:, None] * O_i
        O_i = tl.dot(P.to(V_j.dtype), V_j, acc=O_i)
        m_i = m_new
        K_block = K_block.advance((K_TILE_SIZE, 0))
        V_block = V_block.advance((K_TILE_SIZE, 0))
    O_i = O_i / l_i[:, None]
    tl.store(O_block, O_i.to(O_ptr.type.element_ty), boundary_check=(0,))
    tl.store(L_block, m_i + tl.log(l_i), boundary_check=(0,))


@triton.jit
def flash_bwd_delta_kernel(O_ptr, dO_ptr, D_ptr, n, D: tl.constexpr, TILE_SIZE: tl.constexpr):
    rows, d = tl.program_id(0) * TILE_SIZE + tl.arange(0, TILE_SIZE), tl.arange(0, D)
    where = (tl.program_id(1) * n + rows[:, None]) * D + d[None, :]
    o = tl.load(O_ptr + where, mask=rows[:, None] < n, other=0.0)
    do = tl.load(dO_ptr + where, mask=rows[:, None] < n, other=0.0)
    tl.store(D_ptr + tl.program_id(1) * n + rows, tl.sum(o * do, axis=1), mask=rows < n)


@triton.jit
def flash_bwd_dkdv_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, L_ptr, D_ptr, dK_ptr, dV_ptr, n, scale,
    D: tl.constexpr, TILE_SIZE: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    tile, first_row = tl.program_id(0), tl.program_id(1) * n
    keys, d = tile * TILE_SIZE + tl.arange(0, TILE_SIZE), tl.arange(0, D)
    own = (first_row + keys[:, None]) * D + d[None, :]
    K = tl.load(K_ptr + own, mask=keys[:, None] < n, other=0.0)
    V = tl.load(V_ptr + own, mask=keys[:, None] < n, other=0.0)
    dK = tl.zeros((TILE_SIZE, D), dtype=tl.float32)
    dV = tl.zeros((TILE_SIZE, D), dtype=tl.float32)
    for start in range(tile * TILE_SIZE if is_causal else 0, n, TILE_SIZE):
        rows = start + tl.arange(0, TILE_SIZE)
        where = (first_row + rows[:, None]) * D + d[None, :]
        Q = tl.load(Q_ptr + where, mask=rows[:, None] < n, other=0.0)
        dO = tl.load(dO_ptr + where, mask=rows[:, None] < n, other=0.0)
        lse = tl.load(L_ptr + first_row + rows, mask=rows < n, other=0.0)
        delta = tl.load(D_ptr + first_row + rows, mask=rows < n, other=0.0)
        seen = (rows[:, None] < n) & (keys[None, :] < n)
        if is_causal:
            seen = seen & (rows[:, None] >= keys[None, :])
        P = tl.where(seen, tl.exp(tl.dot(Q, tl.trans(K)) * scale - lse[:, None]), 0.0)
        dV += tl.dot(tl.trans(P.to(dO.dtype)), dO)
        dS = P * (tl.dot(dO, tl.trans(V)) - delta[:, None]) * scale
        dK += tl.dot(tl.trans(dS.to(Q.dtype)), Q)
    tl.store(dK_ptr + own, dK, mask=keys[:, None] < n)
    tl.store(dV_ptr + own, dV, mask=keys[:, None] < n)


@triton.jit
def flash_bwd_dq_kernel(
    Q_ptr, K_ptr, V_ptr, dO_ptr, L_ptr, D_ptr, dQ_ptr, n, scale,
    D: tl.constexpr, TILE_SIZE: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    tile, first_row = tl.program_id(0), tl.program_id(1) * n
    rows, d = tile * TILE_SIZE + tl.arange(0, TILE_SIZE), tl.arange(0, D)
    own = (first_row + rows[:, None]) * D + d[None, :]
    Q = tl.load(Q_ptr + own, mask=rows[:, None] < n, other=0.0)
    dO = tl.load(dO_ptr + own, mask=rows[:, None] < n, other=0.0)
    lse = tl.load(L_ptr + first_row + rows, mask=rows < n, other=0.0)
    delta = tl.load(D_ptr + first_row + rows, mask=rows < n, other=0.0)
    dQ = tl.zeros((TILE_SIZE, D), dtype=tl.float32)
    for start in range(0, tl.minimum((tile + 1) * TILE_SIZE, n) if is_causal else n, TILE_SIZE):
        keys = start + tl.arange(0, TILE_SIZE)
        where = (first_row + keys[:, None]) * D + d[None, :]
        K = tl.load(K_ptr + where, mask=keys[:, None] < n, other=0.0)
        V = tl.load(V_ptr + where, mask=keys[:, None] < n, other=0.0)
        seen = keys[None, :] < n
        if is_causal:
            seen = seen & (rows[:, None] >= keys[None, :])
        P = tl.where(seen, tl.exp(tl.dot(Q, tl.trans(K)) * scale - lse[:, None]), 0.0)
        dS = P * (tl.dot(dO, tl.trans(V)) - delta[:, None]) * scale
        dQ += tl.dot(dS.to(K.dtype), K)
    tl.store(dQ_ptr + own, dQ, mask=rows[:, None] < n)


class FlashAttentionTriton(torch.autograd.Function):
    """Part (b): attention in Triton kernels; q, k and v are (batch, n, d)."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        """Return O, and save the inputs, O and L for the backward pass."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, n, d = q.shape
        o = torch.empty_like(q)
        lse = torch.empty((batch, n), device=q.device, dtype=torch.float32)
        flash_fwd_kernel[(triton.cdiv(n, TILE), batch)](
            q, k, v, o, lse,
            *q.stride(), *k.stride(), *v.stride(), *o.stride(), *lse.stride(),
            n, k.shape[1], 1 / math.sqrt(d),
            D=d, Q_TILE_SIZE=TILE, K_TILE_SIZE=TILE, is_causal=is_causal,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, do):
        """Return dQ, dK, dV, and None for the argument `is_causal`."""
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        batch, n, d = q.shape
        delta = torch.empty_like(lse)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grid, how = (triton.cdiv(n, TILE), batch), (n, 1 / math.sqrt(d), d, TILE, ctx.is_causal)
        flash_bwd_delta_kernel[grid](o, do, delta, n, d, TILE)
        flash_bwd_dkdv_kernel[grid](q, k, v, do, lse, delta, dk, dv, *how)
        flash_bwd_dq_kernel[grid](q, k, v, do, lse, delta, dq, *how)
        return dq, dk, dv, None
