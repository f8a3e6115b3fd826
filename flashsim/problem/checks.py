"""Checks of single values that describe a problem; each returns what it accepted, normalised.

Raised, with what was wrong and what was given: `DTypeError` for a value of the wrong type,
`ShapeError` for lengths, `OptionError` for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from flashsim.errors import DTypeError, OptionError, ShapeError, choices

DTYPES = ("float64", "float32", "float16", "bfloat16")


def positive_int(name: str, value: Any) -> int:
    """An integer of at least 1."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise DTypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise ShapeError(f"{name} must be at least 1, got {value}")
    return int(value)


def as_array(name: str, values: Any) -> np.ndarray:
    """Anything NumPy can read as an array."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:  # ragged lists, arrays on a GPU
        raise DTypeError(f"{name} cannot be read as a NumPy array: {error}") from error


def number(name: str, value: Any, low: float = -math.inf) -> float:
    """A finite number of at least `low`."""
    real = isinstance(value, (int, float, np.integer, np.floating))
    if not real or isinstance(value, bool):
        raise DTypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    number = float(value)
    if not math.isfinite(number) or number < low:
        bound = "finite" if low == -math.inf else f"finite and at least {low:g}"
        raise OptionError(f"{name} must be {bound}, got {value!r}")
    return number


def dtype_name(dtype: Any) -> str:
    """The name of a supported dtype."""
    try:
        name = str(dtype) if isinstance(dtype, (str, type(None))) else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise DTypeError(f"dtype {name!r} is not supported; {choices(name, DTYPES)}")
    return name


def window(window: Any) -> tuple[int, int] | None:
    """Keys seen to the left and right, -1 unlimited; None for no window."""
    if window is None:
        return None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise DTypeError(
            f"window must be a pair (left, right) of key counts, -1 unlimited, got {window!r}"
        ) from None
    for value in (left, right):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise DTypeError(f"window must hold two integers, got {window!r}")
        if value < -1:
            raise OptionError(f"window sides must be -1 (unlimited) or more, got {window!r}")
    return int(left), int(right)


def cu_seqlens(name: str, values: Sequence[int], total: int) -> tuple[int, ...]:
    """Offsets of packed sequences: from 0 up to `total`."""
    array = as_array(name, values)
    if array.ndim != 1 or array.size < 2 or array.dtype.kind not in "iu":
        raise ShapeError(
            f"{name} must be a 1-D list of at least two integer offsets, got {values!r}"
        )
    offsets = tuple(int(x) for x in array)
    if offsets[0] != 0 or offsets[-1] != total or any(b < a for a, b in pairwise(offsets)):
        raise ShapeError(
            f"{name} must start at 0, never fall and end at the packed length {total}, got "
            f"{list(offsets)}"
        )
    return offsets
