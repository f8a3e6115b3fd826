"""`backend="numba"`: fast FlashAttention-2 on the CPU, over the same tiles as the simulator.

The engine runs the forward pass of every `Problem`. The backward pass is "flash2", in three passes,
or "flash2-fused". The engine computes in float32, or in float64 for float64 inputs. Every sum has a
fixed order, so results do not depend on the number of threads.

The option ``micro_kernel`` of `flashsim.run` is "vector" or "plain" (see `micro_kernels`) or, for
bfloat16, "amx" or "avx512_bf16" (see `bf16_dot`). For bfloat16, "amx" or "avx512_bf16" is the
default if it is faster than "vector" on this CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flashsim.algorithms.score_tile import finite, sink_probability
from flashsim.engines.cpu import heuristics, kernels_decode, tables, threads, work_tiles
from flashsim.engines.cpu.functions import panels
from flashsim.engines.cpu.micro_kernels import registers
from flashsim.engines.cpu.micro_kernels.float16 import BFLOAT16, FLOAT16
from flashsim.engines.cpu.micro_kernels.writer import LINE
from flashsim.engines.cpu.notes import stage_trace
from flashsim.engines.cpu.scores import Rules
from flashsim.engines.protocol import Job, Outcome
from flashsim.errors import UnsupportedError
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule import plans
from flashsim.schedule.schedule import Schedule
from flashsim.trace.events import StageTrace

OPTIONS = frozenset({"threads", "micro_kernel"})
ALGORITHMS = ("flash2", "flash2-fused")
#: The kernel that runs each stage.
KERNELS = {
    "forward": "forward",
    "delta": "delta",
    "dq": "grad_queries",
    "dkdv": "grad_keys",
    "fused": "grad_keys",
}
#: Results that a stage checks for NaN and infinity as it writes them, if they have 32 or 64 bits.
#: 16-bit results are checked only by the forward kernel for pairs and the kernel for one query.
LOOKED_AT = {"forward": ("out",), "dq": ("dq",), "dkdv": ("dk", "dv"), "fused": ("dq", "dk", "dv")}
ROUNDING = {"bfloat16": BFLOAT16, "float16": FLOAT16}


def forward(job: Job) -> Outcome:
    """Run the forward pass of a job on the CPU, tile by tile."""
    engine = _CpuPass.of(job, "forward")
    out, lse = engine.forward()
    return engine.outcome({"out": out, "lse": lse}, {"O": out, "L": lse})


def recall(job: Job, out: np.ndarray, lse: np.ndarray) -> Mapping[str, Any]:
    """Return the tensors that the backward pass needs, from the forward pass's out and LSE."""
    return {"O": out, "L": lse}


def backward(
    job: Job, saved: Mapping[str, Any], dout: np.ndarray, dlse: np.ndarray | None = None
) -> Outcome:
    """Run the backward pass in three passes ("flash2"), or fused, which sums dQ in memory."""
    engine = _CpuPass.of(job, "backward")
    p, real = job.problem, job.problem.compute_dtype
    out, dout, q, k, v = engine.operands(saved["O"], dout, job.q, job.k, job.v)
    lse = threads.frozen(finite(saved["L"]))
    delta = np.empty(p.batch * p.heads * p.n_q, real)
    (less,) = engine.wide(np.zeros(0) if dlse is None else dlse)
    engine.run("delta", _as_floats(out), _as_floats(dout), less, delta)
    inputs = tables.BackwardInputs(q, k, v, dout, lse, threads.frozen(delta), *engine.along())

    dk = np.empty((p.batch, p.kv_heads, p.n_kv, p.head_dim), engine.result)
    dv = np.empty((p.batch, p.kv_heads, p.n_kv, p.head_dim_v), engine.result)
    dbias = np.zeros((0,) if job.bias is None else job.bias.shape, real)
    fused = job.algorithm == "flash2-fused"
    width = -(-p.head_dim // engine.cpu.width) * engine.cpu.width if fused else p.head_dim
    dq = _zeros((p.batch, p.heads, p.n_q, width), real if fused else engine.result)
    grads = tables.Grads._make([*(engine.flat(x) for x in (dq, dk, dv, dbias)), width])
    engine.note("clear_dbias")
    for stage in ("fused",) if fused else ("dkdv", "dq"):
        engine.run(stage, inputs, grads)
    engine.note("convert")
    engine.note("convert_dbias")
    arrays = {"dq": dq[..., : p.head_dim], "dk": dk, "dv": dv}
    if job.bias is not None:
        arrays["dbias"] = dbias
    dtype = numpy_dtype(p.dtype)
    with np.errstate(over="ignore"):
        arrays = {name: np.ascontiguousarray(x, dtype) for name, x in arrays.items()}
    arrays |= {f"d:{name}": sums for name, sums in engine.captured.items()}
    if job.sinks is not None:
        rows = (p.batch, p.heads, p.n_q)
        weight = sink_probability(job.sinks[:, None], saved["L"].reshape(rows))
        arrays["dsinks"] = -(weight * delta.reshape(rows)).sum(axis=(0, 2), dtype=real)
    return engine.outcome(arrays)


def constant(job: Job, shape: tuple[int, ...], dtype: str, value: float) -> np.ndarray:
    """Return an array filled with `value`; raise if the engine does not support the job."""
    _check(job)
    return np.full(shape, value, numpy_dtype(dtype))


def _check(job: Job) -> None:
    if job.algorithm not in ALGORITHMS:
        raise UnsupportedError(
            f"backend 'numba' runs {' and '.join(ALGORITHMS)}, not {job.algorithm!r}; use "
            "backend='simulator', which runs every algorithm"
        )


class _Stage(NamedTuple):
    """A stage's schedule, and its numbers of loops (one per head), outer tiles and visits.

    `long` says whether the stage may take so long that Ctrl-C must stop it. `parts` holds the
    stage's tables (`Tiles`) if the next call can reuse them.
    """

    schedule: Schedule
    loops: int
    tiles: int
    visits: int
    long: bool
    parts: tuple[tables.Tiles, ...] = ()


@dataclass
class _CpuPass:
    """A forward or backward pass: the data that its kernels share, and the traces."""

    job: Job
    direction: str
    stages: list[StageTrace] = field(default_factory=list)
    #: Results without NaN or infinity, as checked by the kernels.
    finite: set[str] = field(default_factory=set)
    #: Stages that this pass, or the same pass with other arrays, has run.
    _stages: dict[tuple[str, int], _Stage] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, direction: str) -> _CpuPass:
        """Return the `_CpuPass` of a job; the job's memo caches what does not depend on arrays."""
        cpu = _cpu(job, direction)
        key = direction, job.algorithm, type(cpu), cpu
        known = job.memo.get(key)
        if known is None:
            new = cls(job, direction)
            # All other fields of the problem are in the rules.
            if job.bias is None and not job.problem.has_functions:
                job.memo[key] = known = copy(new)
                known.job = job.given(None, None, None)
            return new
        new = cls.__new__(cls)  # as `copy.copy` does, which takes 0.04 ms after a pause
        new.__dict__.update(known.__dict__)
        new.job, new.stages, new.finite = job, [], set()
        new.threads = heuristics.thread_count(job.options.get("threads"), job.problem)
        return new

    def __post_init__(self) -> None:
        job, p = self.job, self.job.problem
        _check(job)
        self.threads = heuristics.thread_count(job.options.get("threads"), p)
        self.cpu = _cpu(job, self.direction)
        alone = _is_one(p, self.direction)
        self.pairs = bool(registers.BLOCKING[type(self.cpu)].pairs) and not alone
        #: The arrays that a kernel writes: its results, or float32 numbers that are rounded later.
        self.result = numpy_dtype(p.dtype if p.dtype in ROUNDING else p.compute_dtype)
        usual = heuristics.USUAL["decode" if alone else self.direction]
        self.tiling = heuristics.tiling(
            p, job.tiling, job.device, job.algorithm, self.direction, usual
        )
        tile = self.tiling.clip(p)
        sizes = (p.heads, p.kv_heads, p.n_q, p.n_kv, p.head_dim, p.head_dim_v)
        self.shape = tables.Shape(*sizes, tile.block_q, tile.block_k)
        real = np.dtype(p.compute_dtype).type
        bias = np.zeros(0, real) if job.bias is None else job.bias
        batch, heads = p.bias or (1, 1)
        matrix = p.n_q * p.n_kv
        self.rules = Rules(
            scale=real(p.scale),
            softcap=threads.frozen(np.array([p.softcap], real)),
            left=p.left,
            right=p.right,
            banded=p.banded,
            rounding=ROUNDING.get(p.dtype),
            bias=self.wide(bias)[0],
            bias_batch=matrix * heads if batch > 1 else 0,
            bias_head=matrix if heads > 1 else 0,
            **self._functions(),
        )
        self._plan = {s.name: s for s in plans.stages(p, job.algorithm, self.direction)}

    def _functions(self) -> dict[str, Any]:
        """Return the `Rules` fields of functions and sinks, with arrays for captured gradients."""
        job, p = self.job, self.job.problem
        per_head = frozenset() if p.mask_mod is None else p.mask_mod.per_head
        by_batch, by_head = "b" in per_head, "h" in per_head
        heads = p.heads if by_head else 1
        names = () if p.score_mod is None else [a.name for a in p.score_mod.arrays]
        self.captured = {
            name: np.zeros(array.shape, p.compute_dtype)
            for name, array in zip(names, job.score_arrays, strict=True)
            if name in p.score_grads
        }
        self._panels = panels(p, job.score_arrays, self.captured)
        real = np.dtype(p.compute_dtype).type
        sinks = np.zeros(0, real) if job.sinks is None else job.sinks
        return {
            "keep_batch": heads if by_batch else 0,
            "keep_head": int(by_head),
            "keep_slots": heads * (p.batch if by_batch else 1),
            "calls": threads.frozen(self._panels.calls),
            "captured": threads.frozen(self._panels.table),
            "sinks": self.wide(sinks)[0],
        }

    def wide(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Return arrays as flat arrays of the accumulator type, copied only if necessary."""
        real = self.job.problem.compute_dtype
        return [threads.frozen(x.astype(real, copy=False)) for x in arrays]

    def operands(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Return inputs as flat arrays, in the accumulator type unless they have 16 bits."""
        if self.job.problem.dtype not in ROUNDING:
            return self.wide(*arrays)
        return [self.flat(threads.frozen(x.astype(self.result, copy=False))) for x in arrays]

    def flat(self, array: np.ndarray) -> np.ndarray:
        """Return a one-dimensional view of an array, of the element type that kernels read."""
        flat = array.reshape(-1)
        if self.pairs and array.dtype == self.result:
            return flat.view(np.uint16)
        return _as_floats(flat)

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        """Compute out and LSE, with the decode kernel if each head has only one query."""
        job, p = self.job, self.job.problem
        out = np.empty((p.batch, p.heads, p.n_q, p.head_dim_v), self.result)
        lse = np.empty((p.batch, p.heads, p.n_q), p.compute_dtype)
        arrays = *self.operands(job.q, job.k, job.v), self.flat(out), lse.reshape(-1)
        if _is_one(p, "forward"):
            self.run("forward", *arrays, self._parts(), decode=True)
        else:
            self.run("forward", *arrays)
        return out, lse

    def along(self) -> tuple[np.ndarray, np.ndarray]:
        """Return Q and the factor of scores in the layout of the decode kernel (`kernels_decode`).

        With this Q, the backward pass adds up each score in the decode kernel's order. The result's
        Q is empty if the decode kernel did not run the forward pass. Q is also empty for bfloat16
        pairs, where rounding dS costs far more precision than the order of a sum.
        """
        p, real = self.job.problem, self.job.problem.compute_dtype
        mantissa, power = math.frexp(self.rules.scale)
        factor = threads.frozen(np.array([mantissa], real))
        if not _one_query(p) or self.pairs:
            return threads.frozen(np.zeros(0, real)), factor
        rows = np.zeros((p.batch * p.heads, kernels_decode.padded(p.head_dim)), real)
        rows[:, : p.head_dim] = self.job.q.reshape(-1, p.head_dim)
        return threads.frozen(rows * np.dtype(real).type(math.ldexp(1.0, power))), factor

    def _parts(self) -> tuple[np.ndarray, ...]:
        """Allocate the O, m and l that the decode kernel stores for each part of the keys."""
        p, loops = self.job.problem, self.job.problem.batch * self.job.problem.kv_heads
        parts = kernels_decode.parts_of(loops, self._stage("forward", True).visits)
        heads = parts * p.batch * p.heads
        sums, top, total = (np.empty(heads * n, p.compute_dtype) for n in (p.head_dim_v, 1, 1))
        return sums, top, total, np.zeros(loops, np.int64)

    def schedule(self, stage: plans.Stage) -> Schedule:
        """Return the schedule of a stage: its tiles and their order."""
        p, order = self.job.problem, self.job.key_order
        return work_tiles.known(Schedule(p, self.tiling, stage.outer, order, stage.dense))

    def run(self, name: str, *arrays: Any, decode: bool = False) -> None:
        """Run a stage on all threads, and record the stage's trace if the job requests one."""
        p, fused = self.job.problem, name == "fused"
        stage = self._stage(name, decode)
        notes = _NO_NOTES
        if self.job.trace:
            seen = np.zeros((p.batch * p.heads, stage.visits), np.int64)
            notes = tables.Notes(np.zeros((stage.loops, stage.tiles), np.int64), seen)
        turns = work_tiles.first_turns(stage.schedule) if fused else _NO_TURNS
        kernel = "decode" if decode else KERNELS[name]
        odd = p.dtype in ROUNDING and not decode and not (self.pairs and name == "forward")
        parts = stage.parts or self._tables(stage.schedule, name, decode)
        # One thread sums captured arrays' gradients, so that the order is fixed.
        count = 1 if self.captured and name in ("dq", "fused") else self.threads
        for tiles in parts:
            counter = np.zeros(tables.PLACES, np.int64)
            args = [*arrays, self.shape, tiles, self.rules, notes, counter]
            if KERNELS[name] == "grad_keys":
                args += [fused, turns]
            threads.run(kernel, count, self.cpu, *args, counter=counter, long=stage.long)
            odd = odd or bool(counter[tables.ODD])
        if not odd:
            self.finite.update(LOOKED_AT.get(name, ()))
        if self.job.trace:
            members = p.batch * p.heads // stage.loops
            visits = notes.visits.reshape(stage.loops, members, stage.visits)
            self._trace(self._plan[name], stage.schedule, notes.steps, visits)

    def _stage(self, name: str, decode: bool) -> _Stage:
        """Return the stage `name`; if the mask is a band, cache the stage and its tables."""
        key = name, self.threads
        if key in self._stages:
            return self._stages[key]
        stage, p = self._plan[name], self.job.problem
        schedule, by_row = self.schedule(stage), stage.outer == "queries"
        ptr, inner, _ = schedule.row_csr if by_row else schedule.col_csr
        loops = p.batch * (p.heads if by_row else p.kv_heads)
        tile = schedule.tiling.clip(p)
        scores = p.batch * p.heads * len(inner) * tile.block_q * tile.block_k
        long = scores * (p.head_dim + p.head_dim_v) > threads.LONG  # multiply-adds, about
        numbers = _Stage(schedule, loops, len(ptr) - 1, len(inner), long)
        if p.banded:
            parts = tuple(self._tables(schedule, name, decode))
            self._stages[key] = numbers = numbers._replace(parts=parts)
        return numbers

    def _tables(self, schedule: Schedule, name: str, decode: bool) -> Iterable[tables.Tiles]:
        return work_tiles.tiles(schedule, name, self.threads, self.cpu.width, one_query=decode)

    def note(self, name: str) -> None:
        """Record the trace, if requested, of a stage that NumPy computes on entire arrays."""
        if name not in self._plan or not self.job.trace:
            return
        stage = self._plan[name]
        schedule = self.schedule(stage)
        heights = (schedule.rows[:, 1] - schedule.rows[:, 0]).astype(np.int64)
        self._trace(stage, schedule, heights[None], np.zeros((1, 1, 0), np.int64))

    def _trace(self, stage: plans.Stage, schedule: Schedule, *notes: np.ndarray) -> None:
        self.stages.append(stage_trace(stage, schedule, self.job.device, *notes))

    def outcome(self, arrays: dict[str, Any], saved: dict[str, Any] | None = None) -> Outcome:
        """Return the `Outcome` of the pass, with a trace if the job requests one."""
        stages = tuple(self.stages) if self.job.trace else None
        kernel = f"numba {type(self.cpu).__name__.lower()}, {self.threads} threads"
        finite = frozenset(self.finite)
        return Outcome(arrays, self.tiling, stages, kernel, saved or {}, finite=finite)


def _is_one(p: Problem, direction: str) -> bool:
    """Return whether the decode kernel (`kernels_decode`) runs this pass."""
    return direction == "forward" and _one_query(p)


def _one_query(p: Problem) -> bool:
    """Return whether a problem has one query per head and no offsets, functions or sinks."""
    return p.n_q == 1 and not p.cu_seqlens_q and not p.has_functions


def _cpu(job: Job, direction: str) -> registers.Cpu:
    one_query = _is_one(job.problem, direction)
    return heuristics.cpu(job.options.get("micro_kernel"), job.problem, one_query=one_query)


def _as_floats(flat: np.ndarray) -> np.ndarray:
    """Return a float32 view of an array of 16-bit numbers; return other arrays unchanged.

    If the number of elements is odd, the last one lies past the end of the view; kernels can read
    it, since they check no bounds.
    """
    if flat.dtype.itemsize != 2:
        return flat
    return flat[: flat.size // 2 * 2].view(np.float32)


def _zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros aligned to a cache line (`writer.LINE`); NumPy's `zeros` may not be."""
    dtype, n = np.dtype(dtype), math.prod(shape)
    array = np.zeros(n + LINE, dtype)
    skip = -array.ctypes.data % LINE // dtype.itemsize
    return array[skip : skip + n].reshape(shape)


_NO_NOTES = tables.Notes(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64))
_NO_TURNS = np.zeros(0, np.int64)


__all__ = ["OPTIONS", "backward", "constant", "forward", "recall"]
