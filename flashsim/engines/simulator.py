"""`backend="numpy"`: the algorithms of `flashsim.algorithms` on the simulated memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsim.algorithms import BACKWARD, FORWARD
from flashsim.algorithms.memory import Machine
from flashsim.engines.engine import Job, Outcome
from flashsim.schedule.tiling import Tiling

OPTIONS: frozenset[str] = frozenset()


def forward(job: Job) -> Outcome:
    """Simulate the forward pass tile by tile."""
    p = job.problem
    machine = _machine(job, "forward")
    hbm = machine.hbm
    out = hbm.new("O", p.n_q, p.head_dim_v, p.dtype)
    saved: dict[str, Any] = {}
    if job.algorithm == "standard":
        saved = {name: hbm.new(name, p.n_q, p.n_kv, p.dtype) for name in ("S", "P")}
    elif job.algorithm == "flash1":
        saved = {name: hbm.new(name, p.n_q, None, p.compute_dtype) for name in ("l", "m")}
        if p.dtype != p.compute_dtype:
            hbm.new("O_acc", p.n_q, p.head_dim_v, p.compute_dtype)
    else:
        saved = {"L": hbm.new("L", p.n_q, None, p.compute_dtype)}
    _run(FORWARD[job.algorithm], machine)
    saved["O"] = out
    return Outcome(
        {"out": out, "lse": _lse(machine, saved)},
        machine.tiling,
        tuple(machine.stages) if job.trace else None,
        "simulator",
        saved,
    )


def backward(job: Job, saved: Mapping[str, Any], dout: np.ndarray) -> Outcome:
    """Simulate the backward pass tile by tile."""
    p = job.problem
    machine = _machine(job, "backward")
    hbm = machine.hbm
    for name, array in saved.items():
        narrow = name in ("O", "S", "P")
        hbm.put(name, array, p.dtype if narrow else p.compute_dtype)
    hbm.put("dO", dout)
    arrays = {
        "dq": hbm.new("dQ", p.n_q, p.head_dim, p.dtype),
        "dk": hbm.new("dK", p.n_kv, p.head_dim, p.dtype, kv=True),
        "dv": hbm.new("dV", p.n_kv, p.head_dim_v, p.dtype, kv=True),
    }
    narrow = p.dtype != p.compute_dtype
    if job.algorithm == "standard":
        for name in ("dP", "dS"):
            hbm.new(name, p.n_q, p.n_kv, p.dtype)
    elif job.algorithm != "flash1":
        hbm.new("delta", p.n_q, None, p.compute_dtype)
    if narrow and machine.has("convert"):
        hbm.new("dQ_acc", p.n_q, p.head_dim, p.compute_dtype)
    if job.bias is not None:
        arrays["dbias"] = np.full_like(job.bias, np.nan)
        hbm.put_shared("dBias", arrays["dbias"], p.dtype)
        if narrow:
            total = np.full(job.bias.shape, np.nan, p.compute_dtype)
            hbm.put_shared("dBias_acc", total, p.compute_dtype)
    _run(BACKWARD[job.algorithm], machine)
    stages = tuple(machine.stages) if job.trace else None
    return Outcome(arrays, machine.tiling, stages, "simulator")


def _machine(job: Job, direction: str) -> Machine:
    p = job.problem
    tiling = job.tiling or Tiling.fit(p, job.device, job.algorithm, direction)
    machine = Machine(
        p,
        tiling,
        job.device,
        job.algorithm,
        direction,
        key_order=job.key_order,
        record=bool(job.trace),
    )
    for name, array in (("Q", job.q), ("K", job.k), ("V", job.v)):
        machine.hbm.put(name, array)
    if job.bias is not None:
        machine.hbm.put_shared("bias", job.bias, p.dtype)
    return machine


def _run(algorithm, machine: Machine) -> None:
    # exp(-inf) and NaN inputs are part of the arithmetic; inputs are checked before.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        algorithm(machine)


def _lse(machine: Machine, saved: Mapping[str, Any]) -> np.ndarray:
    """The LSE of each row: stored by FlashAttention-2, m + log l or noted in the others."""
    if "L" in saved:
        return saved["L"]
    p = machine.problem
    if "l" in saved:
        total = np.where(saved["l"] == 0, 1, saved["l"])
        return saved["m"] + np.log(total)
    shape = (p.batch, p.heads, p.n_q)
    return machine.noted_lse.reshape(shape).astype(p.compute_dtype)
