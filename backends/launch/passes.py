"""A pass: one launch, with its walk over the schedule. Shared by the kernel families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.backends.launch.lowering import Lowered, lower
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.clump import clump_size
from flashsim.schedule.schedule import KeyOrder, Schedule
from flashsim.schedule.tiling import Tiling


@dataclass(frozen=True, eq=False)
class Pass:
    """One launch: a stage of `flashsim.schedule.plans` with its walk and its kernel.

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


def tables_of(stage: plans.Stage, problem: Problem, tiling: Tiling, key_order: KeyOrder) -> Lowered:
    """The walk of a stage."""
    by: Literal["row", "col"] = "row" if stage.outer == "queries" else "col"
    return lower(Schedule(problem, tiling, stage.outer, key_order), by)


def variant_of(tables: Lowered, report: str) -> Variant:
    """What a walk and a report ("", "counts" or "timeline") ask of a kernel."""
    return Variant(
        spans=tables.spans is not None,
        descending=tables.descending,
        counts=report != "",
        timeline=report == "timeline",
    )


def walk_pass(
    stage: plans.Stage, tables: Lowered, kernel: Kernel, gpu: Gpu, *, persistent: bool = False
) -> Pass:
    """The pass of a kernel that walks the schedule: a block for each outer tile of each walk.

    A persistent kernel gets one block a multiprocessor, and takes its items itself.
    """
    problem = tables.schedule.problem
    walks, _ = plans.heads_of(stage, problem)
    items = tables.tiles * walks
    blocks = min(items, gpu.multiprocessors) if persistent else items
    clump = clump_size(
        stage, problem, tables.tiles, l2_bytes=gpu.l2_bytes, processors=gpu.multiprocessors
    )
    return Pass(stage, tables, kernel, (blocks,), walks, clump)
