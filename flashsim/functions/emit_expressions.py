"""Writes CUDA C++ statements and expressions for the nodes of an expression graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from flashsim.functions.graph import ArraySpec, Node
from flashsim.functions.intervals import never_negative, of_extremes, ranges_of_integers
from flashsim.functions.operations import BOOL, FLOAT, INT, SCORE

CUDA_TYPES = {BOOL: "bool", INT: "int", FLOAT: "float"}
INFIX = {
    **{"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "eq": "=="},
    **{"ne": "!=", "bitand": "&", "bitor": "|", "bitxor": "^", "shl": "<<", "shr": ">>"},
}
_CUDA_CALLS = {
    **{"exp": "flash_exp", "exp2": "exp2f", "expm1": "expm1f", "log": "__logf", "log2": "__log2f"},
    **{"log1p": "log1pf", "sqrt": "sqrtf", "rsqrt": "rsqrtf", "tanh": "flash_tanh"},
    **{"sin": "sinf", "cos": "cosf", "floor": "floorf", "ceil": "ceilf", "erf": "erff"},
    "sigmoid": "flash_sigmoid",
}
#: C++ expressions, by operation.
_FORMS = {
    **{op: f"{{}} {sign} {{}}" for op, sign in {**INFIX, "and": "&", "or": "|"}.items()},
    **{op: f"{call}({{}})" for op, call in _CUDA_CALLS.items()},
    **{"not": "!{}", "neg": "-{}", "where": "{} ? {} : {}", "pow": "powf({}, {})"},
    **{"min": "min({}, {})", "max": "max({}, {})", "abs": "abs({})", "div": "__fdividef({}, {})"},
}


class Writer:
    """Writes CUDA C++ statements for a graph's nodes; arrays are numbered from `first`."""

    def __init__(
        self,
        nodes: tuple[Node, ...],
        arrays: tuple[ArraySpec, ...],
        first: int,
        extents: Mapping[str, int] | None = None,
        prefix: str = "",
        numbers: Iterable[int] | None = None,
    ) -> None:
        self.nodes, self.arrays, self.first, self.prefix = nodes, arrays, first, prefix
        #: Nodes whose values are parameters of the emitted function: the parameters' names.
        self.given: dict[int, str] = {}
        #: Loads, among the nodes that are used, that have one value per head.
        self.hoisted = {
            n
            for n in (range(len(nodes)) if numbers is None else numbers)
            if nodes[n].op == "load" and self._per_head(n)
        }
        self.ranges = {} if extents is None else ranges_of_integers(nodes, extents)
        self.positive = never_negative(nodes)
        self.extreme = of_extremes(nodes)

    def statements(self, numbers: Iterable[int] | None = None) -> list[str]:
        """Return C++ statements for a set of nodes, such as ``const float v7 = v5 + v6;``."""
        numbers = range(len(self.nodes)) if numbers is None else numbers
        return [
            f"    const {CUDA_TYPES[self.nodes[n].kind]} v{n} = {self.expression(self.nodes[n])};"
            for n in numbers
            if self.nodes[n].op not in ("arg", "const")
            and n not in self.hoisted
            and n not in self.given
        ]

    def name(self, n: int) -> str:
        """Return the C++ expression for a node's value: a variable, an argument or a constant."""
        node = self.nodes[n]
        if n in self.given:
            return self.given[n]
        if n in self.hoisted:
            return f"at.{self.prefix}{n}"
        if node.op == "arg":
            return "s" if node.value == SCORE else str(node.value)
        return literal(node) if node.op == "const" else f"v{n}"

    def expression(self, node: Node) -> str:
        """Return the C++ expression that computes a node from `v0`, `v1`, ..."""
        op, args = node.op, [self.name(a) for a in node.args]
        if op == "load":
            return self._load(node)
        if op == "cast":
            distance = self._distance(node) if node.kind == FLOAT else None
            return distance or f"({CUDA_TYPES[node.kind]}){args[0]}"
        if op in ("eq", "ne") and any(self.extreme[a] for a in node.args):
            return f"{'!' if op == 'ne' else ''}flash_same({args[0]}, {args[1]})"
        if op == "mul" and node.kind == FLOAT and (product := self._times_distance(node)):
            return product
        if op in ("floordiv", "mod"):
            return self._divided(node, args)
        if op in ("min", "max", "abs") and node.kind == FLOAT:
            name = "fabsf" if op == "abs" else f"f{op}f"
            return f"{name}({', '.join(args)})"
        if op == "div":
            by = self.nodes[node.args[1]]
            if by.op == "const" and by.value and math.isfinite(by.value):
                return f"{args[0]} * {literal(by._replace(value=1 / by.value))}"
        return _FORMS[op].format(*args)

    def _distance(self, node: Node) -> str | None:
        """Return a distance between positions, or its absolute value, as a C++ float, or None.

        Positions are below 2^24, so float32 arithmetic on positions is exact.
        """
        if self.nodes[node.args[0]].op == "abs":
            of = self._distance(self.nodes[node.args[0]])
            return of and f"fabsf({of})"
        parts = self._parts(node.args[0])
        return parts and f"{parts[0]} + {parts[1]}"

    def _times_distance(self, node: Node) -> str | None:
        """Return C++ for a distance times a per-head factor (one multiply-add); None if not one."""
        for a, other in (node.args, node.args[::-1]):
            if self.nodes[a].op == "cast" and self._per_head(other):
                parts = self._parts(self.nodes[a].args[0])
                if parts:
                    factor = self.name(other)
                    return f"{factor} * {parts[0]} + {factor} * {parts[1]}"
        return None

    def _per_head(self, n: int) -> bool:
        """Return True if a node's value depends only on the batch entry and the head."""
        node = self.nodes[n]
        if node.op == "arg":
            return node.value in ("b", "h")
        return all(self._per_head(a) for a in node.args)

    def _parts(self, n: int) -> tuple[str, str] | None:
        """Return a distance between positions as two C++ floats, base + step; None for other nodes.

        The base is the same for several scores.
        """
        base, step = self._part(n, "base"), self._part(n, "step")
        if base is None or step is None or "_at" not in step:
            return None
        return f"(float)({base})", f"(float)({step})"

    def _part(self, n: int, part: str) -> str | None:
        """Return a sum's base or step (see `_parts`) as C++; None for any other node."""
        node = self.nodes[n]
        if node.op == "arg" and node.value in ("q", "k"):
            return f"{node.value}_at.{part}"
        if node.op == "const" and node.kind == INT:
            return literal(node) if part == "base" else "0"
        if node.op not in ("add", "sub", "neg") or node.kind != INT:
            return None
        args = [self._part(a, part) for a in node.args]
        if None in args:
            return None
        return f"-({args[0]})" if node.op == "neg" else f"({args[0]} {INFIX[node.op]} {args[1]})"

    def _divided(self, node: Node, args: list[str]) -> str:
        a, b = args
        if node.kind == FLOAT:
            quotient = f"floorf({a} / {b})"
            return quotient if node.op == "floordiv" else f"{a} - {quotient} * {b}"
        by = self.nodes[node.args[1]]
        if by.op == "const" and by.value > 0:
            if by.value & (by.value - 1) == 0:  # an arithmetic shift rounds down, as Python does
                shift = by.value.bit_length() - 1
                return f"{a} >> {shift}" if node.op == "floordiv" else f"{a} & {by.value - 1}"
            if self.positive[node.args[0]]:
                return f"{a} {'/' if node.op == 'floordiv' else '%'} {by.value}"
        return f"flash_{node.op}({a}, {b})"

    def offset(self, node: Node, axes: int | None = None) -> str:
        """Return C++ for the array offset of a loaded element, using only the first `axes` axes."""
        number = self.first + node.value
        text, args = "", node.args[:axes]
        for axis, a in enumerate(args):
            n = f"c.a{number}_n{axis}"
            v = self.name(a)
            low, high = self.ranges.get(a, (-1, -1))
            i = f"min({v}, {n} - 1)" if self.positive[a] else f"flash_wrap({v}, {n})"
            if low >= 0 and high < self.arrays[node.value].shape[axis]:
                i = v
            text = f"(long long){i}" if not text else f"({text} * {n} + {i})"
        return text.removeprefix("(long long)") if len(args) == 1 else text or "0"

    def _load(self, node: Node) -> str:
        return self.element(node, self.offset(node))

    def element(self, node: Node, place: str) -> str:
        """Return the C++ expression for the element at an offset in a load's array."""
        spec = self.arrays[node.value]
        where = f"c.a{self.first + node.value}[{place}]"
        if spec.dtype in ("float16", "bfloat16"):
            return f"flash_{'half' if spec.dtype == 'float16' else 'bfloat16'}({where})"
        if spec.dtype == "bool":
            return f"{where} != 0"
        return f"({CUDA_TYPES[spec.kind]}){where}"


def literal(node: Node) -> str:
    """Return a constant as a C++ literal."""
    if node.kind == BOOL:
        return "true" if node.value else "false"
    if node.kind == INT:
        return str(node.value) if node.value >= 0 else f"({node.value})"
    if math.isnan(node.value):
        return "__int_as_float(0x7fffffff)"
    if math.isinf(node.value):
        return f"__int_as_float(0x{'7f' if node.value > 0 else 'ff'}800000)"
    text = f"{float(np.float32(node.value))!r}f"
    return text if node.value >= 0 else f"({text})"
