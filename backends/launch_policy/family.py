"""What a family of kernels is: which tiles it takes, and which kernel runs each stage of a pass.

`launch_policy.portable` has two, `launch_policy.hopper` one, and `numba_gpu.launch_policy` the same
in Python. The engine (`cupy_gpu.engine`) owns arrays, errors and traces; none of this needs a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from flashsim.backends.launch.device_tables import Lowered, in_turns, lower
from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.backends.launch.passes import KernelPass
from flashsim.errors import FlashSimError, TilingError, UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.head_grouping import clump_size
from flashsim.schedule.schedule import KeyOrder, Schedule
from flashsim.schedule.tiling import Tiling

#: A kernel's variant before a walk's tables and a report say more.
PLAIN = Variant(spans=True, descending=False)


class PassRequest(NamedTuple):
    """A pass that is asked for, without its tiling.

    Attributes
    ----------
    problem : Problem
    gpu : Gpu
    direction : {"forward", "backward"}
    algorithm : str
        Of the backward pass.
    ordered : bool
        "flash2-fused" only: whether dQ is added to in a fixed order.
    """

    problem: Problem
    gpu: Gpu
    direction: str
    algorithm: str = "flash2"
    ordered: bool = False

    @property
    def wide(self) -> int:
        """The wider of head_dim and head_dim_v."""
        return widest(self.problem)

    @property
    def fused(self) -> bool:
        """Whether it is the backward that adds dQ up in memory."""
        return self.direction == "backward" and self.algorithm == "flash2-fused"


class Walked(NamedTuple):
    """A stage with the tables of its walk, on a GPU."""

    stage: plans.Stage
    tables: Lowered
    gpu: Gpu

    @property
    def problem(self) -> Problem:
        """What the walk is over."""
        return self.tables.schedule.problem

    @property
    def walks(self) -> int:
        """How many times the walk is made: query heads, or key heads with keys outside."""
        return plans.heads_of(self.stage, self.problem)[0]

    @property
    def alike(self) -> bool:
        """Whether all outer tiles have as many visits."""
        return bool((self.tables.visits == self.tables.visits[0]).all())


class Shared(NamedTuple):
    """A launch's items: blocks of the cluster that shares one, how many there are, and whether dQ
    of a visit is computed in the next one."""

    cluster: int
    items: int
    deferred: bool


class HandOut(NamedTuple):
    """How the items of a stage are handed out to thread blocks.

    Attributes
    ----------
    clump : int
        Walks that are worked on together.
    in_step : bool
        Whether a pass with keys outside makes a visit for every head of a group in turn.
    launches : tuple of Shared
        In their order; most often one.
    """

    clump: int
    in_step: bool
    launches: tuple[Shared, ...]


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
        What the kernels are compiled for, except for what a walk and a report ask.
    """

    name: str
    load: Callable[[Kernel, int], Any]
    like: Variant = PLAIN

    # -- which tiles ----------------------------------------------------------------------------

    @abstractmethod
    def why_not(self, asked: PassRequest, tiling: Tiling | None) -> str | None:
        """Why these kernels do not run this, with a default tiling for None; None if they do."""

    @abstractmethod
    def possible(self, asked: PassRequest) -> tuple[Tiling, ...]:
        """Every tiling that the kernels run on this GPU."""

    @abstractmethod
    def fastest(self, asked: PassRequest) -> Tiling | None:
        """The fastest tiling of those measured on an H200; None where `why_not` has a reason."""

    def refused(self, reason: str) -> FlashSimError:
        """The error that gives `why_not`'s reason."""
        return TilingError(reason)

    def refusal(self, problem: Problem, tiling: Tiling | None, *asked: Any) -> str | None:
        """`why_not`, of ``PassRequest(problem, *asked)``."""
        return self.why_not(PassRequest(problem, *asked), tiling)

    def tilings(self, *asked: Any) -> tuple[Tiling, ...]:
        """`possible`, of ``PassRequest(*asked)``."""
        return self.possible(PassRequest(*asked))

    def choose(self, problem: Problem, tiling: Tiling | None, *asked: Any) -> Tiling:
        """The tiling, or for None the fastest one, for ``PassRequest(problem, *asked)``.

        Raises
        ------
        TilingError, UnsupportedError
            As `refused` says it.
        """
        question = PassRequest(problem, *asked)
        if reason := self.why_not(question, tiling):
            raise self.refused(reason)
        chosen = tiling or self.fastest(question)
        assert chosen is not None  # else refused
        return chosen

    # -- which kernel ---------------------------------------------------------------------------

    @abstractmethod
    def kernel(
        self, stage: str, problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu
    ) -> Kernel:
        """The kernel of a stage."""

    # -- which backward -------------------------------------------------------------------------

    def orders_dq(self, problem: Problem) -> bool:
        """Whether the fused backward can add to dQ in a fixed order, faster than three passes."""
        return False

    def stores_dq(self, problem: Problem, gpu: Gpu, *, ordered: bool) -> bool:
        """Whether "flash2-once" runs here and is fastest; `ordered`: faster than dQ in order."""
        return False

    def fuses(self, problem: Problem, gpu: Gpu) -> bool:
        """Whether the fused backward, dQ added in any order, is faster than three passes."""
        return True

    # -- how its items are handed out -----------------------------------------------------------

    def clump(self, walk: Walked) -> int:
        """How many walks are worked on together."""
        room = {"l2_bytes": walk.gpu.l2_bytes, "processors": walk.gpu.multiprocessors}
        return clump_size(walk.stage, walk.problem, walk.tables.tiles, **room)

    def cluster(self, walk: Walked) -> int:
        """How many thread blocks share an item."""
        return 1

    def remainder(self, walk: Walked, cluster: int) -> tuple[tuple[int, int], ...]:
        """(blocks of a cluster, items) of launches that take a pass's first items; `cluster` is of
        those that take the others."""
        return ()

    def defers(self, walk: Walked, cluster: int) -> bool:
        """Whether a fused pass computes dQ of a visit in the next one, where it can."""
        return False

    def in_step(self, walk: Walked, clump: int) -> bool:
        """Whether a pass with keys outside makes a visit for every head of a group in turn."""
        return False

    def hand_out(
        self,
        stage: plans.Stage,
        tables: Lowered,
        gpu: Gpu,
        *,
        ordered: bool = False,
        report: str = "",
    ) -> HandOut:
        """How a stage's items are handed out: in a fixed order, or in a timeline, each to a block
        of its own, and never in several launches where anything is reported."""
        walk = Walked(stage, tables, gpu)
        cluster = 1 if ordered or report == "timeline" else self.cluster(walk)
        clump = self.clump(walk)
        shares = () if report or ordered else self.remainder(walk, cluster)
        rest = walk.walks * tables.tiles - sum(items for _, items in shares)
        late = not (ordered or stage.once)  # in order each addition has its turn; once: no next one
        launches = (
            Shared(blocks, items, late and self.defers(walk, blocks))
            for blocks, items in (*shares, (cluster, rest))
        )
        return HandOut(clump, cluster == 1 and self.in_step(walk, clump), tuple(launches))

    # -- launches -------------------------------------------------------------------------------

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
        return _passes(self, PassRequest(problem, gpu, "forward"), tiling, key_order, report)

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
        asked = PassRequest(problem, gpu, "backward", algorithm, ordered)
        return _passes(self, asked, tiling, key_order, report)


def widest(problem: Problem) -> int:
    """The wider of head_dim and head_dim_v."""
    return max(problem.head_dim, problem.head_dim_v)


@lru_cache(maxsize=512)
def _passes(
    family: Family, asked: PassRequest, tiling: Tiling | None, key_order: KeyOrder, report: str
) -> tuple[KernelPass, ...]:
    problem, gpu, direction, algorithm, ordered = asked
    tiling = family.choose(problem, tiling, *asked[1:])
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
        how = family.hand_out(stage, tables, gpu, ordered=ordered, report=report)
        variant = replace(
            family.like,
            spans=tables.spans is not None,
            descending=tables.descending,
            counts=report != "",
            timeline=report == "timeline",
            in_step=how.in_step,
            once=stage.once,
            fused=algorithm != "flash2",
            ordered=ordered,
        )
        walks, _ = plans.heads_of(stage, problem)
        first, launches, clump = 0, list[KernelPass](), how.clump
        for n, (cluster, count, deferred) in enumerate(how.launches, 1):
            more = n < len(how.launches)
            one = replace(variant, cluster=cluster, after=n > 1, more=more, deferred=deferred)
            kernel = family.kernel(stage.name, problem, tiling, one, gpu)
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
