"""`quantize`: round q, k and v to FP8, and return scales for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsim import report
from flashsim.api import array_libraries, dispatch, inputs
from flashsim.api.arrays import require_numpy, squeeze
from flashsim.api.request import adopted
from flashsim.errors import DTypeError, OptionError, ShapeError, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.problem import numpy_dtype
from flashsim.problem.rotation import random_signs, rotated, unrotated

GRANULARITIES = ("tensor", "head", "block")
ROTATIONS = ("hadamard",)


@own_errors
@dataclass(frozen=True, eq=False)
class Quantized:
    """Attention inputs in FP8, with scales by which the elements are multiplied.

    To run attention on a `Quantized` object `x`: ``flashsim.run(x.q, x.k, x.v, **x.options)``.

    Attributes
    ----------
    q, k, v : array of an FP8 type, of the inputs' library and shape
    q_scale, k_scale, v_scale : array of float32, of the same library
        One scale per tensor: shape (). One per head: the shape of q (k, v) without its last two
        axes. One per block: one more axis, of length ceil(n / rows per block).
    granularity : {"tensor", "head", "block"}
    block : (int, int) or None
        The number of query rows, and of key rows, that share a scale.
    rotate : {"hadamard"} or None
        The rotation of q and k.
    signs : ndarray (head_dim,) or None
        The rotation's signs: M = diag(signs) H / sqrt(head_dim).
    v_transposed : array or None
        On a GPU, V in the layout that the FP8 kernel reads (docs/reference/hopper.md). `options`
        contains it, so that `run` does not transpose V.
    """

    q: Any
    k: Any
    v: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    granularity: str
    block: tuple[int, int] | None
    rotate: str | None
    signs: np.ndarray | None
    v_transposed: Any = None

    __repr__ = report.short
    _repr_html_ = report.card

    @property
    def scales(self) -> tuple[Any, Any, Any]:
        """Return the three arrays of scales, of q, k and v."""
        return self.q_scale, self.k_scale, self.v_scale

    @property
    def options(self) -> dict[str, Any]:
        """Return the keywords to pass to `flashsim.run` together with q, k and v."""
        block = {} if self.block is None else {"scale_block": self.block}
        extra = {} if self.v_transposed is None else {"v_transposed": self.v_transposed}
        return {"scales": self.scales, **block, **extra}

    def dequantized(self) -> tuple[Any, Any, Any]:
        """Return q, k and v in float32, with scales applied and the rotation undone."""
        rows = self.block or (1, 1)
        sides = {"q": rows[0], "k": rows[1], "v": rows[1]}
        arrays = []
        for name, side in sides.items():
            scale = f"{name}_scale"
            pair = {name: getattr(self, name), scale: getattr(self, scale)}
            host, (x, factors) = array_libraries.take_anywhere(**pair)
            wide = x.astype(np.float32) * _spread(factors, x, side)
            if self.signs is not None and name != "v":
                wide = unrotated(wide, self.signs)
            arrays.append(host.give(wide))
        q, k, v = arrays
        return q, k, v

    def unrotated(self, x: Any) -> Any:
        """Undo the rotation of q, k, dq or dk; out and dv are never rotated."""
        if self.signs is None:
            return x
        host, (here,) = array_libraries.take_anywhere(x=x)
        return host.give(unrotated(here, self.signs))


@own_errors
def quantize(
    q: Any,
    k: Any,
    v: Any,
    *,
    granularity: str = "head",
    rotate: str | None = None,
    block: tuple[int, int] = (64, 128),
    dtype: str = "float8_e4m3fn",
    seed: int = 0,
    backend: str = "simulator",
) -> Quantized:
    """Round q, k and v to FP8; scales map the largest element to the FP8 type's largest number.

    Parameters
    ----------
    q : array, (batch, heads, n_q, head_dim); leading axes may be left out
    k, v : array, (batch, kv_heads, n_kv, head_dim or head_dim_v)
        On the CPU: float64, float32, float16 or bfloat16, from any library that `run` takes. On a
        GPU (Hopper or later): float16 or bfloat16, with head_dim 64, 128 or 256. Results come from
        the same library.
    granularity : {"tensor", "head", "block"}
        One scale per tensor (q, k and v), per head, or per block of rows of a head, as in
        FlashAttention-3 (arXiv:2407.08608, section 3.3).
    rotate : "hadamard", optional
        Multiply q and k by one random orthogonal matrix first. Their products stay the same, and
        outliers are spread (`flashsim.problem.rotation`). head_dim must be a power of two. The
        result's `unrotated` rotates gradients back.
    block : (int, int)
        For granularity "block" only: query rows and key rows of a block. The default fits every
        tile of the GPU's kernels.
    dtype : {"float8_e4m3fn", "float8_e5m2"}
    seed : int
        Seed of the rotation's signs.
    backend : {"simulator", "cupy"}
        "cupy" runs one kernel on the GPU that holds the arrays. It does not check for NaN and
        infinity. Its results are the same, except for elements half way between two FP8 numbers.

    Raises
    ------
    ShapeError, DTypeError, OptionError, UnsupportedError, BackendUnavailable
        Also for NaN and infinity, which have no scale.
    """
    backend = dispatch.backend_name(backend, ("simulator", "cupy"))
    checks.one_of("granularity", granularity, GRANULARITIES)
    checks.one_of("FP8 dtype", dtype, checks.FP8)
    if rotate is not None:
        checks.one_of("rotate", rotate, ROTATIONS)
    if not isinstance(block, (tuple, list)) or len(block) != 2:
        raise ShapeError(f"block= must be a pair (query rows, key rows), got {shown(block)}")
    rows, keys = (checks.positive_int("rows of a block", x) for x in block)
    host = array_libraries.host_of(q)
    if backend == "simulator":
        q, k, v = array_libraries.take(host, q=q, k=k, v=v)
    else:
        engine = dispatch.engine(backend)  # raises if a package is missing
        q, k, v = (adopted(engine, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    prepared = inputs.prepare(q, k, v)
    if prepared.problem.fp8:
        raise DTypeError(
            f"q, k and v are {prepared.problem.dtype} already; pass float16, bfloat16 or float32 "
            "arrays"
        )
    about: dict[str, Any] = {
        "granularity": granularity,
        "block": (rows, keys) if granularity == "block" else None,
        "rotate": rotate,
        "signs": None
        if rotate is None
        else random_signs(prepared.problem.head_dim, checks.seed(seed)),
    }
    if backend == "cupy":
        return _on_gpu(prepared, about, (rows, keys), dtype)
    require_numpy("simulator", q=q, k=k, v=v)
    with np.errstate(over="ignore"):  # refused below, by name
        wide = {name: x.astype(np.float32) for name, x in {"q": q, "k": k, "v": v}.items()}
    for name, x in wide.items():
        if not np.isfinite(x).all():
            raise OptionError(
                f"{name} contains NaN or infinity (in float32), which cannot be scaled; remove "
                "them first"
            )
    if rotate is not None:
        wide |= {name: rotated(wide[name], about["signs"]) for name in "qk"}
    sides = {"q": rows, "k": keys, "v": keys}
    rounded = {name: _quantized(x, granularity, sides[name], dtype) for name, x in wide.items()}
    arrays: dict[str, Any] = {name: host.give(x) for name, (x, _) in rounded.items()}
    scales = {f"{name}_scale": host.give(scale) for name, (_, scale) in rounded.items()}
    return Quantized(**arrays, **scales, **about)


def _on_gpu(
    prepared: inputs.Inputs, about: dict[str, Any], block: tuple[int, int], dtype: str
) -> Quantized:
    """Quantize on a GPU with `flashsim.backends.cupy_gpu.quantize`, and keep the number of axes."""
    import flashsim.backends.cupy_gpu.quantize as gpu

    p = prepared.problem
    if p.head_dim != p.head_dim_v:
        raise ShapeError(
            f"quantize on a GPU needs q and v of the same head_dim, got {p.head_dim} and "
            f"{p.head_dim_v}"
        )
    kind, signs = about["granularity"], about["signs"]
    rounded = gpu.quantize(prepared.q, prepared.k, prepared.v, kind, block, signs, dtype)
    arrays = {name: squeeze(getattr(rounded, name), prepared.ndim) for name in "qkv"}
    axes = {"tensor": 0, "head": prepared.ndim - 2, "block": prepared.ndim - 1}[kind]
    scales = {n: squeeze(getattr(rounded, n), axes) for n in ("q_scale", "k_scale", "v_scale")}
    return Quantized(**arrays, **scales, **about, v_transposed=rounded.v_transposed)


def _quantized(
    x: np.ndarray, granularity: str, side: int, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the array `x` rounded to FP8, and its float32 scales."""
    import ml_dtypes

    kind = numpy_dtype(dtype)
    size = np.abs(x)
    if granularity == "tensor":
        most = size.max()
    else:
        most = size.max(axis=-1)
        starts = np.arange(0, x.shape[-2], side if granularity == "block" else x.shape[-2])
        most = np.maximum.reduceat(most, starts, axis=-1)
        most = most if granularity == "block" else most[..., 0]
    largest = np.float32(ml_dtypes.finfo(kind).max)
    scale = most / largest  # 0 for zeros, and for numbers that are too small for a scale in float32
    scale = np.asarray(np.where(scale == 0, 1, scale), np.float32)
    # A quotient may come out one rounding above the largest number, and e4m3 has no infinity.
    scaled = np.clip(x / _spread(scale, x, side), -largest, largest)
    return scaled.astype(kind), scale


def _spread(scale: np.ndarray, x: np.ndarray, side: int) -> np.ndarray:
    """Return the scales of `x`'s rows in a shape that broadcasts against `x`."""
    if scale.ndim == x.ndim - 1:
        return scale[..., np.arange(x.shape[-2]) // side, None]
    return scale.reshape(*scale.shape, *(1,) * (x.ndim - scale.ndim))


__all__ = ["Quantized", "quantize"]
