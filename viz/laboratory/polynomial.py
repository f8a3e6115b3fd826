"""`Polynomial`: a sum of products of named sizes, with the arithmetic that byte formulas use.

The byte formulas (closed forms) are Python functions of integers. With polynomials instead of
integers, such a function returns its formula as a polynomial, which can be exported as data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Union

Term = tuple[str, ...]  # names in order, repeated for powers; () is the constant term
Operand = Union["Polynomial", int]


class Polynomial:
    """A polynomial in named sizes, with integer coefficients. Immutable and hashable.

    Polynomials have no order, so code that compares sizes raises a TypeError.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: dict[Term, int]) -> None:
        self.terms = {term: n for term, n in sorted(terms.items()) if n}

    @classmethod
    def named(cls, name: str) -> Polynomial:
        """Return the polynomial that consists of this name alone."""
        return cls({(name,): 1})

    @classmethod
    def of(cls, value: Operand) -> Polynomial:
        """Return `value` as a polynomial; an integer becomes a constant polynomial."""
        return value if isinstance(value, Polynomial) else cls({(): int(value)})

    def __add__(self, other: Operand) -> Polynomial:
        terms = dict(self.terms)
        for term, n in Polynomial.of(other).terms.items():
            terms[term] = terms.get(term, 0) + n
        return Polynomial(terms)

    def __mul__(self, other: Operand) -> Polynomial:
        terms: dict[Term, int] = {}
        for product, n in self.terms.items():
            for two, m in Polynomial.of(other).terms.items():
                term = tuple(sorted(product + two))
                terms[term] = terms.get(term, 0) + n * m
        return Polynomial(terms)

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other: Operand) -> Polynomial:
        return self + Polynomial.of(other) * -1

    def __rsub__(self, other: Operand) -> Polynomial:
        return self * -1 + other

    def __floordiv__(self, other: Operand) -> Polynomial:
        """Divide this polynomial by one term, which must divide each of the polynomial's terms."""
        ((divisor, n),) = Polynomial.of(other).terms.items()
        terms: dict[Term, int] = {}
        for term, m in self.terms.items():
            left = list(term)
            for name in divisor:
                left.remove(name)  # ValueError: it does not divide
            if m % n:
                raise ValueError(f"the divisor {n} must divide {m} without a remainder")
            terms[tuple(left)] = m // n
        return Polynomial(terms)

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Polynomial, int)):
            return NotImplemented
        return self.terms == Polynomial.of(other).terms

    def __hash__(self) -> int:
        return hash(tuple(self.terms.items()))

    def __repr__(self) -> str:
        products = (" ".join([str(n), *term]) for term, n in self.terms.items())
        return " + ".join(products) or "0"


def names(polynomials: Iterable[Polynomial]) -> list[str]:
    """Return the names that occur in these polynomials, in alphabetical order."""
    return sorted({name for p in polynomials for term in p.terms for name in term})
