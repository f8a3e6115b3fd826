"""The oracle of `fuzz`: attention on whole matrices, and the error that a result may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from fuzz_cases import Case, dtype_of, kept

Round = Callable[[np.ndarray], np.ndarray]


def attention(case: Case, x: dict[str, np.ndarray], work: Any, rounded: Round, in_order=False):
    """Return attention and its gradients on whole `work` matrices; `rounded` follows each step."""
    times = _in_order if in_order else np.matmul
    q, k, v, dout = (x[name].astype(work) for name in ("q", "k", "v", "dout"))
    group = case.heads // case.kv_heads
    k, v = (np.repeat(a, group, axis=1) for a in (k, v))
    scale = work(case.d**-0.5 if case.scale is None else case.scale)
    s = rounded(times(q, k.mT) * scale)
    slope = np.ones_like(s)
    if case.softcap:
        t = np.tanh(s / work(case.softcap))
        s, slope = rounded(t * work(case.softcap)), 1 - t * t
    if "bias" in x:
        s = rounded(s + x["bias"].astype(work))
    s = np.where(kept(case), s, work(-np.inf))
    top = s.max(axis=-1, keepdims=True)
    top = np.where(np.isneginf(top), work(0), top)
    e = np.exp(s - top)
    total = e.sum(axis=-1, keepdims=True)
    safe = np.where(total == 0, work(1), total)
    p = rounded(e / safe)
    lse = np.where(total == 0, work(-np.inf), top + np.log(safe))[..., 0]
    dp = rounded(times(dout, v.mT))
    ds = rounded(p * (dp - (p * dp).sum(axis=-1, keepdims=True)))
    inner = rounded(ds * slope) * scale
    fold = lambda a: a.reshape(case.batch, case.kv_heads, group, *a.shape[2:]).sum(axis=2)  # noqa: E731
    result = {
        "out": rounded(times(p, v)),
        "lse": lse,
        "dq": rounded(times(inner, k)),
        "dk": rounded(fold(times(inner.mT, q))),
        "dv": rounded(fold(times(p.mT, dout))),
    }
    if "bias" in x:
        assert case.bias is not None
        shared = tuple(axis for axis in (0, 1) if case.bias[axis] == 1)
        result["dbias"] = ds.sum(axis=shared, keepdims=True)
    return result


def _in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., i, None] * b[..., i, None, :]
    return total


def _sizes(case: Case, x: dict[str, np.ndarray]) -> dict[str, float]:
    """Return, per result, the largest sum of the absolute values of the terms it adds up."""
    big = {name: np.abs(a.astype(np.float64)) for name, a in x.items()}
    group = case.heads // case.kv_heads
    k, v = (np.repeat(big[name], group, axis=1) for name in ("k", "v"))
    scale = abs(case.d**-0.5 if case.scale is None else case.scale)
    p = np.zeros((case.batch, case.heads, case.n_q, case.n_kv))
    p[:] = kept(case)
    p = np.where(p, attention_weights(case, x), 0)
    scores = float((scale * big["q"] @ k.mT).max())
    if "bias" in x:
        scores += float(np.where(np.isinf(big["bias"]), 0, big["bias"]).max())
    dp = big["dout"] @ v.mT
    ds = p * (dp + (p * dp).sum(axis=-1, keepdims=True))
    fold = lambda a: a.reshape(case.batch, case.kv_heads, group, *a.shape[2:]).sum(axis=2)  # noqa: E731
    # P is exp(S - m), and in a backward pass exp(S - LSE), where S is computed again. So roundings
    # of both S and of the LSE change all of P.
    moved, again = 1 + scores, 1 + 3 * scores
    sizes = {
        "out": (p @ v).max() * moved,
        "lse": moved,
        "dq": scale * (ds @ k).max() * again,
        "dk": scale * fold(ds.mT @ big["q"]).max() * again,
        "dv": fold(p.mT @ big["dout"]).max() * again,
        "dbias": ds.sum(axis=(0, 1)).max() * again,
    }
    return {name: float(size) for name, size in sizes.items()}


def attention_weights(case: Case, x: dict[str, np.ndarray]) -> np.ndarray:
    """Return P in float64."""
    q, k = x["q"].astype(np.float64), x["k"].astype(np.float64)
    k = np.repeat(k, case.heads // case.kv_heads, axis=1)
    s = q @ k.mT * (case.d**-0.5 if case.scale is None else case.scale)
    if case.softcap:
        s = case.softcap * np.tanh(s / case.softcap)
    if "bias" in x:
        s = s + x["bias"].astype(np.float64)
    s = np.where(kept(case), s, -np.inf)
    top = s.max(axis=-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


#: The relative error of 2^x if P is rounded to 8 bits at once (exponential.POWER_FROM_0).
PAIRS = 3e-6


def judged(case: Case, x: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return the true results, and the error that each may have."""
    kind = dtype_of(case.dtype)
    exact = attention(case, x, np.longdouble if case.dtype == "float64" else np.float64, _as_is)
    if case.dtype in ("float16", "bfloat16"):
        eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[case.dtype]
        narrow = lambda a: a.astype(kind).astype(np.float32)  # noqa: E731
        rough = [attention(case, x, np.float32, narrow)]
    else:
        eps = float(np.finfo(kind).eps)
        rough = [attention(case, x, kind.type, _as_is, in_order) for in_order in (False, True)]
    inner = float(np.finfo(np.float64 if case.dtype == "float64" else np.float32).eps)
    sizes, may = _sizes(case, x), {}
    for name, true in exact.items():
        error = max(error_of(one[name], true) for one in rough)
        one = 1.0 if name == "lse" else eps / inner  # the LSE has the accumulator's type
        largest = float(np.abs(_finite(true)).max(initial=0))
        may[name] = 2 * error + inner * (sizes[name] + one * largest)
    if case.dtype == "bfloat16" and case.backend == "numba":
        may["lse"] += PAIRS  # if this CPU multiplies pairs of bfloat16
    if case.dtype in ("float16", "bfloat16") and case.algorithm != "standard":
        for name, size in _of_rounded_out(case, x, exact["out"], eps / 2).items():
            may[name] = may.get(name, 0) + size
    return exact, may


def _of_rounded_out(
    case: Case, x: dict[str, np.ndarray], out: np.ndarray, eps: float
) -> dict[str, float]:
    """Return the error that a rounded O causes in delta = rowsum(dO * O).

    It shows if one key has all the weight: dP and delta are then equal except for this error.
    """
    q, k, dout = (np.abs(x[name].astype(np.float64)) for name in ("q", "k", "dout"))
    group = case.heads // case.kv_heads
    k = np.repeat(k, group, axis=1)
    scale = abs(case.d**-0.5 if case.scale is None else case.scale)
    p = np.where(kept(case), attention_weights(case, x), 0)
    ds = p * eps * (dout * np.abs(out.astype(np.float64))).sum(axis=-1, keepdims=True)
    dk = (ds.mT @ q).reshape(case.batch, case.kv_heads, group, *k.shape[2:]).sum(axis=2)
    sizes = {"dq": scale * ds @ k, "dk": scale * dk, "dbias": ds.sum(axis=(0, 1))}
    return {name: float(size.max(initial=0)) for name, size in sizes.items()}


def _as_is(a: np.ndarray) -> np.ndarray:
    return a


def _finite(a: np.ndarray) -> np.ndarray:
    return np.where(np.isneginf(a), 0, a)


def error_of(value: np.ndarray, true: np.ndarray) -> float:
    """Return the largest difference; infinite if only one value is -inf or NaN."""
    value = np.asarray(value).astype(true.dtype)
    if not np.array_equal(np.isneginf(value), np.isneginf(true)):
        return np.inf
    error = float(np.abs(_finite(value) - _finite(true)).max(initial=0))
    return np.inf if np.isnan(error) else error
