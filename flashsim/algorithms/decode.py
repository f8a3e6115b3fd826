"""FlashDecoding: Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023.

A few queries of a long cache are few row tiles: too few to occupy a GPU, whose time goes by at the
speed of one SM. So the keys are divided as well, in the two steps of the post: attention over each
part of the keys, in parallel, each with its log-sum-exp; then a reduction over the parts. What a
part wrote is float32 (or float64), normalised. `Schedule` says which parts there are.

A prefix that all entries of a batch share is walked once, by row tiles of the queries of all of
them, and merged with each entry's own keys: cascade attention (FlashInfer, arXiv:2501.01005; also
Hydragen, arXiv:2402.05099).
"""

from __future__ import annotations

import numpy as np

from flashsim.algorithms.flash2 import normalised, stream_keys
from flashsim.algorithms.machine import Machine
from flashsim.algorithms.merge import merged


def forward(machine: Machine) -> None:
    """Both steps. A row tile whose keys are one part is done after the first."""
    _split(machine)
    _combine(machine)


def _split(machine: Machine) -> None:
    """Step 1: FlashAttention-2's walk, but a thread block owns one part of a row tile's keys."""
    hbm, p = machine.hbm, machine.problem
    with machine.stage("split") as sram:
        schedule = sram.schedule
        for i in range(schedule.t_r):
            rows, (first, stop) = schedule.row_slice(i), schedule.slots[i].tolist()
            for part in range(stop - first):
                with sram.step(i):
                    Q_i = sram.load(hbm.Q, rows)
                    n = Q_i.shape[-2]
                    O_i = sram.alloc("O", (n, p.head_dim_v), fill=0.0)
                    l_i = sram.alloc("l", (n,), fill=0.0)
                    m_i = sram.alloc("m", (n,), fill=-np.inf)
                    stream_keys(sram, hbm, Q_i, O_i, l_i, m_i, schedule.visits(i, part))
                    O_part, L_part = normalised(O_i, l_i, m_i)
                    if stop == 1 and i >= schedule.prefix_tiles:
                        sram.store(hbm.O, rows, O_part)
                        sram.store(hbm.L, rows, L_part)
                    else:
                        there = machine.part_slice(schedule, rows, first + part)
                        sram.store(hbm.O_part, there, O_part)
                        sram.store(hbm.L_part, there, L_part)


def _combine(machine: Machine) -> None:
    """Step 2: the parts of each row tile, merged in their order: the same bits in every run.

    A shared prefix's come before an entry's own. Pair by pair; FlashAttention's combine, and the
    GPU's kernel here, take the largest L of all first, then weigh: other roundings of one sum.
    """
    hbm, p = machine.hbm, machine.problem
    with machine.stage("combine") as sram:
        schedule = sram.schedule
        for i in np.flatnonzero(schedule.merged).tolist():
            rows = schedule.row_slice(i)
            n = rows.stop - rows.start
            with sram.step(i):
                O_i = sram.alloc("O", (n, p.head_dim_v), fill=0.0)
                L_i = sram.alloc("L", (n,), fill=-np.inf)
                for part in range(int(schedule.slots[i, 1])):
                    there = machine.part_slice(schedule, rows, part)
                    with sram.strip():
                        O_part = sram.load(hbm.O_part, there)
                        L_part = sram.load(hbm.L_part, there)
                        O_i[:], L_i[:] = merged(O_i, L_i, O_part, L_part)
                sram.store(hbm.O, rows, O_i)
                sram.store(hbm.L, rows, L_i)


def backward(machine: Machine) -> None:
    """There is none: `plans.check_backward` says so before a machine is made."""
    raise NotImplementedError


ALGORITHMS = {"flash-decode": (forward, backward)}
