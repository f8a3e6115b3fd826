"""Copy captured arrays of mask and score functions, and attention sinks, to GPU memory."""

from functools import lru_cache
from typing import Any, NamedTuple

import cupy
import numpy as np

from flashsim.backends.cupy_gpu import arrays
from flashsim.backends.launch.functions import arrays_of_mask, sources_of, tile_of
from flashsim.engines.protocol import Job
from flashsim.functions.graph import ArraySpec
from flashsim.functions.mask import MaskFunction
from flashsim.problem.problem import numpy_dtype


class ReadByFunctions(NamedTuple):
    """One call's captured arrays and attention sinks, which kernels read besides q, k and v.

    `plain` and `summing` are two versions of the bytes of ``struct FlashCaptured``. Kernels take
    `summing` if they compute gradients of captured arrays, and otherwise `plain`. `sinks` is the
    address of one float32 number per query head, or 0 without sinks. `tile` is the address of the
    captured array that TMA loads tile by tile, or 0 if none is. `gradients` maps "d:<name>" to a
    zeroed float32 array, to which the kernel adds. `keeps` holds the owners of the arrays' memory.
    """

    plain: bytes = b""
    summing: bytes = b""
    sinks: int = 0
    tile: int = 0
    gradients: dict[str, cupy.ndarray] = {}  # noqa: RUF012 (never written to)
    keeps: tuple[Any, ...] = ()


NOTHING = ReadByFunctions()


def captured(job: Job, space: arrays.Space) -> ReadByFunctions:
    """Return a job's captured arrays and sinks in GPU memory, and zeros for requested gradients."""
    p = job.problem
    if not p.has_functions:
        return NOTHING
    with space.active():
        sinks = None
        if p.sinks:
            given = job.sinks.float() if arrays.is_torch(job.sinks) else job.sinks
            sinks = cupy.ascontiguousarray(_on_gpu(given).astype(np.float32, copy=False))
        at = 0 if sinks is None else sinks.data.ptr
        if p.mask_mod is None and p.score_mod is None:
            return ReadByFunctions(sinks=at, keeps=(sinks,))
        score = () if p.score_mod is None else p.score_mod.arrays
        held = [_typed(x, spec) for x, spec in zip(job.score_arrays, score, strict=True)]
        tile = tile_of(p)
        if tile is not None and held[tile.array].data.ptr % 16:  # TMA's alignment
            held[tile.array] = held[tile.array].copy()
        if p.mask_mod is not None:
            held += _of_mask(p.mask_mod, space.device)
        shapes = {spec.name: spec.shape for spec in score}
        gradients = {f"d:{name}": cupy.zeros(shapes[name], np.float32) for name in p.score_grads}
        data = [x.data.ptr for x in held]
        plain, summing = sources_of(p)
        totals = [gradients[f"d:{name}"].data.ptr for name in summing.gradients]
        packed = plain.pack(data).tobytes(), summing.pack(data, totals).tobytes()
        of_tile = 0 if tile is None else data[tile.array]
        return ReadByFunctions(*packed, at, of_tile, gradients, (*held, sinks))


def gradients(
    job: Job, given: ReadByFunctions, space: arrays.Space, lse: int, delta: int
) -> dict[str, Any]:
    """Return the gradients of captured arrays and of sinks, in the library of the call's arrays.

    `lse` and `delta` are the GPU addresses of two float32 arrays with one element per query row.
    """
    p, made = job.problem, dict(given.gradients)
    if p.sinks:
        shape = (p.batch, p.heads, p.n_q)
        rows, less = (_at(x, shape, space) for x in (lse, delta))
        sinks = _at(given.sinks, (1, p.heads, 1), space)
        weight = cupy.exp(sinks - cupy.where(cupy.isneginf(sinks), 0, rows))
        made["dsinks"] = -(weight * less).sum(axis=(0, 2))
    score = () if p.score_mod is None else p.score_mod.arrays
    types = {f"d:{spec.name}": spec.dtype for spec in score}
    return {
        name: _rounded(arrays.as_library_of(job.q, x), types.get(name, "float32"))
        for name, x in made.items()
    }


def _rounded(array: Any, dtype: str) -> Any:
    """Convert an array to the element type with this name."""
    if arrays.dtype_name(array) == dtype:
        return array
    if arrays.is_torch(array):
        import torch

        return array.to(getattr(torch, dtype))
    return array.astype(numpy_dtype(dtype))


def _at(address: int, shape: tuple[int, ...], space: arrays.Space) -> cupy.ndarray:
    """Return a float32 array over the memory at an address, which the caller must keep alive."""
    size = 4 * int(np.prod(shape))
    memory = cupy.cuda.UnownedMemory(address, size, None, space.device)
    return cupy.ndarray(shape, np.float32, cupy.cuda.MemoryPointer(memory, 0))


@lru_cache(maxsize=64)
def _of_mask(mask: MaskFunction, device: int) -> list[cupy.ndarray]:
    """Return a mask function's captured arrays in GPU memory, cached per mask and device."""
    specs, values = arrays_of_mask(mask)
    made = [_typed(x, spec) for x, spec in zip(values, specs, strict=True)]
    cupy.cuda.get_current_stream().synchronize()  # other streams may use the arrays from now on
    return made


def _typed(array: Any, spec: ArraySpec) -> cupy.ndarray:
    """Return a contiguous array of the type that kernels read, copied only if necessary."""
    if spec.dtype == "bfloat16":
        # float32 values, converted to the type that kernels read
        if isinstance(array, np.ndarray) and array.dtype == np.float32:
            array = (array.view(np.uint32) >> 16).astype(np.uint16)
        return cupy.ascontiguousarray(_on_gpu(array))
    return cupy.ascontiguousarray(_on_gpu(array).astype(spec.dtype, copy=False))


def _on_gpu(array: Any) -> cupy.ndarray:
    """Return an array of any library as a CuPy array on the current device, copied if necessary."""
    if isinstance(array, np.ndarray):
        return arrays.upload(np.ascontiguousarray(array))
    if arrays.is_torch(array):
        array = array.detach()
        return arrays.upload(array.numpy()) if array.device.type == "cpu" else _of_torch(array)
    if hasattr(array, "__cuda_array_interface__"):
        return cupy.asarray(array)
    return arrays.upload(np.ascontiguousarray(np.asarray(array)))


def _of_torch(tensor: Any) -> cupy.ndarray:
    """Return a CUDA tensor as a CuPy array; a bfloat16 tensor becomes an array of raw bits."""
    import torch

    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return cupy.from_dlpack(tensor)
