"""Three backward kernels.

Write backward(q, k, v, o, lse, do, causal), which launches three kernels and returns dQ, dK and
dV. The first kernel stores delta = rowsum(dO O). In the second kernel, each program (thread
block) has a tile of keys, loops over the queries, and stores dK and dV. In the third kernel,
each program has a tile of queries, loops over the keys, and stores dQ. Use no atomic
operations. The second and third kernels skip tiles that the causal mask removes entirely.
"""

from flashsim.exercises.exercise import Problem, Task, Tiling
from flashsim.exercises.kernel_exercise import KernelExercise

REFERENCE = """
import numpy as np
import triton
import triton.language as tl


@triton.jit
def backward_delta(o_ptr, do_ptr, delta_ptr, n, BLOCK_Q: tl.constexpr, D: tl.constexpr):
    rows, d = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    own = tl.program_id(1) * n * D + rows[:, None] * D + d[None, :]
    o = tl.load(o_ptr + own, mask=rows[:, None] < n, other=0.0)
    do = tl.load(do_ptr + own, mask=rows[:, None] < n, other=0.0)
    # TODO: store delta
    tl.store(delta_ptr + tl.program_id(1) * n + rows, tl.sum(o * do, 1), mask=rows < n)
    # END


@triton.jit
def backward_dkdv(
    q_ptr, k_ptr, v_ptr, do_ptr, l_ptr, delta_ptr, dk_ptr, dv_ptr, n, scale,
    causal: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
):
    j, head = tl.program_id(0), tl.program_id(1)
    cols, d = j * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, D)
    base = head * n * D
    own = base + cols[:, None] * D + d[None, :]
    k = tl.load(k_ptr + own, mask=cols[:, None] < n, other=0.0)
    v = tl.load(v_ptr + own, mask=cols[:, None] < n, other=0.0)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    begin = (j * BLOCK_K) // BLOCK_Q * BLOCK_Q if causal else 0
    for first in range(begin, n, BLOCK_Q):
        rows = first + tl.arange(0, BLOCK_Q)
        tile = base + rows[:, None] * D + d[None, :]
        # TODO: load Q, dO, L and delta, recompute P, and add to dk and dv
        q = tl.load(q_ptr + tile, mask=rows[:, None] < n, other=0.0)
        do = tl.load(do_ptr + tile, mask=rows[:, None] < n, other=0.0)
        lse = tl.load(l_ptr + head * n + rows, mask=rows < n, other=0.0)
        delta = tl.load(delta_ptr + head * n + rows, mask=rows < n, other=0.0)
        keep = (rows[:, None] < n) & (cols[None, :] < n)
        if causal:
            keep = keep & (rows[:, None] >= cols[None, :])
        p = tl.where(keep, tl.exp(tl.dot(q, tl.trans(k)) * scale - lse[:, None]), 0.0)
        dv += tl.dot(tl.trans(p), do)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dk += tl.dot(tl.trans(ds), q) * scale
        # END
    tl.store(dk_ptr + own, dk, mask=cols[:, None] < n)
    tl.store(dv_ptr + own, dv, mask=cols[:, None] < n)


@triton.jit
def backward_dq(
    q_ptr, k_ptr, v_ptr, do_ptr, l_ptr, delta_ptr, dq_ptr, n, scale,
    causal: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
):
    i, head = tl.program_id(0), tl.program_id(1)
    rows, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    base = head * n * D
    own = base + rows[:, None] * D + d[None, :]
    q = tl.load(q_ptr + own, mask=rows[:, None] < n, other=0.0)
    do = tl.load(do_ptr + own, mask=rows[:, None] < n, other=0.0)
    lse = tl.load(l_ptr + head * n + rows, mask=rows < n, other=0.0)
    delta = tl.load(delta_ptr + head * n + rows, mask=rows < n, other=0.0)
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    end = tl.minimum((i + 1) * BLOCK_Q, n) if causal else n
    for first in range(0, end, BLOCK_K):
        cols = first + tl.arange(0, BLOCK_K)
        tile = base + cols[:, None] * D + d[None, :]
        # TODO: load K and V, recompute P, and add to dq
        k = tl.load(k_ptr + tile, mask=cols[:, None] < n, other=0.0)
        v = tl.load(v_ptr + tile, mask=cols[:, None] < n, other=0.0)
        keep = cols[None, :] < n
        if causal:
            keep = keep & (rows[:, None] >= cols[None, :])
        p = tl.where(keep, tl.exp(tl.dot(q, tl.trans(k)) * scale - lse[:, None]), 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq += tl.dot(ds, k) * scale
        # END
    tl.store(dq_ptr + own, dq, mask=rows[:, None] < n)


def backward(q, k, v, o, lse, do, causal, block_q=32, block_k=32):
    heads, n, d = q.shape
    delta = np.empty((heads, n), np.float32)
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    rows, cols = (triton.cdiv(n, block_q), heads), (triton.cdiv(n, block_k), heads)
    how = n, d**-0.5, causal, block_q, block_k, d
    backward_delta[rows](o, do, delta, n, block_q, d)
    backward_dkdv[cols](q, k, v, do, lse, delta, dk, dv, *how)
    backward_dq[rows](q, k, v, do, lse, delta, dq, *how)
    return dq, dk, dv
"""
_PROBLEMS = Problem(96, head_dim=32), Problem(72, head_dim=32, heads=2, causal=True)
_INPUTS = ("O", "L", "delta")

EXERCISE = KernelExercise(
    name="kernel-backward",
    statement=__doc__,
    tasks=tuple(Task(p, Tiling(32, 32), 65_536, _INPUTS, ("dQ", "dK", "dV")) for p in _PROBLEMS),
    reference=REFERENCE,
    calls=("backward", "FlashAttentionTriton"),
    given=("Q", "K", "V", "O", "L", "dO"),
    path="flash_attention/flash_attention.py",
    hints=(
        "P = exp(scale Q K^T - L). It needs no running maximum or sum, because L contains both.",
        "dV += P^T dO; dP = dO V^T; dS = P (dP - delta); dK += scale dS^T Q; dQ += scale dS K.",
        "If causal, the loop for key tile j begins at the query tile that holds row j * BLOCK_K.",
        "Rows past n have P = exp(0 - 0) = 1: mask them, also in the second kernel.",
    ),
    wrong=(
        ("dk += tl.dot(tl.trans(ds), q) * scale", "dk += tl.dot(tl.trans(ds), q)", "dK is not mul"),
        ("dq += tl.dot(ds, k) * scale", "dq += tl.dot(ds, k)", "dQ is not multiplied by the scale"),
        (
            "begin = (j * BLOCK_K) // BLOCK_Q * BLOCK_Q if causal else 0",
            "begin = 0",
            "tiles whose scores are all masked",
        ),
    ),
)
