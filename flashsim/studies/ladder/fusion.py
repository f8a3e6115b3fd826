"""Algorithms that show which HBM transfers are saved if softmax and products share one kernel."""

import numpy as np

from flashsim.studies.ladder import softmax
from flashsim.studies.ladder.bench import Bench


def softmax_then_product(bench: Bench) -> None:
    """Compute O = softmax(S) V in two kernels: P is written to HBM and read back."""
    softmax.online(bench)
    hbm, p = bench.hbm, bench.problem
    for sram, i, rows, n in bench.row_tiles("P V"):
        O_i = sram.alloc("O", (n, p.head_dim_v), fill=0.0)
        for cols in bench.visits(sram, i):
            P_ij = sram.load(hbm.P, rows, cols)
            O_i += P_ij @ sram.load(hbm.V, cols)
        sram.store(hbm.O, rows, O_i)


def softmax_product(bench: Bench) -> None:
    """Compute O = softmax(S) V in one kernel, which reads S once and keeps P on chip.

    The online softmax also rescales the output: O = exp(m_old - m) O + P V.
    """
    hbm, p = bench.hbm, bench.problem
    for sram, i, rows, n in bench.row_tiles("softmax V"):
        O_i = sram.alloc("O", (n, p.head_dim_v), fill=0.0)
        m_i = sram.alloc("m", (n,), fill=-np.inf)
        l_i = sram.alloc("l", (n,), fill=0.0)
        for cols in bench.visits(sram, i):
            S_ij = sram.load(hbm.S, rows, cols)
            V_j = sram.load(hbm.V, cols)
            m_new = np.maximum(m_i, S_ij.max(axis=-1))
            # Avoids inf - inf in a row of only -inf.
            base = np.where(np.isneginf(m_new), 0, m_new)
            S_ij -= base[..., None]
            P_ij = np.exp(S_ij, out=S_ij)
            alpha = np.exp(m_i - base)
            l_i[:] = alpha * l_i + P_ij.sum(axis=-1)
            O_i *= alpha[..., None]
            O_i += p.rounded(P_ij) @ V_j
            m_i[:] = m_new
        sram.store(hbm.O, rows, O_i / l_i[..., None])


def without_softmax(bench: Bench) -> None:
    """Compute O = (scale Q K^T) V in one kernel, with FlashAttention's loops but no rescaling.

    Without a softmax, Q (K^T V) has the same result at a cost proportional to the length. In
    attention, K^T V cannot be computed first, because a softmax is between the two products.
    """
    hbm, p = bench.hbm, bench.problem
    for sram, i, rows, n in bench.row_tiles("Q K^T V"):
        Q_i = sram.load(hbm.Q, rows)
        O_i = sram.alloc("O", (n, p.head_dim_v), fill=0.0)
        for cols in bench.visits(sram, i):
            K_j, V_j = sram.load(hbm.K, cols), sram.load(hbm.V, cols)
            S_ij = sram.alloc("S", (n, K_j.shape[-2]))
            np.matmul(Q_i, K_j.mT, out=S_ij)
            S_ij *= p.scale
            O_i += p.rounded(S_ij) @ V_j
        sram.store(hbm.O, rows, O_i)


def whole_row_attention(bench: Bench) -> None:
    """Compute attention with a plain softmax, with all scores of a row tile on chip at once.

    The kernel moves as few bytes as FlashAttention, but needs SRAM in proportion to the number of
    keys.
    """
    hbm, p = bench.hbm, bench.problem
    block_k = min(bench.tiling.block_k, p.n_kv)
    bench.require_row(
        "attention with whole rows",
        score=p.compute_itemsize,
        per_row=p.head_dim * p.itemsize + p.head_dim_v * p.compute_itemsize,
        per_tile=block_k * max(p.head_dim, p.head_dim_v) * p.itemsize,
    )
    for sram, i, rows, n in bench.row_tiles("whole-row attention"):
        Q_i = sram.load(hbm.Q, rows)
        S_i = sram.alloc("S", (n, p.n_kv))
        O_i = sram.alloc("O", (n, p.head_dim_v), fill=0.0)
        for cols in bench.visits(sram, i):
            K_j = sram.load(hbm.K, cols)
            S_i[..., cols] = p.scale * (Q_i @ K_j.mT)
        S_i -= S_i.max(axis=-1, keepdims=True)
        P_i = np.exp(S_i, out=S_i)
        P_i /= P_i.sum(axis=-1, keepdims=True)
        for cols in bench.visits(sram, i):
            V_j = sram.load(hbm.V, cols)
            O_i += p.rounded(P_i[..., cols]) @ V_j
        sram.store(hbm.O, rows, O_i)
