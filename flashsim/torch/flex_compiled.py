"""Makes `flex_attention` work in ``torch.compile``, as an operator with functions as subgraphs.

Dynamo, the compiler's tracer, inlines Python functions, and so cannot pass a function as a value.
Dynamo traces functions separately, as subgraphs, only for torch's own flex attention, a
"higher-order operator". Dynamo treats `compiled` as torch's flex attention. When called, `compiled`
converts the subgraphs to flashsim's graphs, and passes the graphs as text to the ordinary operator
``flashsim::attention``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from flashsim.functions.symbols import Captured, Symbol
from flashsim.functions.tracing import trace_mask, trace_score
from flashsim.torch.ops import OpCall, Options

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
        functions: dict[str, Any] = {}
        more = {} if block_mask[0] is None else {"sinks": block_mask[0]}
        if score.graph.nodes[score.graph.root].op != "arg":  # not the score itself
            functions["score_mod"] = score.graph.entry()
            functions["wanted"] = [n for n, x in enumerate(score.arrays) if x.requires_grad]
            more |= {f"score_mod.{n}": x for n, x in enumerate(score.arrays)}
        if mask.graph.nodes[mask.graph.root].value is not True:  # not every score is kept
            functions["mask_mod"] = mask.graph.entry()
            more |= {f"mask_mod.{n}": x for n, x in enumerate(mask.arrays)}
        question = Options(False, -1, -1, 0.0, scale, "flash2", None, options["backend"])
        return OpCall.of(question, [*more], json.dumps(functions)).forward(q, k, v, *more.values())


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
