"""FlashAttention-2: the outer loop runs over queries.

The FlashAttention-2 paper swaps the loops back (arXiv:2307.08691, Algorithm 1). A step owns a
tile of queries, keeps O, m and l on chip, and loads K and V tile by tile. Divide O by l only
once, at the end. Store O and L = m + log l.
"""

import numpy as np

from flashsim.api.counting import count
from flashsim.exercises.exercise import Exercise, Problem, Task, Tiling
from flashsim.exercises.references import LSE_SLIPS, SLIPS, attention, loop_slips, output_terms


def reference(machine):
    """FlashAttention-2's Algorithm 1, lines 3 to 15."""
    hbm, p = machine.hbm, machine.problem  # p.scale is 1 / sqrt(head_dim)
    with machine.stage("forward") as sram:
        for rows in machine.row_tiles():
            with sram.step(rows):
                Q = sram.load(hbm.Q, rows)
                O = sram.alloc("O", Q.shape, fill=0.0)
                # TODO
                m = sram.alloc("m", len(Q), fill=-np.inf)
                l = sram.alloc("l", len(Q), fill=0.0)
                for cols in machine.key_tiles():
                    with sram.visit(rows, cols):
                        S = Q @ sram.load(hbm.K, cols).T
                        S *= p.scale
                        m_new = np.maximum(m, S.max(axis=1))
                        alpha = np.exp(m - m_new)
                        S -= m_new[:, None]
                        np.exp(S, out=S)
                        l *= alpha
                        l += S.sum(axis=1)
                        O *= alpha[:, None]
                        sram.accumulate(O, S, sram.load(hbm.V, cols))
                        m[:] = m_new
                O /= l[:, None]
                sram.store(hbm.L, rows, m + np.log(l))
                # END
                sram.store(hbm.O, rows, O)


EXERCISE = Exercise(
    name="flash2-forward",
    statement=__doc__,
    task=Task(Problem(32, n_kv=48, head_dim=12), Tiling(8, 16), 3328, outputs=("O", "L")),
    reference=reference,
    truth=attention,
    terms=output_terms,
    hints=(
        "It is the fused softmax-product, with S = scale Q Kᵀ computed on chip.",
        "Each step loads its Q once, and all of K and V, tile by tile.",
        "L = m + log l, with m and l as they are after the last tile.",
    ),
    budget=lambda task: count(task.problem, tiling=task.tiling).bytes(),
    at_most=(("store", "O"), ("reduce", "O")),
    mistakes={**SLIPS, **LSE_SLIPS, **loop_slips(8, 16)},
)
