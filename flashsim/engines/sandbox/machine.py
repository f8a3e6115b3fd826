"""`OpenMachine`: the argument that `flashsim.simulate` passes to the user's function."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from flashsim.engines.sandbox.hbm import OpenHbm
from flashsim.engines.sandbox.spans import span
from flashsim.engines.sandbox.sram import OpenSram
from flashsim.engines.sandbox.tape import taped_scope
from flashsim.errors import MemoryModelError
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.dataflow import Outer, Per
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import StageTrace
from flashsim.trace.validate import MOST_STAGES


class OpenMachine:
    """The simulated machine for one run of a user's own algorithm.

    Attributes
    ----------
    problem : Problem
        The problem, with its lengths, head_dim, scale and mask.
    tiling : Tiling
        The requested tiling; a stage may use a different tiling.
    device : Device
        `device.sram_bytes` is the SRAM of one thread block.
    hbm : OpenHbm
        The tensors: ``hbm.Q``, ``hbm.K``, ``hbm.V``, other inputs, and outputs. ``hbm.new``
        allocates a workspace.

    The arguments `samples` and `most_hbm` are passed to `OpenHbm`. A step (one thread block's work)
    may use `most` bytes of SRAM, by default `device.sram_bytes`.
    """

    def __init__(
        self,
        problem: Problem,
        tiling: Tiling,
        device: Device,
        *,
        samples: int = 1,
        most: int | None = None,
        most_hbm: int | None = None,
    ) -> None:
        self._problem, self._tiling, self._device = problem, tiling, device
        self._most = device.sram_bytes if most is None else most
        self._hbm = OpenHbm(problem, samples, most_hbm)
        self._stages: list[StageTrace] = []
        self._open = ""

    # Read-only properties: an algorithm cannot replace parts of the machine.
    problem = property(lambda self: self._problem)
    tiling = property(lambda self: self._tiling)
    device = property(lambda self: self._device)
    hbm = property(lambda self: self._hbm)
    stages = property(lambda self: tuple(self._stages), doc="The stages recorded so far.")

    def _taped(self) -> dict[str, int]:
        return {"machine": 0}

    @taped_scope("stage")
    @contextmanager
    def stage(
        self,
        name: str,
        *,
        outer: Outer = "queries",
        per: Per = "head",
        tiling: Tiling | None = None,
    ) -> Iterator[OpenSram]:
        """Open a context for one stage (a kernel on a GPU), and yield an empty SRAM.

        Steps of a stage share no tiles; only HBM passes data between them.

        Parameters
        ----------
        name : str
            The stage's name in the trace.
        outer : {"queries", "keys"}
            Whether each step works on a tile of queries or on a tile of keys.
        per : {"head", "group"}
            "head": each query head has its own loop. "group": all query heads that share a key head
            have one loop; `load`, `store`, `reduce` and `visit` then need the argument `member=`.
        tiling : Tiling, optional
            Default: the machine's tiling.
        """
        checks.one_of("outer", outer, ("queries", "keys"))
        checks.one_of("per", per, ("head", "group"))
        if self._open:
            raise MemoryModelError(
                f"stage {name!r} begins before {self._open!r} has ended; stages run one after "
                "another, so close each `with machine.stage(...)` block before you open the next",
                "scope",
            )
        checks.instance("a stage's name", name, str, "a word")
        if name in (stage.name for stage in self._stages) or not 0 < len(name) <= 60:
            raise MemoryModelError(
                f"stage {name!r} ran already; give each stage a different, short name"
            )
        if len(self._stages) >= MOST_STAGES:
            raise MemoryModelError(
                f"an algorithm may have at most {MOST_STAGES} stages; move the loop inside a "
                "single stage instead"
            )
        plan = plans.Stage(name, outer, per=per)
        schedule = Schedule(self._problem, tiling or self._tiling, outer)
        sram = OpenSram(self._hbm, schedule, plan, self._device, self._most)
        self._open = name
        try:
            yield sram
        finally:
            self._open = ""
            done = sram._done()
        self._stages.append(done)

    def row_tiles(self) -> list[slice]:
        """Return the row slices of all query tiles, each of up to `tiling.block_q` queries."""
        return _cut(self._problem.n_q, self._tiling.block_q)

    def key_tiles(self) -> list[slice]:
        """Return the row slices of all key tiles, each of up to `tiling.block_k` keys."""
        return _cut(self._problem.n_kv, self._tiling.block_k)

    def keep(self, rows: slice, cols: slice) -> np.ndarray | None:
        """Return a boolean array (rows, cols) that says which scores of a tile the mask keeps.

        The result is None if the mask keeps all scores. An algorithm may skip a tile that is fully
        masked. The mask depends only on positions, so reading it moves no bytes.
        """
        p = self._problem
        q, k = np.array(span(rows, p.n_q, "queries")), np.array(span(cols, p.n_kv, "keys"))
        kept = p.keep(p.sequences[0], q, k)
        return None if kept.all() else kept


def _cut(n: int, block: int) -> list[slice]:
    return [slice(at, min(at + block, n)) for at in range(0, n, block)]
