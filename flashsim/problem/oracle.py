"""Attention and its gradients in float64, and plain attention in any type, to check results.

This module has no tiles, and shares no code with an engine. The functions use N x N arrays, so
large problems need too much memory. Inputs are arrays of any library; results are NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from flashsim.errors import ShapeError, own_errors, shown
from flashsim.functions.forward_mode import pushed
from flashsim.functions.graph import add_at
from flashsim.problem import checks
from flashsim.problem.masks import masked_score
from flashsim.problem.problem import Problem, numpy_dtype


@own_errors
def keep_matrix(problem: Problem) -> np.ndarray:
    """Return booleans (n_q, n_kv): True for each score that the mask keeps."""
    kept = np.zeros((problem.n_q, problem.n_kv), bool)
    for s in problem.sequences:
        q, k = np.arange(s.q_start, s.q_stop), np.arange(s.k_start, s.k_stop)
        if len(q) and len(k):
            kept[s.q_start : s.q_stop, s.k_start : s.k_stop] = problem.keep(s, q, k)
    return kept


@own_errors
def attention(
    q: Any,
    k: Any,
    v: Any,
    problem: Problem,
    *,
    bias: Any = None,
    captured: Sequence[Any] = (),
    sinks: Any = None,
    dtype: str = "float64",
) -> tuple[np.ndarray, np.ndarray]:
    """Return out and LSE of plain attention, with every intermediate rounded to `dtype`.

    The argument `dtype` is an element type or "tf32". With "float64", the result is exact enough to
    check other implementations. With the input's type, the result's error is the reference for
    implementations with tiles.

    Parameters
    ----------
    q, k, v : ndarray, (batch, heads, n_q, d), (batch, kv_heads, n_kv, d), (.., n_kv, d_v)
    bias : ndarray, (1 or batch, 1 or heads, n_q, n_kv), optional
    captured : sequence of ndarray
        The captured arrays of `problem.score_mod`, in its graph's order.
    sinks : ndarray, (heads,), optional

    Returns
    -------
    out : ndarray, (batch, heads, n_q, d_v)
    lse : ndarray, (batch, heads, n_q)
    """
    arrays = {"q": q, "k": k, "v": v}
    q, k, v, bias, captured, sinks, _ = _checked(problem, dtype, arrays, bias, captured, sinks)
    P, lse, _ = _probabilities(q, k, problem, bias, dtype, captured, sinks)
    return _round(P @ _per_head(v, problem), dtype), lse


@own_errors
def gradients(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    problem: Problem,
    *,
    dlse: Any = None,
    bias: Any = None,
    captured: Sequence[Any] = (),
    sinks: Any = None,
    dtype: str = "float64",
) -> dict[str, np.ndarray]:
    """Return the gradients of ``sum(out * dout) + sum(lse * dlse)`` by name.

    The keys are "dq", "dk", "dv", "dbias" (with a bias), "dsinks" (with sinks), and "d:<name>" for
    each array of `problem.score_grads`. The gradients follow arXiv:2205.14135, appendix B.2: dV =
    P^T dO, dP = dO V^T, dS = P (dP - rowsum(P dP)), dQ = scale dS K, dK = scale dS^T Q. Since d LSE
    / dS = P, `dlse` of shape (batch, heads, n_q) adds P dlse to dS.
    """
    p = problem
    arrays = {"q": q, "k": k, "v": v, "dout": dout}
    q, k, v, dout, bias, captured, sinks, dlse = _checked(
        p, dtype, arrays, bias, captured, sinks, dlse
    )
    P, lse, before = _probabilities(q, k, p, bias, dtype, captured, sinks)
    dO = dout.astype(np.float64)
    q64 = q.astype(np.float64)
    dV = _over_group(P.mT @ dO, p)
    dP = _round(dO @ _per_head(v, p).mT, dtype)
    delta = (P * dP).sum(axis=-1, keepdims=True)
    if dlse is not None:
        delta = delta - dlse.astype(np.float64)[..., None]
    dS = _round(P * (dP - delta), dtype)
    result = {"dv": _round(dV, dtype)}
    if sinks is not None:
        of_sink = np.exp(sinks[:, None] - np.where(np.isneginf(sinks[:, None]), 0, lse))
        result["dsinks"] = _round(-(of_sink * delta[..., 0]).sum(axis=(0, 2)), dtype)
    if p.score_mod is not None:
        dS, of_arrays = _through_function(p, before.raw, dS, captured)
        dS = _round(dS, dtype)
        result |= {name: _round(x, dtype) for name, x in of_arrays.items()}
    if bias is not None:
        shared = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
        result["dbias"] = _round(dS.sum(axis=shared, keepdims=True), dtype)
    dS = _round(dS * before.gate, dtype)
    result["dq"] = _round(p.scale * (dS @ _per_head(k, p)), dtype)
    result["dk"] = _round(p.scale * _over_group(dS.mT @ q64, p), dtype)
    return result


@own_errors
def finite_difference(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    problem: Problem,
    *,
    dlse: Any = None,
    bias: Any = None,
    step: float = 1e-5,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Return, per input, the derivative along a random direction, by differences and by formula.

    The result is ``{"dq": (by differences, by formula), ...}``. The two derivatives of an input
    differ by about ``step ** 2``.
    """
    arrays = {"q": q, "k": k, "v": v, "dout": dout}
    q, k, v, dout, bias, *_, dlse = _checked(problem, "float64", arrays, bias, dlse=dlse)
    rng = np.random.default_rng(checks.seed(seed))
    inputs = {"dq": q, "dk": k, "dv": v, **({} if bias is None else {"dbias": bias})}
    inputs = {name: x.astype(np.float64) for name, x in inputs.items()}
    exact = gradients(q, k, v, dout, problem, dlse=dlse, bias=bias)

    def loss(**moved: np.ndarray) -> float:
        x = {**inputs, **moved}
        out, lse = attention(x["dq"], x["dk"], x["dv"], problem, bias=x.get("dbias"))
        of_lse = 0.0 if dlse is None else (np.where(np.isneginf(lse), 0, lse) * dlse).sum()
        return float((out * dout).sum() + of_lse)

    result = {}
    for name, x in inputs.items():
        direction = rng.standard_normal(x.shape)
        up, down = (loss(**{name: x + sign * step * direction}) for sign in (1, -1))
        result[name] = (up - down) / (2 * step), float((exact[name] * direction).sum())
    return result


@own_errors
def tf32(x: np.ndarray) -> np.ndarray:
    """Round float32 values to NVIDIA's tf32, which has 10 bits of mantissa.

    The rounding is to nearest, with ties away from 0, as tensor cores round the operands of float32
    products if a library allows tf32.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x).astype(np.float32)


def _checked(
    p: Problem,
    dtype: str,
    inputs: dict[str, Any],
    bias: Any,
    captured: Any = (),
    sinks: Any = None,
    dlse: Any = None,
) -> tuple[Any, ...]:
    """Return all arguments from `inputs` on as NumPy arrays, once checked; sinks in float64."""
    checks.one_of("dtype", dtype, (*checks.DTYPES, "tf32"))
    arrays = {name: _shaped(p, name, x) for name, x in inputs.items()}
    dlse = None if dlse is None else _shaped(p, "dlse", dlse)
    bias = None if bias is None else checks.as_array("bias", bias)
    shape = (p.batch, p.heads, p.n_q, p.n_kv)
    if bias is not None and any(
        have not in (1, full) for have, full in zip_longest(bias.shape, shape)
    ):
        raise ShapeError(
            f"bias must have shape {shape} (each length may also be 1), got {bias.shape}"
        )
    wanted = () if p.score_mod is None else p.score_mod.arrays
    if not isinstance(captured, Sequence) or len(captured) != len(wanted):
        names = ", ".join(a.name for a in wanted) or "none"
        raise ShapeError(
            "captured= must be a sequence of the arrays that the score function reads "
            f"({names}), got {shown(captured)}"
        )
    captured = tuple(_with_shape(a.name, x, a.shape) for a, x in zip(wanted, captured, strict=True))
    sinks = None if sinks is None else checks.sinks(sinks, p.heads).astype(np.float64)
    return (*arrays.values(), bias, captured, sinks, dlse)


def _shaped(p: Problem, name: str, x: Any) -> np.ndarray:
    """Return q, k, v, dout or dlse as a NumPy array, after checking its shape."""
    heads, rows = (p.kv_heads, p.n_kv) if name in ("k", "v") else (p.heads, p.n_q)
    width = () if name == "dlse" else (p.head_dim if name in ("q", "k") else p.head_dim_v,)
    return _with_shape(name, x, (p.batch, heads, rows, *width))


def _with_shape(name: str, x: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = checks.as_array(name, x)
    if array.shape != shape:
        raise ShapeError(
            f"{name} must have shape {shape}, as the problem requires, got {array.shape}"
        )
    return array


class _Before(NamedTuple):
    """The backward pass's values: the softcap's derivative, and the input of the score function."""

    gate: np.ndarray | float
    raw: np.ndarray


def _probabilities(
    q: np.ndarray,
    k: np.ndarray,
    p: Problem,
    bias: np.ndarray | None,
    dtype: str,
    captured: Sequence[np.ndarray],
    sinks: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, _Before]:
    """Return P, the LSE and `_Before`, with arrays of shape (batch, heads, n_q, ..)."""
    S = _round(q.astype(np.float64) @ _per_head(k, p).mT * p.scale, dtype)
    gate: np.ndarray | float = 1.0
    if p.softcap:
        tanh = np.tanh(S / p.softcap)
        S, gate = _round(p.softcap * tanh, dtype), 1 - tanh * tanh
    if bias is not None:
        S = _round(S + bias.astype(np.float64), dtype)
    before = _Before(gate, S)
    if p.score_mod is not None:
        arguments = {"score": S, **_indices(p)}
        S = _round(p.score_mod.evaluate(arguments, captured), dtype)
    low = masked_score(p.compute_dtype)
    kept = keep_matrix(p)
    if p.mask_mod is not None:
        kept = kept & p.mask_mod.keep(**_indices(p))
    S = np.where(kept & ~np.less_equal(S, low), S, -np.inf)
    m = S.max(axis=-1, keepdims=True)
    if sinks is not None:
        of_heads = sinks[:, None, None]
        m = np.maximum(m, of_heads)
    base = np.where(np.isneginf(m), 0, m)
    E = _round(np.exp(S - base), dtype)
    total = E.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(of_heads - base)
    safe = np.where(total == 0, 1, total)
    lse = np.where(total == 0, -np.inf, base + np.log(safe))[..., 0]
    return _round(E / safe, dtype), lse, before


def _indices(p: Problem) -> dict[str, np.ndarray]:
    """Return a score function's arguments b, h, q, k; q and k count from each sequence's start."""
    q, k = np.arange(p.n_q), np.arange(p.n_kv)
    for s in p.sequences:
        q[s.q_start : s.q_stop] -= s.q_start
        k[s.k_start : s.k_stop] -= s.k_start
    b, h = np.arange(p.batch), np.arange(p.heads)
    return {"b": b[:, None, None, None], "h": h[:, None, None], "q": q[:, None], "k": k}


def _through_function(
    p: Problem, raw: np.ndarray, dS: np.ndarray, captured: Sequence[np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the gradients of a score function's input, and of its captured arrays.

    The gradients are computed by forward-mode differentiation, with respect to the score and to
    each element that the function reads. The engines use reverse mode
    (`flashsim.functions.derivative`) instead, so this function is an independent check.
    """
    arguments = {"score": raw, **_indices(p)}
    graph = p.score_mod
    values = graph.values(arguments, captured)
    dS = np.where(dS == 0, 0, dS)
    of_score = pushed(graph, values, {graph.argument("score")})
    gradients = {}
    for name in p.score_grads:
        number = [a.name for a in graph.arrays].index(name)
        total = np.zeros(captured[number].shape)
        for n in graph.loads:
            node = graph.nodes[n]
            if node.value == number:
                with np.errstate(invalid="ignore"):  # 0 times infinity, where a bias is -inf
                    each = np.where(dS == 0, 0, dS * pushed(graph, values, {n}))
                add_at(total, (values[a] for a in node.args), np.broadcast_to(each, dS.shape))
        gradients[f"d:{name}"] = total
    with np.errstate(invalid="ignore"):
        return np.where(dS == 0, 0, dS * of_score), gradients


def _per_head(x: np.ndarray, p: Problem) -> np.ndarray:
    return np.repeat(x.astype(np.float64), p.group, axis=1)


def _over_group(x: np.ndarray, p: Problem) -> np.ndarray:
    return x.reshape(p.batch, p.kv_heads, p.group, *x.shape[2:]).sum(axis=2)


def _round(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return the float64 results `x`, rounded to `dtype`."""
    if dtype == "tf32":
        return tf32(x).astype(np.float64)
    return x if dtype == "float64" else x.astype(numpy_dtype(dtype)).astype(np.float64)
