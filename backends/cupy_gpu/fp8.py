"""Prepare a transposed V and the scales for the Hopper FP8 forward pass."""

import math
from functools import cache
from typing import Any

import cupy
import numpy as np

from flashsim.backends.cupy_gpu import arrays
from flashsim.backends.cupy_gpu.launching import launch_once
from flashsim.backends.launch.kernel import Kernel, whole_sixteens
from flashsim.backends.launch_policy import quantize as family
from flashsim.engines.protocol import Job
from flashsim.errors import ShapeError

_SCALES = ("q_scale", "k_scale", "v_scale")


def transposed(space: arrays.Space, job: Job, v: arrays.View) -> arrays.View:
    """Return V^T, in which the keys are permuted as the kernel expects.

    The result is the option `v_transposed`, or a new array if the caller did not pass this option.
    If `v_transposed` does not belong to V, the function raises `ShapeError` or `DTypeError`.
    """
    p = job.problem
    shape = p.batch, p.kv_heads, p.head_dim_v, whole_sixteens(p.n_kv)
    given = job.options.get("v_transposed")
    if given is not None:
        arrays.check_space("v_transposed", given, p.result_dtype, space)
        if tuple(given.shape) != shape:
            raise ShapeError(
                f"v_transposed must have shape {shape}, got {tuple(given.shape)}; pass the "
                "v_transposed that flashsim.quantize returned for this v, or leave out "
                "v_transposed="
            )
        return space.view(given)
    rows = p.batch, p.kv_heads, p.n_kv, p.head_dim_v
    made = space.empty(shape, v.array)
    launch((family.transposition(p.head_dim_v),), space, {"v": v}, {"vt": made}, None, rows)
    return space.view(made)._replace(copied=v.copied + math.prod(shape))


def scales(space: arrays.Space, job: Job) -> dict[str, Any]:
    """Return the scales of q, k and v as contiguous GPU arrays by name, or raise `DTypeError`."""
    given = job.options.get("scales") or ()
    found = {}
    for name, one in zip(_SCALES, given, strict=False):
        if isinstance(one, np.ndarray) and one.size == 1:  # a single number, in any memory
            with space.active():
                found[name] = cupy.asarray(one)
            continue
        arrays.check_space(name, one, job.problem.result_dtype, space)
        found[name] = space.vector(one)
    return found


def launch(
    kernels: tuple[Kernel, ...],
    space: arrays.Space,
    inputs: dict[str, arrays.View],
    others: dict[str, Any],
    q: Any,
    k: Any,
) -> None:
    """Launch these kernels of kernels/hopper/quantize.cu in order, on the space's stream.

    `inputs` maps the names of the inputs (among q, k and v) to arrays. `others` maps the names of
    all other arrays of ``struct Args`` to arrays. `q` and `k` are the shapes of Q (None without Q)
    and of K.
    """
    record = np.zeros((), family.ARGS)
    for name, view in inputs.items():
        record[name] = view.place
    for name, array in others.items():
        record[name] = space.pointer(array)
    integers, blocks = family.sizes(q, k, _processors(space.device))
    for name, value in integers.items():
        record[name] = value
    for kernel in kernels:
        launch_once(kernel, (blocks, 1), record, space)


@cache
def _processors(device: int) -> int:
    return int(cupy.cuda.runtime.getDeviceProperties(device)["multiProcessorCount"])
