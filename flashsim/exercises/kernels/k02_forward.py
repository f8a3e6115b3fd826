"""A FlashAttention-2 forward kernel.

Write forward(q, k, v, causal), which returns O and L = m + log l, the log-sum-exp of each row's
scaled scores. The shape of q, k and v is (heads, n, d). In this exercise, causal is always
False. Each program (thread block) computes a tile of queries of one head. A program loads its
tile of Q once, loops over K and V in tiles, and divides by l once, at the end. The size n need
not be a multiple of the tile size; d is a power of two.
"""

from flashsim.exercises.exercise import Problem, Task, Tiling
from flashsim.exercises.kernel_exercise import KernelExercise

REFERENCE = """
import numpy as np
import triton
import triton.language as tl


@triton.jit
def flash_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, n, scale,
    causal: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
):
    i, base = tl.program_id(0), tl.program_id(1) * n * D
    rows, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    own = base + rows[:, None] * D + d[None, :]
    q = tl.load(q_ptr + own, mask=rows[:, None] < n, other=0.0)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    end = n
    for first in range(0, end, BLOCK_K):
        cols = first + tl.arange(0, BLOCK_K)
        tile = base + cols[:, None] * D + d[None, :]
        # TODO: load K and V, compute the scores, and update m, l and acc
        k = tl.load(k_ptr + tile, mask=cols[:, None] < n, other=0.0)
        v = tl.load(v_ptr + tile, mask=cols[:, None] < n, other=0.0)
        keep = cols[None, :] < n
        s = tl.where(keep, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p, v)
        m = m_new
        # END
    # TODO: store O and L
    tl.store(o_ptr + own, acc / l[:, None], mask=rows[:, None] < n)
    tl.store(l_ptr + tl.program_id(1) * n + rows, m + tl.log(l), mask=rows < n)
    # END


def forward(q, k, v, causal, block_q=32, block_k=32):
    heads, n, d = q.shape
    o, lse = np.empty_like(q), np.empty((heads, n), np.float32)
    grid = (triton.cdiv(n, block_q), heads)
    flash_forward[grid](q, k, v, o, lse, n, d**-0.5, causal, block_q, block_k, d)
    return o, lse
"""
_PROBLEMS = Problem(128, head_dim=32), Problem(72, head_dim=32, heads=2)

EXERCISE = KernelExercise(
    name="kernel-forward",
    statement=__doc__,
    tasks=tuple(Task(p, Tiling(32, 32), 49_152, outputs=("O", "L")) for p in _PROBLEMS),
    reference=REFERENCE,
    calls=("forward", "FlashAttentionTriton"),
    given=("Q", "K", "V"),
    path="flash_attention/flash_attention.py",
    hints=(
        "Extend the fused softmax-matmul kernel: compute S = scale Q K^T on chip.",
        "Load each tile of K and of V once per iteration.",
        "Set the scores of keys past n to -inf: a key of zeros has a score of 0, and exp(0) is 1.",
        "L = m + log(l), with the values of m and l after the last tile.",
    ),
    wrong=(
        (" * scale, float", ", float", "the scores are not multiplied by the scale"),
        ("m + tl.log(l)", "m + tl.log2(l)", "m + log2(l)"),
        ("m + tl.log(l)", "m", "the LSE is m alone"),
        ("keep = cols[None, :] < n", "keep = cols[None, :] < n + BLOCK_K", "padded keys"),
    ),
)
