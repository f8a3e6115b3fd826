"""Bounds on HBM traffic from the papers, as curves to hold a count against.

The first two are asymptotic: each gives a shape, not a constant. `proven` is a level that nobody
gets below. M, the on-chip capacity, is in elements.
"""

from __future__ import annotations

from math import isqrt

from flashsim.errors import DTypeError, OptionError, own_errors, shown
from flashsim.problem import checks


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


@own_errors
def proven(scores: int, head_dim: int, m: int, head_dim_v: int | None = None) -> int:
    """Elements that any forward pass moves if it multiplies matrices the usual way.

    Usual: every score is a sum of `head_dim` products, and each of its `head_dim_v` products with a
    row of V is added to a number of O. Scores may be kept on chip, stored or computed again, O may
    be gathered in parts. A run is cut into segments of T transfers. Within one, the numbers that
    it can use of Q, K, V, O and of scores from before are X = 2 M + T at most, which is room for
    at most max(X^2 / (16 d), (X / 3)^1.5) products with V (the inequality of Loomis and Whitney, as
    Irony, Toledo and Tiskin use it for one matrix product). So there are many segments, whatever T
    is; the best of some is returned. T = 2 M shows its shape, where M > 2.4 d^2:
    2 N^2 d^2 / M - 2 M, of the order that Saha and Ye prove (arXiv:2402.07443). The whole proof is
    in docs/reference/model.md.

    Parameters
    ----------
    scores : int
        That the mask keeps, of all heads.
    head_dim, head_dim_v : int
        Of Q and K; of V, as wide if left out.
    m : int
        Elements on chip; of 0, with which nothing can be computed, what holds for any m is said.

    Returns
    -------
    int
        Exact, however large; 0 where the chip is so large that this says nothing.

    Raises
    ------
    DTypeError, OptionError, ShapeError
        For what is no integer, is negative, or a head_dim of 0.
    """
    widths = head_dim, head_dim if head_dim_v is None else head_dim_v
    d, d_v = (checks.positive_int("head_dim", width) for width in widths)
    for name, value in (("scores", scores), ("m", m)):
        if not checks.is_int(value):
            raise DTypeError(f"{name} must be an integer, got {shown(value)}")
        if value < 0:
            raise OptionError(f"{name} must be at least 0, got {shown(value)}")
    products, m = int(scores) * d_v, int(m)

    def least(transfers: int) -> int:
        reach = 2 * m + transfers
        by_scores = -(-16 * d * products // reach**2)  # ceil(products / (reach^2 / 16 d))
        # The least k with k (reach / 3)^1.5 >= products, without a root of anything inexact.
        square = -(-27 * products**2 // reach**3)
        by_hand = isqrt(square - 1) + 1 if square else 0
        return transfers * (max(1, min(by_scores, by_hand)) - 1)

    return max(least(max(1, -(-m * eighths // 8))) for eighths in range(1, 81))
