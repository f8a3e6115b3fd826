"""Launch arithmetic of the CUDA C++ kernels: threads, shared memory, compile-time constants.

Nothing here needs a GPU or CuPy. A `Kernel` says everything about one compiled variant; the kernels
static_assert that `Kernel.shared_bytes` and `ARGS` equal what they declare.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flashsim.errors import TilingError
from flashsim.problem import Problem
from flashsim.tiling import Tiling

_TENSOR = [("data", "<u8"), ("batch", "<i8"), ("head", "<i8"), ("row", "<i8")]
TENSORS = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
TABLES = ("rows", "cols", "spans", "ptr", "index", "kind", "order")
REPORTS = ("visit_counts", "tile_counts", "visit_stamps", "tile_stamps")
POINTERS = ("lse", "delta", "dq_acc", *TABLES, *REPORTS)
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
#: Accumulators a thread may hold; the rest of its 255 registers is for operands and addresses.
_ACCUMULATORS = 192
_SIDES = (16, 32, 48, 64, 80, 96, 112, 128)


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
    """What a kernel is compiled for besides the tile: the mask, the tables, what it reports."""

    spans: bool
    descending: bool
    counts: bool = False
    timeline: bool = False


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
    of a work counter that starts at 0; elsewhere ``struct Args`` alone.
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


def padded(head_dim: int) -> int:
    """The head_dim a kernel computes with: tensor cores take 16 at a time, split tiles 32."""
    step = 16 if head_dim <= 128 else 32
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
    if problem.dtype == "float32":
        _require(tiling, bq // 16 * (dv // 16 + bk // 16) <= _ACCUMULATORS)
        shared = _mat(bq, d) + max(_mat(bk, d), _mat(bk, dv)) + _mat(bq, bk)
        return _kernel("forward_f32.cu", "flash_forward", 8, shared, problem, tiling, variant)
    blocks = 2 if bq % 128 == 0 and (dv + bk) <= _ACCUMULATORS else 1  # 16-row blocks a warp
    held = blocks * (dv + bk) // 2
    _require(tiling, held <= _ACCUMULATORS)
    q_regs = held + blocks * d // 4 <= _ACCUMULATORS
    shared = 2 * max(bq * d + 2 * bk * (d + dv), bq * dv)
    return _kernel(
        *("forward.cu", "flash_forward", bq // (16 * blocks), shared, problem, tiling, variant),
        q_regs=int(q_regs),
    )


def dkdv_kernel(
    problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu, *, fused: bool
) -> Kernel:
    """`flash_dkdv`, which with `fused` makes dQ as well; as `forward_kernel`."""
    bq, bk, d, dv = _sides(problem, tiling)
    if problem.dtype == "float32":
        held = bk // 16 * (d + dv) // 16 + 2 * bq * bk // 256 + fused * bq // 16 * d // 16
        _require(tiling, held <= _ACCUMULATORS)
        shared = _mat(bk, d) + _mat(bk, dv) + _mat(bq, d) + _mat(bq, dv) + 2 * _mat(bq, bk)
        return _kernel(
            *("backward_dkdv_f32.cu", "flash_dkdv", 8, shared + 8 * bq, problem, tiling, variant),
            fused=int(fused),
        )
    parts = 2 if max(d, dv) > 128 else 1
    # 16-key blocks a warp: two, where the accumulators of dK and dV leave room for the scores.
    blocks = 2 if bk * parts % 128 == 0 and d + dv <= 128 * parts else 1
    held = blocks * (d + dv) // (2 * parts)
    per_query = blocks * (3 if problem.softcap else 2) / 2  # S, dP and a softcap's derivative
    chunk = next(
        (c for c in (64, 48, 32, 16) if bq % c == 0 and held + per_query * c <= _ACCUMULATORS), 0
    )
    warps = bk * parts // (16 * blocks)
    _require(tiling, bool(chunk))
    warps_q = max(w for w in range(1, warps + 1) if warps % w == 0 and w <= max(1, bq // 32))
    warps_q = warps_q if bq % (16 * warps_q) == 0 else 1
    for stages in (2, 1):
        shared = 2 * (bk * (d + dv) + stages * bq * (d + dv) + fused * 2 * bk * bq)
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
    )


def dq_kernel(problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu) -> Kernel:
    """`flash_dq`, the last of three passes; as `forward_kernel`."""
    bq, bk, d, dv = _sides(problem, tiling)
    if problem.dtype == "float32":
        _require(tiling, bq // 16 * d // 16 + 2 * bq * bk // 256 <= _ACCUMULATORS)
        shared = _mat(bq, d) + _mat(bq, dv) + _mat(bk, d) + _mat(bk, dv) + _mat(bq, bk) + 8 * bq
        return _kernel("backward_dq_f32.cu", "flash_dq", 8, shared, problem, tiling, variant)
    blocks = 2 if bq % 128 == 0 and d <= 64 else 1
    chunk = next((c for c in (64, 48, 32, 16) if bk % c == 0 and blocks * (d // 2 + c) <= 192), 0)
    _require(tiling, bool(chunk))
    for stages in (2, 1):
        shared = 2 * (bq * (d + dv) + stages * bk * (d + dv)) + 8 * bq
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


# -- tilings --------------------------------------------------------------------------------------


def check(problem: Problem, tiling: Tiling, gpu: Gpu, direction: str, *, fused: bool) -> None:
    """Raise `TilingError`, with the tilings that do run, unless this one runs on this GPU."""
    try:
        need = _shared_need(problem, tiling, gpu, direction, fused)
        if need <= gpu.shared_bytes:
            return
        why = f"needs {need:,} B of shared memory, and {gpu.name} gives a block "
        why += f"{gpu.shared_bytes:,} B"
    except TilingError:
        why = "is not one that the kernels are built for (sides are multiples of 16)"
    possible = ", ".join(str(t) for t in runnable(problem, gpu, direction, fused=fused))
    raise TilingError(
        f"{direction} at head_dim={problem.head_dim}, {problem.dtype}: a {tiling} tile {why}; "
        f"possible: {possible or 'none on this GPU'}"
    )


def runnable(problem: Problem, gpu: Gpu, direction: str, *, fused: bool) -> list[Tiling]:
    """Every tiling that the kernels run on this GPU, smallest first."""
    return [
        tiling
        for tiling in (Tiling(q, k) for q in _SIDES for k in _SIDES)
        if _runs(problem, tiling, gpu, direction, fused)
    ]


def default_tiling(problem: Problem, gpu: Gpu, direction: str, *, fused: bool) -> Tiling:
    """The fastest tiling that runs here, of those measured on an H200 (docs/performance.md)."""
    order: tuple[tuple[int, int], ...]
    d = max(problem.head_dim, problem.head_dim_v)
    if problem.dtype == "float32":
        order = ((64, 64), (32, 32), (16, 16))
    elif direction == "backward":
        order = ((64, 128), (64, 64), (32, 64), (32, 32), (16, 32), (16, 16))
    elif d <= 64:
        order = ((128, 96), (128, 64), (64, 64), (32, 32), (16, 16))
    else:
        order = ((128, 64), (128, 32), (64, 32), (32, 32), (16, 16))
    cells = problem.block_mask
    for tiling in (Tiling(*sides) for sides in order):
        divides = cells is None or not (
            cells.block_q % tiling.block_q or cells.block_k % tiling.block_k
        )
        if divides and _runs(problem, tiling, gpu, direction, fused):
            return tiling
    possible = ", ".join(str(t) for t in runnable(problem, gpu, direction, fused=fused))
    raise TilingError(
        f"no default tiling for {direction} at head_dim={problem.head_dim}, {problem.dtype} on "
        f"{gpu.name}; give tiling=..., one of: {possible or 'none on this GPU'}"
        + ("" if cells is None else f" that divides the block mask's {cells!r}")
    )


def _runs(problem: Problem, tiling: Tiling, gpu: Gpu, direction: str, fused: bool) -> bool:
    try:
        return _shared_need(problem, tiling, gpu, direction, fused) <= gpu.shared_bytes
    except TilingError:
        return False


def _shared_need(problem: Problem, tiling: Tiling, gpu: Gpu, direction: str, fused: bool) -> int:
    variant = Variant(spans=True, descending=False)
    kernels: list[Callable[[], Kernel]]
    if direction == "forward":
        kernels = [lambda: forward_kernel(problem, tiling, variant)]
    else:
        kernels = [lambda: dkdv_kernel(problem, tiling, variant, gpu, fused=fused)]
        if not fused:
            kernels.append(lambda: dq_kernel(problem, tiling, variant, gpu))
    return max(make().shared_bytes for make in kernels)


# -- parts ----------------------------------------------------------------------------------------


def _sides(problem: Problem, tiling: Tiling) -> tuple[int, int, int, int]:
    """Tile sides and padded head dimensions, if the kernels have such tiles at all."""
    bq, bk = tiling.block_q, tiling.block_k
    _require(tiling, bq in _SIDES and bk in _SIDES)
    return bq, bk, padded(problem.head_dim), padded(problem.head_dim_v)


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
    half = problem.dtype != "float32"
    shared = -(-shared // 128) * 128 if half else shared  # half tiles are 128-byte aligned
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
    return {
        "ARGS_BYTES": ARGS.itemsize,
        "SPANS": variant.spans,
        "DESCENDING": variant.descending,
        "TRACE": variant.counts,
        "TIMELINE": variant.timeline,
        "VARLEN": problem.cu_seqlens_q is not None,
        "BLOCK_Q": tiling.block_q,
        "BLOCK_K": tiling.block_k,
        "D": padded(problem.head_dim),
        "DV": padded(problem.head_dim_v),
        "HEAD_DIM": row_elements(problem.head_dim),
        "HEAD_DIM_V": row_elements(problem.head_dim_v),
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
