"""delta, the first stage of the backward pass.

The backward pass needs delta_i = Σ_j P_ij dP_ij, a sum over N keys. Because dP = dO Vᵀ and O =
P V, this equals Σ_x dO_ix O_ix, a sum over head_dim. So computing delta does not need P: load O
and dO once, and store delta.
"""

from flashsim.exercises.exercise import Exercise, Problem, Task, Tiling
from flashsim.exercises.references import delta, moves, scaled


def reference(machine):
    """Line 4 of FlashAttention-2's Algorithm 2."""
    hbm = machine.hbm  # hbm.O and hbm.dO, (32, 12); hbm.delta, (32,)
    with machine.stage("delta") as sram:
        for rows in machine.row_tiles():
            with sram.step(rows):
                # TODO
                O = sram.load(hbm.O, rows)
                O *= sram.load(hbm.dO, rows)
                sram.store(hbm.delta, rows, O.sum(axis=1))
                # END


EXERCISE = Exercise(
    name="delta",
    statement=__doc__,
    task=Task(Problem(32, n_kv=48, head_dim=12), Tiling(8, 16), 896, ("O", "dO"), ("delta",)),
    reference=reference,
    truth=delta,
    hints=(
        "Element by element, then a sum along the row: axis=1.",
        "O *= dO works in place, and needs no third tile.",
        "delta does not depend on the scale of the scores.",
    ),
    budget=moves("O", "dO", "delta"),
    mistakes={
        "delta must not contain the scale": scaled(delta, "delta", lambda p: p.scale),
        "delta is the sum itself, not its mean": scaled(delta, "delta", lambda p: 1 / p.head_dim_v),
    },
)
