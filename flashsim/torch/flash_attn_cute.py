"""The interface of FlashAttention's CuTe kernels: ``from flashsim.torch import flash_attn_cute``.

Code written for ``flash_attn.cute`` (the package flash-attn-4) runs after you change one import.
Tensor layouts and masks are those of `flashsim.torch.flash_attn`, except for `window_size`. In
`window_size`, a negative number is a position past the diagonal, and only None means no limit. As
in flash-attn-4, a causal mask replaces the right limit, and two limits that leave no key are both
ignored. `num_splits`, `pack_gqa`, `scheduler_metadata` and the lengths `max_seqlen_q` to
`min_seqlen_k` only tune speed in flash-attn-4, and have no effect here. All errors are subclasses
of `FlashSimError`. Score and mask functions in CuTe DSL, block-sparse tensors and
`gather_kv_indices` are not supported: these arguments raise an `UnsupportedError`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import Tensor

from flashsim.errors import OptionError, ShapeError, UnsupportedError, own_errors
from flashsim.torch import flash_attn
from flashsim.torch import flash_attn_core as core
from flashsim.torch.flash_attn_core import Window

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
]

#: Keyword arguments that must be None here, and what to use instead.
_ABSENT = {
    **dict.fromkeys(
        ("score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars"),
        "write the function for flashsim.torch.flex_attention, which traces Python functions",
    ),
    **dict.fromkeys(
        ("block_sparse_tensors", "block_sparse_tensors_bwd"),
        "pass a BlockMask to flashsim.torch.flex_attention",
    ),
    "gather_kv_indices": "select the keys before the call",
    "seqlen_k_per_split": "leave it out",
}


@own_errors
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: None = None,
    score_mod_bwd: None = None,
    mask_mod: None = None,
    aux_tensors: None = None,
    aux_scalars: None = None,
    block_sparse_tensors: None = None,
    block_sparse_tensors_bwd: None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention of (batch, n, heads, head_dim) tensors, with a gradient.

    Arguments that are not listed here have no effect, or must be None.

    Parameters
    ----------
    q : Tensor, (batch, n_q, heads, head_dim)
    k, v : Tensor, (batch, n_k, heads_k, head_dim) and (batch, n_k, heads_k, head_dim_v)
    qv : Tensor, (batch, n_q, heads, head_dim_v), optional
        Scores are ``q k^T + qv v^T``.
    softmax_scale : float, optional
        Default: 1 / sqrt(head_dim), where head_dim includes the columns of `qv`.
    causal : bool
    window_size : (int or None, int or None)
        How many keys to the left and right of the diagonal a query sees. None: no limit.
    learnable_sink : Tensor, (heads,), optional
        A score per head that has no value, as in GPT-OSS. It has a gradient.
    softcap : float
    deterministic : bool
        Whether the backward pass adds in a fixed order.

    Returns
    -------
    (Tensor, Tensor)
        out, (batch, n_q, heads, head_dim_v), and the LSE in float32, (batch, heads, n_q) or, with
        `qv`, (batch, n_q, heads). `return_lse` changes nothing: the LSE is always returned, and
        always has a gradient.
    """
    _check_absent(locals())
    scores = _scores(softmax_scale, causal, window_size, softcap, deterministic, learnable_sink)
    out, lse = core.by_token(q, k, v, qv, scores=scores)
    return out, lse if qv is None else lse.transpose(1, 2)


@own_errors
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: None = None,
    score_mod_bwd: None = None,
    mask_mod: None = None,
    block_sparse_tensors: None = None,
    aux_tensors: None = None,
    aux_scalars: None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention of sequences of different lengths, with a gradient.

    Queries or keys are packed, (tokens, heads, head_dim), with offsets `cu_seqlens_q` or
    `cu_seqlens_k`, or padded, (batch, n, heads, head_dim). Offsets and lengths are read on the
    host. For arguments not listed here, see `flash_attn_func`.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : Tensor of int32, (batch + 1,), optional
        Where each packed sequence begins and ends.
    seqused_q, seqused_k : Tensor of int32, (batch,), optional
        Number of used rows of each sequence; results of the other rows are zeros.
    page_table : Tensor of int32, (batch, max_pages), optional
        With a page table, k and v are pages, (pages, page_size, heads_k, ...), without a gradient.

    Returns
    -------
    (Tensor, Tensor)
        out, like q with head_dim_v columns, and the LSE in float32: (heads, tokens) for packed
        queries, (batch, heads, n_q) for padded ones. With `qv`, heads are the last axis.
    """
    _check_absent(locals())
    padded = q.shape[:2] if cu_seqlens_q is None else None
    q, of_q = _packed("q", q, cu_seqlens_q)
    qv = qv.flatten(0, 1) if qv is not None and padded else qv
    if page_table is None:
        k, of_k = _packed("k", k, cu_seqlens_k)
        v, _ = _packed("v", v, cu_seqlens_k)
    else:
        of_k = _of_pages(k, page_table, cu_seqlens_k, seqused_k)
        seqused_k = None
    scores = _scores(softmax_scale, causal, window_size, softcap, deterministic, learnable_sink)
    used = seqused_q, seqused_k
    out, lse = core.varlen((q, k, v, qv), (of_q, of_k), scores, table=page_table, used=used)
    if padded:
        out, lse = out.unflatten(0, padded), lse.unflatten(1, padded).transpose(0, 1)
    return out, lse if qv is None else lse.transpose(-1, -2)


@own_errors
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: Any = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Merge the results of splits of the keys with `flashsim.torch.flash_attn.flash_attn_combine`.

    `cu_seqlens`, `seqused` and `virtual_batch_idx` have no effect: all rows are merged.
    """
    merged, lse = flash_attn.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return merged, lse if return_lse else None


def get_scheduler_metadata(*_: Any, **__: Any) -> None:
    """Return None: unlike flash-attn-4's, flashsim's tile scheduler needs no plan."""
    return


def _packed(name: str, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Any]:
    """Return an array with the rows of all sequences, packed, and each sequence's offset."""
    if cu_seqlens is not None:
        return x, cu_seqlens
    if x.ndim != 4:
        raise ShapeError(
            f"{name} must be (batch, n, heads, head_dim) without cu_seqlens, got {tuple(x.shape)}"
        )
    batch, n = x.shape[:2]
    return x.flatten(0, 1), core.even_offsets(batch, n)


def _of_pages(k: Tensor, table: Tensor, cu_seqlens: Tensor | None, used: Tensor | None) -> Any:
    """Return each sequence's offset in an array into which all pages are packed."""
    if cu_seqlens is not None:
        raise OptionError(
            "page_table= cannot be combined with cu_seqlens_k=; pass the lengths as seqused_k="
        )
    whole = [k.shape[1] * table.shape[1]] * table.shape[0]
    return list(accumulate(whole if used is None else used.tolist(), initial=0))


def _scores(
    scale: float | None, causal: bool, window: Window, softcap: Any, ordered: bool, sinks: Any
) -> core.ScoreOptions:
    """Return options of scores; the window's limits apply in addition to the causal mask."""
    left, right = window
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        left = right = None
    seen = left, None if causal else right
    return core.ScoreOptions(scale, causal, seen, softcap or 0.0, ordered, sinks=sinks, signed=True)


def _check_absent(arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError for the first of a call's unsupported options that is not None."""
    for name, value in arguments.items():
        if name in _ABSENT and value is not None:
            raise UnsupportedError(f"flashsim does not support {name}=; {_ABSENT[name]}")
