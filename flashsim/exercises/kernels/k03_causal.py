"""A causal forward kernel that skips tiles.

Extend your forward(q, k, v, causal): if causal is True, query i sees keys 0 to i. Key tiles that
lie wholly above the diagonal are neither loaded nor computed, so the loop ends where the mask does.
Tiles on the diagonal are masked element by element.
"""

from flashsim.exercises.exercise import Task
from flashsim.exercises.kernel_exercise import KernelExercise
from flashsim.exercises.kernels import k02_forward
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

_CAUSAL = """    # TODO: if causal, end where the mask does
    end = tl.minimum((i + 1) * BLOCK_Q, n) if causal else n
    # END
"""
_MASK = """        keep = cols[None, :] < n
        # TODO: if causal, drop keys after the query
        if causal:
            keep = keep & (rows[:, None] >= cols[None, :])
        # END
"""
_FORWARD = k02_forward.EXERCISE.solution_source
REFERENCE = _FORWARD.replace("    end = n\n", _CAUSAL).replace(
    "        keep = cols[None, :] < n\n", _MASK
)
_PROBLEMS = (
    Problem(128, head_dim=32, causal=True),
    Problem(72, head_dim=32, heads=2, causal=True),
)

EXERCISE = KernelExercise(
    name="kernel-causal",
    statement=__doc__,
    tasks=tuple(Task(p, Tiling(32, 32), 49_152, outputs=("O", "L")) for p in _PROBLEMS),
    reference=REFERENCE,
    calls=("forward", "FlashAttentionTriton"),
    given=("Q", "K", "V"),
    path="flash_attention/flash_attention.py",
    hints=(
        "The loop's end depends on the program: which is the last key that its last row sees?",
        "Rows i * BLOCK_Q to (i + 1) * BLOCK_Q - 1 see keys before (i + 1) * BLOCK_Q.",
        "keep & (rows[:, None] >= cols[None, :]), before the maximum.",
    ),
    wrong=(
        ("tl.minimum((i + 1) * BLOCK_Q, n) if causal else n", "n", "end the loop where the mask"),
        ("rows[:, None] >= cols", "rows[:, None] > cols", "shifted by one"),
    ),
)
