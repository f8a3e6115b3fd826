"""Walkthroughs: small examples with all intermediate numbers, and the reason for each step.

>>> from flashsim import walkthrough
>>> print(walkthrough.softmax([70, 80, 90]))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashsim.api.samples import random_inputs
from flashsim.counts import traffic
from flashsim.errors import OptionError, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.hardware import PRESETS, Device
from flashsim.problem.oracle import attention
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tensors import whole_bytes
from flashsim.schedule.tiling import Tiling

#: The walkthroughs: name -> the content.
NAMES = {
    "softmax": "your logits through naive, stable and online softmax, in float32 as on a GPU",
    "tiles": "m, alpha, l and O of a row, tile by tile",
    "delta": "rowsum(P dP) = rowsum(O dO), in numbers",
    "corrections": "how many divisions O needs, once per row or once per tile",
    "reread": "how long reading P from HBM takes, by device",
}


MOST_LOGITS = 64  # the largest number of logits that fit on a page


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
    if not 0 < len(values) <= MOST_LOGITS or not np.isfinite(values).all():
        raise OptionError(
            f"logits must be 1 to {MOST_LOGITS} finite numbers, got {shown(list(logits))}"
        )
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
            "naive": _in_two_passes(values, keep, table, stable=False),
            "stable": _in_two_passes(values, keep, table, stable=True),
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


def _in_two_passes(x, keep, table: Table, *, stable: bool) -> np.ndarray:
    way, m = ("stable", x.max()) if stable else ("naive", np.float32(0))
    e = keep(np.exp(x - m))
    l = keep(e.sum(dtype=np.float32))
    weights = keep(e / l)
    steps = [("m = max x", m)] if stable else []
    steps.append(("e = exp(x - m)" if stable else "e = exp(x)", e))
    for step, value in (*steps, ("l = sum e", l), ("weights e / l", weights)):
        table.add(way, step, _text(value))
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


MOST_STEPS = 4096  # the largest number of queries and keys, because people read every step


@own_errors
def tiles(
    n: int = 32,
    head_dim: int = 4,
    *,
    tiling: Tiling | None = None,
    row: int | None = None,
    causal: bool = False,
    seed: int = 0,
) -> Table:
    """Return a table of one query row: m, alpha, l and O after each key tile that the row visits.

    The function runs Algorithm 1 of arXiv:2307.08691 on random float32 q, k and v. In the table's
    last row, O has been divided by l.

    Parameters
    ----------
    n, head_dim : int
        The number of queries (and keys), and the width of a row; the default is 32 x 32 scores.
    tiling : Tiling, optional
        Default 16 x 16.
    row : int, optional
        Index of the query; default: the last, which sees every tile also under a causal mask.
    causal : bool
    seed : int

    Raises
    ------
    OptionError
        If `row` is not the index of a query, or n is above 4,096.
    """
    problem = Problem(n, head_dim=head_dim, causal=causal)
    if n > MOST_STEPS:
        raise OptionError(
            f"n must be at most {MOST_STEPS}, because a walkthrough prints every step, got {n}"
        )
    tiling = Tiling(16, 16) if tiling is None else tiling
    seed = checks.seed(seed)
    row = n - 1 if row is None else checks.place("row", row, n)
    schedule = Schedule(problem, tiling)
    q, k, v, _ = (x[0, 0] for x in random_inputs(problem, seed))
    table = Table(
        f"Query {row} of {n} x {n} scores, d = {head_dim}, tiles {tiling}"
        + (", causal" if causal else ""),
        ("tile", "keys", "m", "alpha", "l", "O"),
        note="alpha = exp(m_old - m) rescales l and O; O is divided by l once, at the end, and "
        f"then differs from attention in float64 by {{error:.1g}}; seed {seed}",
    )
    tile = row // min(tiling.block_q, n)
    m, l, O = np.float32(-np.inf), np.float32(0), np.zeros(head_dim, np.float32)
    for visit in schedule.visits(tile):
        keys = np.arange(visit.cols.start, visit.cols.stop)
        s = k[visit.cols] @ q[row] * np.float32(problem.scale)
        if causal:
            s = np.where(keys <= row, s, -np.inf).astype(np.float32)
        m_new = np.maximum(m, s.max())
        alpha, p = np.exp(m - m_new), np.exp(s - m_new)
        l = alpha * l + p.sum()
        O = alpha * O + p @ v[visit.cols]
        m = m_new
        span = f"{keys[0]} to {keys[-1]}"
        table.add(f"{tile}, {visit.j}", span, _4(m), _4(alpha), _4(l), _four(O))
    table.add("O / l", "", None, None, None, _four(O / l))
    table.add("L = m + log l", "", _4(m + np.log(l)), None, None, "")
    seen = row + 1 if causal else n
    s = k[:seen].astype(np.float64) @ q[row] * problem.scale
    weights = np.exp(s - s.max())
    error = np.abs(O / l - weights / weights.sum() @ v[:seen]).max()
    table.note = table.note.format(error=float(error))
    return table


def _4(x: float) -> float:
    return float(np.round(float(x), 4))


def _four(x: np.ndarray) -> str:
    shown = ", ".join(f"{value:.4f}" for value in x[:4])
    return shown + (", ..." if len(x) > 4 else "")


MOST_ROWS = 8


@own_errors
def delta(n: int = 32, head_dim: int = 4, *, seed: int = 0) -> Table:
    """Return a table that compares rowsum(P dP) with rowsum(O dO), computed in float64.

    The backward pass of softmax needs sum_j P_ij dP_ij. With dP = dO V^T, this sum equals dO_i ·
    (sum_j P_ij V_j) = dO_i · O_i (arXiv:2307.08691, section 2.3.2), which needs no scores.
    """
    problem = Problem(n, head_dim=head_dim, dtype="float64")
    inputs = random_inputs(problem, seed)
    results = attention(*inputs[:3], problem)
    q, k, v, dout, out, lse = (x[0, 0] for x in (*inputs, *results))
    P = np.exp(problem.scale * q @ k.T - lse[:, None])
    scores, outputs = (P * (dout @ v.T)).sum(axis=1), (out * dout).sum(axis=1)
    table = Table(
        f"D = rowsum(P dP) = rowsum(O dO), {n} x {n} scores, d = {head_dim}",
        ("row", "rowsum(P dP)", "rowsum(O dO)", "difference"),
        note=f"rowsum(P dP) sums {n} products per row, from N x N matrices that FlashAttention "
        f"does not store; rowsum(O dO) sums {head_dim}, from two stored tensors. Largest "
        f"difference over all {n} rows "
        f"{np.abs(scores - outputs).max():.1g}",
    )
    for i in range(min(n, MOST_ROWS)):
        each = float(scores[i]), float(outputs[i])
        table.add(str(i), *each, abs(each[0] - each[1]))
    return table


@own_errors
def corrections(n: int = 4096, head_dim: int = 64, *, tiling: Tiling | None = None) -> Table:
    """Return a table that counts FlashAttention-1's and -2's operations outside matrix products.

    FlashAttention-1 divides O by l at every key tile, and multiplies O by l at the next key tile.
    FlashAttention-2 divides O by l once, after the last tile (arXiv:2307.08691, section 3.1.1).
    """
    tiling, problem = tiling or Tiling(64, 64), Problem(n, head_dim=head_dim, dtype="bfloat16")
    table = Table(
        f"Divisions of O: {n:,} queries and keys, d = {head_dim}, tiles {tiling}",
        ("algorithm", "divisions", "per row", "multiplications", "others", "total"),
        note="one head, forward: operations that do not run on tensor cores; others: exp, max, "
        f"add. FlashAttention-1 divides {head_dim} columns of O at each tile of a row, "
        "FlashAttention-2 once per row",
    )
    for name in ("flash1", "flash2"):
        counted = traffic.count_schedule(problem, tiling, name, "forward", Device.get("H100"))
        divide, multiply = counted.flops("divide"), counted.flops("multiply")
        others = sum(counted.flops(kind) for kind in ("exp", "max", "add"))
        whole = divide + multiply + others
        table.add(name, divide, divide // n, multiply, others, whole)
    return table


@own_errors
def reread(n: int = 4096, *, head_dim: int = 64, dtype: str = "float32") -> Table:
    """Return a table of the time that each device needs to read P from HBM.

    The table also has the time to store and load both S and P once.
    """
    problem = Problem(n, head_dim=head_dim, dtype=dtype)
    size = whole_bytes(problem, "P")
    flops = traffic.Traffic(
        problem, Tiling(n, n), "standard", "forward", Device.get("H100"), "ascending"
    ).flops("matmul")
    table = Table(
        f"P of {n:,} x {n:,} in {dtype}, one head: {size:,} B",
        ("device", "HBM GB/s", "P once, µs", "S and P, µs", "products, µs"),
        note="standard attention stores and loads S and P, which is four passes; products: the "
        f"time of 4 N^2 d FLOPs at the peak for {dtype}, d = {head_dim}",
    )
    for name, device in PRESETS.items():
        if dtype not in {**device.tensor_flops, **device.cuda_flops}:
            continue
        once = 1e6 * size / device.hbm_bandwidth
        products = 1e6 * flops / device.peak(dtype)
        table.add(name, device.hbm_bandwidth / 1e9, once, 4 * once, products)
    return table


__all__ = ["NAMES", "corrections", "delta", "reread", "softmax", "tiles"]
