"""Computes a lower bound on a pass's time: each kernel takes as long as its busiest unit."""

from __future__ import annotations

from flashsim.counts.traffic import Traffic
from flashsim.counts.work import stage_work, total_flops
from flashsim.errors import OptionError, own_errors
from flashsim.schedule import plans
from flashsim.schedule.tensors import whole_bytes
from flashsim.studies.predict.calibration import HBM_SHARE, LAUNCH
from flashsim.studies.predict.prediction import Prediction, StageTime
from flashsim.studies.predict.units import LANES, SPECIAL, clock


@own_errors
def least(traffic: Traffic) -> Prediction:
    """Return the shortest possible time of a pass, with all units of the GPU working in parallel.

    A stage takes the time of a kernel launch plus the time of its busiest unit: tensor cores,
    exponentials, CUDA cores, L2 (requested bytes) or HBM. Each stage transfers each of its tensors
    from or to HBM once, except tensors that an earlier stage of the pass wrote and that fit in L2.
    Real kernels take longer than this bound; `predict` predicts their times.

    Raises
    ------
    OptionError
        If the algorithm splits keys, or the device has no peak for the dtype.
    """
    if any(stage.parts for stage in traffic.stages):
        raise OptionError(
            f"{traffic.algorithm!r} splits keys, but this lower bound supports only algorithms "
            "that do not; use algorithm='flash2'"
        )
    device, written = traffic.device, set[str]()
    stages = []
    for stage in traffic.stages:
        moved = {(op, t): n for (name, op, t), n in traffic.transfers.items() if name == stage.name}
        hbm = sum(
            whole_bytes(traffic.problem, tensor) * (2 if op == "reduce" else 1)
            for op, tensor in moved
            if not (tensor in written and whole_bytes(traffic.problem, tensor) <= device.l2_bytes)
        )
        written |= {tensor for op, tensor in moved if op != "load"}
        flops = _flops(traffic, stage)
        hertz = clock(device) * device.sm_count
        simple = sum(flops[kind] for kind in ("max", "add", "multiply", "divide"))
        units = {
            "tensor cores": flops["matmul"] / device.peak(traffic.problem.dtype),
            "exponentials": flops["exp"] / (SPECIAL * hertz),
            "CUDA cores": simple / (LANES.get(device.compute_capability, 128) * hertz),
            "HBM": hbm / (device.hbm_bandwidth * HBM_SHARE),
        }
        if device.l2_bandwidth:
            units["L2"] = sum(moved.values()) / device.l2_bandwidth
        stages.append(StageTime(stage.name, LAUNCH + max(units.values()), units, 1.0, 0.0))
    return Prediction(traffic, "ideal", tuple(stages))


def _flops(traffic: Traffic, stage: plans.Stage) -> dict[str, int]:
    """Return one stage's (kernel's) FLOPs over all heads, by kind of operation."""
    p, sums = traffic.problem, traffic.schedule(stage).sums
    work = stage_work(p, traffic.algorithm, traffic.direction, stage.name)
    walks, _ = plans.heads_of(stage, p)
    members = p.group if stage.per == "group" else 1
    step = (0, p.n_kv, 0) if stage.outer == "keys" else (p.n_q, 0, sums.area * stage.whole_rows)
    visits = total_flops(work.visit, sums.col_rows, sums.row_cols, sums.area)
    outer = total_flops(work.outer, *step)
    return {kind: (visits[kind] * members + outer[kind]) * walks for kind in visits}
