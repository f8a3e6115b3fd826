"""Build the kernel that fuses a softmax with a matrix product."""

import numpy as np

from flashsim.backends.launch.kernel import Kernel, macros
from flashsim.errors import TilingError

#: Possible block sides; the largest number of columns of V, since a warp's rows of O must fit in
#: registers.
SIDES, WIDEST = (16, 32, 64), 512
THREADS, _SLICE = 256, 16
_POINTERS = ("x", "v", "o", "counts")
_STRIDES = ("x_batch", "x_row", "v_batch", "v_row", "o_batch", "o_row")
#: ``struct Args`` of kernels/portable/softmax_matmul.cu, by value.
ARGS = np.dtype(
    [
        *((name, "<u8") for name in _POINTERS),
        *((name, "<i8") for name in _STRIDES),
        *((name, "<i4") for name in ("d1", "d2", "d3")),
    ],
    align=True,
)


def kernel(block_1: int, block_2: int, d3: int, *, counts: bool = False) -> Kernel:
    """Return the kernel for these block sizes and `d3` columns of V, or raise `TilingError`."""
    if block_1 not in SIDES or block_2 not in SIDES:
        raise TilingError(
            f"each block side of the GPU kernel must be one of {', '.join(map(str, SIDES))}, got "
            f"{block_1} x {block_2}"
        )
    if d3 > WIDEST:
        raise TilingError(f"the GPU kernel needs a V with at most {WIDEST} columns, got {d3}")
    width = -(-d3 // 32) * 32
    shared = 4 * (block_1 * block_2 + _SLICE * width)
    constants = {
        "ARGS_BYTES": ARGS.itemsize,
        "BLOCK_1": block_1,
        "BLOCK_2": block_2,
        "WIDTH": width,
        "THREADS": THREADS,
        "TRACE": counts,
        "SMEM_BYTES": shared,
    }
    return Kernel(
        *("portable/softmax_matmul.cu", "softmax_matmul", THREADS, shared), macros(constants)
    )
