"""Launch arithmetic of the CUDA C++ kernels: threads, shared memory, compile-time constants.

Nothing here needs a GPU or CuPy. A `Kernel` says everything about one compiled variant; the kernels
static_assert that `Kernel.shared_bytes` and `ARGS` equal what they declare.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from flashsim.errors import TilingError
from flashsim.problem import Problem
from flashsim.tiling import Tiling

_TENSOR = [("data", "<u8"), ("batch", "<i8"), ("head", "<i8"), ("row", "<i8")]
TENSORS = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
TABLES = ("rows", "cols", "spans", "ptr", "index", "kind", "order", "ranks")
REPORTS = ("visit_counts", "tile_counts", "visit_stamps", "tile_stamps")
SCRATCH = ("lse", "delta", "dq_acc", "turns")
POINTERS = (*SCRATCH, *TABLES, *REPORTS)
INTEGERS = (
    *("n_q", "n_kv", "heads", "group", "walks", "tiles", "clump", "n_visits", "left", "right"),
)
#: The kernels' one argument, by value: ``struct Args`` of kernels/common.cuh.
ARGS = np.dtype(
    [
        *((name, _TENSOR) for name in TENSORS),
        *((name, "<u8") for name in POINTERS),
        *((name, "<i4") for name in INTEGERS),
        ("scale", "<f4"),
        ("softcap", "<f4"),
    ]
)
#: The same without alignment gaps (there are none), for packing all of it in one go.
ARGS_FORMAT = struct.Struct(
    "<" + "Qqqq" * len(TENSORS) + "Q" * len(POINTERS) + "i" * len(INTEGERS) + "ff"
)
#: Entries of a count record; which entry is which tensor, `counts.WALKS` says.
SLOTS = 8
#: Time stamps of a visit, and of a thread block (SM, then cycles and ns at start and end).
VISIT_STAMPS, TILE_STAMPS = 5, 5

MAX_HEAD_DIM = 256
#: Sides that a tile of the kernels may have.
SIDES = (16, 32, 48, 64, 80, 96, 112, 128)
#: Accumulators a thread may hold; the rest of its 255 registers is for operands and addresses.
_ACCUMULATORS = 192


@dataclass(frozen=True)
class Gpu:
    """What launch arithmetic needs to know of a GPU.

    Attributes
    ----------
    name : str
    compute_capability : (int, int)
    shared_bytes : int
        Shared memory a thread block may opt in to, in bytes.
    l2_bytes : int
    clock_khz : int
        Highest SM clock.
    multiprocessors : int
    """

    name: str
    compute_capability: tuple[int, int]
    shared_bytes: int
    l2_bytes: int
    clock_khz: int = 1_000_000
    multiprocessors: int = 132


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for besides the tile: the tables, what it reports, its arithmetic.

    `tf32` puts float32 products on tensor cores, their operands rounded to tf32. `python` says that
    the kernel is one of `flashsim.backends.numba_gpu`: its warps trade no scores in the backward
    pass, and its row sums are in registers whatever it costs.
    """

    spans: bool
    descending: bool
    counts: bool = False
    timeline: bool = False
    tf32: bool = False
    python: bool = False


@dataclass(frozen=True)
class Box:
    """What one order to Hopper's copy engine moves: rows by columns of a tensor."""

    tensor: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Kernel:
    """One kernel, compiled for one problem and tiling: all that a launch needs but the data.

    Where it has `boxes`, its arguments are a tensor map for each, ``struct Args`` and the address
    of a work counter that starts at 0 (or 0, if no block gets more than one item); elsewhere
    ``struct Args`` alone.
    """

    file: str
    name: str
    threads: int
    shared_bytes: int
    constants: tuple[tuple[str, int], ...]
    boxes: tuple[Box, ...] = ()

    @property
    def roles(self) -> int:
        """What stamps the time: 1, a whole block; more, a producer and consumer warpgroups."""
        return self.threads // 128 if self.boxes else 1

    @property
    def options(self) -> tuple[str, ...]:
        """Options for NVRTC."""
        arch = ("-arch=sm_90a",) if self.boxes else ()  # Hopper's own instructions
        return ("-std=c++17", *arch, *(f"-D{name}={value}" for name, value in self.constants))


def padded(head_dim: int, other: int = 0) -> int:
    """The head_dim a kernel computes with: tensor cores take 16 at a time, split rows 32.

    `other` is head_dim_v, which is split in the same way.
    """
    step = 16 if max(head_dim, other) <= 128 else 32
    return -(-head_dim // step) * step


def row_elements(head_dim: int) -> int:
    """Elements of a row in HBM: 16-byte accesses need a multiple of 8."""
    return -(-head_dim // 8) * 8


def forward_kernel(problem: Problem, tiling: Tiling, variant: Variant) -> Kernel:
    """`flash_forward` for a problem.

    Raises
    ------
    TilingError
        If the kernel cannot be built for this tile.
    """
    bq, bk, d, dv = _sides(problem, tiling)
    if _plain(problem, variant):
        _require(tiling, bq // 16 * (dv // 16 + bk // 16) <= _ACCUMULATORS)
        shared = _mat(bq, d) + max(_mat(bk, d), _mat(bk, dv)) + _mat(bq, bk)
        return _kernel("forward_f32.cu", "flash_forward", 8, shared, problem, tiling, variant)
    size = problem.itemsize
    blocks = 2 if bq % 128 == 0 and (dv + bk) <= _ACCUMULATORS else 1  # 16-row blocks a warp
    held = blocks * (dv + bk) // 2
    _require(tiling, held <= _ACCUMULATORS)
    # What counts has addresses of its own to keep. Where Q left no register for them, ptxas would
    # compute anew in every visit what it cannot hold, and give up the order of the exponentials.
    reporting = 8 if variant.counts else 0
    q_regs = held + blocks * d * size // 8 + reporting <= _ACCUMULATORS
    # Row sums leave the registers where these are full.
    sums_shared = held == _ACCUMULATORS and not variant.python
    tiles = size * max(bq * d + 2 * bk * (d + dv), bq * dv)
    shared = -(-tiles // 128) * 128 + 8 * bq * 2 * sums_shared
    return _kernel(
        *("forward.cu", "flash_forward", bq // (16 * blocks), shared, problem, tiling, variant),
        q_regs=int(q_regs),
        sums_shared=int(sums_shared),
    )


def dkdv_kernel(
    problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu, *, fused: bool
) -> Kernel:
    """`flash_dkdv`, which with `fused` makes dQ as well; as `forward_kernel`."""
    bq, bk, d, dv = _sides(problem, tiling)
    if _plain(problem, variant):
        held = bk // 16 * (d + dv) // 16 + 2 * bq * bk // 256 + fused * bq // 16 * d // 16
        _require(tiling, held <= _ACCUMULATORS)
        shared = _mat(bk, d) + _mat(bk, dv) + _mat(bq, d) + _mat(bq, dv) + 2 * _mat(bq, bk)
        return _kernel(
            *("backward_dkdv_f32.cu", "flash_dkdv", 8, shared + 8 * bq, problem, tiling, variant),
            fused=int(fused),
        )
    if variant.python:
        splits, queries = max(d, dv) > 128, bq
    else:
        splits = max(d, dv) > 64 and bq % 32 == d % 32 == dv % 32 == 0
        queries = bq // 2 if splits else bq  # of a visit, whose scores a warp makes
    parts = 2 if splits else 1
    # 16-key blocks a warp: two, where the accumulators of dK and dV leave room for the scores.
    blocks = 2 if bk * parts % 128 == 0 and d + dv <= 128 * parts else 1
    held = blocks * (d + dv) // (2 * parts)
    per_query = blocks * (3 if problem.softcap else 2) / 2  # S, dP and a softcap's derivative
    chunk = next(
        (c for c in (64, 48, 32, 16) if queries % c == 0 and held + per_query * c <= _ACCUMULATORS),
        0,
    )
    warps = bk * parts // (16 * blocks)
    _require(tiling, bool(chunk))
    warps_q = max(w for w in range(1, warps + 1) if warps % w == 0 and w <= max(1, bq // 32))
    warps_q = warps_q if bq % (16 * warps_q) == 0 else 1
    trades = splits and not variant.python  # P and dS cross warps
    crossing = trades + (trades or fused) + fused  # of P and dS; dQ is made a visit late
    # Warps make dQ in two halves, before and after their scores, where that was faster on an H200:
    # elsewhere a second copy of the code costs more registers than there are, or was not tried.
    if variant.python:
        halves = fused and max(d, dv) in (96, 128)
    else:
        halves = fused and not variant.tf32 and (trades or max(d, dv) == 64)
    for stages in (2, 1):
        shared = problem.itemsize * ((bk + stages * bq) * (d + dv) + crossing * bq * bk)
        shared += 8 * stages * bq
        if shared <= gpu.shared_bytes:
            break
    return _kernel(
        *("backward_dkdv.cu", "flash_dkdv", warps, shared, problem, tiling, variant),
        parts=parts,
        chunk=chunk,
        stages=stages,
        warps_q=warps_q,
        fused=int(fused),
        halves=int(halves),
    )


def dq_kernel(problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu) -> Kernel:
    """`flash_dq`, the last of three passes; as `forward_kernel`."""
    bq, bk, d, dv = _sides(problem, tiling)
    if _plain(problem, variant):
        _require(tiling, bq // 16 * d // 16 + 2 * bq * bk // 256 <= _ACCUMULATORS)
        shared = _mat(bq, d) + _mat(bq, dv) + _mat(bk, d) + _mat(bk, dv) + _mat(bq, bk) + 8 * bq
        return _kernel("backward_dq_f32.cu", "flash_dq", 8, shared, problem, tiling, variant)
    blocks = 2 if bq % 128 == 0 and d <= 64 else 1
    chunk = next((c for c in (64, 48, 32, 16) if bk % c == 0 and blocks * (d // 2 + c) <= 192), 0)
    _require(tiling, bool(chunk))
    for stages in (2, 1):
        shared = problem.itemsize * (bq * (d + dv) + stages * bk * (d + dv)) + 8 * bq
        if shared <= gpu.shared_bytes:
            break
    return _kernel(
        *("backward_dq.cu", "flash_dq", bq // (16 * blocks), shared, problem, tiling, variant),
        chunk=chunk,
        stages=stages,
    )


def rows_kernel(
    problem: Problem, tiling: Tiling, variant: Variant, name: str, *, fused: bool
) -> Kernel:
    """`flash_delta` or `flash_convert`: row by row, no shared memory."""
    f32 = int(problem.dtype == "float32")
    return _kernel(
        "backward_rows.cu", name, 4, 0, problem, tiling, variant, fused=int(fused), f32=f32
    )


# -- parts ----------------------------------------------------------------------------------------


def _sides(problem: Problem, tiling: Tiling) -> tuple[int, int, int, int]:
    """Tile sides and padded head dimensions, if the kernels have such tiles at all."""
    bq, bk = tiling.block_q, tiling.block_k
    _require(tiling, bq in SIDES and bk in SIDES)
    return bq, bk, *_padded(problem)


def _padded(problem: Problem) -> tuple[int, int]:
    d, dv = problem.head_dim, problem.head_dim_v
    return padded(d, dv), padded(dv, d)


def _plain(problem: Problem, variant: Variant) -> bool:
    """Whether products are float32 multiply-adds: no tensor cores, 256 threads on a tile."""
    return problem.dtype == "float32" and not variant.tf32


def _require(tiling: Tiling, fits: bool) -> None:
    if not fits:
        raise TilingError(f"no kernel for a {tiling} tile")


def _mat(rows: int, cols: int) -> int:
    """Bytes of a float32 tile in shared memory; its rows are padded by 16 bytes."""
    return 4 * rows * (cols + 4)


def _kernel(
    file: str,
    name: str,
    warps: int,
    shared: int,
    problem: Problem,
    tiling: Tiling,
    variant: Variant,
    **more: int,
) -> Kernel:
    _require(tiling, warps <= 8)
    if not _plain(problem, variant):
        shared = -(-shared // 128) * 128  # tiles for tensor cores are 128-byte aligned
    values = constants(problem, tiling, variant) | {
        "SMEM_BYTES": shared,
        "WARPS": warps,
        **{key.upper(): value for key, value in more.items()},
    }
    return Kernel(file, name, 32 * warps, shared, macros(values))


def constants(problem: Problem, tiling: Tiling, variant: Variant) -> dict[str, int]:
    """What every kernel is compiled for."""
    unlimited = problem.n_q + problem.n_kv
    softcap = bool(problem.softcap)
    d, dv = _padded(problem)
    return {
        "ARGS_BYTES": ARGS.itemsize,
        "SPANS": variant.spans,
        "DESCENDING": variant.descending,
        "TRACE": variant.counts,
        "TIMELINE": variant.timeline,
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
        # exp2 takes the scale along, unless a softcap needs it first or it would turn max to min.
        "SCALED": softcap or problem.scale <= 0,
        "SOFTCAP": softcap,
    }


def macros(values: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Constants as the macros of `Kernel.constants`."""
    return tuple((f"FS_{name}", int(value)) for name, value in values.items())
