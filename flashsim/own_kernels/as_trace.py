"""Converts the record of a kernel's accesses to a `Trace`, for pictures, tables and files."""

from typing import Any, cast

import numpy as np

from flashsim.counts.work import KINDS
from flashsim.errors import UnsupportedError
from flashsim.own_kernels.geometry import Geometry
from flashsim.own_kernels.names import identifier
from flashsim.own_kernels.visits import Visits, visits_of
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.names import ALLOC, CODES, COMPUTE, FREE, LOAD, TENSORS
from flashsim.schedule.plans import heads_of
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tensors import ROW
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import StageTrace
from flashsim.trace.recording import Own
from flashsim.trace.trace import Trace
from flashsim.trace.validate import MOST_NAMES, MOST_STAGES


def as_trace(
    geometry: Geometry, name: str, device: Device, compulsory: int, provenance: dict[str, str]
) -> Trace:
    """Return a record as a trace: one stage per kernel launch, one outer-loop step per program.

    If all heads make the same accesses, the trace keeps the accesses of one head only. Otherwise,
    the trace's problem has a single KV head, and its provenance says how many heads there are.
    UnsupportedError is raised if the record has more launches or tensor names than a trace can
    hold.
    """
    record = geometry.record
    if len(record.launches) > MOST_STAGES:
        raise UnsupportedError(
            f"a trace holds at most {MOST_STAGES} launches, but this record has "
            f"{len(record.launches)}; trace fewer launches, or read only the record's totals"
        )
    launches = range(len(record.launches))
    cuts = [visits_of(geometry, n) for n in launches]
    codes, problem = _Codes(geometry), geometry.problem
    stages = [_stage(geometry, n, cuts[n], codes, problem) for n in launches]
    if None in stages:
        heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
        grouped = f"{heads} / {kv_heads}" if heads != kv_heads else f"{heads}"
        provenance = {**provenance, "heads": f"{grouped} heads"}
        problem = _one_group(problem)
        stages = [_stage(geometry, n, cuts[n], codes, problem) for n in launches]
    direction = "backward" if any(x in geometry.labels for x in ("dQ", "dK", "dV")) else "forward"
    return Trace(
        *(problem, device, name, direction, record.source.split()[0], cast(Any, stages)),
        provenance,
        own=Own(codes.axes, compulsory, _workspace(geometry)),
    )


class _Codes:
    """The integer codes that a trace uses for tensors and on-chip values."""

    def __init__(self, geometry: Geometry) -> None:
        self.axes: dict[str, int] = {}
        self._codes: dict[str, int] = {}
        self.of = [
            self.code(identifier(label, self.axes), side.axis)
            for label, side in zip(geometry.labels, geometry.sides, strict=True)
        ]

    def code(self, name: str, axis: int = ROW) -> int:
        """Return a name's integer code, which is new for a new name."""
        if name in CODES:
            return CODES[name]
        if name not in self._codes:
            if len(self._codes) >= MOST_NAMES:
                raise UnsupportedError(
                    f"a trace holds at most {MOST_NAMES} names of tensors and on-chip values; "
                    "trace fewer launches"
                )
            self._codes[name] = len(TENSORS) + len(self._codes)
            self.axes[name] = axis
        return self._codes[name]


def _stage_name(geometry: Geometry, launch: int) -> str:
    kernels = [one.kernel[:50] for one in geometry.record.launches]
    before = kernels[:launch].count(kernels[launch])
    return kernels[launch] if not before else f"{kernels[launch]} {before + 1}"


def _one_group(p: Problem) -> Problem:
    """Return a copy of the problem in which all query heads share a single KV head."""
    kept = "n_q", "n_kv", "head_dim", "head_dim_v", "dtype", "causal", "window", "scale"
    return Problem(**{name: getattr(p, name) for name in kept}, heads=p.batch * p.heads, kv_heads=1)


def _workspace(geometry: Geometry) -> int:
    """Return the total bytes of the tensors that pass results from one launch to the next."""
    a, total = geometry.record.accesses, 0
    for t in geometry.record.tensors:
        ops = np.unique(a["op"][a["tensor"] == t.code])
        if len(ops) > 1 and LOAD in ops and t.code in geometry.record.stored:
            total += t.nbytes
    return total


def _stage(
    geometry: Geometry, launch: int, cut: Visits, codes: _Codes, problem: Problem
) -> StageTrace | None:
    """Return a launch's trace with the events of the first head (or group of heads).

    The result is None if events differ between heads or groups.
    """
    heads, stride = problem.batch * problem.heads, 1
    grouped = problem is not geometry.problem
    # A program that works on several query heads works on a whole group.
    pairs = np.unique(cut.program * heads + cut.head) // heads
    per: Any = "group" if grouped or len(np.unique(pairs)) < len(pairs) else "head"
    if per == "group":
        stride = problem.group
    owner, member = cut.head // stride, cut.head % stride
    counts = np.bincount(owner, minlength=heads // stride)
    if (counts != counts[0]).any() or not counts[0]:
        return None
    order = np.argsort(owner, kind="stable").reshape(heads // stride, -1)
    # Heads whose accesses have equal rows of integers have equal events.
    a, g, at = geometry.record.accesses[cut.at], geometry, cut.at
    begins = (np.diff(cut.visit, prepend=-2) != 0) | (np.diff(cut.program, prepend=-1) != 0)
    facts = a["op"], a["tensor"], a["active"], cut.tile, cut.inner, member, begins
    same = np.stack([*facts, g.row[at], g.col[at], g.rows[at], g.cols[at]], axis=1)[order]
    if (same != same[0]).any():
        return None
    rows, costs = _events(geometry, launch, cut, member, codes, order[0])
    outer: Any = cut.outer
    stage = plans.Stage(_stage_name(geometry, launch), outer, per=per)
    schedule = Schedule(problem, Tiling(cut.block_q, cut.block_k), outer)
    return StageTrace.build(stage, schedule, *heads_of(stage, problem), rows, np.array(costs))


def _events(
    geometry: Geometry, launch: int, cut: Visits, member: np.ndarray, names: _Codes, one: np.ndarray
) -> tuple[list[tuple[int, ...]], list[np.ndarray]]:
    """Return the events of one head's programs in order, and the FLOPs of each compute event."""
    record = geometry.record
    a, asked = record.accesses, record.bytes_asked
    by_row = cut.outer == "queries"
    held = {
        names.code(identifier(name, names.axes) if name not in names.axes else name): nbytes
        for name, (_, nbytes) in record.launches[launch].held.items()
        if nbytes
    }
    schedule = Schedule(geometry.problem, Tiling(cut.block_q, cut.block_k))
    outers, inners = (schedule.t_r, schedule.t_c)[:: 1 if by_row else -1]
    work = _Work(geometry, launch)
    rows: list[tuple[int, ...]] = []
    costs: list[np.ndarray] = []
    numbers: dict[int, int] = {}
    for mine in _runs(one, cut.program):
        program, outer = int(cut.program[mine[0]]), int(cut.tile[mine[0]]) % outers
        step = (outer, -1) if by_row else (-1, outer)
        who = int(member[mine[0]])
        rows += [(ALLOC, code, who, *step, -1, nbytes) for code, nbytes in held.items()]
        kept: list[tuple[int, int]] = []  # tiles that are loaded outside of the inner loop
        parts = _runs(mine, cut.visit)
        for part, after in zip(parts, [*parts[1:], None], strict=True):
            visit, who = int(cut.visit[part[0]]), int(member[part[0]])
            place, number = step, -1
            if visit >= 0:
                inner = int(cut.inner[part[0]]) % inners
                place = (outer, inner) if by_row else (inner, outer)
                number = numbers.setdefault(visit, len(numbers))
            loaded: list[tuple[int, int]] = []
            for x in part:
                access = cut.at[x]
                op, code = int(a["op"][access]), names.of[int(a["tensor"][access])]
                nbytes = int(asked[access])
                rows.append((op, code, int(member[x]), *place, number, nbytes))
                if op == LOAD:
                    loaded.append((code, nbytes))
            if visit < 0:
                kept += loaded
                continue
            rows.append((COMPUTE, 0, who, *place, number, 0))
            costs.append(work.upto(program, None if after is None else cut.at[after[0]]))
            rows += [(FREE, code, who, *place, number, nbytes) for code, nbytes in loaded]
        rows.append((COMPUTE, 0, who, *step, -1, 0))
        costs.append(work.upto(program, None))
        rows += [(FREE, code, who, *step, -1, nbytes) for code, nbytes in (*kept, *held.items())]
    return rows, costs


def _runs(at: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    """Split indices wherever the value at the index changes."""
    return np.split(at, np.flatnonzero(np.diff(values[at])) + 1)


class _Work:
    """Looks up the FLOPs of one launch, program by program."""

    def __init__(self, geometry: Geometry, launch: int) -> None:
        w = geometry.record.work
        w = w[w["launch"] == launch]
        self._work = w[np.argsort(w["program"], kind="stable")]
        self._flops = np.zeros((len(w), len(KINDS) + 2), np.int64)
        self._flops[np.arange(len(w)), self._work["kind"]] = self._work["flops"]
        self._next: dict[int, int] = {}

    def upto(self, program: int, access: int | None) -> np.ndarray:
        """Return a program's FLOPs since the previous call, up to an access (None: all others)."""
        low, end = np.searchsorted(self._work["program"], (program, program + 1))
        begin = self._next.get(program, low)
        if access is not None:
            end = low + np.searchsorted(self._work["at"][low:end], access, side="right")
        self._next[program] = max(begin, end)
        return self._flops[begin:end].sum(axis=0)
