"""Bounds on HBM traffic from the papers, as curves to compare a count with.

The first two are asymptotic: each gives a shape, not a constant. `proven` gives a level that no
algorithm gets below. M, the on-chip capacity, is in elements.
"""

from __future__ import annotations

from math import isqrt

from flashsim.errors import DTypeError, OptionError, own_errors, shown
from flashsim.problem import checks


def flash_theorem(n_q: int, n_kv: int, head_dim: int, m: int) -> float:
    """N^2 d^2 / M elements: the reads and writes of FlashAttention, up to a constant.

    This is Theorem 2 of arXiv:2205.14135, for d <= M <= N d. By the paper's Proposition 3, no exact
    algorithm is asymptotically better for *every* M in that range.
    """
    return n_q * n_kv * head_dim**2 / m


def lower_bound(n_q: int, n_kv: int, head_dim: int, m: int) -> float:
    """Elements that any exact algorithm must move, up to a constant.

    The bound is by Saha and Ye, arXiv:2402.07443. For M >= d^2 it is N^2 d^2 / M, whichever way
    matrices are multiplied, so FlashAttention is optimal there. For smaller M it is
    N^2 d / sqrt(M), for algorithms that multiply matrices the usual way. The product Q K^T itself
    dominates the cost there.
    """
    if m >= head_dim**2:
        return flash_theorem(n_q, n_kv, head_dim, m)
    return n_q * n_kv * head_dim / m**0.5


@own_errors
def proven(scores: int, head_dim: int, m: int, head_dim_v: int | None = None) -> int:
    """Elements that any forward pass must move if it multiplies matrices the usual way.

    The usual way means that every score is a sum of `head_dim` products, and that each of its
    `head_dim_v` products with a row of V is added to a number of O. Scores may be kept on chip,
    stored or recomputed, and O may be accumulated in parts.

    The proof cuts a run into segments of T transfers. Within a segment, at most X = 2 M + T
    numbers of Q, K, V, O and earlier scores are available. They allow at most
    max(X^2 / (16 d), (X / 3)^1.5) products with V, by the inequality of Loomis and Whitney, as
    Irony, Toledo and Tiskin use it for one matrix product. So there are many segments for any T;
    the function returns the best bound over several T. T = 2 M shows the bound's shape for
    M > 2.4 d^2: 2 N^2 d^2 / M - 2 M, of the order that Saha and Ye prove (arXiv:2402.07443).
    The whole proof is in docs/reference/model.md.

    Parameters
    ----------
    scores : int
        Number of scores that the mask keeps, over all heads.
    head_dim, head_dim_v : int
        Row width of Q and K, and of V (default: the same).
    m : int
        Elements on chip. Nothing can be computed with 0; the result then holds for any m.

    Returns
    -------
    int
        Exact, however large; 0 if the chip is so large that the bound says nothing.

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
        # The least k with k (reach / 3)^1.5 >= products, without a root of anything inexact.
        square = -(-27 * products**2 // reach**3)
        by_hand = isqrt(square - 1) + 1 if square else 0
        return transfers * (max(1, min(by_scores, by_hand)) - 1)

    return max(least(max(1, -(-m * eighths // 8))) for eighths in range(1, 81))
