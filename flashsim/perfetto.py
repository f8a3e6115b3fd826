"""Traces as Chrome trace events, for https://ui.perfetto.dev or chrome://tracing.

A real timeline (``trace="timeline"`` on a GPU) keeps its own clock. A simulated trace has none, so
one is made up from the device's peaks: an SM gets 1 / sm_count of the HBM bandwidth and of the
FLOP/s, a step moves its tiles and then computes, nothing overlaps. It shows order and proportion;
it does not predict a kernel's time.

One thread id stands for one SM and pipe, and within it slices nest.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flashsim.errors import OptionError
from flashsim.events import COMPUTE, OPS, PHASES, ROLES, TENSORS, TRANSFERS, StageTrace, gain
from flashsim.trace import Trace
from flashsim.work import TileOp, stage_work, total_flops

PIPES = ("block", "memory", "compute")
_LANES = 64  # thread ids kept for each SM: pipes, or blocks that share it
_COUNTERS = 1_000_000  # a process id of its own for the counters
Slice = dict[str, Any]


def write(trace: Trace, path: str | Path, *, heads: int = 1) -> Path:
    """Write a trace as Chrome trace events (JSON).

    Parameters
    ----------
    trace : Trace
    path : path-like
    heads : int
        Of a simulated trace: how many walks of each stage to lay out, at most all.

    Returns
    -------
    Path

    Raises
    ------
    OptionError
        If `heads` is not positive.
    """
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise OptionError(f"heads must be a positive integer, got {heads!r}")
    events = list(_real(trace) if trace.timeline is not None else _simulated(trace, heads))
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "algorithm": trace.algorithm,
            "direction": trace.direction,
            "device": trace.device.name,
            "clock": "GPU" if trace.timeline is not None else "made up from the device's peaks",
            **{key: str(value) for key, value in trace.provenance.items()},
        },
    }
    path = Path(path)
    path.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    return path


# -- real timelines -------------------------------------------------------------------------------


def lanes(spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which lane of its SM each span goes to, so that blocks which share an SM do not overlap.

    Parameters
    ----------
    spans : ndarray of dtype `TIMELINE`, (n,)

    Returns
    -------
    lane, count : ndarray of int, (n,)
        The lane, and how many lanes the span's SM has. All spans of a visit by one role share one.
    """
    fields = ("stage", "sm", "role", "head", "i", "j", "visit")
    _, owner = np.unique(spans[list(fields)], return_inverse=True)
    n = int(owner.max(initial=-1)) + 1
    start, end = np.full(n, np.iinfo(np.int64).max), np.full(n, np.iinfo(np.int64).min)
    sm, role = np.zeros(n, np.int64), np.zeros(n, np.int64)
    np.minimum.at(start, owner, spans["start_ns"])
    np.maximum.at(end, owner, spans["end_ns"])
    sm[owner], role[owner] = spans["sm"], spans["role"]
    lane = np.zeros(n, np.int64)
    free: dict[int, list[int]] = {}  # when each lane of an SM ends
    for at in np.lexsort((role, start)):
        ends = free.setdefault(int(sm[at]), [])
        fitting = [k for k, stop in enumerate(ends) if stop <= start[at]]
        lane[at] = fitting[0] if fitting else len(ends)
        if fitting:
            ends[fitting[0]] = int(end[at])
        else:
            ends.append(int(end[at]))
    counts = np.array([len(free[int(s)]) for s in sm], np.int64)
    return lane[owner], counts[owner]


def _real(trace: Trace) -> Iterator[Slice]:
    spans = trace.timeline
    assert spans is not None
    if not len(spans):
        return
    lane, _ = lanes(spans)
    origin = int(spans["start_ns"].min())
    names: dict[tuple[int, int], None] = {}
    # Outer spans first where two begin together: slices nest in the order they are listed.
    for at in np.lexsort((-spans["end_ns"], spans["start_ns"])):
        s, thread = spans[at], int(lane[at])
        names[int(s["sm"]), thread] = None
        yield {
            "ph": "X",
            "name": PHASES[s["phase"]],
            "cat": trace.stages[s["stage"]].name,
            "pid": int(s["sm"]),
            "tid": int(s["sm"]) * _LANES + thread,
            "ts": (int(s["start_ns"]) - origin) / 1000,
            "dur": (int(s["end_ns"]) - int(s["start_ns"])) / 1000,
            "args": {
                **{key: int(s[key]) for key in ("head", "i", "j", "visit")},
                "role": ROLES[s["role"]],
            },
        }
    for sm, thread in names:
        yield _name("process_name", sm, 0, f"SM {sm}")
        yield _name("thread_name", sm, sm * _LANES + thread, f"lane {thread}")


# -- simulated traces -----------------------------------------------------------------------------


def _simulated(trace: Trace, heads: int) -> Iterator[Slice]:
    clock = _Clock(trace)
    start = 0.0
    moved: list[tuple[float, int]] = []
    for stage in trace.stages:
        ready = [(start, sm) for sm in range(trace.device.sm_count)]
        steps = _outer_steps(stage)
        latest = start
        for walk in range(min(heads, stage.repeat)):
            for block in steps:
                at, sm = heapq.heappop(ready)  # the SM that is free first takes the next block
                slices, end, transfers = clock.block(stage, block, at, sm, walk)
                yield from slices
                moved += transfers
                heapq.heappush(ready, (end, sm))
                latest = max(latest, end)
        start = latest
    for sm in sorted(clock.used):
        yield _name("process_name", sm, 0, f"SM {sm}")
        for tid, pipe in enumerate(PIPES):
            yield _name("thread_name", sm, sm * _LANES + tid, pipe)
    yield _name("process_name", _COUNTERS, 0, "totals")
    total = 0
    for ts, nbytes in sorted(moved):
        total += nbytes
        yield _counter("HBM bytes", _COUNTERS, ts, total)


def _outer_steps(stage: StageTrace) -> list[np.ndarray]:
    """The events of each outer step, in order: what one thread block does."""
    events = stage.events
    ends = (events["op"] == COMPUTE) & (events["visit"] < 0)
    inside = gain(events)
    # A block begins with its first transfer and ends when everything it held is freed.
    seen = np.cumsum(ends)
    closed = np.flatnonzero((np.cumsum(inside) == 0) & (seen > 0))
    last = closed[np.searchsorted(seen[closed], np.arange(1, seen[-1] + 1))]
    return np.split(events, last + 1)[: len(last)]


class _Clock:
    """Turns the events of a block into slices, by the device's share for one SM."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.used = trace, set[int]()
        device, dtype = trace.device, trace.problem.dtype
        per_us = 1e-6 / device.sm_count  # one SM's share in a microsecond
        matmul = device.peak(dtype)
        self.bytes_per_us = device.hbm_bandwidth * per_us
        self.matmul_per_us = matmul * per_us
        self.other_per_us = device.cuda_flops.get("float32", matmul) * per_us

    def block(
        self, stage: StageTrace, events: np.ndarray, start: float, sm: int, walk: int
    ) -> tuple[list[Slice], float, list[tuple[float, int]]]:
        """Slices, end and transfers (time, bytes) of one outer step that begins at `start`."""
        self.used.add(sm)
        trace = self.trace
        work = stage_work(trace.problem, trace.algorithm, trace.direction, stage.name)
        slices: list[Slice] = []
        moved: list[tuple[float, int]] = []
        held, now, begun = 0, start, start
        outer = events[0]["i"] if stage.stage.outer == "queries" else events[0]["j"]
        for e, change in zip(events, gain(events).tolist(), strict=True):
            if e["op"] in TRANSFERS:
                took = int(e["bytes"]) / self.bytes_per_us
                name = f"{OPS[e['op']]} {TENSORS[e['tensor']]}"
                slices.append(_slice(name, "HBM", sm, 1, now, took, e, stage, walk))
                now += took
                moved.append((now, int(e["bytes"])))
            elif e["op"] == COMPUTE:
                ops = work.visit if e["visit"] >= 0 else work.outer
                for op in ops:
                    took = self._duration(op, stage, e)
                    slices.append(_slice(op.name, "compute", sm, 2, now, took, e, stage, walk))
                    now += took
                if e["visit"] >= 0:
                    name = f"visit ({e['i']}, {e['j']})"
                    slices.append(_slice(name, "visit", sm, 0, begun, now - begun, e, stage, walk))
                begun = now
            if change:
                held += change
                slices.append(_counter("SRAM bytes", sm, now, held))
        whole = _slice(
            f"{stage.name} {outer}", "block", sm, 0, start, now - start, events[0], stage, walk
        )
        return [whole, *slices], now, moved

    def _duration(self, op: TileOp, stage: StageTrace, e: np.void) -> float:
        """Microseconds of one tile operation."""
        schedule, i, j = stage.schedule, int(e["i"]), int(e["j"])
        # As `Trace.flops`: with keys outside, the end of an outer step has columns alone.
        rows = 0 if i < 0 else int(schedule.rows[i, 1] - schedule.rows[i, 0])
        span = schedule.key_counts[i] if j < 0 else schedule.cols[j, 1] - schedule.cols[j, 0]
        cols = int(span)
        flops = total_flops((op,), rows, cols, rows * cols)
        matmul = flops.pop("matmul")
        return matmul / self.matmul_per_us + sum(flops.values()) / self.other_per_us


def _slice(
    name: str, cat: str, sm: int, pipe: int, ts: float, dur: float, e: np.void, stage: StageTrace,
    walk: int,
) -> Slice:  # fmt: skip
    args = {key: int(e[key]) for key in ("i", "j", "visit", "bytes") if e[key] >= 0}
    args["head"] = walk * stage.stride + int(e["head"])
    return {
        "ph": "X", "name": name, "cat": f"{stage.name},{cat}", "pid": sm, "tid": sm * _LANES + pipe,
        "ts": ts, "dur": dur, "args": args,
    }  # fmt: skip


def _counter(name: str, pid: int, ts: float, value: int) -> Slice:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": ts, "args": {"bytes": value}}


def _name(kind: str, pid: int, tid: int, name: str) -> Slice:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
