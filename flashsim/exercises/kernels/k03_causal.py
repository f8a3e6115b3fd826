"""A causal forward kernel that skips tiles.

Extend your forward(q, k, v, causal): if causal is True, query i sees keys 0 to i. Neither load
nor compute key tiles that lie entirely above the diagonal: the loop ends at the last tile that
the mask keeps. In tiles on the diagonal, mask element by element.
"""

from flashsim.exercises.exercise import Task
from flashsim.exercises.kernel_exercise import KernelExercise
from flashsim.exercises.kernels import k02_forward
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

_CAUSAL = """    # TODO: if causal, end at the last key that the tile's rows see
    end = tl.minimum((i + 1) * BLOCK_Q, n) if causal else n
    # END
"""
_MASK = """        keep = cols[None, :] < n
        # TODO: if causal, mask keys after the query
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
        "The end of the loop depends on the program: which key is the last that its rows see?",
        "Rows i * BLOCK_Q to (i + 1) * BLOCK_Q - 1 see keys before (i + 1) * BLOCK_Q.",
        "Before the maximum, set keep = keep & (rows[:, None] >= cols[None, :]).",
    ),
    wrong=(
        ("tl.minimum((i + 1) * BLOCK_Q, n) if causal else n", "n", "scores are all masked"),
        ("rows[:, None] >= cols", "rows[:, None] > cols", "shifted by one"),
    ),
)
