"""`merge`: attention over two sets of keys, from attention over each."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashsim.algorithms.merge import merged
from flashsim.api.arrays import check_like, dtype_name, require_numpy
from flashsim.errors import ShapeError, own_errors
from flashsim.problem import checks

WIDE = ("float64", "float32", "float16", "bfloat16")


@own_errors
def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[np.ndarray, np.ndarray]:
    """Attention over the keys of both, where a and b are the same queries over disjoint keys.

    ``lse = log(exp(lse_a) + exp(lse_b))``, and ``out = exp(lse_a - lse) out_a + exp(lse_b - lse)
    out_b``: what FlashDecoding's second step does with two parts. A row that saw no key on one side
    (lse = -inf, out = 0) is the other's.

    Parameters
    ----------
    out_a, out_b : ndarray, (.., n_q, head_dim_v)
    lse_a, lse_b : ndarray, (.., n_q)
        `Result.out` and `Result.lse`.

    Returns
    -------
    out : ndarray, of out_a's shape and type
    lse : ndarray, of lse_a's

    Raises
    ------
    ShapeError, DTypeError, OptionError
        If they do not fit each other.
    """
    require_numpy("numpy", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    check_like("out_b", out_b, out_a, "out_a")
    check_like("lse_b", lse_b, lse_a, "lse_a")
    if lse_a.shape != out_a.shape[:-1]:
        raise ShapeError(
            f"lse_a must have out_a's shape without its last axis, {out_a.shape[:-1]}, got "
            f"{lse_a.shape}"
        )
    for name, x in (("out_a", out_a), ("lse_a", lse_a)):
        checks.one_of(f"dtype of {name}", dtype_name(x), WIDE)
    out, lse = merged(out_a.astype(lse_a.dtype), lse_a, out_b.astype(lse_a.dtype), lse_b)
    return out.astype(out_a.dtype), lse
