"""Predict the DRAM bytes and roofline of a user's kernel, as for built-in kernels.

For DRAM bytes, the recorded accesses are replayed through the L2 model. Programs start in the order
of the grid, as soon as the device has room for them. Each running program makes one access per time
step.
"""

import heapq
from itertools import pairwise
from typing import Any, cast

import numpy as np

from flashsim.errors import UnsupportedError
from flashsim.l2 import Dram, L2Model
from flashsim.l2.launch import SIDE
from flashsim.l2.model import StageDram, _Sets, _WholeTiles
from flashsim.l2.requests import Stream
from flashsim.problem.hardware import Device
from flashsim.schedule import plans
from flashsim.studies.roofline import Point, Roofline

#: Bytes per piece: tensors are divided into pieces, and L2 holds a piece entirely or not at all.
PIECE = 1 << 10
MOST_PIECES = 50_000_000


class Pieces:
    """Numbers the equal-sized pieces of each tensor; L2 treats a piece as a tile."""

    def __init__(self, traced: Any) -> None:
        record = traced.record
        self.names = list(traced.tensors)
        sizes, first, at = [], [], 0
        self.bytes_of = [t.span * t.itemsize for t in record.tensors]
        for nbytes in self.bytes_of:
            count = max(1, -(-nbytes // PIECE))
            first.append(at)
            at += count
            piece = np.full(count, PIECE, np.int64)
            piece[-1] = nbytes - (count - 1) * PIECE if nbytes else 0
            sizes.append(piece)
        if at > MOST_PIECES:
            raise UnsupportedError(
                f"the L2 model supports at most {MOST_PIECES:,} pieces of {PIECE} B, but the "
                f"tensors have {at:,}; trace a smaller problem"
            )
        self.first = first
        self.size = np.concatenate(sizes)

    def by_tensor(self, per_piece: np.ndarray) -> dict[str, int]:
        """Return the sum over each tensor's pieces, by tensor name, without zero sums."""
        edges = [*self.first, len(self.size)]
        sums = [int(per_piece[a:b].sum()) for a, b in pairwise(edges)]
        return {name: total for name, total in zip(self.names, sums, strict=True) if total}


def dram_of(traced: Any, device: Device, model: L2Model | None) -> Dram:
    """Return a kernel's DRAM bytes, by replaying its accesses through the L2 model of a device."""
    model = L2Model() if model is None else model
    pieces = Pieces(traced)
    tiles = cast(Any, pieces)
    cache = _WholeTiles(tiles, device) if model.ways is None else _Sets(tiles, device, model)
    stages = []
    launches = traced.record.launches
    for number, launch in enumerate(launches):
        part = _stream(traced, number, pieces, device, model)
        read, written = cache.replay(part)
        last = number + 1 == len(launches)
        pending = cache.drain() if model.flush or last else {}
        stages.append(StageDram(launch.kernel, read, written, pending))
    return Dram(cast(Any, traced.trace), model, tuple(stages))


def _stream(traced: Any, launch: int, pieces: Pieces, device: Device, model: L2Model) -> Stream:
    """Return a launch's requests to L2 in order, one request per piece of a tensor."""
    record = traced.record
    a = record.accesses
    mine = np.flatnonzero((a["launch"] == launch) & (a["active"] > 0))
    program = a["program"][mine]
    order = np.argsort(program, kind="stable")
    mine, program = mine[order], program[order]
    starts = np.flatnonzero(np.diff(program, prepend=-1))
    lengths = np.diff(np.append(starts, len(mine)))
    held = sum(nbytes for _, nbytes in record.launches[launch].held.values())
    blocks = model.blocks_per_sm or max(1, device.sram_bytes // max(held, 1))
    slots = device.sm_count * min(blocks, 8)
    free = [(0, slot) for slot in range(min(slots, len(starts)))]
    sides = model.sides(max(len(free), 1), device)
    begins, side = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.uint8)
    for n, length in enumerate(lengths.tolist()):
        time, slot = heapq.heappop(free)
        begins[n], side[n] = time, sides[slot]
        heapq.heappush(free, (time + length, slot))
    which = np.repeat(np.arange(len(starts)), lengths)
    when = begins[which] + np.arange(len(mine)) - starts[which]
    order = np.lexsort((which, when))
    mine, which = mine[order], which[order]
    low, count = _spans(traced, mine, pieces)
    total = int(count.sum())
    ids = np.repeat(low - (np.cumsum(count) - count), count) + np.arange(total)
    codes = a["op"][mine] + SIDE * side[which]
    stage = plans.Stage(record.launches[launch].kernel[:60], "queries")
    return Stream(stage, ids.astype(np.int32), np.repeat(codes, count).astype(np.uint8))


def _spans(traced: Any, mine: np.ndarray, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays with one number per access: the first piece, and the count of pieces."""
    a = traced.record.accesses[mine]
    low, count = np.zeros(len(mine), np.int64), np.zeros(len(mine), np.int64)
    for tensor in traced.record.tensors:
        of = a["tensor"] == tensor.code
        steps = np.array([step * tensor.itemsize for step in tensor.strides] or [0])
        ends = (np.unravel_index(a[name][of], tensor.shape or (1,)) for name in ("first", "last"))
        first, last = (steps @ np.array(index) // PIECE for index in ends)
        low[of] = pieces.first[tensor.code] + first
        count[of] = last - first + 1
    return low, count


def roofline_of(traced: Any, device: Device) -> Roofline:
    """Return a kernel's roofline, with points for requested, DRAM and compulsory bytes."""
    sizes = {
        "requested": traced.bytes(),
        "dram": traced.dram(device).bytes(),
        "compulsory": traced.compulsory(),
    }
    who = traced.name, traced.trace.direction
    flops, dtype = traced.trace.flops("matmul"), traced.problem.dtype
    points = (Point(*who, count, flops, n, device, dtype) for count, n in sizes.items())
    return Roofline(traced.problem, tuple(points))
