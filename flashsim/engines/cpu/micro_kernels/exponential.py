"""Constants with which vector code computes 2^x and 2^x - 1 for floats and doubles."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

#: 2^f on |f| <= 1/2 as 1 + c1 f + ... + c5 f^5: the fit with the smallest relative error, 9.2e-8
#: (three quarters of float32's epsilon), under the condition that 2^0 is exactly 1.
_FLOAT = (
    1.0,
    0.6931469775973343,
    0.24022242084079087,
    0.0555073374589119,
    0.009671512699109118,
    0.0013264726402386837,
)

#: (2^f - 1) / f on |f| <= 1/2: the fit with the smallest relative error, 1.3e-8, under the
#: condition that its value at 0 is ln 2 in float32. Computed from `_FLOAT`, it would have an error
#: of 3e-7 at 0.
_FLOAT_LESS_ONE = (
    0.6931471824645996,
    0.24022649228572845,
    0.05550367385149002,
    0.009618307463824749,
    0.0013387389481067657,
    0.00015383654681500047,
)

#: 2^f on 0 <= f < 1 for results that are rounded to 8 bits: the fit with the smallest relative
#: error, 3e-6, under the condition that 2^0 is exactly 1.
POWER_FROM_0 = (
    1.0,
    0.6930448412895203,
    0.241280198097229,
    0.052242472767829895,
    0.013426683843135834,
)

#: By how much a row's largest score may grow before its sums are rescaled. `m` starts that much
#: above the largest score, so the sums are e^-5 of those with the exact maximum. This costs 8 of
#: the 126 exponents below 1, and does not make overflow more likely.
SLACK = 5

#: The Taylor series; the first term left out is 4e-18 at |f| = 1/2.
_DOUBLE = tuple(math.log(2) ** k / math.factorial(k) for k in range(14))


#: 2 log2 e as the sum of two numbers of a type, with a relative error of 1e-15 (float) or 2e-33
#: (double). log2 e minus its nearest double is 2.0355273740931033e-17.
_TWICE_LOG2E = 2 * math.log2(math.e)
_SINGLE = 2.885390043258667
_PARTS_FLOAT = (_SINGLE, _TWICE_LOG2E - _SINGLE)
_PARTS_DOUBLE = (_TWICE_LOG2E, 2 * 2.0355273740931033e-17)


class Exponential(NamedTuple):
    """The constants for computing powers of two in one floating-point type.

    Two polynomials (constant term first) approximate 2^f (`coefficients`) and (2^f - 1) / f
    (`less_one`, precise for small results). `twice_log2e` is 2 log2 e as a sum of two numbers.
    """

    mantissa: int
    bias: int
    coefficients: tuple[float, ...]
    less_one: tuple[float, ...]
    twice_log2e: tuple[float, float]

    @property
    def magic(self) -> float:
        """Return a number M: adding it to x rounds x to an integer n, with low bits n + bias."""
        return 1.5 * 2**self.mantissa + self.bias

    @classmethod
    @cache
    def of(cls, itemsize: int) -> Exponential:
        """Return the constants for floats (4 bytes) or doubles (8 bytes)."""
        if itemsize == 4:
            return cls(23, 127, _FLOAT, _FLOAT_LESS_ONE, _PARTS_FLOAT)
        return cls(52, 1023, _DOUBLE, _DOUBLE[1:], _PARTS_DOUBLE)
