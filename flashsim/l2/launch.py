"""In which order thread blocks start, and how many run at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashsim import plans
from flashsim.errors import OptionError, choices
from flashsim.hardware import KIB, Device
from flashsim.plans import heads_of
from flashsim.schedule import Schedule
from flashsim.tiling import is_strip

ORDERS = ("head-first", "tile-first", "longest-first", "grouped")
WALKS = ("straight", "sawtooth")

#: Shared memory that CUDA keeps for itself, a block (CUDA C++ Programming Guide, compute
#: capability 8.0 and later).
RESERVED = 1 * KIB
#: An SM holds 2048 threads [CUDA guide]; a block of attention has at least 4 warps.
MOST_BLOCKS = 16


@dataclass(frozen=True)
class L2Model:
    """How a kernel's requests reach L2, and what that L2 is like.

    Parameters
    ----------
    launch : {"head-first", "tile-first", "longest-first", "grouped"}
        The order thread blocks start in. "head-first": all tiles of one head, then the next head
        (FlashAttention-2's grid). "tile-first": tile 0 of every head, then tile 1. "longest-first":
        over all heads, the tile with the most visits first. "grouped": heads in groups whose K and
        V take at most half of L2, the longest tiles of a group first (as FlashAttention-3 does).
    walk : {"straight", "sawtooth"}
        "sawtooth": every other wave of blocks takes its visits backwards, so that it begins with
        what the wave before left in L2 (arXiv:2601.16032).
    blocks_per_sm : int, optional
        Thread blocks that share an SM. Default: as many as its shared memory holds.
    partitions : int, optional
        1 or 2; default: the device's. With 2, each half caches the half of memory attached to it,
        and copies of what its own SMs read from the other half; so data that all SMs read takes
        its space twice.
    skew : float
        Each block's pace is drawn from [1 - skew, 1 + skew]; 0 is lock-step. Not calibrated.
    flush : bool
        Start every stage with an empty cache, as Nsight Compute does by default. False: what one
        stage leaves, the next one finds.
    heads_in_group : int, optional
        For "grouped". Default: as described there.
    seed : int
        Of the paces.

    Raises
    ------
    OptionError
        For an option outside its range.
    """

    launch: str = "head-first"
    walk: str = "straight"
    blocks_per_sm: int | None = None
    partitions: int | None = None
    skew: float = 0.05
    flush: bool = True
    heads_in_group: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, possible in (("launch", ORDERS), ("walk", WALKS)):
            value = getattr(self, name)
            if value not in possible:
                raise OptionError(f"unknown {name} {value!r}; {choices(value, possible)}")
        for name, largest in (("blocks_per_sm", None), ("partitions", 2), ("heads_in_group", None)):
            value = getattr(self, name)
            if value is not None and (value < 1 or (largest and value > largest)):
                limit = f"between 1 and {largest}" if largest else "at least 1"
                raise OptionError(f"{name} must be {limit}, got {value!r}")
        if not 0 <= self.skew < 1:
            raise OptionError(f"skew must be at least 0 and below 1, got {self.skew!r}")

    def slots(self, stage: plans.Stage, schedule: Schedule, device: Device) -> int:
        """Thread blocks in flight at once: SMs times blocks an SM."""
        return device.sm_count * (self.blocks_per_sm or occupancy(stage, schedule, device))

    def order(
        self, stage: plans.Stage, schedule: Schedule, visits: np.ndarray, device: Device
    ) -> tuple[np.ndarray, np.ndarray]:
        """Thread blocks in the order they start: their walk and their outer tile, int32 each.

        Parameters
        ----------
        visits : ndarray, (outer tiles,)
            How many visits each outer tile has.
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
        size = walks if self.launch == "longest-first" else self._group(stage, schedule, device)
        groups = [
            _grid(np.arange(first, min(first + size, walks)), longest, walk_outside=False)
            for first in range(0, walks, size)
        ]
        return np.concatenate([g[0] for g in groups]), np.concatenate([g[1] for g in groups])

    def _group(self, stage: plans.Stage, schedule: Schedule, device: Device) -> int:
        if self.heads_in_group is not None:
            return self.heads_in_group
        p = schedule.problem
        keys = p.n_kv * (p.head_dim + p.head_dim_v) * p.itemsize
        key_heads = max(1, device.l2_bytes // 2 // keys)
        return key_heads * (p.group if stage.per == "head" else 1)


def _grid(
    walks: np.ndarray, tiles: np.ndarray, *, walk_outside: bool
) -> tuple[np.ndarray, np.ndarray]:
    if walk_outside:
        pair = np.repeat(walks, len(tiles)), np.tile(tiles, len(walks))
    else:
        pair = np.tile(walks, len(tiles)), np.repeat(tiles, len(walks))
    return pair[0].astype(np.int32), pair[1].astype(np.int32)


def occupancy(stage: plans.Stage, schedule: Schedule, device: Device) -> int:
    """Thread blocks of a stage that fit on one SM side by side, by their on-chip bytes.

    Registers are part of the on-chip bytes in this model, so a kernel that keeps its accumulators
    in registers may fit more blocks; pass `blocks_per_sm` for a kernel you know.
    """
    tile = schedule.tiling.clip(schedule.problem)
    rows = 1 if is_strip(stage) else tile.block_q
    held = sum(buffer.nbytes(rows, tile.block_k) for buffer in stage.buffers)
    return max(1, min(MOST_BLOCKS, device.sram_per_sm // (held + RESERVED)))
