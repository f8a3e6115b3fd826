"""`merge`: combine attention over two sets of keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashsim.algorithms.merge import merged
from flashsim.api import array_libraries, dispatch
from flashsim.api.arrays import check_like, dtype_name
from flashsim.api.request import adopted
from flashsim.errors import OptionError, ShapeError, own_errors
from flashsim.problem import checks

WIDE = ("float64", "float32", "float16", "bfloat16")


@own_errors
def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Combine the attention of the same queries over two disjoint sets of keys, a and b.

    ``lse = log(exp(lse_a) + exp(lse_b))``, and ``out = exp(lse_a - lse) out_a + exp(lse_b - lse)
    out_b``. Merging two splits of the keys is FlashDecoding's second step. If a row saw no key of
    one set (lse = -inf, out = 0), the row's result is that of the other set.

    `lse_a` and `lse_b` are natural logarithms. Some libraries, such as FlashInfer, return an LSE to
    base 2; multiply an LSE to base 2 by ``math.log(2)``.

    Parameters
    ----------
    out_a, out_b : array, (.., n_q, head_dim_v)
    lse_a, lse_b : array, (.., n_q)
        `Result.out` and `Result.lse`, as `run` returns them: from any library, on the CPU or a GPU.
        Results come from the same library.

    Returns
    -------
    out : array, of out_a's shape and type
    lse : array, of lse_a's

    Raises
    ------
    ShapeError, DTypeError
        If the shapes or types do not match.
    OptionError
        If an LSE is NaN or +inf. On a GPU, this check waits for the device.
    """
    host = array_libraries.host_of(out_a)
    arrays = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    out_a, lse_a, out_b, lse_b = array_libraries.take(host, **arrays)
    check_like("out_b", out_b, out_a, "out_a")
    check_like("lse_b", lse_b, lse_a, "lse_a")
    if lse_a.shape != out_a.shape[:-1]:
        raise ShapeError(
            "lse_a must have the shape of out_a without its last axis, which is "
            f"{out_a.shape[:-1]}, got {lse_a.shape}"
        )
    for name, x in (("out_a", out_a), ("lse_a", lse_a)):
        checks.one_of(f"dtype of {name}", dtype_name(x), WIDE)
    if not all(isinstance(x, np.ndarray) for x in (out_a, lse_a, out_b, lse_b)):
        return _on_gpu(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    _check_lse(lse_a=lse_a, lse_b=lse_b)
    out, lse = merged(out_a.astype(lse_a.dtype), lse_a, out_b.astype(lse_a.dtype), lse_b)
    return host.give(out.astype(out_a.dtype)), host.give(lse)


def _on_gpu(**named: Any) -> tuple[Any, Any]:
    """Merge on the GPU that holds the arrays, with `flashsim.backends.cupy_gpu.merge`."""
    engine = dispatch.engine("cupy")  # raises if a package is missing
    from flashsim.backends.cupy_gpu import merge as gpu

    arrays = gpu.held({name: adopted(engine, name, x) for name, x in named.items()})
    _check_lse(lse_a=arrays["lse_a"], lse_b=arrays["lse_b"])
    return gpu.merged(**arrays)


def _check_lse(**arrays: Any) -> None:
    """Raise `OptionError` for values that cannot be an LSE (NaN and +inf)."""
    for name, lse in arrays.items():
        with np.errstate(invalid="ignore"):
            bad = int((~(lse < np.inf)).sum())
        if bad:
            raise OptionError(
                f"{name} contains {bad:,} NaN or +inf values, but an LSE, a natural logarithm, is "
                "finite, or -inf for a row that sees no key; multiply a base-2 LSE by math.log(2)"
            )
