"""What a family of kernels is: which tiles it takes, and which kernel runs each stage of a pass.

`launch_policy.portable` has two, `launch_policy.hopper` one, and `numba_gpu.launch_policy` the same
in Python. The engine (`cupy_gpu.engine`) owns arrays, errors and traces; none of this needs a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from flashsim.backends.launch.device_tables import Lowered, in_turns, lower
from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.backends.launch.passes import KernelPass
from flashsim.errors import FlashSimError, TilingError, UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.clump import clump_size
from flashsim.schedule.schedule import KeyOrder, Schedule
from flashsim.schedule.tiling import Tiling

#: A kernel's variant before a walk's tables and a report say more.
PLAIN = Variant(spans=True, descending=False)


@dataclass(frozen=True)
class Family(ABC):
    """Kernels for all stages of FlashAttention-2, or for the forward alone.

    Attributes
    ----------
    name : str
        As traces say it.
    load : callable
        The compiler: ``load(kernel, device)`` is the function on CuPy's current device, ready to
        launch.
    like : Variant
        What the kernels are compiled for, but for what a walk and a report ask.
    """

    name: str
    load: Callable[[Kernel, int], Any]
    like: Variant = PLAIN

    @abstractmethod
    def refusal(
        self,
        problem: Problem,
        tiling: Tiling | None,
        gpu: Gpu,
        direction: str,
        algorithm: str = "flash2",
    ) -> str | None:
        """Why these kernels do not run this, with a default tiling for None; None if they do."""

    @abstractmethod
    def tilings(
        self, problem: Problem, gpu: Gpu, direction: str, algorithm: str = "flash2"
    ) -> tuple[Tiling, ...]:
        """Every tiling that the kernels run on this GPU."""

    @abstractmethod
    def default(
        self, problem: Problem, gpu: Gpu, direction: str, algorithm: str, ordered: bool = False
    ) -> Tiling | None:
        """The fastest tiling of those measured on an H200; None where `refusal` has a reason."""

    def refused(self, reason: str) -> FlashSimError:
        """The error that gives `refusal`'s reason."""
        return TilingError(reason)

    def choose(
        self,
        problem: Problem,
        tiling: Tiling | None,
        gpu: Gpu,
        direction: str,
        algorithm: str = "flash2",
        ordered: bool = False,
    ) -> Tiling:
        """The tiling given, or for None the default.

        Raises
        ------
        TilingError, UnsupportedError
            As `refused` says it.
        """
        if reason := self.refusal(problem, tiling, gpu, direction, algorithm):
            raise self.refused(reason)
        chosen = tiling or self.default(problem, gpu, direction, algorithm, ordered)
        assert chosen is not None  # else refused
        return chosen

    @abstractmethod
    def kernel(
        self,
        stage: str,
        problem: Problem,
        tiling: Tiling,
        variant: Variant,
        gpu: Gpu,
        *,
        fused: bool,
        ordered: bool,
    ) -> Kernel:
        """The kernel of a stage; `fused` and `ordered` are its pass's."""

    def orders_dq(self, problem: Problem) -> bool:
        """Whether the fused backward can add to dQ in a fixed order, faster than three passes."""
        return False

    def stores_dq(self, problem: Problem, gpu: Gpu, *, ordered: bool) -> bool:
        """Whether "flash2-once" runs here and is fastest; `ordered`: faster than dQ in order."""
        return False

    def fuses(self, problem: Problem, gpu: Gpu) -> bool:
        """Whether the fused backward, dQ added in any order, is faster than three passes."""
        return True

    def cluster(self, stage: plans.Stage, tables: Lowered, gpu: Gpu) -> int:
        """How many thread blocks share an item; never several in a fixed order or a timeline."""
        return 1

    def clump(self, stage: plans.Stage, tables: Lowered, gpu: Gpu) -> int:
        """How many walks are worked on together."""
        room = {"l2_bytes": gpu.l2_bytes, "processors": gpu.multiprocessors}
        return clump_size(stage, tables.schedule.problem, tables.tiles, **room)

    def remainder(
        self, stage: plans.Stage, tables: Lowered, cluster: int, gpu: Gpu
    ) -> tuple[tuple[int, int], ...]:
        """(blocks of a cluster, items) of launches that take a pass's first items; `cluster` is of
        those that take the others."""
        return ()

    def defers(self, stage: plans.Stage, tables: Lowered, cluster: int) -> bool:
        """Whether a fused pass computes dQ of a visit in the next one, where it can."""
        return False

    def in_step(self, stage: plans.Stage, tables: Lowered, clump: int, gpu: Gpu) -> bool:
        """Whether a pass with keys outside makes a visit for every head of a group in turn."""
        return False

    def forward_passes(
        self, problem: Problem, tiling: Tiling | None, gpu: Gpu, key_order: KeyOrder, report: str
    ) -> tuple[KernelPass, ...]:
        """The forward pass: one launch.

        Parameters
        ----------
        tiling : Tiling or None
            None takes `choose`'s.
        report : {"", "counts", "timeline"}
            What the kernels record.

        Raises
        ------
        TilingError, UnsupportedError
        """
        return _passes(self, "forward", problem, tiling, gpu, key_order, report, "flash2", False)

    def backward_passes(
        self,
        problem: Problem,
        tiling: Tiling | None,
        gpu: Gpu,
        key_order: KeyOrder,
        report: str,
        algorithm: str,
        ordered: bool = False,
    ) -> tuple[KernelPass, ...]:
        """The backward pass, in the order of its launches; as `forward_passes`.

        Parameters
        ----------
        ordered : bool
            "flash2-fused" only, and where `orders_dq`: add to dQ in a fixed order
            (`device_tables.in_turns`).
        """
        return _passes(
            self, "backward", problem, tiling, gpu, key_order, report, algorithm, ordered
        )


@lru_cache(maxsize=512)
def _passes(
    family: Family,
    direction: str,
    problem: Problem,
    tiling: Tiling | None,
    gpu: Gpu,
    key_order: KeyOrder,
    report: str,
    algorithm: str,
    ordered: bool,
) -> tuple[KernelPass, ...]:
    tiling = family.choose(problem, tiling, gpu, direction, algorithm, ordered)
    fused = algorithm != "flash2"
    if ordered and not (algorithm == "flash2-fused" and family.orders_dq(problem)):
        raise UnsupportedError(
            f"the {family.name} kernels do not add to dQ in a fixed order here; the three passes "
            'of algorithm="flash2" need none'
        )
    passes = []
    for stage in plans.stages(problem, algorithm, direction):
        by: Literal["row", "col"] = "row" if stage.outer == "queries" else "col"
        tables = lower(Schedule(problem, tiling, stage.outer, key_order), by)
        tables = in_turns(tables) if ordered and by == "col" else tables
        variant = replace(
            family.like,
            spans=tables.spans is not None,
            descending=tables.descending,
            counts=report != "",
            timeline=report == "timeline",
            once=stage.once,
        )
        if not (ordered or variant.timeline):
            variant = replace(variant, cluster=family.cluster(stage, tables, gpu))
        clump = family.clump(stage, tables, gpu)
        if variant.cluster == 1:
            variant = replace(variant, in_step=family.in_step(stage, tables, clump, gpu))
        walks, _ = plans.heads_of(stage, problem)
        items, first, launches = tables.tiles * walks, 0, []
        shares = () if report or ordered else family.remainder(stage, tables, variant.cluster, gpu)
        for cluster, count in (*shares, (variant.cluster, items - sum(n for _, n in shares))):
            more = first + count < items
            # In order, each addition has its turn; of one visit, there is no next one.
            late = not (ordered or stage.once) and family.defers(stage, tables, cluster)
            one = replace(variant, cluster=cluster, after=first > 0, more=more, deferred=late)
            kernel = family.kernel(
                stage.name, problem, tiling, one, gpu, fused=fused, ordered=ordered
            )
            grid: tuple[int, ...] = (count,)
            if not kernel.shared_bytes:  # row by row: no visits
                grid, clump = (tables.tiles, walks), 1
            elif kernel.cluster > 1:  # each has an item, and no second
                grid = (count * kernel.cluster,)
            elif kernel.boxes:  # one block a multiprocessor, which takes its items itself
                grid = (min(count, gpu.multiprocessors),)
            taken = range(first, first + count)
            launches.append(KernelPass(stage, tables, kernel, grid, walks, clump, taken))
            first += count
        passes.append(replace(launches[-1], before=tuple(launches[:-1])))
    return tuple(passes)
