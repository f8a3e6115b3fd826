"""Merges attention over two sets of keys into attention over the union."""

import numpy as np


def merged(
    out_a: np.ndarray, lse_a: np.ndarray, out_b: np.ndarray, lse_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the output and the LSE of attention over the union of two sets of keys.

    Each LSE has the shape of its output without the last axis. The formulas are lse =
    log(exp(lse_a) + exp(lse_b)) and out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b. A row
    that saw no key of one set (lse = -inf) gets the result of the second set.
    """
    m = np.maximum(lse_a, lse_b)
    base = np.where(np.isneginf(m), 0, m)  # avoids inf - inf if a row saw no key of either set
    with np.errstate(invalid="ignore"):  # with lse = inf, out is NaN, as in attention itself
        a, b = np.exp(lse_a - base), np.exp(lse_b - base)
    total = a + b
    safe = np.where(total == 0, 1, total)
    out = (a / safe)[..., None] * out_a + (b / safe)[..., None] * out_b
    return out, m + np.log(safe)
