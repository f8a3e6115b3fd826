"""Fewest bytes: everything is allowed that fits.

Attention of 96 queries and 96 keys, 16 wide, float32, O alone to be stored, and 12 KiB on chip.
The tiles are yours: `machine.stage(name, tiling=flashsim.Tiling(block_q, block_k))`, plain
slices, smaller pieces inside a visit with `sram.strip()`. What has to be on chip at once, and
what can come and go?

Full marks are what the reference moves; fewer bytes earn a place on the board.
"""

import numpy as np

from flashsim.exercises.exercise import Exercise, Task
from flashsim.exercises.truths import SLIPS, attention, output_terms
from flashsim.problem.problem import Problem
from flashsim.schedule.tensors import whole_bytes
from flashsim.schedule.tiling import Tiling


def reference(machine):
    """Rows are what saves loads: 48 of them stay, and 8 keys at a time pass."""
    hbm, p = machine.hbm, machine.problem
    tiling = type(machine.tiling)(48, 8)
    with machine.stage("forward", tiling=tiling) as sram:
        for i in range(0, p.n_q, 48):
            rows = slice(i, i + 48)
            with sram.step(rows):
                Q = sram.load(hbm.Q, rows)
                O = sram.alloc("O", Q.shape, fill=0.0)
                m = sram.alloc("m", len(Q), fill=-np.inf)
                l = sram.alloc("l", len(Q), fill=0.0)
                for j in range(0, p.n_kv, 8):
                    cols = slice(j, j + 8)
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
                sram.store(hbm.O, rows, O)


SKELETON = """
import numpy as np

import flashsim


def solution(machine):
    hbm, p = machine.hbm, machine.problem
    tiling = flashsim.Tiling(16, 16)  # TODO: better ones
    with machine.stage("forward", tiling=tiling) as sram:
        for i in range(0, p.n_q, tiling.block_q):
            rows = slice(i, i + tiling.block_q)
            with sram.step(rows):
                pass  # TODO
"""


def bound(task):
    """Each of Q, K, V and O once: no algorithm does without."""
    return sum(whole_bytes(task.problem, name) for name in "QKVO")


EXERCISE = Exercise(
    name="fewest-bytes",
    statement=__doc__,
    task=Task(Problem(96, n_kv=96, head_dim=16), Tiling(16, 16), 12 * 1024),
    reference=reference,
    truth=attention,
    skeleton=SKELETON,
    terms=output_terms,
    hints=(
        "K and V are loaded once for each tile of rows; their own tile's size saves nothing.",
        "So make rows many and keys few: Q, O and a few keys at a time.",
        "48 rows and 8 keys: Q and O take 6,144 B, K and V 1,024 B, S 1,536 B.",
    ),
    bound=bound,
    mistakes=SLIPS,
)
