"""Describes this CPU's vector registers, and how a panel (block of scores) uses them.

A matrix product keeps accumulators for `ROWS` rows by ``vecs`` vectors of C in registers. Six rows
by two vectors use 15 of AVX2's 16 registers: 12 accumulators, 2 vectors of the right operand, and 1
scalar copied to all lanes. Two vector multiply-adds per cycle need 8 to 16 independent sums: 8 with
AVX2, whose latency is 4 cycles.

Each kind of CPU is a class without methods, such as `Avx2`. A kernel's argument `cpu` is an object
of such a class. The class of `cpu` selects the version of each operation in `plain.py`, and is part
of the key in Numba's disk cache. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES (environment variables) can
select a CPU with fewer registers.
"""

import os
import platform
from collections import namedtuple
from functools import cache
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np
from numba.core import codegen, config

from flashsim.engines.cpu.micro_kernels import amx

#: Rows of accumulators that one product step keeps in registers.
ROWS = 6

#: The kinds of code. Each is a type with the field `width`: the number of lanes of a panel.
#: `Plain` is for any CPU: Numba compiles the definitions in `plain.py`.
Plain = namedtuple("Plain", "width")
Avx2 = namedtuple("Avx2", "width")  # x86 with AVX2 and FMA: 16 registers of 32 B
Avx512 = namedtuple("Avx512", "width")  # x86 with AVX-512: 32 registers of 64 B
Avx512Bf16 = namedtuple("Avx512Bf16", "width")  # also has dot products of bfloat16 pairs
Amx = namedtuple("Amx", "width")  # also has eight AMX tile registers of 16 x 64 B
Neon = namedtuple("Neon", "width")  # 64-bit ARM: 32 registers of 16 B
Cpu = Plain | Avx2 | Avx512 | Avx512Bf16 | Amx | Neon


class Blocking(NamedTuple):
    """How a matrix product's code uses the CPU's registers.

    `register` is the size of a vector register in bytes, and `vecs` the number of registers per row
    of a panel. With `prefetch`, products prefetch their next data (docs/notebooks/cpu.md). `pairs`
    is the method for bfloat16 pairs ("amx" or "vdpbf16ps"), or "" for floats. `native` says whether
    the CPU rounds to pairs in hardware; only emulated CPUs do not.
    """

    register: int
    vecs: int
    prefetch: bool = False
    pairs: str = ""
    native: bool = True

    def lanes(self, itemsize: int) -> int:
        """Return how many elements of `itemsize` bytes one register holds."""
        return self.register // itemsize


BLOCKING: dict[type, Blocking] = {
    Avx2: Blocking(32, 2),
    Avx512: Blocking(64, 4, prefetch=True),
    Avx512Bf16: Blocking(64, 4, pairs="vdpbf16ps"),
    Amx: Blocking(64, 4, pairs="amx"),
    Neon: Blocking(16, 4),
    Plain: Blocking(4, 1),
}

_BF16 = ("avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512bf16")
#: The micro-kernels for bfloat16, best first, with the LLVM features that each needs.
PAIRED: dict[str, tuple[type[Amx] | type[Avx512Bf16], tuple[str, ...]]] = {
    "amx": (Amx, ("amx-tile", "amx-bf16", *_BF16)),
    "avx512_bf16": (Avx512Bf16, _BF16),
}


def best(dtype: str, *, plain: bool = False) -> Cpu:
    """Return an object of class `Plain` if `plain` is true, or of the fastest class for `dtype`."""
    kind = _host()
    block = BLOCKING[Neon if kind is Plain else kind]
    width = block.lanes(np.dtype(dtype).itemsize) * block.vecs
    return (Plain if plain else kind)(width)


#: The LLVM features that each kind of code needs, widest registers first. A feature needs those
#: before it.
_VECTORS: dict[type[Cpu], tuple[str, ...]] = {
    Avx512: ("avx", "avx2", "fma", "avx512f", "avx512vl"),
    Avx2: ("avx", "avx2", "fma"),
}


@cache
def _host() -> type[Cpu]:
    """Return the fastest `Cpu` class that this CPU can run and Numba may compile for."""
    has, allowed = llvm.get_host_cpu_features(), _given()
    # Without NUMBA_CPU_NAME, LLVM uses this CPU's features, except those that are switched off.
    own = getattr(config, "CPU_NAME") is None  # noqa: B009
    usable = {x for x in has if has[x] and (f"+{x}" in allowed or (own and f"-{x}" not in allowed))}
    for kind, needs in _VECTORS.items():
        if usable.issuperset(needs):
            return kind
    if platform.machine() in ("aarch64", "arm64"):
        return Neon
    return Plain


def _given() -> list[str]:
    """Return the CPU features that Numba gives to LLVM, such as "+avx2" (on) or "-avx2" (off)."""
    features: str | None = getattr(config, "CPU_FEATURES")  # noqa: B009 (Numba sets it as it loads)
    return (codegen.get_host_cpu_features() if features is None else features).split(",")


def paired(micro_kernel: str) -> Cpu:
    """Return the `Cpu` object for a bfloat16 micro-kernel, "amx" or "avx512_bf16"."""
    kind = PAIRED[micro_kernel][0]
    block = BLOCKING[kind]
    return kind(block.lanes(4) * block.vecs)


@cache
def pays(micro_kernel: str) -> bool:
    """Return whether a bfloat16 micro-kernel should beat the float32 code on this CPU.

    With AVX-512's VDPBF16PS, passes took 1.4 to 1.8 times as long as in float32 on one thread of an
    Intel Xeon, and 0.55 to 0.7 times as long on an AMD Zen 4.
    """
    return micro_kernel == "amx" or zen()


def zen() -> bool:
    """Return whether this is an AMD CPU of the Zen family."""
    return bool(llvm.get_host_cpu_name().startswith("znver"))


def without(micro_kernel: str) -> str | None:
    """Return why this process cannot run a bfloat16 micro-kernel, or None if it can.

    An instruction that the CPU lacks would crash the process. So the function checks both the CPU's
    features and those that Numba may use (NUMBA_CPU_FEATURES).
    """
    lacks = lacking(PAIRED[micro_kernel][1])
    if lacks:
        return f"the CPU, or the CPU for which Numba compiles, lacks {', '.join(lacks)}"
    return amx.refusal(os.getpid()) if PAIRED[micro_kernel][0] is Amx else None


@cache
def lacking(features: tuple[str, ...]) -> list[str]:
    """Return those of `features` that the CPU lacks or Numba does not let LLVM use."""
    has, allowed = llvm.get_host_cpu_features(), _given()
    return [x for x in features if not (has.get(x) and f"+{x}" in allowed)]
