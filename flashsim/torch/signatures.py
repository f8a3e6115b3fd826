"""Lists the functions that count as attention, and reads each function's arguments."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.attention import flex_attention as flex

from flashsim.torch.calls import AttentionCall, Extents
from flashsim.torch.masks import READ, Pattern, added, diagonal, has_values, read
from flashsim.torch.ops import OpCall, heard

Arguments = dict[str, Any]
Reader = Callable[[Arguments], AttentionCall]

_MULTI_HEAD = torch.nn.functional.multi_head_attention_forward
#: flex_attention as a user calls it; the operator under it has other arguments.
FLEX = flex.flex_attention


def reader(func: Any) -> tuple[Reader, str] | None:
    """Return an attention function's (argument reader, name), or None for any other function."""
    if func is _MULTI_HEAD:
        return _multi_head, "multi_head_attention_forward"
    if func is FLEX:
        return _flex, "flex_attention"
    if isinstance(func, type):
        name = f"{func.__module__}.{func.__name__}"
        return (_flash_4, name) if name in _AUTOGRAD else None
    name = _name(func)
    return (_READERS[name], name) if name in _READERS else None


def bind(func: Any, name: str, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """Return a call's arguments by name, with defaults filled in."""
    context: tuple[None, ...] = ()
    if isinstance(func, type):  # an autograd function
        func, setup = func.forward, func.setup_context  # type: ignore[attr-defined]
        # Without its own `setup_context`, its forward pass takes the context first.
        context = (None,) if setup is torch.autograd.Function.setup_context else ()
    if isinstance(func, FunctionType):
        bound = inspect.signature(func).bind(*context, *args, **kwargs)
        bound.apply_defaults()
        if func is FLEX:
            mask = bound.arguments["block_mask"]
            as_tuple = (None, None, None, flex.noop_mask) if mask is None else mask.as_tuple()
            bound.arguments["block_mask"] = as_tuple
        return bound.arguments
    if name == "flex_attention":
        return dict(zip(_FLEX, args, strict=False)) | kwargs
    space, _, op = name.partition("::")
    schema = getattr(getattr(torch.ops, space), op).default._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    return given | dict(zip((a.name for a in schema), args, strict=False)) | kwargs


def _name(func: Any) -> str:
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name
    if isinstance(func, torch._ops.OpOverloadPacket):
        return func._qualified_op_name
    if isinstance(func, torch._ops.HigherOrderOperator):
        return func.name()
    return f"aten::{getattr(func, '__name__', '')}"


# -- as fields of Problem --------------------------------------------------------------------------


def dtype_of(x: Tensor, autocast: bool = False) -> str:
    """Return a tensor's type or, with `autocast`, the type that autocast would cast to."""
    dtype, kind = x.dtype, x.device.type
    if autocast and dtype != torch.float64 and torch.amp.is_autocast_available(kind):
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    return str(dtype).removeprefix("torch.")


def device_of(x: Tensor) -> str:
    """Return a tensor's device, marked "(fake)" for a fake tensor."""
    return f"{x.device} (fake)" if isinstance(x, FakeTensor) else str(x.device)


def mapped(tensors: Iterable[Tensor]) -> int:
    """Return how many calls one call under torch.vmap stands for: the product of mapped lengths."""
    functorch: Any = torch._C._functorch
    axes: dict[int, int] = {}
    for x in tensors:
        while functorch.is_functorch_wrapped_tensor(x):
            inside = functorch.get_unwrapped(x)
            if functorch.is_batchedtensor(x):
                axes[functorch.maybe_get_level(x)] = inside.shape[functorch.maybe_get_bdim(x)]
            x = inside
    return math.prod(axes.values())


def _masked(mask: Tensor | None, causal: bool, sizes: Extents) -> Pattern:
    """Return the pattern of a mask or, without a mask, of torch's causal flag (top-left)."""
    if mask is not None:
        return read(mask, sizes.n_q, sizes.n_kv, sizes.batch, sizes.heads)
    if not causal:
        return Pattern()
    if sizes.cu_seqlens_q != sizes.cu_seqlens_k:
        return Pattern(mask=diagonal(1, 2).mask)
    return diagonal(sizes.n_q, sizes.n_kv)


def _window(left: int | None, right: int | None, causal: bool) -> tuple[int, int] | None:
    """Return the sliding window of a FlashAttention call, or None if the call has no limits."""
    left, right = (-1 if side is None else int(side) for side in (left, right))
    return None if left < 0 and (right < 0 or causal) else (left, 0 if causal else right)


def _lengths(x: Tensor, axis: int) -> tuple[int, ...]:
    """Return the offsets of the sequences that a nested tensor holds."""
    return tuple(accumulate((t.shape[axis] for t in x.unbind()), initial=0))


def _offsets(x: Tensor | None, notes: list[str]) -> tuple[int, ...] | None:
    """Return a call's offsets as integers; for unreadable offsets, return None and add a note."""
    if x is None:
        return None
    if not has_values(x):
        notes.append("offsets of packed sequences without values: counted as one sequence")
        return None
    with unset_fake_temporarily():
        return tuple(x.detach().tolist())


# -- readers --------------------------------------------------------------------------------------


def _sdpa(a: Arguments) -> AttentionCall:
    """Read scaled_dot_product_attention's or its operators' arguments, (..., heads, n, d)."""
    q, k, v = a["query"], a["key"], a["value"]
    notes: list[str] = []
    if q.is_nested:
        cu_q, cu_k = _lengths(q, -2), _lengths(k, -2)
        (heads, _, d), (kv_heads, _, d_v) = (x.unbind()[0].shape for x in (q, v))
        sizes = Extents(1, heads, kv_heads, cu_q[-1], cu_k[-1], d, d_v, cu_q, cu_k)
    else:
        kv_heads = k.shape[-3] if k.ndim > 2 else 1
        lead = q.shape[:-2]
        if not a.get("enable_gqa"):
            lead = torch.broadcast_shapes(lead, k.shape[:-2], v.shape[:-2])
        if math.prod(k.shape[:-3]) != math.prod(lead[:-1]):
            notes.append("k and v are shared along the batch: counted once an entry")
        heads = lead[-1] if lead else 1
        widths = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
        sizes = Extents.of(math.prod(lead[:-1]), heads, kv_heads, *widths)
    mask = a.get("attn_mask") if "attn_mask" in a else a.get("attn_bias")
    return AttentionCall(
        *("", "scaled_dot_product_attention", sizes, dtype_of(q, autocast=True), device_of(q)),
        pattern=_masked(mask, bool(a.get("is_causal")), sizes),
        scale=a.get("scale"),
        dropout=a.get("dropout_p", 0.0),
        notes=notes,
    )


#: Arguments of FlashAttention's functions that change what a call moves, but not its count.
_NOT_COUNTED = (
    *("alibi_slopes", "block_table", "page_table", "seqused_k", "leftpad_k", "qv", "seqused_q"),
    *("gather_kv_indices", "score_mod", "mask_mod", "block_sparse_tensors", "learnable_sink"),
)


def _flash(a: Arguments) -> AttentionCall:
    """Read FlashAttention's or torch's arguments, shaped (batch, n, heads, d) or packed 3-D.

    The functions' causal mask and window are bottom-right aligned.
    """
    q, v = (a[short if short in a else long] for short, long in (("q", "query"), ("v", "value")))
    notes: list[str] = []
    cu_q, cu_k = (
        _offsets(a.get(f"cu_seqlens_{side}", a.get(f"cum_seq_{side}")), notes) for side in "qk"
    )
    if cu_q is not None and cu_k is None:  # the keys are padded to one length, not packed
        notes.append("packed queries over padded keys: counted as one sequence")
        cu_q = None
    batch = q.shape[0] if q.ndim == 4 else 1
    heads, lengths, widths = ([x.shape[n] for x in (q, v)] for n in (-2, -3, -1))
    sizes = Extents.of(batch, *heads, *lengths, *widths, offsets=(cu_q, cu_k))
    causal = bool(a.get("causal", a.get("is_causal")))
    sides = a.get("window_size") or (a.get("window_size_left"), a.get("window_size_right"))
    window = _window(sides[0], sides[1], causal)
    for name in _NOT_COUNTED:
        if a.get(name) is not None:
            notes.append(f"{name}: not counted")
    return AttentionCall(
        *("", "FlashAttention", sizes, dtype_of(q), device_of(q)),
        pattern=Pattern(causal=causal, window=window),
        scale=a.get("softmax_scale", a.get("scale")),
        softcap=a.get("softcap") or 0.0,
        dropout=a.get("dropout_p") or 0.0,
        notes=notes,
    )


def _flash_4(a: Arguments) -> AttentionCall:
    """Read a call of FlashAttention-4's functions, in which a window's limits may be negative."""
    call = _flash(a)
    if any(side is not None and side < 0 for side in a.get("window_size") or ()):
        call.notes.append("a negative side of the window: counted as if that side had no limit")
    return call


_OF_SCORES = "score_mod: what it computes is not counted"

#: The names of calls of flashsim's own functions.
OURS = "flashsim.torch.attention"


def _ours(a: Arguments) -> AttentionCall:
    """Read the operator of `flashsim.torch.attention`, whose tensors are (batch, heads, n, d)."""
    q, v, call = a["q"], a["v"], OpCall(a["softcap"], a["scale"], a["text"])
    asked, said = call.question, heard(call.text)
    notes = [_OF_SCORES] if "score_mod" in said.functions else []
    unread = "mask_mod, which is not read: counted as dense"
    more = dict(zip(said.names, a["more"], strict=True))
    bias = more.get("bias")
    cu_q, cu_k = (_offsets(more.get(f"cu_seqlens_{side}"), notes) for side in "qk")
    (batch, heads, n_q, d), (_, kv_heads, n_kv, d_v) = q.shape, v.shape
    sizes = Extents.of(batch, heads, kv_heads, n_q, n_kv, d, d_v, offsets=(cu_q, cu_k))
    return AttentionCall(
        *("", OURS, sizes, dtype_of(q), device_of(q)),
        pattern=Pattern(
            causal=asked.causal,
            window=_window(asked.window_left, asked.window_right, asked.causal),
            bias=None if bias is None else tuple(bias.shape[:2]),
            sinks="sinks" in more,
            note=unread if "mask_mod" in said.functions else "",
        ),
        scale=call.scale,
        softcap=call.softcap,
        notes=notes,
    )


_FLEX = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options")


def _flex(a: Arguments) -> AttentionCall:
    """Read the (batch, heads, n, d) arguments of flex_attention, with the mask as a function."""
    q, k, v = a["query"], a["key"], a["value"]
    (batch, heads, n_q, d), (_, kv_heads, n_kv, d_v) = q.shape, v.shape
    sizes = Extents.of(batch, heads, kv_heads, n_q, n_kv, d, d_v)
    notes = []
    score_mod = a["score_mod"]  # torch's operator gets "_identity" for no function
    if score_mod is not None and getattr(score_mod, "__name__", "") != "_identity":
        notes.append(_OF_SCORES)
    if k.shape[0] != batch:
        notes.append("k and v are shared along the batch: counted once an entry")
    return AttentionCall(
        *("", "flex_attention", sizes, dtype_of(q), device_of(q)),
        pattern=_of_block_mask(a["block_mask"], sizes),
        scale=a["scale"],
        notes=notes,
    )


def _of_block_mask(block_mask: tuple[Any, ...], sizes: Extents) -> Pattern:
    """Return the pattern of flex_attention's mask, which is the last entry of `block_mask`."""
    mask, blocks = block_mask[-1], block_mask[2]
    if mask is flex.noop_mask:
        return Pattern()
    if not has_values(blocks):
        return Pattern(note="a mask function on tensors without values: counted as dense")
    lead, (n_q, n_kv) = blocks.shape[:2], (sizes.n_q, sizes.n_kv)
    if math.prod(lead) * n_q * n_kv > READ:
        return Pattern(note="a mask function of many scores, not read: counted as dense")
    with torch.no_grad(), unset_fake_temporarily():
        kept = flex.create_mask(mask, lead[0], lead[1], n_q, n_kv, device=str(blocks.device))
        return read(kept, n_q, n_kv, sizes.batch, sizes.heads)


def _multi_head(a: Arguments) -> AttentionCall:
    """Read F.multi_head_attention_forward's arguments, shaped (n, batch, width) or (n, width)."""
    q, k = (x if x.ndim == 3 else x.unsqueeze(1) for x in (a["query"], a["key"]))
    (n_q, batch, width), n_kv, heads = q.shape, k.shape[0], a["num_heads"]
    if a["static_k"] is not None:
        n_kv = a["static_k"].shape[1]
    n_kv += (a["bias_k"] is not None) + bool(a["add_zero_attn"])
    sizes = Extents.of(batch, heads, heads, n_q, n_kv, width // heads, width // heads)
    mask, padding = a["attn_mask"], a["key_padding_mask"]
    pattern, notes = Pattern(), []
    if n_kv != k.shape[0] or (mask is not None and padding is not None):
        pattern = Pattern(note="a mask and padding, or keys of the layer's own: counted as dense")
    elif mask is not None or padding is not None:
        given = mask if padding is None else padding.reshape(batch, 1, 1, n_kv)
        keeps = ~given if given.dtype == torch.bool else given
        if keeps.ndim == 3:
            keeps = keeps.reshape(batch, heads, n_q, n_kv)
        pattern = read(keeps, n_q, n_kv, batch, heads)
        if a["is_causal"] and not pattern.known:
            pattern = diagonal(n_q, n_kv)
    if a["need_weights"]:
        notes.append("its probabilities are returned, which FlashAttention never holds")
    return AttentionCall(
        *("", "MultiheadAttention", sizes, dtype_of(q, autocast=True), device_of(q)),
        pattern=pattern,
        dropout=a["dropout_p"] if a["training"] else 0.0,
        notes=notes,
    )


def _fused_layer(a: Arguments) -> AttentionCall:
    """Read the (batch, n, width) arguments of nn's fused attention and encoder layers."""
    q, k = (a["src"], a["src"]) if "src" in a else (a["query"], a["key"])
    heads = a["num_heads"] if "src" in a else a["num_head"]
    d = a["embed_dim"] // heads
    if q.is_nested:
        cu = _lengths(q, 0)
        sizes = Extents(1, heads, heads, cu[-1], cu[-1], d, d, cu, cu)
    else:
        sizes = Extents(q.shape[0], heads, heads, q.shape[1], k.shape[1], d, d)
    pattern, mask = Pattern(), a["mask"]
    if mask is not None and not q.is_nested:
        # True masks a score; a mask of type 1 is for keys, (batch, n).
        kept = ~mask.bool()
        kept = kept[:, None, None] if a["mask_type"] == 1 else kept
        pattern = read(kept, sizes.n_q, sizes.n_kv, sizes.batch, heads)
    notes = []
    if a.get("need_weights"):
        notes.append("its probabilities are returned, which FlashAttention never holds")
    kind = "TransformerEncoderLayer" if "src" in a else "MultiheadAttention"
    return AttentionCall(
        *("", f"{kind} (fast path)", sizes, dtype_of(q), device_of(q)), pattern=pattern, notes=notes
    )


#: FlashAttention-4's functions, which are autograd functions and no operators of torch.
_AUTOGRAD = (
    "flash_attn.cute.interface.FlashAttnFunc",
    "flash_attn.cute.interface.FlashAttnVarlenFunc",
)

_READERS: dict[str, Reader] = {
    **{
        f"aten::{name}": _sdpa
        for name in (
            *("scaled_dot_product_attention", "_scaled_dot_product_attention_math"),
            *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
            *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
            "_scaled_dot_product_fused_attention_overrideable",
        )
    },
    "aten::_flash_attention_forward": _flash,
    "flash_attn::_flash_attn_forward": _flash,
    "flash_attn::_flash_attn_varlen_forward": _flash,
    "flash_attn_3::_flash_attn_forward": _flash,
    "flashsim::attention": _ours,
    "flashsim::attention_without_gradient": _ours,
    "flex_attention": _flex,
    "aten::_native_multi_head_attention": _fused_layer,
    "aten::_transformer_encoder_layer_fwd": _fused_layer,
}


# -- Hugging Face ---------------------------------------------------------------------------------


def layer(
    name: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **rest: Any,
) -> AttentionCall:
    """Read a transformers attention function's layer and (batch, heads, n, d) arguments."""
    (batch, heads, n_q, d), (_, kv_heads, n_kv, d_v) = query.shape, value.shape
    sizes = Extents.of(batch, heads, kv_heads, n_q, n_kv, d, d_v)
    pattern = Pattern()
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
        pattern = read(attention_mask[..., :n_kv], n_q, n_kv, batch, heads)
        if not pattern.known:
            pattern = said(module, sizes, rest)
    elif attention_mask is not None or "flash" in name:  # they take padding, and declare the rest
        pattern = said(module, sizes, rest)
    if rest.get("position_bias") is not None:  # added to the mask, if that is a bias as well
        lead = added(rest["position_bias"], batch, heads)
        batches, of_heads = (max(pair) for pair in zip(lead, pattern.bias or lead, strict=True))
        pattern = replace(pattern, bias=(batches, of_heads))
    if rest.get("s_aux") is not None:
        pattern = replace(pattern, sinks=True)
    return AttentionCall(
        *("", f"transformers, {name}", sizes, dtype_of(query), device_of(query)),
        pattern=pattern,
        scale=scaling,
        softcap=softcap or 0.0,
        dropout=dropout,
    )


def said(module: Any, sizes: Extents, keywords: Arguments) -> Pattern:
    """Return the pattern that a transformers layer declares, for a mask that cannot be read."""
    causal = keywords.get("is_causal")
    causal = bool(getattr(module, "is_causal", False) if causal is None else causal)
    size = keywords.get("sliding_window") or getattr(module, "sliding_window", None)
    window = (size - 1, 0) if causal and size and size < sizes.n_kv else None
    word = "causal" if causal else "without a mask"
    return Pattern(
        causal=causal,
        window=window,
        note=f"a mask without values to read: counted as {word}, as the layer says",
    )
