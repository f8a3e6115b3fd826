"""Forward-mode derivatives on NumPy arrays: a check of `derivative` that shares no code with it."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from flashsim.functions.graph import Graph
from flashsim.functions.operations import FLOAT


def pushed(graph: Graph, values: Sequence[Any], moved: Collection[int]) -> Any:
    """Return a graph's derivative with respect to a number that is added to all nodes `moved`."""
    rates: list[Any] = []
    with np.errstate(all="ignore"):
        for n, node in enumerate(graph.nodes):
            if n in moved:
                rates.append(np.ones(()))
            elif node.kind != FLOAT or node.op in ("arg", "const", "load", "cast"):
                rates.append(np.zeros(()))
            else:
                of = [values[a] for a in node.args]
                rates.append(_rate(node.op, values[n], of, [rates[a] for a in node.args]))
    return rates[graph.root]


def _rate(op: str, y: Any, x: Sequence[Any], dx: Sequence[Any]) -> Any:
    """Return the derivative of ``y = op(x...)``; `dx` holds the derivatives of the arguments x."""
    if op == "where":
        return np.where(x[0], dx[1], dx[2])
    if op in ("min", "max"):
        a, b = x if op == "min" else x[::-1]
        return np.where(a < b, dx[0], np.where(b < a, dx[1], (dx[0] + dx[1]) / 2))
    if op in ("floor", "ceil", "floordiv"):
        return np.zeros(())
    if op == "pow":
        of_base = np.where(dx[0] == 0, 0, x[1] * np.power(x[0], x[1] - 1) * dx[0])
        return of_base + np.where(dx[1] == 0, 0, np.log(x[0]) * y * dx[1])
    two = {
        "add": lambda: dx[0] + dx[1],
        "sub": lambda: dx[0] - dx[1],
        "mul": lambda: dx[0] * x[1] + x[0] * dx[1],
        "div": lambda: (dx[0] * x[1] - x[0] * dx[1]) / (x[1] * x[1]),
        "mod": lambda: dx[0] - np.floor(x[0] / x[1]) * dx[1],
    }
    if op in two:
        return two[op]()
    a = x[0]
    slope = {
        "neg": lambda: -1.0,
        "abs": lambda: np.sign(a),
        "exp": lambda: np.exp(a),
        "exp2": lambda: np.log(2) * np.exp2(a),
        "expm1": lambda: np.exp(a),
        "log": lambda: 1 / a,
        "log2": lambda: 1 / (np.log(2) * a),
        "log1p": lambda: 1 / (1 + a),
        "sqrt": lambda: 1 / (2 * np.sqrt(a)),
        "rsqrt": lambda: -1 / (2 * a * np.sqrt(a)),
        "tanh": lambda: 1 / np.cosh(a) ** 2,
        "sigmoid": lambda: 1 / (2 * np.cosh(a / 2)) ** 2,
        "sin": lambda: np.cos(a),
        "cos": lambda: -np.sin(a),
        "erf": lambda: 2 / np.sqrt(np.pi) * np.exp(-(a**2)),
    }[op]()
    return slope * dx[0]
