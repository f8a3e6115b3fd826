"""Builds a trace from a kernel's notes, the sizes of the tiles that it visited."""

import numpy as np

from flashsim.counts.traffic import strip_rows
from flashsim.engines.cpu.tables import NOTE
from flashsim.errors import MemoryModelError
from flashsim.problem.hardware import Device
from flashsim.schedule.plans import Stage
from flashsim.schedule.schedule import Schedule
from flashsim.trace.assembly import assemble, assemble_rows, tile_bytes
from flashsim.trace.events import StageTrace


def stage_trace(
    stage: Stage, schedule: Schedule, device: Device, steps: np.ndarray, visits: np.ndarray
) -> StageTrace:
    """Return the trace of one stage, from the tile sizes that the kernel wrote down.

    `steps`, an int64 array (loops, T), holds the number of rows of each outer tile, or of columns
    if the loop is KV-outer. `visits`, an int64 array (loops, members, n), holds rows * `NOTE` +
    columns for each tile pair, or 0 for a skipped pair. `MemoryModelError` is raised if two heads
    visited different tiles.
    """
    if (steps != steps[:1]).any() or (visits != visits[:1]).any():
        raise MemoryModelError(
            f"in stage {stage.name!r}, two heads did not visit the same tiles; this is a bug in "
            "flashsim's CPU engine, so please report it"
        )
    size, note = steps[0], visits[0]
    if stage.whole_rows:
        return assemble_rows(stage, schedule, size, strip_rows(stage, schedule, device))
    extent = (size, 0) if stage.outer == "queries" else (0, size)
    outer = tile_bytes((*stage.before, *stage.after), *extent)
    visit = tile_bytes(stage.visit, note // NOTE, note % NOTE)
    return assemble(stage, schedule, outer, visit, note > 0)
