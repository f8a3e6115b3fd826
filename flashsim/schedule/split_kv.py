"""Chooses the number of parts of the keys, and computes how many thread blocks fill a device."""

from typing import Any, NamedTuple

from flashsim.problem import checks
from flashsim.problem.hardware import KIB, Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.plans import heads_of
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.split import Split, check_splits, fa3, fill_once
from flashsim.schedule.tiling import Tiling

#: Bytes of shared memory per thread block that CUDA reserves (CUDA C++ Programming Guide, compute
#: capability 8.0 and later).
RESERVED = 1 * KIB
#: An SM runs up to 2048 threads (CUDA C++ Programming Guide); a block of attention has at least 4
#: warps.
MOST_BLOCKS = 16


class Filling(NamedTuple):
    """How well the thread blocks of a forward pass fill a device.

    `per_sm` blocks run on one SM at the same time, so `needed` blocks fill all SMs. The pass has
    `blocks` blocks with the chosen split, and would have `whole` without a split.
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
    pack_gqa: Any = None,
) -> tuple[Tiling, Split]:
    """Return the tiling (default: `Tiling.fit`) and the split of a forward pass.

    If the algorithm does not split keys, there is one part, and query heads are packed only if
    `pack_gqa` is true. Otherwise they are packed unless `pack_gqa` is false. The number of parts is
    at most the largest number of key tiles that any row tile visits. The function `fill_once`
    (``splits="auto"``) or `fa3` (``splits="fa3"``) chooses the number of parts. Both functions
    assume one thread block per SM, and row tiles that all visit as many key tiles as the longest
    row tile. With a shared prefix, the assumed number of row tiles is all visits divided by the
    longest row tile's visits.
    """
    if not plans.splits_keys(algorithm):
        asked = False if pack_gqa is None else checks.flag("pack_gqa", pack_gqa)
        packed = asked and problem.group > 1
        split = Split(pack_gqa=packed)
        return tiling or Tiling.fit(problem, device, algorithm, split=split), split
    check_splits(splits)
    pack_gqa = True if pack_gqa is None else pack_gqa
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
    pack_gqa: Any = None,
) -> Filling:
    """Return a `Filling`: the thread blocks that fill a device, and the forward pass's blocks."""
    tiling, split = choose(problem, tiling, device, algorithm, splits, pack_gqa)
    schedule = Schedule(problem, tiling, split=split)
    stage = plans.stages(problem, algorithm, split=split)[0]
    walks, per_sm = heads_of(stage, problem)[0], occupancy(stage, schedule, device)
    blocks = walks * int(schedule.part_counts.sum())
    return Filling(tiling, split, per_sm, device.sm_count * per_sm, walks * schedule.t_r, blocks)


def occupancy(stage: plans.Stage, schedule: Schedule, device: Device) -> int:
    """Return how many of a stage's thread blocks fit on one SM with all on-chip buffers.

    Accumulators count as if they were in shared memory. A kernel with accumulators in registers may
    fit more blocks; pass the real number as `L2Model(blocks_per_sm=...)`.
    """
    tile = schedule.tiling.clip(schedule.problem, schedule.split)
    rows = 1 if stage.whole_rows else tile.block_q
    held = sum(buffer.nbytes(rows, tile.block_k) for buffer in stage.buffers)
    return max(1, min(MOST_BLOCKS, device.sram_per_sm // (held + RESERVED)))
