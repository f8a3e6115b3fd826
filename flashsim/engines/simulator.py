"""`backend="numpy"`: the algorithms of `flashsim.algorithms` on the simulated memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsim.algorithms import PASSES
from flashsim.algorithms.memory import Hbm, Machine
from flashsim.engines.engine import Job, Outcome
from flashsim.errors import UnsupportedError
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule import plans
from flashsim.schedule.tensors import BIAS, COL, ROW, TILE, shape
from flashsim.schedule.tiling import Tiling

OPTIONS: frozenset[str] = frozenset()


def forward(job: Job) -> Outcome:
    """Simulate the forward pass tile by tile."""
    machine = _machine(job, "forward")
    made = _room(job, "forward", machine.hbm)
    _run(PASSES[job.algorithm][0], machine)
    saved = {n: made[n] for n in made if not n.endswith("_acc")}
    return Outcome(
        {"out": saved["O"], "lse": _lse(machine, saved)},
        machine.tiling,
        tuple(machine.stages) if job.trace else None,
        "simulator",
        saved,
    )


def recall(job: Job, out: np.ndarray, lse: np.ndarray) -> Mapping[str, Any]:
    """What the backward pass wants of a forward pass, from its results alone."""
    if job.algorithm == "standard":
        raise UnsupportedError(
            "the backward pass of 'standard' reads the scores and probabilities that its forward "
            "pass saved; use run(...).backward(dout), or an algorithm that recomputes them"
        )
    if job.algorithm == "flash1":  # lse = m + log l, and only their sum is asked for
        return {"O": out, "m": lse, "l": np.ones_like(lse)}
    return {"O": out, "L": lse}


def backward(job: Job, saved: Mapping[str, Any], dout: np.ndarray) -> Outcome:
    """Simulate the backward pass tile by tile."""
    machine = _machine(job, "backward")
    hbm = machine.hbm
    for name, array in saved.items():
        hbm.put(name, array, _dtype(job.problem, name))
    hbm.put("dO", dout)
    made = _room(job, "backward", hbm)
    arrays = {name.lower(): made[name] for name in ("dQ", "dK", "dV", "dBias") if name in made}
    _run(PASSES[job.algorithm][1], machine)
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


def _room(job: Job, direction: str, hbm: Hbm) -> dict[str, np.ndarray]:
    """Make room in HBM for all that a pass writes: the arrays by the papers' names."""
    p, made = job.problem, {}
    for name in plans.tensors_of(p, job.algorithm, direction, "store", "reduce"):
        its, dtype = shape(p, name), _dtype(p, name)
        if its.owner == BIAS:
            made[name] = np.full(job.bias.shape, np.nan, numpy_dtype(dtype))
            hbm.put_shared(name, made[name], dtype)
            continue
        sides = {ROW: (p.n_q, its.elements), COL: (p.n_kv, its.elements), TILE: (p.n_q, p.n_kv)}
        n, width = sides[its.axis]
        made[name] = hbm.new(name, n, None if its.vector else width, dtype, kv=its.axis == COL)
    return made


def _dtype(p: Problem, name: str) -> str:
    return p.dtype if shape(p, name).itemsize == p.itemsize else p.compute_dtype


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
