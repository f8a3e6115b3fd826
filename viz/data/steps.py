"""`Steps`: one head's way through a trace, step by step, computed once for all steps.

A step ends where something was computed: at each visit of a score tile, and at the end of each
outer step (where FlashAttention-2 divides by l and stores O). `Trace.frame` answers the same for
one step at a cost that grows with the trace; animations and pages need every step.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from flashsim.counts.work import KINDS, stage_work
from flashsim.errors import TraceError
from flashsim.schedule.names import COMPUTE, FREE, TRANSFERS
from flashsim.trace.events import EVENT, StageTrace, buffer_of, gain
from flashsim.trace.trace import Trace


class Steps:
    """The steps of one walk of each stage of a trace, in order.

    Attributes
    ----------
    trace : Trace
    events : ndarray of dtype `EVENT`, (n_events,)
        One walk of each stage; ``stage`` says which.
    ends : ndarray of int64, (n_steps,)
        The event that ends each step (its "compute").
    stage, i, j, visit : ndarray of int, (n_steps,)
        -1 where a step has no such number: j with queries outside, at the end of a row.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        parts = [stage.events.copy() for stage in trace.stages]
        for number, part in enumerate(parts):
            part["stage"] = number
        self.events = np.concatenate(parts) if parts else np.zeros(0, EVENT)
        self.ends = np.flatnonzero(self.events["op"] == COMPUTE)
        if not len(self.ends):
            raise TraceError(
                f"{trace!r} holds no visit, so there is nothing to walk through; "
                "record one with flashsim.run(..., trace=True)"
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
        """The first event of each step."""
        return np.concatenate([[0], self.ends[:-1] + 1])

    def moves(self, step: int) -> np.ndarray:
        """The transfers of a step: a slice of `events` with loads, stores and reductions only."""
        events = self.events[self.starts[step] : self.ends[step] + 1]
        return events[np.isin(events["op"], TRANSFERS)]

    @cached_property
    def hbm_bytes(self) -> np.ndarray:
        """int64 (n_steps, 3): bytes loaded, stored and reduced when each step has ended."""
        totals = np.zeros((len(self.events), len(TRANSFERS)), np.int64)
        for column, op in enumerate(TRANSFERS):
            totals[:, column] = np.where(self.events["op"] == op, self.events["bytes"], 0)
        return np.cumsum(totals, axis=0)[self.ends]

    @cached_property
    def flops(self) -> np.ndarray:
        """int64 (n_steps,): floating-point operations done when each step has ended."""
        return np.cumsum(self.step_flops)

    @cached_property
    def step_flops(self) -> np.ndarray:
        """int64 (n_steps,): floating-point operations of each step, priced as `Trace.flops`."""
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
                costs = [cost for op in ops for cost in op.flops.values()]
                rows, cols = self._extent(stage, chosen)
                done[chosen] = (
                    sum(c.row for c in costs) * rows
                    + sum(c.col for c in costs) * cols
                    + sum(c.score for c in costs) * rows * cols
                )
        return done

    def _extent(self, stage: StageTrace, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of some steps.

        The end of an outer step spans its sequence's keys, or with keys outside columns alone.
        """
        schedule, i, j = stage.schedule, self.i[chosen], self.j[chosen]
        rows = np.where(i < 0, 0, schedule.rows[i, 1] - schedule.rows[i, 0]).astype(np.int64)
        cols = np.where(j < 0, schedule.key_counts[i], schedule.cols[j, 1] - schedule.cols[j, 0])
        if stage.stage.parts == "merges":  # a step works on the rows of each part
            rows *= schedule.slots[i, 1]
        return rows, cols

    @cached_property
    def notes(self) -> list[str]:
        """Of which part of the keys each step is, or how many it merges; "" where there is one."""
        found = [""] * len(self)
        for number, stage in enumerate(self.trace.stages):
            slots, parts = stage.schedule.slots, stage.schedule.part_counts
            done = np.zeros(stage.schedule.t_r, np.int64)
            for step in np.flatnonzero(self.stage == number) if stage.stage.parts else ():
                i = self.i[step]
                if stage.stage.parts == "merges":
                    found[step] = f"{slots[i, 1]} parts merged"
                    continue
                if parts[i] > 1:
                    found[step] = f"part {done[i] + 1} of {parts[i]}"
                done[i] += self.visit[step] < 0
        return found

    @cached_property
    def buffers(self) -> list[str]:
        """Names of all on-chip buffers, in the order they first appear."""
        owner = buffer_of(self.events["tensor"])[gain(self.events) != 0]
        codes, first = np.unique(owner, return_index=True)
        return [self.trace.tensors[code] for code in codes[np.argsort(first)]]

    @cached_property
    def on_chip(self) -> np.ndarray:
        """int64 (n_steps, n_buffers): what SRAM holds when it is fullest during each step."""
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
        """Bytes that fill a bar of SRAM, so that bars compare: a block's share of the device.

        A GPU's kernel may hold more: its registers come on top, and the bar ends at the peak.
        """
        return max(int(self.on_chip.sum(axis=1).max(initial=1)), self.trace.device.sram_bytes)

    @cached_property
    def order(self) -> np.ndarray:
        """int64 (n_steps,): how many visits its stage has made before each step."""
        seen = np.cumsum(self.visit >= 0)
        before = np.concatenate([[0], seen[:-1]])
        first = np.searchsorted(self.stage, np.arange(len(self.trace.stages)))
        return before - before[np.minimum(first, len(self) - 1)][self.stage]
