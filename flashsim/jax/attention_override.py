"""A `dot_product_attention` with the same arguments as `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from flashsim.errors import DTypeError, ShapeError, reject_unknown, shown
from flashsim.jax.functional import attention, refuse_traced, taken
from flashsim.problem import checks


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
    backend: str | None = None,
    **unknown: Any,
) -> Any:
    """Compute `attention` with the layout and arguments of `jax.nn.dot_product_attention`.

    As in jax.nn, `is_causal` and `local_window_size` are aligned at the top left, so query i and
    key i have the same position. The mask and the lengths are converted to a bias of shape (1 or
    batch, 1 or heads, T, S). `attention` with a mask function (`mask_mod`) or packed sequences
    (`cu_seqlens_q`) needs no such bias.

    For a query that sees no key, the result is zeros. For such a query, jax.nn returns the mean of
    all values. The residual (the LSE) differs from jax.nn's, because masked scores add no rounding
    errors to the LSE.

    Parameters
    ----------
    query : array, (batch, T, heads, head_dim) or (T, heads, head_dim)
    key, value : array, (batch, S, kv_heads, head_dim), or without batch
    bias, mask : array that broadcasts to (batch, heads, T, S), optional
        `mask` is True where a score counts.
    scale, is_causal, local_window_size, return_residual
        As in `jax.nn.dot_product_attention`; the residual, (batch, T, heads), is the LSE.
    query_seq_lengths, key_value_seq_lengths : array, (batch,), optional
        Number of valid rows per batch entry; later rows of the result are zeros.
    backend : str, optional
        As in `attention`.

    Returns
    -------
    jax.Array, shaped like query; with `return_residual` also the LSE

    Raises
    ------
    FlashSimError
        As in `attention`.
    """
    reject_unknown(unknown, dot_product_attention.__kwdefaults__ or (), "dot_product_attention")
    refuse_traced(
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        return_residual=return_residual,
    )
    query, key, value = taken("query", query), taken("key", key), taken("value", value)
    ndim = query.ndim
    if {query.ndim, key.ndim, value.ndim} not in ({3}, {4}):
        raise ShapeError(
            "query, key and value must all be (batch, n, heads, head_dim) arrays, or all be "
            f"(n, heads, head_dim) arrays, got shapes {query.shape}, {key.shape} and {value.shape}"
        )
    q, k, v = (jnp.swapaxes(x[None] if ndim == 3 else x, 1, 2) for x in (query, key, value))
    batch, heads, t, _ = q.shape
    s = k.shape[2]
    query_seq_lengths = _lengths("query_seq_lengths", query_seq_lengths, batch)
    keys_count = _lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    added = _bias(bias, mask, keys_count, shape=(batch, heads, t, s), dtype=query.dtype)
    rows, keys, window = _reach(t, s, checks.flag("is_causal", is_causal), local_window_size)
    given = attention(
        *(q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]),
        bias=None if added is None else added[:, :, :rows, :keys],
        window=window,
        scale=scale,
        backend=backend,
        return_lse=return_residual,
    )
    out, lse = given if return_residual else (given, None)
    if rows < t:  # the other rows see no key
        out = jnp.pad(out, ((0, 0), (0, 0), (0, t - rows), (0, 0)))
    if query_seq_lengths is not None:
        counts = jnp.arange(t) < query_seq_lengths[:, None, None]
        out = jnp.where(counts[..., None], out, 0)
    out = jnp.swapaxes(out, 1, 2)
    out = out[0] if ndim == 3 else out
    if lse is None:
        return out
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, t - rows)), constant_values=-jnp.inf)
    lse = jnp.swapaxes(lse, 1, 2).astype(query.dtype)
    return out, lse[0] if ndim == 3 else lse


def _bias(bias: Any, mask: Any, lengths: Any, *, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the bias, with -inf added at keys that the mask or the lengths exclude."""
    added = None if bias is None else _four(taken("bias", bias), "bias", shape).astype(dtype)
    if lengths is not None:
        kept = jnp.arange(shape[3]) < lengths[:, None, None, None]
        added = jnp.where(kept, 0 if added is None else added, jnp.asarray(-jnp.inf, dtype))
    if mask is not None:
        mask = taken("mask", mask)
        if mask.dtype != bool:
            raise DTypeError(
                f"mask must be boolean, got {mask.dtype}; pass numbers to add to the scores as bias"
            )
        mask = _four(mask, "mask", shape)
        added = jnp.where(mask, 0 if added is None else added, jnp.asarray(-jnp.inf, dtype))
    return None if added is None else jnp.broadcast_to(added, (*added.shape[:2], *shape[2:]))


def _four(x: Any, name: str, shape: tuple[int, ...]) -> Any:
    four = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if four.ndim > 4 or any(n not in (1, m) for n, m in zip(four.shape, shape, strict=True)):
        raise ShapeError(
            f"{name} must broadcast to (batch, heads, T, S) = {shape}, got shape {x.shape}"
        )
    return four


def _lengths(name: str, given: Any, batch: int) -> Any:
    if given is None:
        return None
    try:
        lengths = jnp.asarray(given)
    except (TypeError, OverflowError):
        raise DTypeError(f"{name} must be integers, got {shown(given)}") from None
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ShapeError(
            f"{name} must be integers of shape ({batch},), one per batch entry, got "
            f"{lengths.dtype} of shape {lengths.shape}"
        )
    return lengths


def _sides(window: Any) -> tuple[int | None, int | None]:
    """Return how many keys a query sees to its left and to its right; None means no limit."""
    sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if window is not None and not (len(sides) == 2 and all(map(checks.is_int, sides))):
        raise DTypeError(
            f"local_window_size must be an integer or a pair (left, right), got {shown(window)}"
        )
    return sides


def _reach(
    t: int, s: int, is_causal: bool, local_window_size: int | tuple[int, int] | None
) -> tuple[int, int, tuple[int, int] | None]:
    """Return the numbers of queries and keys that remain in use, and the sliding window.

    `jax.nn` aligns windows at the top left. The returned window is converted for flashsim's
    engines, which align at the bottom right.
    """
    left, right = _sides(local_window_size)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    keys = s if right is None else max(min(s, t + right), 0)
    rows = t if left is None else max(min(t, keys + left), 0)
    if left is None and right is None:
        return rows, keys, None
    if not (rows and keys) or (left is not None and right is not None and left + right < 0):
        return 0, 0, None  # no query sees a key
    shift = keys - rows
    return (
        *(rows, keys),
        (-1 if left is None else left + shift, -1 if right is None else right - shift),
    )
