"""The scopes of a stage (steps, visits and strips); the end of a scope frees its tiles."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from flashsim.engines.sandbox.arithmetic import priced
from flashsim.engines.sandbox.lines import at_work
from flashsim.engines.sandbox.room import Room
from flashsim.engines.sandbox.spans import tile_number
from flashsim.engines.sandbox.tape import taped_scope
from flashsim.errors import MemoryModelError
from flashsim.schedule import plans
from flashsim.schedule.names import COMPUTE
from flashsim.schedule.schedule import Schedule, Visit


class Scopes:
    """The scopes that are open in one stage, and the cost of the operations in each."""

    def __init__(self, schedule: Schedule, stage: plans.Stage) -> None:
        self._schedule, self._stage = schedule, stage
        self._rooms: list[Room] = []
        self._costs: list[np.ndarray] = []
        self._scopes: list[tuple[int, int, int, int]] = []  # member of the group, i, j, visit
        self._sums: list[np.ndarray] = []
        self._visits = 0
        self._over = False

    def _log(self, op: int, tensor: int, nbytes: int) -> None:
        raise NotImplementedError

    def _give_back(self, room: Room, where: str) -> None:
        raise NotImplementedError

    @taped_scope("step")
    @contextmanager
    def step(self, outer: int | slice, member: int = 0) -> Iterator[None]:
        """Open a step of the outer loop: the work of one thread block.

        All tiles are freed at the end of a step.

        Parameters
        ----------
        outer : slice or int
            The rows of the query tile (with ``outer="keys"``, of the key tile), or its number.
        """
        if self._scopes:
            raise MemoryModelError(
                "a step (sram.step) cannot contain another step, because a step is the work of "
                "one thread block; use sram.strip() to open a scope within a step",
                "scope",
            )
        n = self._tile(outer, self._stage.outer)
        tile = (n, -1) if self._stage.outer == "queries" else (-1, n)
        with self._scope((member, *tile, -1), computes=True):
            yield

    def steps(self) -> Iterator[tuple[int, slice]]:
        """Yield each row tile's number and rows inside its step: a Q-outer loop."""
        for i in range(self._schedule.t_r):
            with self.step(i):
                yield i, self._schedule.row_slice(i)

    @taped_scope("strip")
    @contextmanager
    def strip(self) -> Iterator[None]:
        """Open a scope inside a step or a visit; tiles allocated in it are freed at its end."""
        with self._scope(self._here(), computes=False):
            yield

    @taped_scope("visit")
    @contextmanager
    def visit(
        self, visit: Visit | slice, cols: slice | None = None, member: int = 0
    ) -> Iterator[None]:
        """Open a visit: the work on one tile of scores.

        Tiles allocated in a visit are freed at its end.

        Parameters
        ----------
        visit, cols : slice
            The query rows and the keys of the tile; or a single argument, a `Visit` from
            `sram.schedule`.
        """
        _, i, j, at = self._here()
        if at >= 0:
            raise MemoryModelError(
                "a visit (sram.visit) cannot contain another visit; use sram.strip() to open a "
                "scope for smaller tiles within a visit",
                "scope",
            )
        if isinstance(visit, Visit):
            own = self._tile(visit.i, "queries"), self._tile(visit.j, "keys")
        elif cols is None:
            raise MemoryModelError(
                "a visit works on a tile of scores, so it needs both its rows and its columns: "
                "sram.visit(rows, cols)"
            )
        else:
            own = self._tile(visit, "queries"), self._tile(cols, "keys")
        if own[i < 0] != max(i, j):
            side = "query" if i >= 0 else "key"
            raise MemoryModelError(
                f"a visit to {side} tile {own[i < 0]} cannot lie within the step of {side} tile "
                f"{max(i, j)}; open a step for each {side} tile",
                "scope",
            )
        self._visits += 1
        with self._scope((member, *own, self._visits - 1), computes=True):
            yield

    @contextmanager
    def _scope(self, where: tuple[int, int, int, int], *, computes: bool) -> Iterator[None]:
        self._check_open()
        self._scopes.append(where)
        if computes:
            self._sums.append(priced("", 0, 0, 0))
        done = False
        try:
            yield
            done = True
        finally:
            depth = len(self._scopes)
            if computes:
                costs = self._sums.pop()
                if done:
                    self._log(COMPUTE, 0, 0)
                    self._costs.append(costs)
            for room in [room for room in self._rooms if room.depth == depth]:
                self._give_back(room, f"the scope of {at_work()} ended")
            self._scopes.pop()

    def _here(self) -> tuple[int, int, int, int]:
        self._check_open()
        if not self._scopes:
            raise MemoryModelError(
                f"stage {self._stage.name!r} works in steps, one per thread block, which do not "
                "share SRAM: open a step with `with sram.step(rows):`",
                "scope",
            )
        return self._scopes[-1]

    def _check_open(self) -> None:
        if self._over:
            raise MemoryModelError(
                f"stage {self._stage.name!r} has ended, and its SRAM was freed; do this work "
                "before the stage ends, or open another stage",
                "freed",
            )

    def _tile(self, which: int | slice, side: str) -> int:
        return tile_number(which, side, self._schedule, self._stage.name)
