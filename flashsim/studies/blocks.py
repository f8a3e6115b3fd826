"""Compares tile sizes: computes the iterations, bytes and predicted time of each GPU kernel.

>>> from flashsim import Problem, blocks
>>> print(blocks.sizes(Problem(4096, head_dim=128, heads=16, dtype="bfloat16")))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from flashsim import report
from flashsim.counts.questions import in_words
from flashsim.counts.traffic import Traffic
from flashsim.errors import OptionError, TilingError, UnsupportedError, own_errors, shown
from flashsim.l2.launch import occupancy
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule import plans
from flashsim.schedule.tiling import Tiling
from flashsim.studies.predict.model import predict
from flashsim.studies.predict.prediction import untested

SIDES = (32, 64, 128, 256)


@dataclass(frozen=True)
class TiledStage:
    """The cost of one stage (one kernel of a pass) with one tile size.

    Attributes
    ----------
    outer : int
        Number of tiles (of queries, or of keys) in the outer loop of one head. Each has its own
        thread block.
    visits : int
        Iterations of the inner loop, summed over all outer tiles of one head.
    sram : int
        On-chip bytes per thread block.
    blocks : int
        Number of thread blocks that run on an SM at the same time; 0 if not even one block fits.
    bytes : int
        Requested bytes, for all heads.
    seconds : float or None
        Predicted time of flashsim's portable kernels; None if they do not support the tile.
    """

    stage: str
    tiling: Tiling
    outer: int
    visits: int
    sram: int
    blocks: int
    bytes: int
    seconds: float | None


@own_errors
@dataclass(frozen=True, eq=False, repr=False)
class BlockSizes(report.Tabled):
    """The costs of all stages with all tile sizes; prints as a table."""

    problem: Problem
    device: Device
    algorithm: str
    direction: str
    found: tuple[TiledStage, ...]

    def best(self, stage: str) -> TiledStage:
        """Return the cost of a stage with the tile size that makes the stage fastest.

        If no predicted time exists, the method returns the cost with the fewest bytes.
        """
        rows = [b for b in self.found if b.stage == stage and (b.blocks or b.seconds)]
        if not rows:
            raise OptionError(
                f"no tile of stage {shown(stage)} fits on chip; pass smaller tile sizes as sides="
            )
        timed = [b for b in rows if b.seconds is not None]
        return min(timed or rows, key=lambda b: (b.seconds or 0, b.bytes))

    def table(self) -> Table:
        """Return a table with one row per stage and tile size."""
        table = Table(
            f"{self.algorithm} {self.direction}, {in_words(self.problem)} on {self.device.name}",
            ("stage", "tile", "tiles", "visits", "SRAM B", "blocks/SM", "requested B", "ms"),
            note="tiles: outer tiles per head, with one thread block each; visits: iterations of "
            "the inner loop per head; blocks/SM: 0 if a block needs more than the device's "
            f"{self.device.sram_bytes:,} B, counting accumulators, which real kernels keep in "
            "registers; ms: predicted for flashsim's portable kernels, empty if they do not "
            f"support the tile{untested(self.device)}; {self._words()}",
        )
        for b in self.found:
            ms = None if b.seconds is None else 1e3 * b.seconds
            sizes = b.outer, b.visits, b.sram, b.blocks, b.bytes
            table.add(b.stage, str(b.tiling), *sizes, ms)
        return table

    def _words(self) -> str:
        fitting = dict.fromkeys(b.stage for b in self.found if b.blocks or b.seconds)
        best = ", ".join(f"{stage} {self.best(stage).tiling}" for stage in fitting)
        return f"best: {best}" if best else "no tile fits"


@own_errors
def sizes(
    problem: Problem,
    sides: Sequence[int] = SIDES,
    *,
    tilings: Sequence[Tiling] | None = None,
    algorithm: str = "flash2",
    direction: str = "forward",
    device: str | Device = "H200",
) -> BlockSizes:
    """Return the cost of each stage (kernel) of a pass with each tile size.

    Stages without an inner loop, such as delta, are left out.

    Parameters
    ----------
    problem : Problem
    sides : sequence of int
        The numbers of rows and of columns that a tile can have. Every pair of them is tried.
    tilings : sequence of Tiling, optional
        The tiles to try, instead of `sides`.
    algorithm, direction : str
    device : str or Device

    Raises
    ------
    OptionError
        If `sides` is empty.
    """
    device = Device.get(device)
    if tilings is None:
        tilings = [Tiling(q, k) for q, k in product(sides, sides)]
    if not tilings:
        raise OptionError(f"sides= must contain at least one tile size, got {shown(sides)}")
    blocks = [b for t in tilings for b in _blocks(problem, t, algorithm, direction, device)]
    order = [stage.name for stage in plans.stages(problem, algorithm, direction)]
    blocks.sort(key=lambda b: order.index(b.stage))
    return BlockSizes(problem, device, algorithm, direction, tuple(blocks))


@own_errors
def mixed(
    problem: Problem,
    tilings: Mapping[str, Tiling],
    *,
    algorithm: str = "flash2",
    device: str | Device = "H200",
) -> BlockSizes:
    """Return the costs of a backward pass whose stages have tiles of different sizes.

    `tilings` maps stages to tilings, such as ``{"dkdv": ..., "dq": ...}``.

    Stages exchange only delta (one value per row), so a stage's tile size does not change the bytes
    of the other stages.

    Raises
    ------
    OptionError
        If a stage is missing or unknown.
    """
    stages = [s.name for s in plans.stages(problem, algorithm, "backward") if _visited(s)]
    if set(tilings) != set(stages):
        raise OptionError(
            f"tilings= must have exactly the stages {', '.join(stages)} as keys, got "
            f"{', '.join(tilings) or 'none'}"
        )
    device = Device.get(device)
    blocks = [
        block
        for stage in stages
        for block in _blocks(problem, tilings[stage], algorithm, "backward", device)
        if block.stage == stage
    ]
    return BlockSizes(problem, device, algorithm, "backward", tuple(blocks))


def _visited(stage: plans.Stage) -> bool:
    return bool(stage.visit) and not stage.whole_rows


def _blocks(
    problem: Problem, tiling: Tiling, algorithm: str, direction: str, device: Device
) -> list[TiledStage]:
    counted = Traffic(problem, tiling, algorithm, direction, device, "ascending")
    held = tiling.buffers(problem, algorithm, direction)
    times: dict[str, float] = {}  # of portable kernels; none if they cannot run
    how: dict[str, Any] = {"direction": direction, "algorithm": algorithm, "tiling": tiling}
    if algorithm in ("flash2", "flash2-fused"):
        with suppress(TilingError, UnsupportedError):
            prediction = predict(problem, kernels="portable", device=device, **how)
            times = {stage.name: stage.seconds for stage in prediction.stages}
    blocks = []
    for stage in filter(_visited, counted.stages):
        schedule, need = counted.schedule(stage), sum(held[stage.name].values())
        outer = schedule.t_r if stage.outer == "queries" else schedule.t_c
        at_once = occupancy(stage, schedule, device) if need <= device.sram_bytes else 0
        nbytes = sum(n for (name, *_), n in counted.transfers.items() if name == stage.name)
        costs = outer, schedule.n_visits, need, at_once, nbytes, times.get(stage.name)
        blocks.append(TiledStage(stage.name, tiling, *costs))
    return blocks


__all__ = ["SIDES", "BlockSizes", "TiledStage", "mixed", "sizes"]
