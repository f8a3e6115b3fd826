"""The portable kernels (sm_80 and later): which pass runs which kernel, and how it is launched.

A *kernel family* like this one offers `NAME`, `forward_passes`, `backward_passes` and `load`, its
compiler; the engine (`cupy_engine`) owns arrays, errors and traces.
"""

from __future__ import annotations

from functools import lru_cache

from flashsim import plans
from flashsim.backends import compiler, launch
from flashsim.backends.launch import Gpu
from flashsim.backends.passes import Pass, tables_of, variant_of, walk_pass
from flashsim.problem import Problem
from flashsim.schedule import KeyOrder
from flashsim.tiling import Tiling

NAME = "portable"
load = compiler.load


@lru_cache(maxsize=256)
def forward_passes(
    problem: Problem, tiling: Tiling | None, gpu: Gpu, key_order: KeyOrder, report: str
) -> tuple[Pass, ...]:
    """The forward pass: one launch.

    Parameters
    ----------
    tiling : Tiling or None
        None takes `launch.default_tiling`.
    report : {"", "counts", "timeline"}
        What the kernels record.

    Raises
    ------
    TilingError, UnsupportedError
    """
    tiling = _tiling(problem, tiling, gpu, "forward", fused=False)
    (stage,) = plans.stages(problem, "flash2", "forward")
    tables = tables_of(stage, problem, tiling, key_order)
    kernel = launch.forward_kernel(problem, tiling, variant_of(tables, report))
    return (walk_pass(stage, tables, kernel, gpu),)


@lru_cache(maxsize=256)
def backward_passes(
    problem: Problem,
    tiling: Tiling | None,
    gpu: Gpu,
    key_order: KeyOrder,
    report: str,
    algorithm: str,
) -> tuple[Pass, ...]:
    """The backward pass, in the order of its launches; as `forward_passes`."""
    fused = algorithm == "flash2-fused"
    tiling = _tiling(problem, tiling, gpu, "backward", fused=fused)
    passes = []
    for stage in plans.stages(problem, algorithm, "backward"):
        tables = tables_of(stage, problem, tiling, key_order)
        variant = variant_of(tables, report)
        if stage.name in ("dkdv", "fused"):
            kernel = launch.dkdv_kernel(problem, tiling, variant, gpu, fused=fused)
            passes.append(walk_pass(stage, tables, kernel, gpu))
        elif stage.name == "dq":
            kernel = launch.dq_kernel(problem, tiling, variant, gpu)
            passes.append(walk_pass(stage, tables, kernel, gpu))
        else:
            name = f"flash_{stage.name}"
            kernel = launch.rows_kernel(problem, tiling, variant, name, fused=fused)
            heads = problem.batch * problem.heads
            passes.append(Pass(stage, tables, kernel, (tables.tiles, heads), heads, 1))
    return tuple(passes)


def _tiling(
    problem: Problem, tiling: Tiling | None, gpu: Gpu, direction: str, *, fused: bool
) -> Tiling:
    if tiling is None:
        return launch.default_tiling(problem, gpu, direction, fused=fused)
    launch.check(problem, tiling, gpu, direction, fused=fused)
    return tiling
