"""Causal attention that skips empty tiles.

Query i sees keys 0 … i. So about half of the tiles of scores have no visible score. Do not load
the keys of these empty tiles. `machine.keep(rows, cols)` returns a boolean array for a tile:
True for each score that the mask keeps. The method returns None if the mask keeps the whole
tile. Compute O = softmax(S) V as in the last exercise. But S is not an input now: compute S =
scale · Q Kᵀ on chip. Store O.
"""

import numpy as np

from flashsim.api.counting import count
from flashsim.exercises.exercise import Exercise, Problem, Task, Tiling
from flashsim.exercises.references import SLIPS, attention, loop_slips, output_terms, with_problem
from flashsim.schedule.tensors import whole_bytes


def reference(machine):
    """Skip the tiles of scores that lie above the diagonal."""
    hbm, p = machine.hbm, machine.problem
    with machine.stage("forward") as sram:
        for rows in machine.row_tiles():
            with sram.step(rows):
                Q = sram.load(hbm.Q, rows)
                # TODO: O, m and l
                O = sram.alloc("O", Q.shape, fill=0.0)
                m = sram.alloc("m", len(Q), fill=-np.inf)
                l = sram.alloc("l", len(Q), fill=0.0)
                # END
                for cols in machine.key_tiles():
                    keep = machine.keep(rows, cols)
                    # TODO: skip empty tiles; mask tiles on the diagonal: S[~keep] = -np.inf
                    if keep is not None and not keep.any():
                        continue
                    with sram.visit(rows, cols):
                        S = Q @ sram.load(hbm.K, cols).T
                        S *= p.scale
                        if keep is not None:
                            S[~keep] = -np.inf
                        m_new = np.maximum(m, S.max(axis=1))
                        alpha = np.exp(m - m_new)
                        S -= m_new[:, None]
                        np.exp(S, out=S)
                        l *= alpha
                        l += S.sum(axis=1)
                        O *= alpha[:, None]
                        sram.accumulate(O, S, sram.load(hbm.V, cols))
                        m[:] = m_new
                    # END
                # TODO: divide, and store O
                O /= l[:, None]
                sram.store(hbm.O, rows, O)
                # END


def budget(task):
    """Return the bytes for full marks: FlashAttention-2's closed form, without the bytes of
    L."""
    counted = count(task.problem, tiling=task.tiling).bytes()
    return counted - whole_bytes(task.problem, "L")


EXERCISE = Exercise(
    name="causal-skipping",
    statement=__doc__,
    task=Task(Problem(48, n_kv=48, head_dim=12, causal=True), Tiling(8, 8), 2560),
    reference=reference,
    truth=attention,
    terms=output_terms,
    hints=(
        "keep is computed from positions, so calling it before you load costs no bytes.",
        "if keep is not None and not keep.any(): continue, before the visit.",
        "The first tile of a row always has a key that is seen, so m is finite after it.",
    ),
    budget=budget,
    mistakes={
        "this is the result without the causal mask": with_problem(attention, causal=False),
        **SLIPS,
        **loop_slips(8, 8),
    },
)
