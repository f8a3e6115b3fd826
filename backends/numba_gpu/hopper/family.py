"""The Hopper kernels in Python: a kernel family as `families.portable` describes it.

There is a forward only; the backward is `tensor`'s. `refusal` says what they do not run.
"""

from __future__ import annotations

from functools import lru_cache

from flashsim.backends import launch
from flashsim.backends.launch.kernel import Box, Gpu, Kernel, Variant
from flashsim.backends.launch.passes import Pass, tables_of, variant_of, walk_pass
from flashsim.backends.numba_gpu import compiler
from flashsim.backends.numba_gpu.hopper.forward import Layout
from flashsim.backends.numba_gpu.hopper.ptx import CHUNK
from flashsim.errors import UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.schedule import KeyOrder
from flashsim.schedule.tiling import Tiling

NAME = "hopper"
load = compiler.load
CAPABILITY = (9, 0)


def refusal(problem: Problem, tiling: Tiling | None, gpu: Gpu, direction: str) -> str | None:
    """Why these kernels do not run this; None if they do."""
    if direction != "forward":
        return "they have no backward pass"
    if gpu.compute_capability != CAPABILITY:
        has = ".".join(map(str, gpu.compute_capability))
        return f"they need compute capability 9.0, and {gpu.name} has {has}"
    possible = tilings(problem, gpu)
    if tiling is None:
        return None if _divide(problem, possible) else "their tiles do not divide the block mask's"
    if tiling not in possible:
        return f"{tiling} tiles are none of theirs ({', '.join(map(str, possible))})"
    return None


def tilings(problem: Problem, gpu: Gpu) -> tuple[Tiling, ...]:
    """The tilings that the kernels are built for, the best first (docs/reference/hopper.md)."""
    d = max(problem.head_dim, problem.head_dim_v)
    if d <= 64:
        best = [Tiling(192, 128), Tiling(128, 128)]
        if problem.causal and problem.n_kv <= 1024:
            best.reverse()
    elif d <= 128:
        best = [Tiling(128, 176), Tiling(128, 128)]
        if problem.softcap or (problem.causal and problem.n_kv <= 2048):
            best.reverse()
    else:
        best = [Tiling(128, 112)] if d <= 192 else [Tiling(128, 80)]
    best += [Tiling(128, 64)]  # divides common block masks
    return tuple(t for t in best if _layout(problem, t).nbytes <= gpu.shared_bytes)


@lru_cache(maxsize=256)
def forward_passes(
    problem: Problem, tiling: Tiling | None, gpu: Gpu, key_order: KeyOrder, report: str
) -> tuple[Pass, ...]:
    """As `portable.forward_passes`.

    Raises
    ------
    UnsupportedError
        With `refusal`'s reason.
    """
    reason = refusal(problem, tiling, gpu, "forward")
    if reason is not None:
        raise UnsupportedError(
            f"the Hopper kernels do not run this: {reason}; kernel='tensor' may, and without "
            "kernel=... whichever does is taken"
        )
    tiling = tiling or _divide(problem, tilings(problem, gpu))[0]
    (stage,) = plans.stages(problem, "flash2", "forward")
    tables = tables_of(stage, problem, tiling, key_order)
    kernel = _forward_kernel(problem, tiling, variant_of(tables, report))
    return (walk_pass(stage, tables, kernel, gpu, persistent=True),)


def _divide(problem: Problem, possible: tuple[Tiling, ...]) -> list[Tiling]:
    """The tilings that divide the block mask's cells, if there is one."""
    cells = problem.block_mask
    return [
        t
        for t in possible
        if cells is None or not (cells.block_q % t.block_q or cells.block_k % t.block_k)
    ]


def _layout(problem: Problem, tiling: Tiling) -> Layout:
    d, dv = problem.head_dim, problem.head_dim_v
    sides = launch.padded(d, dv), launch.padded(dv, d)
    return Layout(tiling.block_q, tiling.block_k, *sides)


def _forward_kernel(problem: Problem, tiling: Tiling, variant: Variant) -> Kernel:
    layout = _layout(problem, tiling)
    return Kernel(
        *("hopper_forward.py", "hopper_forward", 128 * (layout.groups + 1), layout.nbytes),
        launch.macros(launch.constants(problem, tiling, variant)),
        (Box("q", 64, CHUNK), Box("k", tiling.block_k, CHUNK), Box("v", tiling.block_k, CHUNK)),
    )
