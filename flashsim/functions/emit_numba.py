"""Generates Python source for Numba from an expression graph: one statement per node."""

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

from flashsim.functions.derivative import adjoints
from flashsim.functions.emit_expressions import INFIX
from flashsim.functions.graph import ArraySpec, Graph, Node
from flashsim.functions.intervals import never_negative
from flashsim.functions.operations import BOOL, FLOAT, INT, SCORE

#: Python expressions, by operation.
_FORMS = {
    **{
        op: f"{{}} {sign} {{}}" for op, sign in {**INFIX, "and": "&", "or": "|", "div": "/"}.items()
    },
    **{"not": "not {}", "neg": "-{}", "abs": "abs({})", "where": "{1} if {0} else {2}"},
    **{"min": "{0} if {0} <= {1} else {1}", "max": "{0} if {0} >= {1} else {1}"},
    **{name: f"math.{name}({{}})" for name in ("exp", "expm1", "log", "log1p", "sqrt", "tanh")},
    **{name: f"math.{name}({{}})" for name in ("sin", "cos", "erf")},
    **{"exp2": "math.exp({} * F(0.6931471805599453))", "rsqrt": "F(1) / math.sqrt({})"},
    **{"log2": "math.log({}) * F(1.4426950408889634)", "floor": "F(math.floor({}))"},
    **{"ceil": "F(math.ceil({}))", "sigmoid": "F(0.5) * math.tanh(F(0.5) * {}) + F(0.5)"},
    "pow": "F({} ** {})",
}


class NumbaSource(NamedTuple):
    """Python source of two functions that process a panel (a rectangle) of scores in place.

    The source `score` defines a function (S, raw, ..) that writes score_mod of the scores `raw` to
    S. The source `gradient` defines a function (dS, raw, ..). This function replaces the gradients
    of score_mod's results, in dS, by the gradients of `raw`. `PANEL` lists the other arguments of
    both functions.
    """

    score: str
    gradient: str


#: Further arguments: row r and lane c of a panel hold the score of query
#: ``q + r * q_row + c * q_lane`` and key ``k + r * k_row + c * k_lane``. After them comes `table`:
#: the addresses of the captured arrays, followed by the addresses of their gradients.
PANEL = ("ld", "rows", "lanes", "q", "q_row", "q_lane", "k", "k_row", "k_lane", "b", "h")


def numba_source(graph: Graph, gradients: Collection[str] = ()) -> NumbaSource:
    """Return Python source, which Numba compiles, of a score function and of its gradients."""
    made = adjoints(graph, gradients)
    forward, backward = Written(graph.nodes, graph.arrays), Written(made.nodes, made.arrays)
    body = [*forward.statements(range(len(graph.nodes))), f"S[at] = {forward.name(graph.root)}"]
    numbers = made.numbers
    back = ["dout = S[at]", "if dout == F(0):", "    continue", *backward.statements(numbers)]
    for n, g in made.reads:
        node = made.nodes[n]
        back.append(f"g{node.value}[{backward.offset(node)}] += {backward.name(g)}")
    back.append(f"S[at] = {'F(0)' if made.score is None else backward.name(made.score)}")
    arrays = [f"a{n} = as_pointer(table[{n}], np.{_numba_element(a)})"
              for n, a in enumerate(graph.arrays)]  # fmt: skip
    count = len(graph.arrays)
    sums = [f"g{n} = as_pointer(table[{count + n}], F)"
            for n, a in enumerate(graph.arrays) if a.name in set(gradients)]  # fmt: skip
    return NumbaSource(_panel(arrays, body), _panel([*arrays, *sums], back))


def _numba_element(spec: ArraySpec) -> str:
    """Return the type of a captured array in the CPU engine's memory: float32 for 16-bit floats."""
    return {"bool": "uint8", "float16": "float32", "bfloat16": "float32"}.get(
        spec.dtype, spec.dtype
    )


def _panel(head: list[str], body: list[str]) -> str:
    """Return the source of a function ``panel``, which runs `body` for each score of a panel."""
    loops = [
        *head,
        "for r in range(rows):",
        "    for c in range(lanes):",
        "        at = r * ld + c",
        "        s = raw[at]",
        "        i, j = q + r * q_row + c * q_lane, k + r * k_row + c * k_lane",
        *(f"        {line}" for line in body),
    ]
    text = "\n".join(f"    {line}" for line in loops)
    return f"def panel(S, raw, {', '.join(PANEL)}, table):\n{text}\n"


class Written:
    """Writes Python statements for a graph's nodes; the query q is called i, and the key k is j."""

    def __init__(self, nodes: tuple[Node, ...], arrays: tuple[ArraySpec, ...]) -> None:
        self.nodes, self.arrays = nodes, arrays
        self.positive = never_negative(nodes)

    def statements(self, numbers: Iterable[int]) -> list[str]:
        """Return Python statements for a set of nodes, such as ``v7 = v5 + v6``."""
        return [
            f"v{n} = {self.expression(self.nodes[n])}"
            for n in numbers
            if self.nodes[n].op not in ("arg", "const")
        ]

    def name(self, n: int) -> str:
        """Return the expression for a node's value: a variable, an argument or a constant."""
        node = self.nodes[n]
        if node.op == "arg":
            return {SCORE: "s", "q": "i", "k": "j"}.get(node.value, node.value)
        if node.op != "const":
            return f"v{n}"
        if node.kind != FLOAT:
            return repr(node.value)
        return (
            f"F({node.value!r})" if math.isfinite(node.value) else f"F({_NAMED[repr(node.value)]})"
        )

    def expression(self, node: Node) -> str:
        """Return the Python expression that computes a node from its arguments."""
        op, args = node.op, [self.name(a) for a in node.args]
        if op == "load":
            text = self.read(node)
            return {FLOAT: f"F({text})", INT: f"np.int64({text})", BOOL: f"{text} != 0"}[
                self.arrays[node.value].kind
            ]
        if op == "cast":
            return f"{'F' if node.kind == FLOAT else 'np.int64'}({args[0]})"
        if op in ("floordiv", "mod"):
            return self._divided(node, args)
        return _FORMS[op].format(*args)

    def read(self, node: Node) -> str:
        """Return the Python expression that reads a captured array's element, in its own type."""
        return f"a{node.value}[{self.offset(node)}]"

    def _divided(self, node: Node, args: list[str]) -> str:
        a, b = args
        if node.kind == FLOAT:
            quotient = f"F(math.floor({a} / {b}))"
            return quotient if node.op == "floordiv" else f"{a} - {quotient} * {b}"
        by = self.nodes[node.args[1]]
        safe = b if by.op == "const" and by.value != 0 else f"({b} if {b} != 0 else 1)"
        return f"{a} {'//' if node.op == 'floordiv' else '%'} {safe}"

    def offset(self, node: Node) -> str:
        """Return the Python expression for the array offset of a loaded element."""
        text = ""
        for n, a in zip(self.arrays[node.value].shape, node.args, strict=True):
            v = self.name(a)
            last = f"min({v}, {n - 1})"
            i = last if self.positive[a] else f"max(0, min({v} + ({n} if {v} < 0 else 0), {n - 1}))"
            text = i if not text else f"({text}) * {n} + {i}"
        return text or "0"


_NAMED = {"inf": "np.inf", "-inf": "-np.inf", "nan": "np.nan"}
