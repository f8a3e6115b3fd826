"""`quantize`: q, k and v in FP8, each block with a scale of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsim import report
from flashsim.api import hosts, inputs
from flashsim.errors import DTypeError, OptionError, ShapeError, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.problem import numpy_dtype
from flashsim.problem.rotation import random_signs, rotated, unrotated

GRANULARITIES = ("tensor", "head", "block")
ROTATIONS = ("hadamard",)


@own_errors
@dataclass(frozen=True, eq=False)
class Quantized:
    """Attention inputs in FP8: an element stands for itself times its scale.

    ``flashsim.run(x.q, x.k, x.v, **x.options)`` runs on them.

    Attributes
    ----------
    q, k, v : ndarray of an FP8 type, shaped as they were given
    q_scale, k_scale, v_scale : ndarray of float32
        Shaped () for a tensor; for a head, as q (k, v) without its last two axes; for a block, with
        one axis more, of ceil(n / rows of a block).
    granularity : {"tensor", "head", "block"}
    block : (int, int) or None
        Query rows, and key rows, that share a scale.
    rotate : {"hadamard"} or None
        What q and k were multiplied by.
    signs : ndarray (head_dim,) or None
        Of the rotation: M = diag(signs) H / sqrt(head_dim).
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_scale: np.ndarray
    k_scale: np.ndarray
    v_scale: np.ndarray
    granularity: str
    block: tuple[int, int] | None
    rotate: str | None
    signs: np.ndarray | None

    __repr__ = report.short
    _repr_html_ = report.card

    @property
    def scales(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of q, k and v."""
        return self.q_scale, self.k_scale, self.v_scale

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `run` that say how the numbers are meant."""
        block = {} if self.block is None else {"scale_block": self.block}
        return {"scales": self.scales, **block}

    def dequantized(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What q, k and v stand for, float32, not rotated."""
        rows = self.block or (1, 1)
        sides = rows[0], rows[1], rows[1]
        q, k, v = (
            x.astype(np.float32) * _spread(scale, x, side)
            for x, scale, side in zip((self.q, self.k, self.v), self.scales, sides, strict=True)
        )
        return self.unrotated(q), self.unrotated(k), v

    def unrotated(self, x: np.ndarray) -> np.ndarray:
        """Rows of q or k, or of their gradients, turned back; out and dv never were turned."""
        return x if self.signs is None else unrotated(x, self.signs)


@own_errors
def quantize(
    q: Any,
    k: Any,
    v: Any,
    *,
    granularity: str = "head",
    rotate: str | None = None,
    block: tuple[int, int] = (128, 128),
    dtype: str = "float8_e4m3fn",
    seed: int = 0,
) -> Quantized:
    """Round q, k and v to FP8, scaled so that the largest element is the type's largest number.

    Parameters
    ----------
    q : array, (batch, heads, n_q, head_dim); leading axes may be left out
    k, v : array, (batch, kv_heads, n_kv, head_dim or head_dim_v)
        On the CPU, float64, float32, float16 or bfloat16.
    granularity : {"tensor", "head", "block"}
        What has a scale of its own: each of q, k and v; each of their heads; each block of rows of
        a head, as FlashAttention-3 has it (arXiv:2407.08608, section 3.3).
    rotate : "hadamard", optional
        Multiply q and k by one random orthogonal matrix first, which leaves their products as they
        are and spreads outliers (`flashsim.problem.rotation`); head_dim must be a power of two. The
        result's `unrotated` turns gradients back.
    block : (int, int)
        Query rows and key rows of a block.
    dtype : {"float8_e4m3fn", "float8_e5m2"}
    seed : int
        Of the rotation's signs.

    Raises
    ------
    ShapeError, DTypeError, OptionError
        Also for what is not finite: it has no scale.
    """
    checks.one_of("granularity", granularity, GRANULARITIES)
    checks.one_of("FP8 dtype", dtype, checks.FP8)
    if rotate is not None:
        checks.one_of("rotate", rotate, ROTATIONS)
    if not isinstance(block, (tuple, list)) or len(block) != 2:
        raise ShapeError(f"block must be (query rows, key rows), got {shown(block)}")
    rows, keys = (checks.positive_int("rows of a block", x) for x in block)
    q, k, v = hosts.take(hosts.host_of(q), q=q, k=k, v=v)
    given = inputs.prepare(q, k, v)
    if given.problem.fp8:
        raise DTypeError(f"q, k and v are {given.problem.dtype} already; give wider ones")
    inputs.require_numpy("numpy", q=q, k=k, v=v)
    wide = {name: x.astype(np.float32) for name, x in {"q": q, "k": k, "v": v}.items()}
    for name, x in wide.items():
        if not np.isfinite(x).all():
            raise OptionError(f"{name} holds NaN or infinity (as float32), which no scale fits")
    signs = None
    if rotate is not None:
        signs = random_signs(given.problem.head_dim, checks.seed(seed))
        wide |= {name: rotated(wide[name], signs) for name in "qk"}
    sides = {"q": rows, "k": keys, "v": keys}
    made = {name: _quantized(x, granularity, sides[name], dtype) for name, x in wide.items()}
    arrays = {name: x for name, (x, _) in made.items()}
    scales = {f"{name}_scale": scale for name, (_, scale) in made.items()}
    shared = (rows, keys) if granularity == "block" else None
    return Quantized(
        **arrays, **scales, granularity=granularity, block=shared, rotate=rotate, signs=signs
    )


def _quantized(
    x: np.ndarray, granularity: str, side: int, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """`x` in FP8, and its scale."""
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
    scale = np.asarray(np.where(most == 0, 1, most / largest), np.float32)
    # A quotient may come out one rounding above the largest number, and e4m3 has no infinity.
    scaled = np.clip(x / _spread(scale, x, side), -largest, largest)
    return scaled.astype(kind), scale


def _spread(scale: np.ndarray, x: np.ndarray, side: int) -> np.ndarray:
    """The scale of every row of `x`, so that the two can be multiplied."""
    if scale.ndim == x.ndim - 1:
        return scale[..., np.arange(x.shape[-2]) // side, None]
    return scale.reshape(*scale.shape, *(1,) * (x.ndim - scale.ndim))


__all__ = ["Quantized", "quantize"]
