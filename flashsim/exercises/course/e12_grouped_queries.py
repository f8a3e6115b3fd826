"""Grouped queries: one load of K and V for four heads.

Four query heads share a KV head. With a separate loop for each query head, K and V are loaded
four times as often as needed. In a stage (kernel) with ``per="group"``, a step serves all four
heads: `sram.load(hbm.Q, rows, member=g)` loads the tile of query head g of the group, and
`sram.store` takes `member` too. Load K and V without the argument `member`.

Store O. For each tile of query rows, load K and V once for all four heads.
"""

import numpy as np

from flashsim.exercises.exercise import Exercise, Problem, Task, Tiling
from flashsim.exercises.references import SLIPS, attention, loop_slips, moves, output_terms


def reference(machine):
    """Keep the O, m and l of four heads on chip, and stream K and V past them once."""
    hbm, p = machine.hbm, machine.problem
    with machine.stage("forward", per="group") as sram:
        for rows in machine.row_tiles():
            with sram.step(rows):
                heads = []
                for g in range(p.group):
                    Q = sram.load(hbm.Q, rows, member=g)
                    # TODO: O, m and l of this head; keep them together with Q
                    O = sram.alloc("O", Q.shape, fill=0.0)
                    m = sram.alloc("m", len(Q), fill=-np.inf)
                    l = sram.alloc("l", len(Q), fill=0.0)
                    heads.append((Q, O, m, l))
                    # END
                for cols in machine.key_tiles():
                    with sram.visit(rows, cols):
                        K, V = sram.load(hbm.K, cols), sram.load(hbm.V, cols)
                        # TODO: for each head
                        for Q, O, m, l in heads:
                            with sram.strip():
                                S = Q @ K.T
                                S *= p.scale
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
                # TODO: sram.store(hbm.O, rows, O, member=g)
                for g, (_, O, _, l) in enumerate(heads):
                    O /= l[:, None]
                    sram.store(hbm.O, rows, O, member=g)
                # END


EXERCISE = Exercise(
    name="grouped-queries",
    statement=__doc__,
    task=Task(Problem(16, n_kv=48, head_dim=12, heads=4, kv_heads=1), Tiling(8, 16), 7168),
    reference=reference,
    truth=attention,
    terms=output_terms,
    hints=(
        "You may keep tiles in a Python list if they were made before the loop over keys.",
        "Use `with sram.strip():` for each head, so that only one tile of scores is on chip "
        "at a time.",
        "K and V are loaded in the visit, before the loop over the heads.",
    ),
    budget=moves("Q", "O", per_row_tile="KV"),
    mistakes={**SLIPS, **loop_slips(8, 16)},
)
