"""dQ: the outer loop runs over queries.

    dS_ij = P_ij (dO_i V_jᵀ - delta_i)        dQ_i = scale Σ_j dS_ij K_j

dQ is a sum over keys. If the outer loop runs over queries, dQ stays on chip during the inner
loop, like O in the forward pass. So no atomic addition is needed. A step owns a tile of
queries, and loads their Q, dO, L and delta once.
"""

import numpy as np

from flashsim.exercises.exercise import Exercise, Problem, Task, Tiling
from flashsim.exercises.references import (
    BACKWARD_SLIPS,
    gradient_terms,
    gradients,
    scaled,
    stage_bytes,
)


def reference(machine):
    """Compute dQ, the third kernel of a backward pass without atomics."""
    hbm, p = machine.hbm, machine.problem
    with machine.stage("dq") as sram:
        for rows in machine.row_tiles():
            with sram.step(rows):
                Q, dO = sram.load(hbm.Q, rows), sram.load(hbm.dO, rows)
                L, delta = sram.load(hbm.L, rows), sram.load(hbm.delta, rows)
                # TODO
                dQ = sram.alloc("dQ", Q.shape, fill=0.0)
                for cols in machine.key_tiles():
                    with sram.visit(rows, cols):
                        K = sram.load(hbm.K, cols)
                        P = Q @ K.T
                        P *= p.scale
                        P -= L[:, None]
                        np.exp(P, out=P)
                        dP = dO @ sram.load(hbm.V, cols).T
                        dP -= delta[:, None]
                        P *= dP
                        sram.accumulate(dQ, P, K)
                dQ *= p.scale
                sram.store(hbm.dQ, rows, dQ)
                # END


EXERCISE = Exercise(
    name="dq",
    statement=__doc__,
    task=Task(
        *(Problem(32, n_kv=48, head_dim=12), Tiling(8, 16), 5120),
        *(("dO", "L", "delta"), ("dQ",)),
        spread=8,
    ),
    reference=reference,
    truth=gradients,
    hints=(
        "Each iteration needs K twice, for S and for dQ: load it once and keep it in a variable.",
        "Compute S and dP again, as in the last exercise.",
        "Use sram.accumulate(dQ, dS, K), and apply the scale once, at the end.",
    ),
    terms=gradient_terms,
    budget=stage_bytes("dq"),
    at_most=(("store", "dQ"), ("reduce", "dQ")),
    mistakes={
        "dQ must contain the scale exactly once": scaled(gradients, "dQ", lambda p: 1 / p.scale),
        **BACKWARD_SLIPS,
    },
)
