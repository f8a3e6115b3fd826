"""Launch the teaching kernels on a GPU or, if it is switched on, in Numba's simulator."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import numpy as np
from numba import config, cuda

from flashsim.algorithms.score_tile import sink_probability
from flashsim.backends import failures
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.device_tables import Lowered, check, lower
from flashsim.backends.numba_gpu.teaching import functions
from flashsim.backends.numba_gpu.teaching import kernels as teaching
from flashsim.backends.numba_gpu.teaching.kernels import TeachingShape
from flashsim.backends.numba_gpu.teaching.simulator import atomic_shared_arrays
from flashsim.backends.reports import counts
from flashsim.engines.protocol import Job, Outcome
from flashsim.errors import TilingError, UnsupportedError
from flashsim.problem import checks
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule import plans
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import StageTrace

NAME = "teaching"
#: Shared memory that every NVIDIA GPU gives a block without an opt-in.
SHARED_BYTES = 48 * 1024
_SIDES = (1, 2, 4, 8, 16, 32, 64, 128)


def simulated() -> bool:
    """Return whether Numba runs CUDA kernels in its CPU simulator."""
    return bool(config.ENABLE_CUDASIM)


def shared_bytes(problem: Problem, tiling: Tiling, direction: str) -> int:
    """Return the bytes of shared memory of the pass's largest kernel."""
    q, k, d, dv = tiling.block_q, tiling.block_k, problem.head_dim + 1, problem.head_dim_v + 1
    if direction == "forward":
        return 4 * (q * (d + dv + k + 1) + k * (d + dv))
    return 4 * max(2 * k * (d + dv) + q * (d + dv + k + 1), q * (2 * d + dv) + k * (d + dv))


def choose(problem: Problem, tiling: Tiling | None, direction: str) -> Tiling:
    """Return the requested tiling, or the largest square one that fits, or raise `TilingError`."""
    if tiling is not None:
        tiling.refuse_dq_rows("kernel='teaching'")
        need = shared_bytes(problem, tiling, direction)
        if need <= SHARED_BYTES and max(tiling.block_q, tiling.block_k) <= 1024:
            return tiling
        possible = [
            t
            for t in (Tiling(q, k) for q in _SIDES for k in _SIDES)
            if shared_bytes(problem, t, direction) <= SHARED_BYTES
        ]
        raise TilingError(
            f"a {tiling} tile of the {direction} pass at head_dim={problem.head_dim} needs "
            f"{need:,} B of shared memory, but the teaching kernels allow at most "
            f"{SHARED_BYTES:,} B, and tile sides of at most 1,024; "
            f"choose from {', '.join(str(t) for t in possible) or 'none'}"
        )
    largest = 16 if simulated() else 32  # the simulator starts one OS thread per row
    sides = [x for x in _SIDES if x <= largest]
    for side in reversed(sides):
        square = Tiling(side, side)
        if (
            square.divides(problem.block_mask)
            and shared_bytes(problem, square, direction) <= SHARED_BYTES
        ):
            return square
    raise TilingError(
        f"no tiling of the teaching kernels fits in {SHARED_BYTES:,} B of shared memory at "
        f"head_dim={problem.head_dim}; use a smaller head_dim, or backend='simulator'"
    )


def forward(job: Job) -> Outcome:
    """Run the forward pass with the teaching kernels."""
    p, tiling = job.problem, choose(job.problem, job.tiling, "forward")
    check(p, tiling)
    _check_functions(job)
    device = _Simulator(job) if simulated() else _Gpu.of(job)
    with device.active():
        call = _Call(job, tiling, device, fused=False)
        q, k, v = (device.taken(x) for x in (job.q, job.k, job.v))
        out = device.new((p.batch, p.heads, p.n_q, p.head_dim_v), q.dtype)
        lse = device.new((p.batch, p.heads, p.n_q), np.float32)
        inputs = (q, k, v, out, lse, *call.captured(job), device.taken(_sinks(job)))
        call.walk("row", "forward", teaching.forward_kernel, inputs)
        saved = {"place": device, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        results = {"out": device.given(out, job.q), "lse": device.given(lse, job.q)}
        return Outcome(results, tiling, call.stages(), NAME, saved)


def recall(job: Job, out: Any, lse: Any) -> Mapping[str, Any]:
    """Return the state for the backward pass, from the forward pass's `out` and `lse`."""
    device = _Simulator(job) if simulated() else _Gpu.of(job)
    arrays = {"q": job.q, "k": job.k, "v": job.v, "out": out, "lse": lse}
    for name in ("out", "lse"):
        device.check(name, arrays[name], job.problem.dtype)
    with device.active():
        return {"place": device, **{name: device.taken(x) for name, x in arrays.items()}}


def backward(job: Job, saved: Mapping[str, Any], dout: Any, dlse: Any = None) -> Outcome:
    """Run the backward pass with the teaching kernels."""
    p, tiling = job.problem, choose(job.problem, job.tiling, "backward")
    check(p, tiling)
    _check_functions(job)
    fused = job.algorithm == "flash2-fused"
    device = saved["place"]
    device.check("dout", dout, p.dtype)
    if dlse is not None:
        device.check("dlse", dlse, p.dtype)
    with device.active():
        call = _Call(job, tiling, device, fused=fused)
        q, k, v, out, lse = (saved[name] for name in ("q", "k", "v", "out", "lse"))
        dout = device.taken(dout)
        delta = device.new((p.batch, p.heads, p.n_q), np.float32)
        dq, dk, dv = (device.new(x.shape, x.dtype) for x in (q, k, v))
        acc = device.new(q.shape, np.float32) if fused and q.dtype != np.float32 else dq
        # Without a gradient of the LSE, the array in its place is not read.
        less = device.new((1, 1, 1), np.float32) if dlse is None else device.taken(dlse)
        call.rows("delta", teaching.delta_kernel, (out, dout, delta, acc, less))
        inputs, given = (q, k, v, dout, lse, delta), call.captured(job)
        sums = device.new(given[0].shape, np.float32)  # sums for captured floats, in their order
        given = (*given, sums)
        if fused:
            call.walk("col", "fused", teaching.dkdv_kernel, (*inputs, acc, dk, dv, *given))
            if acc is not dq:
                call.rows("convert", teaching.convert_kernel, (acc, dq))
        else:
            call.walk("col", "dkdv", teaching.dkdv_kernel, (*inputs, dq, dk, dv, *given))
            call.walk("row", "dq", teaching.dq_kernel, (*inputs, dq, *given))
        results = {"dq": dq, "dk": dk, "dv": dv}
        more: dict[str, np.ndarray] = {}
        if p.score_grads:  # otherwise nothing was added, and the call need not wait for the kernels
            more = functions.gradients(call.shape.functions, device.host(sums))
        if p.sinks:
            rows, less = (device.host(x) for x in (lse, delta))
            weight = sink_probability(_sinks(job)[:, None], rows)
            more["dsinks"] = -(weight * less).sum(axis=(0, 2))
        results |= {name: device.taken(x) for name, x in more.items()}
        results = {name: device.given(array, job.q) for name, array in results.items()}
        return Outcome(results, tiling, call.stages(), NAME)


def _check_functions(job: Job) -> None:
    """Raise `UnsupportedError` for functions or sinks that the teaching kernels do not support."""
    p = job.problem
    if not p.has_functions:
        return
    if p.cu_seqlens_q is not None:
        raise UnsupportedError(
            "the teaching kernels cannot run packed sequences (cu_seqlens) with mask_mod, "
            "score_mod or sinks; use backend='simulator' or 'numba'"
        )


def _sinks(job: Job) -> np.ndarray:
    """Return the sinks as float32 (heads,), or a single unused number if there are none."""
    if not job.problem.sinks:
        return np.zeros(1, np.float32)
    return checks.sinks(job.sinks, job.problem.heads).astype(np.float32)


def constant(job: Job, shape: tuple[int, ...], dtype: str, value: float) -> np.ndarray:
    """Return a NumPy array filled with `value`, for the simulator."""
    _Simulator(job)  # or raise if the simulator does not support it
    return np.full(shape, value, numpy_dtype(dtype))


class _Simulator:
    """Handles arrays and launches in Numba's simulator, where all arrays are NumPy arrays."""

    def __init__(self, job: Job) -> None:
        if not isinstance(job.q, np.ndarray):
            raise UnsupportedError(
                "Numba's CUDA simulator runs on NumPy arrays only; convert q, k and v"
            )

    def check(self, name: str, array: Any, dtype: str) -> None:
        """Raise `UnsupportedError` unless `array` is a NumPy array."""
        if not isinstance(array, np.ndarray):
            raise UnsupportedError(
                f"Numba's CUDA simulator runs on NumPy arrays only; convert {name}"
            )

    def active(self) -> AbstractContextManager[Any]:
        """Return a context manager in which kernels run on this device."""
        return atomic_shared_arrays()

    def taken(self, array: Any) -> Any:
        """Return a copy of an array, which the simulator needs because it writes to arguments."""
        return cuda.to_device(array)

    def new(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new NumPy array of zeros."""
        return np.zeros(shape, dtype)

    def given(self, array: Any, like: Any) -> Any:
        """Return a result as an array of the same library as `like`."""
        return array

    def host(self, array: Any) -> np.ndarray:
        """Return an array of reported bytes as a NumPy array."""
        return array

    def launch(self, kernel: Any, grid: tuple[int, int], threads: int, arguments: Any) -> None:
        """Run a kernel in the simulator."""
        _launch(kernel, (grid, threads), arguments)


class _Gpu:
    """Handles arrays and launches on the GPU and stream of a job's arrays."""

    def __init__(self, space: Any) -> None:
        self.space = space

    @classmethod
    def of(cls, job: Job) -> _Gpu:
        """Return the `_Gpu` for the device and stream of a job's arrays, or raise an error."""
        failures.require_cupy("numba_cuda")
        from flashsim.backends.cupy_gpu import arrays
        from flashsim.backends.cupy_gpu import engine as cupy_engine

        cupy_engine.require_gpu()
        return cls(arrays.space_of({"q": job.q, "k": job.k, "v": job.v}, job.problem.dtype))

    def check(self, name: str, array: Any, dtype: str) -> None:
        """Raise an error unless `array` is on this object's GPU and in its library."""
        from flashsim.backends.cupy_gpu import arrays

        arrays.check_space(name, array, dtype, self.space)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context manager in which kernels run on this device."""
        # CuPy and numba-cuda share the device's primary context, but each keeps its own current
        # one.
        with failures.Explaining(), self.space.active(), cuda.gpus[self.space.device]:
            yield

    def taken(self, array: Any) -> Any:
        """Return an array as a CuPy array, which kernels can read. Only NumPy arrays are copied."""
        from flashsim.backends.cupy_gpu import arrays

        return arrays.as_cupy(array)

    def new(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new CuPy array of zeros for a kernel to fill."""
        import cupy

        return cupy.zeros(shape, dtype)

    def given(self, array: Any, like: Any) -> Any:
        """Return a result as an array of the same library as `like`."""
        from flashsim.backends.cupy_gpu import arrays

        return arrays.as_library_of(like, array)

    def host(self, array: Any) -> np.ndarray:
        """Return an array of reported bytes as a NumPy array."""
        return array.get()

    def launch(self, kernel: Any, grid: tuple[int, int], threads: int, arguments: Any) -> None:
        """Run a kernel on the GPU; its first call compiles it and prints a message."""
        compiled, start = len(kernel.overloads), time.perf_counter()
        stream = cuda.external_stream(self.space.stream())
        _launch(kernel, (grid, threads, stream), arguments)
        if len(kernel.overloads) > compiled:
            took = time.perf_counter() - start
            print(
                f"flashsim: compiled {kernel.__name__} (Python, to learn from) in {took:.1f} s; "
                "kept until this process ends",
                file=sys.stderr,
            )


def _launch(kernel: Any, where: tuple[Any, ...], arguments: Any) -> None:
    """Launch a kernel without Numba's warning about low occupancy, which small problems cause."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Grid size")
        kernel[where](*arguments)


class _Call:
    """A forward or backward pass: the kernels' constants, launches and reports."""

    def __init__(self, job: Job, tiling: Tiling, device: Any, *, fused: bool) -> None:
        p = self.problem = job.problem
        self.place = device
        self.tiling, self.key_order = tiling, job.key_order
        self.counting = bool(job.trace)
        self.shape = TeachingShape(
            *(tiling.block_q, tiling.block_k, p.head_dim, p.head_dim_v, p.group),
            softcap=bool(p.softcap),
            itemsize=p.itemsize,
            counts=self.counting,
            fused=fused,
            dlse=p.dlse,
            functions=functions.functions_of(p),
        )
        self.algorithm = "flash2-fused" if fused else "flash2"
        self.reports: list[tuple[plans.Stage, Lowered, Any, Any]] = []

    def captured(self, job: Job) -> tuple[Any, Any]:
        """Return the captured floats and integers as two device arrays."""
        floats, wholes = functions.captured(job, self.shape.functions)
        return self.place.taken(floats), self.place.taken(wholes)

    def walk(self, by: Literal["row", "col"], name: str, kernel: Any, arrays: Any) -> None:
        """Launch a kernel that loops over tile pairs, with one block per outer tile and head."""
        p, tables = self.problem, self._tables(by)
        walks = p.batch * (p.heads if by == "row" else p.kv_heads)
        tile_counts, visit_counts = self._report(name, tables, walks)
        lists = (tables.rows, tables.cols, tables.ptr, tables.index, tables.kind)
        numbers = (int(p.left), int(p.right), np.float32(p.scale), np.float32(p.softcap or 1))
        threads = self.tiling.block_q if by == "row" else self.tiling.block_k
        arguments = (*arrays, *map(self.place.taken, lists), *numbers, tile_counts, visit_counts)
        self.place.launch(kernel(self.shape), (tables.tiles, walks), threads, arguments)

    def rows(self, name: str, kernel: Any, arrays: Any) -> None:
        """Launch a row-wise kernel with one thread block per row tile and head."""
        tables, walks = self._tables("row"), self.problem.batch * self.problem.heads
        tile_counts, _ = self._report(name, tables, walks)
        arguments = (*arrays, self.place.taken(tables.rows), tile_counts)
        self.place.launch(kernel(self.shape), (tables.tiles, walks), self.tiling.block_q, arguments)

    def stages(self) -> tuple[StageTrace, ...] | None:
        """Return the trace events of the launches so far, or None if the job records no trace."""
        if not self.counting:
            return None
        return tuple(
            counts.stage_trace(
                *(stage, tables.schedule, self.place.host(tile), self.place.host(visit)),
            )
            for stage, tables, tile, visit in self.reports
        )

    def _tables(self, by: Literal["row", "col"]) -> Lowered:
        outer: plans.Outer = "queries" if by == "row" else "keys"
        return lower(Schedule(self.problem, self.tiling, outer, self.key_order), by)

    def _report(self, name: str, tables: Lowered, walks: int) -> tuple[Any, Any]:
        heads = self.problem.batch * self.problem.heads
        tile = self.place.new((walks, tables.tiles, launch.SLOTS), np.uint32)
        visit = self.place.new((heads, tables.n_visits, launch.SLOTS), np.uint32)
        direction = "forward" if name == "forward" else "backward"
        stages = plans.stages(self.problem, self.algorithm, direction)
        stage = next(stage for stage in stages if stage.name == name)
        self.reports.append((stage, tables, tile, visit))
        return tile, visit
