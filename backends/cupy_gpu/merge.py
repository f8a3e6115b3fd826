"""Merge two partial attention results on a GPU in one kernel (kernels/portable/merge.cu)."""

from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from flashsim.backends import failures
from flashsim.backends.cupy_gpu import arrays, engine
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch.kernel import Kernel
from flashsim.errors import DTypeError

THREADS = 256
_TYPES = {"float32": "float", "float16": "u16", "bfloat16": "u16"}


@lru_cache
def kernel(width: int, total: str, part: str) -> Kernel:
    """Return the kernel that merges rows of type `part` into rows of type `total`."""
    vector = next(n for n in (8, 4, 2, 1) if width % n == 0 and not (n == 8 and total == "float32"))
    lanes = next(n for n in (32, 16, 8, 4, 2, 1) if n * vector <= max(width, vector))
    constants: dict[str, Any] = {
        "FS_WIDTH": width,
        "FS_VECTOR": vector,
        "FS_LANES": lanes,
        "FS_THREADS": THREADS,
        "FS_BF16": int("bfloat16" in (total, part)),
        "FS_TOTAL": _TYPES[total],
        "FS_PART": _TYPES[part],
    }
    return Kernel("portable/merge.cu", "merge_parts", THREADS, 0, tuple(constants.items()))


def merge_into(out: Any, lse: Any, part: Any, part_lse: Any) -> None:
    """Merge `part`, the attention of the same queries over other keys, into `out` and its LSE.

    The merged output and LSE are computed in float32. `out` (batch, heads, n, width) is float32 or
    has part's type, and `lse` (batch, heads, n) is float32. `out` and `lse` are slices ``whole[:,
    :, a:b]`` of contiguous torch tensors, and the function changes them in place. `part` and
    `part_lse` are contiguous, and have the shapes of `out` and `lse`.
    """
    space = arrays.space_of({"out": out, "part": part}, "float32")
    with failures.Explaining(), space.on_device(), space.active():
        _launch(space, (out, lse, part, part_lse), (out.stride(1), lse.stride(1)))


def _launch(space: arrays.Space, given: tuple[Any, ...], strides: tuple[int, int]) -> None:
    """Launch the merging kernel; `strides` count the elements from one head to the next."""
    names = (arrays.dtype_name(x) for x in (given[0], given[2]))
    batch, heads, rows, width = given[0].shape
    made = kernel(width, *names)
    per_block = THREADS // dict(made.constants)["FS_LANES"]
    grid = -(-rows // per_block), batch * heads, 1
    pointers = map(space.pointer, given)
    function = nvrtc.load(made, space.device)
    function(grid, (THREADS, 1, 1), (*pointers, *strides, np.int32(rows)))


#: The largest number of blocks along a grid's second axis.
_MOST_HEADS = 65535


def held(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays `given`, without a copy, in a form that `merged` takes.

    The function raises `BackendUnavailable` or `DTypeError` if the arrays are not on one GPU, or no
    kernel merges their types.
    """
    engine.require_gpu()
    space = arrays.space_of(given, "float32")
    for name, x in given.items():
        dtype = arrays.dtype_name(x)
        may_be = [*_TYPES] if name.startswith("out") else ["float32"]
        if dtype not in may_be:
            raise DTypeError(
                f"to merge on a GPU, {name} must be {' or '.join(may_be)}, got {dtype}; convert "
                f"{name}, or move all arrays to the CPU"
            )
    if isinstance(space, arrays.TorchSpace):
        return given
    return {name: cupy.asarray(x) for name, x in given.items()}


def merged(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Merge two partial results, and return the output and the LSE over the keys of both.

    The results are new arrays of the library and types of `out_a` and `lse_a`. The arguments must
    come from the function `held`.
    """
    space = arrays.space_of({"out_a": out_a}, "float32")
    with failures.Explaining(), space.on_device(), space.active():
        out, lse = (space.duplicate(x) for x in (out_a, lse_a))
        if 0 in out.shape:
            return out, lse
        part, part_lse = (space.duplicate(x) for x in (out_b, lse_b))
        rows, width = out.shape[-2:]
        whole = [x.reshape(1, -1, rows, width) for x in (out, part)]
        sums = [x.reshape(1, -1, rows) for x in (lse, part_lse)]
        for first in range(0, whole[0].shape[1], _MOST_HEADS):
            some = slice(first, first + _MOST_HEADS)
            given = tuple(x[:, some] for pair in zip(whole, sums, strict=True) for x in pair)
            _launch(space, given, (rows * width, rows))
        return out, lse
