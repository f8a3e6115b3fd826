"""The torch operators ``flashsim::attention`` and ``flashsim::attention_backward``.

The operators' tensors are (batch, heads, n, head_dim); `functional` supports other shapes. The
functions `*_shapes` return the results' shapes, for torch.compile, the meta device and fake
tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashsim.api import execution, inputs
from flashsim.errors import UnsupportedError

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? sinks=None"
)
_QUESTION = (
    "bool causal, int window_left, int window_right, float softcap, float? scale, str algorithm, "
    "bool? deterministic, str backend"
)


@torch.library.custom_op(
    "flashsim::attention",
    mutates_args=(),
    schema=f"({_INPUTS}, *, {_QUESTION}) -> (Tensor out, Tensor lse)",
)
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    sinks: Tensor | None = None,
    *,
    deterministic: bool | None,
    **question: Any,
) -> tuple[Tensor, Tensor]:
    """Return out (batch, heads, n_q, head_dim_v) and lse (batch, heads, n_q) of `flashsim.run`."""
    asked = _given(bias, cu_seqlens_q, cu_seqlens_k, sinks) | keywords(**question)
    result = execution.run(*map(readable, (q, k, v)), **asked)
    return result.out, result.lse


@torch.library.custom_op(
    "flashsim::attention_backward",
    mutates_args=(),
    schema=(
        f"(Tensor dout, Tensor out, Tensor lse, Tensor? dlse, {_INPUTS}, *, {_QUESTION}) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
    ),
)
def backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    sinks: Tensor | None = None,
    *,
    deterministic: bool | None,
    **question: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `flashsim.backward`; return dq, dk, dv, dbias and dsinks (empty if not computed)."""
    asked = _given(bias, cu_seqlens_q, cu_seqlens_k, sinks) | keywords(**question)
    asked |= {"dlse": None if dlse is None else readable(dlse), "deterministic": deterministic}
    gradients = execution.backward(*map(readable, (q, k, v, out, lse, dout)), **asked)
    dbias = q.new_empty(0) if bias is None else gradients.dbias
    dsinks = q.new_empty(0) if sinks is None else gradients.dsinks.to(sinks.dtype)
    return gradients.dq, gradients.dk, gradients.dv, dbias, dsinks


def _given(bias: Tensor | None, of_q: Any, of_k: Any, sinks: Tensor | None) -> dict[str, Any]:
    """Return `flashsim.run`'s keywords for all of the operator's tensors except q, k and v."""
    return {
        **{"cu_seqlens_q": of_q, "cu_seqlens_k": of_k},
        "bias": None if bias is None else readable(bias),
        "sinks": None if sinks is None else readable(sinks),
    }


def keywords(*, window_left: int, window_right: int, **question: Any) -> dict[str, Any]:
    """Convert an operator's keywords to `flashsim.run`'s: two window limits become one pair."""
    return {"window": (window_left, window_right), **question}


def readable(x: Tensor) -> Tensor:
    """Copy a tensor whose last axis is not contiguous, or that is broadcast or lazily negated."""
    x = x.detach().resolve_neg()
    return x.contiguous() if x.stride(-1) != 1 or 0 in x.stride() else x


# -- shapes ---------------------------------------------------------------------------------------


@forward.register_fake
def forward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    sinks: Tensor | None = None,
    *,
    algorithm: str,
    deterministic: bool | None,
    backend: str,
    **question: Any,
) -> tuple[Tensor, Tensor]:
    """Return empty tensors shaped like the results; raise the same errors as a real run.

    Offsets and a compiler's symbolic sizes have no values yet; the operator checks both at run
    time.
    """
    if all(type(n) is int for x in (q, k, v) for n in x.shape) and cu_seqlens_q is None:
        request = inputs.Request(**keywords(**question))
        inputs.prepare(q, k, v, request, bias=bias, may_be_empty=True)
    return empty_results(q, v)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised out and LSE tensors for a forward pass with queries q and values v."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=wide)


@backward.register_fake
def backward_shapes(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    sinks: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return empty tensors shaped like the gradients."""
    more = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (bias, sinks))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *more


# -- gradient -------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Any) -> None:
    """Save inputs, out and the LSE (one number per row) for the backward pass."""
    out, lse = output
    ctx.save_for_backward(out, lse, *inputs)
    ctx.question = keyword_only_inputs
    ctx.set_materialize_grads(False)  # the LSE usually has no gradient, so nothing is read


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    out, lse, *inputs = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * len(inputs)
    dout = torch.zeros_like(out) if dout is None else dout
    *gradients, dbias, dsinks = pulled_back(dout, out, lse, dlse, *inputs, **ctx.question)
    given = zip((dbias, None, None, dsinks), inputs[3:], strict=True)
    return (*gradients, *(None if x is None else g for g, x in given))


def no_second(ctx: Any, *_: Any) -> NoReturn:
    """Raise UnsupportedError instead of computing a second derivative."""
    raise UnsupportedError(
        "flashsim's attention has no second derivatives, because its backward kernel has no "
        "gradient; for second derivatives, use torch's math attention "
        "(torch.nn.attention.SDPBackend.MATH)"
    )


forward.register_autograd(_gradient, setup_context=_keep)
backward.register_autograd(no_second)


def no_forward_mode(*_: Any) -> NoReturn:
    """Raise UnsupportedError, because flashsim does not support forward mode (`jvp`)."""
    raise UnsupportedError(
        "flashsim's attention has no forward mode (torch.func.jvp, jacfwd, linearize, "
        "torch.autograd.forward_ad): use reverse mode (backward(), torch.func.grad, vjp or "
        "jacrev), or, for forward mode, torch's math attention"
    )


# -- torch.func, which takes an autograd.Function but no operator's formula ------------------------


def differentiable(*tensors: Tensor | None, **question: Any) -> tuple[Tensor, Tensor]:
    """Run `forward`, with support for torch.func's gradients, which the operator itself lacks."""
    if _transformed():
        return _Forward.apply(*tensors, question)
    return forward(*tensors, **question)


def _transformed() -> bool:
    """Return True inside a torch.func transform or forward mode, which operators do not support."""
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    if torch.compiler.is_compiling():
        return no_forward_mode() if forward_mode else False
    return forward_mode or torch._C._are_functorch_transforms_active()


def pulled_back(*tensors: Tensor | None, **question: Any) -> tuple[Tensor, ...]:
    """Run `backward`, with support for torch.func's transforms, which the operator itself lacks."""
    if _transformed():
        return _Backward.apply(*tensors, question)
    return backward(*tensors, **question)


class _Forward(torch.autograd.Function):
    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(*tensors_and_question: Any) -> tuple[Tensor, Tensor]:
        *tensors, question = tensors_and_question
        return forward(*tensors, **question)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, question = inputs
        _keep(ctx, tensors, question, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return (*_gradient(ctx, *gradients), None)

    @staticmethod
    def vmap(info: Any, dims: Any, *tensors_and_question: Any) -> Any:
        *tensors, question = tensors_and_question
        return forward_folded(differentiable, info, dims, *tensors, **question)


class _Backward(torch.autograd.Function):
    backward = staticmethod(no_second)
    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(*tensors_and_question: Any) -> tuple[Tensor, ...]:
        *tensors, question = tensors_and_question
        return backward(*tensors, **question)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for a backward pass, because there is no second derivative."""

    @staticmethod
    def vmap(info: Any, dims: Any, *tensors_and_question: Any) -> Any:
        *tensors, question = tensors_and_question
        return backward_folded(pulled_back, info, dims, *tensors, **question)


# -- vmap: one more axis of independent problems is a larger batch ---------------------------------


def forward_folded(
    function: Callable[..., Any],
    info: Any,
    dims: tuple[int | None, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    sinks: Tensor | None = None,
    **question: Any,
) -> Any:
    """Run `forward` or `differentiable` under torch.vmap, with the mapped axis in the batch.

    With sinks, `function` runs once per mapped entry, because all entries of a batch share sinks.
    """
    _refuse_packed(cu_seqlens_q, cu_seqlens_k)
    if sinks is not None:
        return _one_by_one(function, info, dims, q, k, v, bias, None, None, sinks, **question)
    size = info.batch_size
    q, k, v = (_fold(x, dim, size) for x, dim in zip((q, k, v), dims, strict=False))
    if bias is not None:
        bias = _fold_bias(bias, dims[3], size, len(q) // size)
    out, lse = function(q, k, v, bias, None, None, **question)
    return (_unfold(out, size), _unfold(lse, size)), (0, 0)


def backward_folded(
    function: Callable[..., Any],
    info: Any,
    dims: tuple[int | None, ...],
    *tensors: Any,
    **question: Any,
) -> Any:
    """Run `backward` or `pulled_back` under torch.vmap; return one dbias per mapped entry."""
    _refuse_packed(*tensors[8:10])
    if any(x is not None for x in tensors[10:]):
        return _one_by_one(function, info, dims, *tensors, **question)
    size, bias, of_bias = info.batch_size, tensors[7], dims[7]
    folded: list[Any] = [
        None if x is None else _fold(x, dim, size)
        for x, dim in zip(tensors[:7], dims, strict=False)
    ]
    shared = None
    if bias is not None:
        shared = bias.shape[0 if of_bias is None else 1 if of_bias == 0 else 0] == 1
        bias = _fold_bias(bias, of_bias, size, len(folded[0]) // size)
    *gradients, dbias, dsinks = function(*folded, bias, None, None, **question)
    unfolded = [_unfold(x, size) for x in gradients]
    if bias is None:
        return (*unfolded, dbias, dsinks), (0, 0, 0, None, None)
    dbias = _unfold(dbias, size)
    dbias = dbias.sum(1, keepdim=True) if shared else dbias
    return (*unfolded, dbias, dsinks), (0, 0, 0, 0, None)


forward.register_vmap(partial(forward_folded, forward))
backward.register_vmap(partial(backward_folded, backward))


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Move mapped axis `dim` (None: repeat the tensor) into the batch: (size * batch, ...)."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _fold_bias(bias: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """Move a bias's mapped axis into the batch: (1 or batch, ...) becomes (size * batch, ...)."""
    bias = bias.expand(size, *bias.shape) if dim is None else bias.movedim(dim, 0)
    return bias.expand(size, batch, *bias.shape[2:]).flatten(0, 1)


def _one_by_one(
    function: Callable[..., Any], info: Any, dims: Any, *tensors: Any, **question: Any
) -> Any:
    """Run `function` for each entry of the axis that torch.vmap maps, and stack the results."""

    def entry(n: int) -> list[Tensor | None]:
        axes = (*dims, *(None,) * len(tensors))  # dims may be of more or fewer arguments
        pairs = zip(tensors, axes, strict=False)
        return [x if axis is None else x.select(axis, n) for x, axis in pairs]

    found = [function(*entry(n), **question) for n in range(info.batch_size)]
    stacked = tuple(map(torch.stack, zip(*found, strict=True)))
    return stacked, (0,) * len(stacked)


def _unfold(x: Tensor, size: int) -> Tensor:
    return x.unflatten(0, (size, len(x) // size))


def _refuse_packed(*offsets: Any) -> None:
    if any(x is not None for x in offsets):
        raise UnsupportedError(
            "torch.vmap cannot map packed sequences, because cu_seqlens already packs a batch "
            "into one sequence; pack the mapped sequences too, or loop over them"
        )
