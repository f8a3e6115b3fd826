"""How many parts a device divides the keys into, and how many thread blocks fill the device."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashsim.problem.hardware import KIB, Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.plans import heads_of
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.split import WHOLE, Split, check_splits, fa3, fill_once
from flashsim.schedule.tiling import Tiling

#: Shared memory that CUDA keeps for itself, a block (CUDA C++ Programming Guide, compute
#: capability 8.0 and later).
RESERVED = 1 * KIB
#: An SM holds 2048 threads [CUDA guide]; a block of attention has at least 4 warps.
MOST_BLOCKS = 16


class Filling(NamedTuple):
    """How well the thread blocks of a forward pass fill a device.

    Attributes
    ----------
    tiling, split : Tiling, Split
        The chosen tiling and split.
    per_sm : int
        Thread blocks that fit on an SM side by side.
    needed : int
        Blocks that fill every SM: number of SMs x blocks per SM.
    whole : int
        Blocks of the pass if keys are not divided.
    blocks : int
        Blocks of the pass.
    """

    tiling: Tiling
    split: Split
    per_sm: int
    needed: int
    whole: int
    blocks: int


def choose(
    problem: Problem,
    tiling: Tiling | None,
    device: Device,
    algorithm: str,
    splits: Any = "auto",
    pack_gqa: Any = True,
) -> tuple[Tiling, Split]:
    """The tiling (default: the one that fits) and the split of a forward pass.

    An algorithm that does not divide keys has the split `WHOLE`. No row tile gets more parts than
    the most key tiles that any row tile visits. "auto" uses `fill_once` and "fa3" uses `fa3`. Both
    assume one thread block per SM and the row tile that visits the most key tiles. With a shared
    prefix, the number of row tiles is replaced by all visits divided by that row tile's visits.

    Raises
    ------
    OptionError, DTypeError
        For other splits, or other types.
    """
    if not plans.splits_keys(algorithm):
        return tiling or Tiling.fit(problem, device, algorithm), WHOLE
    check_splits(splits)
    finest = Split(2**62, pack_gqa)
    tiling = tiling or Tiling.fit(problem, device, algorithm, split=finest)
    walked = Schedule(problem, tiling, split=finest)
    most = int(walked.part_counts.max())  # key tiles
    if isinstance(splits, str):
        walks, _ = heads_of(plans.stages(problem, algorithm, split=finest)[0], problem)
        blocks = walks * walked.t_r
        if problem.shared_prefix:
            blocks = -(-walks * int(walked.visit_counts.sum()) // most)
        rule = fill_once if splits == "auto" else fa3
        splits = rule(blocks, device.sm_count, most)
    return tiling, Split(min(splits, most), pack_gqa)


def fill(
    problem: Problem,
    device: Device,
    algorithm: str = "flash-decode",
    tiling: Tiling | None = None,
    splits: Any = "auto",
    pack_gqa: Any = True,
) -> Filling:
    """The number of thread blocks that fill a device, and the number that a forward pass has.

    Raises
    ------
    OptionError, DTypeError, SramOverflow
        As for `choose`.
    """
    tiling, split = choose(problem, tiling, device, algorithm, splits, pack_gqa)
    schedule = Schedule(problem, tiling, split=split)
    stage = plans.stages(problem, algorithm, split=split)[0]
    walks, per_sm = heads_of(stage, problem)[0], occupancy(stage, schedule, device)
    blocks = walks * int(schedule.part_counts.sum())
    return Filling(tiling, split, per_sm, device.sm_count * per_sm, walks * schedule.t_r, blocks)


def occupancy(stage: plans.Stage, schedule: Schedule, device: Device) -> int:
    """How many thread blocks of a stage fit on one SM side by side, given their on-chip bytes.

    Registers are part of the on-chip bytes in this model, so a kernel that keeps its accumulators
    in registers may fit more blocks. Pass `blocks_per_sm` for a kernel you know.
    """
    tile = schedule.tiling.clip(schedule.problem, schedule.split)
    rows = 1 if stage.whole_rows else tile.block_q
    held = sum(buffer.nbytes(rows, tile.block_k) for buffer in stage.buffers)
    return max(1, min(MOST_BLOCKS, device.sram_per_sm // (held + RESERVED)))
