"""Makes `flex_attention` work in ``torch.compile``, as an operator with functions as subgraphs.

Dynamo, the compiler's tracer, inlines Python functions, and so cannot pass a function as a value.
Dynamo traces functions separately, as subgraphs, only for torch's own flex attention, a
"higher-order operator". Dynamo treats `compiled` as torch's flex attention. When called, `compiled`
converts the subgraphs to flashsim's graphs, and passes the graphs as text to
``flashsim::flex_attention``, an ordinary operator.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from flashsim.functions.builder import graph_of
from flashsim.functions.mask import MaskFunction
from flashsim.functions.symbols import Captured, Symbol
from flashsim.functions.tracing import Traced, trace_mask, trace_score
from flashsim.torch import ops
from flashsim.torch.flex_passes import FlexPasses

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] score_arrays, Tensor[] mask_arrays"
)
_QUESTION = "str score, str mask, int[] wanted, float? scale, str backend"


@torch.library.custom_op(
    "flashsim::flex_attention",
    mutates_args=(),
    schema=f"({_TENSORS}, *, {_QUESTION}) -> (Tensor out, Tensor lse)",
)
def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *arrays: Any, **question: Any
) -> tuple[Tensor, Tensor]:
    """Run `flashsim.run` with functions as text; `wanted` names the arrays that get gradients."""
    return _passes(*arrays, **question).forward(q, k, v, sinks)


@torch.library.custom_op(
    "flashsim::flex_attention_backward",
    mutates_args=(),
    schema=(
        f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_TENSORS}, *, {_QUESTION}) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor[] captured)"
    ),
)
def backward(*tensors: Any, **question: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Run `flashsim.backward`; return the gradients, with an empty tensor as dsinks if unused."""
    dout, dlse, out, lse, q, k, v, sinks, *arrays = tensors
    passes = _passes(*arrays, **question)
    dq, dk, dv, dsinks, captured = passes.backward((dout, dlse), (out, lse), (q, k, v), sinks)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks, captured


def _passes(
    score_arrays: Sequence[Tensor],
    mask_arrays: Sequence[Tensor],
    score: str,
    mask: str,
    wanted: Sequence[int],
    scale: float | None,
    backend: str,
) -> FlexPasses:
    arrays = tuple(x.detach() for x in score_arrays)
    return FlexPasses(
        Traced(_graph(score), arrays) if score else None,
        MaskFunction(_graph(mask), mask_arrays) if mask else None,
        scale,
        tuple(_graph(score).arrays[n].name for n in wanted),
        backend,
    )


@functools.lru_cache(64)
def _graph(text: str) -> Any:
    return graph_of(json.loads(text))


@forward.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return ops.empty_results(q, v)


@backward.register_fake
def _gradient_shapes(
    *tensors: Any, wanted: Sequence[int], **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    q, k, v, sinks, score_arrays, _ = tensors[4:]
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    arrays = [score_arrays[n].new_empty(score_arrays[n].shape) for n in wanted]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks, arrays


def _keep(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Any) -> None:
    q, k, v, sinks, score_arrays, mask_arrays = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, *score_arrays, *mask_arrays)
    ctx.counts, ctx.question = (len(score_arrays), len(mask_arrays)), keyword_only_inputs
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, sinks, out, lse, *arrays = ctx.saved_tensors
    n_score, n_mask = ctx.counts
    if dout is None and dlse is None:
        return None, None, None, None, [None] * n_score, [None] * n_mask
    dout = torch.zeros_like(out) if dout is None else dout
    given = (q, k, v, sinks, arrays[:n_score], arrays[n_score:])
    dq, dk, dv, dsinks, captured = backward(dout, dlse, out, lse, *given, **ctx.question)
    of_arrays: list[Tensor | None] = [None] * n_score
    for n, gradient in zip(ctx.question["wanted"], captured, strict=True):
        of_arrays[n] = gradient
    return dq, dk, dv, None if sinks is None else dsinks, of_arrays, [None] * n_mask


forward.register_autograd(_gradient, setup_context=_keep)
backward.register_autograd(ops.no_second)


# -- what Dynamo calls -----------------------------------------------------------------------------


_NAME = "flashsim_flex_attention"


def known() -> bool:
    """Make Dynamo treat `compiled` as torch's flex attention; return True if that succeeded."""
    from torch._dynamo.variables import higher_order_ops

    classes = getattr(higher_order_ops, "_hop_name_to_variable_class", {})
    if "flex_attention" in classes:
        classes[_NAME] = classes["flex_attention"]
    return _NAME in classes


known._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result does


class _Compiled(HigherOrderOperator):
    """A higher-order operator; `block_mask` holds the sinks and the mask function's subgraph."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.otherwise: Callable[..., tuple[Tensor, Tensor]]  # `flex.uncompiled`

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_mod: Any,
        block_mask: Any,
        scale: float | None,
        options: Any,
        score_captured: Sequence[Any] = (),
        mask_captured: Sequence[Any] = (),
    ) -> tuple[Tensor, Tensor]:
        if not hasattr(score_mod, "graph"):  # Dynamo gave up, and Python calls this as it is
            sinks, mask = block_mask
            return self.otherwise((q, k, v), score_mod, mask, scale, sinks, **options)
        score = trace_score(_function(score_mod, score_captured, True))
        mask = trace_mask(_function(block_mask[-1], mask_captured, False))
        plain = score.graph.nodes[score.graph.root].op == "arg"  # the score itself
        every = mask.graph.nodes[mask.graph.root].op == "const"
        wanted = [n for n, x in enumerate(score.arrays) if x.requires_grad]
        return forward(
            *(q, k, v, block_mask[0]),
            *([*score.arrays], [] if every else [*mask.arrays]),
            score="" if plain else json.dumps(score.graph.entry()),
            mask="" if every else json.dumps(mask.graph.entry()),
            wanted=wanted,
            scale=scale,
            backend=options["backend"],
        )


#: Dynamo looks for such an object among a function's globals.
compiled = _Compiled()


def _function(subgraph: Any, captured: Sequence[Any], of_score: bool) -> Callable[..., Any]:
    """Return a Python function that evaluates one of Dynamo's subgraphs."""
    body = _Body(subgraph)
    numbers = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    arrays = tuple(numbers.get(type(x), lambda same: same)(x) for x in captured)
    held = body.held()
    if of_score:
        return lambda score, b, h, q, k: body.value((score, b, h, q, k, *arrays), held)
    return lambda b, h, q, k: body.value((b, h, q, k, *arrays), held)


class _Body:
    """A subgraph from Dynamo, which can be called with symbols as arguments."""

    def __init__(self, subgraph: Any) -> None:
        self._graph = subgraph

    def held(self) -> tuple[Tensor, ...]:
        """Return the tensors that the subgraph stores as attributes, in node order."""
        nodes = self._graph.graph.find_nodes(op="get_attr")
        return tuple(getattr(self._graph, node.target) for node in nodes)

    def value(self, given: Sequence[Any], held: Sequence[Any]) -> Any:
        """Evaluate Dynamo's subgraph node by node, and return the result."""
        found: dict[Any, Any] = {}
        inputs, own = iter(given), iter(held)
        for node in self._graph.graph.nodes:
            args, keywords = torch.fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
            if node.op == "placeholder":
                found[node] = next(inputs)
            elif node.op == "get_attr":
                found[node] = next(own)
            elif node.op == "call_method" and node.target == "item":
                found[node] = args[0]  # a Python number that changed between calls
            elif node.op == "call_method":
                found[node] = getattr(args[0], node.target)(*args[1:], **keywords)
            elif node.op == "output":
                return args[0][0] if isinstance(args[0], (tuple, list)) else args[0]
            else:
                found[node] = _called(node.target, args, keywords)
        raise AssertionError(
            "the graph of flex_attention must end with its output, but it has none"
        )


def _called(target: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Evaluate one node of a subgraph: call the node's function, or index an array."""
    indexed = len(args) == 2 and isinstance(args[1], (tuple, list))
    if indexed and isinstance(args[0], (Captured, Symbol)) and "index" in _name(target).lower():
        return args[0][tuple(args[1])]
    return target(*args, **keywords)


def _name(target: Any) -> str:
    return getattr(target, "__qualname__", "") or getattr(target, "__name__", "") or str(target)
