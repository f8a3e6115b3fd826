"""Random inputs of several kinds for the precision laboratory.

Several kinds are needed: with normally distributed scores, the running maximum rarely changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flashsim.api.cost import fits
from flashsim.errors import own_errors
from flashsim.problem import checks

#: The kinds of input, with a description.
KINDS = {
    "normal": "N(0, 1)",
    "rising": "scores rise from -50 to 50 along the keys, so the maximum changes at every tile",
    "falling": "scores fall from 50 to -50: the first tile has the maximum",
    "heavy": "N(0, 1), with one element in a hundred 8 times as large",
    "outliers": "N(0, 1) + N(0, 100) Bernoulli(0.001), FlashAttention-3's (arXiv:2407.08608, 4.3)",
}


class Drawn(NamedTuple):
    """Random inputs q, k, v and dout in float64, each of shape (1, heads, n, head_dim)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray


@own_errors
def draw(kind: str, n: int, head_dim: int = 64, *, heads: int = 1, seed: int = 0) -> Drawn:
    """Return random inputs q, k, v and dout of one kind; the same seed gives the same numbers."""
    checks.one_of("kind of input", kind, KINDS)
    n = checks.positive_int("n", n)
    d = checks.positive_int("head_dim", head_dim)
    heads = checks.positive_int("heads", heads)
    rng = np.random.default_rng(checks.seed(seed))
    fits(4 * 8 * heads * n * d, "use a smaller n")
    arrays = [rng.standard_normal((1, heads, n, d)) for _ in range(4)]
    if kind == "heavy":
        for x in arrays:
            x[rng.random(x.shape) < 0.01] *= 8
    elif kind == "outliers":
        for x in arrays:
            x += 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.001)
    elif kind in ("rising", "falling"):
        direction = np.full(d, d**-0.5)  # a unit vector; the default scale is 1 / sqrt(d)
        ramp = np.linspace(-50, 50, n)[:: 1 if kind == "rising" else -1]
        arrays[0] = 0.1 * arrays[0] + direction
        arrays[1] = arrays[1] + d**0.5 * ramp[:, None] * direction
    return Drawn(*arrays)
