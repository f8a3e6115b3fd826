"""The mask function that flashsim registers with Hugging Face's transformers.

Once per step, a transformers model calls `mask`, and passes the result to each layer's attention
function. `mask` returns a `Band` if the mask is full, causal or a window, with or without padding.
For any other pattern, it returns a mask tensor. It never returns None. After None, a layer would
follow the attribute `is_causal`, which some layers lack or set wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import masking_utils

from flashsim.errors import UnsupportedError
from flashsim.torch.layers import Layers
from flashsim.torch.masks import has_values

#: Queries of a call that decodes.
FEW = 16


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
        causal, window = known
        if not _wanted_whole(causal, rest, start, q_length, kv_length):
            # A cache may move its own offset on before the model asks.
            given["q_offset"] = start + kv_offset
            whole = partial(masking_utils.sdpa_mask, **given)
            keys = _kept(attention_mask, kv_length, kv_offset)
            if window is not None and kv_length <= window[0] + 1:
                window = None
            asked = _Asked(causal, window, keys, start, start + q_length, kv_length, whole)
            band = None
            if not rest.get("allow_is_causal_skip", True):  # torch.compile may take this cache
                band = _live(asked, batch_size, rest.get("device"))
            band = _narrowed(asked) if band is None else band
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


class _Asked(NamedTuple):
    """What decides a `Band`.

    The queries lie at `start` to `end` - 1 among the `n_kv` keys. `keys` has numbers (batch, n_kv)
    that are 0 for padding. `window` is None if it holds all keys. `whole` is that of `Band`.
    """

    causal: bool
    window: tuple[int, int] | None
    keys: Tensor | None
    start: int
    end: int
    n_kv: int
    whole: Callable[[], Tensor]


def _live(asked: _Asked, batch: int, device: Any) -> Band | None:
    """Return the `Band` of a decoding step with a static cache; None if padding prevents a `Band`.

    The `Band` has the same attributes for every token, so torch never recompiles the code.
    """
    causal, window, keys, start, end, n_kv, whole = asked
    if end - start > FEW or end > n_kv or not causal:
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
    return Band(True, window, whole=whole, starts=starts, stops=torch.full_like(starts, end))


def _narrowed(asked: _Asked) -> Band | None:
    """Return the `Band` for these queries and keys, or None if the mask is not a band."""
    causal, window, keys, start, end, n_kv, whole = asked
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
    if end - start <= FEW and bool(queries.all()) and not _has_gaps(kept):
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
