"""Follows one query row through FlashAttention-2, tile by tile, with all numbers."""

from __future__ import annotations

import numpy as np

from flashsim.api.samples import random_inputs
from flashsim.errors import OptionError, own_errors
from flashsim.problem import checks
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling

MOST = 4096  # the largest number of queries and keys, because people read every step


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
    if n > MOST:
        raise OptionError(
            f"n must be at most {MOST}, because a walkthrough prints every step, got {n}"
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
        table.add(f"{tile}, {visit.j}", span, _4(m), _4(alpha), _4(l), _text(O))
    table.add("O / l", "", None, None, None, _text(O / l))
    table.add("L = m + log l", "", _4(m + np.log(l)), None, None, "")
    seen = row + 1 if causal else n
    s = k[:seen].astype(np.float64) @ q[row] * problem.scale
    weights = np.exp(s - s.max())
    error = np.abs(O / l - weights / weights.sum() @ v[:seen]).max()
    table.note = table.note.format(error=float(error))
    return table


def _4(x: float) -> float:
    return float(np.round(float(x), 4))


def _text(x: np.ndarray) -> str:
    shown = ", ".join(f"{value:.4f}" for value in x[:4])
    return shown + (", ..." if len(x) > 4 else "")
