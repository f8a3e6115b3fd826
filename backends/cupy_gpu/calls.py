"""Prepare a job's kernel launches once, so that each call only fills in its arrays.

A `Plan` holds what repeated calls share: launches, compiled functions, and tables in GPU memory. A
`ReadyPass` is one launch of a plan with its parameter buffer. A call writes the addresses and
strides of its arrays into the parameter buffer, and passes the buffer to the driver.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from threading import Lock
from typing import Any, NamedTuple

import cupy
import numpy as np

from flashsim.backends.cupy_gpu import arrays, tensor_maps
from flashsim.backends.cupy_gpu.captured import NOTHING, ReadByFunctions
from flashsim.backends.cupy_gpu.launching import (
    Argument,
    FixedLaunch,
    Launcher,
    Parameters,
    shares_nothing,
)
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.device_tables import Lowered
from flashsim.backends.launch.functions import tile_of
from flashsim.backends.launch.kernel import Gpu, Kernel
from flashsim.backends.launch.passes import KernelPass
from flashsim.backends.reports import counts, timeline
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.split import Split
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import StageTrace, Structured

Load = Callable[[Kernel, int], Any]

#: The leading fields of ``struct Args``, which differ from call to call: address and strides of
#: every tensor, and the addresses of scratch arrays.
_HEAD = struct.Struct("<" + "Qqqq" * len(launch.TENSORS) + "Q" * len(launch.SCRATCH))
_REPORTS = struct.Struct("<" + "Q" * len(launch.REPORTS))
_REPORTS_AT = _HEAD.size + 8 * len(launch.TABLES)
ABSENT = (0, 0, 0, 0)
NO_GRADIENTS = ABSENT * (len(launch.TENSORS) - 4)
NO_SCRATCH = (0,) * (len(launch.SCRATCH) - 1)  # all except the LSE
DQ_ACC = "dq_acc"


@lru_cache(maxsize=256)
def uploaded(tables: Lowered, device: int) -> list[cupy.ndarray | None]:
    """Return copies of a schedule's `launch.TABLES` in GPU memory, cached per device."""
    found = map(tables.table, launch.TABLES)
    return [None if table is None else cupy.asarray(table) for table in found]


class NewArray(NamedTuple):
    """The shape and element strides of a contiguous (batch, heads, n, width) array."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    width: int

    def at(self, address: int) -> tuple[int, int, int, int]:
        """Return `address` and the strides, in the order of the fields of ``struct Args``."""
        return address, *self.strides


class NewArrays(NamedTuple):
    """The shapes and strides of a call's new arrays, and the number of query rows of all heads."""

    out: NewArray
    lse: tuple[int, int, int]
    dq: NewArray
    dk: NewArray
    dv: NewArray
    rows: int

    @classmethod
    def of(cls, p: Problem) -> NewArrays:
        """Return the shapes and strides of the arrays that each call allocates for this problem."""

        def made(heads: int, n: int, head_dim: int) -> NewArray:
            width = launch.row_elements(head_dim)
            return NewArray(
                (p.batch, heads, n, width), (heads * n * width, n * width, width), width
            )

        return cls(
            made(p.heads, p.n_q, p.head_dim_v),
            (p.batch, p.heads, p.n_q),
            made(p.heads, p.n_q, p.head_dim),
            made(p.kv_heads, p.n_kv, p.head_dim),
            made(p.kv_heads, p.n_kv, p.head_dim_v),
            p.batch * p.heads * p.n_q,
        )


class Call:
    """The arrays of one call, as the addresses and strides that its launches take.

    `head` holds the fields of ``struct Args`` that change from call to call, in the struct's order.
    `head` begins with the address and strides of each tensor in `launch.TENSORS`, or `ABSENT` if
    the call lacks the tensor. The address of each contiguous float32 array in `launch.SCRATCH`
    follows, or 0 if the call lacks the array. The objects in `keeps` must stay alive until the
    launches are in the stream.
    """

    def __init__(
        self,
        space: arrays.Space,
        head: Sequence[int],
        captured: ReadByFunctions = NOTHING,
        *,
        keeps: Any = None,
        stream: int | None = None,
    ) -> None:
        self.space, self.head, self.captured, self._keeps = space, head, captured, keeps
        self.stream = space.stream() if stream is None else stream
        self.packed = _HEAD.pack(*head)


class ReadyPass:
    """A compiled launch with its tables in GPU memory, usable for any call's arrays."""

    def __init__(self, one: KernelPass, device: int, load: Load) -> None:
        self.one = one
        self._tables = uploaded(one.tables, device)
        self._args = Argument(one.kernel.args)
        self._head = self._args.buffer[: _HEAD.size]
        self._pack_constants()
        if "starts" in (one.kernel.args.names or ()):
            self._starts = cupy.asarray(one.tables.starts)
            self._args.values["starts"] = self._starts.data.ptr
        self._counter = ctypes.c_uint64()
        kernel, boxes, (across, down) = one.kernel, one.kernel.boxes, (*one.grid, 1)[:2]
        self._launch = Launcher(
            load(kernel, device), kernel, (across, down), overlap=kernel.overlaps
        )
        self._lock = Lock()  # there is one buffer, and there may be several threads
        self.needs_counter = (
            bool(boxes) and one.kernel.cluster == 1 and one.grid[0] < len(one.items)
        )
        # Counters by stream: a launch leaves its counter at 0 for the next launch in the stream.
        self._counters: dict[int, cupy.ndarray] = {}
        # Launch parameters by the inputs of their tensor maps: allocators return the same addresses
        # repeatedly.
        self._parameters_of = lru_cache(maxsize=64)(self._parameters)
        at = [number for box in boxes for number in _map_of(box)]
        self._made_of = itemgetter(*at) if boxes else lambda head: ()
        self._tiled = bool(boxes) and boxes[-1].tensor == launch.TILE

    def _parameters(
        self,
        made_of: tuple[int, ...],
        args: Argument | None = None,
        counter: ctypes.c_uint64 | None = None,
    ) -> Parameters:
        """Return the kernel parameters of a launch, including its tensor maps.

        `made_of` lists the address and strides of each box's tensor, in the order of the kernel's
        boxes. By default, `args` and `counter` are the buffers that all launches of the pass share.
        """
        p, boxes = self.one.tables.schedule.problem, self.one.kernel.boxes
        args = self._args if args is None else args
        counter = self._counter if counter is None else counter
        values = iter(made_of)

        def made(box: launch.Box) -> np.ndarray:
            address = next(values)
            if box.tensor == launch.TILE:
                tile = tile_of(p)
                assert tile is not None  # otherwise the kernel has no such box
                return tensor_maps.encode_tile(tile, box, address)
            dq = box.tensor == DQ_ACC
            strides = NewArrays.of(p).dq.strides if dq else tuple(islice(values, 3))
            return tensor_maps.encode(p, box, address, strides)

        maps = [made(box) for box in boxes]
        others = [args.address, *([ctypes.addressof(counter)] if boxes else [])]
        keeps = maps, args, counter
        return Parameters(*(one.ctypes.data for one in maps), *others, keeps=keeps)

    def fixed(self, call: Call) -> FixedLaunch:
        """Return a repeatable launch on this call's stream and arrays."""
        args, counter = Argument(self.one.kernel.args), ctypes.c_uint64()
        with self._lock:
            args.buffer[:] = self._args.buffer
        args.buffer[: _HEAD.size] = call.packed
        if self.needs_counter:
            counter.value, _keeps = self._counter_of(call)
        parameters = self._parameters(self._made_of(call.head), args, counter)
        return FixedLaunch(self._launch, call.stream, parameters)

    def _pack_constants(self) -> None:
        one, p = self.one, self.one.tables.schedule.problem
        record = self._args.values
        for name, table in zip(launch.TABLES, self._tables, strict=True):
            record[name] = 0 if table is None else table.data.ptr
        values = {
            **{"walks": one.walks, "tiles": one.tables.tiles, "clump": one.clump},
            "n_visits": one.tables.n_visits,
            **{"first": one.items.start, "stop": one.items.stop},
        }
        for name in (*launch.INTEGERS, "scale", "softcap"):
            record[name] = values[name] if name in values else getattr(p, name)

    def __call__(self, call: Call, report: dict[str, cupy.ndarray]) -> None:
        """Launch the pass on the stream of `call`, whose device must be CuPy's current device."""
        made_of = self._made_of(call.head)
        if self._tiled:
            made_of = *made_of, call.captured.tile
        parameters = self._parameters_of(made_of)
        with self._lock:
            self._head[:] = call.packed
            if self.one.kernel.functions is not None or self.one.kernel.sinks:
                self._pack_captured(call.captured)
            if report:
                addresses = (report[n].data.ptr if n in report else 0 for n in launch.REPORTS)
                _REPORTS.pack_into(self._args.buffer, _REPORTS_AT, *addresses)
            if self.needs_counter:
                self._counter.value, _keeps = self._counter_of(call)
            self._launch(call.stream, parameters)

    def _pack_captured(self, captured: ReadByFunctions) -> None:
        """Write the fields for captured arrays and sinks, which follow ``struct Args``."""
        kernel, at = self.one.kernel, launch.ARGS.itemsize
        if kernel.functions is not None:
            packed = captured.summing if kernel.functions.sums else captured.plain
            self._args.buffer[at : at + len(packed)] = packed
        if kernel.sinks:
            self._args.values["sinks"] = captured.sinks

    def _counter_of(self, call: Call) -> tuple[int, Any]:
        """Return the address of a work counter that is 0, and the object that owns this memory.

        No other launch uses this counter at the same time. The caller must keep a reference to the
        owner until the launch is in the stream, so that the memory is not freed earlier.
        """
        stream = call.stream
        if shares_nothing(stream):
            counter = call.space.empty((1,))
            cupy.cuda.runtime.memsetAsync(call.space.pointer(counter), 0, 4, stream)
            return call.space.pointer(counter), counter
        if stream not in self._counters:
            with call.space.active():
                self._counters[stream] = cupy.zeros(1, np.uint32)
        counter = self._counters[stream]
        return counter.data.ptr, counter


class Repeated:
    """A cache of launches; a key is a call's stream and its arrays' addresses and strides.

    Keys recur because memory allocators often reuse the address of freed memory. When a key occurs
    for the second time, its launches are prepared and cached.
    """

    def __init__(self, launches: Sequence[ReadyPass]) -> None:
        self._launches = launches
        self._counts = any(one.needs_counter for one in launches)
        self._known: dict[tuple[Any, ...], tuple[FixedLaunch, ...] | None] = {}

    def launch(self, key: tuple[Any, ...], stream: int) -> bool:
        """Repeat the launches cached for `key`, or return False if none are cached."""
        found = self._known.get(key)
        if found is None or (self._counts and shares_nothing(stream)):
            return False
        for one in found:
            one()
        return True

    def note(self, key: tuple[Any, ...], call: Call) -> None:
        """Record a call so that `launch` can repeat it; none of its arrays may be a copy."""
        if self._counts and shares_nothing(call.stream):
            return
        if len(self._known) >= _MOST_REPEATED:
            self._known.clear()
        known = key in self._known
        self._known[key] = tuple(one.fixed(call) for one in self._launches) if known else None


_MOST_REPEATED = 256


def _map_of(box: launch.Box) -> range:
    """Return the indices in `Call.head` of the address and strides of the tensor that a box names.

    For dQ's accumulator, the result is only the index of the address, since the strides are fixed.
    For a captured array, the result is empty, since `Call.head` does not hold captured arrays.
    """
    if box.tensor == launch.TILE:
        return range(0)
    if box.tensor == DQ_ACC:
        at = 4 * len(launch.TENSORS) + launch.SCRATCH.index(DQ_ACC)
        return range(at, at + 1)
    at = 4 * launch.TENSORS.index(box.tensor)
    return range(at, at + 4)


def summed_up(sizes: NewArrays, dtype: str, algorithm: str) -> int | None:
    """Return the dQ accumulator's number of elements, or None if the backward needs no delta."""
    if algorithm == "flash2-once":
        return None
    narrow = algorithm in plans.FUSED and dtype != "float32"
    return sizes.rows * sizes.dq.width if narrow else 0


class Plan:
    """All launches of a job's forward pass, or of its backward pass, on one GPU.

    `summed` is the size of a backward's float32 dQ accumulator in elements, or None if the backward
    needs neither the accumulator nor delta. With `ordered`, a backward adds to dQ in a fixed order.
    """

    def __init__(
        self,
        name: str,
        passes: tuple[KernelPass, ...],
        gpu: Gpu,
        device: int,
        load: Load,
        *,
        algorithm: str = "flash2",
        ordered: bool = False,
    ) -> None:
        self.name, self.passes, self.gpu = name, passes, gpu
        p = passes[0].tables.schedule.problem
        schedule = passes[0].tables.schedule
        self.tiling = Tiling.joined({x.stage.name: x.tables.schedule.tiling for x in passes})
        self.split: Split = schedule.split
        self.sizes, self.dtype = NewArrays.of(p), p.dtype
        self.summed = summed_up(self.sizes, p.dtype, algorithm)
        self.ordered = ordered
        #: Flags of dQ's tiles, two per row: who stores first (kernels/hopper/send_dq.cuh).
        self.flags = 2 * self.sizes.rows if algorithm == "flash2-fused-first" else 0
        each = (x for one in passes for x in (*one.before, one))
        self.launches = tuple(ReadyPass(x, device, load) for x in each)

    def gradients(
        self, space: arrays.Space, places: tuple[int, ...], lse: int, dlse: int, like: Any
    ) -> tuple[Call, Any, Any, Any]:
        """Return a backward pass's `Call`, and new arrays dQ, dK and dV for the pass to fill.

        `places` lists the address and strides of q, k, v, out and dout. `lse` and `dlse` are the
        addresses of the LSE and of its gradient, or 0 for a missing gradient. `like` is an array of
        the gradients' type.
        """
        made = self.new_arrays(space, like)
        head = self.head(space, places, lse, dlse, made)
        return Call(space, head, keeps=made), *made[:3]

    def new_arrays(self, space: arrays.Space, like: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Allocate dQ, dK, dV, scratch memory and semaphores; the last two may be None."""
        sizes, summed, scratch, turns = self.sizes, self.summed, None, None
        dq = space.empty(sizes.dq.shape, like)
        dk = space.empty(sizes.dk.shape, like)
        dv = space.empty(sizes.dv.shape, like)
        if summed is not None:
            # One array for dQ's accumulator, then delta, then flags: each allocation costs the host
            # 1 to 2 µs.
            scratch = space.empty((summed + sizes.rows + self.flags,))
        if self.ordered:
            turns = space.counters((sizes.rows, 2))
        return dq, dk, dv, scratch, turns

    def head(
        self,
        space: arrays.Space,
        places: tuple[int, ...],
        lse: int,
        dlse: int,
        made: Sequence[Any],
    ) -> tuple[int, ...]:
        """Return the `Call.head` of a backward pass that writes to `made` (from `new_arrays`)."""
        sizes, summed = self.sizes, self.summed
        dq, dk, dv, scratch, turns = (0 if x is None else space.pointer(x) for x in made)
        if self.flags:
            turns = scratch + 4 * ((summed or 0) + sizes.rows)
        return (
            *(*places, *sizes.dq.at(dq), *sizes.dk.at(dk), *sizes.dv.at(dv)),
            *(lse, scratch + 4 * (summed or 0), scratch if summed else dq, turns, dlse, 0, 0),
        )

    def run(
        self, call: Call, trace: bool | str
    ) -> tuple[tuple[StageTrace, ...] | None, np.ndarray | None]:
        """Launch all kernels; return trace events and the timeline, each None unless requested."""
        if not trace:
            for launch_one in self.launches:
                launch_one(call, {})
            return None, None
        with call.space.active():
            reports = [self._buffers(one, call.space, trace) for one in self.passes]
            for launch_one, report in zip(self.launches, reports, strict=True):
                launch_one(call, report)
            stages = tuple(
                counts.stage_trace(
                    one.stage,
                    one.tables.schedule,
                    report["tile_counts"].get(),
                    report["visit_counts"].get(),
                )
                for one, report in zip(self.passes, reports, strict=True)
            )
            return stages, self._timeline(reports) if trace == "timeline" else None

    def _buffers(
        self, one: KernelPass, space: arrays.Space, trace: bool | str
    ) -> dict[str, cupy.ndarray]:
        visits, tiles = one.visit_records, (one.walks, one.tables.tiles)
        shapes = {
            "visit_counts": (*visits, launch.SLOTS),
            "tile_counts": (*tiles, launch.SLOTS),
        }
        made = {name: space.zeros(shape, "uint32") for name, shape in shapes.items()}
        if trace == "timeline":
            roles = one.kernel.roles
            made["visit_stamps"] = space.zeros((*visits, roles, launch.VISIT_STAMPS), "uint64")
            made["tile_stamps"] = space.zeros((*tiles, roles, launch.TILE_STAMPS), "uint64")
        return made

    def _timeline(self, reports: list[dict[str, cupy.ndarray]]) -> np.ndarray:
        """Return the SM and the time span of each visit, in ns since the first span began."""
        parts = [
            timeline.spans(
                number,
                one.tables.schedule,
                one.tables.by,
                report["tile_stamps"].get(),
                report["visit_stamps"].get(),
                self.gpu.clock_khz,
            )
            for number, (one, report) in enumerate(zip(self.passes, reports, strict=True))
            if one.kernel.shared_bytes  # row-wise passes have no visits
        ]
        spans: Structured = np.concatenate(parts)
        first = spans["start_ns"].min()
        spans["start_ns"] -= first
        spans["end_ns"] -= first
        return spans
