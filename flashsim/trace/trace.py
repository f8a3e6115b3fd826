"""`Trace`: the recorded transfers and computations of a run, event by event, with query methods.

All heads run the same loops, so a trace stores one head's events per stage, and a number of
repetitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from flashsim.counts import questions, traffic
from flashsim.counts.traffic import Traffic
from flashsim.counts.work import KINDS
from flashsim.errors import DTypeError, TraceError, UnsupportedError, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.schedule import plans
from flashsim.schedule.names import COMPUTE, OPS, TRANSFERS
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import EVENT, StageTrace, Structured, buffer_of, gain
from flashsim.trace.recording import Recording
from flashsim.trace.steps import Frame, Steps

if TYPE_CHECKING:
    from flashsim.l2 import Dram, L2Model


@own_errors
class Trace(Recording, questions.Answers):
    """The recorded events of a run, with the same query methods as the closed-form `Traffic`."""

    # -- events ---------------------------------------------------------------------------------

    @cached_property
    def events(self) -> Structured:
        """All events of all heads in one structured array (dtype `EVENT`), stage by stage."""
        parts = [stage.expand(number) for number, stage in enumerate(self.stages)]
        return np.concatenate(parts) if parts else np.zeros(0, EVENT)

    @property
    def n_events(self) -> int:
        """The number of events of all heads, computed without listing them."""
        return sum(len(stage.events) * stage.repeat for stage in self.stages)

    @property
    def tiling(self):
        """The size of the tiles of all stages; `Tiling.of` returns that of one stage."""
        if self.own is not None:
            return self.stages[0].schedule.tiling
        return Tiling.joined({stage.name: stage.schedule.tiling for stage in self.stages})

    @property
    def parts(self) -> int:
        """The largest number of parts into which the keys of a row tile are split."""
        return int(self.schedule.part_counts.max(initial=1))

    @property
    def schedule(self) -> Schedule:
        """The schedule of the stage with the most visits; plots show this schedule."""
        return self.main_stage.schedule

    @property
    def main_stage(self) -> StageTrace:
        """The first of the stages with the most visits."""
        return max(self.stages, key=lambda s: int((s.events["visit"] >= 0).sum()))

    def stage(self, name: str) -> StageTrace:
        """Return the trace of the stage with this name."""
        stages = {stage.name: stage for stage in reversed(self.stages)}
        return stages[checks.one_of("stage", name, [s.name for s in self.stages])]

    # -- totals ---------------------------------------------------------------------------------

    @cached_property
    def transfers(self) -> dict[tuple[str, str, str], int]:
        """The requested bytes over all heads, as ``{(stage, op, tensor): bytes}``."""
        result: Counter[tuple[str, str, str]] = Counter()
        names = self.tensors
        for stage in self.stages:
            events = stage.events
            moving = np.isin(events["op"], TRANSFERS) & (events["bytes"] > 0)
            keys = events["op"][moving].astype(np.int64) * len(names) + events["tensor"][moving]
            groups, inverse = np.unique(keys, return_inverse=True)
            sums = np.zeros(len(groups), np.int64)
            np.add.at(sums, inverse, events["bytes"][moving])
            for key, total in zip(groups.tolist(), sums.tolist(), strict=True):
                op, tensor = divmod(key, len(names))
                result[stage.name, OPS[op], names[tensor]] += total * stage.repeat
        return dict(result)

    def compulsory(self) -> int:
        """Return the bytes that any algorithm must move: each input and each output once."""
        if self.own is not None:
            return self.own.compulsory
        return traffic.compulsory(self.problem, self.direction)

    def by_tile(self, op: str | None = None, tensor: str | None = None) -> np.ndarray:
        """Return the requested bytes of each score tile over all heads, int64 (T_r, T_c).

        Transfers of an outer step (Q and O in a Q-outer loop) belong to no single tile; only
        `by_outer` counts such transfers. A stage whose tiles have another size (`Tiling.dq_rows`)
        is left out.
        """
        grid = np.zeros((self.schedule.t_r, self.schedule.t_c), np.int64)
        for stage in self.stages:
            if (stage.schedule.t_r, stage.schedule.t_c) != grid.shape:
                continue
            e = stage.events[self._moving(stage.events, op, tensor)]
            e = e[(e["i"] >= 0) & (e["j"] >= 0)]
            np.add.at(grid, (e["i"], e["j"]), e["bytes"] * stage.repeat)
        return grid

    def by_outer(self, op: str | None = None, tensor: str | None = None) -> int:
        """Return the bytes that outer steps request outside of visits, over all heads."""
        total = 0
        for stage in self.stages:
            e = stage.events[self._moving(stage.events, op, tensor)]
            total += int(e["bytes"][(e["i"] < 0) | (e["j"] < 0)].sum()) * stage.repeat
        return total

    def by_head(self) -> np.ndarray:
        """Return the requested bytes of each query head, int64 (batch * heads,).

        The bytes of a transfer for a group of query heads count for the group's first head.
        """
        totals = np.zeros(self.problem.batch * self.problem.heads, np.int64)
        for stage in self.stages:
            e = stage.events[self._moving(stage.events)]
            per_head = np.bincount(e["head"], weights=e["bytes"], minlength=1).astype(np.int64)
            first = np.arange(stage.repeat) * stage.stride
            for member, nbytes in enumerate(per_head):
                totals[first + member] += nbytes
        return totals

    def _moving(
        self, events: Structured, op: str | None = None, tensor: str | None = None
    ) -> np.ndarray:
        questions.check_names(op, tensor, self.tensors)
        chosen = np.isin(events["op"], TRANSFERS if op is None else OPS.index(op))
        if tensor is not None:
            chosen &= events["tensor"] == self.tensors.index(tensor)
        return chosen

    # -- work -----------------------------------------------------------------------------------

    @cached_property
    def _work(self) -> tuple[dict[str, int], dict[str, int]]:
        if self.own is None:
            return super()._work
        costs = [s.repeat * s.costs.sum(axis=0) for s in self.stages if s.costs is not None]
        *of_kinds, read, write = np.sum(costs, axis=0).tolist()
        return dict(zip(KINDS, of_kinds, strict=True)), {"read": read, "write": write}

    def _extents(self) -> Iterator[tuple[plans.Stage, questions.Extent, questions.Extent]]:
        for stage in self.stages:  # the executed visits and steps
            done = stage.events[stage.events["op"] == COMPUTE]
            visiting = done["visit"] >= 0
            yield stage.stage, stage.extent(done[visiting]), stage.extent(done[~visiting])

    # -- SRAM -----------------------------------------------------------------------------------

    def sram_timeline(self, stage: str | None = None) -> tuple[list[str], np.ndarray]:
        """Return the bytes in each on-chip buffer after each event of one head in a stage.

        Without `stage`, the method uses the stage with the most visits.

        Returns
        -------
        names : list of str
            The buffers' names.
        held : ndarray of int64, shape (events, len(names))
            Bytes in each buffer after each event of the stage.
        """
        events = (self.main_stage if stage is None else self.stage(stage)).events
        change = gain(events)
        owner = buffer_of(events["tensor"])
        codes = np.unique(owner[change != 0])
        held = np.zeros((len(events), len(codes)), np.int64)
        for column, code in enumerate(codes):
            held[:, column] = np.cumsum(np.where(owner == code, change, 0))
        return [self.tensors[code] for code in codes], held

    def peak_sram(self) -> int:
        """Return the most bytes that one thread block had on chip at any time, over all stages."""
        peaks = [np.cumsum(gain(stage.events)).max(initial=0) for stage in self.stages]
        return int(max(peaks, default=0))

    # -- over time ------------------------------------------------------------------------------

    def cumulative(self) -> np.ndarray:
        """Return one head's cumulative requested bytes after each visit, over all stages.

        Entry v of the result is the total after v visits, where a stage without visits, such as
        that of delta, counts as one visit. Bytes outside visits are added to the next visit or, at
        the end of a stage, to the stage's last visit.
        """
        per_visit = [np.zeros(1, np.int64)]
        for stage in self.stages:
            e = stage.events
            ended = np.cumsum((e["op"] == COMPUTE) & (e["visit"] >= 0))
            n = int(ended[-1]) if len(ended) else 0
            slot = np.minimum(ended, max(n - 1, 0))
            sums = np.zeros(max(n, 1), np.int64)
            np.add.at(sums, slot, np.where(np.isin(e["op"], TRANSFERS), e["bytes"], 0))
            per_visit.append(sums)
        return np.cumsum(np.concatenate(per_visit))

    @cached_property
    def _walk(self) -> Steps:
        return Steps(self)

    @property
    def n_visits(self) -> int:
        """The number of visits (tile pairs) of one head, or head group, summed over all stages."""
        return sum(
            int(((s.events["op"] == COMPUTE) & (s.events["visit"] >= 0)).sum()) for s in self.stages
        )

    def frame(self, step: int = -1, head: int = 0) -> Frame:
        """Return the state of memory right after visit `step` of one head; -1 is the last visit.

        Raises
        ------
        TraceError
            If `step` or `head` is out of range, or the trace has no visits.
        """
        heads, visits = self.problem.batch * self.problem.heads, self.n_visits
        if not visits:
            raise TraceError(
                "this trace has no visits, and so no frames: the mask leaves no query a key"
            )
        if not checks.is_int(step) or not -visits <= step < visits:
            raise TraceError(
                f"step= must be from 0 to {visits - 1}, or from -{visits} to -1 to count from the "
                f"last visit, got {shown(step)}"
            )
        if not checks.is_int(head) or not 0 <= head < heads:
            raise TraceError(f"head= must be from 0 to {heads - 1}, got {shown(head)}")
        return self._walk.frame(step % visits, head)

    # -- comparisons ----------------------------------------------------------------------------

    def predicted(self) -> Traffic:
        """Return the traffic that closed-form formulas predict for the trace's schedule.

        Unlike `flashsim.count`, this method does not check that tiles fit on chip, because a GPU
        kernel may keep tiles in registers.

        Raises
        ------
        UnsupportedError
            For a user's own algorithm, for which no closed form was derived.
        """
        if self.own is not None:
            raise UnsupportedError(
                f"{self.algorithm!r} is your own algorithm, so there is no closed form of its "
                "bytes; use trace.bytes(op, tensor) for the bytes that it moved"
            )
        first = self.stages[0].schedule
        return Traffic(
            *(self.problem, self.tiling, self.algorithm, self.direction, self.device),
            first.key_order,
            first.split,
        )

    def dram(self, device: str | Device | None = None, l2: L2Model | None = None) -> Dram:
        """Return the DRAM bytes that a model of the L2 cache of `device` predicts.

        By default, `device` is the trace's device. The model (`flashsim.l2`) replays the schedule's
        requests tile by tile.

        Raises
        ------
        UnsupportedError
            If there are too many requests to replay, or a score function indexes a captured array
            with elements of another captured array.
        """
        from flashsim.l2 import dram

        requested = self.predicted()
        if device is not None:
            requested.device = Device.get(device)
        return dram(requested, l2)

    def diff(self, other: Trace | Traffic) -> dict[tuple[str, str, str], tuple[int, int]]:
        """Return the transfers whose bytes differ from those of another trace or count.

        The result ``{(stage, op, tensor): (ours, theirs)}`` is empty if all bytes agree.

        Raises
        ------
        DTypeError
            If `other` is neither a trace nor a count.
        """
        if not hasattr(other, "transfers"):
            raise DTypeError(f"diff() needs a Trace or a Traffic, got {shown(other)}")
        ours, theirs = self.transfers, other.transfers
        return {
            key: (ours.get(key, 0), theirs.get(key, 0))
            for key in sorted({*ours, *theirs})
            if ours.get(key, 0) != theirs.get(key, 0)
        }

    def same_events(self, other: Trace) -> bool:
        """Return True if two traces have the same stages, with the same events.

        Raises
        ------
        DTypeError
            If `other` is not a trace.
        """
        checks.instance("other", other, Trace, "flashsim.Trace")
        return [s.name for s in self.stages] == [s.name for s in other.stages] and np.array_equal(
            self.events, other.events
        )

    # -- to and from disk -----------------------------------------------------------------------

    def save(self, path) -> None:
        """Write the trace to a versioned ``.npz`` file (no pickle), which `Trace.load` reads."""
        from flashsim.trace.file import save  # imported late, to keep `import flashsim` light

        save(self, path)

    @staticmethod
    def load(path) -> Trace:
        """Read a trace from a file that `save` wrote.

        Raises
        ------
        TraceError
            If the file does not exist, is damaged, is not a trace, or comes from a newer flashsim.
        """
        from flashsim.trace.file import load

        return Trace(**vars(load(checks.path("path", path))))

    def to_perfetto(self, path, *, heads: int = 1):
        """Write Chrome trace events for https://ui.perfetto.dev (see `perfetto.write`)."""
        from flashsim.trace.perfetto import write

        return write(self, path, heads=heads)

    # -- for people -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[np.void]:
        return iter(self.events)

    def __len__(self) -> int:
        return self.n_events

    def __repr__(self) -> str:
        return (
            f"<Trace {self.algorithm} {self.direction} on {self.backend}: {self.n_events:,} events,"
            f" {self.bytes():,} B requested>"
        )
