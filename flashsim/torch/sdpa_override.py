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
from collections import namedtuple
from collections.abc import Callable, Mapping
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
    register_flash_attention_impl(NAME, register_fn=_Activated)
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
        self.libraries = [
            _replace("CPU", _replacements(_CPU)),
            _replace("CUDA", _replacements(_CUDA)),
        ]
        if torch.cuda.is_available():
            self.libraries.append(_replace("CUDA", _masked_on_cuda(), with_keyset=True))

    def remove(self) -> None:
        """Restore torch's own attention."""
        self.libraries.clear()


def _replace(device: str, functions: dict[str, Any], **how: Any) -> Library:
    library = Library("aten", "IMPL", device)
    with warnings.catch_warnings():  # the user requested the override
        warnings.filterwarnings("ignore", message=".*[Oo]verrid")
        for name, function in functions.items():
            library.impl(name, torch.compiler.disable(function), device, **how)
    return library


#: The arguments of one of torch's operators, by their names in the operator's schema. It is a named
#: tuple, which takes the host less time than another object.
_Arguments = Any
#: Arguments that torch's operators call differently, and those that only some operators have.
_SAME = {"attn_bias": "attn_mask", "grad_out_": "grad_out"}
_OF_SOME = {"attn_mask", "cum_seq_q", "cum_seq_k", "window_size_left", "window_size_right"}


def _names(operator: str) -> list[str]:
    schema = getattr(torch.ops.aten, operator).default._schema
    return [_SAME.get(argument.name, argument.name) for argument in schema.arguments]


def _replacement(operator: str, function: Callable[[_Arguments], Any]) -> Callable[..., Any]:
    """Return `function` as a replacement for one of torch's operators.

    If torch passes no gradient, the replacement of a backward operator returns no gradients.
    """
    schema, names = getattr(torch.ops.aten, operator).default._schema, _names(operator)
    defaults = {name: x.default_value for name, x in zip(names, schema.arguments, strict=True)}
    defaults |= dict.fromkeys(_OF_SOME - defaults.keys())
    arguments = namedtuple("Arguments", [*defaults], defaults=[*defaults.values()])  # type: ignore[misc]
    backward = names[0] == "grad_out"

    def replaced(*args: Any, **named: Any) -> Any:
        if backward and args[0] is None:
            return (None,) * 3
        return function(arguments(*args, **named))

    return replaced


def _replacements(functions: Mapping[str, Callable[[_Arguments], Any]]) -> dict[str, Any]:
    return {name: _replacement(name, function) for name, function in functions.items()}


# -- with a mask ----------------------------------------------------------------------------------


def _masked_question(a: _Arguments, q: Tensor, k: Tensor, *, narrow: bool = True) -> dict[str, Any]:
    """Convert torch's arguments, with a top-left causal mask, to `flashsim.run`'s keywords."""
    _refuse_dropout(a.dropout_p)
    square = q.shape[2] == k.shape[2]
    return {
        "causal": a.is_causal and square,
        "mask_mod": top_left() if a.is_causal and not square else None,
        "bias": None if a.attn_mask is None else _as_bias(a.attn_mask, q, k, narrow=narrow),
        "scale": a.scale,
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


def _masked_forward(a: _Arguments) -> tuple[Tensor, Tensor]:
    """Run the forward pass on (batch, heads, n, d) tensors; keep memory layouts."""
    q, k, v = _dense(a.query, a.key, a.value)
    result = execution.run(q, k, v, **_masked_question(a, q, k))
    return _laid_out(result.out, a.query), _by_token(result.lse)


def _masked_gradients(a: _Arguments, lse: Tensor, *, of_mask: bool = False) -> Any:
    """Run the backward pass on (batch, heads, n, d) tensors, and return the gradients."""
    q, k, v, out, lse, dout = _dense(a.query, a.key, a.value, a.out, lse, a.grad_out)
    question = _masked_question(a, q, k, narrow=not of_mask)
    deterministic = torch.are_deterministic_algorithms_enabled() if q.is_cuda else None
    return execution.backward(q, k, v, out, lse, dout, deterministic=deterministic, **question)


def _masked_backward(a: _Arguments) -> tuple[Tensor, ...]:
    found = _masked_gradients(a, a.logsumexp)
    return tuple(map(_by_token, (found.dq, found.dk, found.dv)))


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` in the memory layout of `like`, which torch promises to compiled code."""
    if x.stride() == like.stride():
        return x
    place = torch.empty_like(like)
    return x if x.stride() == place.stride() else place.copy_(x)


def _dense(*tensors: Tensor) -> list[Tensor]:
    return [x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in tensors]


def _by_token(x: Tensor) -> Tensor:
    """Return `x` with the memory order (batch, n, heads, d), like torch's gradients."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _forward_on_cpu(a: _Arguments) -> tuple[Tensor, Tensor]:
    """Run `_masked_forward`; as in torch, a row that sees no key has the LSE 0.

    If flashsim is switched off before the backward pass, torch's kernel reads this LSE.
    """
    out, lse = _masked_forward(a)
    return out, lse.masked_fill_(lse == -torch.inf, 0)


_CPU = {
    "_scaled_dot_product_flash_attention_for_cpu": _forward_on_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _masked_backward,
}

# -- CUDA -----------------------------------------------------------------------------------------

#: The arguments of ``_flash_attention_forward`` that flashsim supports or ignores.
_SUPPORTED = frozenset((
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p"),
    *("is_causal", "return_debug_mask", "scale", "window_size_left", "window_size_right"),
))  # fmt: skip


def _flash_forward(a: _Arguments) -> tuple[Tensor, ...]:
    """Run the forward pass on (batch, n, heads, d) or packed tensors."""
    question = _question(a)
    asked = sorted(n for n, x in a._asdict().items() if x is not None and n not in _SUPPORTED)
    if a.return_debug_mask or asked:
        raise UnsupportedError(
            f"flashsim's attention does not support {', '.join(asked or ['return_debug_mask'])}; "
            "call torch.nn.attention.restore_flash_attention_impl() to use torch's attention "
            "again"
        )
    q, k, v = (_by_head(x, a.cum_seq_q) for x in (a.query, a.key, a.value))
    result = execution.run(q, k, v, **question)
    lse = result.lse if a.cum_seq_q is None else result.lse[0]
    return _by_row(result.out, a.cum_seq_q), lse, *_no_dropout(a.query)


def _flash_backward(a: _Arguments) -> tuple[Tensor, ...]:
    """Run the backward pass on (batch, n, heads, d) or packed tensors."""
    question = _question(a)
    tensors = a.query, a.key, a.value, a.out, a.grad_out
    q, k, v, out, dout = (_by_head(x, a.cum_seq_q) for x in tensors)
    lse = a.logsumexp if a.cum_seq_q is None else a.logsumexp[None]
    gradients = execution.backward(
        *(q, k, v, out, lse, dout),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **question,
    )
    return tuple(_by_row(x, a.cum_seq_q) for x in (gradients.dq, gradients.dk, gradients.dv))


def _turned(a: _Arguments, *names: str) -> _Arguments:
    """Return arguments whose tensors `names` are (batch, n, heads, d), not (batch, heads, n, d)."""
    tensors = {name: getattr(a, name).transpose(1, 2) for name in names}
    return a._replace(**tensors, cum_seq_q=None, cum_seq_k=None)


def _sdpa_forward(a: _Arguments) -> tuple[Any, ...]:
    """Run the forward pass on (batch, heads, n, d) tensors."""
    out, lse, *rest = _flash_forward(_turned(a, "query", "key", "value"))
    ends = None, None, a.query.shape[2], a.key.shape[2]
    return _laid_out(out.transpose(1, 2), a.query), lse, *ends, *rest


def _sdpa_backward(a: _Arguments) -> tuple[Tensor, ...]:
    """Run the backward pass on (batch, heads, n, d) tensors."""
    gradients = _flash_backward(_turned(a, "grad_out", "query", "key", "value", "out"))
    like = (a.query, a.key, a.value)
    return tuple(_laid_out(x.transpose(1, 2), y) for x, y in zip(gradients, like, strict=True))


def _question(a: _Arguments) -> dict[str, Any]:
    _refuse_dropout(a.dropout_p)
    sides = a.window_size_left, a.window_size_right
    return {
        "causal": a.is_causal,
        "window": tuple(-1 if side is None else side for side in sides),
        "scale": a.scale,
        "cu_seqlens_q": a.cum_seq_q,
        "cu_seqlens_k": a.cum_seq_k,
        "backend": default_backend(a.query),
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


def _efficient_forward(a: _Arguments) -> tuple[Tensor, ...]:
    """Run the forward pass, and pad the LSE to a multiple of 32 rows."""
    out, lse = _masked_forward(a)
    rows = -lse.shape[-1] % 32
    lse = torch.nn.functional.pad(lse, (0, rows)) if a.compute_log_sumexp else lse[..., :0]
    state, offset, _ = _no_dropout(a.query)
    return _by_token(out), lse.contiguous(), state[0].long(), offset.long()


def _efficient_backward(a: _Arguments) -> tuple[Tensor | None, ...]:
    lse, of_mask = a.logsumexp[..., : a.query.shape[2]].contiguous(), a.grad_input_mask[3]
    found = _masked_gradients(a, lse, of_mask=of_mask)
    dbias = found.dbias if of_mask else None
    return (*map(_by_token, (found.dq, found.dk, found.dv)), dbias)


def _cudnn_forward(a: _Arguments) -> tuple[Any, ...]:
    out, lse = _masked_forward(a)
    state, offset, _ = _no_dropout(a.query)
    ends = None, None, a.query.shape[2], a.key.shape[2]
    return out, lse.contiguous()[..., None], *ends, state[0].long(), offset.long(), None


def _cudnn_backward(a: _Arguments) -> tuple[Tensor, ...]:
    found = _masked_gradients(a, a.logsumexp[..., 0])
    pairs = zip((found.dq, found.dk, found.dv), (a.query, a.key, a.value), strict=True)
    return tuple(_laid_out(x, like) for x, like in pairs)


_MASKED_ON_CUDA = {
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}


def _masked_on_cuda() -> dict[str, Any]:
    """Return, by name, the functions that replace torch's CUDA operators for calls with a mask."""
    kernel = torch.library.get_kernel
    return {
        name: _if_masked(function, _names(name).index("attn_mask"), kernel(f"aten::{name}", "CUDA"))
        for name, function in _replacements(_MASKED_ON_CUDA).items()
    }


def _if_masked(function: Callable[..., Any], at: int, own: Any) -> Callable[..., Any]:
    """Return a function that calls `function` if argument number `at` is a mask, else `own`."""

    def chosen(keyset: Any, *args: Any, **options: Any) -> Any:
        if args[at] is None:
            return own.call_boxed(keyset, *args, **options)
        return function(*args, **options)

    return chosen
