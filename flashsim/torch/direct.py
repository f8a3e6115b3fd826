"""Repeated calls of `attention` run directly on an engine: only the first call is checked.

A `Ready` is a checked call; a `Ready`'s cache key contains all values that the checks read. In
eager mode, a `Ready` runs as a plain `torch.autograd.Function`. Under torch.compile, or if
something observes or transforms operators (a dispatch mode, torch.func, forward mode,
torch.jit.trace), a `Ready` runs inside the operator ``flashsim::attention``.

On a GPU, calls with few queries run the decode kernels even if a gradient is needed, so that calls
with and without a gradient return the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashsim.api import inputs
from flashsim.api.array_libraries import from_torch
from flashsim.api.arrays import warn_of_overflow
from flashsim.api.decode_options import few_queries
from flashsim.api.inputs import Request
from flashsim.api.request import Checked, ask
from flashsim.torch import ops
from flashsim.torch.ops import Options, heard, readable

_C = torch._C
_AD = torch.autograd.forward_ad


class Ready:
    """A checked call: `forward(q, k, v)` and `backward(q, k, v, out, lse, dout, dlse=None)`.

    `output(q, k, v)` is the forward pass without the LSE, and `by_token(q, k, v)` returns its
    result as (batch, n_q, heads, head_dim_v), contiguous. `repeated(q, k, v)` returns `by_token`
    for tensors that differ from these only in their addresses.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, question: Options) -> None:
        self.question = question
        run = question.keywords()
        deterministic = run.pop("deterministic")
        self.forward: Any = partial(ops.run, **run)
        self.output: Any = self._output
        self.by_token: Any = self._by_token
        self.repeated: Any = lambda q, k, v: self.by_token
        self.backward: Any = partial(_gradients, deterministic=deterministic, **run)
        if _few(q, k, v) and run["backend"] == "cupy":
            self.forward = decoder = _decoder(q, k, v, Request(**run))
            self.output, self.by_token = decoder.output, decoder.by_token
            self.repeated = decoder.repeated
            return
        asked, job = ask(Request(**run), *map(readable, (q, k, v)))
        if asked.empty or asked.ndim != 4:
            return
        # This object must not keep the call's tensors alive.
        bare = job.given(None, None, None)
        kept = replace(asked, job=bare)
        if asked.host.library:
            self.forward = _on_cpu(kept)
            return
        direct = getattr(asked.engine, "direct", None)
        made = direct and direct(
            job,
            lambda saved, dlse: kept.backward_job(
                bare, saved, None, deterministic, None, dlse=dlse
            ),
        )
        if made:
            self.forward, self.backward = made.forward, made.backward

    def _output(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.forward(q, k, v)[0]

    def _by_token(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.forward(q, k, v)[0].transpose(1, 2).contiguous()


def _gradients(
    *tensors: Tensor | None, deterministic: bool | None, **told: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, given q, k, v, out, lse, dout and, if it is not None, dlse."""
    dlse = tensors[6] if len(tensors) > 6 else None
    got = ops.run_backward(*tensors[:6], dlse=dlse, deterministic=deterministic, **told)
    return got.dq, got.dk, got.dv


def _on_cpu(asked: Checked) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the forward pass of a checked call on a CPU engine."""
    checked, run, give = asked.job, asked.engine.forward, asked.host.give

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        job = checked.given(_numbers(q), _numbers(k), _numbers(v))
        outcome = run(job)
        if unseen := outcome.unseen("out"):
            warn_of_overflow(unseen, job.inputs)
        return give(outcome.arrays["out"]), give(outcome.arrays["lse"])

    return forward


def _numbers(x: Tensor) -> Any:
    """Return a NumPy array that shares a tensor's memory."""
    x = x.detach().resolve_neg()
    return from_torch("", x) if x.dtype == torch.bfloat16 else x.numpy()


def _few(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if a CUDA call has so few queries that the decode kernels run it."""
    ranks = q.ndim, k.ndim, v.ndim
    if not q.is_cuda or ranks != (4, 4, 4) or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    return few_queries(q.shape, k.shape, v.shape)


def about(n: int) -> int:
    """Return the number of keys `n`, rounded up so that similar cache lengths share a `Ready`."""
    step = max(128, 1 << max(n.bit_length() - 5, 0))
    return -(-n // step) * step


def _decoder(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Any:
    """Return a function that runs the decode kernel for these tensor types and any cache length."""
    import flashsim.backends.cupy_gpu.engine as cupy_engine

    if q.shape[2] == 1:  # one query sees all keys, since its own is the last
        request = request._replace(causal=False)
    given = inputs.prepare(readable(q), readable(k), readable(v), request)
    return cupy_engine.decoder(replace(given.problem, n_kv=about(k.shape[2])), q)


_READY: dict[tuple[Any, ...], Ready] = {}
_MOST = 1024
#: Calls of `_READY` by the exact shapes of k and v. A token of a decoding loop looks up all layers
#: but the first here, and does not round the number of keys.
_EXACT: dict[tuple[Any, ...], Ready] = {}
_MOST_EXACT = 256


def ready(q: Tensor, k: Tensor, v: Tensor, asked: tuple[Any, ...]) -> Ready | None:
    """Return the cached `Ready` of an operator's call; the first call with q, k and v is checked.

    For a call with other tensors, or with functions, return None.
    """
    key = _key(q, k, v, asked)
    call = _EXACT.get(key) or _found(key, q, k, v)
    if call is None:
        said = heard(asked[2])
        if not (said.names or said.functions):
            call = first(key, q, k, v, said.question(*asked[:2]))
    return call


def _key(q: Tensor, k: Tensor, v: Tensor, asked: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the cache key of a call, which includes the options' types, because True equals 1."""
    return (
        *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
        *(q.layout, k.layout, v.layout, asked, *map(type, asked)),
    )


def _rounded(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return the key of `_READY`, in which calls with few queries have a rounded number of keys."""
    if not _few(q, k, v):
        return key
    of_q, of_k, of_v, *rest = key
    n = about(of_k[2])
    return of_q, (*of_k[:2], n, of_k[3]), (*of_v[:2], n, of_v[3]), *rest


def _found(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> Ready | None:
    """Return the call that `_READY` has for a key, and add it to `_EXACT`."""
    call = _READY.get(_rounded(key, q, k, v))
    if call is not None:
        if len(_EXACT) >= _MOST_EXACT:
            _EXACT.clear()
        _EXACT[key] = call
    return call


def unwatched() -> bool:
    """Return True if no mode, transform or tracer of torch observes operators.

    The function does not ask whether torch.compile traces the code.
    """
    return not (
        _C._len_torch_dispatch_stack()
        or _C._are_functorch_transforms_active()
        or _AD._current_level >= 0
        or _C._get_tracing_state() is not None
    )


def known(q: Any, k: Any, v: Any, asked: tuple[Any, ...]) -> tuple[Ready | None, tuple[Any, ...]]:
    """Return (cached call or None, cache key); the key is () if the call must not be cached."""
    if not type(q) is type(k) is type(v) is Tensor or not unwatched():
        return None, ()
    try:
        if q.is_neg() or k.is_neg() or v.is_neg():
            return None, ()
        key = _key(q, k, v, asked)
        call = _EXACT.get(key)
        if call is not None:
            return call, key
        return (None, ()) if q.is_meta else (_found(key, q, k, v), key)
    except (RuntimeError, TypeError):  # a nested tensor; a value that has no hash
        return None, ()


def first(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, question: Options) -> Ready:
    """Check a call of `attention`, and cache a `Ready` under the key that `known` returned."""
    call = Ready(q, k, v, question)
    if len(_READY) >= _MOST:
        _READY.clear()
        _EXACT.clear()
    _READY[_rounded(key, q, k, v)] = call
    return call


def attend(
    call: Ready, q: Tensor, k: Tensor, v: Tensor, *, with_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a checked call eagerly, with a gradient if q, k or v requires one."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _applied(q, k, v, call, with_lse)
    return call.forward(q, k, v) if with_lse else call.output(q, k, v)


def by_token(call: Ready, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run a checked call as `attend` does; return the output as (batch, n_q, heads, head_dim_v)."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _applied(q, k, v, call, False).transpose(1, 2).contiguous()
    return call.by_token(q, k, v)


class _Attend(torch.autograd.Function):
    jvp = staticmethod(ops.no_forward_mode)

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Ready, with_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        out, lse = call.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        if with_lse:
            ctx.set_materialize_grads(False)  # the LSE usually has no gradient
            return out, lse
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return None, None, None, None, None
            dout = torch.zeros_like(out)
        mapped = _C._functorch.is_legacy_batchedtensor(dout)  # by is_grads_batched
        eager = type(dout) is Tensor and not mapped and unwatched()
        if eager and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            dq, dk, dv = ctx.call.backward(q, k, v, out, lse, dout, dlse)
        else:  # also for a second derivative, which the operator refuses
            asked = ops.OpCall.of(ctx.call.question)
            dq, dk, dv = ops.gradients(asked, dout, out, lse, dlse, q, k, v)
        return dq, dk, dv, None, None


_live = _C._functorch.unwrap_if_dead


def _applied(q: Tensor, k: Tensor, v: Tensor, call: Ready, with_lse: bool) -> Any:
    """Run a checked call with a gradient; no transform of torch.func may be active.

    This is `_Attend.apply` without its Python part, which takes as long as a launch. That part
    binds default arguments, looks for transforms of torch.func and unwraps tensors that left them.
    """
    apply: Any = super(torch.autograd.Function, _Attend).apply
    return apply(_live(q), _live(k), _live(v), call, with_lse)


# -- the operators' results -----------------------------------------------------------------------


def _attention(
    q: Tensor, k: Tensor, v: Tensor, more: list[Tensor], *asked: Any
) -> tuple[Tensor, Tensor]:
    """Run the forward pass of ``flashsim::attention``."""
    call = ready(q, k, v, asked)
    if call is not None:
        return call.forward(q, k, v)
    told = ops.OpCall(*asked).keywords(more)
    del told["deterministic"]
    return ops.run(q, k, v, **told)


def _backward(*given: Any) -> list[Tensor]:
    """Run ``flashsim::attention_backward``; return the gradients of the tensors that have one."""
    dout, out, lse, dlse, q, k, v, more, *asked = given
    call = ready(q, k, v, tuple(asked))
    if call is not None:
        return [*call.backward(q, k, v, out, lse, dout, dlse)]
    said, told = heard(asked[2]), ops.OpCall(*asked).keywords(more)
    captured = [name for key, name in said.moved.items() if key not in ("bias", "sinks")]
    found = ops.run_backward(*(q, k, v, out, lse, dout), dlse=dlse, captured=captured, **told)
    gradients = {"dbias": found.dbias, "dsinks": found.dsinks, **(found.captured or {})}
    pairs = zip(said.names, more, strict=True)
    moved = [gradients[said.moved[n]].to(x.dtype) for n, x in pairs if n in said.moved]
    return [found.dq, found.dk, found.dv, *moved]


for _name in ("attention", "attention_without_gradient"):
    ops.LIBRARY.impl(_name, _attention, "CompositeExplicitAutograd")
ops.LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")


class _Eager(ops.OpCall):
    """A call whose passes run without torch's dispatcher."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        return _attention(q, k, v, [*more], *self)

    def backward(self, *tensors: Any) -> list[Tensor]:
        return _backward(*tensors[:7], [*tensors[7:]], *self)


def general(call: ops.OpCall, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Run any call of `attention` on 4-D tensors; if nothing observes it, without an operator."""
    if torch.compiler.is_compiling() or not unwatched() or tensors[0].is_meta:
        return ops.attend(call, *tensors)
    if any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_neg() for x in tensors):
        return ops.attend(call, *tensors)
    eager = _Eager(*call)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return eager.forward(*tensors)
    apply: Any = super(torch.autograd.Function, ops.Attend).apply  # as in `_applied`
    return apply(eager, *map(_live, tensors))
