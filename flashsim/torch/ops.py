"""The torch operators ``flashsim::attention`` and ``flashsim::attention_backward``.

The operators' tensors are (batch, heads, n, head_dim); `functional` supports other shapes. The list
`more` has the optional tensors: a bias, offsets, sinks, and arrays that functions capture. All
options except softcap and scale are one string, because torch dispatches an operator with few
arguments quickly. ``flashsim::attention_without_gradient`` has no gradient, so torch does not look
for one; the search takes as long as a launch. `direct` computes the operators' results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from operator import index
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flashsim.api import execution, inputs
from flashsim.errors import UnsupportedError
from flashsim.functions.builder import graph_of
from flashsim.functions.graph import Graph
from flashsim.functions.tracing import Traced
from flashsim.problem import checks

LIBRARY = torch.library.Library("flashsim", "FRAGMENT")
_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor[] more, float softcap, float? scale, str text"
for _name in ("attention", "attention_without_gradient"):
    LIBRARY.define(f"{_name}({_GIVEN}) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    f"attention_backward(Tensor dout, Tensor out, Tensor lse, Tensor? dlse, {_GIVEN}) -> Tensor[]"
)


# -- options --------------------------------------------------------------------------------------


class Options(NamedTuple):
    """The options of an attention call, without the tensors."""

    causal: bool
    window_left: int
    window_right: int
    softcap: float
    scale: float | None
    algorithm: str
    deterministic: bool | None
    backend: str

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of `flashsim.run`, and `deterministic`."""
        told = self._asdict()
        return {"window": (told.pop("window_left"), told.pop("window_right")), **told}


class Heard(NamedTuple):
    """What the text of an operator says: the options, the names of `more`, graphs of functions."""

    options: tuple[Any, ...]
    names: tuple[str, ...]
    functions: dict[str, Graph]
    #: The tensors of `more` with a gradient: their names in `flashsim.backward`'s results.
    moved: dict[str, str]

    def question(self, softcap: float, scale: float | None) -> Options:
        """Return all options of the call."""
        causal, left, right, *rest = self.options
        return Options(causal, left, right, softcap, scale, *rest)


def _flag(name: str, word: str) -> bool:
    """Return the flag that a word means; torch.compile passes flags unchecked."""
    return checks.flag(name, {"True": True, "False": False}.get(word, word))


@lru_cache(maxsize=1024)
def heard(text: str) -> Heard:
    """Return what an `OpCall`'s text says."""
    causal, left, right, algorithm, deterministic, by, names, functions = text.split(" ", 7)
    ordered = None if deterministic == "None" else _flag("deterministic", deterministic)
    options = _flag("causal", causal), int(left), int(right), algorithm, ordered, by
    asked = json.loads(functions or "{}")
    wanted = asked.pop("wanted", ())
    graphs = {name: graph_of(entry) for name, entry in asked.items()}
    moved = {"bias": "dbias", "sinks": "dsinks"}
    moved |= {f"score_mod.{n}": graphs["score_mod"].arrays[n].name for n in wanted}
    listed = tuple(names.split(",")) if names else ()
    moved = {name: moved[name] for name in listed if name in moved}
    return Heard(options, listed, graphs, moved)


class OpCall(NamedTuple):
    """A call's arguments after the tensors; the methods run the operators with them."""

    softcap: float
    scale: float | None
    text: str

    @classmethod
    def of(cls, question: Options, names: Sequence[str] = (), functions: str = "") -> OpCall:
        """Return the arguments for options, the names of `more`, and JSON of traced functions."""
        causal, left, right, softcap, scale, *rest = question
        # Under torch.compile, `index` makes a number of a symbol, which has no text.
        window = [index(x) if type(x) is int else x for x in (left, right)]
        words = " ".join(map(str, (causal, *window, *rest)))
        return cls(softcap, scale, f"{words} {','.join(names)} {functions}")

    @property
    def question(self) -> Options:
        """Return the call's options."""
        return heard(self.text).question(self.softcap, self.scale)

    @property
    def moved(self) -> list[bool]:
        """Return for each tensor of `more` whether it has a gradient."""
        said = heard(self.text)
        return [name in said.moved for name in said.names]

    def keywords(self, more: Sequence[Tensor]) -> dict[str, Any]:
        """Return `flashsim.run`'s keywords, and `deterministic`."""
        said, told = heard(self.text), self.question.keywords()
        tensors = dict(zip(said.names, more, strict=True))
        for name, graph in said.functions.items():
            arrays = (tensors.pop(f"{name}.{n}").detach() for n in range(len(graph.arrays)))
            told[name] = Traced(graph, tuple(arrays))
        offsets = "cu_seqlens_q", "cu_seqlens_k"
        return told | {n: x if n in offsets else readable(x) for n, x in tensors.items()}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        """Return out (batch, heads, n_q, head_dim_v) and lse (batch, heads, n_q)."""
        tensors, run = (q, k, v, *more), torch.ops.flashsim.attention_without_gradient.default
        trained = torch.is_grad_enabled() and any([x.requires_grad for x in tensors])
        # A program that is exported or traced without gradients may be trained later.
        if trained or torch.compiler.is_exporting() or torch.jit.is_tracing():
            run = torch.ops.flashsim.attention.default
        return run(q, k, v, [*more], *self)

    def backward(self, *tensors: Any) -> list[Tensor]:
        """Return dq, dk, dv and the gradients of those tensors of `more` that have one.

        `tensors` are dout, out, lse, dlse or None, q, k, v and those of `more`.
        """
        run = torch.ops.flashsim.attention_backward.default
        return run(*tensors[:7], [*tensors[7:]], *self)

    def mapped(self, back: bool, info: Any, dims: Sequence[Any], tensors: Sequence[Any]) -> Any:
        """Run a pass under torch.vmap: `folded`."""
        run = partial(gradients if back else attend, self)
        return folded(run, heard(self.text), info, dims, tensors)


# -- engines --------------------------------------------------------------------------------------


def run(q: Tensor, k: Tensor, v: Tensor, **told: Any) -> tuple[Tensor, Tensor]:
    """Return the out and the LSE of `flashsim.run`."""
    result = execution.run(*map(readable, (q, k, v)), **told)
    return result.out, result.lse


def run_backward(*tensors: Tensor, dlse: Tensor | None = None, **told: Any) -> Any:
    """Return the gradients of `flashsim.backward` of q, k, v, out, the LSE and out's gradient."""
    dlse = None if dlse is None else readable(dlse)
    return execution.backward(*map(readable, tensors), dlse=dlse, **told)


def readable(x: Tensor) -> Tensor:
    """Copy a tensor whose last axis is not contiguous, or that is broadcast or lazily negated."""
    x = x.detach().resolve_neg()
    return x.contiguous() if x.stride(-1) != 1 or 0 in x.stride() else x


# -- shapes ---------------------------------------------------------------------------------------


@torch.library.register_fake("flashsim::attention", lib=LIBRARY)
@torch.library.register_fake("flashsim::attention_without_gradient", lib=LIBRARY)
def _shapes(q: Tensor, k: Tensor, v: Tensor, more: Any, *asked: Any) -> tuple[Tensor, Tensor]:
    """Return empty tensors shaped like the results; raise the same errors as a real run.

    Offsets and a compiler's symbolic sizes have no values yet; the operator checks both at run
    time.
    """
    call = OpCall(*asked)
    said = heard(call.text)
    sized = all(type(n) is int for x in (q, k, v) for n in x.shape)
    if sized and not said.functions and "cu_seqlens_q" not in said.names:
        told = call.question.keywords()
        scores = {name: told[name] for name in ("causal", "window", "softcap", "scale")}
        bias = dict(zip(said.names, more, strict=True)).get("bias")
        inputs.prepare(q, k, v, inputs.Request(**scores), bias=bias, may_be_empty=True)
    return empty_results(q, v)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised out and LSE tensors for a forward pass with queries q and values v."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=wide)


@torch.library.register_fake("flashsim::attention_backward", lib=LIBRARY)
def _gradient_shapes(*given: Any) -> list[Tensor]:
    *qkv, more = given[4:8]
    moved = [x for x, moves in zip(more, OpCall(*given[8:]).moved, strict=True) if moves]
    return [x.new_empty(x.shape) for x in (*qkv, *moved)]


# -- gradient -------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    """Save inputs, out and the LSE (one number per row) for the backward pass."""
    q, k, v, more, *asked = inputs
    ctx.save_for_backward(*output, q, k, v, *more)
    ctx.call = OpCall(*asked)
    ctx.set_materialize_grads(False)  # the LSE usually has no gradient, so nothing is read


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    dq, dk, dv, *more = _pulled_back(ctx, dout, dlse)
    return dq, dk, dv, more, None, None, None


def _pulled_back(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of q, k, v and each tensor of `more`, or None."""
    out, lse, *tensors = ctx.saved_tensors
    if dout is None and dlse is None:
        return [None] * len(tensors)
    dout = torch.zeros_like(out) if dout is None else dout
    found = iter(gradients(ctx.call, dout, out, lse, dlse, *tensors))
    return [next(found) if moves else None for moves in (True, True, True, *ctx.call.moved)]


def no_second(ctx: Any, *_: Any) -> NoReturn:
    """Raise UnsupportedError instead of computing a second derivative."""
    raise UnsupportedError(
        "flashsim's attention has no second derivatives, because its backward kernel has no "
        "gradient; for second derivatives, use torch's math attention "
        "(torch.nn.attention.SDPBackend.MATH)"
    )


torch.library.register_autograd("flashsim::attention", _gradient, setup_context=_keep, lib=LIBRARY)
torch.library.register_autograd("flashsim::attention_backward", no_second, lib=LIBRARY)


def no_forward_mode(*_: Any) -> NoReturn:
    """Raise UnsupportedError, because flashsim does not support forward mode (`jvp`)."""
    raise UnsupportedError(
        "flashsim's attention has no forward mode (torch.func.jvp, jacfwd, linearize, "
        "torch.autograd.forward_ad): use reverse mode (backward(), torch.func.grad, vjp or "
        "jacrev), or, for forward mode, torch's math attention"
    )


# -- torch.func, which takes an autograd.Function but no operator's formula ------------------------


def attend(call: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Run the forward pass of an `OpCall` on 4-D tensors, with support for torch.func."""
    return Attend.apply(call, *tensors) if transformed() else call.forward(*tensors)


def gradients(call: Any, *tensors: Tensor | None) -> Sequence[Tensor]:
    """Run the backward pass of an `OpCall`, with support for torch.func; see `OpCall.backward`."""
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors):
        return _one_by_one(call, tensors)
    refuses = type(call) is OpCall or not torch.is_grad_enabled()  # second derivatives, or has none
    run = call.backward if refuses and not transformed() else partial(_Gradients.apply, call)
    return run(*tensors)


def _one_by_one(call: Any, tensors: Sequence[Any]) -> list[Tensor]:
    """Run the backward pass for each gradient of ``torch.autograd.grad(is_grads_batched=True)``."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    batched = torch._C._functorch.is_legacy_batchedtensor
    opened = [
        torch._remove_batch_dim(x, level, 1, 0) if x is not None and batched(x) else x
        for x in tensors
    ]
    mapped = [x is not y for x, y in zip(opened, tensors, strict=True)]
    found = [
        gradients(call, *(x[n] if of else x for x, of in zip(opened, mapped, strict=True)))
        for n in range(len(opened[mapped.index(True)]))
    ]
    stacked = map(torch.stack, zip(*found, strict=True))
    return [torch._add_batch_dim(x, 0, level) for x in stacked]


def transformed() -> bool:
    """Return True inside a torch.func transform or forward mode, which operators do not support."""
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    if torch.compiler.is_compiling():
        return no_forward_mode() if forward_mode else False
    return forward_mode or torch._C._are_functorch_transforms_active()


class Attend(torch.autograd.Function):
    """Runs the passes of an `OpCall`, or of an object with the same methods, as one function."""

    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(call: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and the LSE."""
        return call.forward(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save inputs, out and the LSE."""
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *of: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors."""
        return None, *_pulled_back(ctx, *of)

    @staticmethod
    def vmap(info: Any, dims: Any, call: Any, *tensors: Any) -> Any:
        """Run the forward pass for each entry of a mapped axis."""
        return call.mapped(False, info, dims[1:], tensors)


class _Gradients(torch.autograd.Function):
    """The backward pass; as a function of its own, it can refuse second derivatives."""

    backward = staticmethod(no_second)
    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(call: Any, *tensors: Any) -> tuple[Tensor, ...]:
        return tuple(call.backward(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing, because there are no second derivatives."""

    @staticmethod
    def vmap(info: Any, dims: Any, call: Any, *tensors: Any) -> Any:
        return call.mapped(True, info, dims[1:], tensors)


# -- vmap: one more axis of independent problems is a larger batch ---------------------------------


def folded(
    function: Callable[..., Any], said: Heard, info: Any, dims: Sequence[Any], tensors: Any
) -> Any:
    """Run a pass under torch.vmap, with the mapped axis in the batch.

    With sinks, `function` runs once per mapped entry, because all entries of a batch share sinks.
    The backward pass returns one gradient of the bias per mapped entry.
    """
    if said.functions:
        no_vmap()
    if not {"cu_seqlens_q", "cu_seqlens_k"}.isdisjoint(said.names):
        raise UnsupportedError(
            "torch.vmap cannot map packed sequences, because cu_seqlens already packs a batch "
            "into one sequence; pack the mapped sequences too, or loop over them"
        )
    size, pairs = info.batch_size, [*zip(tensors, dims, strict=True)]
    if not size:
        raise UnsupportedError(
            "torch.vmap over an axis of length 0 is not supported, because nothing is computed; "
            "skip the call if the axis is empty"
        )
    if "sinks" in said.names:
        entries = ([x if d is None else x.select(d, n) for x, d in pairs] for n in range(size))
        found = [function(*entry) for entry in entries]
        return _all_mapped(map(torch.stack, zip(*found, strict=True)))
    given: list[Any] = [x if x is None else _fold(x, dim, size) for x, dim in pairs]
    shared = False
    if said.names:
        bias, batch = _unfold(given[-1], size), len(given[0]) // size
        shared = bias.shape[1] == 1
        given[-1] = bias.expand(size, batch, *bias.shape[2:]).flatten(0, 1)
    results = [_unfold(x, size) for x in function(*given)]
    if shared and len(results) > 2:  # the gradient of the bias is the last one
        results[-1] = results[-1].sum(1, keepdim=True)
    return _all_mapped(results)


def no_vmap(*_: Any) -> NoReturn:
    """Raise UnsupportedError, because functions of b and h cannot tell mapped entries apart."""
    raise UnsupportedError(
        "flashsim.torch.flex_attention does not support torch.vmap; make the mapped axis part of "
        "the batch, or loop over it"
    )


def _all_mapped(results: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    results = tuple(results)
    return results, (0,) * len(results)


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Move mapped axis `dim` (None: repeat the tensor) into the batch: (size * batch, ...)."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _unfold(x: Tensor, size: int) -> Tensor:
    return x.unflatten(0, (size, len(x) // size))


@torch.library.register_vmap("flashsim::attention", lib=LIBRARY)
@torch.library.register_vmap("flashsim::attention_without_gradient", lib=LIBRARY)
def _mapped(info: Any, dims: Any, q: Tensor, k: Tensor, v: Tensor, more: Any, *asked: Any) -> Any:
    call, axes = OpCall(*asked), [*dims[:3], *(dims[3] or ())]
    return folded(call.forward, heard(call.text), info, axes, (q, k, v, *more))


@torch.library.register_vmap("flashsim::attention_backward", lib=LIBRARY)
def _backward_mapped(info: Any, dims: Any, *given: Any) -> Any:
    call, axes = OpCall(*given[8:]), [*dims[:7], *(dims[7] or ())]
    found = folded(call.backward, heard(call.text), info, axes, (*given[:7], *given[7]))
    return tuple(map(list, found))
