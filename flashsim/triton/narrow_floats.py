"""Computes bfloat16 and FP8 correctly, because Triton's interpreter computes both wrongly.

The interpreter stores bfloat16 and FP8 numbers as unsigned integers. The interpreter computes sums,
products, comparisons and `tl.dot` on these integers: the results are wrong, and no error is raised.
The interpreter's conversions also round differently from a GPU's. This module widens operands to
float32, which is exact, and rounds the result once, to nearest even. A GPU gives the same sums,
products and quotients of two bfloat16 or FP8 numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashsim.errors import UnsupportedError
from flashsim.triton.installed import installed

#: Triton's name of each type, and its name in NumPy or ml_dtypes.
_EXACT = {
    "bf16": "bfloat16",
    "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
    "fp8e4b8": "float8_e4m3fnuz",
    "fp8e5b16": "float8_e5m2fnuz",
}
#: Types to which NVIDIA GPUs convert with saturation (cvt.rn.satfinite), so results stay finite.
_SATURATE = ("fp8e4nv", "fp8e5")


def exact_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype with this name; ml_dtypes provides those that NumPy lacks."""
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def is_narrow(dtype: Any) -> bool:
    """Return True if the interpreter stores a Triton type as an unsigned integer."""
    scalar = dtype.scalar
    if scalar.name == "fp8e4b15":
        raise UnsupportedError(
            "the type float8e4b15 cannot be traced, because no installed library rounds to "
            "it; use tl.float8e4nv"
        )
    return scalar.name in _EXACT


def widen(handle: Any) -> np.ndarray:
    """Return the numbers that a handle holds, with 16-bit and 8-bit floats widened to float32."""
    if not is_narrow(handle.dtype):
        half = handle.data.dtype == np.float16
        return handle.data.astype(np.float32) if half else handle.data
    exact = exact_dtype(_EXACT[handle.dtype.scalar.name])
    return np.ascontiguousarray(handle.data).view(exact).astype(np.float32)


def narrow(data: np.ndarray, dtype: Any) -> np.ndarray:
    """Return numbers rounded to a narrow type, to nearest even, as bits of that type."""
    name = dtype.scalar.name
    exact = exact_dtype(_EXACT[name])
    if name in _SATURATE:
        import ml_dtypes

        most = float(ml_dtypes.finfo(exact).max)
        data = np.clip(data, -most, most)  # NaN stays NaN
    with np.errstate(over="ignore"):
        rounded = np.asarray(data).astype(exact)
    return rounded.view(f"u{exact.itemsize}")


def handle(data: np.ndarray, dtype: Any) -> Any:
    """Return a `TensorHandle` of Triton's interpreter for data of a type."""
    return installed().interpreter.TensorHandle(data, dtype)


def cast(source: Any, to: Any) -> Any:
    """Return a handle converted to another type; the old or the new type must be narrow."""
    data = widen(source)
    scalar = to.scalar
    if is_narrow(scalar):
        return handle(narrow(data, scalar), scalar)
    return handle(data.astype(installed().interpreter._get_np_dtype(scalar)), scalar)


def arithmetic(op: Any, *operands: Any) -> Any:
    """Apply a NumPy operation to handles; the result has the type of the first handle."""
    dtype = operands[0].dtype.scalar
    with np.errstate(all="ignore"):
        result = op(*(widen(one) for one in operands))
    if result.dtype == np.bool_:  # of a comparison
        return handle(result, dtype)
    return handle(narrow(result, dtype), dtype)


def refuse(what: str) -> UnsupportedError:
    """Return the error for an operation on narrow types that flashsim does not support."""
    return UnsupportedError(
        f"{what} of bfloat16 or FP8 numbers is not supported, because Triton's interpreter "
        "computes it wrongly; convert the numbers first: x.to(tl.float32)"
    )
