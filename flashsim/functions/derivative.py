"""Reverse-mode derivatives of a score function, added as nodes to the function's graph.

The added nodes compute gradients of the score and of each captured element from `dout`, the
gradient of the function's result. Comparisons, conversions to integers and integer operations have
no derivative. Where `minimum` or `maximum` has two equal arguments, each gets half of the gradient,
as in torch and JAX.
"""

import math
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import NamedTuple

from flashsim.functions.builder import Builder
from flashsim.functions.graph import ArraySpec, Graph, Node, count_flops, needed
from flashsim.functions.operations import FLOAT, SCORE

#: The name of the argument that holds the gradient of a score function's result.
DOUT = "dout"


class Adjoints(NamedTuple):
    """A score function's graph, extended by the nodes of its derivative.

    `score` is the number of the node that computes the score's gradient. `score` is None if the
    function's result does not depend on the score. For each load of a captured element that has a
    gradient, `reads` has a pair of node numbers (load, gradient).
    """

    nodes: tuple[Node, ...]
    root: int
    score: int | None
    reads: tuple[tuple[int, int], ...]
    arrays: tuple[ArraySpec, ...]

    @property
    def roots(self) -> list[int]:
        """The numbers of the nodes that compute gradients: one per load, and one for the score."""
        return [g for _, g in self.reads] + ([] if self.score is None else [self.score])

    @property
    def numbers(self) -> list[int]:
        """The numbers of all nodes that the gradients depend on, in order, including loads."""
        return needed(self.nodes, [*self.roots, *(n for n, _ in self.reads)])


def adjoints(graph: Graph, wanted: Collection[str] | None = None) -> Adjoints:
    """Return a score function's graph, extended by gradients of arrays `wanted` (None: all)."""
    build = Builder(graph.nodes, graph.arrays)
    gradient: dict[int, int] = {graph.root: build.put(Node("arg", (), DOUT, FLOAT))}
    reads = []
    score = None
    for n in reversed(range(len(graph.nodes))):
        node = graph.nodes[n]
        if n not in gradient or node.kind != FLOAT:
            continue
        g = gradient[n]
        if node.op == "arg" and node.value == SCORE:
            score = g
        if node.op == "load" and (wanted is None or graph.arrays[node.value].name in wanted):
            reads.append((n, g))
        if node.op not in RULES:
            continue
        for a, term in zip(node.args, RULES[node.op](_Terms(build), g, n, *node.args), strict=True):
            if term is not None and build.nodes[a].kind == FLOAT:
                gradient[a] = build.op("add", gradient[a], term) if a in gradient else term
    return Adjoints(tuple(build.nodes), graph.root, score, tuple(reads), graph.arrays)


@lru_cache(maxsize=256)
def gradient_flops(graph: Graph, wanted: tuple[str, ...]) -> int:
    """Return the FLOPs per score of a score function's derivative, including recomputed values."""
    made = adjoints(graph, wanted)
    return count_flops(made.nodes, needed(made.nodes, made.roots))


class _Terms:
    """Short methods that add a derivative's operations to a graph."""

    def __init__(self, build: Builder) -> None:
        self.build = build

    def __call__(self, name: str, *args: int | float) -> int:
        numbers = (self.build.const(a) if isinstance(a, float) else a for a in args)
        return self.build.op(name, *numbers)

    def mul(self, *args: int | float) -> int:
        """Return the number of a node that computes the product of nodes and constants."""
        first, *rest = args
        result = self.build.const(first) if isinstance(first, float) else first
        for a in rest:
            result = self("mul", result, a)
        return result

    def minus(self, a: int | float, b: int | float) -> int:
        """Return the number of a node that computes the difference of two nodes or constants."""
        return self("sub", a, b)


def _pow(t: _Terms, g: int, n: int, a: int, b: int) -> tuple[int | None, ...]:
    of_a = t.mul(g, b, t("pow", a, t.minus(b, 1.0)))
    if t.build.nodes[b].op == "const":
        return of_a, None
    return of_a, t.mul(g, n, t("log", a))


def _of_sign(t: _Terms, g: int, a: int) -> int:
    return t("where", t("lt", 0.0, a), g, t("where", t("lt", a, 0.0), t("neg", g), 0.0))


def _if_less(t: _Terms, g: int, a: int, b: int) -> int:
    """Return the part of `g` that goes to the argument a of minimum(a, b)."""
    return t("where", t("lt", a, b), g, t("where", t("lt", b, a), 0.0, t.mul(g, 0.5)))


#: By operation: a function of the terms, the result's gradient, the result and the arguments. It
#: returns what is added to each argument's gradient; None where nothing is added.
RULES: dict[str, Callable[..., tuple[int | None, ...]]] = {
    "add": lambda t, g, n, a, b: (g, g),
    "sub": lambda t, g, n, a, b: (g, t("neg", g)),
    "mul": lambda t, g, n, a, b: (t.mul(g, b), t.mul(g, a)),
    "div": lambda t, g, n, a, b: (t("div", g, b), t("neg", t("div", t.mul(g, n), b))),
    "mod": lambda t, g, n, a, b: (g, t("neg", t.mul(g, t("floor", t("div", a, b))))),
    "neg": lambda t, g, n, a: (t("neg", g),),
    "abs": lambda t, g, n, a: (_of_sign(t, g, a),),
    "min": lambda t, g, n, a, b: (_if_less(t, g, a, b), _if_less(t, g, b, a)),
    "max": lambda t, g, n, a, b: (_if_less(t, g, b, a), _if_less(t, g, a, b)),
    "where": lambda t, g, n, c, a, b: (None, t("where", c, g, 0.0), t("where", c, 0.0, g)),
    "pow": _pow,
    "exp": lambda t, g, n, a: (t.mul(g, n),),
    "exp2": lambda t, g, n, a: (t.mul(g, n, math.log(2)),),
    "expm1": lambda t, g, n, a: (t.mul(g, t("add", n, 1.0)),),
    "log": lambda t, g, n, a: (t("div", g, a),),
    "log2": lambda t, g, n, a: (t("div", g, t.mul(a, math.log(2))),),
    "log1p": lambda t, g, n, a: (t("div", g, t("add", a, 1.0)),),
    "sqrt": lambda t, g, n, a: (t("div", t.mul(g, 0.5), n),),
    "rsqrt": lambda t, g, n, a: (t.mul(g, -0.5, n, n, n),),
    "tanh": lambda t, g, n, a: (t.mul(g, t.minus(1.0, t.mul(n, n))),),
    "sigmoid": lambda t, g, n, a: (t.mul(g, n, t.minus(1.0, n)),),
    "sin": lambda t, g, n, a: (t.mul(g, t("cos", a)),),
    "cos": lambda t, g, n, a: (t("neg", t.mul(g, t("sin", a))),),
    "erf": lambda t, g, n, a: (t.mul(g, 2 / math.sqrt(math.pi), t("exp", t("neg", t.mul(a, a)))),),
}
