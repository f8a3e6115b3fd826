"""Compute the launches of CUDA C++ kernels: threads, shared memory, compile-time constants.

A ``static_assert`` in each kernel checks that `Kernel.shared_bytes` and `ARGS` have the sizes of
the kernel's structs. Nothing in this module needs a GPU or CuPy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flashsim.backends.launch.functions import Generated, functions_of
from flashsim.errors import OptionError, UnsupportedError, choices
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

if TYPE_CHECKING:
    from flashsim.engines.protocol import Job

_TENSOR = [("data", "<u8"), ("batch", "<i8"), ("head", "<i8"), ("row", "<i8")]
TENSORS = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
TABLES = ("rows", "cols", "spans", "ptr", "index", "kind", "order", "ranks")
REPORTS = ("visit_counts", "tile_counts", "visit_stamps", "tile_stamps")
#: FP8 inputs have no backward pass, so q_scale shares the field of dlse.
SCRATCH = ("lse", "delta", "dq_acc", "turns", "dlse", "k_scale", "v_scale")
POINTERS = (*SCRATCH, *TABLES, *REPORTS)
INTEGERS = (
    *("n_q", "n_kv", "heads", "group", "walks", "tiles", "clump", "n_visits", "left", "right"),
    *("first", "stop"),
)
#: ``struct Args`` of kernels/common.cuh, the kernels' only argument, passed by value.
ARGS = np.dtype(
    [
        *((name, _TENSOR) for name in TENSORS),
        *((name, "<u8") for name in POINTERS),
        *((name, "<i4") for name in INTEGERS),
        ("scale", "<f4"),
        ("softcap", "<f4"),
    ]
)


def args_dtype(functions: Generated | None, *, packed: bool, sinks: bool) -> np.dtype:
    """Return `ARGS` with additional fields for mask functions, score functions and sinks.

    The field ``captured`` holds the arrays and numbers that functions capture. The fields
    ``starts`` (for packed sequences) and ``sinks`` are addresses.
    """
    more = [] if functions is None else [("captured", f"V{functions.captured_bytes}")]
    more += [("starts", "<u8")] if functions is not None and packed else []
    more += [("sinks", "<u8")] if sinks else []
    return np.dtype([*ARGS.descr, *more]) if more else ARGS


#: The name of the box of captured elements (`functions.BiasTile`), which is a kernel's last box.
TILE = "tile"
#: Suffixes of the files of forward kernels, whose softmax includes sinks.
FORWARD = ("/forward.cu", "/forward_f32.cu", "/decode.cu")
#: Slots of a count record; slot n is transfer n of the stage's dataflow.
SLOTS = 8
#: Time stamps per visit, and per thread block (SM, then cycles and ns at start and end).
VISIT_STAMPS, TILE_STAMPS = 5, 5

MAX_HEAD_DIM = 256
#: Rows of a view of packed sequences in a tensor map, and the coordinate on the axis whose stride
#: compensates for them (`cupy_gpu.tensor_maps`). kernels/hopper/ptx.cuh has the same constant.
ROUND = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that determine how kernels are launched.

    `shared_bytes` is the largest shared memory that a thread block may request. `clock_khz` is the
    highest SM clock, and `hbm_bandwidth` the data sheet's bytes per second. `clusters` holds pairs:
    a cluster size in blocks, and how many such clusters run at once with one block per SM. A launch
    asks the driver for the pairs in `clusters`, because chips of one model may group their SMs
    differently. A plan without a GPU takes them from the `Device`, and estimates those that are
    missing.
    """

    name: str
    compute_capability: tuple[int, int]
    shared_bytes: int
    l2_bytes: int
    clock_khz: int = 1_000_000
    multiprocessors: int = 132
    hbm_bandwidth: float = 4.8e12
    clusters: tuple[tuple[int, int], ...] = ()

    def at_once(self, cluster: int) -> int:
        """Return the number (or an estimate) of clusters of `cluster` blocks that run at once."""
        return dict(self.clusters).get(cluster, self.multiprocessors // cluster)

    @classmethod
    def like(cls, device: Device) -> Gpu:
        """Return a `Gpu` with the properties of a `Device`, to plan launches without that GPU."""
        return cls(
            *(device.name, device.compute_capability, device.sram_bytes, device.l2_bytes),
            multiprocessors=device.sm_count,
            hbm_bandwidth=device.hbm_bandwidth,
            clusters=device.clusters,
        )


@dataclass(frozen=True)
class Variant:
    """A kernel's compile-time options besides the tile: tables, reports and arithmetic.

    With `tf32`, float32 operands are rounded to tf32, so that tensor cores can multiply them.
    `python` marks a kernel of `flashsim.backends.numba_gpu`. `cluster` is the number of thread
    blocks that share a work tile of the Hopper backward. With `overlap`, a kernel lets the next
    kernel start before its own end, and waits before it reads the previous kernel's results.

    With `in_step`, the Hopper backward orders its loops so that concurrent work tiles read the same
    row tiles (kernels/hopper/kv_outer.cuh). With `deferred`, the Hopper backward computes a visit's
    dQ during the next visit (kernels/hopper/backward.cu). With `once`, each row tile has a single
    key tile. With `fused`, one kernel computes dK, dV and dQ. With both `fused` and `ordered`,
    blocks add to dQ in a fixed order. With both `fused` and `first`, the first block to reach a
    tile of dQ stores it, and later blocks add to it.

    With `after`, a launch starts as soon as the previous launch of the pass has begun. With `more`,
    a launch lets the next launch of the pass begin.

    With `shares`, each warpgroup of the Hopper forward computes only the visits that its rows need.
    `pack` is the number of query heads whose rows share a row tile of the Hopper forward: the heads
    of a GQA group, or 1.
    """

    spans: bool
    descending: bool
    counts: bool = False
    timeline: bool = False
    tf32: bool = False
    python: bool = False
    cluster: int = 1
    overlap: bool = False
    in_step: bool = False
    once: bool = False
    deferred: bool = False
    after: bool = False
    more: bool = False
    fused: bool = False
    ordered: bool = False
    first: bool = False
    pack: int = 1
    shares: bool = False


@dataclass(frozen=True)
class Box:
    """A TMA box: the rows and columns of a tensor that one TMA copy moves.

    `swizzle` is the width of the box in bytes. Inside the box, TMA permutes 16-byte pieces to avoid
    bank conflicts. If `transposed`, the tensor has shape (.., d, n), where n is padded to a
    multiple of 16. With packed heads, `heads` is the number of query heads per group: row r of the
    box is then query r // heads of head r % heads. If `interleaved`, the rows of each eight are in
    the order 0, 4, 1, 5, 2, 6, 3, 7.
    """

    tensor: str
    rows: int
    columns: int
    swizzle: int = 128
    transposed: bool = False
    heads: int = 1
    interleaved: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel for one problem and tiling, with all that a launch needs except the data.

    A kernel with `boxes` takes one tensor map per box, then ``struct Args`` and the address of a
    work counter. The work counter is 0 before and after the launch. The counter's address is 0 if
    no block gets more than one work tile. A kernel without `boxes` takes ``struct Args`` alone.
    """

    file: str
    name: str
    threads: int
    shared_bytes: int
    constants: tuple[tuple[str, int], ...]
    boxes: tuple[Box, ...] = ()
    cluster: int = 1  # thread blocks per cluster, which share a work tile
    overlaps: bool = False  # may start while the previous kernel runs, and waits for it itself
    functions: Generated | None = None
    sinks: bool = False

    @property
    def args(self) -> np.dtype:
        """The NumPy type of the kernel's ``struct`` argument."""
        packed = bool(dict(self.constants)["FS_VARLEN"])
        return args_dtype(self.functions, packed=packed, sinks=self.sinks)

    @property
    def roles(self) -> int:
        """The number of warp roles per block that record time stamps."""
        return self.threads // 128 if self.boxes else 1

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler options with which NVRTC compiles this kernel."""
        hopper = self.file.startswith("hopper/")
        arch = ("-arch=sm_90a",) if hopper else ()  # enables Hopper's own instructions
        return ("-std=c++17", *arch, *(f"-D{name}={value}" for name, value in self.constants))


def padded(head_dim: int, other: int = 0) -> int:
    """Return head_dim rounded up to a multiple of 16, or to a multiple of 32 if it exceeds 128.

    Tensor cores take 16 columns at a time. Rows that are split between warps need a multiple of 32
    columns. `other` is the problem's second head dimension, such as head_dim_v. If one head
    dimension exceeds 128, warps split the rows of both.
    """
    step = 16 if max(head_dim, other) <= 128 else 32
    return -(-head_dim // step) * step


def row_elements(head_dim: int) -> int:
    """Return the number of elements per row in HBM: head_dim rounded up to a multiple of 8."""
    return -(-head_dim // 8) * 8


def whole_sixteens(n: int) -> int:
    """Return the number of keys per row of an FP8 V^T: `n`, rounded up to a multiple of 16."""
    return -(-n // 16) * 16


def check_asked(
    backend: str, asked: Job, algorithms: tuple[str, ...], kernels: Iterable[str]
) -> str:
    """Return the job's option `kernel`, or raise an error for an unknown kernel or algorithm."""
    if asked.algorithm not in algorithms:
        raise UnsupportedError(
            f"backend={backend!r} runs only the algorithms {', '.join(map(repr, algorithms))}, "
            f"not {asked.algorithm!r}; use backend='simulator', which runs every algorithm"
        )
    name, known = asked.options.get("kernel", "auto"), ("auto", *kernels)
    if name not in known:
        raise OptionError(f"unknown kernel {name!r}; choose from {choices(name, known)}")
    return name


def check_head_dims(problem: Problem, what: str) -> None:
    """Raise `UnsupportedError` if head_dim or head_dim_v exceeds `MAX_HEAD_DIM`."""
    for name in ("head_dim", "head_dim_v"):
        if getattr(problem, name) > MAX_HEAD_DIM:
            raise UnsupportedError(
                f"{what} supports a {name} of at most {MAX_HEAD_DIM}, got "
                f"{getattr(problem, name)}; use backend='simulator'"
            )


# -- constants and kernels ------------------------------------------------------------------------


def padded_dims(problem: Problem) -> tuple[int, int]:
    """Return head_dim and head_dim_v, both rounded up by `padded`."""
    d, dv = problem.head_dim, problem.head_dim_v
    return padded(d, dv), padded(dv, d)


def constants(problem: Problem, tiling: Tiling, variant: Variant) -> dict[str, int]:
    """Return the compile-time constants that all kernels share, as a dict by name."""
    unlimited = problem.n_q + problem.n_kv
    softcap = bool(problem.softcap)
    d, dv = padded_dims(problem)
    return {
        "ARGS_BYTES": ARGS.itemsize,
        "SPANS": variant.spans,
        "DESCENDING": variant.descending,
        "TRACE": variant.counts,
        "TIMELINE": variant.timeline,
        "OVERLAP": variant.overlap,
        "VARLEN": problem.cu_seqlens_q is not None,
        "BLOCK_Q": tiling.block_q,
        "BLOCK_K": tiling.block_k,
        "D": d,
        "DV": dv,
        "HEAD_DIM": row_elements(problem.head_dim),
        "HEAD_DIM_V": row_elements(problem.head_dim_v),
        "COUNTED": problem.head_dim,
        "COUNTED_V": problem.head_dim_v,
        "BYTES": problem.itemsize,
        "TF32": variant.tf32,
        "BF16": problem.dtype == "bfloat16",
        "RIGHT": problem.right < unlimited,
        "LEFT": problem.left < unlimited,
        # The factor of exp2 includes the scale, unless a softcap or a function needs scaled scores,
        # or the scale is negative, which would swap maximum and minimum.
        "SCALED": softcap or problem.score_mod is not None or problem.scale <= 0,
        "SOFTCAP": softcap,
    }


def macros(values: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Convert a dict of constants to (macro name, value) pairs for `Kernel.constants`."""
    return tuple((f"FS_{name}", int(value)) for name, value in values.items())


def built(
    file: str,
    name: str,
    threads: int,
    shared: int,
    made_for: tuple[Problem, Tiling, Variant],
    more: dict[str, int],
    boxes: tuple[Box, ...] = (),
    cluster: int = 1,
    *,
    outer: str | None = "queries",
) -> Kernel:
    """Return the `Kernel` called `name` in `file`, with the given compile-time constants.

    `outer` is the axis of the kernel's outer loop, "queries" or "keys", or None for a row-wise
    kernel. A KV-outer kernel also adds up the gradients of arrays that functions capture.
    """
    problem, values = made_for[0], constants(*made_for) | {"SMEM_BYTES": shared} | more
    generated, functions = None, None if outer is None else functions_of(problem)
    if functions is not None:
        generated = functions.summing if outer == "keys" else functions.plain
    sinks = problem.sinks and file.endswith(FORWARD)
    if generated is not None:
        values |= generated.constants | more
    values |= {"SINKS": 1} if sinks else {}
    packed = problem.cu_seqlens_q is not None
    values["ARGS_BYTES"] = args_dtype(generated, packed=packed, sinks=sinks).itemsize
    return Kernel(
        *(file, name, threads, shared, macros(values), boxes, cluster),
        functions=generated,
        sinks=sinks,
    )
