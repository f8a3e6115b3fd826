"""The ladder's softmax algorithms: they read the scores S (n_q, n_kv) and write P (n_q, n_kv).

Names and pass counts follow Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867. A pass count is how often each element is transferred between HBM and SRAM.
"""

import numpy as np

from flashsim.studies.ladder.bench import Bench


def naive(bench: Bench) -> None:
    """Run Algorithm 1 (naive): sum exponentials, then divide. Each element has 2 loads and 1 store.

    The exponential exp(s) overflows float32 at s = 89.
    """
    hbm = bench.hbm
    for sram, i, rows, n in bench.row_tiles("naive softmax"):
        l_i = sram.alloc("l", (n,), fill=0.0)
        for cols in bench.visits(sram, i):
            l_i += np.exp(sram.load(hbm.S, rows, cols)).sum(axis=-1)
        for cols in bench.visits(sram, i):
            S_ij = sram.load(hbm.S, rows, cols)
            sram.store(hbm.P, rows, np.exp(S_ij) / l_i[..., None], cols)


def stable(bench: Bench) -> None:
    """Run Algorithm 2 (stable): maximum, sum, then divide. Each element has 3 loads and 1 store."""
    hbm = bench.hbm
    for sram, i, rows, n in bench.row_tiles("stable softmax"):
        m_i = sram.alloc("m", (n,), fill=-np.inf)
        l_i = sram.alloc("l", (n,), fill=0.0)
        for cols in bench.visits(sram, i):
            S_ij = sram.load(hbm.S, rows, cols)
            np.maximum(m_i, S_ij.max(axis=-1), out=m_i)
        for cols in bench.visits(sram, i):
            S_ij = sram.load(hbm.S, rows, cols)
            l_i += np.exp(S_ij - m_i[..., None]).sum(axis=-1)
        for cols in bench.visits(sram, i):
            S_ij = sram.load(hbm.S, rows, cols)
            P_ij = np.exp(S_ij - m_i[..., None]) / l_i[..., None]
            sram.store(hbm.P, rows, P_ij, cols)


def online(bench: Bench) -> None:
    """Run Algorithm 3 (online): maximum and sum in one pass. Each element has 2 loads and 1 store.

    If a chunk of a row raises the maximum, the sum is rescaled: l = exp(m_old - m) l + sum(chunk).
    """
    hbm = bench.hbm
    for sram, i, rows, n in bench.row_tiles("online softmax"):
        m_i = sram.alloc("m", (n,), fill=-np.inf)
        l_i = sram.alloc("l", (n,), fill=0.0)
        for cols in bench.visits(sram, i):
            S_ij = sram.load(hbm.S, rows, cols)
            m_new = np.maximum(m_i, S_ij.max(axis=-1))
            l_i *= np.exp(m_i - m_new)
            l_i += np.exp(S_ij - m_new[..., None]).sum(axis=-1)
            m_i[:] = m_new
        for cols in bench.visits(sram, i):
            S_ij = sram.load(hbm.S, rows, cols)
            P_ij = np.exp(S_ij - m_i[..., None]) / l_i[..., None]
            sram.store(hbm.P, rows, P_ij, cols)


def whole_row(bench: Bench) -> None:
    """Compute a softmax with whole rows on chip. Each element has 1 load and 1 store."""
    hbm = bench.hbm
    bench.require_row("softmax of whole rows", score=bench.problem.itemsize)
    for sram, _, rows, _ in bench.row_tiles("whole-row softmax"):
        S_i = sram.load(hbm.S, rows)
        S_i -= S_i.max(axis=-1, keepdims=True)
        P_i = np.exp(S_i, out=S_i)
        P_i /= P_i.sum(axis=-1, keepdims=True)
        sram.store(hbm.P, rows, P_i)
