"""Fewest bytes: any algorithm that fits on chip.

Compute attention of 192 queries and 192 keys with head_dim 16 in float32, with 3 KiB on chip.
Store O only. You choose the tiles: by `machine.stage(name, tiling=flashsim.Tiling(block_q,
block_k))`, by plain slices, or by `sram.strip()` for smaller pieces inside a visit (one tile
pair). Think about which data must stay on chip all the time, and which data can be loaded
again.

You get full marks for moving as few bytes as the reference; fewer bytes improve your place on
the leaderboard. With 3 KiB on chip, no algorithm that adds up 16 products per score can move
less than 97,920 B. docs/reference/model.md has the proof, and `flashsim exercise grade FILE
--plot p.png` draws this bound as a line.
"""

import numpy as np

from flashsim.counts import bounds
from flashsim.exercises.exercise import Exercise, Problem, Task, Tiling
from flashsim.exercises.references import SLIPS, attention, loop_slips, output_terms
from flashsim.schedule.tensors import whole_bytes


def reference(machine):
    """Keep 16 rows on chip, which saves most loads, and stream 4 keys at a time."""
    hbm, p = machine.hbm, machine.problem
    tiling = type(machine.tiling)(16, 4)
    with machine.stage("forward", tiling=tiling) as sram:
        for i in range(0, p.n_q, 16):
            rows = slice(i, i + 16)
            with sram.step(rows):
                Q = sram.load(hbm.Q, rows)
                O = sram.alloc("O", Q.shape, fill=0.0)
                m = sram.alloc("m", len(Q), fill=-np.inf)
                l = sram.alloc("l", len(Q), fill=0.0)
                for j in range(0, p.n_kv, 4):
                    cols = slice(j, j + 4)
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
    tiling = flashsim.Tiling(8, 8)  # TODO: better ones
    with machine.stage("forward", tiling=tiling) as sram:
        for i in range(0, p.n_q, tiling.block_q):
            rows = slice(i, i + tiling.block_q)
            with sram.step(rows):
                pass  # TODO
"""


def bound(task):
    """Return a lower bound on the bytes of any algorithm.

    The bound is the larger of two numbers: the bytes of Q, K, V and O, and the proven bound for
    this SRAM size.
    """
    p = task.problem
    once = sum(whole_bytes(p, name) for name in "QKVO")
    return max(once, 4 * bounds.proven(p.n_q * p.n_kv, p.head_dim, task.sram_bytes // 4))


EXERCISE = Exercise(
    name="fewest-bytes",
    statement=__doc__,
    task=Task(Problem(192, n_kv=192, head_dim=16), Tiling(8, 8), 3 * 1024),
    reference=reference,
    truth=attention,
    skeleton=SKELETON,
    terms=output_terms,
    hints=(
        "K and V are loaded once per tile of rows, whatever the size of the key tile.",
        "So use tiles of many rows and few keys: keep Q, O and a few keys on chip.",
        "16 rows and 4 keys: Q and O take 2,048 B, K and V 512 B, S 256 B.",
    ),
    bound=bound,
    mistakes={**SLIPS, **loop_slips(8, 8)},
)
