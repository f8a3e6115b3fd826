"""From the notes of a walk (which tiles it visited, how large they were) to a trace's events.

The sequence of a visit's events is a fact about the algorithm and stands in `_STEPS`, in the order
in which `flashsim.algorithms` carries them out; which visits there were, and their sizes, come
from the walk. So a tile that a walk skips, or cuts short, is missing from the trace.
"""

from __future__ import annotations

import numpy as np

from flashsim.counts.traffic import strip_rows
from flashsim.engines.cpu.tables import NOTE
from flashsim.errors import MemoryModelError
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.names import ALLOC, CODES, COMPUTE, FREE, LOAD, REDUCE, STORE
from flashsim.schedule.plans import Stage, heads_of
from flashsim.schedule.schedule import Schedule
from flashsim.trace.events import StageTrace

_OPS = {"load": LOAD, "store": STORE, "reduce": REDUCE, "alloc": ALLOC}

#: What a stage does when an outer step begins, at each visit, and when the step ends. A name ending
#: in ? is there only if the problem has a bias (or, for the gate, a softcap); one ending in + is an
#: accumulator, in the accumulator's type where the input's is narrower.
_STEPS = {
    "forward": (
        "load Q, alloc O, alloc l, alloc m",
        "load K, load V, alloc S, load bias?",
        "store O, store L",
    ),
    "dkdv": (
        "load K, load V, alloc dK, alloc dV",
        "load Q, load dO, load L, load delta, alloc S, alloc gate?, load bias?, alloc dP",
        "store dK, store dV",
    ),
    "fused": (
        "load K, load V, alloc dK, alloc dV",
        "load Q, load dO, load L, load delta, alloc S, alloc gate?, load bias?, alloc dP,"
        " alloc dQ, reduce dQ+, reduce dBias+?",
        "store dK, store dV",
    ),
    "dq": (
        "load Q, load dO, load L, load delta, alloc dQ",
        "load K, load V, alloc S, alloc gate?, load bias?, alloc dP, reduce dBias+?",
        "store dQ",
    ),
    "delta": ("load O, load dO, alloc delta", "", "store delta"),
    "clear_dbias": ("", "", "store dBias+"),
    "convert": ("load dQ_acc, store dQ, free", "", ""),
}

Event = tuple[int, int, tuple[int, int, int]]  # op, tensor, bytes a row, a column and a score


def stage_trace(
    stage: Stage,
    schedule: Schedule,
    device: Device,
    algorithm: str,
    steps: np.ndarray,
    visits: np.ndarray,
) -> StageTrace:
    """The trace of one stage.

    Parameters
    ----------
    steps : int64 (walks, T)
        Rows (with keys outside, columns) of each outer tile as each walk met it.
    visits : int64 (walks, members, n)
        Rows times `NOTE` plus columns of each visit; 0 where it was not made.

    Raises
    ------
    MemoryModelError
        If two heads did not walk alike (a bug in the engine).
    """
    if (steps != steps[:1]).any() or (visits != visits[:1]).any():
        raise MemoryModelError(f"stage {stage.name!r}: not every head made the same walk")
    repeat, stride = heads_of(stage, schedule.problem)
    rows: np.ndarray | list
    if stage.name == "convert_dbias":
        rows = _convert_dbias(stage, schedule, device, steps[0])
    else:
        sizes = _Sizes(schedule.problem, algorithm)
        rows = _rows(stage, schedule, sizes, steps[0], visits[0])
    return StageTrace.build(stage, schedule, repeat, stride, rows)


class _Sizes:
    """Bytes a row, a column and a score of every tensor, in HBM and on chip."""

    def __init__(self, problem: Problem, algorithm: str) -> None:
        p = self.problem = problem
        self.fused = algorithm == "flash2-fused"
        e, a, d, dv = p.itemsize, p.compute_itemsize, p.head_dim, p.head_dim_v
        self.hbm = {
            **{"Q": (d * e, 0, 0), "O": (dv * e, 0, 0), "dO": (dv * e, 0, 0), "dQ": (d * e, 0, 0)},
            **{"L": (a, 0, 0), "delta": (a, 0, 0), "dQ_acc": (d * a, 0, 0)},
            **{"K": (0, d * e, 0), "V": (0, dv * e, 0), "dK": (0, d * e, 0), "dV": (0, dv * e, 0)},
            **{"bias": (0, 0, e), "dBias": (0, 0, e), "dBias_acc": (0, 0, a)},
        }
        self.chip = {
            **{"O": (dv * a, 0, 0), "dQ": (d * a, 0, 0), "dK": (0, d * a, 0), "dV": (0, dv * a, 0)},
            **{name: (a, 0, 0) for name in ("l", "m", "delta")},
            **{name: (0, 0, a) for name in ("S", "dP", "gate")},
        }

    def parse(self, text: str) -> list[Event]:
        """Events of one entry of `_STEPS`; "free" stands for those of all that is held."""
        events: list[Event] = []
        for word in filter(None, text.split(", ")):
            op, _, name = word.partition(" ")
            if name.endswith("?"):
                name = name[:-1]
                if not (self.problem.softcap if name == "gate" else self.problem.bias):
                    continue
            if op == "free":
                events += frees(events)
                continue
            if name.endswith("+"):
                wide = self.problem.dtype == self.problem.compute_dtype
                name = name[:-1] + ("" if wide else "_acc")
            sizes = self.chip if op == "alloc" else self.hbm
            events.append((_OPS[op], CODES[name], sizes[name]))
        return events


def frees(events: list[Event]) -> list[Event]:
    """The end of what was loaded or allocated, in the same order; `_acc` is a name in HBM only."""
    names = list(CODES)
    return [
        (FREE, CODES[names[tensor].removesuffix("_acc")], size)
        for op, tensor, size in events
        if op in (LOAD, ALLOC)
    ]


def _rows(
    stage: Stage, schedule: Schedule, sizes: _Sizes, steps: np.ndarray, visits: np.ndarray
) -> np.ndarray:
    """Rows for `StageTrace.build`: each step's beginning, its visits member by member, its end."""
    compute: list[Event] = [(COMPUTE, 0, (0, 0, 0))]
    begin, visit, end = (sizes.parse(text) for text in _STEPS[stage.name])
    if stage.name == "delta" and sizes.fused:
        end += sizes.parse("store dQ+")
    held = [] if any(op == FREE for op, *_ in begin) else frees(begin)
    end, visit = end + compute + held, visit + compute + frees(visit) if visit else []
    by_row = stage.outer == "queries"
    ptr, inner, _ = schedule.row_csr if by_row else schedule.col_csr
    order = np.array(schedule.outer_order())
    owner = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    members, made = np.nonzero(visits)  # member by member, in the order of the CSR
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    walk = np.lexsort((made, members, rank[owner[made]]))
    members, made = members[walk], made[walk]
    count = np.bincount(rank[owner[made]], minlength=len(order))  # visits of each step, in order

    length = len(begin) + count * len(visit) + len(end)
    start = np.cumsum(length) - length
    table = np.zeros((int(length.sum()), 7), np.int64)
    other = -np.ones(len(order), np.int64)
    i, j = (order, other) if by_row else (other, order)
    size = steps[order]
    whole = np.full(len(order), schedule.problem.n_kv)  # a bias row spans every key
    extent = (size, whole if stage.per == "bias" else other) if by_row else (other, size)
    _put(table, start, begin, 0, i, j, other, *extent)
    _put(table, start + len(begin) + count * len(visit), end, 0, i, j, other, *extent)

    step = rank[owner[made]]
    nth = np.arange(len(made)) - (np.cumsum(count) - count)[step]
    at = start[step] + len(begin) + nth * len(visit)
    own, seen = owner[made], inner[made]
    i, j = (own, seen) if by_row else (seen, own)
    note = visits[members, made]
    _put(table, at, visit, members, i, j, made, note // NOTE, note % NOTE)
    return table


def _put(table, at, events, member, i, j, visit, rows, cols) -> None:
    """Write a run of events at each of the places `at`."""
    for k, (op, tensor, (row, col, score)) in enumerate(events):
        nbytes = row * rows + col * cols + score * rows * cols
        for column, value in enumerate((op, tensor, member, i, j, visit, nbytes)):
            table[at + k, column] = value


def _convert_dbias(stage: Stage, schedule: Schedule, device: Device, steps: np.ndarray) -> list:
    """The bias's gradient is rounded in strips of as many whole rows as fit on chip."""
    p = schedule.problem
    height = strip_rows(stage, schedule, device)
    rows = []
    for i, size in enumerate(steps.tolist()):
        for first in range(0, size, height):
            n = (min(first + height, size) - first) * p.n_kv
            loaded, stored = n * p.compute_itemsize, n * p.itemsize
            rows += [
                (LOAD, CODES["dBias_acc"], 0, i, -1, -1, loaded),
                (STORE, CODES["dBias"], 0, i, -1, -1, stored),
                (FREE, CODES["dBias"], 0, i, -1, -1, loaded),
            ]
        rows.append((COMPUTE, 0, 0, i, -1, -1, 0))
    return rows
