"""dK and dV: the outer loop runs over keys.

If L and delta of each row are known, P = exp(S - L) can be recomputed from Q and K. If the
outer loop runs over keys, dK and dV are sums over the inner loop:

    dV_j = Σ_i P_ijᵀ dO_i      dS_ij = P_ij (dO_i V_jᵀ - delta_i)      dK_j = scale Σ_i dS_ijᵀ Q_i

A step owns a tile of keys, keeps dK and dV on chip, and loads Q, dO, L and delta tile by tile.
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
    """Lines 5 to 19 of FlashAttention-2's Algorithm 2, without dQ."""
    hbm, p = machine.hbm, machine.problem
    with machine.stage("dkdv", outer="keys") as sram:
        for cols in machine.key_tiles():
            with sram.step(cols):
                K, V = sram.load(hbm.K, cols), sram.load(hbm.V, cols)
                dK = sram.alloc("dK", K.shape, fill=0.0)
                dV = sram.alloc("dV", V.shape, fill=0.0)
                for rows in machine.row_tiles():
                    with sram.visit(rows, cols):
                        # TODO: P, dV, dS, dK
                        Q, dO = sram.load(hbm.Q, rows), sram.load(hbm.dO, rows)
                        P = Q @ K.T
                        P *= p.scale
                        P -= sram.load(hbm.L, rows)[:, None]
                        np.exp(P, out=P)
                        sram.accumulate(dV, P.T, dO)
                        dP = dO @ V.T
                        dP -= sram.load(hbm.delta, rows)[:, None]
                        P *= dP
                        sram.accumulate(dK, P.T, Q)
                        # END
                # LEFT OUT
                dK *= p.scale
                # END
                sram.store(hbm.dK, cols, dK)
                sram.store(hbm.dV, cols, dV)


EXERCISE = Exercise(
    name="dk-dv",
    statement=__doc__,
    task=Task(
        *(Problem(32, n_kv=48, head_dim=12), Tiling(8, 16), 6144),
        *(("dO", "L", "delta"), ("dK", "dV")),
        spread=8,
    ),
    reference=reference,
    truth=gradients,
    hints=(
        "P needs no maximum and no division: exp(S - L) is P itself.",
        "Compute dP = dO @ V.T, subtract delta and multiply by P: this is dS, which can "
        "overwrite P.",
        "Call sram.accumulate(dV, P.T, dO) before dS overwrites P; apply the scale of dK "
        "once, at the end.",
    ),
    terms=gradient_terms,
    budget=stage_bytes("dkdv"),
    at_most=(("store", "dK"), ("reduce", "dK")),
    mistakes={
        "dK must contain the scale exactly once": scaled(gradients, "dK", lambda p: 1 / p.scale),
        **BACKWARD_SLIPS,
    },
)
