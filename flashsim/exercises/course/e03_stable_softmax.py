"""Softmax of large scores.

As in the last exercise, compute P = softmax(S). But now scores reach 200, and exp(200) is
infinity in float32. So subtract each row's largest score before exp; this does not change P.
Complete rows fit on chip, so again load S once and store P once.
"""

import numpy as np

from flashsim.exercises.exercise import Exercise, Problem, Task, Tiling
from flashsim.exercises.references import moves, softmax, softmax_slips


def reference(machine):
    """Subtract each row's maximum in place."""
    hbm = machine.hbm
    with machine.stage("softmax") as sram:
        for rows in machine.row_tiles():
            with sram.step(rows):
                S = sram.load(hbm.S, rows)
                # TODO: as before, but so that no exponential exceeds 1
                S -= S.max(axis=1)[:, None]
                np.exp(S, out=S)
                S /= S.sum(axis=1)[:, None]
                # END
                sram.store(hbm.P, rows, S)


def weights(arrays, p, dtype):
    """Return the result of a common mistake: P without the division by each row's sum."""
    s = arrays["S"].astype(dtype)
    return {"P": np.exp(s - s.max(axis=-1, keepdims=True))}


EXERCISE = Exercise(
    name="stable-softmax",
    statement=__doc__,
    task=Task(Problem(32, n_kv=48, head_dim=8), Tiling(8, 48), 2048, ("S",), ("P",), spread=200),
    reference=reference,
    truth=softmax,
    hints=(
        "exp(s - m) / Σ exp(s - m) is the same for every m.",
        "With m the row's maximum, no exponent is above 0.",
        "S -= S.max(axis=1)[:, None] before the exponential.",
    ),
    budget=moves("S", "P"),
    mistakes={
        "the exponentials were not divided by the sum of their row": weights,
        **softmax_slips(8, stable=True),
    },
)
