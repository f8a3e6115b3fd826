"""Softmax and product in one pass.

Compute O = softmax(S) V in one pass over S. P is never stored in HBM. S is in HBM, and is
loaded in tiles of 8 × 16. Keep O, m and l of eight rows on chip. Whenever the running maximum m
grows, rescale both O and l. Load each score of S only once.
"""

import numpy as np

from flashsim.exercises.exercise import Exercise, Problem, Task, Tiling
from flashsim.exercises.references import loop_slips, moves, output_terms, softmax_product


def reference(machine):
    """Pass over S once; divide by l at the end."""
    hbm, p = machine.hbm, machine.problem
    with machine.stage("fused") as sram:
        for rows in machine.row_tiles():
            with sram.step(rows):
                n = rows.stop - rows.start
                O = sram.alloc("O", (n, p.head_dim_v), fill=0.0)
                # TODO: m and l
                m = sram.alloc("m", n, fill=-np.inf)
                l = sram.alloc("l", n, fill=0.0)
                # END
                for cols in machine.key_tiles():
                    with sram.visit(rows, cols):
                        S, V = sram.load(hbm.S, rows, cols), sram.load(hbm.V, cols)
                        # TODO: the online softmax, with O rescaled too
                        m_new = np.maximum(m, S.max(axis=1))
                        alpha = np.exp(m - m_new)
                        S -= m_new[:, None]
                        np.exp(S, out=S)
                        l *= alpha
                        l += S.sum(axis=1)
                        O *= alpha[:, None]
                        sram.accumulate(O, S, V)
                        m[:] = m_new
                        # END
                # TODO: divide
                O /= l[:, None]
                # END
                sram.store(hbm.O, rows, O)


def undivided(arrays, p, dtype):
    """Return the result of a common mistake: Σ exp(S - m) V without the division by l."""
    s = arrays["S"].astype(dtype)
    return {"O": np.exp(s - s.max(axis=-1, keepdims=True)) @ arrays["V"].astype(dtype)}


EXERCISE = Exercise(
    name="fused-softmax-product",
    statement=__doc__,
    task=Task(Problem(32, n_kv=48, head_dim=12), Tiling(8, 16), 3072, ("S",)),
    reference=reference,
    truth=softmax_product,
    terms=output_terms,
    hints=(
        "O is a sum over keys, like l: rescale it by the same factor exp(m - m_new).",
        "sram.accumulate(O, P, V) adds P V without extra memory for the product; P can "
        "overwrite S.",
        "Divide once at the end: O /= l[:, None].",
    ),
    budget=moves("S", "O", per_row_tile="V"),
    mistakes={
        "the sum over the keys is right, but was not divided by l": undivided,
        **loop_slips(8, 16),
    },
)
