"""The Hopper kernels (sm_90a): what they take, which kernel runs a stage, and how it is launched.

Where `refusal` gives a reason, portable kernels run. How the kernels got to be as they are, step by
step: docs/notebooks/hopper.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashsim.backends import launch
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch.device_tables import Lowered
from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.backends.launch_policy import hopper_kernels, portable_kernels
from flashsim.backends.launch_policy.cost_model import (
    ADDING_UP,
    HOPPER_FORWARD,
    HOPPER_FUSED_WIDE,
    ROLES,
    backward_microseconds,
    backward_times,
    busy_at_once,
    fastest_cluster,
    fastest_first,
    microseconds_by_keys,
    remainder,
    sooner_at_once,
)
from flashsim.backends.launch_policy.family import Family
from flashsim.errors import UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.clump import held
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling

CAPABILITY = (9, 0)

#: Query rows of a walk, on average, from which on dQ is deferred.
_LONG_WALK = 1024

#: The head_dim up to which the fused kernel stores dQ after one visit.
_WIDEST_ONCE = 128


@dataclass(frozen=True)
class Hopper(Family):
    """The family of kernels that use Hopper's own instructions.

    Attributes
    ----------
    instead : str
        What `kernel` option to try where these do not run.
    """

    instead: str = "portable"

    def refusal(
        self,
        problem: Problem,
        tiling: Tiling | None,
        gpu: Gpu,
        direction: str,
        algorithm: str = "flash2",
    ) -> str | None:
        """See `Family`."""
        if gpu.compute_capability != CAPABILITY:
            return f"they need compute capability 9.0, and {gpu.name} has " + ".".join(
                map(str, gpu.compute_capability)
            )
        if problem.itemsize != 2:
            return f"they take float16 and bfloat16, not {problem.dtype}"
        if max(problem.head_dim, problem.head_dim_v) > launch.MAX_HEAD_DIM:
            return f"they take a head_dim up to {launch.MAX_HEAD_DIM}"
        possible = self.tilings(problem, gpu, direction, algorithm)
        if direction == "backward" and algorithm == "flash2-once":
            if max(problem.head_dim, problem.head_dim_v) > _WIDEST_ONCE or problem.softcap:
                return (
                    f"they store dQ at once up to a head_dim of {_WIDEST_ONCE}, without a softcap"
                )
            if not possible:
                return "of their tiles of 128 keys a row tile has several visits, or none"
        if tiling is None:
            if not any(t.divides(problem.block_mask) for t in possible):
                return "their tiles do not divide the block mask's"
        elif tiling not in possible:
            return f"{tiling} tiles are none of theirs ({', '.join(map(str, possible))})"
        return None

    def tilings(
        self, problem: Problem, gpu: Gpu, direction: str, algorithm: str = "flash2"
    ) -> tuple[Tiling, ...]:
        """The tilings that the kernels are built for, the best first (docs/reference/hopper.md)."""
        d = max(problem.head_dim, problem.head_dim_v)
        if direction == "backward":
            if algorithm == "flash2-once":
                tile = Tiling(128, 128) if d <= 64 else Tiling(64, 128)
                return (tile,) if Schedule(problem, tile).visited_once else ()
            if d <= 64:
                return (Tiling(128, 128),)
            if d > 128:
                if algorithm != "flash2-fused" or d > 192:
                    return (Tiling(64, 64),)
                given = problem, HOPPER_FUSED_WIDE, gpu.multiprocessors
                return fastest_first(*given, microseconds_by_keys)
            # By itself dQ takes 64 rows to a product; a softcap takes registers.
            if algorithm != "flash2-fused" or problem.softcap:
                return (Tiling(64, 128),)
            low, high = Tiling(64, 128), Tiling(80, 128)
            return (high, low) if d <= 80 else (low, high)
        if d <= 128:
            times = next(times for widest, times in HOPPER_FORWARD.items() if d <= widest)
            best = list(fastest_first(problem, times, gpu.multiprocessors))
            if problem.softcap:  # takes registers, and wide tiles have none left
                best = [t for t in best if t.block_k <= 128] + [t for t in best if t.block_k > 128]
        else:
            best = [Tiling(128, 112)] if d <= 192 else [Tiling(128, 80)]
        best += [Tiling(128, 64)]  # divides common block masks
        return tuple(t for t in best if self.forward_bytes(problem, t) <= gpu.shared_bytes)

    def default(
        self, problem: Problem, gpu: Gpu, direction: str, algorithm: str, ordered: bool = False
    ) -> Tiling | None:
        """See `Family`."""
        every = self.tilings(problem, gpu, direction, algorithm)
        possible = [t for t in every if t.divides(problem.block_mask)]
        # In order: the fewer row tiles, the fewer turns to wait.
        return max(possible, key=lambda t: t.block_q) if ordered else possible[0]

    def refused(self, reason: str) -> UnsupportedError:
        """See `Family`."""
        return UnsupportedError(
            f"the Hopper kernels do not run this: {reason}; kernel={self.instead!r} may, and "
            "without kernel=... whichever does is taken"
        )

    def orders_dq(self, problem: Problem) -> bool:
        """See `Family`."""
        return max(problem.head_dim, problem.head_dim_v) <= 128

    def stores_dq(self, problem: Problem, gpu: Gpu, *, ordered: bool) -> bool:
        """See `Family`. By the time model: for a few items dQ's own pass beside another is faster.

        Additions in order never are, with a delta before them and a conversion behind.
        """
        if self.refusal(problem, None, gpu, "backward", "flash2-once"):
            return False
        once, *others = (
            backward_microseconds(
                self.backward_passes(problem, None, gpu, "ascending", "", algorithm), gpu
            )
            for algorithm in ("flash2-once", "flash2", "flash2-fused")
        )
        return ordered or once < min(others)

    def fuses(self, problem: Problem, gpu: Gpu) -> bool:
        """See `Family`."""
        if self.refusal(problem, None, gpu, "backward"):
            return True  # cells of 80 rows, say: three passes have no such tile
        return self.fused_is_faster(problem, gpu)

    def fused_is_faster(self, problem: Problem, gpu: Gpu) -> bool:
        """Than three passes, if these run: by the time model (`cost_model`).

        The three passes have more products, but no float32 dQ to clear and to convert, and dQ's
        runs beside dK's and dV's. Above 192 the fused kernel has no room to send dQ off.
        """
        if max(problem.head_dim, problem.head_dim_v) > 192:
            return False
        three, fused = (
            backward_microseconds(
                self.backward_passes(problem, None, gpu, "ascending", "", algorithm), gpu
            )
            for algorithm in ("flash2", "flash2-fused")
        )
        return fused < three

    def cluster(self, stage: plans.Stage, tables: Lowered, gpu: Gpu) -> int:
        """See `Family`. A backward with keys outside whose items leave multiprocessors idle."""
        p = tables.schedule.problem
        if stage.outer != "keys" or max(p.head_dim, p.head_dim_v) > 128:
            return 1
        walks, _ = plans.heads_of(stage, p)
        d = 64 if max(p.head_dim, p.head_dim_v) <= 64 else 128
        times = getattr(backward_times(p, tables.schedule.tiling), stage.name), ADDING_UP[d]
        free = gpu.multiprocessors
        if stage.name == "dkdv":  # dQ's pass runs beside it, if there is room, or else behind it
            if walks * len(tables.visits) >= free:
                return 1
            beside = busy_at_once(p, tables.schedule.tiling)[0]
            free = int(free - beside) if beside + walks * len(tables.visits) <= free else free
        return fastest_cluster(walks, p.group * tables.visits, *times, free)

    def remainder(
        self, stage: plans.Stage, tables: Lowered, cluster: int, gpu: Gpu
    ) -> tuple[tuple[int, int], ...]:
        """See `Family`. Where all items are equally long, clusters take what whole rounds leave."""
        p, visits = tables.schedule.problem, tables.visits
        wide = max(p.head_dim, p.head_dim_v)
        if stage.name != "fused" or stage.once or cluster > 1 or wide > 128:
            return ()
        if (visits != visits[0]).any():
            return ()
        items, steps = plans.heads_of(stage, p)[0] * len(visits), p.group * int(visits[0])
        times = backward_times(p, tables.schedule.tiling).fused
        return remainder(items, steps, times, ADDING_UP[64 if wide <= 64 else 128], gpu)

    def defers(self, stage: plans.Stage, tables: Lowered, cluster: int) -> bool:
        """See `Family`. Where a block's walk is long: its end takes longer."""
        p, rows = tables.schedule.problem, tables.schedule.tiling.block_q * tables.visits.mean()
        narrow = max(p.head_dim, p.head_dim_v) <= 128
        return stage.name == "fused" and narrow and p.group * rows >= _LONG_WALK * cluster

    def clump(self, stage: plans.Stage, tables: Lowered, gpu: Gpu) -> int:
        """See `Family`. Where no item is shorter than another, one head's (or one group's, which
        shares K and V) are worked on at a time: nothing is gained by taking long ones first, and
        more blocks read the same tiles at the same time. But not where they add to the same dQ in
        turns.

        A clump's long items, which come first, fetch its K and V; the short ones find them in L2.
        So a forward of many short sequences, which is bound by DRAM, gets clumps so small that
        blocks are at work on several, some at the beginning and some at the end of theirs. Where
        there are few rounds of items, it counts for more that the long ones of all heads come
        first.
        """
        visits, p = tables.visits, tables.schedule.problem
        if tables.ranks is None and (visits == visits[0]).all():
            return p.group if stage.per == "head" else 1
        size, few = super().clump(stage, tables, gpu), gpu.multiprocessors // 8
        if _drifts(stage, tables):
            if self.in_step(stage, tables, 1, gpu):
                size = _whole_rounds(plans.heads_of(stage, p)[0], tables.tiles, gpu) or size
            times = getattr(backward_times(p, tables.schedule.tiling), stage.name)
            walks, places = plans.heads_of(stage, p)[0], gpu.multiprocessors
            if sooner_at_once(walks, times.items(p.group * visits), places, size):
                size = walks  # in step, they need not fit in L2 together
        short = stage.name == "forward" and 0 < few * tables.tiles <= gpu.multiprocessors
        if short and plans.heads_of(stage, p)[0] * tables.tiles >= 8 * gpu.multiprocessors:
            size = min(size, max(1, few // p.group) * p.group)
        return size

    def in_step(self, stage: plans.Stage, tables: Lowered, clump: int, gpu: Gpu) -> bool:
        """See `Family`. Where what a clump's blocks go through, dQ too, is more than L2 holds.

        Under a left window they begin at different row tiles, and no order brings them together.
        Of more items than multiprocessors those that run together are about equally long, and
        drift slowly: there it takes twice as much.
        """
        p, rounds = tables.schedule.problem, clump * tables.tiles / gpu.multiprocessors
        room = gpu.l2_bytes * (1 if rounds <= 1 else 2)
        alike = stage.name == "fused" and p.left >= p.n_q + p.n_kv
        return alike and _drifts(stage, tables) and clump * held(stage, p) > room

    def stages(self, problem: Problem, tiling: Tiling, gpu: Gpu) -> int:
        """Stages of the forward's rings: three where they fit."""
        return 3 if self.forward_bytes(problem, tiling, 3) <= gpu.shared_bytes else 2

    def forward_bytes(self, problem: Problem, tiling: Tiling, stages: int = 2) -> int:
        """Shared memory of the forward's blocks."""
        groups = tiling.block_q // 64
        d, dv = hopper_kernels.tile_columns("forward", problem)
        q, kv = tiling.block_q * d, tiling.block_k * (d + dv)
        return hopper_kernels.on_chip(2 * (q + stages * kv), 2 * groups + 4 * stages)

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
        """See `Family`; the row-wise kernels are the portable ones."""
        variant = replace(variant, overlap=True)
        if stage == "forward":
            stages = self.stages(problem, tiling, gpu)
            shared = self.forward_bytes(problem, tiling, stages)
            turns = hopper_kernels.take_turns(problem, tiling)
            made = hopper_kernels.forward_kernel(
                problem, tiling, variant, shared, stages, turns=turns
            )
        elif stage == "fused" and tiling == ROLES:
            made = hopper_kernels.roles_kernel(problem, tiling, variant)
        elif stage in ("dkdv", "fused"):
            made = hopper_kernels.backward_kernel(
                problem, tiling, variant, fused=fused, ordered=ordered
            )
        elif stage == "dq":
            made = hopper_kernels.dq_kernel(problem, tiling, variant)
        else:
            made = portable_kernels.rows_kernel(problem, tiling, variant, stage, fused=fused)
        return replace(made, overlaps=True)


HOPPER = Hopper("hopper", nvrtc.load)


def _drifts(stage: plans.Stage, tables: Lowered) -> bool:
    """Whether blocks of a key head, begun together, would soon be at different query heads."""
    group, visits = tables.schedule.problem.group, tables.visits
    uneven = tables.ranks is None and bool((visits != visits[0]).any())
    return stage.outer == "keys" and group > 1 and uneven


def _whole_rounds(walks: int, tiles: int, gpu: Gpu) -> int:
    """Walks of a clump, four at most, whose items are about whole rounds; 0 if none are.

    In step, the items of a round go the same way; of a round that two clumps share, they do not.
    """
    most = gpu.multiprocessors

    def beside(size: int) -> int:
        return abs(size * tiles - most * max(1, round(size * tiles / most)))

    best = min(range(1, min(walks, 4) + 1), key=beside)
    return best if 6 * beside(best) <= most else 0
