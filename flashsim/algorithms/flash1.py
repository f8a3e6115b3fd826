"""The first FlashAttention: Dao, Fu, Ermon, Rudra, Ré, arXiv:2205.14135, Algorithms 1 and 4.

Keys are the outer loop: each visit (tile pair) reads and writes O, l and m, but K and V are read
only once. FlashAttention-2 swapped the two loops so that O, l and m stay on chip. Numbers at the
right end of a line are line numbers of the paper's algorithms. If accumulators are wider than the
inputs, O and dQ stay in HBM as accumulators until a conversion at the end, as in real kernels.
"""

import numpy as np

from flashsim.algorithms.machine import Machine
from flashsim.algorithms.score_tile import (
    accumulator,
    clear_dbias,
    convert,
    fill,
    finite,
    lse_gradient,
    reduce_dbias,
    score_gradient,
    score_tile,
)


def forward(machine: Machine) -> None:
    """Run FlashAttention-1's forward pass, Algorithm 1 of the paper.

    At each visit (tile pair), O is divided by l, the running sum of exponentials.
    """
    hbm = machine.hbm
    O = accumulator(hbm, "O")
    fill(machine, "init", {O.name: 0.0, "l": 0.0, "m": -np.inf})                          # 2
    with machine.stage("forward") as sram:
        schedule = sram.schedule
        for j in schedule.outer_order():                                                  # 5
            cols = schedule.col_slice(j)
            with sram.step(j):
                K_j, V_j = sram.load(hbm.K, cols), sram.load(hbm.V, cols)                 # 6
                for visit in schedule.visits(j):                                          # 7
                    with sram.visit(visit):
                        rows = visit.rows
                        Q_i, O_i = sram.load(hbm.Q, rows), sram.load(O, rows)             # 8
                        l_i, m_i = sram.load(hbm.l, rows), sram.load(hbm.m, rows)
                        S_ij, _ = score_tile(sram, Q_i, K_j, visit)                       # 9
                        m_ij = S_ij.max(axis=-1)                                          # 10
                        S_ij -= finite(m_ij)[..., None]
                        P_ij = np.exp(S_ij, out=S_ij)
                        l_ij = P_ij.sum(axis=-1)
                        m_new = np.maximum(m_i, m_ij)                                     # 11
                        alpha = np.exp(m_i - finite(m_new))
                        beta = np.exp(m_ij - finite(m_new))
                        l_new = alpha * l_i + beta * l_ij
                        l_safe = np.where(l_new == 0, 1, l_new)
                        O_i *= (alpha * l_i)[..., None]
                        O_i += beta[..., None] * (sram.rounded("P", P_ij) @ V_j)
                        sram.store(O, rows, O_i / l_safe[..., None])                      # 12
                        sram.store(hbm.l, rows, l_new)                                    # 13
                        sram.store(hbm.m, rows, m_new)
    convert(machine, "O_acc", "O")


def backward(machine: Machine) -> None:
    """Run FlashAttention-1's backward pass, Algorithm 4, without dropout (lines 14, 15 and 18).

    Every visit (tile pair) loads and stores a tile of dQ. Tiles of dK and dV are complete at the
    end of an outer step, so dK and dV need not start as zeros in HBM (line 5).
    """
    hbm, p = machine.hbm, machine.problem
    dQ = accumulator(hbm, "dQ")
    fill(machine, "init", {dQ.name: 0.0})                                                 # 5
    clear_dbias(machine)
    with machine.stage("backward") as sram:
        schedule = sram.schedule
        for j in schedule.outer_order():                                                  # 6
            cols = schedule.col_slice(j)
            with sram.step(j):
                K_j, V_j = sram.load(hbm.K, cols), sram.load(hbm.V, cols)                 # 7
                dK_j = sram.alloc("dK", K_j.shape[-2:], fill=0.0)                         # 8
                dV_j = sram.alloc("dV", V_j.shape[-2:], fill=0.0)
                for g in range(p.group):  # the query heads that share this key head
                    for visit in schedule.visits(j):                                      # 9
                        with sram.visit(visit, member=g):
                            rows = visit.rows
                            Q_i = sram.load(hbm.Q, rows, member=g)                        # 10
                            O_i = sram.load(hbm.O, rows, member=g)
                            dO_i = sram.load(hbm.dO, rows, member=g)
                            dL_i = lse_gradient(sram, rows, member=g)
                            dQ_i = sram.load(dQ, rows, member=g)
                            l_i = sram.load(hbm.l, rows, member=g)
                            m_i = sram.load(hbm.m, rows, member=g)
                            S_ij, chain = score_tile(                                     # 11, 12
                                sram, Q_i, K_j, visit, member=g, gated=True
                            )
                            S_ij -= finite(m_i)[..., None]
                            P_ij = np.exp(S_ij, out=S_ij)                                 # 13
                            P_ij /= np.where(l_i == 0, 1, l_i)[..., None]
                            dV_j += sram.rounded("P", P_ij).mT @ dO_i                     # 16
                            D_i = (dO_i * O_i).sum(axis=-1)                               # 19
                            if dL_i is not None:
                                D_i -= dL_i
                            dS_ij, dbias_ij = score_gradient(                             # 17, 20
                                sram, P_ij, dO_i, V_j, D_i, chain
                            )
                            dS_ij = sram.rounded("dS", dS_ij)
                            dQ_i += p.scale * (dS_ij @ K_j)
                            sram.store(dQ, rows, dQ_i, member=g)                          # 21
                            reduce_dbias(sram, rows, dbias_ij, visit.cols, g)
                            dK_j += dS_ij.mT @ Q_i                                        # 22
                sram.store(hbm.dK, cols, dK_j * p.scale)                                  # 24
                sram.store(hbm.dV, cols, dV_j)
    convert(machine, "dQ_acc", "dQ")
    convert(machine, "dBias_acc", "dBias")


ALGORITHMS = {"flash1": (forward, backward)}
