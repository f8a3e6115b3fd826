"""The events of traces: binary layout (28 bytes) and vocabulary; and `StageTrace`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsim.schedule import plans
from flashsim.schedule.names import ALLOC, CODES, COMPUTE, FREE, LOAD, TENSORS, TRANSFERS
from flashsim.schedule.schedule import Schedule

EVENT = np.dtype(
    [
        *((name, "u1") for name in ("op", "tensor", "level", "stage")),
        *((name, "<i4") for name in ("head", "i", "j", "visit")),
        ("bytes", "<i8"),
    ]
)


#: A span of time on a GPU: what one role of one thread block did for one visit.
TIMELINE = np.dtype(
    [
        *((name, "u1") for name in ("stage", "phase", "role")),
        ("sm", "<i2"),
        *((name, "<i4") for name in ("head", "i", "j", "visit")),
        *((name, "<i8") for name in ("start_ns", "end_ns")),
    ]
)
#: The work that a span covers. Spans of all other phases nest inside "visit" spans.
PHASES = ("visit", "load", "scores", "softmax", "output", "store")
#: The warps that did the work: the whole block, or a warp-specialised kernel's producer or
#: consumers.
ROLES = ("block", "producer", "consumer 0", "consumer 1", "consumer 2")


#: An array with columns. Their types are unknown to mypy, which takes up to two seconds for each
#: expression of several columns if it is told that this is an array.
Structured = Any


@dataclass(frozen=True, eq=False)
class StageTrace:
    """The events of one run of a stage's loops, and the number of runs.

    The stage runs its loops `repeat` times. Each run starts `stride` query heads after the previous
    run. In `events`, the field ``head`` counts from the first query head of the run. `costs`, int64
    (computes, kinds of FLOP + 2), exists only for a user's own algorithm. Each "compute" event has
    a row: the FLOPs by kind, then the bytes read from and written to SRAM. For built-in algorithms,
    `counts.work` computes FLOPs and SRAM bytes.
    """

    stage: plans.Stage
    schedule: Schedule
    repeat: int
    stride: int
    events: Structured
    costs: np.ndarray | None = None

    def __repr__(self) -> str:
        return f"<StageTrace {self.name}: {len(self.events):,} events, repeat={self.repeat:,}>"

    @classmethod
    def build(
        cls,
        stage: plans.Stage,
        schedule: Schedule,
        repeat: int,
        stride: int,
        rows: Sequence[tuple[int, ...]] | np.ndarray,
        costs: np.ndarray | None = None,
    ) -> StageTrace:
        """Build a stage's trace from tuples (op, tensor, member, i, j, visit, bytes)."""
        table = np.asarray(rows, np.int64).reshape(-1, 7)
        events = np.zeros(len(table), EVENT)
        for column, name in enumerate(("op", "tensor", "head", "i", "j", "visit", "bytes")):
            events[name] = table[:, column]
        events["level"] = ~np.isin(events["op"], TRANSFERS)
        events.setflags(write=False)
        return cls(stage, schedule, repeat, stride, events, costs)

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage.name

    def sides(self, i: np.ndarray, j: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays: the number of rows, and the number of columns, of each visit's tile.

        An outer step has -1 as its `i` or `j`. An outer step of a Q-outer loop counts as a tile
        with all keys of its sequence. An outer step of a KV-outer loop counts as a tile with 0
        rows.
        """
        schedule = self.schedule
        rows = np.where(i < 0, 0, schedule.rows[i, 1] - schedule.rows[i, 0]).astype(np.int64)
        cols = np.where(j < 0, schedule.key_counts[i], schedule.cols[j, 1] - schedule.cols[j, 0])
        if self.stage.parts == "merges":  # a step merges the rows of all parts of the keys
            rows *= schedule.slots[i, 1]
        return rows, cols.astype(np.int64)

    def extent(self, tiles: np.ndarray) -> tuple[int, int, int]:
        """Return the rows, columns and scores of visits or outer steps, summed over all heads."""
        rows, cols = self.sides(tiles["i"], tiles["j"])
        sums = int(rows.sum()), int(cols.sum()), int((rows * cols).sum())
        return self.repeat * sums[0], self.repeat * sums[1], self.repeat * sums[2]

    def expand(self, number: int) -> np.ndarray:
        """Return the events of all heads; `number` is the stage's index in the trace."""
        full = np.concatenate([self.events] * self.repeat)
        full["head"] += np.repeat(
            np.arange(self.repeat, dtype=np.int32) * self.stride, len(self.events)
        )
        full["stage"] = number
        return full


def gain(events: Structured) -> np.ndarray:
    """Return, per event, the change of the on-chip memory in use, in bytes."""
    on = (events["op"] == LOAD) | (events["op"] == ALLOC)
    off = events["op"] == FREE
    return np.where(on, events["bytes"], 0) - np.where(off, events["bytes"], 0)


def step_ends(events: Structured) -> np.ndarray:
    """Return the index of each outer step's last event.

    An outer step ends at the first event, after its "compute" event, that leaves no buffer on chip.
    """
    seen = np.cumsum((events["op"] == COMPUTE) & (events["visit"] < 0))
    closed = np.flatnonzero((np.cumsum(gain(events)) == 0) & (seen > 0))
    return closed[np.searchsorted(seen[closed], np.arange(1, seen.max(initial=0) + 1))]


def buffer_of(codes: np.ndarray) -> np.ndarray:
    """Return, for each tensor code, the code of the on-chip buffer that holds the tensor's tiles.

    Except in a user's own algorithm, the buffer's name is the tensor's name without `_acc`.
    """
    table = np.arange(256)
    table[: len(TENSORS)] = [CODES[name.removesuffix("_acc")] for name in TENSORS]
    return table[codes]
