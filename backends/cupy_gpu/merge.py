"""Merging partial attention on a GPU: one kernel, in place (kernels/portable/merge.cu)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from flashsim.backends import failures
from flashsim.backends.cupy_gpu import arrays
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch.kernel import Kernel

THREADS = 256
_TYPES = {"float32": "float", "float16": "u16", "bfloat16": "u16"}


@lru_cache
def kernel(width: int, total: str, part: str) -> Kernel:
    """The kernel for rows of `width` elements, of types by name.

    Parameters
    ----------
    width : int
        Elements of a row of out.
    total, part : str
        Types of what is merged into, and of what is merged.
    """
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
    """Merge `part`, the same rows over other keys, into `out` and its LSE, in float32.

    Parameters
    ----------
    out : torch.Tensor, (batch, heads, n, width), float32 or part's type
        Rows of a contiguous tensor: ``whole[:, :, a:b]``; changed in place.
    lse : torch.Tensor, (batch, heads, n), float32
        Likewise.
    part, part_lse : torch.Tensor, contiguous, of the same shapes
    """
    names = (arrays.dtype_name(x) for x in (out, part))
    batch, heads, rows, width = out.shape
    made = kernel(width, *names)
    space = arrays.space_of({"out": out, "part": part}, "float32")
    per_block = THREADS // dict(made.constants)["FS_LANES"]
    with failures.Explaining(), space.on_device(), space.active():
        function = nvrtc.load(made, space.device)
        pointers = [x.data_ptr() for x in (out, lse, part, part_lse)]
        grid = -(-rows // per_block), batch * heads, 1
        arguments = (*pointers, out.stride(1), lse.stride(1), np.int32(rows))
        function(grid, (THREADS, 1, 1), arguments)
