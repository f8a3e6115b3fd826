"""Exports traces as Chrome trace events, for https://ui.perfetto.dev or chrome://tracing.

If a GPU recorded a timeline (``trace="timeline"``), the export keeps the GPU's times, and leaves
out stages that the kernel did not time. A simulated trace has no times, so the export computes
times from the device's peaks. Each SM gets 1 / sm_count of the HBM bandwidth and of the FLOP/s. A
step's transfers and computation do not overlap. Computed times show order and proportion, but do
not predict a kernel's time.

In a simulated trace, a thread id stands for one SM and pipe. In a recorded trace, a thread id
stands for one SM, warp role and layer of overlapping visits. The slices of one thread id are nested
or disjoint. All times are whole nanoseconds, because Perfetto rounds fractional starts and
durations separately, and drops a slice that ends after the enclosing slice.
"""

from __future__ import annotations

import gzip
import heapq
import json
import os
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from flashsim.counts.work import KINDS, StageWork, TileOp, stage_work, total_flops
from flashsim.errors import OptionError, shown
from flashsim.problem import checks
from flashsim.report import whole
from flashsim.schedule.names import COMPUTE, OPS, TRANSFERS
from flashsim.trace import timeline
from flashsim.trace.events import PHASES, ROLES, StageTrace, Structured, gain, step_ends
from flashsim.trace.recording import Recording

PIPES = ("block", "memory", "compute")
# Thread ids reserved for each SM: for its pipes, or for the rows of its thread blocks. They start
# above all process ids, because Perfetto takes a thread with a process's id for its main thread.
_LANES = 1024
VISIT, STORE = PHASES.index("visit"), PHASES.index("store")
_COUNTERS = 1_000_000  # the process id of the counters
Slice = dict[str, Any]


def write(trace: Recording, path: str | Path, *, heads: int = 1) -> Path:
    """Write a trace as Chrome trace events (JSON), and return the path.

    Parameters
    ----------
    trace : Trace, or its `Recording`
    path : path-like
        A file whose name ends in .gz is compressed; Perfetto opens it as well.
    heads : int
        For a simulated trace: how many heads (or head groups) of each stage to show. If a stage has
        fewer, all are shown.

    Raises
    ------
    OptionError, DTypeError
        If `heads` is not positive, or `path` cannot be the path of a file.
    """
    path = Path(checks.path("path", path))
    if os.path.isdir(path):  # also False for a name that no file can have
        raise OptionError(f"cannot write {str(path)!r}: it is a folder; name a file")
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise OptionError(f"heads= must be a positive integer, got {shown(heads)}")
    events = list(_real(trace) if trace.timeline is not None else _simulated(trace, heads))
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "algorithm": trace.algorithm,
            "direction": trace.direction,
            "device": trace.device.name,
            "clock": "GPU" if trace.timeline is not None else "computed from the device's peaks",
            **{key: str(value) for key, value in trace.provenance.items()},
        },
    }
    data = json.dumps(document, separators=(",", ":")).encode()
    with whole(path) as part:
        part.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


# -- timelines that a GPU recorded ----------------------------------------------------------------


def _real(trace: Recording) -> Iterator[Slice]:
    spans = trace.timeline
    assert spans is not None
    if not len(spans):
        return
    placed = timeline.rows(trace, spans)
    origin = int(spans["start_ns"].min())
    thread = _thread(spans["sm"].astype(np.int64), placed.row)
    # Of two spans with the same start, the longer comes first: slices nest in their listed order.
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
        yield from _process(sm, "SM")
    for tid in np.unique(thread).tolist():
        yield _about("thread_name", tid // _LANES - 1, tid, placed.names[tid % _LANES])
    yield from _real_counters(trace, spans, placed.block, origin)


def _real_counters(
    trace: Recording, spans: Structured, block: np.ndarray, origin: int
) -> Iterator[Slice]:
    """Yield the counters of a recorded timeline: requested HBM bytes, and SRAM in use per SM.

    A visit's bytes are added at the visit's end, and an outer step's bytes when the step stores a
    row or column tile. A thread block counts with the stage's peak SRAM while the block's last warp
    role works. In a warp-specialised kernel, this role is the last consumer.
    """
    yield from _process(_COUNTERS, "totals")
    moved: list[tuple[int, int]] = []
    held: list[tuple[int, int, int]] = []
    for number in np.unique(spans["stage"]).tolist():
        stage, mine = trace.stages[number], spans["stage"] == number
        last = mine & (spans["role"] == spans["role"][mine].max())  # of a visit's roles
        parts = spans[last & np.isin(spans["phase"], (VISIT, STORE))]
        moved += zip(parts["end_ns"].tolist(), _part_bytes(stage, parts).tolist(), strict=True)
        peak = int(np.cumsum(gain(stage.events)).max(initial=0))
        for block_number in np.unique(block[mine]).tolist():
            life = spans[last & (block == block_number)]
            sm = int(life["sm"][0])
            held.append((int(life["start_ns"].min()), peak, sm))
            held.append((int(life["end_ns"].max()), -peak, sm))
    total = 0
    for end, nbytes in sorted(moved):
        total += nbytes
        yield _counter("HBM", _COUNTERS, end - origin, total)
    on_chip: dict[int, int] = {}
    for when, change, sm in sorted(held):  # at the same time, an end sorts before a start
        on_chip[sm] = on_chip.get(sm, 0) + change
        yield _counter("SRAM", sm, when - origin, on_chip[sm])


def _part_bytes(stage: StageTrace, parts: Structured) -> np.ndarray:
    """Return the requested bytes of each visit or outer step in `parts`, as int64 (n_parts,).

    If several blocks store parts of one row tile, the outer step's bytes are divided equally among
    the blocks.
    """
    events = stage.events[np.isin(stage.events["op"], TRANSFERS)]
    side = "j" if stage.stage.outer == "keys" else "i"
    inside = events["visit"] >= 0
    by_visit = np.zeros((stage.stride, int(events["visit"].max(initial=0)) + 1), np.int64)
    np.add.at(by_visit, (events["head"][inside], events["visit"][inside]), events["bytes"][inside])
    by_outer = np.zeros(int(events[side].max(initial=0)) + 1, np.int64)
    np.add.at(by_outer, events[side][~inside], events["bytes"][~inside])
    stores = parts["phase"] == STORE
    alike = np.stack([stores, parts["head"], parts[side]], axis=1)
    _, which, shares = np.unique(alike, axis=0, return_inverse=True, return_counts=True)
    return np.where(
        stores,
        by_outer[parts[side]] // shares[which.reshape(-1)],
        by_visit[parts["head"] % stage.stride, parts["visit"]],
    )


# -- simulated traces -----------------------------------------------------------------------------


def _simulated(trace: Recording, heads: int) -> Iterator[Slice]:
    clock = _Clock(trace)
    start = 0
    moved: list[tuple[int, int]] = []
    for stage in trace.stages:
        ready = [(start, sm) for sm in range(trace.device.sm_count)]
        steps = _outer_steps(stage)
        latest = start
        for walk in range(min(heads, stage.repeat)):
            for block in steps:
                at, sm = heapq.heappop(ready)  # the next block runs on the first free SM
                slices, end, transfers = clock.block(stage, block, at, sm, walk)
                yield from slices
                moved += transfers
                heapq.heappush(ready, (end, sm))
                latest = max(latest, end)
        start = latest
    for sm in sorted(clock.used):
        yield from _process(sm, "SM")
        for row, pipe in enumerate(PIPES):
            yield _about("thread_name", sm, _thread(sm, row), pipe)
    yield from _process(_COUNTERS, "totals")
    total = 0
    for when, nbytes in sorted(moved):
        total += nbytes
        yield _counter("HBM", _COUNTERS, when, total)


def _outer_steps(stage: StageTrace) -> list[np.ndarray]:
    """Return one array of events per outer step, in order; the export shows a step as a block."""
    last = step_ends(stage.events)
    return np.split(stage.events, last + 1)[: len(last)]


class _Clock:
    """Converts a block's events to slices, timed by one SM's portion of the device's peaks."""

    def __init__(self, trace: Recording) -> None:
        self.trace, self.used = trace, set[int]()
        self._own = {s.name: cycle(s.costs) for s in trace.stages if s.costs is not None}
        device, dtype = trace.device, trace.problem.dtype
        per_ns = 1e-9 / device.sm_count  # one SM's share in a nanosecond
        matmul = device.peak(dtype)
        self.bytes_per_ns = device.hbm_bandwidth * per_ns
        self.matmul_per_ns = matmul * per_ns
        self.other_per_ns = device.cuda_flops.get("float32", matmul) * per_ns

    def block(
        self, stage: StageTrace, events: Structured, start: int, sm: int, walk: int
    ) -> tuple[list[Slice], int, list[tuple[int, int]]]:
        """Return a step's slices, end time in ns, and transfers as pairs (time, bytes)."""
        self.used.add(sm)
        trace = self.trace
        work = StageWork()
        if trace.own is None:
            work = stage_work(trace.problem, trace.algorithm, trace.direction, stage.name)
        slices: list[Slice] = []
        moved: list[tuple[int, int]] = []
        held, now, begun = 0, start, start
        outer = events[0]["i"] if stage.stage.outer == "queries" else events[0]["j"]
        for e, change in zip(events, gain(events).tolist(), strict=True):
            if e["op"] in TRANSFERS:
                took = _ticks(int(e["bytes"]) / self.bytes_per_ns)
                name = f"{OPS[e['op']]} {trace.tensors[e['tensor']]}"
                slices.append(_slice(name, "HBM", sm, 1, now, took, e, stage, walk))
                now += took
                moved.append((now, int(e["bytes"])))
            elif e["op"] == COMPUTE:
                ops = work.visit if e["visit"] >= 0 else work.outer
                for op in ops:
                    took = self._duration(op, stage, e)
                    slices.append(_slice(op.name, "compute", sm, 2, now, took, e, stage, walk))
                    now += took
                if stage.name in self._own:  # one row of costs per compute event, for each head
                    matmul, *others = next(self._own[stage.name])[: len(KINDS)].tolist()
                    took = self._ticks(matmul, sum(others))
                    slices.append(_slice("work", "compute", sm, 2, now, took, e, stage, walk))
                    now += took
                if e["visit"] >= 0:
                    name = f"visit ({e['i']}, {e['j']})"
                    slices.append(_slice(name, "visit", sm, 0, begun, now - begun, e, stage, walk))
                begun = now
            if change:
                held += change
                slices.append(_counter("SRAM", sm, now, held))
        whole = _slice(
            f"{stage.name} {outer}", "block", sm, 0, start, now - start, events[0], stage, walk
        )
        return [whole, *slices], now, moved

    def _duration(self, op: TileOp, stage: StageTrace, e: np.void) -> int:
        """Return the duration of one tile operation in nanoseconds."""
        rows, cols = (int(x) for x in stage.sides(e["i"], e["j"]))
        flops = total_flops((op,), rows, cols, rows * cols)
        matmul = flops.pop("matmul")
        return self._ticks(matmul, sum(flops.values()))

    def _ticks(self, matmul: int, others: int) -> int:
        return _ticks(matmul / self.matmul_per_ns + others / self.other_per_ns)


def _ticks(ns: float) -> int:
    """Round `ns` to whole nanoseconds, at least one, so that every slice is visible."""
    return max(1, round(ns))


# -- Chrome trace events: arguments are in ns, the output is in µs --------------------------------


def _slice(
    name: str, cat: str, sm: int, pipe: int, start: int, took: int, e: np.void, stage: StageTrace,
    walk: int,
) -> Slice:  # fmt: skip
    args = {key: int(e[key]) for key in ("i", "j", "visit", "bytes") if e[key] >= 0}
    args["head"] = walk * stage.stride + int(e["head"])
    return {
        "ph": "X", "name": name, "cat": f"{stage.name},{cat}", "pid": sm, "tid": _thread(sm, pipe),
        "ts": start / 1000, "dur": took / 1000, "args": args,
    }  # fmt: skip


def _thread(sm: Any, row: Any) -> Any:
    """Return the thread id of one row of an SM; both arguments may be arrays."""
    return (sm + 1) * _LANES + row


def _counter(name: str, pid: int, when: int, value: int) -> Slice:
    """Return a trace event that sets the counter `name` to `value` bytes at time `when`."""
    return {"ph": "C", "name": name, "pid": pid, "ts": when / 1000, "args": {"bytes": value}}


def _process(pid: int, name: str) -> Iterator[Slice]:
    """Yield events that set a process's name and position: totals first, then SM 0, SM 1 ..."""
    yield _about("process_name", pid, 0, name)
    order = 0 if pid == _COUNTERS else 1 + pid
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": order}}


def _about(kind: str, pid: int, tid: int, name: str) -> Slice:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
