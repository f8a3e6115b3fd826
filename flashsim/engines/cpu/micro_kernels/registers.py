"""Which vector registers this CPU has, and how panels are blocked over them.

A product keeps `ROWS` rows by ``vecs`` vectors of accumulators in registers. Six by two fill AVX2's
16 registers (12 accumulators, 2 vectors of the right operand, 1 scalar spread over the lanes);
six by four suit the 32 registers of AVX-512 and NEON. Both keep two multiply-adds a cycle busy,
which needs at least 8 (AVX2: latency 4) to 16 independent sums.

The classes carry no code: their type tells the compiler which operations to use (`panels.py`), and
is part of the key of Numba's on-disk cache.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np

#: Rows of accumulators that one product step keeps in registers.
ROWS = 6


class Plain(NamedTuple):
    """Any CPU: the definitions of `panels.py`, compiled as they stand."""

    width: int


class Avx2(NamedTuple):
    """x86 with AVX2 and FMA: 16 registers of 32 B."""

    width: int


class Avx512(NamedTuple):
    """x86 with AVX-512: 32 registers of 64 B."""

    width: int


class Neon(NamedTuple):
    """64-bit ARM: 32 registers of 16 B."""

    width: int


Cpu = Plain | Avx2 | Avx512 | Neon


class Blocking(NamedTuple):
    """Bytes of one vector register, how many stand side by side in a panel, and whether products
    bring near what they read next (docs/notebooks/cpu.md: worth its instructions with AVX-512).
    """

    register: int
    vecs: int
    prefetch: bool = False

    def lanes(self, itemsize: int) -> int:
        """Elements of one register."""
        return self.register // itemsize


BLOCKING = {Avx2: Blocking(32, 2), Avx512: Blocking(64, 4, prefetch=True), Neon: Blocking(16, 4)}


def best(dtype: str, *, plain: bool = False) -> Cpu:
    """The kind of code for this CPU, with the panel width for this accumulator type.

    `plain` asks for the definitions, at the same width as the vector code would have.
    """
    kind = _host()
    block = BLOCKING.get(kind, BLOCKING[Neon])
    width = block.lanes(np.dtype(dtype).itemsize) * block.vecs
    return (Plain if plain else kind)(width)


@cache
def _host() -> type[Cpu]:
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512vl"):
        return Avx512
    if features.get("avx2") and features.get("fma"):
        return Avx2
    if platform.machine() in ("aarch64", "arm64"):
        return Neon
    return Plain
