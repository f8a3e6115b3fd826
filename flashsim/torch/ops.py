"""The torch operators ``flashsim::attention`` and ``flashsim::attention_backward``.

The operators' tensors are (batch, heads, n, head_dim); `functional` supports other shapes. The
functions `*_shapes` return the results' shapes, for torch.compile, the meta device and fake
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def run(q: Tensor, k: Tensor, v: Tensor, **told: Any) -> tuple[Tensor, Tensor]:
    """Return the out and the LSE of `flashsim.run`."""
    result = execution.run(*map(readable, (q, k, v)), **told)
    return result.out, result.lse


def run_backward(*tensors: Tensor, dlse: Tensor | None = None, **told: Any) -> Any:
    """Return the gradients of `flashsim.backward` of q, k, v, out, the LSE and out's gradient."""
    dlse = None if dlse is None else readable(dlse)
    return execution.backward(*map(readable, tensors), dlse=dlse, **told)


@torch.library.custom_op(
    "flashsim::attention",
    mutates_args=(),
    schema=f"({_INPUTS}, *, {_QUESTION}) -> (Tensor out, Tensor lse)",
)
def forward(*tensors: Any, deterministic: bool | None, **question: Any) -> tuple[Tensor, Tensor]:
    """Return out (batch, heads, n_q, head_dim_v) and lse (batch, heads, n_q) of `flashsim.run`."""
    q, k, v, *more = tensors
    return run(q, k, v, **_given(*more), **keywords(**question))


@torch.library.custom_op(
    "flashsim::attention_backward",
    mutates_args=(),
    schema=(
        f"(Tensor dout, Tensor out, Tensor lse, Tensor? dlse, {_INPUTS}, *, {_QUESTION}) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
    ),
)
def backward(*tensors: Any, **question: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `flashsim.backward`; return dq, dk, dv, dbias and dsinks (empty if not computed)."""
    dout, out, lse, dlse, q, k, v, *more = tensors
    given, told = _given(*more), keywords(**question)
    gradients = run_backward(q, k, v, out, lse, dout, dlse=dlse, **given, **told)
    dbias = q.new_empty(0) if given["bias"] is None else gradients.dbias
    dsinks = q.new_empty(0) if given["sinks"] is None else gradients.dsinks.to(more[3].dtype)
    return gradients.dq, gradients.dk, gradients.dv, dbias, dsinks


def _given(bias: Any, of_q: Any, of_k: Any, sinks: Tensor | None = None) -> dict[str, Any]:
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

_CHECKED_LATER = {"algorithm", "deterministic", "backend"}


@forward.register_fake
def forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, cu_seqlens_q: Any, *_: Any, **told: Any
) -> tuple[Tensor, Tensor]:
    """Return empty tensors shaped like the results; raise the same errors as a real run.

    Offsets and a compiler's symbolic sizes have no values yet; the operator checks both at run
    time.
    """
    if all(type(n) is int for x in (q, k, v) for n in x.shape) and cu_seqlens_q is None:
        told = {name: told[name] for name in told.keys() - _CHECKED_LATER}
        request = inputs.Request(**keywords(**told))
        inputs.prepare(q, k, v, request, bias=bias, may_be_empty=True)
    return empty_results(q, v)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised out and LSE tensors for a forward pass with queries q and values v."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=wide)


@backward.register_fake
def backward_shapes(*tensors: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return empty tensors shaped like the gradients."""
    q, k, v, bias, _, _, sinks = _all(tensors)[4:]
    more = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (bias, sinks))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *more


def _all(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the tensors of an operator with the sinks last, which a caller may leave out."""
    complete = len(tensors) in (7, 11)  # of the forward and of the backward operator
    return tuple(tensors) if complete else (*tensors, None)


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
    *gradients, dbias, dsinks = through(backward, dout, out, lse, dlse, *inputs, **ctx.question)
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


def through(operator: Callable[..., Any], *tensors: Any, **question: Any) -> tuple[Tensor, ...]:
    """Run `forward` or `backward`, with support for torch.func, which the operators lack."""
    if transformed():
        return _Transformed.apply(*tensors, operator, question)
    return operator(*tensors, **question)


def transformed() -> bool:
    """Return True inside a torch.func transform or forward mode, which operators do not support."""
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    if torch.compiler.is_compiling():
        return no_forward_mode() if forward_mode else False
    return forward_mode or torch._C._are_functorch_transforms_active()


class _Transformed(torch.autograd.Function):
    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:
        *tensors, operator, question = given
        return operator(*tensors, **question)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, operator, question = inputs
        ctx.of_forward = operator is forward
        if ctx.of_forward:
            _keep(ctx, tensors, question, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        if not ctx.of_forward:
            no_second(ctx)
        return (*_gradient(ctx, *gradients), None, None)

    @staticmethod
    def vmap(info: Any, dims: Any, *given: Any) -> Any:
        *tensors, operator, question = given
        return folded(partial(through, operator), info, dims, *tensors, **question)


# -- vmap: one more axis of independent problems is a larger batch ---------------------------------


def folded(
    function: Callable[..., Any], info: Any, dims: Sequence[Any], *tensors: Any, **question: Any
) -> Any:
    """Run one of the operators under torch.vmap, with the mapped axis in the batch.

    With sinks, `function` runs once per mapped entry, because all entries of a batch share sinks.
    The backward operator returns one dbias per mapped entry.
    """
    *dense, bias, of_q, of_k, sinks = _all(tensors)
    if of_q is not None or of_k is not None:
        raise UnsupportedError(
            "torch.vmap cannot map packed sequences, because cu_seqlens already packs a batch "
            "into one sequence; pack the mapped sequences too, or loop over them"
        )
    if sinks is not None:
        return _one_by_one(function, info, dims, *tensors, **question)
    size, dim, shared = info.batch_size, dims[len(dense)], False
    pairs = zip(dense, dims, strict=False)
    dense = [x if x is None else _fold(x, axis, size) for x, axis in pairs]
    if bias is not None:
        bias = bias.expand(size, *bias.shape) if dim is None else bias.movedim(dim, 0)
        shared = bias.shape[1] == 1
        bias = bias.expand(size, len(dense[0]) // size, *bias.shape[2:]).flatten(0, 1)
    found = function(*dense, bias, None, None, **question)
    unfolded = [_unfold(x, size) for x in found[:3]]
    if len(found) == 2:  # out and the LSE
        return tuple(unfolded), (0, 0)
    dbias, dsinks = found[3:]
    if bias is None:
        return (*unfolded, dbias, dsinks), (0, 0, 0, None, None)
    dbias = _unfold(dbias, size)
    dbias = dbias.sum(1, keepdim=True) if shared else dbias
    return (*unfolded, dbias, dsinks), (0, 0, 0, 0, None)


forward.register_vmap(partial(folded, forward))
backward.register_vmap(partial(folded, backward))


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Move mapped axis `dim` (None: repeat the tensor) into the batch: (size * batch, ...)."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


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
