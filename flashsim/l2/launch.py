"""In which order thread blocks start, and how many run at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashsim.counts.work import stage_work, total_flops
from flashsim.errors import DTypeError, OptionError, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.schedule import plans
from flashsim.schedule.head_grouping import clump_size
from flashsim.schedule.plans import heads_of
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.split_kv import occupancy
from flashsim.schedule.tables import INT32

ORDERS = ("head-first", "tile-first", "longest-first", "grouped", "in-turns")
WALKS = ("straight", "sawtooth", "in-step")

#: Added to the code of a request's operation if an SM of the second partition asks.
SIDE = 4


@own_errors
@dataclass(frozen=True)
class L2Model:
    """How a kernel's requests reach L2, and what that L2 is like.

    Parameters
    ----------
    launch : {"head-first", "tile-first", "longest-first", "grouped", "in-turns"}
        The order thread blocks start in. "head-first": all tiles of one head, then the next head
        (FlashAttention-2's grid). "tile-first": tile 0 of every head, then tile 1. "longest-first":
        over all heads, the tile with the most visits first. "grouped": heads in groups whose
        tensors stay in L2 together, the longest tiles of a group first (as FlashAttention-3 does,
        and the kernels of `flashsim.backends`: `clump_size`). "in-turns": likewise, but a fused
        backward adds to dQ in a fixed order: its blocks take the columns that start at the last
        rows first and wait for their turns (`flashsim.schedule.dq_order`).
    walk : {"straight", "sawtooth", "in-step"}
        "sawtooth": every other wave of blocks takes its visits backwards, so that it begins with
        what the wave before left in L2 (arXiv:2601.16032). "in-step": with keys outside, likewise,
        but from the first wave on, and the query heads of a group are at each tile in turn (the
        Hopper kernels of `flashsim.backends`): see docs/reference/hopper.md.
    blocks_per_sm : int, optional
        Thread blocks that share an SM. Default: as many as its shared memory holds.
    partitions : int, optional
        1 or 2; default: the device's. With 2, each half caches the half of memory attached to it,
        and copies of what its own SMs read from the other half; so data that all SMs read takes
        its space twice.
    jitter : float
        In seconds: how far a visit's time strays, uniformly, each on its own. A visit takes as long
        as its matrix products at the device's peak; where that is not known for the dtype, and with
        0, all blocks keep step.
    turn : float
        For "in-turns", in seconds: from one addition to a row tile's dQ to the next block's. What
        fits six launches on an H200 (docs/notebooks/l2.md).
    ways : int or None
        Lines a set of the cache holds. None: the textbook cache, fully associative, of whole tiles,
        in one partition, as `curves` assumes.
    flush : bool
        Start every stage with an empty cache, as Nsight Compute does by default. False: what one
        stage leaves, the next one finds.
    heads_in_group : int, optional
        For "grouped" and "in-turns". Default: as described there.
    seed : int
        Of the jitter, of which SM is in which partition, and of which lines share a set.

    Raises
    ------
    OptionError, DTypeError
        For an option outside its range or of another type.
    """

    launch: str = "head-first"
    walk: str = "straight"
    blocks_per_sm: int | None = None
    partitions: int | None = None
    jitter: float = 0.35e-6
    turn: float = 1.2e-6
    ways: int | None = 16
    flush: bool = True
    heads_in_group: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, possible in (("launch", ORDERS), ("walk", WALKS)):
            checks.one_of(name, getattr(self, name), possible)
        limits = {"blocks_per_sm": None, "partitions": 2, "heads_in_group": None, "ways": 64}
        for name, largest in limits.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not checks.is_int(value):
                raise DTypeError(f"{name} must be an integer or None, got {shown(value)}")
            if not 1 <= value <= (largest or INT32):
                limit = "at least 1" if largest is None else f"between 1 and {largest}"
                if largest is None and value > INT32:
                    limit = f"at most {INT32:,}"
                raise OptionError(f"{name} must be {limit}, got {shown(value)}")
        if self.ways is None and self.partitions == 2:
            raise OptionError("the fully associative cache (ways=None) has one partition, not 2")
        checks.flag("flush", self.flush)
        for name in ("jitter", "turn"):
            if not 0 <= checks.number(name, getattr(self, name)) < 1e-3:
                raise OptionError(
                    f"{name} must be at least 0 and below 1e-3 seconds, got {getattr(self, name)!r}"
                )
        checks.seed(self.seed)

    def parts(self, device: Device) -> int:
        """Partitions of the cache."""
        return 1 if self.ways is None else self.partitions or device.l2_partitions

    def sides(self, slots: int, device: Device) -> np.ndarray:
        """uint8 (slots,): the partition of each slot's SM; half of the SMs, drawn at random."""
        halves = np.arange(device.sm_count) % self.parts(device)
        return np.resize(np.random.default_rng(self.seed).permutation(halves), slots).astype("u1")

    def jitter_share(
        self, stage: plans.Stage, schedule: Schedule, device: Device, algorithm: str, direction: str
    ) -> float:
        """The jitter as a share of a visit's time, at most 1."""
        seconds = self.visit_seconds(stage, schedule, device, algorithm, direction)
        return min(1.0, self.jitter / seconds) if seconds else 0.0

    def turn_share(
        self, stage: plans.Stage, schedule: Schedule, device: Device, algorithm: str, direction: str
    ) -> float:
        """The time of a turn in visits."""
        seconds = self.visit_seconds(stage, schedule, device, algorithm, direction)
        return self.turn / seconds if seconds else 0.0

    def visit_seconds(
        self, stage: plans.Stage, schedule: Schedule, device: Device, algorithm: str, direction: str
    ) -> float:
        """What a visit's matrix products take at the device's peak; 0 where that is not known."""
        p, tile = schedule.problem, schedule.tiling.clip(schedule.problem, schedule.split)
        if p.dtype not in {*device.tensor_flops, *device.cuda_flops}:
            return 0.0
        visit = stage_work(p, algorithm, direction, stage.name).visit
        sides = tile.block_q, tile.block_k, tile.block_q * tile.block_k
        flops = total_flops(visit, *sides)["matmul"]
        each = device.peak(p.dtype) / self.slots(stage, schedule, device)
        return flops / each

    def slots(self, stage: plans.Stage, schedule: Schedule, device: Device) -> int:
        """Thread blocks in flight at once: SMs times blocks an SM."""
        return device.sm_count * (self.blocks_per_sm or occupancy(stage, schedule, device))

    def order(
        self,
        stage: plans.Stage,
        schedule: Schedule,
        visits: np.ndarray,
        device: Device,
        columns: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Thread blocks in the order they start: their walk and their outer tile, int32 each.

        Parameters
        ----------
        visits : ndarray, (outer tiles,)
            How many visits each outer tile has; of keys in parts, each part.
        columns : ndarray, (outer tiles,), optional
            Those of "in-turns", in their order, where the stage adds in turns.
        """
        walks, tiles = heads_of(stage, schedule.problem)[0], len(visits)
        tile_order = np.arange(tiles)
        if stage.outer == "keys" and schedule.key_order == "descending":
            tile_order = tile_order[::-1]
        if self.launch == "head-first":
            return _grid(np.arange(walks), tile_order, walk_outside=True)
        if self.launch == "tile-first":
            return _grid(np.arange(walks), tile_order, walk_outside=False)
        longest = tile_order[np.argsort(-visits[tile_order], kind="stable")]
        longest = longest if columns is None else columns
        size = self._together(stage, schedule, tiles, device)
        groups = [
            _grid(np.arange(first, min(first + size, walks)), longest, walk_outside=False)
            for first in range(0, walks, size)
        ]
        return np.concatenate([g[0] for g in groups]), np.concatenate([g[1] for g in groups])

    def waves(
        self, stage: plans.Stage, schedule: Schedule, tiles: int, device: Device, blocks: int
    ) -> np.ndarray:
        """Of `blocks` thread blocks, in the order they start: in which wave each is.

        In step, every group of heads has as many waves, whole ones
        (kernels/hopper/tile_scheduler.cuh).
        """
        at_once = max(min(self.slots(stage, schedule, device), blocks), 1)
        block = np.arange(blocks)
        if self.walk != "in-step":
            return block // at_once
        whole = tiles * self._together(stage, schedule, tiles, device)
        each = max(1, (2 * whole + at_once) // (2 * at_once))
        return block // whole * each + block % whole // at_once

    def _together(self, stage: plans.Stage, schedule: Schedule, tiles: int, device: Device) -> int:
        """Walks of a group."""
        if self.launch not in ("grouped", "in-turns"):
            return heads_of(stage, schedule.problem)[0]
        return self.heads_in_group or clump_size(
            *(stage, schedule.problem, tiles),
            l2_bytes=device.l2_bytes,
            processors=device.sm_count,
        )


def _grid(
    walks: np.ndarray, tiles: np.ndarray, *, walk_outside: bool
) -> tuple[np.ndarray, np.ndarray]:
    if walk_outside:
        pair = np.repeat(walks, len(tiles)), np.tile(tiles, len(walks))
    else:
        pair = np.tile(walks, len(tiles)), np.repeat(tiles, len(walks))
    return pair[0].astype(np.int32), pair[1].astype(np.int32)
