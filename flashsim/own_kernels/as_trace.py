"""Converts the record of a kernel's accesses to a `Trace`, for pictures, tables and files."""

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

    If all heads make the same accesses, the trace keeps the accesses of one head only.
    UnsupportedError is raised if the record has more launches or tensor names than a trace can
    hold.
    """
    record = geometry.record
    if len(record.launches) > MOST_STAGES:
        raise UnsupportedError(
            f"a trace holds at most {MOST_STAGES} launches, but this record has "
            f"{len(record.launches)}; trace fewer launches, or read only the record's totals"
        )
    cut = [visits_of(geometry, n) for n in range(len(record.launches))]
    own = _Codes(geometry)
    made = [_stage(geometry, n, one, own, grouped=False) for n, one in enumerate(cut)]
    problem = geometry.problem
    if any(one is None for one in made):
        heads = problem.batch * problem.heads
        problem = _one_group(problem, heads)
        made = [_stage(geometry, n, one, own, grouped=True) for n, one in enumerate(cut)]
    stages = []
    for n, (one, walk) in enumerate(zip(made, cut, strict=True)):
        assert one is not None
        rows, costs, per = one
        stage = plans.Stage(_stage_name(geometry, n), walk.outer, per=per)  # type: ignore[arg-type]
        schedule = Schedule(problem, Tiling(walk.block_q, walk.block_k), walk.outer)  # type: ignore[arg-type]
        stages.append(
            StageTrace.build(stage, schedule, *heads_of(stage, problem), rows, np.array(costs))
        )
    direction = "backward" if any(x in geometry.labels for x in ("dQ", "dK", "dV")) else "forward"
    return Trace(
        *(problem, device, name, direction, record.source.split()[0], stages),
        provenance,
        own=Own(own.axes, compulsory, _workspace(geometry)),
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


def _one_group(p: Problem, heads: int) -> Problem:
    """Return a copy of the problem in which all query heads share a single KV head."""
    kept = "n_q", "n_kv", "head_dim", "head_dim_v", "dtype", "causal", "window", "scale"
    return Problem(**{name: getattr(p, name) for name in kept}, heads=heads, kv_heads=1)


def _workspace(geometry: Geometry) -> int:
    """Return the total bytes of the tensors that pass results from one launch to the next."""
    a, total = geometry.record.accesses, 0
    for t in geometry.record.tensors:
        ops = np.unique(a["op"][a["tensor"] == t.code])
        if len(ops) > 1 and LOAD in ops and t.code in geometry.record.stored:
            total += t.nbytes
    return total


def _stage(
    geometry: Geometry, launch: int, cut: Visits, names: _Codes, *, grouped: bool
) -> tuple[list[tuple[int, ...]], list[np.ndarray], str] | None:
    """Return a launch's first head's (or group's) events, FLOPs, and "head" or "group".

    The result is None if events differ between heads or groups.
    """
    p = geometry.problem
    heads, stride = p.batch * p.heads, 1
    # A program that works on several query heads works on a whole group.
    pairs = np.unique(cut.program * heads + cut.head) // heads
    per = "group" if grouped or len(np.unique(pairs)) < len(pairs) else "head"
    if per == "group":
        stride = heads if grouped else p.group
    owner, member = cut.head // stride, cut.head % stride
    counts = np.bincount(owner, minlength=heads // stride)
    if (counts != counts[0]).any() or not counts[0]:
        return None
    order = np.argsort(owner, kind="stable").reshape(heads // stride, -1)
    same = _facts(geometry, launch, cut, member)[order]
    if (same != same[0]).any():
        return None
    one = order[0]
    rows, costs = _events(geometry, launch, cut, member, names, one)
    return rows, costs, per


def _facts(geometry: Geometry, launch: int, cut: Visits, member: np.ndarray) -> np.ndarray:
    """Return one row of integers per access; heads with equal rows have equal events."""
    a, g = geometry.record.accesses[cut.at], geometry
    return np.stack(
        [
            *(a["op"], a["tensor"], a["active"], cut.tile, cut.inner, member),
            *(g.row[cut.at], g.col[cut.at], g.rows[cut.at], g.cols[cut.at]),
            _begins(cut),
        ],
        axis=1,
    ).astype(np.int64)


def _begins(cut: Visits) -> np.ndarray:
    """Return a boolean per access: True for the first access of a visit (tile pair) or program."""
    return (np.diff(cut.visit, prepend=-2) != 0) | (np.diff(cut.program, prepend=-1) != 0)


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
    work = _Work(geometry, launch)
    rows: list[tuple[int, ...]] = []
    costs: list[np.ndarray] = []
    numbers: dict[int, int] = {}
    at = 0
    n = len(one)
    while at < n:
        program = cut.program[one[at]]
        end = at
        while end < n and cut.program[one[end]] == program:
            end += 1
        outer = int(cut.tile[one[at]]) % (schedule.t_r if by_row else schedule.t_c)
        step = (outer, -1) if by_row else (-1, outer)
        who = int(member[one[at]])
        rows += [(ALLOC, code, who, *step, -1, nbytes) for code, nbytes in held.items()]
        loaded: list[tuple[int, int]] = []
        here = at
        while here < end:
            visit, first = int(cut.visit[one[here]]), here
            while here < end and cut.visit[one[here]] == visit:
                here += 1
            part = one[first:here]
            inner = int(cut.inner[part[0]]) % (schedule.t_c if by_row else schedule.t_r)
            number = -1 if visit < 0 else numbers.setdefault(visit, len(numbers))
            place = step if visit < 0 else (outer, inner) if by_row else (inner, outer)
            mine: list[tuple[int, int]] = []
            who = int(member[part[0]])
            for x in part:
                access = cut.at[x]
                op, code = int(a["op"][access]), names.of[int(a["tensor"][access])]
                nbytes = int(asked[access])
                rows.append((op, code, int(member[x]), *place, number, nbytes))
                if op == LOAD:
                    mine.append((code, nbytes))
            if visit < 0:
                loaded += mine
                continue
            stop = cut.at[one[here]] if here < end else None
            rows.append((COMPUTE, 0, who, *place, number, 0))
            costs.append(work.upto(program, stop))
            rows += [(FREE, code, who, *place, number, nbytes) for code, nbytes in mine]
        rows.append((COMPUTE, 0, who, *step, -1, 0))
        costs.append(work.upto(program, None))
        rows += [(FREE, code, who, *step, -1, nbytes) for code, nbytes in loaded]
        rows += [(FREE, code, who, *step, -1, nbytes) for code, nbytes in held.items()]
        at = end
    return rows, costs


class _Work:
    """Looks up the FLOPs of one launch, program by program."""

    def __init__(self, geometry: Geometry, launch: int) -> None:
        w = geometry.record.work
        w = w[w["launch"] == launch]
        order = np.argsort(w["program"], kind="stable")
        self._work = w[order]
        self._next: dict[int, int] = {}

    def upto(self, program: int, access: int | None) -> np.ndarray:
        """Return a program's FLOPs since the previous call, up to an access (None: all others)."""
        total = np.zeros(len(KINDS) + 2, np.int64)
        w = self._work
        lo = int(np.searchsorted(w["program"], program))
        hi = int(np.searchsorted(w["program"], program, side="right"))
        at = self._next.get(int(program), lo)
        while at < hi and (access is None or w["at"][at] <= access):
            total[w["kind"][at]] += w["flops"][at]
            at += 1
        self._next[int(program)] = at
        return total
