"""`backend="numba"`: FlashAttention-2 on the CPU as fast as it goes, walking the same tiles.

Forward and both forms of the backward pass for everything a `Problem` can say. The arithmetic runs
in the accumulator's type; numbers of 16 bits are read and written as they lie in memory, a tile at
a time, and memory stays linear in the sequence. Every sum has one order, so results do not depend
on the number of threads.

Options of `run`: ``threads`` (default: the CPUs this process may use) and ``micro_kernel``:
"vector" or "plain" (see `micro_kernels`; default: "vector" where the CPU's registers are known) or,
for bfloat16, "amx" or "avx512_bf16" (see `pairs`; the default where they can run and pay, which is
not with one query a head).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from flashsim.engines.cpu import threads, walks_decode
from flashsim.engines.cpu.micro_kernels import registers
from flashsim.engines.cpu.micro_kernels.halves import BFLOAT16, FLOAT16, NO_ROUNDING
from flashsim.engines.cpu.notes import stage_trace
from flashsim.engines.cpu.primitives.packing import LINE
from flashsim.engines.cpu.scores import Rules
from flashsim.engines.cpu.tables import NOTE, Grads, Notes, Shape, Tiles, WalkInputs
from flashsim.engines.engine import Job, Outcome
from flashsim.errors import BackendUnavailable, OptionError, UnsupportedError, shown
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule import plans
from flashsim.schedule.schedule import MASKED, Schedule
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import StageTrace

OPTIONS = frozenset({"threads", "micro_kernel"})
ALGORITHMS = ("flash2", "flash2-fused")
#: Which walk carries out a stage.
WALKS = {
    "forward": "forward",
    "delta": "delta",
    "dq": "grad_queries",
    "dkdv": "grad_keys",
    "fused": "grad_keys",
}
MICRO_KERNELS = ("vector", "plain", *registers.PAIRED)

#: Tiles that suit a CPU's caches (docs/notebooks/cpu.md): where no tiling is asked for, the first
#: that fits the device.
USUAL = {
    "forward": (Tiling(128, 64), Tiling(64, 64)),
    "backward": (Tiling(64, 64), Tiling(48, 64)),
    "decode": (Tiling(1, 128), Tiling(1, 64)),
}

#: Bytes of its outer tiles that a thread keeps in its second-level cache, so that the inner ones,
#: which come from further away, are fetched once for all of these; and the least number of items
#: for a thread.
TOGETHER, ITEMS = 400 << 10, 4

#: Mask bits (bytes) that are evaluated ahead of a walk: bounds the memory of arbitrary masks.
MASK_CHUNK = 1 << 25

ROUNDING = {"bfloat16": BFLOAT16, "float16": FLOAT16}


def forward(job: Job) -> Outcome:
    """The forward pass."""
    engine = _CpuPass(job, "forward")
    p = job.problem
    out, lse = (engine.decode if engine.alone else engine.forward)()
    with np.errstate(over="ignore"):  # `run` warns, with what was given in sight
        out = out.astype(numpy_dtype(p.dtype), copy=False)
    return engine.outcome({"out": out, "lse": lse}, {"O": out, "L": lse})


def recall(job: Job, out: np.ndarray, lse: np.ndarray) -> Mapping[str, Any]:
    """What the backward pass wants of a forward pass, from its results alone."""
    return {"O": out, "L": lse}


def backward(job: Job, saved: Mapping[str, Any], dout: np.ndarray) -> Outcome:
    """The backward pass: in three passes ("flash2"), or fused, with dQ summed up in memory."""
    engine = _CpuPass(job, "backward")
    p, real = job.problem, job.problem.compute_dtype
    out, dout, q, k, v = engine.operands(saved["O"], dout, job.q, job.k, job.v)
    lse = threads.frozen(np.where(np.isneginf(saved["L"]), 0, saved["L"]))
    delta = np.empty(p.batch * p.heads * p.n_q, real)
    engine.walk("delta", _as_floats(out), _as_floats(dout), delta)
    inputs = WalkInputs(q, k, v, dout, lse, threads.frozen(delta))

    dk = np.empty((p.batch, p.kv_heads, p.n_kv, p.head_dim), engine.result)
    dv = np.empty((p.batch, p.kv_heads, p.n_kv, p.head_dim_v), engine.result)
    dbias = np.zeros((0,) if job.bias is None else job.bias.shape, real)
    fused = job.algorithm == "flash2-fused"
    width = -(-p.head_dim // engine.cpu.width) * engine.cpu.width if fused else p.head_dim
    dq = _zeros((p.batch, p.heads, p.n_q, width), real if fused else engine.result)
    grads = Grads._make([*(engine.flat(x) for x in (dq, dk, dv, dbias)), width])
    engine.note("clear_dbias")
    for stage in ("fused",) if fused else ("dkdv", "dq"):
        engine.walk(stage, inputs, grads)
    engine.note("convert")
    engine.note("convert_dbias")
    arrays = {"dq": dq[..., : p.head_dim], "dk": dk, "dv": dv}
    if job.bias is not None:
        arrays["dbias"] = dbias
    dtype = numpy_dtype(p.dtype)
    with np.errstate(over="ignore"):
        arrays = {name: np.ascontiguousarray(x, dtype) for name, x in arrays.items()}
    return engine.outcome(arrays)


@dataclass
class _CpuPass:
    """One pass in one direction: what its walks share, and the stages they leave behind."""

    job: Job
    direction: str
    stages: list[StageTrace] = field(default_factory=list)

    def __post_init__(self) -> None:
        job, p = self.job, self.job.problem
        if job.algorithm not in ALGORITHMS:
            raise UnsupportedError(
                f"backend 'numba' runs {' and '.join(ALGORITHMS)}, not {job.algorithm!r}; "
                "backend='numpy' simulates every algorithm"
            )
        self.threads = _threads(job.options.get("threads"))
        one = self.direction == "forward" and p.n_q == 1 and not p.cu_seqlens_q
        self.cpu = _cpu(job.options.get("micro_kernel"), p, one=one)
        self.pairs = bool(registers.BLOCKING[type(self.cpu)].pairs)
        #: What a walk writes: its results, or numbers to be rounded.
        self.result = numpy_dtype(p.dtype if p.dtype in ROUNDING else p.compute_dtype)
        #: Whether this is a forward pass of one query a head, which has a walk of its own.
        self.alone = one and not self.pairs
        usual = USUAL["decode" if self.alone else self.direction]
        self.tiling = _tiling(p, job.tiling, job.device, job.algorithm, self.direction, usual)
        tile = self.tiling.clip(p)
        sizes = (p.heads, p.kv_heads, p.n_q, p.n_kv, p.head_dim, p.head_dim_v)
        self.shape = Shape(*sizes, tile.block_q, tile.block_k)
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
            rounding=ROUNDING.get(p.dtype, NO_ROUNDING),
            bias=self.wide(bias)[0],
            bias_batch=matrix * heads if batch > 1 else 0,
            bias_head=matrix if heads > 1 else 0,
        )
        self._plan = {s.name: s for s in plans.stages(p, job.algorithm, self.direction)}

    def wide(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Flat, contiguous and in the accumulator's type; a view where possible."""
        real = self.job.problem.compute_dtype
        return [threads.frozen(x.astype(real, copy=False)) for x in arrays]

    def operands(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """What a walk reads: as `wide`, or numbers of 16 bits as they lie in memory."""
        if self.job.problem.dtype not in ROUNDING:
            return self.wide(*arrays)
        return [self.flat(threads.frozen(x.astype(self.result, copy=False))) for x in arrays]

    def flat(self, array: np.ndarray) -> np.ndarray:
        """What a walk takes for an array: its numbers; or, where they have 16 bits and are
        operands of pairs, their bits, otherwise the floats in their place.
        """
        flat = array.reshape(-1)
        if self.pairs and array.dtype == self.result:
            return flat.view(np.uint16)
        return _as_floats(flat)

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        """Output and LSE as a walk writes them."""
        job, p = self.job, self.job.problem
        out = np.empty((p.batch, p.heads, p.n_q, p.head_dim_v), self.result)
        lse = np.empty((p.batch, p.heads, p.n_q), p.compute_dtype)
        operands = self.operands(job.q, job.k, job.v)
        self.walk("forward", *operands, self.flat(out), lse.reshape(-1))
        return out, lse

    def decode(self) -> tuple[np.ndarray, np.ndarray]:
        """The same of one query a head: `walks_decode`."""
        job, p = self.job, self.job.problem
        narrow = _cpu(job.options.get("micro_kernel"), p, one=True, narrow=True)
        visits = len(self.schedule(self._plan["forward"]).row_csr[1])
        heads, parts = p.batch * p.heads, walks_decode.parts_of(p.batch * p.kv_heads, visits)
        out = np.empty((parts, heads, p.head_dim_v), p.compute_dtype)
        m, l = np.empty((2, parts, heads), p.compute_dtype)
        sums = out.reshape(-1), m.reshape(-1), l.reshape(-1)
        self.walk("forward", narrow, *self.operands(job.q, job.k, job.v), *sums, decode=True)
        out, lse = walks_decode.merged(out, m, l)
        return out.reshape(p.batch, p.heads, 1, -1), lse.reshape(p.batch, p.heads, 1)

    def schedule(self, stage: plans.Stage) -> Schedule:
        """A stage's walk."""
        p, order = self.job.problem, self.job.key_order
        schedule = Schedule(p, self.tiling, stage.outer, order, stage.dense)
        return _known(schedule) if p.banded else schedule

    def walk(self, name: str, *arrays: Any, decode: bool = False) -> None:
        """Run a stage on all threads, and keep its trace if one is asked for."""
        stage = self._plan[name]
        schedule = self.schedule(stage)
        by_row = stage.outer == "queries"
        own, other = (schedule.rows, schedule.cols) if by_row else (schedule.cols, schedule.rows)
        csr = schedule.row_csr if by_row else schedule.col_csr
        p = self.job.problem
        walks = p.batch * (p.heads if by_row else p.kv_heads)
        notes = _no_notes()
        if self.job.trace:
            visits = np.zeros((p.batch * p.heads, len(csr[1])), np.int64)
            notes = Notes(np.zeros((walks, len(own)), np.int64), visits)
        fused = name == "fused"
        turn = _turns(schedule, csr) if fused else _NOTHING
        turns = np.zeros(p.batch * p.heads * schedule.t_r if fused else 0, np.int64)
        set_ptr, sets = self._sets(by_row, shares=name in ("dq", "fused"))
        if decode:  # the heads of one key head
            set_ptr = np.arange(p.batch * p.kv_heads + 1) * (p.heads // p.kv_heads)
        runs = _runs(schedule, csr, fused, self._together(name, len(own) * (len(set_ptr) - 1)))
        descending = schedule.key_order == "descending"
        for part, keep_at, keep in self._masks(schedule, csr, runs, by_row):
            tables = (own, other, *csr, keep_at, keep, turn, part, set_ptr, sets)
            tiles = Tiles._make([*(_table(x) for x in tables), descending])
            counter = np.zeros(2, np.int64)  # the next item, and whether to stop
            args = [*arrays, self.shape, tiles, self.rules, notes, counter]
            if WALKS[name] == "grad_keys":
                args += [fused, turns]
            long = self._work(schedule, len(csr[1])) > threads.LONG
            walk = "decode" if decode else "pairs_" * self.pairs + WALKS[name]
            threads.run(walk, self.threads, self.cpu, *args, counter=counter, long=long)
        if self.job.trace:
            shape = walks, p.batch * p.heads // walks, len(csr[1])
            self._trace(stage, schedule, notes.steps, notes.visits.reshape(shape))

    def _work(self, schedule: Schedule, visits: int) -> int:
        """About how many multiply-adds a walk of all heads takes."""
        p, tile = self.job.problem, schedule.tiling.clip(self.job.problem)
        scores = visits * tile.block_q * tile.block_k
        return p.batch * p.heads * scores * (p.head_dim + p.head_dim_v)

    def _together(self, name: str, n: int) -> int:
        """How many of n outer tiles a thread walks at a time; results do not depend on it."""
        d, dv, block_q, block_k = self.shape[-4:]
        elements = {
            "forward": (d + dv) * block_q,  # Q, O
            "dkdv": 2 * (d + dv) * block_k,  # K, V, dK, dV
            "fused": (3 * d + 2 * dv) * block_k,  # K once more, by row
        }
        if name not in elements:
            return 1
        fit = TOGETHER // (elements[name] * np.dtype(self.job.problem.compute_dtype).itemsize)
        return max(1, min(fit, n // (ITEMS * self.threads)))

    def note(self, name: str) -> None:
        """The trace of a stage that NumPy carries out on whole arrays, if there is such a stage."""
        if name not in self._plan or not self.job.trace:
            return
        stage = self._plan[name]
        schedule = self.schedule(stage)
        heights = (schedule.rows[:, 1] - schedule.rows[:, 0]).astype(np.int64)
        self._trace(stage, schedule, heights[None], np.zeros((1, 1, 0), np.int64))

    def _trace(self, stage, schedule, steps, visits) -> None:
        job = self.job
        self.stages.append(stage_trace(stage, schedule, job.device, steps, visits))

    def _sets(self, by_row: bool, *, shares: bool) -> tuple[np.ndarray, np.ndarray]:
        """CSR of the heads that one thread takes in turn: those that add to one bias gradient."""
        p = self.job.problem
        heads = p.heads if by_row else p.kv_heads
        numbers = np.arange(p.batch * heads).reshape(p.batch, heads)
        batch, matrices = p.bias if shares and p.bias is not None else (p.batch, p.heads)
        if matrices == 1:
            numbers = numbers.reshape(batch, -1)
        elif batch == 1:  # the matrix of a head serves every batch entry
            numbers = numbers.T
        else:
            numbers = numbers.reshape(-1, 1)
        return np.arange(len(numbers) + 1) * numbers.shape[1], numbers.reshape(-1)

    def _masks(
        self, schedule: Schedule, csr, runs: np.ndarray, by_row: bool
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Runs in parts, each with the mask bits that its MASKED visits need."""
        ptr, inner, kind = csr
        keep_at = np.full(len(inner), -1, np.int64)
        if self.job.problem.banded:
            yield runs, keep_at, np.zeros(0, np.uint8)
            return
        begin, size = 0, 0
        bits: list[np.ndarray] = []
        owner = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
        for place, (first, last) in enumerate(runs.tolist()):
            for at in range(ptr[first], ptr[last]):
                if kind[at] != MASKED:
                    continue
                i, j = (owner[at], inner[at]) if by_row else (inner[at], owner[at])
                kept = schedule.keep(int(i), int(j))
                if kept is not None:
                    keep_at[at] = size
                    bits.append(kept.reshape(-1).view(np.uint8))
                    size += kept.size
            if size > MASK_CHUNK or place == len(runs) - 1:
                yield runs[begin : place + 1], keep_at, np.concatenate([*bits, _NO_BITS])
                begin, size, bits = place + 1, 0, []

    def outcome(self, arrays: dict[str, Any], saved: dict[str, Any] | None = None) -> Outcome:
        """What the engine hands back."""
        stages = tuple(self.stages) if self.job.trace else None
        kernel = f"numba {type(self.cpu).__name__.lower()}, {self.threads} threads"
        return Outcome(arrays, self.tiling, stages, kernel, saved or {})


@lru_cache(maxsize=64)
def _tiling(
    problem: Problem,
    given: Tiling | None,
    device: Device,
    algorithm: str,
    direction: str,
    suits: tuple[Tiling, ...],
) -> Tiling:
    """The tiling asked for, which must fit the device, or one that `suits` a CPU."""
    if given is not None:
        given.check(problem, device, algorithm, direction)
        return given
    for usual in suits:
        if usual.footprint(problem, algorithm, direction) <= device.sram_bytes:
            return usual
    return Tiling.fit(problem, device, algorithm, direction)


@lru_cache(maxsize=8)
def _known(schedule: Schedule) -> Schedule:
    """A schedule whose tables are there already, if it was walked lately.

    Only for problems whose fields say everything: what a mask function returns may change.
    """
    return schedule


def _as_floats(flat: np.ndarray) -> np.ndarray:
    """The floats that lie in the place of 16-bit numbers (see `halves`), or what was given.

    The last of an odd number lies beyond the end that a walk is told, which it does not ask for.
    """
    if flat.dtype.itemsize != 2:
        return flat
    return flat[: flat.size // 2 * 2].view(np.float32)


def _zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that begin with a cache line (`packing.LINE`); NumPy's may lie across two."""
    dtype, n = np.dtype(dtype), math.prod(shape)
    array = np.zeros(n + LINE, dtype)
    skip = -array.ctypes.data % LINE // dtype.itemsize
    return array[skip : skip + n].reshape(shape)


_NOTHING = np.zeros(0, np.int32)
_NO_BITS = np.zeros(0, np.uint8)


def _no_notes() -> Notes:
    return Notes(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64))


def _table(array: np.ndarray) -> np.ndarray:
    """A read-only view of a table, whatever it was before: one type, one compilation."""
    view = np.ascontiguousarray(array).view()
    view.setflags(write=False)
    return view


def _runs(schedule: Schedule, csr, fused: bool, together: int) -> np.ndarray:
    """Even runs of up to `together` outer tiles: longest first; fused, in the order of turns."""
    tiles = len(csr[0]) - 1
    edges = np.linspace(0, tiles, -(-tiles // together) + 1).astype(np.int64)
    runs = np.stack([edges[:-1], edges[1:]], axis=1)
    if fused:
        return runs[::-1] if schedule.key_order == "descending" else runs
    return runs[np.argsort(-np.diff(csr[0][edges]), kind="stable")]


def _turns(schedule: Schedule, csr) -> np.ndarray:
    """How many visits of the same row tile precede each visit, columns in the outer order."""
    row = csr[1]
    order = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=schedule.t_r)
    turn = np.empty(len(row), np.int32)
    turn[order] = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    if schedule.key_order == "descending":
        np.subtract(counts[row] - 1, turn, out=turn, casting="same_kind")  # one type: one walk
    return turn


def _threads(given: Any) -> int:
    if given is None:
        return threads.available()
    if not checks.is_int(given) or given < 1:
        raise OptionError(f"threads must be a positive integer, got {shown(given)}")
    if given > threads.most():
        raise OptionError(
            f"threads must be at most {threads.most()}, got {given}: this process may use "
            f"{threads.available()} CPUs, and more threads than CPUs gain nothing"
        )
    return int(given)


def _cpu(
    micro_kernel: Any, problem: Problem, *, one: bool = False, narrow: bool = False
) -> registers.Cpu:
    """What carries out a pass; of `one` query a head no product in pairs unless it is asked for:
    memory is what limits it, and `walks_decode` reads memory faster (docs/notebooks/cpu.md).
    """
    if micro_kernel is not None:
        checks.one_of("micro_kernel", micro_kernel, MICRO_KERNELS)
    if micro_kernel in registers.PAIRED:
        return _paired(micro_kernel, problem.dtype)
    if micro_kernel is None and problem.dtype == "bfloat16" and not one:
        for name in registers.PAIRED:
            if registers.pays(name) and registers.without(name) is None:
                return registers.paired(name)
    cpu = registers.best(problem.compute_dtype, plain=micro_kernel == "plain", narrow=narrow)
    if micro_kernel == "vector" and isinstance(cpu, registers.Plain):
        raise BackendUnavailable(
            "micro_kernel='vector' needs a CPU with AVX2 and FMA, AVX-512 or NEON; "
            "micro_kernel='plain' runs on any"
        )
    return cpu


def _paired(micro_kernel: str, dtype: str) -> registers.Cpu:
    if dtype != "bfloat16":
        raise OptionError(
            f"micro_kernel={micro_kernel!r} multiplies bfloat16, and the inputs are {dtype}: "
            "convert them, or leave micro_kernel out"
        )
    missing = registers.without(micro_kernel)
    if missing is not None:
        raise BackendUnavailable(
            f"micro_kernel={micro_kernel!r} cannot run here: {missing}; leave micro_kernel out for "
            "what this CPU does best"
        )
    return registers.paired(micro_kernel)


__all__ = ["NOTE", "OPTIONS", "backward", "forward", "recall"]
