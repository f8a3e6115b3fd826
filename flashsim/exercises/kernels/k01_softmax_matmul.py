"""A fused softmax-matmul kernel.

Write O = softmax(S) V as one kernel, for S of shape (batch, d1, d2) and V of shape (batch, d2,
d3). The softmax runs along the last axis of S. Each program (thread block) computes BLOCK_1
rows of O, and loops over d2 in tiles of BLOCK_1 x BLOCK_2. A program loads each tile of S once,
and stores only O, so it needs a running maximum and a running sum. The sizes d1 and d2 need not
be multiples of the tile sizes; d3 is a power of two.
"""

from flashsim.exercises.exercise import Problem, Task, Tiling
from flashsim.exercises.kernel_exercise import KernelExercise

REFERENCE = """
import numpy as np
import triton
import triton.language as tl


@triton.jit
def fused(
    s_ptr, v_ptr, o_ptr, d1, d2,
    D3: tl.constexpr, BLOCK_1: tl.constexpr, BLOCK_2: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_1 + tl.arange(0, BLOCK_1)
    d = tl.arange(0, D3)
    s_ptr += tl.program_id(1) * d1 * d2
    v_ptr += tl.program_id(1) * d2 * D3
    o_ptr += tl.program_id(1) * d1 * D3
    acc = tl.zeros([BLOCK_1, D3], tl.float32)
    m = tl.full([BLOCK_1], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_1], tl.float32)
    for first in range(0, d2, BLOCK_2):
        cols = first + tl.arange(0, BLOCK_2)
        # TODO: load a tile of S and one of V, and update m, l and acc
        inside = (rows[:, None] < d1) & (cols[None, :] < d2)
        s = tl.load(s_ptr + rows[:, None] * d2 + cols[None, :], mask=inside, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + cols[:, None] * D3 + d[None, :], mask=cols[:, None] < d2, other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p, v)
        m = m_new
        # END
    # TODO: store O
    tl.store(o_ptr + rows[:, None] * D3 + d[None, :], acc / l[:, None], mask=rows[:, None] < d1)
    # END


def softmax_matmul(s, v, BLOCK_1=32, BLOCK_2=32):
    batch, d1, d2 = s.shape
    o = np.empty((batch, d1, v.shape[2]), np.float32)
    grid = (triton.cdiv(d1, BLOCK_1), batch)
    fused[grid](s, v, o, d1, d2, v.shape[2], BLOCK_1, BLOCK_2)
    return o
"""


def budget(task: Task) -> dict[tuple[str, str], int]:
    """Return the bytes for full marks: S and O move once, V moves once per tile of rows."""
    p = task.problem
    tiles = -(-p.n_q // task.tiling.block_q)
    heads = 4 * p.batch * p.heads
    return {
        ("load", "S"): heads * p.n_q * p.n_kv,
        ("load", "V"): heads * tiles * p.n_kv * p.head_dim_v,
        ("store", "O"): heads * p.n_q * p.head_dim_v,
    }


_SIZES = Problem(128, n_kv=96, head_dim=32), Problem(70, n_kv=50, head_dim=32, heads=2)

EXERCISE = KernelExercise(
    name="kernel-softmax-matmul",
    statement=__doc__,
    tasks=tuple(Task(p, Tiling(32, 32), 40_960, inputs=("S",)) for p in _SIZES),
    reference=REFERENCE,
    calls=("softmax_matmul", "SoftmaxMatmul"),
    given=("S", "V"),
    flag=False,
    path="softmax_matmul/softmax_matmul.py",
    budget=budget,
    hints=(
        "Use the online softmax of the lessons, which makes one pass over d2.",
        "When the maximum grows from m to m_new, multiply l and acc by exp(m - m_new).",
        "Lanes of S past d2 must be -inf, so that their exp is 0. Rows of V past d2 must be 0.",
    ),
    wrong=(
        ("acc * alpha[:, None] + tl.dot", "acc + tl.dot", "O is not multiplied by exp(m_old"),
        ("l * alpha + tl.sum(p, 1)", "l + tl.sum(p, 1)", "l is not multiplied by exp(m_old"),
        ("acc / l[:, None]", "acc", "O is not divided by l"),
    ),
)
