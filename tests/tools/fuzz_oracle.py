"""The oracle of `fuzz`: attention on whole matrices, and the error that a result may have."""

from types import SimpleNamespace

import numpy as np
from fuzz_cases import Case, dtype_of, kept
from helpers import in_order, plain, terms

import flashsim

#: The relative error of 2^x if P is rounded to 8 bits at once (exponential.POWER_FROM_0).
PAIRS = 3e-6


def judged(case: Case, x: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return the true results, and the error that each may have."""
    kind, half = dtype_of(case.dtype), case.dtype in ("float16", "bfloat16")
    p = flashsim.Problem(
        *(case.n_q, case.n_kv, case.d, case.dv, case.batch, case.heads, case.kv_heads, case.dtype),
        softcap=case.softcap,
        scale=case.scale,
    )
    given, how = SimpleNamespace(**{"bias": None} | x), {"kept": kept(case)}
    exact = plain(given, p, np.longdouble if case.dtype == "float64" else np.float64, **how)
    prob = exact.pop("P").astype(np.float64)
    if half:
        eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[case.dtype]
        narrow = lambda a: a.astype(kind).astype(np.float32)  # noqa: E731
        rough = [plain(given, p, np.float32, rounded=narrow, **how)]
    else:
        eps = float(np.finfo(kind).eps)
        rough = [plain(given, p, kind.type, times, **how) for times in (np.matmul, in_order)]
    inner = float(np.finfo(np.float64 if case.dtype == "float64" else np.float32).eps)
    sizes, may = _sizes(given, terms(given, p, prob)), {}
    for name, true in exact.items():
        error = max(error_of(one[name], true) for one in rough)
        one = 1.0 if name == "lse" else eps / inner  # the LSE has the accumulator's type
        largest = float(np.abs(_finite(true)).max(initial=0))
        may[name] = 2 * error + inner * (sizes[name] + one * largest)
    if case.dtype == "bfloat16" and case.backend == "numba":
        may["lse"] += PAIRS  # if this CPU multiplies pairs of bfloat16
    if half and case.algorithm != "standard":
        for name, size in _of_rounded_out(given, p, prob, exact["out"], eps / 2).items():
            may[name] = may.get(name, 0) + size
    return exact, may


def _sizes(x: SimpleNamespace, sums: dict[str, np.ndarray]) -> dict[str, float]:
    """Return, per result, the largest sum of the absolute values of the terms it adds up."""
    scores = sums["lse"].max()
    if x.bias is not None:
        scores += np.where(np.isinf(x.bias), 0, np.abs(x.bias.astype(np.float64))).max()
    # P is exp(S - m), and in a backward pass exp(S - LSE), where S is computed again. So roundings
    # of both S and of the LSE change all of P.
    moved = {"out": 1 + scores, "lse": 1 + scores}
    sizes = {name: size.max() for name, size in sums.items()} | {"lse": 1}
    return {name: float(size * moved.get(name, 1 + 3 * scores)) for name, size in sizes.items()}


def _of_rounded_out(
    x: SimpleNamespace, p: flashsim.Problem, prob: np.ndarray, out: np.ndarray, eps: float
) -> dict[str, float]:
    """Return the error that a rounded O causes in delta = rowsum(dO * O).

    It shows if one key has all the weight: dP and delta are then equal except for this error.
    """
    q, k, dout = (np.abs(a.astype(np.float64)) for a in (x.q, x.k, x.dout))
    k = np.repeat(k, p.group, axis=1)
    ds = prob * eps * (dout * np.abs(out.astype(np.float64))).sum(axis=-1, keepdims=True)
    dk = (ds.mT @ q).reshape(p.batch, p.kv_heads, p.group, *k.shape[2:]).sum(axis=2)
    sizes = {"dq": abs(p.scale) * ds @ k, "dk": abs(p.scale) * dk, "dbias": ds.sum(axis=(0, 1))}
    return {name: float(size.max(initial=0)) for name, size in sizes.items()}


def _finite(a: np.ndarray) -> np.ndarray:
    return np.where(np.isneginf(a), 0, a)


def error_of(value: np.ndarray, true: np.ndarray) -> float:
    """Return the largest difference; infinite if only one value is -inf or NaN."""
    value = np.asarray(value).astype(true.dtype)
    if not np.array_equal(np.isneginf(value), np.isneginf(true)):
        return np.inf
    error = float(np.abs(_finite(value) - _finite(true)).max(initial=0))
    return np.inf if np.isnan(error) else error
