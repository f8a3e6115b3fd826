"""The portable kernels (sm_80 and later): which pass runs which kernel, and how it is launched.

A *kernel family* like this one offers `NAME`, `forward_passes` and `backward_passes`; the engine
(`cupy_engine`) owns arrays, errors and traces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from flashsim import plans
from flashsim.backends import launch
from flashsim.backends.launch import Gpu, Kernel, Variant
from flashsim.backends.lowering import Lowered, lower
from flashsim.problem import Problem
from flashsim.schedule import KeyOrder, Schedule
from flashsim.tiling import Tiling

NAME = "portable"


@dataclass(frozen=True, eq=False)
class Pass:
    """One launch: a stage of `flashsim.plans` with its walk and its kernel.

    Attributes
    ----------
    stage : plans.Stage
    tables : Lowered
    kernel : Kernel
    grid : tuple of int
        Thread blocks. A walk's blocks are numbered in one dimension, a row-wise pass's in two.
    walks : int
        How many times the walk is made: query heads, or key heads with keys outside.
    clump : int
        Heads whose tensors are worked on together, to stay in L2 (`take_work` in common.cuh).
    """

    stage: plans.Stage
    tables: Lowered
    kernel: Kernel
    grid: tuple[int, ...]
    walks: int
    clump: int


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
    tables = _tables(problem, tiling, key_order, "row")
    kernel = launch.forward_kernel(problem, tiling, _variant(tables, report))
    return (_walk(stage, tables, kernel, gpu),)


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
        by: Literal["row", "col"] = "row" if stage.outer == "queries" else "col"
        tables = _tables(problem, tiling, key_order, by)
        variant = _variant(tables, report)
        if stage.name in ("dkdv", "fused"):
            kernel = launch.dkdv_kernel(problem, tiling, variant, gpu, fused=fused)
            passes.append(_walk(stage, tables, kernel, gpu))
        elif stage.name == "dq":
            kernel = launch.dq_kernel(problem, tiling, variant, gpu)
            passes.append(_walk(stage, tables, kernel, gpu))
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


def _tables(
    problem: Problem, tiling: Tiling, key_order: KeyOrder, by: Literal["row", "col"]
) -> Lowered:
    outer: plans.Outer = "queries" if by == "row" else "keys"
    return lower(Schedule(problem, tiling, outer, key_order), by)


def _variant(tables: Lowered, report: str) -> Variant:
    return Variant(
        spans=tables.spans is not None,
        descending=tables.descending,
        counts=report != "",
        timeline=report == "timeline",
    )


def _walk(stage: plans.Stage, tables: Lowered, kernel: Kernel, gpu: Gpu) -> Pass:
    p = tables.schedule.problem
    walks, _ = plans.heads_of(stage, p)
    d, dv = p.head_dim, p.head_dim_v
    if tables.by == "row":  # a walk reads K and V; the query heads of a group share them
        heads_at_once = p.group * int(0.4 * gpu.l2_bytes) // (p.n_kv * (d + dv) * p.itemsize)
        clump = max(p.group, heads_at_once // p.group * p.group)
    else:  # a walk reads Q and dO and, fused, adds to a float32 dQ, for each head of its group
        per_walk = p.group * p.n_q * ((d + dv) * p.itemsize + 4 * d)
        clump = max(1, int(0.4 * gpu.l2_bytes) // per_walk)
    clump = min(clump, walks)
    return Pass(stage, tables, kernel, (tables.tiles * walks,), walks, clump)
