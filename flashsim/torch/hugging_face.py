"""Adds flashsim to Hugging Face's transformers: an attention function and a mask function.

Once per step, a transformers model calls the mask function, and passes the mask to each layer's
attention function. The mask function of flashsim returns a `Band` if the mask is full, causal or a
window, with or without padding. For any other pattern, the mask function returns a mask tensor. The
mask function never returns None. After None, a layer would follow the attribute `is_causal`, which
some layers lack or set wrongly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any, ClassVar, NoReturn

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils, modeling_utils

from flashsim.errors import UnsupportedError
from flashsim.torch import hugging_face_packed
from flashsim.torch.decoding import decode
from flashsim.torch.functional import attention
from flashsim.torch.layers import Layers
from flashsim.torch.masks import has_values

#: Queries of a call that decodes.
FEW = 16


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


@dataclass(frozen=True, eq=False)
class Band:
    """A mask as a band along the diagonal: the keys that each query may see, without the padding.

    Attributes
    ----------
    window : as in `flashsim.Problem`: bottom-right aligned, after padding is removed
    keys, queries : False for padding, whose rows get zeros, (batch, n); None means no padding
    starts, stops : where each sequence's keys begin and end, int32 (batch,), for `decode` of few
        queries without padding; nothing is packed then, and `keys` may be None for a static cache
    plain : True if there is no padding, and no limits that differ between sequences
    layers : runs the calls of the layers that get this `Band`; None in compiled code
    whole : returns the mask as a boolean tensor, for a model that reshapes or slices its mask
    """

    causal: bool
    window: tuple[int, int] | None = None
    keys: Tensor | None = None
    queries: Tensor | None = None
    whole: Callable[[], Tensor] | None = None
    starts: Tensor | None = None
    stops: Tensor | None = None
    plain: bool = field(init=False)
    layers: Layers | None = field(init=False)

    # For a static cache, `generate` makes the mask itself and passes it to the model, which passes
    # it back to `mask` if it looks like a mask of four axes.
    ndim: ClassVar[int] = 4

    def __post_init__(self) -> None:
        """Note whether the band has no padding, and no limits that differ between sequences."""
        plain = self.keys is self.queries is self.starts is self.stops is None
        object.__setattr__(self, "plain", plain)
        repeats = plain and not torch.compiler.is_compiling()
        object.__setattr__(self, "layers", Layers() if repeats else None)

    def contiguous(self) -> Band:
        """Return this `Band` itself, unchanged."""
        return self

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        """Raise an error: a model that computes with a mask must request a mask tensor."""
        raise _NoTensor(
            "this model's own code reads the attention mask as a tensor, but flashsim's attention "
            "creates no mask tensor; call model.set_attn_implementation('eager')"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # look-ups of protocols, such as copying
            raise AttributeError(name)
        if self.whole is None or name not in _LAYOUT:
            self.__torch_function__()
        return getattr(self.whole().as_subclass(_Spelled), name)

    def __getitem__(self, which: Any) -> Tensor:
        if self.whole is None:
            self.__torch_function__()
        return self.whole().as_subclass(_Spelled)[which]


#: Methods that rearrange the numbers of a mask, and functions that select by a mask.
_LAYOUT = frozenset(("repeat", "expand", "reshape", "view", "unsqueeze", "squeeze"))
_CHOOSING = frozenset(
    (
        *(torch.where, Tensor.where, torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_),
        torch.nn.functional.scaled_dot_product_attention,
    )
)


class _Spelled(Tensor):
    """A boolean mask tensor that a model may reshape and select from, but not add to scores.

    A model written for eager attention would add the mask to scores, and True would count as 1.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if not isinstance(result, Tensor) or result.dtype == torch.bool:
            return result
        return result.as_subclass(Tensor) if func in _CHOOSING else Band.__torch_function__()


class _NoTensor(UnsupportedError, AttributeError):
    """An UnsupportedError that is also an AttributeError, so that `hasattr` returns False."""


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Band | Tensor | None = None,
    local_size: int | None = None,
    **rest: Any,
) -> Band | Tensor:
    """Return the mask for a call from transformers, as a `Band` if possible and else as a tensor.

    The arguments are those of transformers' `sdpa_mask`. Query i has position ``q_offset + i``, and
    key j has ``kv_offset + j``. `attention_mask`, (batch, positions), is False at padding, or is an
    earlier result of `mask`.
    """
    if isinstance(attention_mask, Band):
        return attention_mask
    given = {
        **rest,
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "local_size": local_size,
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
    }
    known = None
    # Then nothing may depend on numbers.
    tracing = torch.compiler.is_compiling() or not _readable(attention_mask, q_offset)
    if not tracing or (attention_mask is None and isinstance(q_offset, int)):
        known = _band(mask_function, local_size)
    if known is not None:
        start = int(q_offset) - kv_offset  # the queries' positions among the keys
        if not _wanted_whole(known[0], rest, start, q_length, kv_length):
            # A cache may move its own offset on before the model asks.
            given["q_offset"] = start + kv_offset
            whole = partial(masking_utils.sdpa_mask, **given)
            keys = _kept(attention_mask, kv_length, kv_offset)
            about = *known, keys, start, q_length, kv_length, whole
            band = None
            if not rest.get("allow_is_causal_skip", True):  # torch.compile may take this cache
                band = _live(*about, batch_size, rest.get("device"))
            band = _narrowed(*about) if band is None else band
            if band is not None:
                return band
    spelled: Tensor = masking_utils.sdpa_mask(**given)
    return spelled


def _wanted_whole(causal: bool, rest: dict[str, Any], start: int, n_q: int, n_kv: int) -> bool:
    """Return True if a model requests the mask as a tensor, in order to read the mask itself."""
    skip = "allow_is_causal_skip" if causal else "allow_is_bidirectional_skip"
    return not rest.get(skip, True) and not (n_q == 1 and start + 1 <= n_kv)


def _readable(*given: Any) -> bool:
    return all([has_values(x) for x in given if isinstance(x, Tensor)])


def _live(
    causal: bool,
    window: tuple[int, int] | None,
    keys: Tensor | None,
    start: int,
    n_q: int,
    n_kv: int,
    whole: Callable[[], Tensor],
    batch: int,
    device: Any,
) -> Band | None:
    """Return the `Band` of a decoding step with a static cache; None if padding prevents a `Band`.

    The `Band` has the same attributes for every token, so torch never recompiles the code.
    """
    end = start + n_q
    if n_q > FEW or end > n_kv or not causal:
        return None
    if keys is None:
        starts = torch.zeros(batch, dtype=torch.int32, device=device)
    else:
        kept = keys[:, :end].bool()
        starts = kept.int().argmax(1)
        gaps = kept.sum(1).add_(starts).ne(end).any()
        if any(torch.stack([gaps, starts.max() > start]).tolist()):  # the only wait for a GPU
            return None
        starts = starts.int()
    if window is not None and n_kv <= window[0] + 1:
        window = None
    return Band(True, window, whole=whole, starts=starts, stops=torch.full_like(starts, end))


def _narrowed(
    causal: bool,
    window: tuple[int, int] | None,
    keys: Tensor | None,
    start: int,
    n_q: int,
    n_kv: int,
    whole: Callable[[], Tensor],
) -> Band | None:
    """Return the `Band` for these queries and keys, or None if the mask is not a band."""
    end = start + n_q
    if window is not None and n_kv <= window[0] + 1:
        window = None
    if causal and end < n_kv:  # a cache with free space at its end, which no query sees
        kept = torch.ones(1, n_kv, dtype=torch.bool) if keys is None else keys.bool()
        kept = kept & (torch.arange(n_kv, device=kept.device) < end)
    elif end != n_kv and (causal or window is not None):
        return None
    elif keys is None or keys.all():  # without a conversion, which is a launch per token
        return Band(causal, window, whole=whole)
    else:
        kept = keys.bool()
    if window is not None and _has_gaps(kept):  # removing padding would shorten distances
        return None
    if not causal and window is None:
        return Band(False, None, kept, whole=whole)
    queries, live = kept[:, start:end], {}
    if n_q <= FEW and bool(queries.all()) and not _has_gaps(kept):
        stops = torch.full((len(kept),), end, dtype=torch.int32, device=kept.device)
        live = {"starts": kept.int().argmax(1).int(), "stops": stops}
    return Band(causal, window, kept, queries, whole, **live)


def _has_gaps(keys: Tensor) -> bool:
    """Return True if any sequence has padding between two of its tokens."""
    return bool((keys[:, 1:] & ~keys[:, :-1]).sum(1).add(keys[:, 0]).gt(1).any())


def _kept(attention_mask: Tensor | None, n_kv: int, kv_offset: int) -> Tensor | None:
    """Return numbers (batch, n_kv) that are 0 for padding; None without a mask."""
    if attention_mask is None or (kv_offset == 0 and attention_mask.shape[-1] == n_kv):
        return attention_mask
    padded: Any = masking_utils.prepare_padding_mask(attention_mask, n_kv, kv_offset)
    return padded[:, kv_offset : kv_offset + n_kv]


def _band(
    mask_function: Callable[..., Any], size: int | None
) -> tuple[bool, tuple[int, int] | None] | None:
    """Return a `Band`'s `causal` and `window` for transformers' mask function, or None."""
    if mask_function is masking_utils.causal_mask_function:
        return True, None
    if mask_function is masking_utils.bidirectional_mask_function:
        return False, None
    if size is None or torch.compiler.is_compiling():
        return None
    if _same(mask_function, masking_utils.sliding_window_causal_mask_function(size)):
        return True, (size - 1, 0)
    both_sides = getattr(masking_utils, "sliding_window_bidirectional_mask_function", None)
    if both_sides is not None and _same(mask_function, both_sides(size)):
        return False, (size, size)
    return None


def _same(f: Any, g: Any) -> bool:
    """Return True if two functions have the same code and, recursively, equal closure values."""
    if isinstance(f, FunctionType) and isinstance(g, FunctionType):
        cells = [[cell.cell_contents for cell in x.__closure__ or ()] for x in (f, g)]
        return f.__code__ is g.__code__ and _same(*map(tuple, cells))
    if isinstance(f, tuple) and isinstance(g, tuple):
        return len(f) == len(g) and all(map(_same, f, g))
    return f is g or (isinstance(f, int) and isinstance(g, int) and f == g)


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


def _refuse(dropout: float, rest: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedError(
            f"flashsim's attention has no dropout, got dropout={dropout}; set the model's "
            "attention dropout to 0, or call model.eval()"
        )
    for name, what in _REFUSED.items():
        given = rest.get(name)
        if given is not None and given is not False:
            raise UnsupportedError(
                f"flashsim's attention does not support {what} (argument {name}); use "
                "model.set_attn_implementation('eager'), which does"
            )
