"""The Hopper kernels (sm_90a): supported passes, and each stage's kernel and launch.

The notebook docs/notebooks/hopper.md describes the kernels' development.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch import functions
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.backends.launch_policy import cost_model, hopper_kernels, portable_kernels
from flashsim.backends.launch_policy.clusters import fastest_cluster, shared_launches
from flashsim.backends.launch_policy.cost_model import HOPPER_FUSED_WIDE
from flashsim.backends.launch_policy.family import Family, PassRequest, Walked, widest
from flashsim.backends.launch_policy.hopper_kernels import Rings
from flashsim.errors import UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule.head_grouping import held
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.split import Split
from flashsim.schedule.tiling import Tiling

CAPABILITY = (9, 0)

#: Above a head_dim of 128: the number of key tiles per head below which a pass of more than so many
#: waves does not alternate between the query heads of a group (`Hopper.in_step`).
_SHORT_LOOP, _IN_STEP_WAVES = 12, 6

#: Average query rows per loop from which on dQ is deferred.
_LONG_WALK = 1024

#: The fraction of a forward pass's predicted time that packing heads must save.
_PACKING_GAINS = 0.005

#: The head_dim up to which the fused kernel stores dQ after one visit.
_WIDEST_ONCE = 128
#: The head_dim up to which a fused kernel stages dQ in shared memory.
_WIDEST_STAGED = 192

#: The fused backward in which the first visit of a row tile stores dQ. How many work tiles of a
#: head may begin at the same row tile, and the fraction of the fused backward's predicted time that
#: this form must save (`Hopper.stores_first`).
_FIRST = "flash2-fused-first"
_TOGETHER, _SAVES = 3, 0.035


@dataclass(frozen=True)
class Hopper(Family):
    """The family of kernels that use Hopper's own instructions.

    Error texts for unsupported passes suggest the kernel family that `instead` names. With
    `brings_tiles`, kernels load parts of a captured array in advance, and add a linear term of the
    score function by a product. With `packs_heads`, query heads of a GQA group may share the row
    tiles of a forward pass. With `shares`, a warpgroup of a forward pass computes only the visits
    that its own rows need.
    """

    instead: str = "portable"
    brings_tiles: bool = False
    packs_heads: bool = False
    shares: bool = False

    def why_not(self, asked: PassRequest, tiling: Tiling | None) -> str | None:
        """Return the reason why the Hopper kernels cannot run this pass, or None if they can."""
        problem, gpu, direction, algorithm = asked[:4]
        if gpu.compute_capability != CAPABILITY:
            return f"they need compute capability 9.0, and {gpu.name} has " + ".".join(
                map(str, gpu.compute_capability)
            )
        if problem.itemsize != 2:
            return f"they support float16 and bfloat16, not {problem.dtype}"
        if asked.wide > launch.MAX_HEAD_DIM:
            return f"they support a head_dim up to {launch.MAX_HEAD_DIM}"
        possible = self.possible(asked)
        if direction == "backward" and algorithm == "flash2-once":
            scored = problem.softcap or problem.score_mod is not None or problem.sinks
            if asked.wide > _WIDEST_ONCE or scored:
                return (
                    f"algorithm='flash2-once' needs a head_dim up to {_WIDEST_ONCE}, and no "
                    "softcap, score_mod or sinks"
                )
            if not possible:
                return (
                    "algorithm='flash2-once' needs each row tile to visit exactly one tile of 128 "
                    "keys, and here a row tile visits several or none"
                )
        if direction == "backward" and algorithm == _FIRST and asked.wide > _WIDEST_STAGED:
            return f"algorithm={_FIRST!r} needs a head_dim up to {_WIDEST_STAGED}"
        if tiling is None:
            if not any(t.divides(problem.block_mask) for t in possible):
                return "their tiles do not divide the block mask's cells"
        elif tiling not in possible:
            return f"they have no {tiling} tiles, only {', '.join(map(str, possible)) or 'none'}"
        return None

    def possible(self, asked: PassRequest) -> tuple[Tiling, ...]:
        """Return all supported tilings, fastest first (docs/reference/hopper.md)."""
        problem, gpu, d = asked.problem, asked.gpu, asked.wide
        if asked.direction == "backward":
            if asked.algorithm == "flash2-once":
                tile = Tiling(128, 128) if d <= 64 else Tiling(64, 128)
                return (tile,) if Schedule(problem, tile).visited_once else ()
            scored = problem.score_mod is not None  # uses registers, as a softcap does
            if d <= 64:
                fewer = scored and d > 32 and not functions.has_known_slope(problem)
                return (Tiling(64 if fewer else 128, 128),)
            if d > 128:
                if not asked.fused or d > 192 or scored:
                    return (Tiling(64, 64),)
                given = problem, HOPPER_FUSED_WIDE, gpu.multiprocessors
                return cost_model.fastest_first(*given, cost_model.microseconds_by_keys)
            # Without transposition, a product of dQ has 64 rows; functions use registers.
            low, high = Tiling(64, 128), Tiling(80, 128)
            if scored or problem.mask_mod is not None or (asked.fused and problem.softcap):
                return (low,)
            if not asked.fused:
                return replace(low, dq_rows=128), low
            return (high, low) if d <= 80 else (low, high)
        times = _forward_times(d)
        launch_time = partial(
            cost_model.microseconds, split=_split(asked), part_rows=self.part_rows(problem)
        )
        if d <= 128:
            best = list(cost_model.fastest_first(problem, times, gpu.multiprocessors, launch_time))
            reads = functions.read_arrays(problem, beside_ahead=self.brings_tiles)
            ramp = self.brings_tiles and hopper_kernels.adds_ramp(problem)
            scored = problem.score_mod is not None and not ramp
            if problem.softcap or scored or reads:
                # Functions use registers: wide tiles have none left, and three warpgroups have few.
                rows = 128 if reads else 192
                best.sort(key=lambda t: t.block_k > 128 or t.block_q > rows)
            best += [Tiling(128, 64)]  # divides common block masks
        else:
            processors = gpu.multiprocessors
            best = sorted(times, key=lambda t: launch_time(problem, t, times[t], processors))
        if self.brings_tiles and functions.tile_of(problem):
            best.sort(key=lambda t: not self.rings(problem, t, gpu).tile)
        return tuple(
            t for t in best if self.forward_bytes(problem, t, Rings(2)) <= gpu.shared_bytes
        )

    def fastest(self, asked: PassRequest) -> Tiling | None:
        """Return the fastest tiling with which the Hopper kernels can run this pass."""
        possible = [t for t in self.possible(asked) if t.divides(asked.problem.block_mask)]
        if asked.ordered:  # fewer row tiles mean fewer waits for a turn
            return max(possible, key=lambda t: t.block_q)
        if any(t.dq_rows for t in possible):

            def took(tiling: Tiling) -> float:
                p, gpu, algorithm = asked.problem, asked.gpu, asked.algorithm
                passes = self.backward_passes(p, tiling, gpu, "ascending", "", algorithm)
                return cost_model.backward_microseconds(passes, gpu)

            return min(possible, key=took)
        return possible[0]

    def packs(self, asked: PassRequest, tiling: Tiling | None) -> bool:
        """Return whether the query heads of a GQA group share the row tiles of a forward pass.

        Unless the caller decides, they do if the cost model predicts that this is faster: fewer
        rows of the last row tiles do not exist, and under a causal mask or a window, row tiles
        have fewer queries and so visit fewer key tiles. The cost model leaves out the time of
        partly masked visits, of which packed heads have fewer, and `flashsim.predict` includes it.
        """
        p = asked.problem
        possible = self.packs_heads and hopper_kernels.packs_heads(p)
        if asked.direction != "forward" or asked.pack_gqa is False or not possible:
            return False
        if asked.pack_gqa or self.why_not(asked, tiling):
            return bool(asked.pack_gqa)
        times = _forward_times(asked.wide)

        def took(packed: bool) -> float:
            request = asked._replace(pack_gqa=packed)
            tile = tiling or self.fastest(request)
            if tile not in times:  # only for block masks
                return math.inf
            given = p, tile, times[tile], asked.gpu.multiprocessors
            return cost_model.microseconds(*given, _split(request), self.part_rows(p))

        return took(True) < (1 - _PACKING_GAINS) * took(False)

    def part_rows(self, problem: Problem) -> int:
        """Return the rows of a warpgroup; 0 above a head_dim of 128, where shares save no time."""
        return 64 if self.shares and widest(problem) <= 128 else 0

    def refused(self, reason: str) -> UnsupportedError:
        """Return the error to raise if `why_not` returned `reason`."""
        return UnsupportedError(
            f"the Hopper kernels do not run this: {reason}; try kernel={self.instead!r}, or leave "
            "kernel= out to select a family that does"
        )

    def orders_dq(self, problem: Problem) -> bool:
        """Return whether a fused backward with ordered dQ sums works and beats three passes."""
        return widest(problem) <= 128

    def stores_dq(self, problem: Problem, gpu: Gpu, *, ordered: bool) -> bool:
        """Return whether "flash2-once" works and is predicted to be the fastest backward.

        With few work tiles, three passes are faster, because two of their kernels run at the same
        time. The fused backward with ordered dQ sums is slower than "flash2-once": it needs a delta
        kernel and a kernel that converts dQ.
        """
        if self.refusal(problem, None, gpu, "backward", "flash2-once"):
            return False
        once, *others = self._times(problem, gpu, "flash2-once", "flash2", "flash2-fused")
        return ordered or once < min(others)

    def fuses(self, problem: Problem, gpu: Gpu) -> bool:
        """Return whether the fused backward is predicted to be faster than three passes.

        The three passes compute more matrix products, but they need not clear and convert a float32
        dQ. The kernel for dQ may run at the same time as the kernel for dK and dV. Above a head_dim
        of 192, shared memory has no space to stage dQ, so no fused kernel exists.
        """
        if self.refusal(problem, None, gpu, "backward"):
            return True  # e.g. cells of 80 rows, for which three passes have no tile
        if widest(problem) > _WIDEST_STAGED:
            return False
        form = _FIRST if self.stores_first(problem, gpu) else "flash2-fused"
        three, fused = self._times(problem, gpu, "flash2", form)
        return fused < three

    def stores_first(self, problem: Problem, gpu: Gpu) -> bool:
        """Return whether "flash2-fused-first" works and is the faster fused backward.

        It is slower if many blocks reach a row tile at the same time, because they wait until the
        first one has stored. So at most `_TOGETHER` work tiles of a head may begin at the same row
        tile, as under a causal mask, and query heads must not alternate (`in_step`). With many
        visits per row tile, reading flags costs more than the zeros that it saves.
        """
        if self.refusal(problem, None, gpu, "backward", _FIRST):
            return False
        passes = self.backward_passes(problem, None, gpu, "ascending", "", _FIRST)
        one = next(one for one in passes if one.stage.name == "fused")
        tables, in_step = one.tables, dict(one.kernel.constants)["FS_IN_STEP"]
        used = tables.visits > 0
        begins = (
            tables.index[tables.ptr[:-1][used]] if tables.spans is None else tables.spans[used, 0]
        )
        if in_step or not len(begins) or int(np.bincount(begins).max()) > _TOGETHER:
            return False
        fused, stored = self._times(problem, gpu, "flash2-fused", _FIRST)
        return stored < (1 - _SAVES) * fused

    def _times(self, problem: Problem, gpu: Gpu, *algorithms: str) -> list[float]:
        """Return the predicted time in µs of the backward pass for each of `algorithms`."""
        made = (
            self.backward_passes(problem, None, gpu, "ascending", "", algorithm)
            for algorithm in algorithms
        )
        return [cost_model.backward_microseconds(passes, gpu) for passes in made]

    def launches(self, walk: Walked) -> tuple[tuple[int, int], ...]:
        """Return a stage's launches, in order, as pairs (blocks per work tile, work tiles).

        Blocks share work tiles only if a KV-outer backward has too few work tiles to fill the SMs.
        If its work tiles are equal, extra launches come first, in which clusters share the work
        tiles that would leave SMs idle. `hopper_kernels.roles_kernel` does not support clusters.
        Above a head_dim of 128, all blocks must be able to run at the same time. Too many clusters
        are slow: on an H100, 128 work tiles took 92 µs in clusters of two, and 72 µs without
        clusters.
        """
        p, (stage, tables, gpu, tiling), items = walk.problem, walk, walk.items
        if stage.outer != "keys" or tables.schedule.tiling == cost_model.ROLES:
            return ((1, items),)
        steps = p.group * tables.visits
        if cost_model.has_equal_tiles(stage, tables):
            return shared_launches(items, int(steps[0]), *_item_times(walk), gpu)
        free = gpu.multiprocessors
        # dQ's kernel runs beside this one if SMs are free, otherwise after it
        if stage.name == "dkdv":
            if items >= free:
                return ((1, items),)
            beside = cost_model.busy_at_once(p, tiling.of("dq"))[0]
            free = int(free - beside) if beside + items <= free else free
        # how many clusters the remaining SMs run is not known
        at_once = gpu.clusters if free == gpu.multiprocessors else ()
        blocks = fastest_cluster(walk.walks, steps, *_item_times(walk), free, at_once)
        while widest(p) > 128 and blocks > 1 and blocks * items > gpu.multiprocessors:
            blocks //= 2
        return ((blocks, items),)

    def defers(self, walk: Walked, cluster: int) -> bool:
        """Return whether a fused pass should compute a visit's dQ in the next visit.

        Only long loops defer dQ, since deferral costs time at the end of each loop.
        """
        p, tables = walk.problem, walk.tables
        rows = p.group * (tables.schedule.tiling.block_q * tables.visits.mean())
        return walk.stage.name == "fused" and widest(p) <= 128 and rows >= _LONG_WALK * cluster

    def clump(self, walk: Walked, cluster: int = 1) -> int:
        """Return how many heads form a head group, which run together.

        If all work tiles are equally long, a head group is one head, or a GQA group's query heads,
        which share K and V. In small groups, more blocks read the same tiles at the same time.
        Blocks that add to dQ in a fixed order use the rule for work tiles of different lengths. The
        same rule covers heads that share a large bias, because their blocks should read the same
        rows of the bias at the same time.

        If work tiles have different lengths, a group's long work tiles start first and load K and
        V, which the short ones find in L2. DRAM limits a forward pass over many short sequences.
        The head groups of such a pass are small, so that some blocks begin a group while others
        finish one. With few waves, all heads may form one group, so that the long work tiles of all
        heads come first. Clusters that share work tiles are compared by their own times.

        The same holds for packed heads, whose head groups can have many more work tiles. A group of
        several waves ends with a wave of short work tiles, for which DRAM is too slow. On an H100,
        groups of half a wave are 1.01 to 1.12 times as fast above a head_dim of 64. Up to 64 they
        gain nothing.
        """
        p, (stage, tables, gpu, _) = walk.problem, walk
        group = p.group if stage.per == "head" else 1  # walks that share K and V
        shared = functions.heads_share(p, gpu.l2_bytes // 8)
        if tables.ranks is None and walk.alike and not shared:
            return group
        size, processors = super().clump(walk), gpu.multiprocessors
        if cluster > 1:
            times, adding_up = _item_times(walk)
            items = times.items(-(-p.group * walk.tables.visits // cluster)) + adding_up
            if cost_model.sooner_at_once(walk.walks, items, processors // cluster, size):
                size = walk.walks
        elif _drifts(walk):
            if self.in_step(walk, 1):
                size = _whole_rounds(walk.walks, tables.tiles, gpu) or size
            items = _item_times(walk)[0].items(p.group * tables.visits)
            if self.in_step(walk, walk.walks):  # a few row tiles of each head should fit in L2
                share = held(stage, p) * tables.schedule.tiling.block_q / p.n_q / gpu.l2_bytes
                drift = 2 if widest(p) > 128 else 1  # warpgroups with roles let blocks drift apart
                larger = cost_model.heads_together(
                    walk.walks, items, processors, size, share, drift
                )
                size = larger if larger != size else self._one_wave(walk, size, share)
            elif self.in_l2(walk, walk.walks) and cost_model.sooner_at_once(
                walk.walks, items, processors, size
            ):
                size = walk.walks
        few = processors // 8
        if walk.items < 8 * processors or stage.name != "forward":
            return size
        if tables.schedule.split.pack_gqa and widest(walk.problem) > 64:
            if tables.tiles <= processors:
                size = min(size, few, max(1, round(processors / (2 * tables.tiles))))
        elif 0 < few * tables.tiles <= processors:
            size = min(size, max(1, few // group) * group)
        return size

    def _one_wave(self, walk: Walked, size: int, share: float) -> int:
        """Return how many heads are one wave above a head_dim of 128, or `size`.

        Head groups of `size` stay if they fill whole waves, or if those of one wave do not. `share`
        is the fraction of L2 that a row tile of a head takes.
        """
        tiles, gpu = walk.tables.tiles, walk.gpu
        if widest(walk.problem) <= 128 or _fills_waves(size, tiles, gpu):
            return size
        wave = max(1, round(gpu.multiprocessors / tiles))
        fits = (
            wave <= walk.walks
            and wave * share <= cost_model.LIVE
            and _fills_waves(wave, tiles, gpu)
        )
        return wave if fits and self.in_step(walk, wave) else size

    def in_step(self, walk: Walked, clump: int) -> bool:
        """Return whether a KV-outer pass alternates between the query heads of a GQA group.

        A KV-outer pass alternates if L2 does not hold what a head group loops over (`in_l2`). No
        pass alternates under a left window, where work tiles begin at different row tiles. Above a
        head_dim of 128, blocks drift apart with each wave, and short loops lose step.
        """
        p = walk.problem
        waves = walk.items / walk.gpu.multiprocessors
        if widest(p) > 128 and walk.tables.tiles < _SHORT_LOOP and waves > _IN_STEP_WAVES:
            return False
        unlimited = walk.stage.name == "fused" and p.left >= p.n_q + p.n_kv
        return unlimited and _drifts(walk) and not self.in_l2(walk, clump)

    def in_l2(self, walk: Walked, clump: int) -> bool:
        """Return whether L2 holds the tensors that a head group loops over, including dQ.

        With more work tiles than SMs, the limit is 1.25 times the L2 size (twice for a single
        head), because concurrent work tiles are about equally long and drift apart slowly.
        """
        more = clump * walk.tables.tiles > walk.gpu.multiprocessors
        room = walk.gpu.l2_bytes * ((2 if clump == 1 else 1.25) if more else 1)
        return clump * held(walk.stage, walk.problem) <= room

    def rings(self, problem: Problem, tiling: Tiling, gpu: Gpu) -> Rings:
        """Return the sizes of the forward kernel's ring buffers.

        K and V have three pipeline stages if shared memory suffices, otherwise two. A captured
        array gets its own ring buffer if there is space beside two stages of K and V.
        """
        tiled = self.brings_tiles and functions.tile_of(problem)
        possible = (Rings(3, 2), Rings(2, 2), Rings(2, 1)) if tiled else ()
        for rings in (*possible, Rings(3)):
            if self.forward_bytes(problem, tiling, rings) <= gpu.shared_bytes:
                return rings
        return Rings(2)

    def forward_bytes(
        self, problem: Problem, tiling: Tiling, rings: Rings, *, shares: bool = True
    ) -> int:
        """Return the bytes of shared memory per thread block of the forward kernel."""
        return hopper_kernels.forward_bytes(problem, tiling, rings, shares=shares)

    def kernel(
        self, stage: str, problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu
    ) -> Kernel:
        """Return the kernel that runs a stage of a pass; row-wise stages use portable kernels."""
        given = problem, tiling, replace(variant, overlap=True)
        if stage == "forward":
            rings = self.rings(problem, tiling, gpu)
            shared = self.forward_bytes(problem, tiling, rings, shares=variant.shares)
            ahead = self.brings_tiles
            made = hopper_kernels.forward_kernel(*given, shared, rings, ahead=ahead)
        elif stage == "fused" and tiling == cost_model.ROLES:
            made = hopper_kernels.roles_kernel(*given)
        elif stage in ("dkdv", "fused"):
            made = hopper_kernels.backward_kernel(*given, ahead=self.brings_tiles)
        elif stage == "dq":
            made = hopper_kernels.dq_kernel(*given)
        else:
            made = portable_kernels.rows_kernel(stage, *given)
        return replace(made, overlaps=True)


HOPPER = Hopper(
    "hopper", nvrtc.load, takes_functions=True, brings_tiles=True, shares=True, packs_heads=True
)


def _forward_times(wide: int) -> dict[Tiling, cost_model.Times]:
    """Return the forward kernel's `Times` per tile; `wide` is the larger head dimension."""
    known = cost_model.HOPPER_FORWARD | cost_model.HOPPER_FORWARD_WIDE
    return next(times for widest, times in known.items() if wide <= widest)


def _split(asked: PassRequest) -> Split:
    return Split(pack_gqa=bool(asked.pack_gqa))


def _item_times(walk: Walked) -> tuple[cost_model.Times, float]:
    """Return a backward kernel's `Times`, and the extra µs per work tile shared by a cluster."""
    p = walk.problem
    known = cost_model.backward_times(p, walk.tables.schedule.tiling)
    return getattr(known, walk.stage.name), cost_model.ADDING_UP[64 if widest(p) <= 64 else 128]


def _drifts(walk: Walked) -> bool:
    """Return whether blocks that start on one KV head may soon work on different query heads."""
    uneven = walk.tables.ranks is None and not walk.alike
    return walk.stage.outer == "keys" and walk.problem.group > 1 and uneven


def _fills_waves(heads: int, tiles: int, gpu: Gpu) -> bool:
    """Return whether the work tiles of so many heads fill an almost integer number of waves."""
    waves = heads * tiles / gpu.multiprocessors
    return 6 * abs(waves - max(1, round(waves))) <= 1


def _whole_rounds(walks: int, tiles: int, gpu: Gpu) -> int:
    """Return how many heads (1 to 4) together fill an almost integer number of waves, or 0.

    If head groups fill whole waves, the work tiles of a wave loop over the row tiles in the same
    direction. If two head groups shared a wave, their loops would have different directions.
    """
    most = gpu.multiprocessors

    def beside(size: int) -> int:
        return abs(size * tiles - most * max(1, round(size * tiles / most)))

    best = min(range(1, min(walks, 4) + 1), key=beside)
    return best if _fills_waves(best, tiles, gpu) else 0
