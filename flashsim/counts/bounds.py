"""Bounds on HBM traffic from the papers, as curves to hold a count against.

They are asymptotic: each gives a shape, not a constant. M, the on-chip capacity, is in elements.
"""

from __future__ import annotations


def flash_theorem(n_q: int, n_kv: int, head_dim: int, m: int) -> float:
    """N^2 d^2 / M elements: what FlashAttention reads and writes, up to a constant.

    Theorem 2 of arXiv:2205.14135, for d <= M <= N d. Its Proposition 3: no exact algorithm does
    asymptotically better for *every* M in that range.
    """
    return n_q * n_kv * head_dim**2 / m


def lower_bound(n_q: int, n_kv: int, head_dim: int, m: int) -> float:
    """Elements that any exact algorithm must move, up to a constant.

    Saha and Ye, arXiv:2402.07443: N^2 d^2 / M where M >= d^2, whichever way matrices are
    multiplied, so FlashAttention is optimal there; N^2 d / sqrt(M) below, for algorithms that
    multiply matrices the usual way, where the scores' own product is what costs.
    """
    if m >= head_dim**2:
        return flash_theorem(n_q, n_kv, head_dim, m)
    return n_q * n_kv * head_dim / m**0.5
