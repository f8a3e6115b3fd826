"""Runs an algorithm on the simulated two-level memory: one HBM, and one SRAM per kernel."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from flashsim.algorithms.hbm import Hbm
from flashsim.algorithms.sram import Sram
from flashsim.counts.traffic import strip_rows
from flashsim.problem.hardware import Device
from flashsim.problem.precision import USUAL, Precision, Roundings
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.schedule import KeyOrder, Schedule, check_visits
from flashsim.schedule.split import WHOLE, Split
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import StageTrace


@dataclass(eq=False)
class Machine:
    """One run of one algorithm: the simulated HBM, and a trace of each completed stage (kernel).

    `schedules` keeps each stage's schedule between runs of one problem with one tiling.
    """

    problem: Problem
    tiling: Tiling
    device: Device
    algorithm: str
    direction: str
    key_order: KeyOrder = "ascending"
    split: Split = WHOLE
    record: bool = False
    precision: Precision = USUAL
    schedules: dict[str, Schedule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p, how = self.problem, (self.algorithm, self.direction, self.split)
        self.tiling.check(p, self.device, *how)
        self.hbm = Hbm(p)
        self.stages: list[StageTrace] = []
        planned = plans.stages(p, *how)
        check_visits(planned, p, self.tiling)
        self._plan = {stage.name: stage for stage in planned}
        #: Log-sum-exp of each row, for the caller, if the algorithm does not store it in HBM.
        self.noted_lse = np.full((p.batch * p.kv_heads, p.group, p.n_q), np.nan)

    def note_lse(self, rows: slice, lse: np.ndarray) -> None:
        """Keep the LSE of rows as a result, without a store to HBM and without counting bytes."""
        self.noted_lse[..., rows] = lse

    @property
    def parts(self) -> int:
        """The largest number of parts into which the keys of any query are split."""
        if self.split == WHOLE and not self.problem.shared_prefix:
            return 1
        how = self.key_order, False, self.split
        return int(Schedule(self.problem, self.tiling, "queries", *how).slots[:, 1].max())

    def has(self, name: str) -> bool:
        """Return True if the algorithm runs this stage (kernel) for this problem."""
        return name in self._plan

    @contextmanager
    def stage(self, name: str) -> Iterator[Sram]:
        """Run one stage (kernel): yield an empty SRAM, which has the stage's schedule."""
        stage = self._plan[name]
        schedule = self.schedules.get(name)
        if schedule is None:
            how = stage.outer, self.key_order, stage.dense, self.split
            tile = self.tiling.of(stage.name)
            schedule = self.schedules[name] = Schedule(self.problem, tile, *how)
        roundings = Roundings.of(self.problem, self.algorithm, self.direction, name, self.precision)
        sram = Sram(
            *(self.hbm, schedule, stage, self.device), record=self.record, roundings=roundings
        )
        yield sram
        self.stages.append(sram.done())

    @staticmethod
    def part_slice(schedule: Schedule, rows: slice, part: int) -> slice:
        """Return the slice of `O_part` and `L_part` for a range of rows and a part of the keys."""
        before = part * schedule.n_rows
        return slice(before + rows.start, before + rows.stop)

    def strips(self, sram: Sram, i: int) -> Iterator[slice]:
        """Yield slices of row tile `i`, each with as many full rows of scores as fit on chip."""
        rows = sram.schedule.row_slice(i)
        height = strip_rows(sram.stage, sram.schedule, self.device)
        for start in range(rows.start, rows.stop, height):
            yield slice(start, min(start + height, rows.stop))
