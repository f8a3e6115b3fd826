"""Predicts the time of standard attention, which writes S and P to memory and reads them again.

The model assumes one kernel of a library for each stage of the algorithm "standard". One hardware
unit bounds each kernel's time. The kernels compute masked scores too. No constant is fitted to
attention. Products reach the fraction of the tensor cores' peak that one large product reaches; all
other kernels reach the fraction of the bandwidth that a copy reaches. If all tensors of a stage fit
in L2, the stage reads them from L2 and leaves its results in L2. A framework's implementation takes
longer, because it has additional kernels for scale, mask and types.
"""

import math

from flashsim.counts.traffic import Traffic
from flashsim.counts.work import stage_work, total_flops
from flashsim.errors import UnsupportedError
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.tensors import COL, TILE, shape
from flashsim.schedule.tiling import Tiling
from flashsim.studies.energy import Use, joules
from flashsim.studies.predict.calibration import HBM_SHARE, LAUNCH, MATRIX_SHARE
from flashsim.studies.predict.prediction import Prediction, StageTime
from flashsim.studies.predict.units import SPECIAL, clock, once_bytes

#: A library's tile of a product, which determines the number of thread blocks.
PRODUCT = Tiling(128, 128)


def predict_standard(problem: Problem, direction: str, device: Device) -> Prediction:
    """Return standard attention's predicted time by stage.

    Packed sequences raise an `UnsupportedError`, because batched matrix products need equal
    lengths.
    """
    if problem.cu_seqlens_q is not None:
        raise UnsupportedError(
            "standard attention's time can be predicted only for sequences of one length, but "
            "these sequences are packed; use batch and n_q instead of cu_seqlens"
        )
    traffic = Traffic(problem, PRODUCT, "standard", direction, device)
    return Prediction(traffic, "library", tuple(_stage(one, traffic) for one in traffic.stages))


def _stage(stage: plans.Stage, traffic: Traffic) -> StageTime:
    p, device = traffic.problem, traffic.device
    heads, scores = p.batch * p.heads, p.n_q * p.n_kv
    work = stage_work(p, "standard", traffic.direction, stage.name)
    flops = total_flops((*work.visit, *work.outer), 0, 0, scores)
    product = heads * flops["matmul"] / (MATRIX_SHARE * device.peak(p.dtype))
    waves = heads * _tiles(stage, p) / device.sm_count
    moved = once_bytes(traffic, stage.name)
    fits = moved <= device.l2_bytes and device.l2_bandwidth > 0
    memory = "L2" if fits else "HBM"
    units = {
        "tensor cores": product,
        "exponentials": heads * flops["exp"] / (SPECIAL * clock(device) * device.sm_count),
        memory: moved / (device.l2_bandwidth if fits else HBM_SHARE * device.hbm_bandwidth),
    }
    # The last wave of blocks takes as long as a full wave.
    rounded = {**units, "tensor cores": product * math.ceil(waves) / waves}
    seconds = max(rounded.values())
    tail = 1 - max(units.values()) / seconds
    use = Use(heads * flops["matmul"], heads * scores * (flops["exp"] > 0), 0.0, moved, 0.0, moved)
    took = LAUNCH + seconds
    return StageTime(stage.name, took, units, waves, tail, use, joules(use, took, device))


def _tiles(stage: plans.Stage, problem: Problem) -> int:
    """Return a matrix product's number of thread blocks per head: one per tile of its result."""
    stored = next(move.tensor for move in stage.moves if move.op == "store")
    its = shape(problem, stored)
    rows = problem.n_kv if its.axis == COL else problem.n_q
    columns = problem.n_kv if its.axis == TILE else its.elements
    return -(-rows // PRODUCT.block_q) * -(-columns // PRODUCT.block_k)
