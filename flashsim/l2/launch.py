"""`L2Model`: the options of the L2 model, such as the launch order and the cache's structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flashsim.counts.traffic import Traffic
from flashsim.counts.work import stage_work, total_flops
from flashsim.errors import DTypeError, OptionError, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.schedule import plans
from flashsim.schedule.head_grouping import clump_size
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
    masked: float = 2.0
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


class L2Launch:
    """The launch of one stage's kernel under an `L2Model`: how its thread blocks are scheduled.

    `slots` thread blocks run at the same time. The kernel runs `walks` loops over its outer tiles,
    and each loop advances by `stride` query heads. `tile` is the tile, cut to the problem's size.
    """

    def __init__(self, model: L2Model, requested: Traffic, stage: plans.Stage) -> None:
        self.model, self.requested, self.stage = model, requested, stage
        self.schedule, self.device = requested.schedule(stage), requested.device
        per_sm = model.blocks_per_sm or occupancy(stage, self.schedule, self.device)
        self.slots = self.device.sm_count * per_sm
        self.walks, self.stride = plans.heads_of(stage, requested.problem)
        self.tile = self.schedule.tiling.clip(requested.problem, self.schedule.split)

    def visit_seconds(self) -> float:
        """Return the seconds of one visit's matrix products at the device's peak, 0 if unknown."""
        r, dtype = self.requested, self.requested.problem.dtype
        if dtype not in {*self.device.tensor_flops, *self.device.cuda_flops}:
            return 0.0
        visit = stage_work(r.problem, r.algorithm, r.direction, self.stage.name).visit
        q, k = self.tile.block_q, self.tile.block_k
        return total_flops(visit, q, k, q * k)["matmul"] / (self.device.peak(dtype) / self.slots)

    def shares(self) -> Shares:
        """Return the model's `jitter`, `wait`, `turn` and time of `masked`, per visit's time."""
        seconds, model = self.visit_seconds(), self.model
        if not seconds:
            return Shares(0.0, 0.0, 0.0, 0.0)
        instructions = model.masked * self.tile.block_q * self.tile.block_k
        each = self.device.peak("float32", tensor_cores=False) / 2 / self.slots
        wait = 0.0 if model.ways is None else model.wait
        times = wait / seconds, model.turn / seconds, instructions / each / seconds
        return Shares(min(1.0, model.jitter / seconds), *times)

    def order(
        self, visits: np.ndarray, columns: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each thread block's loop number and outer tile (int32), in the order of start.

        Each head, or each group of query heads, has one loop. `visits` has the number of visits of
        each outer tile, or of each part if keys are split. For a fixed order of additions to dQ,
        `columns` has the column tiles in the order of `launch="in-turns"`.
        """
        tiles = np.arange(len(visits), dtype=np.int32)
        if self.stage.outer == "keys" and self.schedule.key_order == "descending":
            tiles = tiles[::-1]
        if columns is not None:
            tiles = columns.astype(np.int32)
        elif self.model.launch not in ("head-first", "tile-first"):
            tiles = tiles[np.argsort(-visits[tiles], kind="stable")]
        size = 1 if self.model.launch == "head-first" else self._together(len(tiles))
        walks = np.arange(self.walks, dtype=np.int32)
        groups = [walks[first : first + size] for first in range(0, self.walks, size)]
        return (
            np.concatenate([np.tile(group, len(tiles)) for group in groups]),
            np.concatenate([np.repeat(tiles, len(group)) for group in groups]),
        )

    def waves(self, tiles: int, blocks: int) -> np.ndarray:
        """Return the number of the wave in which each of `blocks` thread blocks starts.

        With `walk="in-step"`, every head group takes the same integer number of waves
        (kernels/hopper/tile_scheduler.cuh).
        """
        at_once = max(min(self.slots, blocks), 1)
        block = np.arange(blocks)
        if self.model.walk != "in-step":
            return block // at_once
        whole = tiles * self._together(tiles)
        each = max(1, (2 * whole + at_once) // (2 * at_once))
        return block // whole * each + block % whole // at_once

    def _together(self, tiles: int) -> int:
        """Return the size of a launch's groups, in loops (heads, or groups of query heads)."""
        if self.model.launch not in ("grouped", "in-turns"):
            return self.walks
        limits = {"l2_bytes": self.device.l2_bytes, "processors": self.device.sm_count}
        heads = self.model.heads_in_group
        return heads or clump_size(self.stage, self.requested.problem, tiles, **limits)
