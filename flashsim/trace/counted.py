"""`counted`: builds a trace without a run, from the dataflow table and a schedule."""

import numpy as np

from flashsim.counts.traffic import Traffic, strip_rows
from flashsim.errors import OptionError, UnsupportedError
from flashsim.problem.hardware import Device
from flashsim.schedule import plans
from flashsim.schedule.schedule import Schedule
from flashsim.trace.assembly import assemble, assemble_rows, tile_bytes
from flashsim.trace.events import StageTrace
from flashsim.trace.trace import Trace

#: The `backend` of a trace that was counted, not executed.
COUNTED = "counted"
#: The largest number of events of one head; they take about half a gigabyte.
MOST_EVENTS = 1 << 24


def counted(traffic: Traffic) -> Trace:
    """Return the trace of a pass, without a run: the events that the simulator would record.

    Raises
    ------
    UnsupportedError
        If the algorithm splits keys (FlashDecoding), because the dataflow does not list the events
        of the parts.
    OptionError
        If one head has more than `MOST_EVENTS` events.
    """
    if any(stage.parts for stage in traffic.stages):
        raise UnsupportedError(
            f"{traffic.algorithm!r} splits keys into parts, whose events cannot be listed "
            "without a run; use flashsim.run(..., trace=True), which records them"
        )
    n = sum(_events(stage, traffic.schedule(stage)) for stage in traffic.stages)
    if n > MOST_EVENTS:
        raise OptionError(
            f"one head has about {n:,} events, but the limit for listing them is "
            f"{MOST_EVENTS:,}; use larger tiles or a shorter sequence"
        )
    return Trace(
        traffic.problem,
        traffic.device,
        traffic.algorithm,
        traffic.direction,
        COUNTED,
        [stage_trace(stage, traffic.schedule(stage), traffic.device) for stage in traffic.stages],
        {"events": "counted from the schedule; nothing was executed"},
    )


def stage_trace(stage: plans.Stage, schedule: Schedule, device: Device) -> StageTrace:
    """Return the trace of one stage: all transfers for every tile that the schedule lists."""
    heights, widths = schedule.heights, schedule.widths
    if stage.whole_rows:
        return assemble_rows(stage, schedule, heights, strip_rows(stage, schedule, device))
    by_row = stage.outer == "queries"
    ptr, inner, _ = schedule.row_csr if by_row else schedule.col_csr
    outer = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    i, j = (outer, inner) if by_row else (inner, outer)
    steps = tile_bytes((*stage.before, *stage.after), *((heights, 0) if by_row else (0, widths)))
    members = schedule.problem.group if stage.per == "group" else 1
    visits = np.stack([tile_bytes(stage.visit, heights[i], widths[j])] * members)
    return assemble(stage, schedule, steps, visits, np.full(visits.shape[:2], bool(stage.visit)))


def _events(stage: plans.Stage, schedule: Schedule) -> int:
    """Return an estimate of how many events a stage records for one head, without listing tiles."""
    if stage.whole_rows:
        return schedule.problem.n_q * (2 * len(stage.visit) + 1)
    members = schedule.problem.group if stage.per == "group" else 1
    visits = schedule.sums.visits * members if stage.visit else 0
    return visits * (2 * len(stage.visit) + 1)
