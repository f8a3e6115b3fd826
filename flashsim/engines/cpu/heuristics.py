"""Chooses the micro-kernel, the number of threads and the tiling of a pass."""

from functools import lru_cache
from typing import Any

from flashsim.engines.cpu import threads
from flashsim.engines.cpu.micro_kernels import registers
from flashsim.errors import BackendUnavailable, OptionError, shown
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

MICRO_KERNELS = ("vector", "plain", *registers.PAIRED)

#: Tiles that suit a CPU's caches (docs/notebooks/cpu.md). The default tiling is the first that fits
#: the device.
USUAL = {
    "forward": (Tiling(128, 64), Tiling(64, 64)),
    "backward": (Tiling(64, 64), Tiling(48, 64)),
    "decode": (Tiling(1, 512), Tiling(1, 256), Tiling(1, 128), Tiling(1, 64)),
}

#: The number of float products per element of K and V up to which decoding on floats is at least as
#: fast as a bfloat16 micro-kernel (docs/notebooks/cpu.md).
PRODUCTS = {"amx": 12, "avx512_bf16": 7}


@lru_cache(maxsize=64)
def tiling(
    problem: Problem,
    requested: Tiling | None,
    device: Device,
    algorithm: str,
    direction: str,
    suits: tuple[Tiling, ...],
) -> Tiling:
    """Return the requested tiling, if it fits on chip, or a default tiling that fits."""
    if requested is not None:
        requested.refuse_dq_rows("backend='numba'")
        requested.check(problem, device, algorithm, direction)
        return requested
    for usual in suits:
        if usual.footprint(problem, algorithm, direction) <= device.sram_bytes:
            return usual
    return Tiling.fit(problem, device, algorithm, direction)


def thread_count(requested: Any, problem: Problem) -> int:
    """Return the requested number of threads; the default is all CPUs, or 1 for a small pass."""
    if requested is None:
        p = problem
        scores = p.batch * p.heads * p.n_q * p.n_kv
        return 1 if scores * (p.head_dim + p.head_dim_v) <= threads.SHORT else threads.available()
    if not checks.is_int(requested) or requested < 1:
        raise OptionError(f"threads= must be a positive integer, got {shown(requested)}")
    if requested > threads.ALWAYS and requested > threads.most():
        raise OptionError(
            f"threads= must be at most {threads.most()}, got {requested}; this process may use "
            f"{threads.available()} CPUs, and more threads than CPUs are no faster"
        )
    return int(requested)


def cpu(micro_kernel: Any, problem: Problem, *, one_query: bool = False) -> registers.Cpu:
    """Return the kernels' argument `cpu`, whose type makes Numba compile a certain micro-kernel.

    With `one_query` per head, a bfloat16 micro-kernel is the default only if many heads share keys.
    With few heads per key, memory bandwidth limits decoding, and a bfloat16 micro-kernel is no
    faster.
    """
    if micro_kernel is not None:
        checks.one_of("micro_kernel", micro_kernel, MICRO_KERNELS)
    if micro_kernel in registers.PAIRED:
        return _paired(micro_kernel, problem.dtype)
    if micro_kernel is None and problem.dtype == "bfloat16":
        for name in registers.PAIRED:
            if one_query and not arithmetic_limits(problem, PRODUCTS[name]):
                continue
            if registers.pays(name) and registers.without(name) is None:
                return registers.paired(name)
    best = registers.best(problem.compute_dtype, plain=micro_kernel == "plain")
    if micro_kernel == "vector" and isinstance(best, registers.Plain):
        raise BackendUnavailable(
            "micro_kernel='vector' needs a CPU with AVX2 and FMA, AVX-512 or NEON, which Numba "
            "may use (see NUMBA_CPU_NAME and NUMBA_CPU_FEATURES); use micro_kernel='plain', "
            "which runs on any CPU"
        )
    return best


def arithmetic_limits(problem: Problem, most: int) -> bool:
    """Return whether arithmetic, and not memory bandwidth, would limit the decode kernel.

    Each element of K and V is multiplied once per query head that reads it. For each score, softmax
    and other work cost as much as 96 columns of products. Above `most` multiplications per element,
    arithmetic takes longer than loading.
    """
    heads, d = problem.group, min(problem.head_dim, problem.head_dim_v)
    return heads * (d + 96) > most * d


def _paired(micro_kernel: str, dtype: str) -> registers.Cpu:
    if dtype != "bfloat16":
        raise OptionError(
            f"micro_kernel={micro_kernel!r} needs bfloat16 inputs, got {dtype}; convert the "
            "inputs to bfloat16, or leave out micro_kernel="
        )
    missing = registers.without(micro_kernel)
    if missing is not None:
        raise BackendUnavailable(
            f"micro_kernel={micro_kernel!r} cannot run on this machine: {missing}; leave out "
            "micro_kernel= to use the fastest one for this CPU"
        )
    return registers.paired(micro_kernel)
