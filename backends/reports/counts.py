"""Convert the bytes that a GPU kernel's threads report into trace events.

A kernel reports into two uint32 arrays. The array for iterations of the outer loop is ``(walks,
tiles, SLOTS)``, and the array for visits (tile pairs) is ``(batch * heads, n_visits, SLOTS)``. Slot
n holds the bytes of transfer n. The stage (`plans.Stage`) lists the transfers per visit, and per
outer iteration before and after the visits. Kernels do not report events on chip (alloc, free,
compute); these come from the stage.
"""

import numpy as np

from flashsim.errors import TraceError
from flashsim.schedule import plans
from flashsim.schedule.schedule import Schedule
from flashsim.trace.assembly import assemble, tile_bytes
from flashsim.trace.events import StageTrace


def stage_trace(
    stage: plans.Stage, schedule: Schedule, tile_counts: np.ndarray, visit_counts: np.ndarray
) -> StageTrace:
    """Return a stage's trace events with the bytes that the kernel reported.

    `tile_counts` is uint32 (walks, tiles, SLOTS), and `visit_counts` uint32 (batch * heads,
    n_visits, SLOTS), or (walks, n_visits, SLOTS) if heads are packed. `TraceError` means that two
    heads moved different numbers of bytes, which only a broken kernel does.
    """
    repeat, _ = plans.heads_of(stage, schedule.problem)
    tiles = one_walk(stage.name, tile_counts.reshape(repeat, -1, tile_counts.shape[-1]))
    visits = one_walk(stage.name, visit_counts.reshape(repeat, -1, visit_counts.shape[-1]))
    members = plans.members_of(stage, schedule.problem, schedule.split)
    visits = visits.reshape(members, -1, visits.shape[-1])
    heights, widths = (
        np.diff(x[:, :2])[:, 0].astype(np.int64) for x in (schedule.rows, schedule.cols)
    )
    by_row = stage.outer == "queries"
    ptr, inner, _ = schedule.row_csr if by_row else schedule.col_csr
    outer = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    i, j = (outer, inner) if by_row else (inner, outer)
    rows, cols = (heights, 0) if by_row else (0, widths)
    step = tile_bytes((*stage.before, *stage.after), rows, cols, tiles)
    visit = tile_bytes(stage.visit, heights[i], widths[j], visits)
    executed = np.full(visit.shape[:2], bool(stage.visit))
    return assemble(stage, schedule, step, visit, executed)


def one_walk(name: str, counts: np.ndarray) -> np.ndarray:
    """Return the counts of one head as int64; raise `TraceError` if the heads differ."""
    if (counts != counts[:1]).any():
        walk, record, slot = (int(x[0]) for x in np.nonzero(counts != counts[:1]))
        raise TraceError(
            f"in stage {name!r}, all heads must move the same bytes, but head {walk} reported "
            f"{int(counts[walk, record, slot]):,} B and head 0 reported "
            f"{int(counts[0, record, slot]):,} B (record {record}, slot {slot}); the kernel has "
            "a bug"
        )
    return counts[0].astype(np.int64)
