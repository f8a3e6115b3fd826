"""The arithmetic that users can apply to tiles, and the FLOPs of each operation."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flashsim.counts.work import KINDS

#: The columns of one event's work: FLOPs by kind, then bytes read from and written to SRAM.
WORK = (*KINDS, "read", "write")

#: Elementwise operations by the kind of their cost (see `flashsim.counts.work`).
COSTS: Mapping[Callable[..., Any], str] = {
    **dict.fromkeys((np.exp, np.exp2, np.log, np.log2, np.log1p, np.expm1), "exp"),
    **dict.fromkeys((np.tanh, np.sin, np.cos, np.sqrt, np.power), "exp"),
    **dict.fromkeys((np.maximum, np.minimum, np.fmax, np.fmin), "max"),
    **dict.fromkeys((np.less, np.less_equal, np.greater, np.greater_equal), "max"),
    **dict.fromkeys((np.equal, np.not_equal, np.isfinite, np.isnan, np.isinf), "max"),
    **dict.fromkeys((np.absolute, np.sign, np.floor, np.ceil, np.rint), "max"),
    **dict.fromkeys((np.add, np.subtract, np.negative), "add"),
    **dict.fromkeys((np.multiply, np.square), "multiply"),
    **dict.fromkeys((np.divide, np.reciprocal), "divide"),
    **dict.fromkeys((np.logical_and, np.logical_or, np.logical_not, np.invert), ""),
    **dict.fromkeys((np.bitwise_and, np.bitwise_or), ""),
}

#: Reductions by the method's name: the NumPy operation, and the kind of cost per element.
REDUCTIONS: Mapping[str, tuple[np.ufunc, str]] = {
    "sum": (np.add, "add"),
    "max": (np.maximum, "max"),
    "min": (np.minimum, "max"),
    "any": (np.logical_or, ""),
    "all": (np.logical_and, ""),
}


def priced(kind: str, amount: int, read: int, write: int) -> np.ndarray:
    """Return the cost of one operation on tiles, as an array with the columns `WORK`."""
    row = np.zeros(len(WORK), np.int64)
    if kind:
        row[WORK.index(kind)] = amount
    row[-2:] = read, write
    return row
