"""`Steps`: the steps of one head in a trace, with the state of memory after each step.

A step ends at each "compute" event: at each visit of a score tile, and at the end of each outer
step (where FlashAttention-2 divides by l and stores O).
"""

from __future__ import annotations

from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from flashsim import report
from flashsim.counts.work import KINDS, stage_work, total_flops
from flashsim.errors import TraceError
from flashsim.schedule.names import COMPUTE, FREE, OPS, TRANSFERS
from flashsim.trace.events import EVENT, Structured, buffer_of, gain
from flashsim.trace.recording import Recording

_Trace = TypeVar("_Trace", bound=Recording)


@report.shows_fields
class Frame(NamedTuple):
    """The state of the loops over one head after visit number `step`, for drawing."""

    step: int
    stage: str
    i: int
    j: int
    head: int
    order: np.ndarray  # visit number of each tile seen so far in this stage; NaN elsewhere
    hbm_bytes: int  # moved for this head up to and including this visit, all stages
    moved: dict[str, int]  # the same by "op tensor", e.g. {"load K": ...}
    on_chip: dict[str, int]  # bytes in SRAM during the visit, by buffer
    flops: int  # executed up to and including this visit


class Steps(Generic[_Trace]):
    """The steps of one head (or head group) in each stage of a trace, in order.

    `events`, of dtype `EVENT`, has the events of one head in each stage. `ends`, int64 (n_steps,),
    has the index of the "compute" event that ends each step. `stage`, `i`, `j` and `visit`,
    (n_steps,), are -1 where a number does not exist.
    """

    def __init__(self, trace: _Trace) -> None:
        self.trace = trace
        parts = [stage.events.copy() for stage in trace.stages]
        for number, part in enumerate(parts):
            part["stage"] = number
        self.events: Structured = np.concatenate(parts) if parts else np.zeros(0, EVENT)
        self.ends = np.flatnonzero(self.events["op"] == COMPUTE)
        if not len(self.ends):
            raise TraceError(
                f"{trace!r} has no steps to show, because no query tile meets a key tile; record "
                "a trace of a problem with unmasked scores: flashsim.run(..., trace=True)"
            )
        for name in ("stage", "i", "j", "visit"):
            setattr(self, name, self.events[name][self.ends].astype(np.int64))

    stage: np.ndarray
    i: np.ndarray
    j: np.ndarray
    visit: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def starts(self) -> np.ndarray:
        """The index, in `events`, of the first event of each step."""
        return np.concatenate([[0], self.ends[:-1] + 1])

    def moves(self, step: int) -> np.ndarray:
        """Return the transfers of `step`: loads, stores and reductions."""
        events = self.events[self.starts[step] : self.ends[step] + 1]
        return events[np.isin(events["op"], TRANSFERS)]

    @cached_property
    def hbm_bytes(self) -> np.ndarray:
        """Bytes loaded, stored and reduced up to the end of each step, int64 (n_steps, 3)."""
        totals = np.zeros((len(self.events), len(TRANSFERS)), np.int64)
        for column, op in enumerate(TRANSFERS):
            totals[:, column] = np.where(self.events["op"] == op, self.events["bytes"], 0)
        return np.cumsum(totals, axis=0)[self.ends]

    @cached_property
    def flops(self) -> np.ndarray:
        """Floating-point operations executed up to the end of each step, int64 (n_steps,)."""
        return np.cumsum(self.step_flops)

    @cached_property
    def step_flops(self) -> np.ndarray:
        """Floating-point operations of each step of one head, int64 (n_steps,)."""
        done = np.zeros(len(self), np.int64)
        trace = self.trace
        for number, stage in enumerate(trace.stages):
            if stage.costs is not None:
                done[self.stage == number] = stage.costs[:, : len(KINDS)].sum(axis=1)
                continue
            work = stage_work(trace.problem, trace.algorithm, trace.direction, stage.name)
            for ops, chosen in (
                (work.visit, (self.stage == number) & (self.visit >= 0)),
                (work.outer, (self.stage == number) & (self.visit < 0)),
            ):
                rows, cols = stage.sides(self.i[chosen], self.j[chosen])
                done[chosen] = sum(total_flops(ops, rows, cols, rows * cols).values())
        return done

    @cached_property
    def notes(self) -> list[str]:
        """One text per step, such as "part 2 of 4" of split keys, or "head 2 of 4" of a group."""
        notes, heads = [""] * len(self), self.events["head"][self.ends]
        for number, stage in enumerate(self.trace.stages):
            visits = np.flatnonzero((self.stage == number) & (self.visit >= 0))
            if members := int(heads[visits].max(initial=0)):
                for step in visits:
                    notes[step] = f"head {heads[step] + 1} of {members + 1}"
            slots, parts = stage.schedule.slots, stage.schedule.part_counts
            done = np.zeros(stage.schedule.t_r, np.int64)
            for step in np.flatnonzero(self.stage == number) if stage.stage.parts else ():
                i = self.i[step]
                if stage.stage.parts == "merges":
                    notes[step] = f"{slots[i, 1]} parts merged"
                    continue
                if parts[i] > 1:
                    notes[step] = f"part {done[i] + 1} of {parts[i]}"
                done[i] += self.visit[step] < 0
        return notes

    @cached_property
    def buffers(self) -> list[str]:
        """The names of all on-chip buffers, in order of first appearance."""
        owner = buffer_of(self.events["tensor"])[gain(self.events) != 0]
        codes, first = np.unique(owner, return_index=True)
        return [self.trace.tensors[code] for code in codes[np.argsort(first)]]

    @cached_property
    def on_chip(self) -> np.ndarray:
        """The bytes in each buffer at a step's moment of most SRAM, int64 (n_steps, n_buffers)."""
        change, owner = gain(self.events), buffer_of(self.events["tensor"])
        total = np.where(self.events["op"] == FREE, -1, np.cumsum(change))
        fullest = np.maximum.reduceat(total, self.starts)
        at = np.arange(len(total))
        where = np.repeat(fullest, np.diff(np.append(self.starts, self.ends[-1] + 1)))
        span = slice(0, self.ends[-1] + 1)
        first = np.where(total[span] == where, at[span], len(total))
        position = np.minimum.reduceat(first, self.starts)
        columns = [
            np.cumsum(np.where(owner == self.trace.tensors.index(name), change, 0))[position]
            for name in self.buffers
        ]
        return np.stack(columns, axis=1) if columns else np.zeros((len(self), 0), np.int64)

    @property
    def sram_scale(self) -> int:
        """The bytes of a full SRAM bar: the capacity per block or, if greater, the trace's peak."""
        return max(int(self.on_chip.sum(axis=1).max(initial=1)), self.trace.device.sram_bytes)

    @cached_property
    def order(self) -> np.ndarray:
        """For each step, the number of earlier visits in the same stage, int64 (n_steps,)."""
        seen = np.cumsum(self.visit >= 0)
        before = np.concatenate([[0], seen[:-1]])
        first = np.searchsorted(self.stage, np.arange(len(self.trace.stages)))
        return before - before[np.minimum(first, len(self) - 1)][self.stage]

    @cached_property
    def visits(self) -> np.ndarray:
        """The indices of the steps that are visits of score tiles, not ends of outer steps."""
        return np.flatnonzero(self.visit >= 0)

    def frame(self, visit: int, head: int) -> Frame:
        """Return the state after a visit in the run of the loops that starts at head `head`."""
        at = self.visits[visit]
        stage = self.trace.stages[self.stage[at]]
        order = np.full((stage.schedule.t_r, stage.schedule.t_c), np.nan)
        seen = self.visits[: visit + 1]
        seen = seen[self.stage[seen] == self.stage[at]]
        order[self.i[seen], self.j[seen]] = self.order[seen]
        moved: dict[str, int] = {}
        events = self.events[: self.ends[at] + 1]
        for op in TRANSFERS:
            those = events[events["op"] == op]
            for code in np.unique(those["tensor"]):
                nbytes = int(those["bytes"][those["tensor"] == code].sum())
                moved[f"{OPS[op]} {self.trace.tensors[code]}"] = nbytes
        held = zip(self.buffers, self.on_chip[at].tolist(), strict=True)
        return Frame(
            *(visit, stage.name, int(self.i[at]), int(self.j[at])),
            *(head + int(events[-1]["head"]), order, int(self.hbm_bytes[at].sum()), moved),
            on_chip={name: size for name, size in held if size},
            flops=int(self.step_flops[self.visits[: visit + 1]].sum()),
        )
