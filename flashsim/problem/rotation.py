"""Incoherent processing for FP8: rotates rows by a Hadamard matrix, which spreads out outliers.

An outlier determines the FP8 scale of a row's block, so the row's remaining elements lose
precision. A rotation M spreads the outlier over all d elements of the row. Rotating q and k by the
same M keeps every product: (q M) (k M)^T = q M M^T k^T = q k^T. The rotation M is a diagonal matrix
of random signs times a Hadamard matrix divided by sqrt(d). QuIP# (arXiv:2402.04396) and
FlashAttention-3 (arXiv:2407.08608, section 3.3) use this method.
"""

import numpy as np

from flashsim.errors import ShapeError


def random_signs(d: int, seed: int) -> np.ndarray:
    """Return d random signs, +1 or -1, as float32 (d,); the same seed gives the same signs."""
    return np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), d)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Return ``x @ H / sqrt(d)`` for rows x of shape (.., d) and Sylvester's Hadamard matrix H.

    The width d must be a power of two, else `ShapeError` is raised. The fast Walsh-Hadamard
    transform computes the product in d log d additions per row. H / sqrt(d) is symmetric and
    orthogonal, and so equals its inverse.
    """
    d = x.shape[-1]
    if d & (d - 1):
        raise ShapeError(
            f"a Hadamard rotation needs a head_dim that is a power of two, got {d}; pad q and k "
            f"with zeros to head_dim {1 << d.bit_length()}, which keeps q k^T, and pass scale= "
            f"for head_dim {d}"
        )
    span = 1
    while span < d:
        pairs = x.reshape(*x.shape[:-1], d // (2 * span), 2, span)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        span *= 2
    return x / np.sqrt(d).astype(x.dtype)


def rotated(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return `x`, (.., d), with each row rotated by M = diag(signs) H / sqrt(d)."""
    return hadamard(x * signs.astype(x.dtype))


def unrotated(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return ``x M^T``: rows, or gradients of rows, with the rotation undone."""
    return hadamard(x) * signs.astype(x.dtype)
