"""How many parts the keys are divided into on a device."""

from __future__ import annotations

from typing import Any

from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.plans import heads_of
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.split import WHOLE, Split, check_splits, fa3, fill_once
from flashsim.schedule.tiling import Tiling


def choose(
    problem: Problem,
    tiling: Tiling | None,
    device: Device,
    algorithm: str,
    splits: Any = "auto",
    pack_gqa: Any = True,
) -> tuple[Tiling, Split]:
    """The tiling (default: the one that fits) and the split of a forward pass.

    An algorithm that does not divide keys has `WHOLE`. More parts than any row tile visits key
    tiles are as many as it does. "auto" is `fill_once`, "fa3" is `fa3`, both
    with a thread block an SM and the row tile that visits the most key tiles; with a shared prefix,
    the blocks are as many as if all row tiles were as long as that one.

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
