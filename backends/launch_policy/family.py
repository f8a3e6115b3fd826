"""The interface of a kernel family: supported tilings, and the kernel of each stage."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from flashsim.backends.launch.device_tables import (
    Lowered,
    in_shares,
    in_turns,
    lower,
    refuse_functions,
)
from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.backends.launch.passes import KernelPass
from flashsim.errors import FlashSimError, TilingError, UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.head_grouping import clump_size
from flashsim.schedule.schedule import KeyOrder, Schedule
from flashsim.schedule.split import Split
from flashsim.schedule.tiling import Tiling

#: A kernel's variant before the schedule's tables and the report determine the rest.
PLAIN = Variant(spans=True, descending=False)


class PassRequest(NamedTuple):
    """A pass whose tiling is not yet chosen. With `ordered`, blocks add to dQ in a fixed order.

    `pack_gqa` says whether the query heads of a GQA group share a row tile of a forward pass. If it
    is None, the family decides (`Family.packs`).
    """

    problem: Problem
    gpu: Gpu
    direction: str
    algorithm: str = "flash2"
    ordered: bool = False
    pack_gqa: bool | None = None

    @property
    def wide(self) -> int:
        """The larger of head_dim and head_dim_v."""
        return widest(self.problem)

    @property
    def fused(self) -> bool:
        """Whether this is a fused backward that accumulates dQ in HBM (`plans.FUSED`)."""
        return self.direction == "backward" and self.algorithm in plans.FUSED


class Walked(NamedTuple):
    """A stage of a pass, with its kernel's schedule tables and the GPU that runs the kernel.

    `tiling` has the tiles of all stages of the pass.
    """

    stage: plans.Stage
    tables: Lowered
    gpu: Gpu
    tiling: Tiling

    @property
    def problem(self) -> Problem:
        """The problem for which the stage's schedule was made."""
        return self.tables.schedule.problem

    @property
    def walks(self) -> int:
        """The number of loops over the schedule.

        There is one per query head, or one per KV head if the loop is KV-outer or packs heads.
        """
        return plans.heads_of(self.stage, self.problem)[0]

    @property
    def items(self) -> int:
        """The number of work tiles of all heads."""
        return self.walks * self.tables.tiles

    @property
    def alike(self) -> bool:
        """Whether all outer tiles have the same number of visits."""
        return bool((self.tables.visits == self.tables.visits[0]).all())


class Shared(NamedTuple):
    """How thread blocks share the work tiles of one launch.

    `cluster` is the number of blocks per work tile, and `items` the number of work tiles.
    `deferred` says whether a visit's dQ is computed in the next visit.
    """

    cluster: int
    items: int
    deferred: bool


class HandOut(NamedTuple):
    """How a stage's work tiles are assigned to thread blocks, in one or several launches.

    `clump` is the number of heads in a head group, which run together. With `in_step`, a KV-outer
    pass alternates between the query heads of a GQA group.
    """

    clump: int
    in_step: bool
    launches: tuple[Shared, ...]


@dataclass(frozen=True)
class Family(ABC):
    """A family of kernels for all stages of FlashAttention-2, or for its forward pass alone.

    `name` is what traces call the family. ``load(kernel, device)`` compiles a kernel, and returns a
    function that launches on CuPy's current device. `like` holds compile-time options that do not
    depend on schedule tables or reports. `takes_functions` says whether the kernels take
    `mask_mod`, `score_mod` and `sinks`. `elsewhere` is the advice in error texts if the kernels
    take no functions.
    """

    name: str
    load: Callable[[Kernel, int], Any]
    like: Variant = PLAIN
    takes_functions: bool = False
    elsewhere: str = "use backend='cupy', 'simulator' or 'numba'"

    # -- which tiles ----------------------------------------------------------------------------

    @abstractmethod
    def why_not(self, asked: PassRequest, tiling: Tiling | None) -> str | None:
        """Return the reason why these kernels cannot run this pass, or None if they can.

        If `tiling` is None, the default tiling is checked.
        """

    @abstractmethod
    def possible(self, asked: PassRequest) -> tuple[Tiling, ...]:
        """Return all tilings with which the kernels can run this pass on this GPU."""

    @abstractmethod
    def fastest(self, asked: PassRequest) -> Tiling | None:
        """Return the fastest tiling on an H200, or None if the kernels cannot run this pass."""

    def refused(self, reason: str) -> FlashSimError:
        """Return the error to raise if `why_not` returned `reason`."""
        return TilingError(reason)

    def refusal(self, problem: Problem, tiling: Tiling | None, *asked: Any) -> str | None:
        """Return why kernels cannot run ``PassRequest(problem, *asked)``, or None if they can."""
        return self.why_not(PassRequest(problem, *asked), tiling)

    def tilings(self, *asked: Any) -> tuple[Tiling, ...]:
        """Return all tilings that the kernels support for ``PassRequest(*asked)``."""
        return self.possible(PassRequest(*asked))

    def choose(self, problem: Problem, tiling: Tiling | None, *asked: Any) -> Tiling:
        """Return `tiling`, or the fastest tiling if it is None; raise for an unsupported pass."""
        question = PassRequest(problem, *asked)
        if reason := self.why_not(question, tiling):
            raise self.refused(reason)
        chosen = tiling or self.fastest(question)
        assert chosen is not None  # otherwise `refused` was raised
        return chosen

    def packs(self, asked: PassRequest, tiling: Tiling | None) -> bool:
        """Return whether the query heads of a GQA group share the row tiles of a forward pass."""
        return False

    def part_rows(self, problem: Problem) -> int:
        """Return for how many rows of a forward's row tile a warpgroup computes its own visits.

        0 means that all warpgroups compute all visits of the row tile.
        """
        return 0

    # -- which kernel ---------------------------------------------------------------------------

    @abstractmethod
    def kernel(
        self, stage: str, problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu
    ) -> Kernel:
        """Return the kernel that runs a stage of a pass."""

    # -- which backward -------------------------------------------------------------------------

    def orders_dq(self, problem: Problem) -> bool:
        """Return whether a fused backward with ordered dQ sums works and beats three passes."""
        return False

    def stores_dq(self, problem: Problem, gpu: Gpu, *, ordered: bool) -> bool:
        """Return whether "flash2-once" works and is the fastest backward on this GPU.

        With `ordered`, the other candidate is the fused backward with a fixed order of additions to
        dQ.
        """
        return False

    def fuses(self, problem: Problem, gpu: Gpu) -> bool:
        """Return whether the fused backward with unordered dQ sums is faster than three passes."""
        return True

    def stores_first(self, problem: Problem, gpu: Gpu) -> bool:
        """Return whether "flash2-fused-first" works and is the faster fused backward."""
        return False

    # -- how work tiles are assigned ------------------------------------------------------------

    def clump(self, walk: Walked, cluster: int = 1) -> int:
        """Return how many heads form a head group, which run together.

        `cluster` is the number of blocks that share a work tile.
        """
        room = {"l2_bytes": walk.gpu.l2_bytes, "processors": walk.gpu.multiprocessors}
        return clump_size(walk.stage, walk.problem, walk.tables.tiles, **room)

    def launches(self, walk: Walked) -> tuple[tuple[int, int], ...]:
        """Return a stage's launches, in order, as pairs (blocks per work tile, work tiles)."""
        return ((1, walk.items),)

    def defers(self, walk: Walked, cluster: int) -> bool:
        """Return whether a fused pass should compute a visit's dQ in the next visit."""
        return False

    def in_step(self, walk: Walked, clump: int) -> bool:
        """Return whether a KV-outer pass alternates between the query heads of a GQA group."""
        return False

    def hand_out(
        self,
        stage: plans.Stage,
        tables: Lowered,
        gpu: Gpu,
        tiling: Tiling,
        *,
        ordered: bool = False,
        report: str = "",
    ) -> HandOut:
        """Decide how a stage's work tiles are assigned to thread blocks.

        No cluster shares a work tile if blocks add to dQ in a fixed order, or record a timeline. A
        pass that reports bytes or times has one launch per stage.
        """
        walk = Walked(stage, tables, gpu, tiling)
        alone = ordered or report == "timeline"
        launches = ((1, walk.items),) if alone else self.launches(walk)
        cluster = launches[-1][0]
        clump = self.clump(walk, cluster)
        if report:
            launches = ((cluster, walk.items),)
        # ordered: each addition waits for its turn; once: no visit follows
        late = not (ordered or stage.once)
        shared = (Shared(n, items, late and self.defers(walk, n)) for n, items in launches)
        return HandOut(clump, cluster == 1 and self.in_step(walk, clump), tuple(shared))

    # -- launches -------------------------------------------------------------------------------

    def forward_passes(
        self,
        problem: Problem,
        tiling: Tiling | None,
        gpu: Gpu,
        key_order: KeyOrder,
        report: str,
        pack_gqa: bool | None = None,
    ) -> tuple[KernelPass, ...]:
        """Return the forward pass's single launch, in a tuple.

        If `tiling` is None, the method `choose` picks it. With the `report` "counts", the kernels
        record the bytes that they move. With "timeline", the kernels record time stamps too. If
        `pack_gqa` is None, the method `packs` decides whether query heads share row tiles. The
        method raises `TilingError` or `UnsupportedError`.
        """
        asked = PassRequest(problem, gpu, "forward", pack_gqa=pack_gqa)
        return _passes(self, asked, tiling, key_order, report)

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
        """Return the launches of the backward pass, in order.

        With `ordered`, blocks add to dQ in a fixed order (`device_tables.in_turns`). The option
        `ordered` needs the algorithm "flash2-fused", and a family whose `orders_dq` is true. The
        other parameters and the errors are those of `forward_passes`.
        """
        asked = PassRequest(problem, gpu, "backward", algorithm, ordered)
        return _passes(self, asked, tiling, key_order, report)


def fastest_backward(
    problem: Problem,
    gpu: Gpu,
    family_of: Callable[[str], Family],
    algorithm: str,
    deterministic: bool,
    *,
    tiled: bool,
) -> tuple[str, bool]:
    """Return the fastest algorithm for a backward pass, and whether it adds to dQ in a fixed order.

    `family_of` returns the kernel family that runs a backward algorithm. If the caller chose a
    tiling (`tiled`) or another algorithm than "flash2", only the order of dQ's sums is chosen.
    """
    form = plans.backward_form(algorithm, deterministic)
    any_form = algorithm == "flash2" and not tiled
    if any_form and family_of(form).stores_dq(problem, gpu, ordered=deterministic):
        return "flash2-once", False
    if deterministic:
        ordered = family_of("flash2-fused").orders_dq(problem)
        return ("flash2-fused", True) if ordered else (form, False)
    if any_form and not family_of(form).fuses(problem, gpu):
        return "flash2", False
    first = any_form and family_of(form).stores_first(problem, gpu)
    return ("flash2-fused-first" if first else form), False


def widest(problem: Problem) -> int:
    """The larger of head_dim and head_dim_v."""
    return max(problem.head_dim, problem.head_dim_v)


@lru_cache(maxsize=512)
def _passes(
    family: Family, asked: PassRequest, tiling: Tiling | None, key_order: KeyOrder, report: str
) -> tuple[KernelPass, ...]:
    problem, gpu, direction, algorithm, ordered, pack_gqa = asked
    if not family.takes_functions:
        refuse_functions(problem, family.name, family.elsewhere)
    split = Split(pack_gqa=family.packs(asked, tiling))
    if pack_gqa and problem.group > 1 and not split.pack_gqa:
        raise UnsupportedError(
            f"the {family.name} kernels cannot pack the query heads of this forward pass; only the "
            "C++ kernels for Hopper can, for float16 and bfloat16, groups of 2, 4, 8, 16, 32 or 64 "
            "heads, and no packed sequences, block mask, functions, bias or sinks; leave out "
            "pack_gqa="
        )
    asked = asked._replace(pack_gqa=split.pack_gqa)
    tiling = family.choose(problem, tiling, *asked[1:])
    if ordered and not (algorithm == "flash2-fused" and family.orders_dq(problem)):
        raise UnsupportedError(
            f"the {family.name} kernels cannot run a deterministic fused backward for this "
            'problem (they would add to dQ in no fixed order); use algorithm="flash2", whose '
            "three passes are deterministic"
        )
    passes = []
    for stage in plans.stages(problem, algorithm, direction, split):
        by: Literal["row", "col"] = "row" if stage.outer == "queries" else "col"
        tile = tiling.of(stage.name)
        tables = lower(Schedule(problem, tile, stage.outer, key_order, split=split), by)
        tables = in_turns(tables) if ordered and by == "col" else tables
        how = family.hand_out(stage, tables, gpu, tiling, ordered=ordered, report=report)
        if stage.name == "forward" and (rows := family.part_rows(problem)):
            tables = in_shares(tables, rows)
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
            first=algorithm == "flash2-fused-first",
            pack=tables.schedule.members,
            shares=tables.shares is not None,
        )
        walks, _ = plans.heads_of(stage, problem)
        first, launches, clump = 0, list[KernelPass](), how.clump
        for n, (cluster, count, deferred) in enumerate(how.launches, 1):
            more = n < len(how.launches)
            one = replace(variant, cluster=cluster, after=n > 1, more=more, deferred=deferred)
            kernel = family.kernel(stage.name, problem, tile, one, gpu)
            grid: tuple[int, ...] = (count,)
            if not kernel.shared_bytes:  # row-wise: no visits
                grid, clump = (tables.tiles, walks), 1
            elif kernel.cluster > 1:  # each block has one work tile
                grid = (count * kernel.cluster,)
            elif kernel.boxes:  # one persistent block per SM
                grid = (min(count, gpu.multiprocessors),)
            taken = range(first, first + count)
            launches.append(KernelPass(stage, tables, kernel, grid, walks, clump, taken))
            first += count
        passes.append(replace(launches[-1], before=tuple(launches[:-1])))
    return tuple(passes)
