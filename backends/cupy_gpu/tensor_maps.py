"""Encode tensor maps, which describe arrays to Hopper's TMA, with the CUDA driver."""

import ctypes
from functools import cache

import numpy as np

from flashsim.backends.launch.functions import BiasTile
from flashsim.backends.launch.kernel import ROUND, Box, row_elements, whole_sixteens
from flashsim.errors import UnsupportedError
from flashsim.problem.problem import Problem

#: CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion of cuda.h.
_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
_BYTES, _PROMOTE_256B = 0, 3
_SWIZZLES = {32: 1, 64: 2, 128: 3}
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64


def encode(problem: Problem, box: Box, pointer: int, strides: tuple[int, ...]) -> np.ndarray:
    """Return the tensor map of one tensor of a launch, as a kernel argument of 128 bytes.

    `box` names the tensor, and holds the number of rows and columns per TMA copy. The box's rows
    are swizzled in shared memory. `strides` are distances in elements between batch entries,
    between heads and between rows. If the driver refuses these strides, the function raises
    `UnsupportedError`.
    """
    p = problem
    dtype = "float32" if box.tensor == "dq_acc" else p.dtype
    key_side = box.tensor in ("k", "v")
    n, heads = (p.n_kv, p.kv_heads) if key_side else (p.n_q, p.heads)
    d = row_elements(p.head_dim_v if box.tensor in ("v", "dout") else p.head_dim)
    itemsize = 4 if dtype == "float32" else p.itemsize
    batch_step, head_step, row_step = (s * itemsize for s in strides)
    shape, steps = [d, n, heads, p.batch], [row_step, head_step, batch_step]
    if box.heads > 1:  # packed heads
        shape = [d, box.heads, n, heads // box.heads, p.batch]
        steps = [head_step, row_step, box.heads * head_step, batch_step]
    if box.transposed:
        shape[:2] = whole_sixteens(n), d
    if p.cu_seqlens_q is not None:
        # TMA clips a box at the end of the map, not at the end of a sequence. So the last axis (the
        # batch has one entry) selects views of the tensor, each shifted by one row: the last row of
        # view `stop` is row stop - 1 of the tensor, and a box that starts in the view ends there. A
        # view has `ROUND` rows, and the tensor's rows are its last. The second-to-last axis undoes
        # the excess: addresses are sums modulo 2**64, and its stride is such that `ROUND` strides
        # equal -ROUND rows. (A map that simply starts so many rows before the tensor also reads
        # correct data. But if no memory is mapped there, TMA occasionally fails, since it may touch
        # the beginning of a map whatever the coordinates.)
        shape, steps = [d, ROUND, heads, ROUND + 1, n + 1], [row_step, head_step]
        steps += [2**64 // ROUND - row_step, row_step]
    made, error = _encoded(_TYPES.get(dtype, _BYTES), pointer, shape, steps, box)
    if error:
        raise UnsupportedError(
            f"Hopper's TMA cannot address {box.tensor}: shape {(p.batch, heads, n, d)}, strides "
            f"{strides} elements (CUDA error {error}); pass a contiguous array, or use "
            "kernel='portable'"
        )
    return made


def encode_tile(tile: BiasTile, box: Box, pointer: int) -> np.ndarray:
    """Return the tensor map of a captured array, or raise `UnsupportedError`."""
    planes, rows, columns = tile.shape
    row = columns * tile.spec.itemsize
    shape, steps = [columns, rows, planes, 1], [row, rows * row, planes * rows * row]
    if box.interleaved:
        shape, steps = [columns, 2, 4, rows // 8, planes], [4 * row, row, 8 * row, rows * row]
    made, error = _encoded(_TYPES[tile.spec.dtype], pointer, shape, steps, box)
    if error:
        raise UnsupportedError(
            f"Hopper's TMA cannot address the captured array {tile.spec.name!r} of shape "
            f"{tile.spec.shape} (CUDA error {error}); try kernel='portable', which does not use "
            "TMA"
        )
    return made


def _encoded(
    element: int, pointer: int, shape: list[int], steps: list[int], box: Box
) -> tuple[np.ndarray, int]:
    """Return a tensor map, and the driver's error code (0 if there was no error).

    `steps` are the strides in bytes of all axes except the contiguous one.
    """
    rank = len(shape)
    sides = [box.columns, *([box.heads] if box.heads > 1 else []), box.rows // box.heads]
    if box.interleaved:
        sides = [box.columns, 2, 4, box.rows // 8]
    storage = np.zeros(_MAP_BYTES + _MAP_ALIGNMENT, np.uint8)
    start = -storage.ctypes.data % _MAP_ALIGNMENT
    made = storage[start : start + _MAP_BYTES]
    error = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(made.ctypes.data),
        element,
        rank,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * (rank - 1))(*steps),
        (ctypes.c_uint32 * rank)(*sides, *[1] * (rank - len(sides))),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # no interleaving
        _SWIZZLES[box.swizzle],
        _PROMOTE_256B,
        0,  # elements outside the tensor arrive as zeros
    )
    return made.view(f"V{_MAP_BYTES}"), error


@cache
def driver() -> ctypes.CDLL:
    """Return the CUDA driver's library, or raise `UnsupportedError` if the library is not found."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UnsupportedError(
        "the CUDA driver's library (libcuda) was not found; use kernel='portable', which does "
        "not need it"
    )
