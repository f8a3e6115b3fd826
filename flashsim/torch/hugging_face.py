"""Adds flashsim to Hugging Face's transformers: an attention function and a mask function.

Once per step, a transformers model calls the mask function (`hugging_face_masks`), and passes the
mask to each layer's attention function, `attend`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils, modeling_utils
from transformers.utils import output_capturing

from flashsim.errors import UnsupportedError
from flashsim.torch import hugging_face_packed
from flashsim.torch.decoding import decode
from flashsim.torch.functional import attention
from flashsim.torch.hugging_face_masks import Band, mask


def register(name: str) -> None:
    """Register flashsim with transformers under a name; raise if transformers is older than 5.4."""
    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise UnsupportedError(
            "flashsim's attention needs transformers 5.4 or later, but found "
            f"{transformers.__version__}: pip install --upgrade transformers"
        )
    AttentionInterface.register(name, attend)
    AttentionInterface.register(f"paged|{name}", attend_paged)
    AttentionMaskInterface.register(name, mask)
    # transformers takes every name with "flash" in it for the flash-attn package. It would import
    # that package, and refuse a mask of chunks.
    modules: tuple[Any, ...] = (modeling_utils, masking_utils)
    for module in modules:
        theirs = getattr(module, "is_flash_attention_requested", None)
        if theirs is not None and not hasattr(theirs, "but_for"):
            module.is_flash_attention_requested = _but_for(name, theirs)


def _but_for(name: str, theirs: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap transformers' `is_flash_attention_requested` so that it returns False for `name`."""

    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, **rest: Any
    ) -> bool:
        asked = requested_attention_implementation or getattr(config, "_attn_implementation", None)
        return asked not in (name, f"paged|{name}") and theirs(
            config, requested_attention_implementation, **rest
        )

    is_flash_attention_requested.but_for = name  # type: ignore[attr-defined]
    return is_flash_attention_requested


# -- attention ------------------------------------------------------------------------------------


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Band | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention of (batch, heads, n, d) inputs; return (batch, n, heads, d).

    Dropout, a paged cache, keys chosen by an indexer, or a request for the probabilities raise
    UnsupportedError.
    """
    if (
        type(attention_mask) is Band
        and attention_mask.plain
        and not dropout
        and position_bias is None
        and _SPECIAL.isdisjoint(rest)
        and not _records_probabilities()
    ):  # the usual call of a layer, in as little of the host's time as possible
        causal, window = attention_mask.causal, attention_mask.window
        ordered = torch.are_deterministic_algorithms_enabled()
        asked = causal, window, softcap or 0.0, scaling, "flash2", ordered, None
        layers = attention_mask.layers
        out = None if layers is None else layers(query, key, value, asked)
        if out is None:
            out = attention(
                *(query, key, value),
                causal=causal,
                window=window,
                softcap=softcap or 0.0,
                scale=scaling,
                deterministic=ordered,
            )
            out = out.transpose(1, 2).contiguous()
        return out, None
    _refuse(dropout, rest)
    sinks = next((rest[name] for name in _SINKS if rest.get(name) is not None), None)
    if isinstance(attention_mask, Band):
        band, added = attention_mask, None
    elif attention_mask is None:  # as in continuous batching
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        width = rest.get("sliding_window") if causal else None
        band, added = Band(bool(causal), (width - 1, 0) if width else None), None
    else:
        band, added = Band(causal=False), _added(attention_mask, query)
    if position_bias is not None:
        bias = _added(position_bias, query)
        added = bias if added is None else added + bias
    decodes = added is None and sinks is None and not _wants_gradient(query, key, value)
    if band.stops is not None and band.keys is None and not decodes:
        band = replace(band, keys=_between(band, key.shape[2]))
    options: dict[str, Any] = {
        "causal": band.causal,
        "window": band.window,
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": sinks,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    patterned = isinstance(attention_mask, Tensor) or band.keys is not None
    if not patterned and added is None and rest.get("cu_seq_lens_q") is not None:
        # Packed by the caller.
        return hugging_face_packed.attend(query, key, value, rest, options), None
    if band.keys is not None and added is not None:
        added = added + _added(band.keys[:, None, None], query)
    if added is not None:
        full = (*added.shape[:2], query.shape[2], key.shape[2])
        options["bias"] = added.to(query.dtype).expand(full).contiguous()
    elif band.stops is not None and decodes:
        return _decoded(query, key, value, band, options), None
    elif band.keys is not None:
        return _without_padding(query, key, value, band, options), None
    return attention(query, key, value, **options).transpose(1, 2).contiguous(), None


def attend_paged(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    cache: Any = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention over the paged cache that continuous batching uses.

    Queries, new keys and new values are (1, heads, tokens, d); the output is (1, tokens, heads, d).
    A call without a paged cache raises UnsupportedError. Newer versions of transformers update the
    cache themselves, and call `attend`.
    """
    if cache is None:
        raise UnsupportedError(
            '"paged|flashsim" is only for continuous batching (model.generate_batch), which has '
            'a paged cache; for other calls, use model.set_attn_implementation("flashsim")'
        )
    where = {name: rest.pop(name) for name in ("read_index", "write_index")}
    packed = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **where)
    k, v = (x.transpose(0, 1)[None] for x in packed)
    rest.setdefault("sliding_window", getattr(module, "sliding_window", None))
    return attend(module, query, k, v, attention_mask, **rest)


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """Turn a mask into a bias: -inf at masked keys, so that a row without keys gives zeros.

    A number near the lowest number of a float mask's type masks the score. A number such as -1e9,
    to which float32 adds a score without keeping a digit, also masks the score. If -1e9 masked all
    n keys of a row, rounding would lose the term log n of the row's LSE. The backward pass would
    recompute P = 1 instead of P = 1 / n.
    """
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        return torch.where(mask, zero, -torch.inf)
    computed = torch.float64 if query.dtype == torch.float64 else torch.float32
    no_digit = -2 / torch.finfo(computed).eps
    lowest = max(torch.finfo(mask.dtype).min / 2, no_digit)
    return mask.masked_fill(mask <= lowest, -torch.inf)


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _between(band: Band, n_kv: int) -> Tensor:
    """Return booleans (batch, n_kv) that are True for keys between a `Band`'s starts and stops."""
    assert band.starts is not None
    assert band.stops is not None
    at = torch.arange(n_kv, device=band.starts.device)
    return (at >= band.starts[:, None]) & (at < band.stops[:, None])


def _decoded(
    query: Tensor, key: Tensor, value: Tensor, band: Band, options: dict[str, Any]
) -> Tensor:
    """Decode over the keys in use of each sequence, without copying the keys."""
    batch, device = query.shape[0], query.device
    starts, stops = (
        None if x is None else x.to(device).expand(batch) for x in (band.starts, band.stops)
    )
    names = ("causal", "window", "scale", "softcap")
    out = decode(
        *(query, key, value),
        cache_seqlens=None if stops is None else stops.contiguous(),
        cache_starts=None if starts is None else starts.contiguous(),
        **{name: options[name] for name in names},
    )
    return out.transpose(1, 2).contiguous()


def _without_padding(
    query: Tensor, key: Tensor, value: Tensor, band: Band, options: dict[str, Any]
) -> Tensor:
    """Compute attention after removing padding; the remaining tokens are packed sequences."""
    batch, heads, n_q, _ = query.shape
    q, rows, cu_q = _packed(query, band.queries)
    k, _, cu_k = _packed(key, band.keys)
    v, _, _ = _packed(value, band.keys)
    if cu_q[-1] and cu_k[-1]:
        out = attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    else:  # only padding: a sum over no keys is zeros, with gradients of zeros
        group = heads // key.shape[1]
        out = q @ (k.mT @ v).repeat_interleave(group, dim=1)
    out = out[0].transpose(0, 1)
    full = out.new_zeros(batch * n_q, heads, value.shape[-1]).index_copy(0, rows, out)
    return full.reshape(batch, n_q, heads, -1)


def _packed(x: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, list[int]]:
    """Return unpadded tokens, (1, heads, tokens, d), the tokens' indices, and sequence offsets."""
    batch, heads, n, d = x.shape
    kept = torch.ones(1, n, dtype=torch.bool, device=x.device) if kept is None else kept
    kept = kept.to(x.device).expand(batch, n)
    rows = kept.flatten().nonzero().squeeze(1)
    tokens = x.transpose(1, 2).reshape(batch * n, heads, d)[rows]
    return tokens.transpose(0, 1)[None], rows, [0, *kept.sum(1).cumsum(0).tolist()]


#: The names that models give to a layer's sinks.
_SINKS = ("s_aux", "sinks")
#: What a layer cannot have, by the argument that requests it.
_REFUSED = {
    "indices": "attention to only those keys that an indexer chose",
    "block_indices": "attention to only those blocks of keys that an indexer chose",
    "cache": "a paged cache",
    "output_attentions": "returning the probabilities",
}
#: The other arguments of a layer that keep its call from the fast path of `attend`.
_SPECIAL = frozenset((*_SINKS, "cu_seq_lens_q", *_REFUSED))


def _records_probabilities() -> bool:
    """Return True if the caller requested the probabilities.

    Some models do not pass this flag to their layers.
    """
    if torch.compiler.is_compiling():
        return False
    return any("attentions" in name for name in output_capturing._active_collector.get() or ())


def _refuse(dropout: float, rest: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedError(
            f"flashsim's attention has no dropout, got dropout={dropout}; set the model's "
            "attention dropout to 0, or call model.eval()"
        )
    if _records_probabilities():
        rest = {**rest, "output_attentions": True}
    for name, what in _REFUSED.items():
        given = rest.get(name)
        if given is not None and given is not False:
            raise UnsupportedError(
                f"flashsim's attention does not support {what} (argument {name}); use "
                "model.set_attn_implementation('eager'), which does"
            )
