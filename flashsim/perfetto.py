"""Traces as Chrome trace events, for https://ui.perfetto.dev or chrome://tracing.

A real timeline (``trace="timeline"`` on a GPU) keeps its own clock. A simulated trace has none, so
one is made up from the device's peaks: an SM gets 1 / sm_count of the HBM bandwidth and of the
FLOP/s, a step moves its tiles and then computes, nothing overlaps. It shows order and proportion;
it does not predict a kernel's time.

One thread id stands for one SM and pipe (simulated), or one SM, role and layer of overlapping
visits (real), and within it slices nest.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flashsim import timeline
from flashsim.errors import OptionError
from flashsim.events import COMPUTE, OPS, PHASES, ROLES, TENSORS, TRANSFERS, StageTrace, gain
from flashsim.trace import Trace
from flashsim.work import TileOp, stage_work, total_flops

PIPES = ("block", "memory", "compute")
_LANES = 256  # thread ids kept for each SM: pipes, or rows of the blocks that share it
VISIT, STORE = PHASES.index("visit"), PHASES.index("store")
_COUNTERS = 1_000_000  # a process id of its own for the counters
Slice = dict[str, Any]


def write(trace: Trace, path: str | Path, *, heads: int = 1) -> Path:
    """Write a trace as Chrome trace events (JSON).

    Parameters
    ----------
    trace : Trace
    path : path-like
        One that ends in .gz is compressed, which Perfetto opens as well.
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
    data = json.dumps(document, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


# -- real timelines -------------------------------------------------------------------------------


def _real(trace: Trace) -> Iterator[Slice]:
    spans = trace.timeline
    assert spans is not None
    if not len(spans):
        return
    placed = timeline.rows(trace, spans)
    origin = int(spans["start_ns"].min())
    thread = spans["sm"].astype(np.int64) * _LANES + placed.row
    # Outer spans first where two begin together: slices nest in the order they are listed.
    for at in np.lexsort((-spans["end_ns"], spans["start_ns"])).tolist():
        s = spans[at]
        yield {
            "ph": "X",
            "name": f"visit ({s['i']}, {s['j']})" if s["phase"] == 0 else PHASES[s["phase"]],
            "cat": f"{trace.stages[s['stage']].name},{ROLES[s['role']]}",
            "pid": int(s["sm"]),
            "tid": int(thread[at]),
            "ts": (int(s["start_ns"]) - origin) / 1000,
            "dur": (int(s["end_ns"]) - int(s["start_ns"])) / 1000,
            "args": {key: int(s[key]) for key in ("head", "i", "j", "visit")},
        }
    for sm in np.unique(spans["sm"]).tolist():
        yield _name("process_name", sm, 0, f"SM {sm}")
    for tid in np.unique(thread).tolist():
        yield _name("thread_name", tid // _LANES, tid, placed.names[tid % _LANES])
    yield from _real_counters(trace, spans, placed.block, origin)


def _real_counters(
    trace: Trace, spans: np.ndarray, block: np.ndarray, origin: int
) -> Iterator[Slice]:
    """Requested HBM bytes, counted when a block's part ends; SRAM that the blocks of an SM hold.

    The timeline knows when, the events know how much: bytes of a visit count at its end, those of a
    whole row or column when it is stored. A block holds its stage's peak while its last role works.
    """
    yield _name("process_name", _COUNTERS, 0, "totals")
    moved: list[tuple[int, int]] = []
    held: list[tuple[int, int, int]] = []
    for number in np.unique(spans["stage"]).tolist():
        stage, mine = trace.stages[number], spans["stage"] == number
        last = mine & (spans["role"] == spans["role"][mine].max())  # of a visit's roles
        parts = spans[last & np.isin(spans["phase"], (VISIT, STORE))]
        moved += zip(parts["end_ns"].tolist(), _part_bytes(stage, parts).tolist(), strict=True)
        peak = int(np.cumsum(gain(stage.events)).max(initial=0))
        for one in np.unique(block[mine]).tolist():
            life = spans[last & (block == one)]
            sm = int(life["sm"][0])
            held.append((int(life["start_ns"].min()), peak, sm))
            held.append((int(life["end_ns"].max()), -peak, sm))
    total = 0
    for end, nbytes in sorted(moved):
        total += nbytes
        yield _counter("HBM bytes", _COUNTERS, (end - origin) / 1000, total)
    on_chip: dict[int, int] = {}
    for when, change, sm in sorted(held):  # an end before a start at the same time
        on_chip[sm] = on_chip.get(sm, 0) + change
        yield _counter("SRAM bytes", sm, (when - origin) / 1000, on_chip[sm])


def _part_bytes(stage: StageTrace, parts: np.ndarray) -> np.ndarray:
    """Requested bytes of visits, and of the rows or columns that are stored; int64 (n_parts,)."""
    events = stage.events[np.isin(stage.events["op"], TRANSFERS)]
    side = "j" if stage.stage.outer == "keys" else "i"
    inside = events["visit"] >= 0
    by_visit = np.zeros((stage.stride, int(events["visit"].max(initial=0)) + 1), np.int64)
    np.add.at(by_visit, (events["head"][inside], events["visit"][inside]), events["bytes"][inside])
    by_outer = np.zeros(int(events[side].max(initial=0)) + 1, np.int64)
    np.add.at(by_outer, events[side][~inside], events["bytes"][~inside])
    return np.where(
        parts["phase"] == VISIT,
        by_visit[parts["head"] % stage.stride, parts["visit"]],
        by_outer[parts[side]],
    )


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
