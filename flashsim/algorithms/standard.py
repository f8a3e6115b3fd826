"""Standard attention: S and P are materialised in HBM (Algorithms 0 and 3 of arXiv:2205.14135).

The matrix products are tiled as in any matrix-product kernel; nothing else is optimised. Fully
masked tiles are not skipped, as in the frameworks' plain implementations. Numbers at the right end
of a line are the paper's line numbers.
"""

import numpy as np

from flashsim.algorithms.functions import load_own
from flashsim.algorithms.machine import Machine
from flashsim.algorithms.score_tile import (
    clear_dbias,
    convert,
    finite,
    log_sum_exp,
    lse_gradient,
    reduce_dbias,
    score_tile,
)


def forward(machine: Machine) -> None:
    """Run the forward pass (Algorithm 0 of the paper): S = Q K^T; P = softmax(S); O = P V."""
    _scores(machine)
    _softmax(machine)
    hbm, p = machine.hbm, machine.problem
    with machine.stage("output") as sram:
        for i, rows in sram.steps():
            n = rows.stop - rows.start
            O_i = sram.alloc("O", (n, p.head_dim_v), fill=0.0)
            for visit in sram.schedule.visits(i):
                with sram.visit(visit):
                    P_ij = sram.load(hbm.P, rows, visit.cols)                             # 3
                    O_i += P_ij @ sram.load(hbm.V, visit.cols)
            sram.store(hbm.O, rows, O_i)


def _scores(machine: Machine) -> None:
    """Compute the scores S = scale Q K^T and, with a softcap, the softcap's derivative.

    The derivative is stored, because a rounded S is too imprecise to recompute it.
    """
    hbm = machine.hbm
    with machine.stage("scores") as sram:
        for i, rows in sram.steps():
            Q_i = sram.load(hbm.Q, rows)                                                  # 1
            own = load_own(sram, i)
            for visit in sram.schedule.visits(i):
                with sram.visit(visit):
                    K_j = sram.load(hbm.K, visit.cols)
                    S_ij, chain = score_tile(sram, Q_i, K_j, visit, own=own, gated=True)
                    sram.store(hbm.S, rows, S_ij, visit.cols)
                    if chain.cap is not None:
                        sram.store(hbm.gate, rows, chain.cap, visit.cols)


def _softmax(machine: Machine) -> None:
    """Compute P = softmax(S) from complete rows of S; the LSE is not stored in HBM."""
    hbm = machine.hbm
    with machine.stage("softmax") as sram:
        for i, _ in sram.steps():
            sequence = sram.schedule.sequence_of_row(i)
            keys = slice(sequence.k_start, sequence.k_stop)
            for rows in machine.strips(sram, i):
                with sram.strip():
                    S_i = sram.load(hbm.S, rows, keys)                                    # 2
                    m_i = S_i.max(axis=-1, initial=-np.inf)
                    S_i -= finite(m_i)[..., None]
                    P_i = np.exp(S_i, out=S_i)
                    l_i = P_i.sum(axis=-1)
                    P_i /= np.where(l_i == 0, 1, l_i)[..., None]
                    sram.store(hbm.P, rows, P_i, keys)
                    machine.note_lse(rows, log_sum_exp(m_i, l_i))


def backward(machine: Machine) -> None:
    """Run the backward pass (Algorithm 3) with the saved P and the softcap's saved derivative."""
    _sum_over_queries(machine, "dv", "P", "dO", "dV")                                     # 1
    hbm = machine.hbm
    with machine.stage("dp") as sram:
        for i, rows in sram.steps():
            dO_i = sram.load(hbm.dO, rows)
            for visit in sram.schedule.visits(i):
                with sram.visit(visit):
                    V_j = sram.load(hbm.V, visit.cols)
                    dP_ij = sram.alloc("dP", (dO_i.shape[-2], V_j.shape[-2]))
                    np.matmul(dO_i, V_j.mT, out=dP_ij)                                    # 2
                    sram.store(hbm.dP, rows, dP_ij, visit.cols)
    _ds(machine)
    _dq(machine)
    _sum_over_queries(machine, "dk", "dS", "Q", "dK", machine.problem.scale)              # 5
    convert(machine, "dBias_acc", "dBias")


def _sum_over_queries(
    machine: Machine, stage: str, left: str, right: str, result: str, scale: float | None = None
) -> None:
    """Compute ``result = left.T @ right``, times `scale` if any, with keys as the outer loop."""
    hbm, p = machine.hbm, machine.problem
    left_, right_, result_ = (hbm.tensors[name] for name in (left, right, result))
    with machine.stage(stage) as sram:
        schedule = sram.schedule
        for j in schedule.outer_order():
            cols = schedule.col_slice(j)
            with sram.step(j):
                sum_j = sram.alloc(result, (cols.stop - cols.start, right_.width), fill=0.0)
                for g in range(p.group):
                    for visit in schedule.visits(j):
                        with sram.visit(visit, member=g):
                            left_ij = sram.load(left_, visit.rows, cols, member=g)
                            sum_j += left_ij.mT @ sram.load(right_, visit.rows, member=g)
                sram.store(result_, cols, sum_j if scale is None else sum_j * scale)


def _ds(machine: Machine) -> None:
    hbm, p = machine.hbm, machine.problem
    clear_dbias(machine)
    with machine.stage("ds") as sram:
        for i, _ in sram.steps():
            sequence = sram.schedule.sequence_of_row(i)
            keys = slice(sequence.k_start, sequence.k_stop)
            for rows in machine.strips(sram, i):
                with sram.strip():
                    P_i = sram.load(hbm.P, rows, keys)                                    # 3
                    dP_i = sram.load(hbm.dP, rows, keys)
                    dL_i = lse_gradient(sram, rows)
                    D_i = (P_i * dP_i).sum(axis=-1)
                    if dL_i is not None:
                        D_i -= dL_i
                    dS_i = P_i * (dP_i - D_i[..., None])
                    reduce_dbias(sram, rows, dS_i, keys)
                    if p.softcap:
                        dS_i *= sram.load(hbm.gate, rows, keys)
                    sram.store(hbm.dS, rows, dS_i, keys)


def _dq(machine: Machine) -> None:
    hbm, p = machine.hbm, machine.problem
    with machine.stage("dq") as sram:
        for i, rows in sram.steps():
            dQ_i = sram.alloc("dQ", (rows.stop - rows.start, p.head_dim), fill=0.0)
            for visit in sram.schedule.visits(i):
                with sram.visit(visit):
                    dS_ij = sram.load(hbm.dS, rows, visit.cols)
                    dQ_i += dS_ij @ sram.load(hbm.K, visit.cols)                          # 4
            sram.store(hbm.dQ, rows, dQ_i * p.scale)


ALGORITHMS = {"standard": (forward, backward)}
