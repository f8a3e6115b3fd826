"""Check the scales of FP8 inputs that are passed to `run`."""

from typing import Any

import numpy as np

from flashsim.api import array_libraries
from flashsim.api.arrays import require_numpy
from flashsim.errors import DTypeError, OptionError, ShapeError, UnsupportedError, shown
from flashsim.problem import checks
from flashsim.problem.problem import Problem
from flashsim.schedule.tensors import INPUTS, rows_a_scale
from flashsim.schedule.tiling import Tiling

#: The value of ``scales=`` for FP8 elements without scales.
UNSCALED = "unscaled"


def said(scales: Any) -> Any:
    """Return a call's three scales, with numbers as float32 arrays; None for "unscaled"."""
    if isinstance(scales, str) and scales == UNSCALED:
        return None
    if not isinstance(scales, (tuple, list)) or len(scales) != 3:
        raise DTypeError(
            f"scales= must be {UNSCALED!r} or three arrays or numbers, for q, k and v, got "
            f"{shown(scales)}; after x = flashsim.quantize(q, k, v), pass scales=x.scales"
        )
    return tuple(map(_number, scales))


def _number(value: Any) -> Any:
    """Return a number as a float32 array of shape (); return anything else unchanged."""
    if not checks.is_int(value) and not isinstance(value, (float, np.floating)):
        return value
    with np.errstate(over="ignore"):  # refused by its value
        return np.asarray(value, np.float32)


def require(dtype: str) -> None:
    """Raise an `OptionError`: inputs of the FP8 type `dtype` need `scales`."""
    raise OptionError(
        f"q, k and v are {dtype}, and FP8 inputs need scales; pass the options that "
        "flashsim.quantize returns, as in run(x.q, x.k, x.v, **x.options), or "
        f"scales={UNSCALED!r} if all scales are 1"
    )


def refuse(dtype: str, who: str) -> None:
    """Raise `UnsupportedError` if `dtype` is FP8, because the caller `who` takes no scales."""
    if dtype in checks.FP8:
        raise UnsupportedError(
            f"{who} takes no scales=, but {dtype} inputs need scales; convert to bfloat16, or "
            "call flashsim.run(q, k, v, scales=...)"
        )


def granularity(
    scales: Any, block: Any, ndim: int, tiling: Tiling | None
) -> str | tuple[int, int] | None:
    """Return what has one FP8 scale: a "tensor", a "head", or a block (rows of q, rows of k)."""
    if scales is None:
        if block is not None:
            raise OptionError(
                "scale_block= is the number of rows per scale, so it needs scales=; pass "
                "scales= too, or leave out scale_block="
            )
        return None
    kinds = {len(np.shape(scale)) - (ndim - 2) for scale in scales}
    if all(len(np.shape(scale)) == 0 for scale in scales) and ndim > 2:
        kind: str | tuple[int, int] = "tensor"
    elif kinds == {0}:
        kind = "head"
    elif kinds == {1}:
        if block is not None:
            return block
        if tiling is None:
            raise OptionError(
                "scales per block need the size of a block; pass scale_block=(query rows, key "
                "rows), or pass tiling=, so that the blocks are its tiles"
            )
        return tiling.block_q, tiling.block_k
    else:
        shapes = ", ".join(str(np.shape(scale)) for scale in scales)
        raise ShapeError(
            "the scales of q, k and v must all have shape () for one per tensor, (batch, heads) "
            "for one per head, or (batch, heads, blocks) for one per block, except for axes that "
            f"q lacks; got shapes {shapes}"
        )
    if block is not None:
        raise OptionError(
            f"scale_block= is for scales per block, but these scales are one per {kind}; leave "
            "out scale_block="
        )
    return kind


def checked(problem: Problem, scales: Any, *, values: bool) -> tuple[Any, ...]:
    """Return the scales of q, k and v, of shape (), (batch, heads) or (batch, heads, blocks).

    If `values` is true, the scales' numbers are checked too, so the scales must be in CPU memory.
    """
    p, checked_scales = problem, []
    for name, scale in zip(INPUTS, scales, strict=True):
        heads, n = (p.heads, p.n_q) if name == "Q" else (p.kv_heads, p.n_kv)
        shape: tuple[int, ...] = () if p.scales == "tensor" else (p.batch, heads)
        if isinstance(p.scales, tuple):
            shape = (*shape, -(-n // rows_a_scale(p, name)))
        dtype = str(getattr(scale, "dtype", type(scale).__name__)).removeprefix("torch.")
        if dtype != "float32":
            raise DTypeError(f"the scale of {name.lower()} must be a float32 array, got {dtype}")
        if values:
            (scale,) = array_libraries.take(
                array_libraries.host_of(scale), **{f"scale of {name.lower()}": scale}
            )
            require_numpy("simulator", **{f"scale of {name.lower()}": scale})
        actual = tuple(scale.shape)
        if (1,) * (len(shape) - len(actual)) + actual != shape:
            raise ShapeError(f"the scale of {name.lower()} must have shape {shape}, got {actual}")
        if values and not (np.isfinite(scale) & (scale > 0)).all():
            raise OptionError(
                f"the scale of {name.lower()} must be positive and finite, but it contains other "
                "values"
            )
        checked_scales.append(scale.reshape(shape))
    return tuple(checked_scales)
