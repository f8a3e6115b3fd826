"""Find the shape, the element type and the values of one array of any library, without a copy."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsim.errors import DTypeError, OptionError, ShapeError
from flashsim.problem import checks


def dtype_name(array: Any) -> str:
    """Return the name of an array's element type, for NumPy, CuPy and torch."""
    return name_of(array.dtype)


def name_of(dtype: Any) -> str:
    """Return the name of an element type, without the "torch." prefix of torch's types."""
    return str(dtype).removeprefix("torch.")


def only_dlpack(x: Any) -> bool:
    """Return whether only DLPack can read an array: it is not NumPy's, CuPy's or torch's."""
    if type(x).__module__.partition(".")[0] in ("numpy", "cupy", "torch"):
        return False
    return hasattr(x, "__dlpack__") and not hasattr(x, "__cuda_array_interface__")


def last_axes(name: str) -> str:
    """Return the axes that the array named `name` must end with, such as "(n, head_dim)"."""
    if "lse" in name:
        return "(heads, n_q)"
    return "(n_q, n_kv)" if "bias" in name else "(n, head_dim)"


def shape_of(name: str, x: Any) -> tuple[int, ...]:
    """Return the shape of an array; raise if it is not an array."""
    try:
        shape, _, _ = tuple(x.shape), x.dtype, x.reshape
    except (AttributeError, TypeError):
        raise DTypeError(
            f"{name} must be an array (NumPy, CuPy or torch), got {type(x).__name__}; "
            f"np.asarray({name}, np.float32) makes one"
        ) from None
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(
            f"{name} is a masked array, but attention ignores its mask; pass {name}.filled(0), "
            "and mask the scores by mask=, block_mask= or a bias= of -inf"
        )
    several = isinstance(x, np.ndarray) and x.size > 0 and shape and shape[-1] > 1
    if several and x.strides[-1] != x.itemsize:
        if len(shape) > 1 and x.strides[-2] == x.itemsize:
            raise ShapeError(
                f"{name} of shape {shape} looks transposed (strides {x.strides} B), but its last "
                f"two axes must be {last_axes(name)} in memory; pass {name} without .T, or copy "
                f"it with np.ascontiguousarray({name}), or {name}.contiguous() in torch"
            )
        raise ShapeError(
            f"{name}'s last axis must be contiguous, got strides {x.strides} B for shape {shape}; "
            f"copy it with np.ascontiguousarray({name}), or {name}.contiguous() in torch"
        )
    return shape


def expand(x: Any, ndim: int = 4) -> Any:
    """Return the array with axes of length 1 added in front, up to `ndim` axes."""
    return x if x.ndim == ndim else x.reshape((1,) * (ndim - len(x.shape)) + tuple(x.shape))


def squeeze(x: Any, ndim: int) -> Any:
    """Return the array without the axes that `expand` added."""
    return x if x.ndim == ndim else x.reshape(tuple(x.shape)[len(x.shape) - ndim :])


def require_numpy(backend: str, **arrays: Any) -> None:
    """Raise unless all arguments are NumPy arrays, because `backend` runs on the CPU."""
    for name, x in arrays.items():
        if x is not None and not isinstance(x, np.ndarray):
            where = f" on {x.device}" if hasattr(x, "device") else ""
            kind = f"{type(x).__module__}.{type(x).__name__}{where}"
            raise DTypeError(
                f"backend {backend!r} takes arrays in the CPU's memory, but {name} is a {kind}; "
                f"move {name} to the CPU, or pass the name of a GPU backend as backend="
            )


def check_like(name: str, array: Any, like: Any, what: str) -> Any:
    """Return `array`; raise unless it has the shape and dtype of `like` (`what` in errors)."""
    wanted, shape = shape_of(what, like), shape_of(name, array)
    if shape != wanted:
        raise ShapeError(
            f"{name} must have the same shape as {what}, which is {wanted}, got {shape}"
        )
    if array.dtype != like.dtype and dtype_name(array) != dtype_name(like):
        raise DTypeError(
            f"{name} must have the same dtype as {what}, which is {dtype_name(like)}, got "
            f"{dtype_name(array)}; convert it with {name}.astype(...)"
        )
    return array


def check_kept(name: str, array: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Raise unless `array` has the shape and dtype that an earlier `run` returned."""
    got = tuple(shape_of(name, array)), dtype_name(array)
    if got[0] != shape:
        raise ShapeError(f"{name} must have the shape that run returned, {shape}, got {got[0]}")
    if got[1] != dtype:
        raise DTypeError(f"{name} must have the dtype that run returned, {dtype}, got {got[1]}")


def check_finite(name: str, array: Any) -> None:
    """Raise `OptionError` if an array contains NaN or infinity (``nan_policy="raise"``)."""
    bad = _not_finite(array)
    if bad:
        raise OptionError(
            f"{name} contains {bad:,} NaN or infinite values, and nan_policy is 'raise'; use "
            "nan_policy='propagate' to allow them"
        )


def _not_finite(array: Any) -> int:
    """Return how many of an array's values are NaN or infinite."""
    if isinstance(array, np.ndarray) and dtype_name(array) == "bfloat16":
        # As integers, infinity and NaN are the largest bits of either sign. Comparing the bits
        # takes a fifth of the time of widening.
        signed, bits = array.view(np.int16), array.view(np.uint16)
        if signed.max(initial=0) < 0x7F80 and bits.max(initial=0) < 0xFF80:
            return 0
    ours = dtype_name(array) in ("bfloat16", *checks.FP8)
    wide = array.astype(np.float32) if ours else array
    finite = np.isfinite(wide)
    return 0 if finite.all() else int((~finite).sum())  # counting takes three times as long


def warn_of_overflow(results: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Warn of NaN or infinity in results if the inputs have none; bias and sinks may hold -inf."""
    for name, x in results.items():
        bad = _not_finite(x)
        if not bad:
            continue
        for other, y in inputs.items():
            held = _not_finite(y)
            if held and not (other in ("bias", "sinks") and held == int((y == -np.inf).sum())):
                return
        dtype = dtype_name(x)
        largest = {"float16": "65,504", "float64": "1.8e308"}.get(dtype, "3.4e38")
        warnings.warn(
            f"{name} contains {bad:,} NaN or infinite values although the inputs are finite: "
            f"{dtype} ends at {largest}; scale the inputs down, or use a type with more range",
            RuntimeWarning,
            stacklevel=4,
        )
