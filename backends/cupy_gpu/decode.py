"""Run `algorithm="flash-decode"` on a GPU in one or two launches, with reusable memory."""

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import cupy
import numpy as np

from flashsim.backends import failures
from flashsim.backends.cupy_gpu import arrays
from flashsim.backends.cupy_gpu.captured import NOTHING, ReadByFunctions, captured
from flashsim.backends.cupy_gpu.decode_options import check, keys_of, splits_of, table_of
from flashsim.backends.cupy_gpu.launching import (
    Argument,
    Launcher,
    Parameters,
    aside,
    shares_nothing,
)
from flashsim.backends.cupy_gpu.workspace import (
    NO_PARTS,
    Workspace,
    parts_of,
)
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy import decode_kernels, decode_plan
from flashsim.backends.reports import decode_report as traces
from flashsim.engines.protocol import Job, Outcome
from flashsim.errors import UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

#: The leading fields of ``struct DecodeArgs``, which differ from call to call; two integers do too.
_HEAD = struct.Struct(
    "<" + "Qqqq" * len(decode_kernels.TENSORS) + "Q" * len(decode_kernels.POINTERS)
)
#: Where the addresses of q, o, k and v are among the 64-bit fields of `_HEAD`.
_OF_Q, _OF_OUT, _OF_K, _OF_V = range(0, 4 * len(decode_kernels.TENSORS), 4)
_TABLE, _ADDRESS = struct.Struct("<ii"), struct.Struct("<Q")
_CAPACITY = struct.Struct("<i")
_TABLE_AT, _ITEMS_AT, _CAPACITY_AT = (
    int(decode_kernels.RECORD.fields[name][1])  # type: ignore[index]
    for name in ("table_row", "items", "capacity")
)


class _Ready:
    """A compiled decode launch whose table of work tiles is in GPU memory."""

    def __init__(self, made: decode_plan.Decode, device: int) -> None:
        self._items = cupy.asarray(made.items)
        self.items = self._items.data.ptr
        self._args = Argument(decode_kernels.record_dtype(made.problem))
        self._args.values[0] = decode_plan.record(made)
        self._parameters = Parameters(self._args.address)
        self._launch = Launcher(
            *(nvrtc.load(made.kernel, device), made.kernel, made.grid),
            cluster=made.cluster,
            overlap=made.overlaps,
        )
        self._merge: Launcher | None = None
        if made.merge and len(made.merges):
            self._merges = cupy.asarray(made.merges)
            function = nvrtc.load(made.merge, device)
            self._merge = Launcher(function, made.merge, made.merge_grid, overlap=made.overlaps)
        self._lock = Lock()  # there is one buffer, and there may be several threads
        self._sizes = 0, 0, made.problem.n_kv  # in the buffer: row, pages, capacity
        self._addresses = self._args.buffer[: _HEAD.size].cast("Q")
        self._filled: Any = None  # the `_Repeated` whose fields the buffer has

    def __call__(
        self,
        stream: int,
        head: Sequence[int],
        row: int,
        pages: int,
        capacity: int = 0,
        given: ReadByFunctions = NOTHING,
    ) -> None:
        """Launch the decode kernel on `stream`, whose device must be CuPy's current device.

        `head` lists the address and strides of each tensor in `decode_kernels.TENSORS`, and then
        the addresses in `decode_kernels.POINTERS`. `row` is the number of block-table entries per
        sequence, and `pages` is the number of pages in the pool. `capacity` is the number of rows
        per sequence in the cache, for a kernel that reads live lengths at run time.
        """
        with self._lock:
            buffer = self._args.buffer
            self._filled = None
            _HEAD.pack_into(buffer, 0, *head)
            sizes = row, pages, capacity
            if sizes != self._sizes:
                _TABLE.pack_into(buffer, _TABLE_AT, row, pages)
                _CAPACITY.pack_into(buffer, _CAPACITY_AT, capacity)
                self._sizes = sizes
            if given is not NOTHING:
                at = decode_kernels.RECORD.itemsize
                buffer[at : at + len(given.plain)] = given.plain
                if given.sinks:
                    self._args.values["sinks"] = given.sinks
            self._run(stream)

    def again(self, call: "_Repeated", q: int, k: int, v: int, out: int) -> None:
        """Launch the kernel as `call` did first, with tensors at other addresses."""
        with self._lock:
            if self._filled is not call:
                _HEAD.pack_into(self._args.buffer, 0, *call.head)
                _TABLE.pack_into(self._args.buffer, _TABLE_AT, 0, 0)
                _CAPACITY.pack_into(self._args.buffer, _CAPACITY_AT, call.capacity)
                self._sizes = 0, 0, call.capacity
                self._filled = None if self._merge else call
            at = self._addresses
            at[_OF_Q], at[_OF_OUT], at[_OF_K], at[_OF_V] = q, out, k, v
            self._run(call.stream)

    def _run(self, stream: int) -> None:
        self._launch(stream, self._parameters)
        if self._merge:
            _ADDRESS.pack_into(self._args.buffer, _ITEMS_AT, self._merges.data.ptr)
            self._merge(stream, self._parameters)


@lru_cache(maxsize=256)
def _ready(made: decode_plan.Decode, device: int) -> _Ready:
    with aside():
        return _Ready(made, device)


def forward(job: Job, gpu: Gpu, space: arrays.Space) -> Outcome:
    """Run decoding: attention of q over a contiguous or paged (`block_table`) KV cache.

    The job's k and v are the KV cache, in the cache's layout. `job.problem.n_kv` is the capacity of
    the cache per sequence.
    """
    return _forward(job, gpu, space, counts=bool(job.trace))[0]


class Decoder:
    """Decodes torch tensors; the kernel reads the sequence lengths from GPU memory.

    Every call is one launch that does not wait for the GPU, so a CUDA graph can capture it. The
    number of splits is chosen for sequences of `problem.n_kv` keys, but the sequences may be
    shorter or longer.
    """

    def __init__(
        self, space: arrays.Space, problem: Problem, gpu: Gpu, page: int, splits: int | None
    ) -> None:
        self._space, self._page, p = space, page, problem
        self._made = made = decode_plan.dynamic(p, gpu, splits, page)
        with failures.Explaining(), space.active():
            self._ready = _ready(made, space.device)
        width = launch.row_elements(p.head_dim_v)
        self._new_out = space.maker((p.batch, p.heads, p.n_q, width), p.dtype)
        self._new_lse = space.maker((p.batch, p.heads, p.n_q))
        self._strides = p.heads * p.n_q * width, p.n_q * width, width
        self._new_by_token = space.maker((p.batch, p.n_q, p.heads, width), p.dtype)
        self._by_token = p.heads * p.n_q * width, width, p.heads * width
        self._width, self._padded, self._rows = p.head_dim_v, width, p.batch * p.heads * p.n_q
        # Strides of tensors that the kernel reads without a copy, and the same as it takes them.
        self._readable: tuple[Any, Any] = (), ((), (), ())
        # Scratch memory by stream: addresses of partial results and of an LSE that nobody reads.
        self._scratch: dict[int, tuple[tuple[int, int, int], int, Any]] = {}

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        lengths: Any = None,
        table: Any = None,
        starts: Any = None,
        entries: Any = None,
    ) -> tuple[Any, Any]:
        """Return the attention output and the LSE.

        `q` is (batch, heads, n_q, head_dim). `k` and `v` are (entries, kv_heads, n, width), or with
        a `table` (pages, kv_heads, page, width). `lengths`, `starts` and `entries` are contiguous
        int32 arrays of shape (batch,). `lengths`, `starts` and `entries` hold the end and start of
        each sequence's live keys, and the sequence's index in the cache. `table` is an int32 array
        (batch, pages per sequence) with contiguous rows.
        """
        space = self._space
        try:
            with space.on_device():
                lse, stream = self._new_lse(), space.stream()
                parts, _kept = self._partial(stream)
                where = self._new_out(), self._strides, stream, parts, lse.data_ptr()
                return self._decoded(q, k, v, *where, lengths, table, starts, entries), lse
        except Exception as error:
            failures.explain(error)
            raise

    def output(self, q: Any, k: Any, v: Any) -> Any:
        """Return only the attention output of a call in which all keys are live."""
        return self._output(q, k, v, self._new_out, self._strides)

    def by_token(self, q: Any, k: Any, v: Any) -> Any:
        """Return the result of `output` as (batch, n_q, heads, head_dim_v)."""
        return self._output(q, k, v, self._new_by_token, self._by_token)

    def repeated(self, q: Any, k: Any, v: Any) -> Any:
        """Return `by_token` for tensors that differ from these only in their addresses."""
        space, (steps, places) = self._space, self._readable
        stream = space.stream()
        scratch = self._scratch.get(stream)
        if (
            scratch is None  # the first call is part of a CUDA graph
            or steps != (q.stride(), k.stride(), v.stride())  # q, k or v must be copied
            or self._width != self._padded
        ):
            return self.by_token
        of_q, of_k, of_v = places
        parts, lse, owner = scratch
        head = (
            *(0, *of_q, 0, *self._by_token, 0, *of_k, 0, *of_v),
            *(lse, *parts, self._ready.items, *_WHOLE),
        )
        return _Repeated(self, self._ready, self._new_by_token, stream, head, k.shape[2], owner)

    def _output(self, q: Any, k: Any, v: Any, new: Any, strides: tuple[int, int, int]) -> Any:
        space = self._space
        try:
            stream = space.stream()
            scratch = self._scratch.get(stream)
            runtime = cupy.cuda.runtime
            if (
                scratch is None
                or runtime.getDevice() != space.device
                or runtime.streamIsCapturing(stream)
            ):
                with space.on_device():
                    if shares_nothing(stream):
                        lse, (parts, _kept) = self._new_lse(), self._partial(stream)
                        where = stream, parts, lse.data_ptr()
                        return self._decoded(q, k, v, new(), strides, *where)
                    scratch = self._scratch[stream] = self._shared(stream)
                    return self._decoded(q, k, v, new(), strides, stream, *scratch[:2])
            return self._decoded(q, k, v, new(), strides, stream, *scratch[:2])
        except Exception as error:
            failures.explain(error)
            raise

    def _shared(self, stream: int) -> tuple[tuple[int, int, int], int, Any]:
        """Return scratch memory that all calls on a stream share, and its owners.

        CuPy allocates the memory, because torch's memory may be that of a CUDA graph.
        """
        space = self._space
        with space.active():
            lse = space.zeros((self._rows,), "float32")
        parts, owner = self._partial(stream)
        return parts, lse.data.ptr, (lse, owner)

    def _decoded(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        of_out: tuple[int, int, int],
        stream: int,
        parts: tuple[int, int, int],
        lse: int,
        lengths: Any = None,
        table: Any = None,
        starts: Any = None,
        entries: Any = None,
    ) -> Any:
        space, ready, pages, row = self._space, self._ready, 0, 0
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        steps = q.stride(), k.stride(), v.stride()
        readable, (of_q, of_k, of_v) = self._readable
        if steps != readable or (at_q | at_k | at_v) & 15:
            given = q, k, v
            (at_q, *of_q), q = arrays.place(space, q)
            (at_k, *of_k), k = arrays.place(space, k)
            (at_v, *of_v), v = arrays.place(space, v)
            if q is given[0] and k is given[1] and v is given[2]:
                self._readable = steps, (of_q, of_k, of_v)
        capacity, read = k.shape[2], _WHOLE
        if not lengths is table is starts is entries is None:
            at = [0 if x is None else x.data_ptr() for x in (table, lengths, starts, entries)]
            read = *at, *_NOTHING
            if table is not None:
                pages, row = k.shape[0], table.stride(0)
                capacity = table.shape[1] * self._page
        head = (
            *(at_q, *of_q, out.data_ptr(), *of_out, at_k, *of_k, at_v, *of_v),
            *(lse, *parts, ready.items, *read),
        )
        ready(stream, head, row, pages, capacity)
        if self._width != self._padded:
            out = space.result(out, self._width, self._padded)
        return out

    def _partial(self, stream: int) -> tuple[tuple[int, int, int], Any]:
        return parts_of(self._space, self._made, None, stream) if self._made.slots else NO_PARTS

    def at(
        self,
        q: arrays.Place,
        k: arrays.Place,
        v: arrays.Place,
        out: int,
        lse: int,
        keys: int,
        stream: int,
    ) -> None:
        """Decode the arrays at these addresses, with `keys` live keys per sequence.

        The space's device must be the thread's current device.
        """
        parts, _kept = self._partial(stream)
        head = *q, out, *self._strides, *k, *v, lse, *parts, self._ready.items, *_WHOLE
        self._ready(stream, head, 0, 0, keys)


class _Repeated:
    """`Decoder.by_token` for tensors whose strides and number of keys are known."""

    def __init__(
        self,
        decoder: Decoder,
        ready: _Ready,
        new: Any,
        stream: int,
        head: Any,
        capacity: int,
        scratch: Any,
    ) -> None:
        self._by_token, self._space, self._again = decoder.by_token, decoder._space, ready.again
        self._new, self.stream, self.head, self.capacity = new, stream, head, capacity
        self._scratch = scratch  # the memory that `head` points to; the decoder may replace its own

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        space, stream, runtime = self._space, self.stream, cupy.cuda.runtime
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (
            space.stream() != stream
            or (at_q | at_k | at_v) & 15
            or runtime.getDevice() != space.device
            or runtime.streamIsCapturing(stream)
        ):
            return self._by_token(q, k, v)
        try:
            out = self._new()
            self._again(self, at_q, at_k, at_v, out.data_ptr())
        except Exception as error:
            failures.explain(error)
            raise
        return out


def counted(job: Job, gpu: Gpu, space: arrays.Space) -> dict[str, int]:
    """Run decoding once, and return the bytes per tensor that the kernel's threads report.

    The entry "O_part read" is the number of bytes of partial outputs O that the merging threads
    read.
    """
    return _forward(job, gpu, space, counts=True)[1]


def _forward(
    job: Job, gpu: Gpu, space: arrays.Space, *, counts: bool
) -> tuple[Outcome, dict[str, int]]:
    check(job)
    p, options = job.problem, job.options
    table = options.get("block_table")
    page = 0 if table is None else int(job.k.shape[2])
    lengths, prefix = keys_of(job, table, page)
    timed = job.trace == "timeline"
    if timed and (prefix or p.latent):
        raise UnsupportedError(
            "on a GPU, trace='timeline' does not support shared_prefix= or latent attention; "
            "pass trace=True, or leave out trace="
        )
    splits = splits_of(options.get("splits", "auto"))
    made = decode_plan.plan(p, lengths, gpu, splits, page, counts, timed, prefix)
    walk = traces.walk_of(made, lengths, page) if job.trace else None
    with failures.Explaining(), space.on_device():
        with space.active():
            ready = _ready(made, space.device)
            where, row, _held = table_of(table)
        given = options.get("workspace")
        stream = space.stream()
        q, k = space.view(job.q), space.view(job.k)
        v = k if p.latent else space.view(job.v)
        out, lse = (given or Workspace()).results(space, p, q.array)
        parts, _kept = parts_of(space, made, given, stream)
        width = launch.row_elements(p.head_dim_v)
        o = (space.pointer(out), p.heads * p.n_q * width, p.n_q * width, width)
        reports = _reports(made, space, timed=timed) if counts else {}
        head = [*q.place, *o, *k.place, *v.place, space.pointer(lse), *parts, ready.items, where]
        head += _NO_LENGTHS
        head += [reports[n].data.ptr if n in reports else 0 for n in _REPORTS]
        functions = captured(job, space)
        ready(stream, head, row, int(job.k.shape[0]) if page else 0, given=functions)
        stages = spans = None
        if walk is not None:
            found = {name: report.get() for name, report in reports.items()}
            stages = traces.stages(made, walk, found["visit_counts"], found["item_counts"])
            if timed:
                stamps = found["visit_stamps"], found["item_stamps"]
                spans = traces.timeline(made, walk, *stamps, gpu.clock_khz)
        copied = {n: x.copied for n, x in zip("qkv", (q, k, v), strict=True) if x.copied}
        outcome = Outcome(
            {"out": space.result(out, p.head_dim_v, width), "lse": space.result(lse)},
            Tiling(p.n_q, made.block_k),
            stages,
            "decode",
            {"copied": copied, "splits": made.splits},
            spans,
            gpu.name,
            None if walk is None else walk.problem,
            split=made.split,
        )
        return outcome, _totals(reports)


_NO_LENGTHS = (0, 0, 0)  # addresses of lengths, starts, entries
_REPORTS = ("visit_counts", "item_counts", "visit_stamps", "item_stamps")
_NOTHING = (0,) * len(_REPORTS)
_WHOLE = (0, *_NO_LENGTHS, *_NOTHING)  # no table


def _reports(
    made: decode_plan.Decode, space: arrays.Space, *, timed: bool
) -> dict[str, cupy.ndarray]:
    visits = (made.walks, made.n_visits)
    items = (len(made.items) * made.problem.kv_heads, made.row_tiles)
    shapes = [(*visits, decode_plan.SLOTS), (*items, decode_plan.SLOTS)]
    if timed:
        shapes += [(*visits, decode_plan.VISIT_STAMPS), (*items, decode_plan.ITEM_STAMPS)]
    types = ("uint32", "uint32", "uint64", "uint64")
    with space.active():
        return {
            name: space.zeros(shape, dtype)
            for name, shape, dtype in zip(_REPORTS, shapes, types, strict=False)
        }


def _totals(reports: Mapping[str, cupy.ndarray]) -> dict[str, int]:
    names = {"visit_counts": decode_plan.VISIT_SLOTS, "item_counts": decode_plan.ITEM_SLOTS}
    return {
        name: int(total)
        for which in names.keys() & reports.keys()
        for name, total in zip(
            names[which], reports[which].get().sum((0, 1), dtype=np.int64), strict=False
        )
    }
