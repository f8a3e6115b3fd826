"""Merge attention over two sets of keys into attention over both."""

from __future__ import annotations

import numpy as np


def merged(
    out_a: np.ndarray, lse_a: np.ndarray, out_b: np.ndarray, lse_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return out and LSE over the keys of both; ``lse`` has one axis less than ``out``.

    lse = log(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
    If a row saw no key on one side (lse = -inf), the result is the other side's row.
    """
    m = np.maximum(lse_a, lse_b)
    base = np.where(np.isneginf(m), 0, m)  # no key on either side: no inf - inf
    with np.errstate(invalid="ignore"):  # lse = inf has no finite out: NaN, as attention itself has
        a, b = np.exp(lse_a - base), np.exp(lse_b - base)
    total = a + b
    safe = np.where(total == 0, 1, total)
    out = (a / safe)[..., None] * out_a + (b / safe)[..., None] * out_b
    return out, m + np.log(safe)
