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


def tiled(block_q: int, block_k: int, *, top: int = 1, total: int = 1, divisions: int = 0) -> Truth:
    """Attention tile by tile, with a mistake in the loop.

    Parameters
    ----------
    block_q, block_k : int
        The tiles; what a mistake gives depends on them.
    top, total : {0, 1}
        The axis of a tile of scores along which its maximum and its sum are taken; 1 is right, and
        0 is possible where tiles are square.
    divisions : int
        0: O is divided by l after the loop. 1: in every visit instead. 2: in both places.
    """

    def wrong(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
        s = arrays["S"].astype(dtype)
        keep = oracle.keep_matrix(p)
        s = np.where(keep, s, -np.inf)
        v = np.repeat(arrays["V"].astype(dtype), p.group, axis=1)
        out = np.zeros((*s.shape[:2], p.n_q, p.head_dim_v), dtype)
        for i in range(0, p.n_q, block_q):
            O, m, l = out[:, :, i : i + block_q], -np.inf, np.zeros(1, dtype)
            for j in range(0, p.n_kv, block_k):
                if not keep[..., i : i + block_q, j : j + block_k].any():
                    continue
                S = s[:, :, i : i + block_q, j : j + block_k]
                m_new = np.maximum(m, S.max(axis=2 + top))
                alpha, P = np.exp(m - m_new), np.exp(S - m_new[..., None])
                l = l * alpha + P.sum(axis=2 + total)
                O[...] = O * alpha[..., None] + P @ v[:, :, j : j + block_k]
                O /= l[..., None] if divisions else 1
                m = m_new
            O /= 1 if divisions == 1 else l[..., None]
        return {"O": out}

    return wrong


def lse_slip(of: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Truth:
    """A wrong L, as a function of m, the largest score of each row, and of the right L."""

    def wrong(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
        return {"L": of(arrays["S"].max(axis=-1).astype(dtype), attention(arrays, p, dtype)["L"])}

    return wrong


def backward_slip(*, scale: Callable[[Problem], float], delta: float = 1.0) -> Truth:
    """Gradients from scores with another scale, or with only a part of delta taken off dP."""

    def wrong(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
        q, k, v, dout = (arrays[name].astype(dtype) for name in ("Q", "K", "V", "dO"))
        P = np.exp((q @ k.mT) * scale(p) - arrays["L"][..., None])
        dS = P * (dout @ v.mT - delta * arrays["delta"][..., None])
        return {"dQ": p.scale * dS @ k, "dK": p.scale * dS.mT @ q, "dV": P.mT @ dout}

    return wrong


_NO_SCALE = "this is what comes out without the scale, 1 / sqrt(head_dim)"
_HEAD_DIM = "the scale is 1 / head_dim here; it is 1 / sqrt(head_dim)"

#: Mistakes of an attention forward pass.
SLIPS: dict[str, Truth] = {
    _NO_SCALE: with_problem(attention, scale=1.0),
    _HEAD_DIM: lambda arrays, p, dtype: attention(arrays, replace(p, scale=1 / p.head_dim), dtype),
    "the sum over the keys is right, but was not divided by l": numerator,
}

#: Mistakes of L.
LSE_SLIPS: dict[str, Truth] = {
    "L has the wrong sign: it is m + log l, not m - log l": lse_slip(lambda m, L: 2 * m - L),
    "L has the wrong sign: it is m + log l, not -(m + log l)": lse_slip(lambda m, L: -L),
    "L is in base 2: multiply it by log 2": lse_slip(lambda m, L: L / np.log(2)),
    "L is log l here; add m, which was taken off the scores": lse_slip(lambda m, L: L - m),
    "L is m here; add log l": lse_slip(lambda m, L: m),
    "L is m + l here; it is m + log l": lse_slip(lambda m, L: m + np.exp(L - m)),
}

#: Mistakes of a stage of the backward pass.
BACKWARD_SLIPS: dict[str, Truth] = {
    _NO_SCALE: backward_slip(scale=lambda p: 1.0),
    _HEAD_DIM: backward_slip(scale=lambda p: 1 / p.head_dim),
    "delta was not taken off dP": backward_slip(scale=lambda p: p.scale, delta=0.0),
}


def loop_slips(block_q: int, block_k: int) -> dict[str, Truth]:
    """Mistakes inside the loop over the keys, for tiles of these sizes."""
    words = "O was divided by l in every visit; divide once, after the last"
    found = {
        words: tiled(block_q, block_k, divisions=1),
        f"{words}, and not again": tiled(block_q, block_k, divisions=2),
    }
    if block_q == block_k:  # with others, the shapes would not fit
        for top, total in ((0, 0), (1, 0)):  # any maximum along a row would do
            which = " and ".join(["the maximum"] * (not top) + ["the sum"] * (not total))
            said = f"{which} of a tile of scores: along the keys, axis=1, not along the queries"
            found[said] = tiled(block_q, block_k, top=top, total=total)
    return found


def softmax_slips(block_q: int, *, stable: bool) -> dict[str, Truth]:
    """Mistakes of a softmax of whole rows, in tiles of so many rows."""

    def of(top: int, total: int) -> Truth:
        def wrong(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
            s = arrays["S"].astype(dtype)
            s = s.reshape(*s.shape[:2], -1, block_q, p.n_kv)
            weights = np.exp(s - s.max(axis=3 + top, keepdims=True) if stable else s)
            shares = weights / weights.sum(axis=3 + total, keepdims=True)
            return {"P": shares.reshape(arrays["S"].shape)}

        return wrong

    wrong_sum = "the sum runs along the queries, axis=0; a row's keys lie along axis=1"
    found = {wrong_sum: of(1, 0)}
    if stable:
        found["the maximum and the sum run along the queries, axis=0; take axis=1"] = of(0, 0)
        found["the maximum runs along the queries, axis=0; take axis=1"] = of(0, 1)
    return found
