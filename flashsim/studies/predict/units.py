"""Computes how long a block's tiles keep each unit of an SM busy, from instructions and bytes.

Tensor cores multiply whole tiles, with head_dim padded to the kernel's width. Kernels move rows
that are padded to 16 bytes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from flashsim.backends.launch.device_tables import Lowered, parts_of
from flashsim.backends.launch.kernel import padded_dims, row_elements
from flashsim.backends.launch.passes import KernelPass
from flashsim.backends.launch_policy import hopper_kernels
from flashsim.counts.traffic import Traffic
from flashsim.counts.work import stage_work, total_flops
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.head_grouping import held
from flashsim.schedule.tensors import shape, whole_bytes
from flashsim.studies.energy import Use
from flashsim.studies.predict.calibration import DRIFTED, L2_KEEPS

UNITS = ("tensor cores", "exponentials", "CUDA cores", "shared memory", "L2")

#: float32 lanes of an SM by compute capability (CUDA C++ Programming Guide, arithmetic throughput).
#: Its special-function units compute 16 results per cycle, and its shared memory moves 128 B per
#: cycle.
LANES = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
SPECIAL, SHARED_BYTES = 16, 128
#: Bytes that one SM can receive from L2 per cycle. This number is assumed. If all SMs of an H100
#: read at once, each receives 37.
L2_PORT = 64
#: The number of warpgroups for which the constants state the latency of a visit: while one waits,
#: the other works. With three warpgroups, two work.
PAIR = 2
#: Scaling an element of O takes this share of a score's instructions: 1.31 of 4.85, by the machine
#: code of Hopper's forward kernels (benchmarks/instructions.py).
SCALED = 0.27
#: The columns of a product that adds the log-sum-exp or delta of rows (STATISTICS in
#: kernels/hopper/kv_outer.cuh).
STATISTICS_COLUMNS = 16
#: Bytes of shared memory per block that CUDA reserves (CUDA C++ Programming Guide), and the
#: registers per thread of these kernels, which is nearly the maximum for every head_dim.
RESERVED, REGISTERS = 1024, 256


@dataclass(frozen=True)
class Work:
    """The work of a launch's outer tiles, in the order in which thread blocks take them.

    Attributes
    ----------
    one, traffic : KernelPass, Traffic
        The launch, and the pass that it belongs to.
    visits, masked : ndarray
        Per outer tile, over all query heads of a group: its visits (pairs of a query tile and a key
        tile), and those of its visits in which a mask is applied. If each warpgroup computes only
        its own visits, both are means over the warpgroups.
    longest : ndarray
        Per outer tile, the visits of the warpgroup that has the most: it ends last.
    visit : dict of float
        Seconds that one visit takes on each unit of an SM, if the unit does nothing else. The keys
        are `UNITS` and also "reductions" (bytes added at L2, at the speed of L2 reads), "scores"
        (one instruction per score), "masks" (the same; twice as many in a Hopper kernel for a
        window, which compares a column with two limits), "statistics" (one per score, if a Hopper
        kernel for dK and dV loads the log-sum-exp and delta of rows), "O" (one instruction per
        element of O that a Hopper forward scales) and "pieces" (one instruction per 16 bytes whose
        address a thread computes).
    own : ndarray
        Seconds that L2 needs for the bytes that each outer tile loads and stores outside its
        visits. A tile at a sequence's end counts only the rows that exist.
    blocks, groups : int
        The blocks that share an SM, and the warpgroups of a block that split a visit's rows by
        ping-pong scheduling on the tensor cores (without such scheduling, `PAIR`).
    stores : ndarray or None
        Per outer tile of "flash2-fused-first", its visits that may be the first of their row tile.
    """

    one: KernelPass
    traffic: Traffic
    visits: np.ndarray
    masked: np.ndarray
    longest: np.ndarray
    visit: dict[str, float]
    own: np.ndarray
    blocks: int
    groups: int = PAIR
    stores: np.ndarray | None = None


def clock(device: Device) -> float:
    """Return a device's SM clock in Hz, computed from its float32 peak."""
    lanes = LANES.get(device.compute_capability, 128)
    return device.peak("float32", tensor_cores=False) / (2 * lanes * device.sm_count)


def work_of(one: KernelPass, traffic: Traffic) -> Work:
    """Return how much work the thread blocks of a launch give each hardware unit of an SM."""
    p, device, stage = traffic.problem, traffic.device, one.stage
    tiling, tables = one.tables.schedule.tiling, one.tables
    sides, hertz = (tiling.block_q, tiling.block_k), clock(device)
    a_lane = 1 / (LANES.get(device.compute_capability, 128) * hertz)
    l2 = device.sm_count / device.l2_bandwidth if device.l2_bandwidth else 0.0
    tiles = one.walks * tables.tiles
    if l2 and is_hopper_in_cpp(one) and len(one.items) == tiles:
        # The SMs that have a work tile share L2's bandwidth.
        working = min(1.0, tiles * one.kernel.cluster / device.sm_count)
        l2 = max(working * l2, 1 / (L2_PORT * hertz))
    dims, beyond, loads = padded_dims(p), 0, False
    if one.kernel.boxes and stage.name != "forward":
        taken, beyond = hopper_kernels.product_columns(stage.name, p, tiling, one.kernel.cluster)
        dims = taken, taken
        # A product adds the log-sum-exp to the scores, and another adds delta to dP.
        adds = dict(one.kernel.constants).get("FS_STATISTICS", 0)
        beyond += 2 * STATISTICS_COLUMNS * adds
        loads = stage.name in ("dkdv", "fused") and not adds
    wide = replace(p, head_dim=dims[0], head_dim_v=dims[1])
    turns = bool(one.kernel.boxes) and stage.name == "forward"  # on the tensor cores
    left = is_hopper_in_cpp(one) and dict(one.kernel.constants).get("FS_LEFT")
    padded = stage_work(wide, traffic.algorithm, traffic.direction, stage.name).visit
    flops = total_flops(padded, *sides, sides[0] * sides[1])
    flops["matmul"] += 2 * sides[0] * sides[1] * beyond
    simple = sum(flops[kind] for kind in ("max", "add", "multiply", "divide"))
    moved = {op: _bytes(p, stage.visit, op, sides) for op in ("load", "store", "reduce")}
    seconds = {
        "tensor cores": flops["matmul"] * device.sm_count / device.peak(p.dtype),
        "exponentials": flops["exp"] / (SPECIAL * hertz),
        "CUDA cores": simple * a_lane,
        "shared memory": _shared_reads(one, dims, sides) / (SHARED_BYTES * hertz),
        "L2": sum(moved.values()) * l2,
        "reductions": moved["reduce"] * l2,
        "scores": sides[0] * sides[1] * a_lane,
        "masks": sides[0] * sides[1] * a_lane * (2 if left else 1),
        "statistics": sides[0] * sides[1] * a_lane * loads,
        "O": sides[0] * dims[1] * a_lane if turns else 0.0,
        "pieces": _uneven_pieces(one, p, dims, sides) * a_lane,
    }
    members = plans.members_of(stage, p, tables.schedule.split)
    own = sum(_bytes(p, (*stage.before, *stage.after), op, sides) for op in ("load", "store"))
    order, outer = tables.order, tables.schedule.rows
    if stage.outer == "keys":
        outer = tables.schedule.cols
    rows = np.diff(outer[:, :2])[:, 0][order] / sides[stage.outer == "keys"]
    visits, masked, longest = (x[order] * members for x in _visits(tables))
    groups, blocks = tiling.block_q // 64 if turns else PAIR, blocks_per_sm(one, device)
    counts = visits, masked, longest
    stores = None
    if dict(one.kernel.constants).get("FS_FIRST"):
        stores = _first_visits(one, device.sm_count // one.kernel.cluster)[order] * members
    return Work(one, traffic, *counts, seconds, own * l2 * rows, blocks, groups, stores)


def is_hopper_in_cpp(one: KernelPass) -> bool:
    """Whether a launch is of a Hopper kernel in C++."""
    return bool(one.kernel.boxes) and one.kernel.file.endswith(".cu")


def _visits(tables: Lowered) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return per outer tile: `visits`, `masked` and `longest` of `Work`, for one query head."""
    if tables.shares is None:
        return tables.visits, tables.masked, tables.visits
    first, full_first, full_stop, stop = np.moveaxis(parts_of(tables).astype(np.int64), 2, 0)
    visits, full = stop - first, full_stop - full_first
    return visits.mean(1), (visits - full).mean(1), visits.max(1)


def _first_visits(one: KernelPass, places: int) -> np.ndarray:
    """Return per outer tile of a head: its visits that may be the first of their row tile.

    The `places` blocks of a wave begin together, and loop over row tiles in ascending order. So of
    the blocks that visit a row tile, the one that begins nearest to it comes first. Blocks that
    begin at the same row tile reach all others together: one stores, and the rest wait for it.
    """
    tables = one.tables
    rows = [_inner_tiles(tables, tile) for tile in range(tables.tiles)]
    begins, visited = np.zeros((2, len(tables.rows)), np.int64)
    found = np.zeros(tables.tiles, np.int64)
    order = [tile for tile in tables.order if len(rows[tile])]
    at_once = max(1, places // min(one.clump, one.walks))
    for start in range(0, len(order), at_once):
        wave = order[start : start + at_once]
        for tile in sorted(wave, key=lambda tile: rows[tile][0]):
            begins[rows[tile]] = rows[tile][0]
        for tile in wave:
            mine = rows[tile]
            found[tile] = np.count_nonzero((visited[mine] == 0) & (begins[mine] == mine[0]))
        for tile in wave:
            visited[rows[tile]] = 1
    return found


def _inner_tiles(tables: Lowered, tile: int) -> np.ndarray:
    if tables.spans is not None:
        return np.arange(tables.spans[tile, 0], tables.spans[tile, 3])
    return tables.index[tables.ptr[tile] : tables.ptr[tile + 1]]


def _bytes(p: Problem, moves: Iterable[plans.Move], op: str, sides: tuple[int, int]) -> int:
    """Return the bytes of one operation's transfers: whole tiles, with rows padded to 16 bytes."""
    total = 0
    for move in moves:
        if move.op == op:
            its = shape(p, move.tensor)
            nbytes = move.tile.nbytes(*sides)
            whole = its.vector or its.elements == 1  # such as captured elements
            total += nbytes if whole else nbytes // its.elements * row_elements(its.elements)
    return total


def _shared_reads(one: KernelPass, dims: tuple[int, int], sides: tuple[int, int]) -> int:
    """Return the bytes that a portable kernel's warps read from shared memory per visit.

    The result is 0 if TMA loads the tiles: tensor cores read these tiles without the warps. In each
    matrix product, every warp reads the complete inner tile. In KV-outer kernels, several warps may
    share the columns of a product (`FS_PARTS`).
    """
    if one.kernel.boxes:  # the tensor cores read operands from shared memory without warps' loads
        return 0
    (d, dv), (bq, bk), name = dims, sides, one.stage.name
    constants = dict(one.kernel.constants)
    warps, size = one.kernel.threads // 32, constants["FS_BYTES"]
    if name in ("forward", "dq"):
        return warps * bk * ((d if name == "forward" else 2 * d) + dv) * size
    reads = warps // constants.get("FS_PARTS", 1) * 2 * bq * (d + dv) * size
    if name == "fused":  # K for dQ, and dS transposed through shared memory
        reads += (max(1, bq // 32) * bk * d + 2 * bq * bk) * size
    return reads


def _uneven_pieces(
    one: KernelPass, p: Problem, dims: tuple[int, int], sides: tuple[int, int]
) -> int:
    """Return the number of 16-byte pieces per visit whose addresses are computed separately.

    Only portable kernels have such pieces (`load_async` in mma.cuh), in two cases. Either a block's
    threads do not load a multiple of eight whole rows at a time, or padded rows contain pieces that
    do not exist in memory.
    """
    if one.kernel.boxes:
        return 0
    rows = sides[1] if one.stage.outer == "queries" else sides[0]
    pieces = 0
    for width, exists in zip(dims, (p.head_dim, p.head_dim_v), strict=True):
        chunks = width * p.itemsize // 16
        threads = one.kernel.threads
        even = threads % chunks == 0 and threads // chunks % 8 == 0
        if not even or row_elements(exists) != width:
            pieces += rows * chunks
    return pieces


def blocks_per_sm(one: KernelPass, device: Device) -> int:
    """Return how many thread blocks fit on an SM; a persistent kernel has 1 block per SM."""
    if one.kernel.boxes:
        return 1
    by_shared = device.sram_per_sm // (one.kernel.shared_bytes + RESERVED)
    by_registers = device.registers_per_sm // (4 * REGISTERS * one.kernel.threads)
    return max(1, min(by_shared, by_registers))


def use_of(one: KernelPass, traffic: Traffic, units: Mapping[str, float]) -> Use:
    """Return the FLOPs, bytes and other quantities from which a launch's energy is computed.

    `units` has the seconds per hardware unit, as in `StageTime.units`.
    """
    p, device, tiling = traffic.problem, traffic.device, one.tables.schedule.tiling
    members = plans.members_of(one.stage, p, one.tables.schedule.split)
    visits = int(one.tables.visits.sum()) * members * one.walks if one.stage.visit else 0
    moved = {"load": 0, "store": 0, "reduce": 0}
    for (stage, op, _), nbytes in traffic.transfers.items():
        if stage == one.stage.name:
            moved[op] += nbytes
    shared = units.get("shared memory", 0.0) * SHARED_BYTES * clock(device) * device.sm_count
    return Use(
        flops=units.get("tensor cores", 0.0) * device.peak(p.dtype),
        scores=visits * tiling.block_q * tiling.block_k,
        shared=shared,
        moved=moved["load"] + moved["store"],
        added=moved["reduce"],
        hbm=once_bytes(traffic, one.stage.name) + bytes_again(one, traffic),
        by_threads=not one.kernel.boxes,
    )


def bytes_again(one: KernelPass, traffic: Traffic) -> float:
    """Return the bytes that a kernel reads from HBM more than once, because L2 did not keep them.

    Only fused kernels with grouped heads read bytes more than once, if a head group's data (Q, dO
    and dQ) exceeds L2. Only the data that exceeds L2's capacity is read more than once. In the
    cases tried, the result differed from the slower L2 model's (`flashsim.l2`) by at most 1/7.

    If all blocks of a head group run at once and none waits for another, the long and the short
    blocks of a head soon work on different query heads. In this case, a request for data that does
    not fit in L2 goes to HBM, and an addition to such data reads and writes HBM. For Hopper's
    kernels, only the share `DRIFTED` of these bytes is counted.

    If a head group has more blocks than SMs, or if its blocks are co-scheduled, the blocks of one
    wave read each row tile together. Each later wave that visits a row tile reads this tile again.
    """
    p, stage, tables = traffic.problem, one.stage, one.tables
    asked = {"load": 0, "reduce": 0}
    for (name, op, _), nbytes in traffic.transfers.items():
        if name == stage.name and op in asked:
            asked[op] += nbytes
    if p.group == 1 or not asked["reduce"] or (tables.visits == tables.visits[0]).all():
        return 0.0
    heads, processors = min(one.clump, one.walks), traffic.device.sm_count
    missing = max(0.0, 1 - traffic.device.l2_bytes / (heads * held(stage, p)))
    if not missing:
        return 0.0
    together = dict(one.kernel.constants).get("FS_IN_STEP") or heads * tables.tiles > processors
    if not together:
        share = DRIFTED if is_hopper_in_cpp(one) else 1.0
        every = asked["load"] + 2 * asked["reduce"] - once_bytes(traffic, stage.name)
        return share * missing * every
    looped = sum(
        whole_bytes(p, move.tensor) * (2 if move.op == "reduce" else 1)
        for move in stage.visit
        if move.op in asked
    )
    return missing * (_waves_per_row(one, heads, processors) - 1) * looped


def _waves_per_row(one: KernelPass, heads: int, processors: int) -> float:
    """Return the number of waves of thread blocks that visit a row tile, averaged over row tiles.

    Per head, a wave has as many consecutive outer tiles as there are SMs per head. The count
    assumes that a wave visits every row tile between the wave's first and last one.
    """
    tables = one.tables
    visited = tables.order[tables.visits[tables.order] > 0]
    ends = np.stack(
        [tables.index[tables.ptr[visited]], tables.index[tables.ptr[visited + 1] - 1] + 1]
    )
    each = processors / heads
    starts = np.unique(np.arange(0.0, ends.shape[1], max(1.0, each)).astype(int))
    begin, end = np.minimum.reduceat(ends[0], starts), np.maximum.reduceat(ends[1], starts)
    return float((end - begin).sum() / len(np.unique(tables.index)))


def zeros(traffic: Traffic) -> tuple[float, float]:
    """Return the bytes of dQ's zeros that L2 keeps for a fused kernel, and those that it does not.

    The kernel for delta reads O and dO and writes the zeros. L2 keeps the last part of these bytes.
    HBM never moves the zeros that L2 keeps.
    """
    if ("delta", "store", "dQ_acc") not in traffic.transfers:
        return 0.0, 0.0
    share = min(1.0, L2_KEEPS * traffic.device.l2_bytes / once_bytes(traffic, "delta"))
    nbytes = whole_bytes(traffic.problem, "dQ_acc")
    return share * nbytes, (1 - share) * nbytes


def once_bytes(traffic: Traffic, stage: str) -> int:
    """Return the bytes of the tensors that a stage reads, plus those of the tensors it writes."""
    stored = {tensor for _, op, tensor in traffic.transfers if op == "store"}
    return sum(
        whole_bytes(traffic.problem, tensor) * (2 if op == "reduce" and tensor in stored else 1)
        for name, op, tensor in traffic.transfers
        if name == stage
    )
