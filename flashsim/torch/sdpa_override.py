"""Lets flashsim replace the attention of torch and of Hugging Face's transformers.

`install` and ``torch.nn.attention.activate_flash_attention_impl("flashsim")`` switch flashsim on,
and ``restore_flash_attention_impl()`` switches it off. While flashsim is on,
``scaled_dot_product_attention`` runs flashsim wherever torch would choose flash attention, on the
CPU and on CUDA. On CUDA, torch's flash attention takes no `attn_mask`. For calls with a mask,
flashsim therefore also replaces torch's other fused kernels. Dropout raises an error, because the
kernels do not support it.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from flashsim.api import execution
from flashsim.errors import BackendUnavailable, UnsupportedError
from flashsim.functions import causal as top_left
from flashsim.torch.functional import default_backend

NAME = "flashsim"


def install() -> tuple[str, ...]:
    """Register "flashsim" with torch and, if transformers is installed, with transformers.

    Nothing changes until a program selects "flashsim" by name:
    ``torch.nn.attention.activate_flash_attention_impl("flashsim")``, or for a Hugging Face model
    ``set_attn_implementation("flashsim")``.

    Returns
    -------
    tuple of str
        The libraries that now know "flashsim". If transformers is too old, there is a warning.

    Raises
    ------
    BackendUnavailable
        If this version of torch has no registry of implementations.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise BackendUnavailable(
            f"torch {torch.__version__} has no register_flash_attention_impl; upgrade torch, or "
            "call flashsim.torch.attention"
        ) from None
    register_flash_attention_impl(NAME, register_fn=_activate)
    if importlib.util.find_spec("transformers") is None:
        return ("torch",)
    from flashsim.torch import hugging_face

    try:
        hugging_face.register(NAME)
    except UnsupportedError as error:
        warnings.warn(str(error), stacklevel=2)
        return ("torch",)
    return ("torch", "transformers")


class _Activated:
    """Replaces functions in torch's dispatcher until `remove` runs or this object is deleted."""

    def __init__(self) -> None:
        self.libraries = [_replace("CPU", _CPU), _replace("CUDA", _CUDA)]
        if torch.cuda.is_available():
            self.libraries.append(_replace("CUDA", _masked_on_cuda(), with_keyset=True))

    def remove(self) -> None:
        """Restore torch's own attention."""
        self.libraries.clear()


def _activate() -> _Activated:
    return _Activated()


def _replace(device: str, functions: dict[str, Any], **how: Any) -> Library:
    library = Library("aten", "IMPL", device)
    with warnings.catch_warnings():  # the user requested the override
        warnings.filterwarnings("ignore", message=".*[Oo]verrid")
        for name, function in functions.items():
            library.impl(name, torch.compiler.disable(function), device, **how)
    return library


def _of_a_gradient(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function `backward`, to return no gradients if torch passes no gradients."""

    @wraps(backward)
    def checked(grad_out: Tensor | None, *args: Any, **options: Any) -> Any:
        return (None,) * 3 if grad_out is None else backward(grad_out, *args, **options)

    return checked


# -- with a mask ----------------------------------------------------------------------------------


def _masked_question(
    q: Tensor,
    k: Tensor,
    dropout: float,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    *,
    narrow: bool = True,
) -> dict[str, Any]:
    """Convert torch's arguments, with a top-left causal mask, to `flashsim.run`'s keywords."""
    _refuse_dropout(dropout)
    square = q.shape[2] == k.shape[2]
    return {
        "causal": causal and square,
        "mask_mod": top_left() if causal and not square else None,
        "bias": None if mask is None else _as_bias(mask, q, k, narrow=narrow),
        "scale": scale,
        "backend": default_backend(q),
    }


def _as_bias(mask: Tensor, q: Tensor, k: Tensor, *, narrow: bool) -> Tensor:
    """Return a mask as a bias (-infinity for False); with `narrow`, broadcast axes get length 1."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        mask = zero.masked_fill(~mask, float("-inf"))
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)).to(q.dtype)
    for axis in (0, 1) if narrow else ():
        mask = mask.narrow(axis, 0, 1) if mask.stride(axis) == 0 and mask.numel() else mask
    return mask.expand(*mask.shape[:2], q.shape[2], k.shape[2]).contiguous()


def _masked_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Replace torch's ``_scaled_dot_product_flash_attention_for_cpu``; keep memory layouts."""
    q, k, v = _dense(query, key, value)
    question = _masked_question(q, k, dropout_p, is_causal, attn_mask, scale)
    result = execution.run(q, k, v, **question)
    return _laid_out(result.out, query), _by_token(result.lse)


@_of_a_gradient
def _masked_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Replace torch's ``_scaled_dot_product_flash_attention_for_cpu_backward``."""
    gradients = _masked_gradients(
        (query, key, value, out, logsumexp, grad_out),
        *(dropout_p, is_causal, attn_mask, scale),
        of_mask=False,
    )
    return tuple(map(_by_token, (gradients.dq, gradients.dk, gradients.dv)))


def _masked_gradients(
    tensors: tuple[Tensor, ...],
    dropout: float,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    *,
    of_mask: bool,
) -> Any:
    """Return gradients of q, k and v; `tensors` has q, k, v, out, LSE and the gradient of out."""
    q, k, v, out, lse, dout = _dense(*tensors)
    question = _masked_question(q, k, dropout, causal, mask, scale, narrow=not of_mask)
    deterministic = torch.are_deterministic_algorithms_enabled() if q.is_cuda else None
    return execution.backward(q, k, v, out, lse, dout, deterministic=deterministic, **question)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` in the memory layout of `like`, which torch promises to compiled code."""
    place = torch.empty_like(like)
    return x if x.stride() == place.stride() else place.copy_(x)


def _dense(*tensors: Tensor) -> list[Tensor]:
    return [x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in tensors]


def _by_token(x: Tensor) -> Tensor:
    """Return `x` with the memory order (batch, n, heads, d), like torch's gradients."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


_CPU = {
    "_scaled_dot_product_flash_attention_for_cpu": _masked_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _masked_backward,
}

# -- CUDA -----------------------------------------------------------------------------------------


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **rest: Any,
) -> tuple[Tensor, ...]:
    """Replace torch's ``_flash_attention_forward`` on (batch, n, heads, d) or packed tensors."""
    _refuse_dropout(dropout_p)
    asked = sorted(name for name, value in rest.items() if value is not None)
    if return_debug_mask or asked:
        raise UnsupportedError(
            f"flashsim's attention does not support {', '.join(asked or ['return_debug_mask'])}; "
            "call torch.nn.attention.restore_flash_attention_impl() to use torch's attention "
            "again"
        )
    question = _question(
        query, cum_seq_q, cum_seq_k, is_causal, scale, window_size_left, window_size_right
    )
    q, k, v = (_by_head(x, cum_seq_q) for x in (query, key, value))
    result = execution.run(q, k, v, **question)
    lse = result.lse if cum_seq_q is None else result.lse[0]
    return _by_row(result.out, cum_seq_q), lse, *_no_dropout(query)


@_of_a_gradient
def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """Replace torch's ``_flash_attention_backward``."""
    _refuse_dropout(dropout_p)
    question = _question(
        query, cum_seq_q, cum_seq_k, is_causal, scale, window_size_left, window_size_right
    )
    q, k, v, out, dout = (_by_head(x, cum_seq_q) for x in (query, key, value, out, grad_out))
    lse = logsumexp if cum_seq_q is None else logsumexp[None]
    gradients = execution.backward(
        *(q, k, v, out, lse, dout),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **question,
    )
    return tuple(_by_row(x, cum_seq_q) for x in (gradients.dq, gradients.dk, gradients.dv))


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Replace ``_scaled_dot_product_flash_attention`` of torch, on (batch, heads, n, d)."""
    n_q, n_k = query.shape[2], key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *rest = _flash_forward(
        q, k, v, None, None, n_q, n_k, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return _laid_out(out.transpose(1, 2), query), lse, None, None, n_q, n_k, *rest


@_of_a_gradient
def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Replace torch's ``_scaled_dot_product_flash_attention_backward``."""
    dout, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    options = (max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)
    gradients = _flash_backward(dout, q, k, v, out, logsumexp, None, None, *options, scale=scale)
    like = (query, key, value)
    return tuple(_laid_out(x.transpose(1, 2), y) for x, y in zip(gradients, like, strict=True))


def _question(
    query: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    causal: bool,
    scale: float | None,
    left: int | None,
    right: int | None,
) -> dict[str, Any]:
    return {
        "causal": causal,
        "window": tuple(-1 if side is None else side for side in (left, right)),
        "scale": scale,
        "cu_seqlens_q": cum_seq_q,
        "cu_seqlens_k": cum_seq_k,
        "backend": default_backend(query),
    }


def _by_head(x: Tensor, packed: Tensor | None) -> Tensor:
    """Return a (batch, n, heads, d) or packed tensor as (batch, heads, n, d), not broadcast."""
    x = x.detach()
    x = x.contiguous() if x.stride(-1) != 1 or 0 in x.stride() else x
    return x.transpose(1, 2) if packed is None else x.transpose(0, 1)[None]


def _by_row(x: Tensor, packed: Tensor | None) -> Tensor:
    """Return a contiguous tensor (batch, n, heads, d), or (tokens, heads, d) if packed."""
    x = x.transpose(1, 2).contiguous()
    return x if packed is None else x[0]


def _no_dropout(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return placeholders for torch's two dropout outputs: a generator state and a mask."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return state, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise UnsupportedError(
            f"flashsim's attention has no dropout, got dropout_p={dropout}; pass dropout_p=0"
        )


_CUDA = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}

# -- CUDA, with a mask: the kernels that torch chooses there ---------------------------------------


def _efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Replace torch's ``_scaled_dot_product_efficient_attention``; pad LSE to a multiple of 32."""
    out, lse = _masked_forward(
        *(query, key, value, dropout_p, is_causal), attn_mask=attn_bias, scale=scale
    )
    rows = -lse.shape[-1] % 32
    lse = torch.nn.functional.pad(lse, (0, rows)) if compute_log_sumexp else lse[..., :0]
    state, offset, _ = _no_dropout(query)
    return _by_token(out), lse.contiguous(), state[0].long(), offset.long()


@_of_a_gradient
def _efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """Replace torch's ``_scaled_dot_product_efficient_attention_backward``."""
    lse = logsumexp[..., : query.shape[2]].contiguous()
    found = _masked_gradients(
        (query, key, value, out, lse, grad_out_),
        *(dropout_p, is_causal, attn_bias, scale),
        of_mask=grad_input_mask[3],
    )
    of_mask = found.dbias if grad_input_mask[3] else None
    return (*map(_by_token, (found.dq, found.dk, found.dv)), of_mask)


def _cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Replace torch's ``_scaled_dot_product_cudnn_attention``."""
    out, lse = _masked_forward(
        *(query, key, value, dropout_p, is_causal), attn_mask=attn_bias, scale=scale
    )
    state, offset, _ = _no_dropout(query)
    ends = None, None, query.shape[2], key.shape[2]
    return out, lse.contiguous()[..., None], *ends, state[0].long(), offset.long(), None


@_of_a_gradient
def _cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Replace torch's ``_scaled_dot_product_cudnn_attention_backward``."""
    found = _masked_gradients(
        (query, key, value, out, logsumexp[..., 0], grad_out),
        *(dropout_p, is_causal, attn_bias, scale),
        of_mask=False,
    )
    pairs = zip((found.dq, found.dk, found.dv), (query, key, value), strict=True)
    return tuple(_laid_out(x, like) for x, like in pairs)


#: Replacements, and which of their arguments is the mask.
_MASKED_ON_CUDA = {
    "_scaled_dot_product_efficient_attention": (_efficient_forward, 3),
    "_scaled_dot_product_efficient_attention_backward": (_efficient_backward, 4),
    "_scaled_dot_product_cudnn_attention": (_cudnn_forward, 3),
    "_scaled_dot_product_cudnn_attention_backward": (_cudnn_backward, 8),
}


def _masked_on_cuda() -> dict[str, Any]:
    """Return, by name, the functions that replace torch's CUDA operators for calls with a mask."""
    kernel = torch.library.get_kernel
    return {
        name: _if_masked(function, at, kernel(f"aten::{name}", "CUDA"))
        for name, (function, at) in _MASKED_ON_CUDA.items()
    }


def _if_masked(function: Callable[..., Any], at: int, own: Any) -> Callable[..., Any]:
    """Return a function that calls `function` if argument number `at` is a mask, else `own`."""

    @wraps(function)
    def chosen(keyset: Any, *args: Any, **options: Any) -> Any:
        if args[at] is None:
            return own.call_boxed(keyset, *args, **options)
        return function(*args, **options)

    return chosen
