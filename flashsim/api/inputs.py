"""Turn the user's arrays and keywords into a checked `Problem` and 4-D arrays, without a copy."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from flashsim.api.arrays import check_finite, expand, name_of, shape_of
from flashsim.api.dispatch import BACKENDS, ON_CPU
from flashsim.api.kv_cache import paged_shapes
from flashsim.errors import (
    DTypeError,
    MaskError,
    OptionError,
    ShapeError,
    UnsupportedError,
    shown,
)
from flashsim.functions.mask import MaskFunction
from flashsim.functions.tracing import Traced, host_values, trace_score
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.masks import BlockMask
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.schedule import KEY_ORDERS
from flashsim.schedule.tiling import Tiling

AXES = {2: "(n, d)", 3: "(heads, n, d)", 4: "(batch, heads, n, d)"}

#: Options of algorithms that split the keys (`Split`), and of KV caches.
DECODING = ("splits", "pack_gqa", "cache_seqlens", "block_table", "shared_prefix", "head_dim_v")


class Request(NamedTuple):
    """All keyword arguments of `run` or `backward` except `bias`, with their defaults."""

    causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    scale: float | None = None
    mask: Callable[..., Any] | None = None
    block_mask: Any = None
    cu_seqlens_q: Sequence[int] | None = None
    cu_seqlens_k: Sequence[int] | None = None
    algorithm: str = "flash2"
    tiling: Tiling | None = None
    device: str | Device = "H100"
    backend: str = "simulator"
    key_order: str = "ascending"
    nan_policy: str = "propagate"
    trace: bool | str = False
    mask_mod: Any = None
    score_mod: Any = None
    sinks: Any = None
    options: tuple[tuple[str, Any], ...] = ()


class Inputs(NamedTuple):
    """Checked 4-D arrays and their problem; `ndim` is the number of axes of the user's arrays.

    If the batch, the queries or the keys have size 0, `empty` is True. An empty problem has size 1
    instead of 0, and no offsets, block mask or functions. `score` is the traced score function,
    also of an empty problem, with the arrays that it captures as the user passed them.
    """

    problem: Problem
    q: Any
    k: Any
    v: Any
    bias: Any
    ndim: int
    empty: bool = False
    sinks: Any = None
    score_arrays: tuple[Any, ...] = ()
    mask_arrays: tuple[Any, ...] = ()
    score: Traced | None = None


def offsets(cu_seqlens: Any) -> Any:
    """Return the offsets of packed sequences; convert a tensor to a tuple.

    A tensor cannot be a cache key, because it may change later. Reading a tensor from a GPU waits
    for the GPU.
    """
    if isinstance(cu_seqlens, np.ndarray) or not hasattr(cu_seqlens, "tolist"):
        return cu_seqlens
    values = cu_seqlens.tolist()
    return tuple(values) if isinstance(values, list) else values


def check_tiling(tiling: Any) -> None:
    """Raise `DTypeError` unless `tiling` is a `Tiling` or None."""
    if tiling is not None and not isinstance(tiling, Tiling):
        raise DTypeError(f"tiling must be a flashsim.Tiling(block_q, block_k), got {shown(tiling)}")


def check_key_order(key_order: str) -> Any:
    """Return `key_order`; raise if no key order has that name."""
    return checks.one_of("key_order", key_order, KEY_ORDERS)


def check_trace_mode(trace: bool | str, backend: str) -> bool | str:
    """Return `trace`; raise unless it is True, False or, on a GPU backend, "timeline"."""
    timeline = isinstance(trace, str) and trace == "timeline"
    if not timeline and not isinstance(trace, (bool, np.bool_)):
        raise OptionError(f"trace must be True, False or 'timeline', got {shown(trace)}")
    if timeline and backend in ON_CPU:
        raise UnsupportedError(
            "trace='timeline' records when a GPU ran each part of the work, so it needs one of "
            f"the GPU backends ({' and '.join(b for b in BACKENDS if b not in ON_CPU)}); pass "
            "one as backend=, or pass trace=True"
        )
    return trace if timeline else bool(trace)


def prepare(
    q: Any,
    k: Any,
    v: Any,
    request: Request = Request(),  # noqa: B008  (it is immutable)
    *,
    bias: Any = None,
    block_table: Any = None,
    latent: bool = False,
    scales: Any = None,
    may_be_empty: bool = False,
    on_cpu: bool = True,
) -> Inputs:
    """Check that the arrays fit together, and return them as 4-D arrays with their `Problem`.

    If `may_be_empty` is true, the batch, the queries or the keys may have size 0. If `on_cpu` is
    true, captured arrays are converted to NumPy arrays.
    """
    shapes: tuple[tuple[int, ...], ...] = shape_of("q", q), shape_of("k", k), shape_of("v", v)
    if block_table is not None:
        shapes = paged_shapes(shapes, block_table)
        if request.nan_policy == "raise":
            raise OptionError(
                "nan_policy='raise' cannot be combined with block_table=, because it would also "
                "check rows of pages that no sequence uses; leave out nan_policy=, and check k "
                "and v when you write them"
            )
    ndim = _same_ndim(shapes, may_be_empty)
    dtype = name_of(q.dtype)
    if not q.dtype == k.dtype == v.dtype and not dtype == name_of(k.dtype) == name_of(v.dtype):
        raise DTypeError(
            "q, k and v must have one dtype, got "
            + ", ".join(f"{name} {name_of(x.dtype)}" for name, x in (("q", q), ("k", k), ("v", v)))
        )
    of_q, of_k, of_v = ((1,) * (4 - ndim) + shape for shape in shapes)
    _check_shapes(of_q, of_k, of_v)
    batch, heads, n_q, d = of_q
    n_kv, leading = of_k[2], None
    if bias is not None:
        shape = _bias_shape(bias, dtype, (batch, heads, n_q, n_kv))
        bias = bias.reshape(shape)
        leading = bias.shape[0], bias.shape[1]
    offsets_q, offsets_k = offsets(request.cu_seqlens_q), offsets(request.cu_seqlens_k)
    block_mask = request.block_mask
    if block_mask is not None:
        block_mask = _block_mask(block_mask, request.tiling)
    empty = 0 in (batch, n_q, n_kv)
    if empty:
        if offsets_q is not None and offsets_k is not None:
            checks.packed(offsets_q, offsets_k, batch, n_q, n_kv)
            offsets_q = offsets_k = None
        block_mask = None
        leading = None if leading is None else (max(leading[0], 1), leading[1])
    mask_mod, score_mod, sinks = request.mask_mod, request.score_mod, request.sinks
    score = None if score_mod is None else trace_score(score_mod)
    mask_arrays: tuple[Any, ...] = ()
    score_arrays: tuple[Any, ...] = ()
    if mask_mod is not None:
        mask_mod = MaskFunction.of(mask_mod)
        mask_arrays = mask_mod.originals
    if score is not None:
        score_mod, score_arrays = score
        if on_cpu:
            pairs = zip(score_arrays, score_mod.arrays, strict=True)
            score_arrays = tuple(host_values(x, spec, copy=False) for x, spec in pairs)
    if empty:  # there is no score
        mask_mod = score_mod = None
    fields: dict[str, Any] = {
        **{"n_q": max(n_q, 1), "n_kv": max(n_kv, 1), "head_dim": d, "head_dim_v": of_v[3]},
        **{"batch": max(batch, 1), "heads": heads, "kv_heads": of_k[1], "dtype": dtype},
        **{"causal": request.causal, "window": request.window, "softcap": request.softcap},
        **{"scale": request.scale, "mask": request.mask, "block_mask": block_mask},
        **{"cu_seqlens_q": offsets_q, "cu_seqlens_k": offsets_k, "bias": leading},
        **{"latent": latent, "scales": tuple(scales) if isinstance(scales, list) else scales},
        **{"mask_mod": mask_mod, "score_mod": score_mod, "sinks": sinks is not None},
    }
    try:
        problem = _same_problem(**fields)
    except TypeError:  # an unhashable argument, such as a list as the window; or an error
        problem = Problem(**fields)
    checks.one_of("nan_policy", request.nan_policy, ("propagate", "raise"))
    if request.nan_policy == "raise":
        for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)):
            if x is not None:
                check_finite(name, x)
    if ndim < 4:
        q, k, v = expand(q), expand(k), expand(v)
    if sinks is not None and (on_cpu or not hasattr(sinks, "shape")):
        sinks = checks.sinks(sinks, problem.heads).astype(problem.compute_dtype, copy=False)
    elif sinks is not None:
        checks.sinks_shape(sinks, problem.heads)
    checked_parts = problem, q, k, v, bias, ndim, empty
    return Inputs(*checked_parts, sinks, score_arrays, mask_arrays, score)


#: The same arguments are validated only once, because it takes a large part of a short GPU call.
_same_problem = lru_cache(maxsize=256, typed=True)(Problem)


def values_in_keys(k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, bool]:
    """Return V, and whether V is the first `head_dim_v` columns of k, in which case `v` is None.

    `head_dim_v` is removed from `options`.
    """
    width = options.pop("head_dim_v", None)
    if width is None:
        return v, False
    if v is not None:
        raise OptionError(
            f"head_dim_v={shown(width)} means that V is the first columns of k, but v was passed "
            "too; pass v=None, or leave out head_dim_v="
        )
    width = checks.positive_int("head_dim_v", width)
    if width > shape_of("k", k)[-1]:
        raise ShapeError(
            f"head_dim_v must be at most {k.shape[-1]}, because V is the first head_dim_v columns "
            f"of k, whose shape is {tuple(k.shape)}; got {width}"
        )
    return k[..., :width], True


def check_decoding(algorithm: str, options: Iterable[str]) -> None:
    """Raise `OptionError` for decoding options of an algorithm that does not split the keys.

    FlashAttention-2's forward pass can also pack query heads.
    """
    packs = ("pack_gqa",) if algorithm in plans.PACKING else ()
    used = [name for name in options if name in DECODING and name not in packs]
    if used == ["pack_gqa"] and not plans.splits_keys(algorithm):
        raise OptionError(
            f"{algorithm!r} does not take pack_gqa, because it packs no query heads; use "
            "algorithm='flash2' or 'flash-decode', or leave out pack_gqa="
        )
    if used and not plans.splits_keys(algorithm):
        raise OptionError(
            f"{algorithm!r} does not take {', '.join(used)}, because only decoding does; use "
            f"algorithm='flash-decode', or leave out {', '.join(f'{name}=' for name in used)}"
        )


def _same_ndim(shapes: tuple[tuple[int, ...], ...], may_be_empty: bool) -> int:
    ndims = {len(shape) for shape in shapes}
    if len(ndims) > 1 or not ndims <= set(AXES):
        raise ShapeError(
            f"q, k and v must all be {', '.join(AXES.values())} arrays, all with the same "
            f"number of axes, got {_named(shapes)}"
        )
    if not may_be_empty and any(0 in shape for shape in shapes):
        raise ShapeError(f"q, k and v must not be empty, got {_named(shapes)}")
    if any(0 in (*shape[-3:-2], shape[-1]) for shape in shapes):
        raise ShapeError(
            f"q, k and v must have at least one head and one column, got {_named(shapes)}"
        )
    return ndims.pop()


def _check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    shapes = q, k, v
    if q[0] != k[0] or q[0] != v[0]:
        raise ShapeError(f"q, k and v must have the same batch size, got {_named(shapes)}")
    if k[1] != v[1]:
        raise ShapeError(f"k and v must have the same number of heads, got {_named(shapes)}")
    if q[3] != k[3]:
        hint = "; k looks transposed: its rows are keys" if q[3] == k[2] else ""
        raise ShapeError(f"q and k must have the same head_dim, got {_named(shapes) + hint}")
    if k[2] != v[2]:
        hint = "; v looks transposed: its rows are values" if k[2] == v[3] else ""
        raise ShapeError(f"k and v must have the same number of rows, got {_named(shapes) + hint}")


def _named(shapes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in zip("qkv", shapes, strict=True))


def _bias_shape(bias: Any, dtype: str, full: tuple[int, ...]) -> tuple[int, ...]:
    shape = shape_of("bias", bias)
    whose, needed = ("out", "bfloat16") if dtype in checks.FP8 else ("q", dtype)
    if name_of(bias.dtype) != needed:
        found = name_of(bias.dtype)
        raise DTypeError(
            f"bias must have the same dtype as {whose}, which is {needed}, got {found}"
        )
    if not 2 <= len(shape) <= 4 or shape[-2:] != full[2:]:
        raise ShapeError(
            f"bias must have shape {tuple(full)}, of which the first two lengths may also be 1 or "
            f"missing; got {shape}"
        )
    return (1,) * (4 - len(shape)) + shape


def _block_mask(block_mask: Any, tiling: Tiling | None) -> BlockMask:
    if isinstance(block_mask, BlockMask):
        return block_mask
    if tiling is None:
        raise MaskError(
            "a block_mask= that is a plain grid has one value per tile, so the tile size must "
            "be known; pass tiling=, or block_mask=flashsim.BlockMask(grid, block_q, block_k)"
        )
    return BlockMask(block_mask, tiling.block_q, tiling.block_k)
