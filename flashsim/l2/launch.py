"""`L2Model`: the options of the L2 model, such as the launch order and the cache's structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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

#: Added to the code of a request if it comes from an SM of the second partition.
SIDE = 4


class Shares(NamedTuple):
    """Times of an `L2Model`, relative to the time of one visit."""

    jitter: float
    wait: float
    turn: float
    masked: float


@own_errors
@dataclass(frozen=True)
class L2Model:
    """Options of the L2 model: the order of a kernel's requests, and the cache's structure.

    Parameters
    ----------
    launch : {"head-first", "tile-first", "longest-first", "grouped", "in-turns"}
        The order in which thread blocks start. A visit is one query tile times one key tile.

        - "head-first": all tiles of one head, then the next head (FlashAttention-2's grid).
        - "tile-first": tile 0 of every head, then tile 1 of every head, and so on.
        - "longest-first": over all heads, tiles in order of decreasing numbers of visits.
        - "grouped": one group of heads after the other, each as large as fits in L2; within a
          group, the longest tiles first. FlashAttention-3 and the kernels of `flashsim.backends`
          start blocks in this order; `clump_size` computes the size of a group.
        - "in-turns": as "grouped", but a fused backward adds to dQ in a fixed order. The blocks of
          column tiles whose first row tile is last start first, and each addition to dQ waits for
          its turn (`flashsim.schedule.dq_order`).
    walk : {"straight", "sawtooth", "in-step"}
        The order of a block's visits. "straight": the order of the schedule. "sawtooth": every
        other wave of blocks makes its visits in reverse order, so that it starts with the data that
        the previous wave left in L2 (arXiv:2601.16032). "in-step" (KV-outer kernels): the first
        wave, the third and so on are in reverse order, and a block makes each visit for all query
        heads of its group before the next visit. The Hopper kernels of `flashsim.backends` use
        "in-step": see docs/reference/hopper.md.
    blocks_per_sm : int, optional
        Thread blocks that share an SM. Default: as many as fit into its shared memory.
    partitions : int, optional
        The number of L2 partitions, 1 or 2; the default is the device's number. With 2, each half
        of L2 caches the half of memory attached to it. Each half also keeps copies of the data that
        its own SMs read from the other half. So data that all SMs read is in L2 twice.
    jitter : float
        The largest random deviation of a visit's time, in seconds; each visit draws its deviation
        uniformly. A visit takes as long as its matrix products at the device's peak, plus `masked`
        and `wait`. If that peak is unknown for the dtype, all blocks advance at the same speed.
    masked : float
        Additional instructions per score of a visit whose tile is masked in part.
    wait : float
        The seconds that a visit takes longer if all lines that it loads come from DRAM. With
        `ways=None`, visits do not wait.
    turn : float
        For "in-turns": the seconds between two blocks' additions to the same row tile's dQ. The
        default fits six launches on an H200 (docs/notebooks/l2.md).
    ways : int or None
        Lines per set of the cache. None selects the textbook cache that the function `curves`
        assumes: fully associative, of whole tiles, with one partition.
    flush : bool
        Whether every kernel starts with an empty cache, as Nsight Compute does by default. If
        False, a kernel starts with the cache contents that the previous kernel left.
    cluster : int
        Thread blocks that share each outer tile of a KV-outer kernel, and divide its visits.
    heads_in_group : int, optional
        Heads per group, for "grouped" and "in-turns". Default: computed by `clump_size`.
    seed : int
        Random seed for the jitter, for the partition of each SM, and for the set of each line.

    Raises
    ------
    OptionError, DTypeError
        If an option is out of range or has the wrong type.
    """

    launch: str = "head-first"
    walk: str = "straight"
    blocks_per_sm: int | None = None
    partitions: int | None = None
    jitter: float = 0.25e-6
    masked: float = 3.0
    wait: float = 0.1e-6
    turn: float = 1.2e-6
    ways: int | None = 16
    flush: bool = True
    cluster: int = 1
    heads_in_group: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, possible in (("launch", ORDERS), ("walk", WALKS)):
            checks.one_of(name, getattr(self, name), possible)
        limits = {"blocks_per_sm": None, "partitions": 2, "heads_in_group": None, "ways": 64}
        limits["cluster"] = 16  # the most that CUDA allows
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
            raise OptionError(
                "a fully associative cache (ways=None) must have one partition, got "
                "partitions=2; pass partitions=1, or a number as ways="
            )
        checks.flag("flush", self.flush)
        for name in ("jitter", "wait", "turn"):
            if not 0 <= checks.number(name, getattr(self, name)) < 1e-3:
                raise OptionError(
                    f"{name} must be at least 0 and below 1e-3 seconds, got {getattr(self, name)!r}"
                )
        if not 0 <= checks.number("masked", self.masked) <= 1000:
            raise OptionError(f"masked must be between 0 and 1000, got {self.masked!r}")
        checks.seed(self.seed)

    def parts(self, device: Device) -> int:
        """Return the number of partitions of the simulated cache."""
        return 1 if self.ways is None else self.partitions or device.l2_partitions

    def sides(self, slots: int, device: Device) -> np.ndarray:
        """Return the L2 partition of each slot's SM, uint8 (slots,); SMs are divided at random."""
        halves = np.arange(device.sm_count) % self.parts(device)
        return np.resize(np.random.default_rng(self.seed).permutation(halves), slots).astype("u1")

    def shares(
        self, stage: plans.Stage, schedule: Schedule, device: Device, algorithm: str, direction: str
    ) -> Shares:
        """Return `jitter`, `wait`, `turn` and the time of `masked`, in units of a visit's time."""
        seconds = self.visit_seconds(stage, schedule, device, algorithm, direction)
        if not seconds:
            return Shares(0.0, 0.0, 0.0, 0.0)
        tile = schedule.tiling.clip(schedule.problem, schedule.split)
        instructions = self.masked * tile.block_q * tile.block_k
        each = device.peak("float32", tensor_cores=False) / 2 / self.slots(stage, schedule, device)
        wait = 0.0 if self.ways is None else self.wait
        return Shares(
            min(1.0, self.jitter / seconds),
            wait / seconds,
            self.turn / seconds,
            instructions / each / seconds,
        )

    def visit_seconds(
        self, stage: plans.Stage, schedule: Schedule, device: Device, algorithm: str, direction: str
    ) -> float:
        """Return the seconds of one visit's matrix products at the device's peak, 0 if unknown."""
        p, tile = schedule.problem, schedule.tiling.clip(schedule.problem, schedule.split)
        if p.dtype not in {*device.tensor_flops, *device.cuda_flops}:
            return 0.0
        visit = stage_work(p, algorithm, direction, stage.name).visit
        sides = tile.block_q, tile.block_k, tile.block_q * tile.block_k
        flops = total_flops(visit, *sides)["matmul"]
        each = device.peak(p.dtype) / self.slots(stage, schedule, device)
        return flops / each

    def slots(self, stage: plans.Stage, schedule: Schedule, device: Device) -> int:
        """Return how many thread blocks run at the same time: the SMs times the blocks per SM."""
        return device.sm_count * (self.blocks_per_sm or occupancy(stage, schedule, device))

    def order(
        self,
        stage: plans.Stage,
        schedule: Schedule,
        visits: np.ndarray,
        device: Device,
        columns: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each thread block's loop number and outer tile (int32), in the order of start.

        Each head, or each group of query heads, has one loop. `visits` has the number of visits of
        each outer tile, or of each part if keys are split. For a fixed order of additions to dQ,
        `columns` has the column tiles in the order of `launch="in-turns"`.
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
        """Return the number of the wave in which each of `blocks` thread blocks starts.

        With `walk="in-step"`, every head group takes the same integer number of waves
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
        """Return the size of a launch's groups, in loops (heads, or groups of query heads)."""
        if self.launch not in ("grouped", "in-turns"):
            return heads_of(stage, schedule.problem)[0]
        return self.heads_in_group or clump_size(
            *(stage, schedule.problem, tiles), l2_bytes=device.l2_bytes, processors=device.sm_count
        )


def _grid(
    walks: np.ndarray, tiles: np.ndarray, *, walk_outside: bool
) -> tuple[np.ndarray, np.ndarray]:
    if walk_outside:
        pair = np.repeat(walks, len(tiles)), np.tile(tiles, len(walks))
    else:
        pair = np.tile(walks, len(tiles)), np.repeat(tiles, len(walks))
    return pair[0].astype(np.int32), pair[1].astype(np.int32)
