"""Follows a few logits through three kinds of softmax, with every intermediate value in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashsim.errors import OptionError, own_errors, shown
from flashsim.problem import checks
from flashsim.report import Table

MOST = 64  # the largest number of logits that fit on a page


@own_errors
def softmax(logits: Sequence[float], *, chunk: int = 1, subnormals: bool = False) -> Table:
    """Return a table of the naive, the stable and the online softmax of one row, step by step.

    Parameters
    ----------
    logits : sequence of float
        The row, which is rounded to float32.
    chunk : int
        Number of logits that the online softmax processes at a time.
    subnormals : bool
        Whether results below float32's smallest normal number, 1.2e-38, are kept, as in NumPy. A
        GPU's fast arithmetic (``-ftz=true``, ``exp2.approx.ftz``) replaces them by 0.

    Returns
    -------
    Table
        The columns are way, step and value. The last rows are the float64 result, and the largest
        error of each way.

    Raises
    ------
    OptionError
        If there are no logits or more than 64, or if a logit is not finite.
    """
    values = np.array([checks.number("logits", x) for x in logits], np.float32)
    if not 0 < len(values) <= MOST or not np.isfinite(values).all():
        raise OptionError(f"logits must be 1 to {MOST} finite numbers, got {shown(list(logits))}")
    chunk = checks.positive_int("chunk", chunk)
    table = Table(
        f"Softmax of {_text(values)} in float32, "
        + ("subnormals kept" if subnormals else "subnormals flushed to 0 as on a GPU"),
        ("way", "step", "value"),
        note="naive: exp overflows above 88.72 and is subnormal below -87.34; online: alpha = "
        "exp(m_old - m) rescales l to the new maximum",
    )
    keep = (lambda x: x) if subnormals else _flushed
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        weights_by_way = {
            "naive": _naive(values, keep, table),
            "stable": _stable(values, keep, table),
            "online": _online(values, chunk, keep, table),
        }
    exact = np.exp(values.astype(np.float64) - values.max())
    exact /= exact.sum()
    table.add("float64", "weights", _text(exact))
    for way, weights in weights_by_way.items():
        error = np.abs(weights - exact).max()
        table.add(way, "largest error", _text(error))
    return table


def _flushed(x: np.ndarray) -> np.ndarray:
    small = np.abs(x) < np.finfo(np.float32).smallest_normal
    return np.where(small, np.float32(0), x)


def _naive(x, keep, table: Table) -> np.ndarray:
    e = keep(np.exp(x))
    l = keep(e.sum(dtype=np.float32))
    weights = keep(e / l)
    for step, value in (("e = exp(x)", e), ("l = sum e", l), ("weights e / l", weights)):
        table.add("naive", step, _text(value))
    return weights


def _stable(x, keep, table: Table) -> np.ndarray:
    m = x.max()
    e = keep(np.exp(x - m))
    l = keep(e.sum(dtype=np.float32))
    weights = keep(e / l)
    steps = (("m = max x", m), ("e = exp(x - m)", e), ("l = sum e", l), ("weights e / l", weights))
    for step, value in steps:
        table.add("stable", step, _text(value))
    return weights


def _online(x, chunk: int, keep, table: Table) -> np.ndarray:
    m, l = np.float32(-np.inf), np.float32(0)
    for start in range(0, len(x), chunk):
        part = x[start : start + chunk]
        m_new = np.maximum(m, part.max())
        alpha = keep(np.exp(m - m_new))
        l = keep(alpha * l + keep(np.exp(part - m_new)).sum(dtype=np.float32))
        m = m_new
        state = f"m {_text(m)}, alpha {_text(alpha)}, l {_text(l)}"
        table.add("online", f"after {_text(part)}", state)
    weights = keep(keep(np.exp(x - m)) / l)
    table.add("online", "weights exp(x - m) / l", _text(weights))
    return weights


def _text(x: np.ndarray | float) -> str:
    return ", ".join(f"{value:.6g}" for value in np.ravel(x))
