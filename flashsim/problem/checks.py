"""Checks arguments; each function returns the accepted value in a standard form.

The errors name the argument and the value: `DTypeError` for a value of the wrong type, `ShapeError`
for lengths and shapes, and `OptionError` for other invalid values.
"""

import math
import os
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from flashsim.errors import DTypeError, OptionError, ShapeError, choices, shown

#: The one-byte element types of inputs, as `ml_dtypes` names them.
FP8 = ("float8_e4m3fn", "float8_e5m2")
DTYPES = ("float64", "float32", "float16", "bfloat16", *FP8)


#: Every size must fit in a signed 64-bit integer.
LARGEST = 2**63 - 1


def is_int(value: Any) -> bool:
    """Return True if `value` is an integer of Python or NumPy, and not a boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _integer(name: str, value: Any) -> int:
    if not is_int(value):
        raise DTypeError(f"{name} must be an integer, got {shown(value)} ({type(value).__name__})")
    return int(value)


def positive_int(name: str, value: Any) -> int:
    """Return `value` as an integer from 1 to 2**63 - 1."""
    return _at_least(1, name, value)


def _at_least(low: int, name: str, value: Any) -> int:
    if not low <= _integer(name, value) <= LARGEST:
        bound = f"at least {low}" if value < low else "at most 2**63 - 1"
        raise ShapeError(f"{name} must be {bound}, got {shown(value)}")
    return int(value)


def count(name: str, value: Any) -> int:
    """Return `value` as an integer from 0 to 2**63 - 1."""
    return _at_least(0, name, value)


def place(name: str, value: Any, among: int) -> int:
    """Return `value` as an index from 0 to `among` - 1."""
    if not 0 <= _integer(name, value) < among:
        raise OptionError(f"{name} must be from 0 to {among - 1}, got {shown(value)}")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """Return `value`, which must be True or False, as a Python bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise DTypeError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def one_of(name: str, value: Any, possible: Iterable[str]) -> Any:
    """Return `value` if it is one of the possible names; otherwise raise an error."""
    if not isinstance(value, str) or value not in possible:
        raise OptionError(f"unknown {name} {shown(value)}; choose from {choices(value, possible)}")
    return value


def instance(name: str, value: Any, kind: type, how: str) -> Any:
    """Return `value` if it is a `kind`; otherwise raise an error that calls the type `how`."""
    if not isinstance(value, kind):
        raise DTypeError(f"{name} must be a {how}, got {shown(value)}")
    return value


def path(name: str, value: Any) -> str:
    """Return `value` as a path, or raise an error if no file can have such a path."""
    try:
        if not isinstance(value, (str, os.PathLike)) or b"\0" in os.fsencode(value):
            raise DTypeError(f"{name} must be the path of a file, got {shown(value)}")
    except UnicodeEncodeError:
        raise OptionError(f"{name} must be the path of a file, got {shown(value)}") from None
    return os.fspath(value)


def seed(value: Any) -> int:
    """Return `value` as a seed for random numbers."""
    if _integer("seed", value) < 0:
        raise OptionError(f"seed must be at least 0, got {shown(value)}")
    return int(value)


def as_array(name: str, values: Any) -> np.ndarray:
    """Return an array of any library or device as a NumPy array.

    Numbers of torch's 8-bit and 16-bit float types become float32.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise DTypeError(
            f"{name} is a masked array, whose mask would be lost; pass {name}.filled(value), a "
            "plain array"
        )
    library = type(values).__module__.partition(".")[0]
    try:
        if hasattr(values, "requires_grad"):  # a torch tensor, or a subclass of it
            values = values.detach().cpu()
            narrow = values.is_floating_point() and values.itemsize < 4
            return np.asarray(values.float() if narrow else values)
        return np.asarray(values.get() if library == "cupy" else values)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors without numbers
        raise DTypeError(f"{name} cannot be read as a NumPy array: {error}") from error


def sinks(values: Any, heads: int) -> np.ndarray:
    """Return sinks, an array-like of (heads,) floats, as a NumPy array."""
    array = as_array("sinks", values)
    floats = array.dtype.kind == "f" or array.dtype.name in DTYPES  # NumPy does not know bfloat16
    sinks_shape(array, heads, floats=floats)
    return array


def sinks_shape(array: Any, heads: int, *, floats: bool = True) -> None:
    """Raise `ShapeError` unless sinks, an array of any library, are (heads,) and `floats`."""
    if tuple(array.shape) != (heads,) or not floats:
        raise ShapeError(
            f"sinks must be floats of shape ({heads},), one per query head, got {array.dtype} of "
            f"shape {tuple(array.shape)}"
        )


def number(name: str, value: Any, low: float = -math.inf) -> float:
    """Return `value` as a finite float of at least `low`."""
    if not (is_int(value) or isinstance(value, (float, np.floating))):
        raise DTypeError(f"{name} must be a number, got {shown(value)} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < low:
        bound = "finite" if low == -math.inf else f"finite and at least {low:g}"
        raise OptionError(f"{name} must be {bound}, got {shown(value)}")
    return number


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, or raise an error if flashsim does not support the dtype."""
    try:
        known = isinstance(dtype, (type, np.dtype))
        name = np.dtype(dtype).name if known else dtype
    except Exception:  # NumPy raises many kinds of error for a value that is no dtype
        name = dtype
    if not isinstance(name, str) or name not in DTYPES:
        turned = {np.dtype(x).newbyteorder().str: x for x in ("float64", "float32", "float16")}
        if isinstance(name, str) and name in turned:
            raise DTypeError(
                f"dtype {name!r} is {turned[name]} with swapped byte order; convert it with "
                f"x.astype({turned[name]!r})"
            )
        raise DTypeError(
            f"dtype {shown(name)} is not supported; choose from {choices(name, DTYPES)}"
        )
    return name


def window(window: Any) -> tuple[int, int] | None:
    """Return a window's two limits, left and right, as integers (-1: no limit); None stays None."""
    if window is None:
        return None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise DTypeError(
            "window= must be a pair (left, right), the numbers of keys that are visible on each "
            f"side, with -1 for no limit, got {shown(window)}"
        ) from None
    for value in (left, right):
        if not is_int(value):
            raise DTypeError(
                f"window= must be a pair of integers (left, right), got {shown(window)}"
            )
        if value < -1:
            raise OptionError(
                f"each side of window= must be at least 0, or -1 for no limit, got {shown(window)}"
            )
    return int(left), int(right)


def packed(
    of_q: Any, of_k: Any, batch: int, n_q: int, n_kv: int, prefix: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets of packed sequences' queries and keys, after checking that they fit.

    The offsets of keys start after a shared prefix of `prefix` keys.
    """
    if batch != 1:
        raise ShapeError(
            "with cu_seqlens, all sequences are packed into one batch entry, so batch must "
            f"be 1, got {batch}"
        )
    q, k = _offsets("cu_seqlens_q", of_q, n_q), _offsets("cu_seqlens_k", of_k, n_kv, prefix)
    if len(q) != len(k):
        raise ShapeError(
            "cu_seqlens_q and cu_seqlens_k must have the same number of sequences, got "
            f"{len(q) - 1} and {len(k) - 1}"
        )
    return q, k


def _offsets(name: str, values: Any, total: int, first: int = 0) -> tuple[int, ...]:
    """Return offsets, which start at `first`, never decrease, and end at `total`.

    Two equal consecutive offsets are valid, and stand for an empty sequence.
    """
    array = as_array(name, values)
    if array.ndim != 1 or array.size < 2 or array.dtype.kind not in "iu":
        raise ShapeError(
            f"{name} must be a 1-D list of at least two integer offsets, got {shown(values)}"
        )
    offsets = tuple(int(x) for x in array)
    if offsets[0] != first or offsets[-1] != total or any(b < a for a, b in pairwise(offsets)):
        raise ShapeError(
            f"{name} must start at {first}, never decrease, and end at the packed length "
            f"{total}, got {shown(list(offsets))}"
        )
    return offsets
