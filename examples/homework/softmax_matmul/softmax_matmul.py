"""Fused softmax-matmul: softmax(X) V in one kernel, X (batch, d1, d2) and V (batch, d2, d3)."""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_matmul_kernel(
    x_ptr, v_ptr, o_ptr,
    stride_xb, stride_xr, stride_xc, stride_vb, stride_vr, stride_vc,
    stride_ob, stride_or, stride_oc,
    d1, d2, D3: tl.constexpr, BLOCK_1: tl.constexpr, BLOCK_2: tl.constexpr,
):  # fmt: skip
    tile, batch = tl.program_id(0), tl.program_id(1)
    rows = tile * BLOCK_1 + tl.arange(0, BLOCK_1)
    d = tl.arange(0, D3)
    acc = tl.zeros((BLOCK_1, D3), dtype=tl.float32)
    row_max = tl.full((BLOCK_1,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_1,), dtype=tl.float32)
    for start in range(0, d2, BLOCK_2):
        cols = start + tl.arange(0, BLOCK_2)
        x = tl.load(
            x_ptr + batch * stride_xb + rows[:, None] * stride_xr + cols[None, :] * stride_xc,
            mask=(rows[:, None] < d1) & (cols[None, :] < d2),
            other=float("-inf"),
        )
        v = tl.load(
            v_ptr + batch * stride_vb + cols[:, None] * stride_vr + d[None, :] * stride_vc,
            mask=cols[:, None] < d2,
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(x, axis=1))
        p = tl.exp(x - new_max[:, None])
        rescale = tl.exp(row_max - new_max)
        row_sum = rescale * row_sum + tl.sum(p, axis=1)
        acc = rescale[:, None] * acc + tl.dot(p, v)
        row_max = new_max
    out = acc / row_sum[:, None]
    where = o_ptr + batch * stride_ob + rows[:, None] * stride_or + d[None, :] * stride_oc
    tl.store(where, out, mask=rows[:, None] < d1)


def softmax_matmul(x: torch.Tensor, v: torch.Tensor, BLOCK_1: int = 32, BLOCK_2: int = 32):
    """Return softmax(x, dim=-1) @ v."""
    batch, d1, d2 = x.shape
    o = torch.empty((batch, d1, v.shape[2]), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(d1, BLOCK_1), batch)
    softmax_matmul_kernel[grid](
        x, v, o, *x.stride(), *v.stride(), *o.stride(), d1, d2, v.shape[2], BLOCK_1, BLOCK_2
    )
    return o
