"""The portable kernels (sm_80 and later): which pass runs which kernel, and how it is launched.

A *kernel family* offers `NAME`, `forward_passes`, `backward_passes` and `load`, its compiler; the
engine (`cupy_gpu`) owns arrays, errors and traces. This module is one, `Portable` makes more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from flashsim.backends.families import fitting, portable_kernels
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.backends.launch.passes import Pass, tables_of, variant_of, walk_pass
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.schedule import KeyOrder
from flashsim.schedule.tiling import Tiling


@dataclass(frozen=True)
class Portable:
    """The family whose kernels are compiled for `like`, but for what a walk and a report ask."""

    like: Variant = fitting.PLAIN
    NAME: str = "portable"
    load: Callable[[Kernel, int], Any] = nvrtc.load

    def forward_passes(
        self, problem: Problem, tiling: Tiling | None, gpu: Gpu, key_order: KeyOrder, report: str
    ) -> tuple[Pass, ...]:
        """The forward pass: one launch.

        Parameters
        ----------
        tiling : Tiling or None
            None takes `fitting.default_tiling`.
        report : {"", "counts", "timeline"}
            What the kernels record.

        Raises
        ------
        TilingError, UnsupportedError
        """
        return _forward_passes(self.like, problem, tiling, gpu, key_order, report)

    def backward_passes(
        self,
        problem: Problem,
        tiling: Tiling | None,
        gpu: Gpu,
        key_order: KeyOrder,
        report: str,
        algorithm: str,
    ) -> tuple[Pass, ...]:
        """The backward pass, in the order of its launches; as `forward_passes`."""
        return _backward_passes(self.like, problem, tiling, gpu, key_order, report, algorithm)


@lru_cache(maxsize=256)
def _forward_passes(
    like: Variant,
    problem: Problem,
    tiling: Tiling | None,
    gpu: Gpu,
    key_order: KeyOrder,
    report: str,
) -> tuple[Pass, ...]:
    tiling = _tiling(like, problem, tiling, gpu, "forward", fused=False)
    (stage,) = plans.stages(problem, "flash2", "forward")
    tables = tables_of(stage, problem, tiling, key_order)
    variant = _variant(like, variant_of(tables, report))
    return (
        walk_pass(stage, tables, portable_kernels.forward_kernel(problem, tiling, variant), gpu),
    )


@lru_cache(maxsize=256)
def _backward_passes(
    like: Variant,
    problem: Problem,
    tiling: Tiling | None,
    gpu: Gpu,
    key_order: KeyOrder,
    report: str,
    algorithm: str,
) -> tuple[Pass, ...]:
    fused = algorithm == "flash2-fused"
    tiling = _tiling(like, problem, tiling, gpu, "backward", fused=fused)
    passes = []
    for stage in plans.stages(problem, algorithm, "backward"):
        tables = tables_of(stage, problem, tiling, key_order)
        variant = _variant(like, variant_of(tables, report))
        if stage.name in ("dkdv", "fused"):
            kernel = portable_kernels.dkdv_kernel(problem, tiling, variant, gpu, fused=fused)
            passes.append(walk_pass(stage, tables, kernel, gpu))
        elif stage.name == "dq":
            kernel = portable_kernels.dq_kernel(problem, tiling, variant, gpu)
            passes.append(walk_pass(stage, tables, kernel, gpu))
        else:
            name = f"flash_{stage.name}"
            kernel = portable_kernels.rows_kernel(problem, tiling, variant, name, fused=fused)
            heads = problem.batch * problem.heads
            passes.append(Pass(stage, tables, kernel, (tables.tiles, heads), heads, 1))
    return tuple(passes)


def _variant(like: Variant, asked: Variant) -> Variant:
    return replace(asked, tf32=like.tf32, python=like.python)


def _tiling(
    like: Variant,
    problem: Problem,
    tiling: Tiling | None,
    gpu: Gpu,
    direction: str,
    *,
    fused: bool,
) -> Tiling:
    if tiling is None:
        return fitting.default_tiling(problem, gpu, direction, like, fused=fused)
    fitting.check(problem, tiling, gpu, direction, like, fused=fused)
    return tiling


_plain = Portable()
NAME, load = _plain.NAME, _plain.load
forward_passes, backward_passes = _plain.forward_passes, _plain.backward_passes
#: float32 products on tensor cores, their operands rounded to tf32.
TF32 = Portable(replace(fitting.PLAIN, tf32=True), "portable, tf32")
