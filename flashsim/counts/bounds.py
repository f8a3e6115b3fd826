"""Bounds on HBM traffic from the papers, with which counts are compared.

`flash_theorem` and `lower_bound` are asymptotic: both hold up to an unknown constant factor.
`proven` includes all constants, so no algorithm moves fewer elements. In this module, M is the
on-chip capacity in elements, N the sequence length and d the head dim.
"""

from __future__ import annotations

from math import isqrt

from flashsim.errors import DTypeError, OptionError, own_errors, shown
from flashsim.problem import checks


def flash_theorem(n_q: int, n_kv: int, head_dim: int, m: int) -> float:
    """Return N^2 d^2 / M, the elements that FlashAttention moves, up to a constant factor.

    The bound N^2 d^2 / M is Theorem 2 of arXiv:2205.14135, for d <= M <= N d, where M is the
    on-chip capacity in elements. By Proposition 3 of the same paper, no exact algorithm moves
    asymptotically fewer elements for *every* M between d and N d.
    """
    return n_q * n_kv * head_dim**2 / m


def lower_bound(n_q: int, n_kv: int, head_dim: int, m: int) -> float:
    """Return the number of elements that any exact algorithm must move, up to a constant factor.

    The lower bound is by Saha and Ye, arXiv:2402.07443. For M >= d^2, the bound is N^2 d^2 / M,
    however matrices are multiplied, so FlashAttention is optimal for such M. For M < d^2, the
    product Q K^T itself dominates the cost, and the bound is N^2 d / sqrt(M), for algorithms that
    multiply matrices the usual way.
    """
    if m >= head_dim**2:
        return flash_theorem(n_q, n_kv, head_dim, m)
    return n_q * n_kv * head_dim / m**0.5


@own_errors
def proven(scores: int, head_dim: int, m: int, head_dim_v: int | None = None) -> int:
    """Return a lower bound on the number of elements that any forward pass must move.

    The bound holds for a pass that multiplies matrices the usual way. In the usual way, a score is
    a sum of `head_dim` products, and each of the score's `head_dim_v` products with a row of V is
    added to an element of O. The algorithm may keep scores on chip, store them or recompute them,
    and it may accumulate O in parts.

    The proof divides a run of the algorithm into segments of T transferred elements each. In a
    segment, at most X = 2 M + T elements of Q, K, V, O and earlier scores are available. The
    inequality of Loomis and Whitney (as in Irony, Toledo and Tiskin) limits the number of products
    with V that use only X elements to max(X^2 / (16 d), (X / 3)^1.5). So a run needs a minimum
    number of segments of T transfers each. The result is the largest bound among several segment
    sizes T. For M > 2.4 d^2, T = 2 M gives 2 N^2 d^2 / M - 2 M, which matches the order proved by
    Saha and Ye (arXiv:2402.07443). The complete proof is in docs/reference/model.md.

    Parameters
    ----------
    scores : int
        Number of scores that the mask keeps, over all heads.
    head_dim, head_dim_v : int
        Row width of Q and K, and of V (default: the same).
    m : int
        The number of elements that fit on chip. If it is 0, which no algorithm can use, the result
        is a bound for every m.

    Returns
    -------
    int
        The bound as an exact integer, or 0 if the chip is so large that the proof gives no bound.

    Raises
    ------
    DTypeError, OptionError, ShapeError
        If an argument is not an integer or is negative, or a head_dim is 0.
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
        # The least k with k (reach / 3)^1.5 >= products, by integers alone, without rounding.
        square = -(-27 * products**2 // reach**3)
        by_hand = isqrt(square - 1) + 1 if square else 0
        return transfers * (max(1, min(by_scores, by_hand)) - 1)

    return max(least(max(1, -(-m * eighths // 8))) for eighths in range(1, 81))
