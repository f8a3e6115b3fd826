"""Softmax of whole rows.

The matrix of scores, S, is in HBM. Store P, where P[i, j] = exp(S[i, j]) / Σ exp(S[i, :]). A
tile of 8 complete rows fits on chip. The scores are small enough that exp does not overflow, so
use this formula directly. Load S once, store P once.
"""

import numpy as np

from flashsim.exercises.exercise import Exercise, Problem, Task, Tiling
from flashsim.exercises.references import moves, softmax, softmax_slips


def reference(machine):
    """Keep complete rows on chip from load to store."""
    hbm = machine.hbm  # hbm.S and hbm.P, (32, 48)
    with machine.stage("softmax") as sram:
        for rows in machine.row_tiles():  # slices of 8 rows
            with sram.step(rows):
                S = sram.load(hbm.S, rows)
                # TODO: exponentials in place, divided by the sum of each row
                np.exp(S, out=S)
                S /= S.sum(axis=1)[:, None]
                # END
                sram.store(hbm.P, rows, S)


def weights(arrays, p, dtype):
    """Return the result of a common mistake: P without the division by each row's sum."""
    return {"P": np.exp(arrays["S"].astype(dtype))}


EXERCISE = Exercise(
    name="naive-softmax",
    statement=__doc__,
    task=Task(Problem(32, n_kv=48, head_dim=8), Tiling(8, 48), 2048, ("S",), ("P",), spread=20),
    reference=reference,
    truth=softmax,
    hints=(
        "np.exp(S, out=S) needs no memory besides S.",
        "S.sum(axis=1) is a tile with one number per row; [:, None] turns it into a column.",
        "np.exp(S, out=S), then S /= S.sum(axis=1)[:, None].",
    ),
    budget=moves("S", "P"),
    mistakes={
        "the exponentials were not divided by the sum of their row": weights,
        **softmax_slips(8, stable=False),
    },
)
