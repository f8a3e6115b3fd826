"""A causal forward kernel that skips tiles.

Extend your forward(q, k, v, causal): if causal is True, query i sees keys 0 to i. Skip key
tiles that lie entirely above the diagonal: end the loop at the last tile with a visible score.
In tiles on the diagonal, mask the individual scores.
"""

from dataclasses import replace

from flashsim.exercises.kernels import k02_forward

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
_TASKS = k02_forward.EXERCISE.tasks

EXERCISE = replace(
    k02_forward.EXERCISE,
    name="kernel-causal",
    statement=__doc__,
    tasks=tuple(replace(one, problem=replace(one.problem, causal=True)) for one in _TASKS),
    reference=REFERENCE,
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
