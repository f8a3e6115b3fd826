"""Right results for grading exercises, and the results of known mistakes, in plain NumPy.

The functions for results take (arrays, problem, dtype) and return outputs by name. The grader
compares a solution with the float64 result; the error of the float32 result sets the tolerance.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from flashsim.api.counting import count
from flashsim.exercises.exercise import Arrays, Task
from flashsim.problem import oracle
from flashsim.problem.problem import Problem
from flashsim.schedule.tensors import whole_bytes

Truth = Callable[[Arrays, Problem, str], Arrays]


def moves(*once: str, per_row_tile: str = "") -> Callable[[Task], int]:
    """Return a function that computes a task's byte budget.

    The budget counts each tensor in `once` one time, and each tensor in `per_row_tile` (a text of
    one-letter names) once per row tile.
    """

    def budget(task: Task) -> int:
        p, t_r = task.problem, -(-task.problem.n_q // task.tiling.block_q)
        repeated = t_r * sum(whole_bytes(p, name) for name in per_row_tile)
        return sum(whole_bytes(p, name) for name in once) + repeated

    return budget


def stage_bytes(stage: str) -> Callable[[Task], int]:
    """Return a function that computes a task's byte budget from a stage of FlashAttention-2."""

    def budget(task: Task) -> int:
        counted = count(task.problem, direction="backward", tiling=task.tiling)
        return sum(nbytes for (name, _, _), nbytes in counted.transfers.items() if name == stage)

    return budget


def scores(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """Return S = scale Q K^T."""
    q, k = (arrays[name].astype(dtype) for name in "QK")
    return {"S": (q @ k.mT) * np.dtype(dtype).type(p.scale)}


def softmax(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """Return P, the softmax of each row of S."""
    s = arrays["S"].astype(dtype)
    weights = np.exp(s - s.max(axis=-1, keepdims=True))
    return {"P": weights / weights.sum(axis=-1, keepdims=True)}


def softmax_product(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """Return O = softmax(S) V."""
    return {"O": softmax(arrays, p, dtype)["P"] @ arrays["V"].astype(dtype)}


def attention(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """Return O and L, the log-sum-exp of each row, computed by `flashsim.oracle`."""
    out, lse = oracle.attention(arrays["Q"], arrays["K"], arrays["V"], p, dtype=dtype)
    return {"O": out, "L": lse}


def gradients(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """Return dQ, dK and dV, computed by `flashsim.oracle`."""
    q, k, v, dout = (arrays[name] for name in ("Q", "K", "V", "dO"))
    found = oracle.gradients(q, k, v, dout, p, dtype=dtype)
    return {"dQ": found["dq"], "dK": found["dk"], "dV": found["dv"]}


def output_terms(arrays: Arrays, p: Problem) -> Arrays:
    """Return, per output of a forward pass, the sum of the absolute values of the output's terms.

    The rounding error of a result is proportional to this sum. For example, O is a mean of rows of
    V: it may be small although the rows of V are large.
    """
    v = np.repeat(np.abs(arrays["V"].astype(np.float64)), p.group, axis=1)
    found = attention(arrays, p, "float64")
    weights = np.exp(arrays["S"] - arrays["S"].max(axis=-1, keepdims=True))
    top = np.abs(arrays["S"]).max(axis=-1)
    spread = {"L": np.maximum(top, np.abs(found["L"])), "m": top, "l": weights.sum(axis=-1)}
    return {"O": weights / weights.sum(axis=-1, keepdims=True) @ v, **spread}


def gradient_terms(arrays: Arrays, p: Problem) -> Arrays:
    """Return, per gradient, the sum of the absolute values of the gradient's terms.

    The rounding error of a result is proportional to this sum. For example, dS is a difference of
    two nearly equal numbers in a row with one large P.
    """
    q, k, v, dout = (np.abs(arrays[name].astype(np.float64)) for name in ("Q", "K", "V", "dO"))
    P = softmax(arrays, p, "float64")["P"]
    dP = dout @ v.mT
    dS = P * (dP + (P * dP).sum(axis=-1, keepdims=True))
    return {"dQ": p.scale * dS @ k, "dK": p.scale * dS.mT @ q, "dV": P.mT @ dout}


def delta(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """Return delta = rowsum(dO O)."""
    return {"delta": (arrays["dO"].astype(dtype) * arrays["O"].astype(dtype)).sum(axis=-1)}


def numerator(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
    """Return the result of a common mistake: O without the division by l."""
    found = attention(arrays, p, dtype)
    top = arrays["S"].max(axis=-1).astype(dtype)
    return {"O": found["O"] * np.exp(found["L"] - top)[..., None]}


def with_problem(truth: Truth, **changes: Any) -> Truth:
    """Return a function that computes `truth` after replacing some fields of the problem."""
    return lambda arrays, p, dtype: truth(arrays, replace(p, **changes), dtype)


def scaled(truth: Truth, name: str, factor: Callable[[Problem], float]) -> Truth:
    """Return a function that computes the result `name` of `truth`, multiplied by a factor."""
    return lambda arrays, p, dtype: {name: truth(arrays, p, dtype)[name] * factor(p)}


def tiled(block_q: int, block_k: int, *, top: int = 1, total: int = 1, divisions: int = 0) -> Truth:
    """Return a function that computes attention tile by tile, with a mistake in the loop.

    The maximum of a tile of scores is taken along the axis `top`, and the sum along `total`. Axis 1
    is right, and axis 0 is wrong; only square tiles allow axis 0. O is divided by l after the loop
    (`divisions` 0), in every iteration (1), or in both places (2).
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
    """Return a function that computes a wrong L: the result of `of(row maximum, right L)`."""

    def wrong(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
        return {"L": of(arrays["S"].max(axis=-1).astype(dtype), attention(arrays, p, dtype)["L"])}

    return wrong


def backward_slip(*, scale: Callable[[Problem], float], delta: float = 1.0) -> Truth:
    """Return a function that computes wrong gradients: from a wrong scale or delta * `delta`."""

    def wrong(arrays: Arrays, p: Problem, dtype: str) -> Arrays:
        q, k, v, dout = (arrays[name].astype(dtype) for name in ("Q", "K", "V", "dO"))
        P = np.exp((q @ k.mT) * scale(p) - arrays["L"][..., None])
        dS = P * (dout @ v.mT - delta * arrays["delta"][..., None])
        return {"dQ": p.scale * dS @ k, "dK": p.scale * dS.mT @ q, "dV": P.mT @ dout}

    return wrong


_NO_SCALE = "the scores lack the scale, 1 / sqrt(head_dim)"
_HEAD_DIM = "the scale is 1 / head_dim; it should be 1 / sqrt(head_dim)"

#: Mistakes in an attention forward pass: the explanation, and a function for the wrong result.
SLIPS: dict[str, Truth] = {
    _NO_SCALE: with_problem(attention, scale=1.0),
    _HEAD_DIM: lambda arrays, p, dtype: attention(arrays, replace(p, scale=1 / p.head_dim), dtype),
    "the sum over the keys is right, but was not divided by l": numerator,
}

#: Mistakes in L.
LSE_SLIPS: dict[str, Truth] = {
    "log l has the wrong sign: L is m + log l, not m - log l": lse_slip(lambda m, L: 2 * m - L),
    "L has the wrong sign: it is m + log l, not -(m + log l)": lse_slip(lambda m, L: -L),
    "L is in base 2: multiply it by log 2": lse_slip(lambda m, L: L / np.log(2)),
    "L is log l; add m, which was subtracted from the scores": lse_slip(lambda m, L: L - m),
    "L is m; add log l": lse_slip(lambda m, L: m),
    "L is m + l; it should be m + log l": lse_slip(lambda m, L: m + np.exp(L - m)),
}

#: Mistakes in a stage of the backward pass.
BACKWARD_SLIPS: dict[str, Truth] = {
    _NO_SCALE: backward_slip(scale=lambda p: 1.0),
    _HEAD_DIM: backward_slip(scale=lambda p: 1 / p.head_dim),
    "delta was not subtracted from dP": backward_slip(scale=lambda p: p.scale, delta=0.0),
}


def loop_slips(block_q: int, block_k: int) -> dict[str, Truth]:
    """Return known mistakes in the loop over keys, each with a function for its result."""
    words = "O was divided by l in every iteration"
    found = {
        f"{words}; divide once, after the last iteration": tiled(block_q, block_k, divisions=1),
        f"{words} and again at the end; divide once, at the end": tiled(
            block_q, block_k, divisions=2
        ),
    }
    if block_q == block_k:  # otherwise, wrong axes would raise an error
        for top, total in ((0, 0), (1, 0)):  # with a right sum, any maximum gives the right O
            which = " and ".join(["the maximum"] * (not top) + ["the sum"] * (not total))
            said = f"take {which} of a tile of scores along the keys, axis=1, not along the queries"
            found[said] = tiled(block_q, block_k, top=top, total=total)
    return found


def softmax_slips(block_q: int, *, stable: bool) -> dict[str, Truth]:
    """Return known mistakes in a softmax of whole rows, each with a function for its result."""

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
