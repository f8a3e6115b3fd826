"""FlashAttention-1: the outer loop runs over keys.

Swap the two loops, as the first FlashAttention paper does (arXiv:2205.14135, Algorithm 1). A
step owns a tile of keys, loads K and V *once*, and loops over the queries. Every iteration
loads O, l and m of the iteration's query rows from HBM, updates them, and stores them. Before
the loops, a separate stage (kernel) must set O = 0, l = 0 and m = -inf in HBM.

Store O (divided by l, as in the paper), l and m.
"""

import numpy as np

from flashsim.api.counting import count
from flashsim.exercises.exercise import Exercise, Problem, Task, Tiling
from flashsim.exercises.references import SLIPS, attention, output_terms


def reference(machine):
    """FlashAttention-1's Algorithm 1, lines 2 to 15."""
    hbm, p = machine.hbm, machine.problem
    with machine.stage("init") as sram:
        for rows in machine.row_tiles():
            with sram.step(rows):
                sram.store(hbm.O, rows, 0.0)
                # TODO: l and m
                sram.store(hbm.l, rows, 0.0)
                sram.store(hbm.m, rows, -np.inf)
                # END
    with machine.stage("forward", outer="keys") as sram:
        for cols in machine.key_tiles():
            with sram.step(cols):
                K, V = sram.load(hbm.K, cols), sram.load(hbm.V, cols)
                for rows in machine.row_tiles():
                    with sram.visit(rows, cols):
                        # TODO: load O, l and m of these rows, update them, store them
                        O, l = sram.load(hbm.O, rows), sram.load(hbm.l, rows)
                        m = sram.load(hbm.m, rows)
                        S = sram.load(hbm.Q, rows) @ K.T
                        S *= p.scale
                        m_new = np.maximum(m, S.max(axis=1))
                        S -= m_new[:, None]
                        np.exp(S, out=S)
                        l *= np.exp(m - m_new)  # the part of l_new that was there
                        O *= l[:, None]
                        l += S.sum(axis=1)
                        sram.accumulate(O, S, V)
                        O /= l[:, None]
                        sram.store(hbm.O, rows, O)
                        sram.store(hbm.l, rows, l)
                        sram.store(hbm.m, rows, m_new)
                        # END


def truth(arrays, p, dtype):
    """Return O, and an l and m such that m + log l is the LSE."""
    s = arrays["S"].astype(dtype)
    m = s.max(axis=-1)
    l = np.exp(s - m[..., None]).sum(axis=-1)
    return {"O": attention(arrays, p, dtype)["O"], "l": l, "m": m}


EXERCISE = Exercise(
    name="flash1-forward",
    statement=__doc__,
    task=Task(Problem(32, n_kv=48, head_dim=12), Tiling(8, 16), 4096, outputs=("O", "l", "m")),
    reference=reference,
    truth=truth,
    terms=output_terms,
    hints=(
        "O in HBM is already divided by the l of the keys seen so far: multiply by l before "
        "you add to it.",
        "With l already rescaled: O *= l, l += the new sums, O += P V, O /= l.",
        "A whole O in one step would save the stores of O, but K and V are to be read once.",
    ),
    budget=lambda task: count(task.problem, algorithm="flash1", tiling=task.tiling).bytes(),
    at_most=(("load", "K"), ("load", "V")),
    mistakes=SLIPS,
)
