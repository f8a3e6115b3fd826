"""The kernels that quantise inputs to FP8 (kernels/hopper/quantize.cu), and their launches."""

import math
from typing import Any

import numpy as np

from flashsim.backends.launch.kernel import Gpu, Kernel, macros, whole_sixteens
from flashsim.errors import UnsupportedError

_INPUT = [("data", "<u8"), ("batch", "<i8"), ("head", "<i8"), ("row", "<i8")]
_POINTERS = (
    *("q8", "k8", "v8", "vt", "q_scale", "k_scale", "v_scale"),
    *("q_largest", "k_largest", "v_largest", "signs"),
)
_INTEGERS = ("n_q", "n_kv", "heads", "kv_heads", "batch", "tiles_q", "tiles_kv", "columns")
#: ``struct Args`` of the kernels, by value.
ARGS = np.dtype(
    [
        *((name, _INPUT) for name in "qkv"),
        *((name, "<u8") for name in _POINTERS),
        *((name, "<i4") for name in _INTEGERS),
    ]
)
#: Rows of a head that a thread block works on at a time.
ROWS = 128
HEAD_DIMS = (64, 128, 256)
#: Tiles in shared memory, and bytes of a ``struct Tile``.
_STAGES, _TILE_BYTES = 3, 64
GRANULARITIES = ("tensor", "head", "block")
#: ``enum Mode``: one launch, or two.
BLOCKS, LARGEST_ONLY, ELEMENTS_ONLY = range(3)


def kernels(
    d: int,
    dtype: str,
    granularity: str,
    block: tuple[int, int],
    *,
    rotate: bool,
    e5m2: bool = False,
) -> tuple[Kernel, ...]:
    """Return the kernels that quantise q, k and v to FP8, or raise `UnsupportedError`.

    A single kernel suffices if one thread block has all rows that share a scale.
    """
    check_head_dim(d)
    if dtype not in ("float16", "bfloat16"):
        raise UnsupportedError(
            f"quantize on a GPU supports float16 and bfloat16, not {dtype}; convert q, k and v"
        )
    one = granularity == "block" and block in ((ROWS // 2, ROWS), (ROWS, ROWS))
    if granularity == "block" and not one and any(side % ROWS for side in block):
        raise UnsupportedError(
            f"on a GPU, each block that shares a scale must have a multiple of {ROWS} rows, or "
            f"{ROWS // 2} rows of Q and {ROWS} of K and V, got block={block}"
        )
    values = {
        **{"ROTATE": rotate, "E5M2": e5m2, "BF16": dtype == "bfloat16"},
        "SCALES": GRANULARITIES.index(granularity),
        **{"SCALE_Q": block[0], "SCALE_K": block[1]},
    }
    modes = (BLOCKS,) if one else (LARGEST_ONLY, ELEMENTS_ONLY)
    return tuple(_kernel("quantize", d, values | {"MODE": mode}) for mode in modes)


def transposition(d: int) -> Kernel:
    """Return the kernel that transposes an FP8 V, or raise `UnsupportedError`."""
    check_head_dim(d)
    unused = ("ROTATE", "E5M2", "BF16", "SCALES", "MODE")
    return _kernel("transpose", d, dict.fromkeys(unused, 0) | {"SCALE_Q": ROWS, "SCALE_K": ROWS})


def check_gpu(gpu: Gpu) -> None:
    """Raise `UnsupportedError` for GPUs older than Hopper, which cannot run these kernels."""
    if gpu.compute_capability < (9, 0):
        has = ".".join(map(str, gpu.compute_capability))
        raise UnsupportedError(
            f"quantize on a GPU needs compute capability 9.0 or later, and {gpu.name} has {has}; "
            "use backend='simulator', which quantises NumPy arrays"
        )


def check_head_dim(d: int) -> None:
    """Raise `UnsupportedError` for a head_dim without a kernel."""
    if d not in HEAD_DIMS:
        dims = ", ".join(map(str, HEAD_DIMS))
        raise UnsupportedError(f"FP8 on a GPU needs a head_dim of {dims}, got {d}")


def _kernel(name: str, d: int, values: dict[str, Any]) -> Kernel:
    threads = ROWS * (2 if d == 64 else 4)
    shared = _STAGES * 2 * ROWS * d + 2 * d + 2 * 32 * 4 + 4 * _TILE_BYTES
    constants = values | {"ARGS_BYTES": ARGS.itemsize, "D": d, "ROWS": ROWS, "SMEM_BYTES": shared}
    if name == "transpose":
        shared = ROWS * d
    return Kernel("hopper/quantize.cu", name, threads, shared, macros(constants))


def scale_shape(granularity: str, batch: int, heads: int, n: int, rows: int) -> tuple[int, ...]:
    """Return the shape of the array of scales for one input."""
    shapes = {"tensor": (), "head": (batch, heads), "block": (batch, heads, -(-n // rows))}
    return shapes[granularity]


def sizes(
    q: tuple[int, int, int, int] | None, k: tuple[int, int, int, int], processors: int
) -> tuple[dict[str, int], int]:
    """Return the integer fields of ``struct Args``, and the launch's number of thread blocks.

    `q` and `k` are the shapes (batch, heads, n, d) of Q and K. If `q` is None, the launch only
    transposes V.
    """
    batch, kv_heads, n_kv, d = k
    heads, n_q = (0, 0) if q is None else (q[1], q[2])
    tiles_q, tiles_kv = math.ceil(n_q / ROWS), math.ceil(n_kv / ROWS)
    values = (n_q, n_kv, heads, kv_heads, batch, tiles_q, tiles_kv, whole_sixteens(n_kv))
    blocks = batch * kv_heads * tiles_kv
    if q is not None:  # persistent blocks
        blocks = min(batch * heads * tiles_q + 2 * blocks, processors * (256 // d))
    return dict(zip(_INTEGERS, values, strict=True)), blocks
