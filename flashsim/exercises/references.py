"""Results in plain NumPy that judge exercises: float64 is the truth, float32 sets the tolerance.

Each function takes (arrays, problem, dtype) and returns outputs by name. `with_problem` and
`scaled` turn one into the result of a mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from flashsim.exercises.exercise import Arrays
from flashsim.problem import oracle
from flashsim.problem.problem import Problem

Truth = Callable[[Arrays, Problem, str], Arrays]


def scores(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """S = scale Q K^T."""
    q, k = (arrays[name].astype(dtype) for name in "QK")
    return {"S": (q @ k.mT) * np.dtype(dtype).type(p.scale)}


def softmax(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """P, the softmax of each row of S."""
    s = arrays["S"].astype(dtype)
    weights = np.exp(s - s.max(axis=-1, keepdims=True))
    return {"P": weights / weights.sum(axis=-1, keepdims=True)}


def softmax_product(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """O = softmax(S) V."""
    return {"O": softmax(arrays, p, dtype)["P"] @ arrays["V"].astype(dtype)}


def attention(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """O and L = log sum exp, computed by the oracle."""
    out, lse = oracle.attention(arrays["Q"], arrays["K"], arrays["V"], p, dtype=dtype)
    return {"O": out, "L": lse}


def gradients(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """dQ, dK and dV, computed by the oracle."""
    q, k, v, dout = (arrays[name] for name in ("Q", "K", "V", "dO"))
    found = oracle.gradients(q, k, v, dout, p, dtype=dtype)
    return {"dQ": found["dq"], "dK": found["dk"], "dV": found["dv"]}


def output_terms(arrays: Arrays, p: Problem) -> Arrays:
    """Sums of absolute terms for the outputs of a forward pass.

    Rounding errors are relative to these: a mean of rows of V may be small although its terms are
    not.
    """
    v = np.repeat(np.abs(arrays["V"].astype(np.float64)), p.group, axis=1)
    found = attention(arrays, p, "float64")
    weights = np.exp(arrays["S"] - arrays["S"].max(axis=-1, keepdims=True))
    top = np.abs(arrays["S"]).max(axis=-1)
    spread = {"L": np.maximum(top, np.abs(found["L"])), "m": top, "l": weights.sum(axis=-1)}
    return {"O": weights / weights.sum(axis=-1, keepdims=True) @ v, **spread}


def gradient_terms(arrays: Arrays, p: Problem) -> Arrays:
    """Sums of absolute terms for `gradients`.

    In dS two nearly equal numbers are subtracted where a row has one large P.
    """
    q, k, v, dout = (np.abs(arrays[name].astype(np.float64)) for name in ("Q", "K", "V", "dO"))
    P = softmax(arrays, p, "float64")["P"]
    dP = dout @ v.mT
    dS = P * (dP + (P * dP).sum(axis=-1, keepdims=True))
    return {"dQ": p.scale * dS @ k, "dK": p.scale * dS.mT @ q, "dV": P.mT @ dout}


def delta(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """delta = rowsum(dO O)."""
    return {"delta": (arrays["dO"].astype(dtype) * arrays["O"].astype(dtype)).sum(axis=-1)}


def numerator(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """O before the division by l: the result of a common mistake."""
    found = attention(arrays, p, dtype)
    top = arrays["S"].max(axis=-1).astype(dtype)
    return {"O": found["O"] * np.exp(found["L"] - top)[..., None]}


def with_problem(truth: Truth, **changes: Any) -> Truth:
    """`truth` for a changed problem: ``scale=1.0`` gives the result of forgetting the scale."""
    return lambda arrays, p, dtype: truth(arrays, replace(p, **changes), dtype)


def scaled(truth: Truth, name: str, factor: Callable[[Problem], float]) -> Truth:
    """`truth` with one result multiplied by a factor."""
    return lambda arrays, p, dtype: {name: truth(arrays, p, dtype)[name] * factor(p)}


#: Mistakes of an attention forward pass.
SLIPS: dict[str, Truth] = {
    "this is what comes out without the scale, 1 / sqrt(head_dim)": with_problem(
        attention, scale=1.0
    ),
    "the sum over the keys is right, but was not divided by l": numerator,
}
