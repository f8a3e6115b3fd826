"""`backend="simulator"`: runs the algorithms of `flashsim.algorithms` on simulated memory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flashsim.algorithms import PASSES
from flashsim.algorithms.machine import Machine
from flashsim.algorithms.score_tile import log_sum_exp
from flashsim.engines.protocol import Job, Outcome
from flashsim.errors import UnsupportedError
from flashsim.problem.precision import USUAL, round_to
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule import plans
from flashsim.schedule.split import WHOLE, Split
from flashsim.schedule.split_kv import choose
from flashsim.schedule.tensors import BIAS, COL, INPUTS, ROW, TILE, rows_a_scale, shape
from flashsim.schedule.tensors import dtype as dtype_of
from flashsim.schedule.tiling import Tiling

OPTIONS = frozenset(("splits", "pack_gqa", "cache_seqlens", "block_table", "shared_prefix"))
OPTIONS |= {"head_dim_v", "scales", "scale_block", "precision"}


def forward(job: Job) -> Outcome:
    """Simulate the forward pass tile by tile."""
    how = {name: x for name, x in job.options.items() if name in ("splits", "pack_gqa")}
    tiling, split = choose(job.problem, job.tiling, job.device, job.algorithm, **how)
    lengths = job.options.get("cache_seqlens")
    if lengths is not None:
        job = _live(job, lengths, job.problem.shared_prefix)
    machine = _machine(job, "forward", tiling, split)
    arrays_in_hbm = _room(job, machine)
    _run(PASSES[job.algorithm][0], machine)
    saved = {n: arrays_in_hbm[n] for n in arrays_in_hbm if not n.endswith(("_acc", "_part"))}
    if split.pack_gqa:
        saved = {name: _unpacked(x, job.problem) for name, x in saved.items()}
    arrays = {"out": saved["O"], "lse": _lse(machine, saved)}
    if lengths is not None:
        arrays = {name: _by_entry(x, len(lengths)) for name, x in arrays.items()}
    stages = tuple(machine.stages) if job.trace else None
    return Outcome(arrays, machine.tiling, stages, "simulator", saved, split=split)


def recall(job: Job, out: np.ndarray, lse: np.ndarray) -> Mapping[str, Any]:
    """Return the tensors that the backward pass needs, from the results of the forward pass."""
    if job.algorithm == "standard":
        raise UnsupportedError(
            "the backward pass of 'standard' reads the probabilities that its forward pass "
            "saved; use run(...).backward(dout), or an algorithm that recomputes the "
            "probabilities, such as 'flash2'"
        )
    if job.algorithm == "flash1":  # the pass uses only m + log l, so m = lse and l = 1 will do
        return {"O": out, "m": lse, "l": np.ones_like(lse)}
    return {"O": out, "L": lse}


def backward(
    job: Job, saved: Mapping[str, Any], dout: np.ndarray, dlse: np.ndarray | None = None
) -> Outcome:
    """Simulate the backward pass tile by tile."""
    tiling = job.tiling or Tiling.fit(job.problem, job.device, job.algorithm, "backward")
    machine = _machine(job, "backward", tiling)
    hbm = machine.hbm
    for name, array in saved.items():
        hbm.put(name, array, dtype_of(job.problem, name))
    inputs = job.options.get("precision", USUAL).inputs
    dout = dout if inputs is None else round_to(dout, inputs)
    hbm.put("dO", dout, job.problem.result_dtype)
    if dlse is not None:
        hbm.put("dL", dlse, dtype_of(job.problem, "dL"))
    arrays_in_hbm = _room(job, machine)
    names = [name for name in ("dQ", "dK", "dV", "dBias") if name in arrays_in_hbm]
    arrays = {name.lower(): arrays_in_hbm[name] for name in names}
    specs = () if job.problem.score_mod is None else job.problem.score_mod.arrays
    for spec in specs:
        if spec.name in job.problem.score_grads:
            zeros = np.zeros(spec.shape, job.problem.compute_dtype)
            arrays[f"d:{spec.name}"] = hbm.captured_gradients[spec.name] = zeros
    _run(PASSES[job.algorithm][1], machine)
    if job.problem.sinks:
        arrays["dsinks"] = arrays_in_hbm["dSink"].sum(axis=(0, 2))
    stages = tuple(machine.stages) if job.trace else None
    return Outcome(arrays, machine.tiling, stages, "simulator")


def constant(job: Job, shape: tuple[int, ...], dtype: str, value: float) -> np.ndarray:
    """Return an array of the given shape and type, filled with `value`."""
    return np.full(shape, value, numpy_dtype(dtype))


def _machine(job: Job, direction: str, tiling: Tiling, split: Split = WHOLE) -> Machine:
    p, precision = job.problem, job.options.get("precision", USUAL)
    if job.trace and precision != USUAL:
        raise UnsupportedError(
            "trace= cannot be combined with precision=: precision= changes the results, but not "
            "the traced bytes, which follow from the inputs' types; leave out trace= or "
            "precision="
        )
    machine = Machine(
        *(p, tiling, job.device, job.algorithm, direction),
        key_order=job.key_order,
        split=split,
        record=bool(job.trace),
        precision=precision,
        schedules=job.memo.setdefault(direction, {}),
    )
    if precision.inputs is not None:
        q, k, v = (round_to(x, precision.inputs) for x in (job.q, job.k, job.v))
        job = replace(job, q=q, k=k, v=v)
    q = _packed(job.q, p) if split.pack_gqa else job.q
    machine.hbm.put("Q", q)
    caches = {"K": job.k} if p.latent else {"K": job.k, "V": job.v}
    if "block_table" in job.options:
        machine.hbm.put_paged(job.options["block_table"], **caches)
    else:
        for name, array in caches.items():
            machine.hbm.put(name, array)
    if job.bias is not None and split.pack_gqa:
        whole = np.broadcast_to(job.bias, (p.batch, p.heads, p.n_q, p.n_kv))
        machine.hbm.put("bias", _packed(whole, p), p.result_dtype)
    elif job.bias is not None:
        machine.hbm.put_shared("bias", job.bias, p.result_dtype)
    if p.score_mod is not None:
        machine.hbm.put_captured("F", p.score_mod, job.score_arrays, p.compute_dtype)
    if (mask := p.mask_mod) is not None:
        machine.hbm.put_captured("M", mask.graph, mask.arrays, mask.dtype)
    if p.sinks:
        whole = np.broadcast_to(job.sinks[:, None], (p.batch, p.heads, 1))
        machine.hbm.put("sink", whole, p.compute_dtype)
    if p.scales is not None:
        for name, array in zip(INPUTS, job.options["scales"], strict=True):
            heads = p.heads if name == "Q" else p.kv_heads
            whole = np.broadcast_to(
                array.reshape(*array.shape, *(1,) * (3 - array.ndim)),
                (p.batch, heads, array.shape[2] if array.ndim == 3 else 1),
            )
            machine.hbm.put_scale(name, whole, rows_a_scale(p, name))
    return machine


def _live(job: Job, lengths: tuple[int, ...], prefix: int) -> Job:
    """Return the job with all live keys packed one after another, after the shared prefix."""
    q = job.q.swapaxes(0, 1).reshape(1, job.problem.heads, job.problem.n_q, job.q.shape[-1])
    size = job.problem.page_size
    if size is not None:
        rows = job.options["block_table"]
        own = prefix // size
        live = [row[own : -(-n // size)] for row, n in zip(rows, lengths, strict=True)]
        numbers = np.concatenate([rows[0, :own], *live])
        return replace(job, q=q, options={**job.options, "block_table": numbers})
    k, v = (
        np.concatenate([x[0, :, :prefix], *(x[b, :, prefix:n] for b, n in enumerate(lengths))], 1)
        for x in (job.k, job.v)
    )
    return replace(job, q=q, k=k[None], v=v[None])


def _by_entry(x: np.ndarray, batch: int) -> np.ndarray:
    """Reshape an array (1, heads, batch * n_q[, width]) to (batch, heads, n_q[, width])."""
    rest = x.shape[3:]
    return x.reshape(x.shape[1], batch, x.shape[2] // batch, *rest).swapaxes(0, 1)


def _packed(x: np.ndarray, p: Problem) -> np.ndarray:
    """Rearrange (batch, heads, n_q, width) to (batch, kv_heads, n_q * group, width)."""
    groups = x.reshape(p.batch, p.kv_heads, p.group, p.n_q, x.shape[-1])
    return groups.swapaxes(2, 3).reshape(p.batch, p.kv_heads, p.n_q * p.group, x.shape[-1])


def _unpacked(x: np.ndarray, p: Problem) -> np.ndarray:
    """Rearrange (batch, kv_heads, n_q * group[, width]) back to (batch, heads, n_q[, width])."""
    rest = x.shape[3:]
    rows = x.reshape(p.batch, p.kv_heads, p.n_q, p.group, *rest)
    # with one KV head, reshape alone returns a view, whose last axis is not contiguous
    return np.ascontiguousarray(rows.swapaxes(2, 3)).reshape(p.batch, p.heads, p.n_q, *rest)


def _room(job: Job, machine: Machine) -> dict[str, np.ndarray]:
    """Allocate a pass's results in HBM, and return them by their names in the papers."""
    p, hbm, split, parts = job.problem, machine.hbm, machine.split, machine.parts
    arrays: dict[str, np.ndarray] = {}
    for name in plans.tensors_of(p, job.algorithm, machine.direction, "store", "reduce"):
        its, dtype = shape(p, name), dtype_of(p, name)
        if name == "dF":  # one sum per captured array
            continue
        if name == "dSink":
            arrays[name] = np.zeros((p.batch, p.heads, 1), dtype)
            hbm.put(name, arrays[name], dtype)
            continue
        if its.owner == BIAS:
            arrays[name] = np.full(job.bias.shape, np.nan, numpy_dtype(dtype))
            hbm.put_shared(name, arrays[name], dtype)
            continue
        if split != WHOLE or parts > 1:
            owners, rows = (p.kv_heads, p.n_q * p.group) if split.pack_gqa else (p.heads, p.n_q)
            n = rows * parts if name.endswith("_part") else rows
            size = (p.batch, owners, n) if its.vector else (p.batch, owners, n, its.elements)
            arrays[name] = np.full(size, np.nan, numpy_dtype(dtype))
            hbm.put(name, arrays[name], dtype)
            continue
        sides = {ROW: (p.n_q, its.elements), COL: (p.n_kv, its.elements), TILE: (p.n_q, p.n_kv)}
        n, width = sides[its.axis]
        arrays[name] = hbm.new(name, n, None if its.vector else width, dtype, kv=its.axis == COL)
    return arrays


def _run(algorithm, machine: Machine) -> None:
    # exp(-inf) is part of the algorithm, and inputs may be NaN: NumPy must not warn about either.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        algorithm(machine)


def _lse(machine: Machine, saved: Mapping[str, Any]) -> np.ndarray:
    """Return the LSE, one number per row: the stored L, m + log l, or what `note_lse` kept."""
    if "L" in saved:
        return saved["L"]
    p = machine.problem
    if "l" in saved:
        return log_sum_exp(saved["m"], saved["l"])
    shape = (p.batch, p.heads, p.n_q)
    return machine.noted_lse.reshape(shape).astype(p.compute_dtype)
