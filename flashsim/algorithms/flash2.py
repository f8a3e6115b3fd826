"""FlashAttention-2: Tri Dao, arXiv:2307.08691.

Numbers at the right end of a line are the paper's line numbers. Only `Sram.load`, `store` and
`reduce` access HBM, and these methods count bytes. A `step` or `visit` (one tile pair) frees all
tiles that were allocated inside it, so indentation shows how long a tile stays on chip. Arrays have
the leading axes (batch * key heads, query heads per key head), because all heads run the same loop
at once.
"""

from collections.abc import Iterable
from functools import partial
from typing import Literal

import numpy as np

from flashsim.algorithms.functions import NOTHING, Values, load_own
from flashsim.algorithms.machine import Machine
from flashsim.algorithms.score_tile import (
    accumulator,
    clear_dbias,
    convert,
    finite,
    log_sum_exp,
    lse_gradient,
    reduce_dbias,
    score_gradient,
    score_tile,
    sink_probability,
)
from flashsim.algorithms.sram import Sram
from flashsim.schedule.schedule import Visit


def forward(machine: Machine) -> None:
    """Run FlashAttention-2's forward pass, Algorithm 1 of the paper.

    Queries are the outer loop: O, m and l stay on chip while K and V are streamed. Line 10 of the
    paper divides O by the rescaling factor; this code multiplies, which is correct.
    """
    hbm, p = machine.hbm, machine.problem
    with machine.stage("forward") as sram:
        schedule = sram.schedule
        for i, rows in sram.steps():                                                      # 3
            Q_i = sram.load(hbm.Q, rows)                                                  # 4
            own = load_own(sram, i)
            n = Q_i.shape[-2]
            sink = sram.load(hbm.sink, slice(0, 1)) if p.sinks else -np.inf
            O_i = sram.alloc("O", (n, p.head_dim_v), fill=0.0)                            # 5
            l_i = sram.alloc("l", (n,), fill=float(p.sinks))
            m_i = sram.alloc("m", (n,))
            m_i[...] = sink  # a sink is a score without a value: the softmax starts with it
            stream_keys(sram, Q_i, O_i, l_i, m_i, schedule.visits(i), own)                # 6
            O, L = normalised(O_i, l_i, m_i)
            sram.store(hbm.O, rows, O)                                                    # 12, 14
            sram.store(hbm.L, rows, L)                                                    # 13, 15


def stream_keys(
    sram: Sram,
    Q_i: np.ndarray,
    O_i: np.ndarray,
    l_i: np.ndarray,
    m_i: np.ndarray,
    visits: Iterable[Visit],
    own: Values = NOTHING,
) -> None:
    """Update a row tile's unnormalised O, l and m with each key tile (lines 7 to 10)."""
    hbm, p = sram.hbm, sram.problem
    for visit in visits:
        with sram.visit(visit):
            K, V = hbm.K, hbm.tensors.get("V")  # None if V is columns of K
            if p.page_size is not None:
                pages = sram.load(hbm.table, visit.cols)
                K, V = hbm.through(pages, "K"), None if V is None else hbm.through(pages, "V")
            K_j = sram.load(K, visit.cols)                                                # 7
            V_j = K_j[..., : p.head_dim_v] if V is None else sram.load(V, visit.cols)
            S_ij, _ = score_tile(sram, Q_i, K_j, visit, own=own)                          # 8
            m_new = sram.rounded("m", np.maximum(m_i, S_ij.max(axis=-1)))                 # 9
            S_ij -= finite(m_new)[..., None]
            P_ij = np.exp(S_ij, out=S_ij)  # P overwrites S's tile
            alpha = np.exp(m_i - finite(m_new))
            l_i[:] = alpha * l_i + P_ij.sum(axis=-1)
            sram.accumulate(O_i, sram.rounded("P", P_ij), V_j, rescale=alpha)             # 10
            m_i[:] = m_new


def normalised(
    O_i: np.ndarray, l_i: np.ndarray, m_i: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a row tile's final O and LSE (lines 12, 13); a row without keys gets 0 and -inf."""
    l_safe = np.where(l_i == 0, 1, l_i)
    return O_i / l_safe[..., None], log_sum_exp(m_i, l_i)


def backward(machine: Machine) -> None:
    """Compute the gradients (Algorithm 2) in three passes: delta first, dK and dV second, dQ third.

    The three passes need no atomics, so they are deterministic. The gradient dQ is a sum over keys;
    dK and dV are sums over queries. A loop can keep sums over keys or sums over queries on chip,
    not both, so dQ needs its own pass. The dQ pass recomputes the scores, so the total is 7 matrix
    products instead of 5 (14 N^2 d FLOPs).
    """
    delta_pass(machine)
    clear_dbias(machine)
    with machine.stage("dkdv") as sram:
        _keys_outside(sram, dq="")
    _dq_pass(machine)
    convert(machine, "dBias_acc", "dBias")


def backward_fused(machine: Machine, *, clears_dq: bool = True) -> None:
    """Compute the gradients (Algorithm 2) in one KV-outer pass, which accumulates dQ in HBM.

    The fused pass takes 5 matrix products: 10 N^2 d FLOPs. On a GPU, the order of atomic additions
    to dQ changes from run to run, so the last bits of dQ vary.

    Unless `clears_dq` is true, no pass sets dQ to 0. The first visit of a row tile then stores its
    part of dQ, and later visits add to it. The conversion of dQ writes 0 for a row tile without
    visits.
    """
    delta_pass(machine, clears_dq=clears_dq)
    clear_dbias(machine)
    if not clears_dq:  # a tile that nothing was stored to counts as 0, as the GPU's flags tell
        accumulator(machine.hbm, "dQ").data.fill(0.0)
    with machine.stage("fused") as sram:
        _keys_outside(sram, dq="reduce")
    convert(machine, "dQ_acc", "dQ")
    convert(machine, "dBias_acc", "dBias")


def backward_once(machine: Machine) -> None:
    """Compute the gradients (Algorithm 2) in one pass, if each row tile sees a single key tile.

    A row's P and dP are completely on chip, so delta = rowsum(P o dP) needs neither O nor a
    separate pass. Each tile's dQ is complete, so dQ is stored directly in its final type, and the
    pass is deterministic.
    """
    clear_dbias(machine)
    with machine.stage("fused") as sram:
        _keys_outside(sram, dq="store")
    convert(machine, "dBias_acc", "dBias")


def delta_pass(machine: Machine, *, clears_dq: bool = False) -> None:
    """Compute delta = rowsum(dO o O), which the paper calls D.

    If the LSE has a gradient dL, dL is subtracted from delta: d LSE / dS = P, so dS = P (dP - D +
    dL). With `clears_dq`, the pass also sets dQ's accumulator to 0, for the fused backward pass.
    """
    hbm = machine.hbm
    with machine.stage("delta") as sram:
        for _, rows in sram.steps():
            O_i, dO_i = sram.load(hbm.O, rows), sram.load(hbm.dO, rows)
            dL_i = lse_gradient(sram, rows)
            delta_i = sram.alloc("delta", O_i.shape[-2:-1])
            np.sum(dO_i * O_i, axis=-1, out=delta_i)                                      # 4
            if dL_i is not None:
                delta_i -= dL_i
            if sram.problem.sinks:  # a sink has P = exp(sink - L) and no value: dSink = -P delta
                sink, L_i = sram.load(hbm.sink, slice(0, 1)), sram.load(hbm.L, rows)
                of_sink = -(sink_probability(sink, L_i) * delta_i).sum(axis=-1, keepdims=True)
            sram.store(hbm.delta, rows, delta_i)
            if sram.problem.sinks:
                sram.reduce(hbm.dSink, slice(0, 1), of_sink)
            if clears_dq:
                sram.store(accumulator(hbm, "dQ"), rows, 0.0)                             # 3


def _keys_outside(sram: Sram, *, dq: Literal["", "reduce", "store"]) -> None:
    """Compute dK and dV in a loop whose outer level runs over key tiles.

    A thread block computes one tile of keys of one key head, for all query heads that share it. If
    `dq` is "", no dQ is computed. If `dq` is "reduce", each tile pair's dQ is added to dQ in HBM.
    If `dq` is "store", each tile pair's dQ is complete, and is stored.
    """
    hbm, p, schedule = sram.hbm, sram.problem, sram.schedule
    for j in schedule.outer_order():                                                      # 5
        cols = schedule.col_slice(j)
        with sram.step(j):
            K_j, V_j = sram.load(hbm.K, cols), sram.load(hbm.V, cols)                     # 6
            dK_j = sram.alloc("dK", K_j.shape[-2:], fill=0.0)                             # 7
            dV_j = sram.alloc("dV", V_j.shape[-2:], fill=0.0)
            for g in range(p.group):  # the query heads that share this key head
                for visit in schedule.visits(j):                                          # 8
                    with sram.visit(visit, member=g):
                        rows = visit.rows
                        Q_i = sram.load(hbm.Q, rows, member=g)                            # 9
                        dO_i = sram.load(hbm.dO, rows, member=g)
                        L_i = sram.load(hbm.L, rows, member=g)
                        delta_i = dL_i = None
                        if dq != "store":
                            delta_i = sram.load(hbm.delta, rows, member=g)
                        else:
                            dL_i = lse_gradient(sram, rows, member=g)
                        S_ij, chain = score_tile(                                         # 10
                            sram, Q_i, K_j, visit, member=g, gated=True
                        )
                        S_ij -= finite(L_i)[..., None]
                        P_ij = np.exp(S_ij, out=S_ij)                                     # 11
                        dV_j += sram.rounded("P", P_ij).mT @ dO_i                         # 12
                        dS_ij, dbias_ij = score_gradient(                                 # 13, 14
                            sram, P_ij, dO_i, V_j, delta_i, chain, dL_i
                        )
                        dS_ij = sram.rounded("dS", dS_ij)
                        if dq:
                            dQ_i = sram.alloc("dQ", Q_i.shape[-2:])
                            np.matmul(dS_ij, K_j, out=dQ_i)
                            dQ_i *= p.scale
                            if dq == "store":
                                sram.store(hbm.dQ, rows, dQ_i, member=g)
                            else:                                                         # 15
                                sram.reduce(accumulator(hbm, "dQ"), rows, dQ_i, member=g)
                            reduce_dbias(sram, rows, dbias_ij, visit.cols, g)
                        dK_j += dS_ij.mT @ Q_i                                            # 16
            sram.store(hbm.dK, cols, dK_j * p.scale)                                      # 18
            sram.store(hbm.dV, cols, dV_j)


def _dq_pass(machine: Machine) -> None:
    """Compute dQ in a loop whose outer level runs over query tiles, as in the forward pass."""
    hbm, p = machine.hbm, machine.problem
    with machine.stage("dq") as sram:
        schedule = sram.schedule
        for i, rows in sram.steps():
            Q_i = sram.load(hbm.Q, rows)
            own = load_own(sram, i)
            dO_i = sram.load(hbm.dO, rows)
            L_i, delta_i = sram.load(hbm.L, rows), sram.load(hbm.delta, rows)
            dQ_i = sram.alloc("dQ", Q_i.shape[-2:], fill=0.0)
            for visit in schedule.visits(i):
                with sram.visit(visit):
                    K_j, V_j = sram.load(hbm.K, visit.cols), sram.load(hbm.V, visit.cols)
                    S_ij, chain = score_tile(sram, Q_i, K_j, visit, own=own, gated=True)
                    S_ij -= finite(L_i)[..., None]
                    P_ij = np.exp(S_ij, out=S_ij)
                    dS_ij, dbias_ij = score_gradient(sram, P_ij, dO_i, V_j, delta_i, chain)
                    dQ_i += sram.rounded("dS", dS_ij) @ K_j
                    reduce_dbias(sram, rows, dbias_ij, visit.cols)
            sram.store(hbm.dQ, rows, dQ_i * p.scale)


ALGORITHMS = {
    "flash2": (forward, backward),
    "flash2-fused": (forward, backward_fused),
    "flash2-fused-first": (forward, partial(backward_fused, clears_dq=False)),
    "flash2-once": (forward, backward_once),
}
