"""Online softmax: one pass for the maximum and the sum.

In this exercise, a row of scores does not fit on chip, but a tile of 8 × 16 scores does.
Computing the maximum, then the sum, then the quotient would take three passes over S. Instead,
keep a running maximum m and a running sum l per row, and rescale l whenever m grows. Then two
passes over S are enough: the first computes m and l, the second computes P. Load S twice, store
P once.
"""

import numpy as np

from flashsim.exercises.exercise import Exercise, Problem, Task, Tiling
from flashsim.exercises.references import moves, softmax


def reference(machine):
    """Milakov and Gimelshein's online softmax, arXiv:1805.02867, Algorithm 3, tile by tile."""
    hbm = machine.hbm
    with machine.stage("softmax") as sram:
        for rows in machine.row_tiles():
            with sram.step(rows):
                n = rows.stop - rows.start
                m = sram.alloc("m", n, fill=-np.inf)
                l = sram.alloc("l", n, fill=0.0)
                for cols in machine.key_tiles():
                    with sram.visit(rows, cols):
                        S = sram.load(hbm.S, rows, cols)
                        # TODO: bring m and l up to date: m[:] = ..., l[:] = ...
                        m_new = np.maximum(m, S.max(axis=1))
                        l *= np.exp(m - m_new)
                        S -= m_new[:, None]
                        np.exp(S, out=S)
                        l += S.sum(axis=1)
                        m[:] = m_new
                        # END
                # TODO: the second pass, which ends with sram.store(hbm.P, rows, tile, cols)
                for cols in machine.key_tiles():
                    with sram.visit(rows, cols):
                        S = sram.load(hbm.S, rows, cols)
                        S -= m[:, None]
                        np.exp(S, out=S)
                        S /= l[:, None]
                        sram.store(hbm.P, rows, S, cols)
                # END


EXERCISE = Exercise(
    name="online-softmax",
    statement=__doc__,
    task=Task(Problem(32, n_kv=48, head_dim=8), Tiling(8, 16), 1024, ("S",), ("P",)),
    reference=reference,
    truth=softmax,
    hints=(
        "When the maximum grows from m to m_new, the sum so far is too large by a factor of "
        "exp(m_new - m).",
        "l[:] = l * exp(m - m_new) + the row sums of exp(S - m_new).",
        "Tiles made inside a visit are freed at its end: write into m and l (m[:] = m_new) "
        "instead of rebinding them.",
    ),
    budget=moves("S", "S", "P"),
)
