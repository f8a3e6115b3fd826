"""The simulated machine on which the ladder's algorithms ("rungs") run one attention head.

The outer loop runs over row tiles of the score matrix, the inner loop over all tiles of a row.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from flashsim.algorithms.hbm import Hbm
from flashsim.algorithms.sram import Sram
from flashsim.errors import SramOverflow
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.names import OPS, TENSORS, TRANSFERS
from flashsim.schedule.plans import Stage
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling


class Bench:
    """A simulated machine: HBM contains a rung's inputs, and each kernel gets an empty SRAM.

    Attributes
    ----------
    hbm : Hbm
        Tensors by name. The inputs are S (n_q, n_kv), or Q, K and V. The output is P (n_q, n_kv) or
        O (n_q, head_dim).
    transfers : dict
        Bytes moved so far, ``{(op, tensor): bytes}``.
    peak : int
        The most bytes on chip at any time so far.
    """

    def __init__(self, problem: Problem, tiling: Tiling, device: Device) -> None:
        self.problem, self.tiling, self.device = problem, tiling, device
        self.hbm = Hbm(problem)
        self.schedule = Schedule(problem, tiling, dense=True)
        self.transfers: Counter[tuple[str, str]] = Counter()
        self.peak = 0

    def row_tiles(self, name: str) -> Iterator[tuple[Sram, int, slice, int]]:
        """Run one kernel: yield an empty SRAM, and the number, rows and height of each row tile.

        The SRAM has the device's capacity, and is emptied after each row tile. The kernel's
        transfers are recorded after its last row tile.
        """
        stage = Stage(name, "queries", (), dense=True)
        sram = Sram(self.hbm, self.schedule, stage, self.device, record=True)
        for i, rows in sram.steps():
            yield sram, i, rows, rows.stop - rows.start
        events = sram.done().events
        for event in events[np.isin(events["op"], TRANSFERS)]:
            self.transfers[OPS[event["op"]], TENSORS[event["tensor"]]] += int(event["bytes"])
        self.peak = max(self.peak, sram.peak)

    def visits(self, sram: Sram, i: int) -> Iterator[slice]:
        """Yield the columns of each score tile in row tile `i`, then free the loaded data."""
        for visit in self.schedule.visits(i):
            with sram.visit(visit):
                yield visit.cols

    def require_row(self, what: str, score: int, per_row: int = 0, per_tile: int = 0) -> None:
        """Raise `SramOverflow`, with the longest possible row, if a row tile does not fit.

        On chip, each score takes `score` bytes, each row another `per_row` bytes, and each tile
        another `per_tile` bytes.
        """
        height = min(self.tiling.block_q, self.problem.n_q)
        need = height * (self.problem.n_kv * score + per_row) + per_tile
        if need <= self.device.sram_bytes:
            return

        def longest(rows: int) -> int:
            return max(0, ((self.device.sram_bytes - per_tile) // rows - per_row) // score)

        n, device = self.problem.n_kv, self.device
        raise SramOverflow(
            f"{what} keeps {height} whole rows of {n:,} scores on chip ({need:,} B), but a thread "
            f"block of {device.name} has {device.sram_bytes:,} B; use rows of at most "
            f"{longest(height):,} scores (with block_q=1, {longest(1):,}), or an online softmax"
        )
