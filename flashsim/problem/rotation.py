"""Incoherent processing: rows are rotated by a Hadamard matrix, which spreads out outliers.

An outlier in one of d elements sets the scale of its row's whole block, and costs all other
elements their precision. A rotation M spreads it over all d. Rotating q and k by the same M keeps
every product: (q M) (k M)^T = q M M^T k^T = q k^T. M is a diagonal of random signs times a Hadamard
matrix over sqrt(d): QuIP# (arXiv:2402.04396), FlashAttention-3 (arXiv:2407.08608, 3.3).
"""

from __future__ import annotations

import numpy as np

from flashsim.errors import ShapeError


def random_signs(d: int, seed: int) -> np.ndarray:
    """float32 (d,): +1 or -1, the same for the same seed."""
    return np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), d)


def hadamard(x: np.ndarray) -> np.ndarray:
    """``x @ H / sqrt(d)`` for Sylvester's Hadamard matrix H of order d, by d log d sums per row.

    It is the fast Walsh-Hadamard transform: sums and differences of neighbours, then of pairs, then
    of fours. H / sqrt(d) is symmetric and orthogonal, so it is its own inverse.

    Parameters
    ----------
    x : ndarray, (.., d)
        d must be a power of two.

    Raises
    ------
    ShapeError
        If d is not a power of two.
    """
    d = x.shape[-1]
    if d & (d - 1):
        raise ShapeError(
            f"a Hadamard rotation needs a head_dim that is a power of two, got {d}; pad q and k "
            f"with zeros to {1 << d.bit_length()}, which leaves q k^T as it is, and give scale"
        )
    span = 1
    while span < d:
        pairs = x.reshape(*x.shape[:-1], d // (2 * span), 2, span)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        span *= 2
    return x / np.sqrt(d).astype(x.dtype)


def rotated(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """``x M``, with M = diag(signs) H / sqrt(d); `x` is (.., d)."""
    return hadamard(x * signs.astype(x.dtype))


def unrotated(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """``x M^T``, which undoes `rotated`, both for q and k and for their gradients."""
    return hadamard(x) * signs.astype(x.dtype)
