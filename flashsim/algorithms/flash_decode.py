"""FlashDecoding: Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023.

A few queries with a long KV cache yield too few row tiles to fill a GPU, so FlashDecoding also
splits the keys into parts. Step 1 computes attention over each part of the keys in parallel, and
each part's log-sum-exp. Step 2 merges the results of all parts. Each part's output is normalised
and stored in float32 (float64 for float64 inputs).

If all batch entries share a prefix of keys, additional row tiles hold the queries of all entries,
so that the prefix is read only once (cascade attention: FlashInfer, arXiv:2501.01005; also
Hydragen, arXiv:2402.05099). The results over the shared prefix are merged with the results over
each entry's own keys.
"""

import numpy as np

from flashsim.algorithms.flash2 import normalised, stream_keys
from flashsim.algorithms.machine import Machine
from flashsim.algorithms.merge import merged


def forward(machine: Machine) -> None:
    """Run both steps of decoding: attention over each part of the keys, and the merge."""
    _split(machine)
    _combine(machine)


def _split(machine: Machine) -> None:
    """Run step 1: each thread block attends over one part of a row tile's keys."""
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
                    stream_keys(sram, Q_i, O_i, l_i, m_i, schedule.visits(i, part))
                    O_part, L_part = normalised(O_i, l_i, m_i)
                    if stop == 1 and i >= schedule.prefix_tiles:
                        sram.store(hbm.O, rows, O_part)
                        sram.store(hbm.L, rows, L_part)
                    else:
                        there = machine.part_slice(schedule, rows, first + part)
                        sram.store(hbm.O_part, there, O_part)
                        sram.store(hbm.L_part, there, L_part)


def _combine(machine: Machine) -> None:
    """Run step 2: merge the results of all parts of a row tile's keys into the final output.

    The parts are merged one after another in a fixed order, a shared prefix first, so every run
    gives the same bits. FlashAttention's and flashsim's GPU kernels merge all parts at once, with
    the same result except for rounding.
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
    """Raise an error, because decoding has no backward pass."""
    raise NotImplementedError


ALGORITHMS = {"flash-decode": (forward, backward)}
