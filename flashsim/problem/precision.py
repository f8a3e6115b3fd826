"""Which types numbers are rounded to on their way through an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from flashsim.problem.problem import Problem, numpy_dtype

#: Types of the operands of products by name, each with a power of two that they are multiplied by
#: before they are rounded, and divided by after.
Operands = Mapping[str, tuple[str, float]]
NO_ROUNDING: Operands = MappingProxyType({})

#: P = exp(S - m) is at most 1; FlashAttention-3 adds 8 to the exponent of 2 (`Max_offset` in its
#: hopper/softmax.h), so that e4m3, whose smallest number is 2**-9, keeps P down to 2**-17.
P_FACTOR = 256.0


def round_to(x: np.ndarray, dtype: str, factor: float = 1.0) -> np.ndarray:
    """`x` rounded to a type and back again; the factor, a power of two, is exact.

    Where a type has no infinity (float8_e4m3fn), what is too large becomes NaN, as in `ml_dtypes`.
    """
    if factor == 1.0:
        return x.astype(numpy_dtype(dtype)).astype(x.dtype)
    return (x * x.dtype.type(factor)).astype(numpy_dtype(dtype)).astype(x.dtype) / factor


def operands(problem: Problem, direction: str) -> Operands:
    """How P and dS enter products: in the input's type, and of FP8 inputs backward in bfloat16.

    FlashAttention-3 has no FP8 backward pass; the 16-bit one is what follows its FP8 forward.
    """
    p = problem
    if p.dtype == p.compute_dtype:
        return NO_ROUNDING
    if direction == "forward":
        return {"P": (p.dtype, P_FACTOR if p.fp8 else 1.0)}
    return dict.fromkeys(("P", "dS"), (p.result_dtype, 1.0))
