"""flash-attention's interface: ``from flashsim.torch.flash_attn import flash_attn_func``.

Code written for the ``flash_attn`` package (FlashAttention-2) runs after you change one import;
`flashsim.torch.flash_attn_interface` is for FlashAttention-3's package. Tensors are (batch, n,
heads, head_dim), or (tokens, heads, head_dim) for packed sequences. The causal mask and the window
are aligned to the end of the keys. Errors are `FlashSimError`; dropout raises UnsupportedError.
ALiBi needs no bias matrix, because a score function computes ALiBi.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsim.errors import DTypeError, ShapeError, own_errors
from flashsim.torch import flash_attn_cache as caches
from flashsim.torch import flash_attn_core as core
from flashsim.torch.flash_attn_core import Window

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


@own_errors
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention of (batch, n, heads, head_dim) tensors, with a gradient.

    Parameters
    ----------
    q : Tensor, (batch, n_q, heads, head_dim)
    k, v : Tensor, (batch, n_k, heads_k, head_dim) and (batch, n_k, heads_k, head_dim_v)
    dropout_p : float
        Must be 0.
    softmax_scale : float, optional
        Default: 1 / sqrt(head_dim).
    causal : bool
    window_size : (int, int)
        Keys to the left and right of the diagonal that a query sees; -1 or None: no limit.
    softcap : float
    alibi_slopes : Tensor of float32, (heads,) or (batch, heads), optional
        Adds ``-slope * |i + n_k - n_q - j|`` to the score of query i and key j.
    deterministic : bool
        Whether the backward pass adds in a fixed order.
    return_attn_probs : bool
        Return ``(out, lse, None)``: flashsim never stores the probabilities.

    Returns
    -------
    Tensor, (batch, n_q, heads, head_dim_v)
        With `return_attn_probs`, also the LSE, (batch, heads, n_q) in float32, and None.
    """
    core.no_dropout(dropout_p)
    limits = softmax_scale, causal, window_size, softcap, deterministic
    out, lse = core.by_token(q, k, v, scores=core.ScoreOptions(*limits, slopes=alibi_slopes))
    return (out, lse, None) if return_attn_probs else out


@own_errors
@core.with_options_of(flash_attn_func)
def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Any:
    """Call `flash_attn_func` with q, k and v in one tensor, (batch, n, 3, heads, head_dim)."""
    return flash_attn_func(*core.unpacked("qkv", qkv), *options, **named)


@own_errors
@core.with_options_of(flash_attn_func)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """Call `flash_attn_func` with k and v in one tensor, (batch, n_k, 2, heads_k, head_dim)."""
    return flash_attn_func(q, *core.unpacked("kv", kv), *options, **named)


@own_errors
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Compute attention of packed sequences, (tokens, heads, head_dim), with a gradient.

    The sequences' offsets are read on the host. For arguments not listed here, see
    `flash_attn_func`.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : Tensor of int32, (batch + 1,)
        Where each sequence begins and ends.
    max_seqlen_q, max_seqlen_k : int
        The longest sequence; not needed here.
    block_table : Tensor of int32, (batch, max_pages), optional
        k and v are pages, (pages, page_size, heads_k, head_dim). With a `block_table`, there is no
        gradient.

    Returns
    -------
    Tensor, (tokens, heads, head_dim_v)
        With `return_attn_probs`, also the LSE, (heads, tokens) in float32, and None.
    """
    core.no_dropout(dropout_p)
    limits = softmax_scale, causal, window_size, softcap, deterministic
    scores = core.ScoreOptions(*limits, slopes=alibi_slopes)
    offsets = cu_seqlens_q, cu_seqlens_k
    out, lse = core.varlen((q, k, v), offsets, scores, table=block_table)
    return (out, lse, None) if return_attn_probs else out


@own_errors
@core.with_options_of(flash_attn_func)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Any:
    """Call `flash_attn_varlen_func` with q, k and v in one tensor, (tokens, 3, heads, head_dim)."""
    lengths: Any = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    q, k, v = core.unpacked("qkv", qkv, "tokens")
    return flash_attn_varlen_func(q, k, v, *lengths, *options, **named)


@own_errors
@core.with_options_of(flash_attn_func)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **named: Any,
) -> Any:
    """Call `flash_attn_varlen_func` with k and v in one tensor, (tokens, 2, heads_k, head_dim)."""
    lengths: Any = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    k, v = core.unpacked("kv", kv, "tokens")
    return flash_attn_varlen_func(q, k, v, *lengths, *options, **named)


@own_errors
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Compute attention of a few queries over a KV cache; new keys can be appended in place.

    On a GPU, the kernel itself reads cache lengths and block tables. A call does not wait for the
    GPU, and a CUDA graph can capture it. With `alibi_slopes`, the call reads lengths on the host,
    and copies the live keys. For arguments not listed here, see `flash_attn_func`.

    Parameters
    ----------
    q : Tensor, (batch, n_q, heads, head_dim)
    k_cache, v_cache : Tensor, (entries, n, heads_k, head_dim)
        With a `block_table`, (pages, page_size, heads_k, head_dim).
    k, v : Tensor, (batch, n_new, heads_k, head_dim), optional
        Written to the caches, in place, from `cache_seqlens` on.
    rotary_cos, rotary_sin : Tensor, (positions, rotary_dim / 2), optional
        Rotate k and q by their positions. Without a causal mask or a window, all queries have the
        position ``cache_seqlens``.
    cache_seqlens : int or Tensor of int32, (batch,), optional
        The number of keys in the cache before this call.
    cache_batch_idx, cache_leftpad : Tensor of int32, (batch,), optional
        Each sequence's entry of the cache, and the position of the sequence's first key in that
        entry.
    block_table : Tensor of int32, (batch, max_pages), optional
        Each sequence's pages.
    rotary_interleaved : bool
        Rotate columns 0 and 1, 2 and 3, ...; False: columns 0 and rotary_dim / 2, ...
    num_splits : int
        The number of splits of the keys; 0: chosen.

    Returns
    -------
    Tensor, (batch, n_q, heads, head_dim_v)
        With `return_softmax_lse`, also the LSE, (batch, heads, n_q) in float32.
    """
    cache = caches.Cache(
        *(k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx),
        *(cache_leftpad, block_table, rotary_interleaved, num_splits),
    )
    scores = core.ScoreOptions(softmax_scale, causal, window_size, softcap, slopes=alibi_slopes)
    out, lse = caches.with_cache(q, cache, scores)
    return (out, lse) if return_softmax_lse else out


@own_errors
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge the attention outputs of splits of the keys, weighted by each split's LSE.

    Parameters
    ----------
    out_partial : Tensor of float32, (splits, batch, n, heads, d), or (splits, tokens, heads, d)
    lse_partial : Tensor of float32, (splits, batch, n, heads), or (splits, tokens, heads)
    out : Tensor, optional
        The tensor to which the result is written.
    out_dtype : torch.dtype, optional
        Default: `out`'s, or out_partial's.

    Returns
    -------
    (Tensor, Tensor)
        The output, (batch, n, heads, d) or (tokens, heads, d), and the LSE, whose shape is that of
        `lse_partial` without the axis of splits.
    """
    if out_partial.ndim not in (4, 5) or out_partial.shape[:-1] != lse_partial.shape:
        raise ShapeError(
            "out_partial must be (splits, batch, n, heads, d) or (splits, tokens, heads, d), and "
            f"lse_partial the same without d, got {tuple(out_partial.shape)} and "
            f"{tuple(lse_partial.shape)}"
        )
    if lse_partial.dtype != torch.float32:
        raise DTypeError(f"lse_partial must be float32, got {lse_partial.dtype}")
    lse = torch.logsumexp(lse_partial, dim=0)
    base = torch.where(torch.isneginf(lse), 0.0, lse)
    weights = torch.exp(lse_partial - base)[..., None]
    # A split without keys may contain any values: its weight is 0.
    parts = torch.where(weights > 0, out_partial.float(), 0.0)
    merged = (weights * parts).sum(0)
    if out is not None and out.shape != merged.shape:
        raise ShapeError(
            f"out must have the shape {tuple(merged.shape)} of the result, got {tuple(out.shape)}"
        )
    if out is None:
        return merged.to(out_dtype or out_partial.dtype), lse
    return out.copy_(merged), lse
