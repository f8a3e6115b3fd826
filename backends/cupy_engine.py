"""`backend="cupy"`: FlashAttention-2 on a real NVIDIA GPU, in CUDA C++ compiled by NVRTC.

The kernels walk the tiles that `Schedule` lists and, if asked, report what they moved and when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import numpy as np

from flashsim.backends import counts, hopper, launch, lowering, portable, tensor_maps, timeline
from flashsim.backends.launch import Gpu, Kernel
from flashsim.backends.lowering import Lowered
from flashsim.backends.passes import Pass
from flashsim.engine import Job, Outcome
from flashsim.errors import BackendUnavailable, OptionError, UnsupportedError, choices
from flashsim.events import StageTrace

OPTIONS: frozenset[str] = frozenset({"kernel"})
#: Kernel families by name; each offers `NAME`, `forward_passes`, `backward_passes`, `load`.
KERNELS = {"portable": portable, "hopper": hopper}
OLDEST = (8, 0)
#: What a family's `load` is, and what picks a family: ``(job, gpu, direction)``.
Load = Callable[[Kernel, int], Any]
FamilyOf = Callable[[Job, Gpu, str], Any]

try:
    import cupy
except ImportError as error:
    raise BackendUnavailable(
        f"backend='cupy' needs CuPy, which cannot be imported ({error}); install it for your "
        "driver's CUDA: pip install 'flashsim[cuda13]' or 'flashsim[cuda12]'"
    ) from None

from flashsim.backends import arrays  # noqa: E402  (it imports CuPy)


def forward(job: Job) -> Outcome:
    """Run the forward pass on the GPU that holds the arrays (NumPy arrays: on the current one)."""
    _check(job)
    _check_kernel(job)
    return forward_with(_family, job)


def backward(job: Job, saved: Mapping[str, Any], dout: Any) -> Outcome:
    """Run the backward pass: three deterministic passes, or fused with reductions into dQ."""
    return backward_with(_family, job, saved, dout)


def forward_with(family_of: FamilyOf, job: Job) -> Outcome:
    """The forward pass by the kernels that `family_of` picks, for a job that it takes."""
    p = job.problem
    require_gpu()
    space = arrays.space_of({"q": job.q, "k": job.k, "v": job.v}, p.dtype)
    with _errors(job), space.active():
        gpu = gpu_of(space.device)
        family = family_of(job, gpu, "forward")
        passes = family.forward_passes(p, job.tiling, gpu, job.key_order, _report(job))
        views = {"q": space.view(job.q), "k": space.view(job.k), "v": space.view(job.v)}
        width = launch.row_elements(p.head_dim_v)
        out = space.empty((p.batch, p.heads, p.n_q, width), views["q"].array)
        lse = space.empty((p.batch, p.heads, p.n_q))
        launcher = Launcher(
            job, space, gpu, {**views, "o": space.view(out)}, {"lse": lse}, family.load
        )
        stages = launcher.run(passes)
        saved = {"space": space, "views": launcher.views, "lse": lse, "gpu": gpu}
        arrays_out = {"out": space.result(out, p.head_dim_v), "lse": space.result(lse)}
        return Outcome(
            arrays_out,
            passes[0].tables.schedule.tiling,
            stages,
            family.NAME,
            saved,
            launcher.timeline(passes),
            gpu.name,
        )


def backward_with(family_of: FamilyOf, job: Job, saved: Mapping[str, Any], dout: Any) -> Outcome:
    """The backward pass, likewise."""
    p = job.problem
    space, gpu = saved["space"], saved["gpu"]
    family = family_of(job, gpu, "backward")
    arrays.check_space("dout", dout, p.dtype, space)
    with _errors(job), space.active():
        passes = family.backward_passes(
            p, job.tiling, gpu, job.key_order, _report(job), job.algorithm
        )
        like = saved["views"]["q"].array
        d, dv = launch.row_elements(p.head_dim), launch.row_elements(p.head_dim_v)
        new = {
            "dq": space.empty((p.batch, p.heads, p.n_q, d), like),
            "dk": space.empty((p.batch, p.kv_heads, p.n_kv, d), like),
            "dv": space.empty((p.batch, p.kv_heads, p.n_kv, dv), like),
        }
        scratch = {"lse": saved["lse"], "delta": space.empty((p.batch, p.heads, p.n_q))}
        if job.algorithm == "flash2-fused":
            narrow = p.dtype != "float32"
            acc = space.empty((p.batch, p.heads, p.n_q, d)) if narrow else new["dq"]
            scratch["dq_acc"] = acc
        views = {**saved["views"], "dout": space.view(dout)}
        views |= {name: space.view(array) for name, array in new.items()}
        launcher = Launcher(job, space, gpu, views, scratch, family.load)
        stages = launcher.run(passes)
        widths = {"dq": p.head_dim, "dk": p.head_dim, "dv": p.head_dim_v}
        return Outcome(
            {name: space.result(array, widths[name]) for name, array in new.items()},
            passes[0].tables.schedule.tiling,
            stages,
            family.NAME,
            timeline=launcher.timeline(passes),
            gpu=gpu.name,
        )


class Launcher:
    """Launches passes over one call's arrays and collects what they report.

    Parameters
    ----------
    job : Job
    space : arrays.Space
    gpu : Gpu
    views : dict of str to arrays.View
        By the names of `launch.TENSORS`.
    scratch : dict of str to array
        Contiguous float32 arrays: "lse", "delta", "dq_acc".
    load : callable
        ``load(kernel, device)``, the family's compiler.
    """

    def __init__(
        self,
        job: Job,
        space: arrays.Space,
        gpu: Gpu,
        views: dict[str, Any],
        scratch: dict[str, Any],
        load: Load,
    ) -> None:
        self.job, self.space, self.gpu, self.load = job, space, gpu, load
        self.views, self.scratch = views, scratch
        self.reports: list[dict[str, cupy.ndarray]] = []
        self._head: list[int] = []
        for name in launch.TENSORS:
            view = views.get(name)
            self._head += (0, 0, 0, 0) if view is None else (view.pointer, *view.strides)
        for name in ("lse", "delta", "dq_acc"):
            self._head.append(space.pointer(scratch[name]) if name in scratch else 0)

    def run(self, passes: tuple[Pass, ...]) -> tuple[StageTrace, ...] | None:
        """Launch every pass in order; the stages' events if the job asks for them."""
        for one in passes:
            prepared(one, self.space.device, self.load)  # compile first: no gap between launches
        for one in passes:
            report = self._buffers(one) if self.job.trace else {}
            self.reports.append(report)
            self._launch(one, report)
        if not self.job.trace:
            return None
        fused = self.job.algorithm == "flash2-fused"
        return tuple(
            counts.stage_trace(
                one.stage,
                one.tables.schedule,
                report["tile_counts"].get(),
                report["visit_counts"].get(),
                fused=fused,
            )
            for one, report in zip(passes, self.reports, strict=True)
        )

    def timeline(self, passes: tuple[Pass, ...]) -> np.ndarray | None:
        """Where and when each visit ran, from the first block's start; None unless asked for."""
        if self.job.trace != "timeline":
            return None
        parts = [
            timeline.spans(
                number,
                one.tables.schedule,
                one.tables.by,
                report["tile_stamps"].get(),
                report["visit_stamps"].get(),
                self.gpu.clock_khz,
            )
            for number, (one, report) in enumerate(zip(passes, self.reports, strict=True))
            if one.kernel.shared_bytes  # row-wise passes have no visits
        ]
        spans = np.concatenate(parts)
        first = spans["start_ns"].min()
        spans["start_ns"] -= first
        spans["end_ns"] -= first
        return spans

    def _buffers(self, one: Pass) -> dict[str, Any]:
        p, tables = self.job.problem, one.tables
        heads = p.batch * p.heads
        shapes = {
            "visit_counts": (heads, tables.n_visits, launch.SLOTS),
            "tile_counts": (one.walks, tables.tiles, launch.SLOTS),
        }
        made = {name: self.space.zeros(shape, "uint32") for name, shape in shapes.items()}
        if self.job.trace == "timeline":
            roles = one.kernel.roles
            made["visit_stamps"] = self.space.zeros(
                (heads, tables.n_visits, roles, launch.VISIT_STAMPS), "uint64"
            )
            made["tile_stamps"] = self.space.zeros(
                (one.walks, tables.tiles, roles, launch.TILE_STAMPS), "uint64"
            )
        return made

    def _launch(self, one: Pass, report: dict[str, Any]) -> None:
        ready = prepared(one, self.space.device, self.load)
        reported = [report[n].data.ptr if n in report else 0 for n in launch.REPORTS]
        packed = launch.ARGS_FORMAT.pack(*self._head, *ready.tables, *reported, *ready.numbers)
        # As plain bytes: CuPy would spell out a structured dtype's fields at every launch.
        args = np.frombuffer(packed, _ARGS_BYTES)
        values: tuple[Any, ...] = (args,)
        if one.kernel.boxes:
            maps = (self._map(box) for box in one.kernel.boxes)
            values = (*maps, args, self.space.zeros((1,), "uint32"))
        ready.function(one.grid, ready.block, values, shared_mem=one.kernel.shared_bytes)

    def _map(self, box: launch.Box) -> np.ndarray:
        """The tensor map of one array of this call."""
        p = self.job.problem
        if box.tensor in self.views:
            pointer, strides, _ = self.views[box.tensor]
        else:
            d = launch.row_elements(p.head_dim)
            pointer = self.space.pointer(self.scratch[box.tensor])
            strides = (p.heads * p.n_q * d, p.n_q * d, d)
        return tensor_maps.encode(p, box, pointer, strides)


_ARGS_BYTES = np.dtype(("V", launch.ARGS.itemsize))


class Uploaded:
    """A walk's tables in GPU memory."""

    def __init__(self, tables: Lowered) -> None:
        self.arrays = {
            name: cupy.asarray(table)
            for name in launch.TABLES
            if (table := getattr(tables, name)) is not None
        }
        self.pointers = [
            self.arrays[name].data.ptr if name in self.arrays else 0 for name in launch.TABLES
        ]


@lru_cache(maxsize=256)
def uploaded(tables: Lowered, device: int) -> Uploaded:
    """The tables on CuPy's current device, uploaded once."""
    made = Uploaded(tables)
    cupy.cuda.get_current_stream().synchronize()  # other streams may use them from now on
    return made


class Prepared:
    """All of a launch that does not change from call to call."""

    def __init__(self, one: Pass, device: int, load: Load) -> None:
        self.function = load(one.kernel, device)
        self.block = (one.kernel.threads,)
        self._uploaded = uploaded(one.tables, device)  # keeps the tables alive
        self.tables = self._uploaded.pointers
        p = one.tables.schedule.problem
        values = {
            **{"walks": one.walks, "tiles": one.tables.tiles, "clump": one.clump},
            "n_visits": one.tables.n_visits,
        }
        names = (*launch.INTEGERS, "scale", "softcap")
        self.numbers = [values.get(n) if n in values else getattr(p, n) for n in names]


@lru_cache(maxsize=512)
def prepared(one: Pass, device: int, load: Load) -> Prepared:
    """A pass compiled and its tables uploaded, once for each device and compiler."""
    return Prepared(one, device, load)


@cache
def gpu_of(device: int) -> Gpu:
    """What launch arithmetic needs to know of a device.

    Raises
    ------
    BackendUnavailable
        If it is too old for the kernels.
    """
    properties = cupy.cuda.runtime.getDeviceProperties(device)
    capability = (properties["major"], properties["minor"])
    name = properties["name"].decode()
    if capability < OLDEST:
        raise BackendUnavailable(
            f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need "
            f"{OLDEST[0]}.{OLDEST[1]} (Ampere) or later: use backend='numpy' or 'numba'"
        )
    return Gpu(
        name,
        capability,
        properties["sharedMemPerBlockOptin"],
        properties["l2CacheSize"],
        properties["clockRate"],
        properties["multiProcessorCount"],
    )


@cache
def require_gpu() -> None:
    """Raise `BackendUnavailable`, saying what is missing, unless CuPy sees a GPU."""
    try:
        found = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        version = cupy.cuda.runtime.runtimeGetVersion()
        cuda = f"{version // 1000}.{version % 1000 // 10}"
        raise BackendUnavailable(
            f"CuPy {cupy.__version__} (built for CUDA {cuda}) finds no usable GPU: {error}; check "
            "nvidia-smi, and that the driver is new enough for this CuPy (flashsim[cuda12] or "
            "[cuda13] must match it)"
        ) from None
    if not found:
        raise BackendUnavailable("no NVIDIA GPU is visible; see CUDA_VISIBLE_DEVICES, nvidia-smi")


def _check(job: Job) -> None:
    p = job.problem
    if job.algorithm not in ("flash2", "flash2-fused"):
        raise UnsupportedError(
            f"backend='cupy' runs 'flash2' and 'flash2-fused', not {job.algorithm!r}; "
            "backend='numpy' simulates it"
        )
    if p.dtype == "float64":
        raise UnsupportedError(
            "backend='cupy' takes float16, bfloat16 and float32, not float64; convert the arrays, "
            "or use backend='numpy'"
        )
    for name in ("head_dim", "head_dim_v"):
        if getattr(p, name) > launch.MAX_HEAD_DIM:
            raise UnsupportedError(
                f"backend='cupy' takes {name} up to {launch.MAX_HEAD_DIM}, got {getattr(p, name)}"
            )
    lowering.refuse(p)


def _check_kernel(job: Job) -> None:
    name = job.options.get("kernel", "auto")
    if name not in ("auto", *KERNELS):
        raise OptionError(f"unknown kernel {name!r}; {choices(name, ('auto', *KERNELS))}")


def _family(job: Job, gpu: Gpu, direction: str) -> Any:
    """The kernels that were asked for; "auto" takes Hopper's wherever they run this."""
    name = job.options.get("kernel", "auto")
    if name != "auto":
        return KERNELS[name]
    refused = hopper.refusal(job.problem, job.tiling, gpu, direction, _report(job))
    return portable if refused else hopper


def _report(job: Job) -> str:
    return "timeline" if job.trace == "timeline" else "counts" if job.trace else ""


@contextmanager
def _errors(job: Job) -> Iterator[None]:
    """Say what a failure of the GPU means for the caller."""
    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise BackendUnavailable(
            f"out of GPU memory: {error}; free arrays, use a shorter batch or, for the backward "
            "pass, deterministic=True, which needs no float32 accumulator for dQ"
        ) from error
    except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as error:
        raise BackendUnavailable(
            f"the GPU refused the launch: {error}; if it was an earlier kernel that failed, only a "
            "new process helps"
        ) from error
