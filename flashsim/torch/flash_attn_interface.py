"""The interface of FlashAttention-3's package: ``import flashsim.torch.flash_attn_interface``.

Code written for ``flash_attn_interface`` runs after you change one import. Tensor layouts and masks
are those of `flashsim.torch.flash_attn`. Errors are `FlashSimError`. FP8 inputs are widened to
bfloat16 and multiplied by their descales. `num_splits` of a call without a cache, `pack_gqa`,
`sm_margin` and `scheduler_metadata` only tune speed in FlashAttention-3, and have no effect here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashsim.errors import OptionError, ShapeError, own_errors
from flashsim.torch import flash_attn_cache as caches
from flashsim.torch import flash_attn_core as core
from flashsim.torch.flash_attn import flash_attn_combine
from flashsim.torch.flash_attn_core import Window

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


@own_errors
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention of (batch, n, heads, head_dim) tensors, with a gradient.

    Parameters
    ----------
    q : Tensor, (batch, n_q, heads, head_dim)
    k, v : Tensor, (batch, n_k, heads_k, head_dim) and (batch, n_k, heads_k, head_dim_v)
    softmax_scale : float, optional
        Default: 1 / sqrt(head_dim), where head_dim includes the columns of `qv`.
    qv : Tensor, (batch, n_q, heads, head_dim_v), optional
        Scores are ``q k^T + qv v^T``.
    q_descale, k_descale, v_descale : Tensor of float32, (batch, heads_k), optional
        Factors of FP8 inputs. The output is then bfloat16.
    attention_chunk : int
        Queries see keys of their own chunk of this many positions; 0: all keys.
    causal, window_size, softcap, deterministic
        As in `flashsim.torch.flash_attn.flash_attn_func`.
    return_attn_probs : bool
        Return ``(out, lse)``, the LSE as (batch, heads, n_q).

    Returns
    -------
    Tensor, (batch, n_q, heads, head_dim_v)
    """
    limits = softmax_scale, causal, window_size, softcap, deterministic, attention_chunk
    scores = core.ScoreOptions(*limits, descales=(q_descale, k_descale, v_descale))
    out, lse = core.by_token(q, k, v, qv, scores=scores)
    return (out, lse) if return_attn_probs else out


@own_errors
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Call `flash_attn_func` with q, k and v in one tensor, (batch, n, 3, heads, head_dim).

    If `num_heads_q` is passed, the tensor is (batch, n, num_heads_q + 2 heads_k, head_dim).
    """
    if num_heads_q is None:
        q, k, v = core.unpacked("qkv", qkv)
    else:
        kv_heads, rest = divmod(qkv.shape[2] - num_heads_q, 2)
        if qkv.ndim != 4 or rest or kv_heads < 1:
            raise ShapeError(
                f"qkv must be (batch, n, {num_heads_q} + 2 heads_k, head_dim), got "
                f"{tuple(qkv.shape)}"
            )
        q, k, v = qkv.split((num_heads_q, kv_heads, kv_heads), 2)
    return flash_attn_func(
        *(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size),
        *(attention_chunk, softcap, 1, None, deterministic, sm_margin, return_attn_probs),
    )


@own_errors
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention of packed sequences, (tokens, heads, head_dim), with a gradient.

    Sequence offsets and lengths are read on the host. For arguments not listed here, see
    `flash_attn_func`.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : Tensor of int32, (batch + 1,)
        Where each sequence begins and ends.
    seqused_q, seqused_k : Tensor of int32, (batch,), optional
        Number of used rows of each sequence; results of the other rows are zeros.

    Returns
    -------
    Tensor, (tokens, heads, head_dim_v)
        With `return_attn_probs`, also the LSE, (heads, tokens).
    """
    limits = softmax_scale, causal, window_size, softcap, deterministic, attention_chunk
    scores = core.ScoreOptions(*limits, descales=(q_descale, k_descale, v_descale))
    offsets, used = (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k)
    out, lse = core.varlen((q, k, v, qv), offsets, scores, used=used)
    return (out, lse) if return_attn_probs else out


@own_errors
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Compute attention of a few queries over a KV cache; new keys can be appended in place.

    For arguments not listed here, see `flash_attn_func` and
    `flashsim.torch.flash_attn.flash_attn_with_kvcache`. With `cu_seqlens_q`, `qv`,
    `attention_chunk` or FP8, cache lengths are read on the host, and the live keys are copied into
    one packed array.

    Parameters
    ----------
    q : Tensor, (batch, n_q, heads, head_dim); with `cu_seqlens_q` (tokens, heads, head_dim)
    k, v : Tensor, (batch, n_new, heads_k, ..), optional
        New keys; with `cu_seqlens_k_new` packed, (tokens, heads_k, ..).
    page_table : Tensor of int32, (batch, max_pages), optional
        Each sequence's pages.
    rotary_seqlens : Tensor of int32, (batch,), optional
        Positions to rotate by, instead of `cache_seqlens`.

    Returns
    -------
    Tensor, like q with head_dim_v columns
        With `return_softmax_lse`, also the LSE, (batch, heads, n_q) or (heads, tokens).
    """
    cache = caches.Cache(
        *(k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx),
        *(cache_leftpad, page_table, rotary_interleaved, num_splits, rotary_seqlens),
    )
    limits = softmax_scale, causal, window_size, softcap, False, attention_chunk
    scores = core.ScoreOptions(*limits, descales=(q_descale, k_descale, v_descale))
    if cu_seqlens_q is None and cu_seqlens_k_new is not None:
        raise OptionError("cu_seqlens_k_new= needs cu_seqlens_q= too; pass both")
    if cu_seqlens_q is None:
        out, lse = caches.with_cache(q, cache, scores, qv)
    else:
        out, lse = caches.packed_over_cache(q, cu_seqlens_q, cu_seqlens_k_new, cache, scores, qv)
    return (out, lse) if return_softmax_lse else out


def get_scheduler_metadata(*_: Any, **__: Any) -> None:
    """Return None: unlike FlashAttention-3's, flashsim's tile scheduler needs no plan."""
    return
