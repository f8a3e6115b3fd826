"""bfloat16 and FP8, computed right: the interpreter holds their bits and computes with the bits.

Triton's interpreter keeps such numbers as unsigned integers. Sums, products, comparisons and
`tl.dot` of them come out wrong, without an error, and conversions round by their own rules. Here
operands are widened to float32, which is exact; the result is rounded once, to nearest even. For
sums, products and quotients of two such numbers that is what a GPU gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashsim.errors import UnsupportedError
from flashsim.triton.installed import installed

#: Triton's name of a type, and the one of NumPy or ml_dtypes.
_EXACT = {
    "bf16": "bfloat16",
    "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
    "fp8e4b8": "float8_e4m3fnuz",
    "fp8e5b16": "float8_e5m2fnuz",
}
#: Conversions to these stay finite on NVIDIA GPUs (cvt.rn.satfinite).
_SATURATE = ("fp8e4nv", "fp8e5")


def exact_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of that name; ml_dtypes has those that NumPy lacks."""
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def is_narrow(dtype: Any) -> bool:
    """Return whether a Triton type is one that the interpreter keeps as bits."""
    scalar = dtype.scalar
    if scalar.name == "fp8e4b15":
        raise UnsupportedError(
            "the type float8e4b15 cannot be traced, because no installed library rounds to "
            "it; use tl.float8e4nv"
        )
    return scalar.name in _EXACT


def widen(handle: Any) -> np.ndarray:
    """Return a handle's numbers: exact float32 for a narrow type, its own data for another."""
    if not is_narrow(handle.dtype):
        half = handle.data.dtype == np.float16
        return handle.data.astype(np.float32) if half else handle.data
    exact = exact_dtype(_EXACT[handle.dtype.scalar.name])
    return np.ascontiguousarray(handle.data).view(exact).astype(np.float32)


def narrow(data: np.ndarray, dtype: Any) -> np.ndarray:
    """Return the bits of numbers rounded to a narrow type, to nearest even."""
    name = dtype.scalar.name
    exact = exact_dtype(_EXACT[name])
    if name in _SATURATE:
        import ml_dtypes

        most = float(ml_dtypes.finfo(exact).max)
        data = np.clip(data, -most, most)  # a NaN stays
    with np.errstate(over="ignore"):
        rounded = np.asarray(data).astype(exact)
    return rounded.view(f"u{exact.itemsize}")


def handle(data: np.ndarray, dtype: Any) -> Any:
    """Return a handle of the interpreter."""
    return installed().interpreter.TensorHandle(data, dtype)


def cast(source: Any, to: Any) -> Any:
    """Convert a handle to a type, if either is narrow."""
    data = widen(source)
    scalar = to.scalar
    if is_narrow(scalar):
        return handle(narrow(data, scalar), scalar)
    return handle(data.astype(installed().interpreter._get_np_dtype(scalar)), scalar)


def arithmetic(op: Any, *operands: Any) -> Any:
    """Apply a NumPy operation to handles; the first one has the type of the result."""
    dtype = operands[0].dtype.scalar
    with np.errstate(all="ignore"):
        result = op(*(widen(one) for one in operands))
    if result.dtype == np.bool_:  # of a comparison
        return handle(result, dtype)
    return handle(narrow(result, dtype), dtype)


def refuse(what: str) -> UnsupportedError:
    """Return the error for an operation on narrow types that is not computed here."""
    return UnsupportedError(
        f"{what} of bfloat16 or FP8 numbers is wrong in Triton's interpreter, and is not computed "
        "here either; convert them first: x.to(tl.float32)"
    )
