"""Quantise 16-bit q, k and v to FP8 on a GPU, and also transpose V for the forward pass."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import cupy
import numpy as np

from flashsim.backends import failures
from flashsim.backends.cupy_gpu import arrays, engine, fp8
from flashsim.backends.launch.kernel import whole_sixteens
from flashsim.backends.launch_policy import quantize as family
from flashsim.errors import DTypeError


class Fp8Arrays(NamedTuple):
    """FP8 arrays and their scales, in the inputs' library.

    Attributes
    ----------
    q, k, v : (batch, heads, n, d)
    q_scale, k_scale, v_scale : float32, (), (batch, heads) or (batch, heads, blocks)
    v_transposed : (batch, kv_heads, d, n_kv rounded up to a multiple of 16)
        V^T as the kernel reads it: each group of 16 keys is permuted (kernels/hopper/quantize.cu).
    """

    q: Any
    k: Any
    v: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    v_transposed: Any


def quantize(
    q: Any,
    k: Any,
    v: Any,
    granularity: str,
    block: tuple[int, int],
    signs: np.ndarray | None,
    dtype: str,
) -> Fp8Arrays:
    """Round 16-bit arrays to FP8, and return them with their scales and a transposed V.

    The arrays q, k and v are on a GPU, with shape (batch, heads, n, d). The FP8 `dtype` is
    "float8_e4m3fn" or "float8_e5m2", and the granularity "tensor", "head" or "block". With "block",
    `block` holds two numbers: how many rows of Q, and how many rows of K and V, share a scale. If
    `signs` (d,) is passed, q and k are first multiplied by diag(signs) H / sqrt(d), where H is the
    Hadamard matrix. The function needs only one launch if each scale covers 64 or 128 rows.
    """
    engine.require_gpu()
    if isinstance(q, np.ndarray):
        raise DTypeError(
            "quantize on a GPU needs arrays in GPU memory, got NumPy arrays; move them to the "
            "GPU, or use backend='simulator'"
        )
    kind = arrays.dtype_name(q)
    space = arrays.space_of({"q": q, "k": k, "v": v}, kind)
    family.check_gpu(engine.gpu_of(space.device))
    rotate = {"rotate": signs is not None, "e5m2": dtype == "float8_e5m2"}
    made = family.kernels(q.shape[-1], kind, granularity, block, **rotate)
    with failures.Explaining(), space.on_device():
        inputs = {name: space.view(x) for name, x in zip("qkv", (q, k, v), strict=True)}
        like = space.prototype(dtype)
        out = {
            name + "8": space.empty(x.shape, like) for name, x in zip("qkv", (q, k, v), strict=True)
        }
        batch, kv_heads, n_kv, d = k.shape
        out["vt"] = space.empty((batch, kv_heads, d, whole_sixteens(n_kv)), like)
        largest, shapes = {}, []
        for name, x, rows in (("q", q, block[0]), ("k", k, block[1]), ("v", v, block[1])):
            shapes.append(family.scale_shape(granularity, batch, x.shape[1], x.shape[2], rows))
            out[f"{name}_scale"] = space.empty(shapes[-1])
        if len(made) > 1:
            *ends, total = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
            with space.active():
                # all zeroed by one launch
                parts = cupy.split(space.zeros((total,), "uint32"), ends)
            largest = dict(zip(("q_largest", "k_largest", "v_largest"), parts, strict=True))
        if signs is not None:
            with space.active():
                largest["signs"] = _uploaded(signs.astype(np.float32).tobytes(), space.device)
        fp8.launch(made, space, inputs, out | largest, tuple(q.shape), tuple(k.shape))
        narrow = {name: out[f"{name}8"] for name in "qkv"}
        scales = {f"{name}_scale": out[f"{name}_scale"] for name in "qkv"}
        return Fp8Arrays(**narrow, **scales, v_transposed=out["vt"])


@lru_cache(maxsize=64)
def _uploaded(signs: bytes, device: int) -> cupy.ndarray:
    """Return a Hadamard rotation's signs in GPU memory, cached per device."""
    made = cupy.asarray(np.frombuffer(signs, np.float32))
    cupy.cuda.get_current_stream().synchronize()  # other streams may use them from now on
    return made
