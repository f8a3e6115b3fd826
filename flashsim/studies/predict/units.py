"""How long each unit of a GPU needs for the work of one visit of one thread block, alone."""

from __future__ import annotations

from flashsim.counts.traffic import Traffic
from flashsim.counts.work import TileOp, stage_work, total_flops
from flashsim.problem.hardware import Device
from flashsim.schedule import plans
from flashsim.schedule.tensors import whole_bytes

UNITS = ("tensor cores", "exponentials", "CUDA cores", "shared memory", "L2")

#: float32 lanes of an SM by compute capability (CUDA C++ Programming Guide, arithmetic throughput);
#: its special-function units make 16 results a cycle, its shared memory moves 128 B a cycle.
LANES = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
SPECIAL, SHARED_BYTES = 16, 128


def clock(device: Device) -> float:
    """The SM clock, in Hz, that a device's float32 peak assumes."""
    lanes = LANES.get(device.compute_capability, 128)
    return device.peak("float32", tensor_cores=False) / (2 * lanes * device.sm_count)


def visit_seconds(traffic: Traffic, stage: plans.Stage, rows_a_reader: int) -> dict[str, float]:
    """Seconds that a visit keeps each unit of an SM busy, had it the SM for itself.

    Tensor cores and CUDA cores work on whole tiles. Each warp (or warpgroup) reads the visited
    tiles from shared memory for its own `rows_a_reader` rows of the outer tile, once a product. L2
    serves every SM its share of its bandwidth.
    """
    p, device, tiling = traffic.problem, traffic.device, traffic.tiling
    work = stage_work(p, traffic.algorithm, traffic.direction, stage.name).visit
    sides = tiling.block_q, tiling.block_k
    flops = total_flops(work, *sides, tiling.block_q * tiling.block_k)
    hertz = clock(device)
    lanes = LANES.get(device.compute_capability, 128)
    simple = sum(flops[kind] for kind in ("max", "add", "multiply", "divide"))
    moved = sum(move.tile.nbytes(*sides) for move in stage.visit if move.transfers)
    outer = tiling.block_q if stage.outer == "queries" else tiling.block_k
    visited = [m for m in stage.visit if m.op == "load" and m.tensor in ("Q", "K", "V", "dO")]
    read = sum(_products(work, m.tensor) * m.tile.nbytes(*sides) for m in visited)
    return {
        "tensor cores": flops["matmul"] / (device.peak(p.dtype) / device.sm_count),
        "exponentials": flops["exp"] / (SPECIAL * hertz),
        "CUDA cores": simple / (lanes * hertz),
        "shared memory": read * outer / rows_a_reader / (SHARED_BYTES * hertz),
        "L2": moved / (device.l2_bandwidth / device.sm_count) if device.l2_bandwidth else 0.0,
    }


def _products(work: tuple[TileOp, ...], name: str) -> int:
    """How many matrix products of a visit read a tensor's tile."""
    return sum("matmul" in op.flops and name in op.reads.split() for op in work)


def once_bytes(traffic: Traffic, stage: str) -> int:
    """Bytes of all tensors that a stage touches, each once for reading and once for writing."""
    return sum(
        whole_bytes(traffic.problem, tensor) * (2 if op == "reduce" else 1)
        for name, op, tensor in traffic.transfers
        if name == stage
    )
