"""Estimate a kernel's on-chip memory from its jaxpr: the values that the kernel holds at once.

An intermediate array counts from the equation that computes it to the last equation that reads it.
Loaded tiles are not included, because the trace lists loaded tiles as loads. A compiled kernel may
hold fewer values, since a compiler fuses element-wise operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np
from jax.extend.core import Literal

from flashsim.jax.jaxpr_walk import bodies

#: Primitives whose results are loaded tiles.
LOADS = ("get", "masked_load")
#: A kind of value: its element type and its shape.
Kind = tuple[str, tuple[int, ...]]


def most_live(jaxpr: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return, by name, the shape and bytes of the values that a kernel holds at its memory peak.

    A name such as "2 float32" stands for two float32 values of the same shape.
    """
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for (dtype, shape), count in sorted(_most(jaxpr).items(), key=lambda one: -_size(one[0])):
        name = f"{count} {dtype}"
        for letter in "bcdefgh":
            name = f"{count} {dtype} {letter}" if name in found else name
        found[name] = (shape, count * _size((dtype, shape)))
    return found


def _size(kind: Kind) -> int:
    dtype, shape = kind
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def _kind(variable: Any) -> Kind | None:
    """Return the type and shape of an intermediate array, or None for a scalar or a ref."""
    aval = variable.aval
    if hasattr(aval, "inner_aval") or not getattr(aval, "shape", ()):
        return None
    return np.dtype(aval.dtype).name, tuple(aval.shape)


def _most(jaxpr: Any, loaded: Collection[Any] = ()) -> Counter[Kind]:
    last: dict[Any, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        for variable in equation.invars:
            if not isinstance(variable, Literal):
                last[variable] = number
    for variable in jaxpr.outvars:
        if not isinstance(variable, Literal):
            last[variable] = len(jaxpr.eqns)
    first = (*jaxpr.constvars, *jaxpr.invars)
    live = {v: kind for v in first if v not in loaded and (kind := _kind(v)) is not None}
    loaded = set(loaded)
    best: Counter[Kind] = Counter(live.values())
    for number, equation in enumerate(jaxpr.eqns):
        read = {v for v in equation.invars if not isinstance(v, Literal)}
        outside = Counter(kind for v, kind in live.items() if v not in read)
        for body in bodies(equation.params):
            inner = {  # loaded tiles among the body's inputs, whose last ones are the equation's
                inside
                for inside, given in zip(
                    reversed(body.invars), reversed(equation.invars), strict=False
                )
                if not isinstance(given, Literal) and given in loaded
            }
            best = max(best, outside + _most(body, inner), key=_bytes)
        if equation.primitive.name in LOADS:
            loaded |= set(equation.outvars)
        live |= {
            v: kind for v in equation.outvars if v not in loaded and (kind := _kind(v)) is not None
        }
        best = max(best, Counter(live.values()), key=_bytes)
        live = {v: kind for v, kind in live.items() if last.get(v, -1) > number}
    return best


def _bytes(held: Counter[Kind]) -> int:
    return sum(count * _size(kind) for kind, count in held.items())
