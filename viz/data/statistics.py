"""The online softmax of one query row: its running maximum m and sum l, visit by visit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashsim import report
from flashsim.errors import OptionError, ShapeError, UnsupportedError
from flashsim.trace.trace import Trace
from flashsim.viz.data.steps import Steps


@dataclass(frozen=True)
class RowStatistics:
    """m and l of one query row (arXiv:2307.08691, Algorithm 1, lines 9 and 10).

    Attributes
    ----------
    row, tile, head : int
        The query row (packed index), the row tile it lies in, and the query head.
    steps : ndarray of int64, (n_visits,)
        The steps of the `Steps` that visit the row's tile.
    m, l : ndarray of float64, (n_visits,)
        Maximum of the scores seen so far, and the sum of exp(score - m), after each of them. -inf
        and 0 until the row has seen a key.
    """

    row: int
    tile: int
    head: int
    steps: np.ndarray
    m: np.ndarray
    l: np.ndarray

    __repr__ = report.short


def row_statistics(
    trace: Trace, q: np.ndarray, k: np.ndarray, *, row: int | None = None, head: int = 0
) -> RowStatistics:
    """Follow one row of scores through the visits of a forward trace.

    Parameters
    ----------
    trace : Trace
        Of a forward pass of "flash1" or "flash2", without a bias.
    q, k : ndarray, (batch, heads, n_q, head_dim), (batch, kv_heads, n_kv, head_dim)
        What ran; leading axes may be left out.
    row : int, optional
        Query row; default: the last of the row tile half-way down.
    head : int
        Query head, counted over the batch.

    Raises
    ------
    UnsupportedError, OptionError, ShapeError
    """
    p = trace.problem
    running = any(b.name == "m" for stage in trace.stages for b in stage.stage.buffers)
    if trace.direction != "forward" or not running or p.bias is not None:
        raise UnsupportedError(
            "m and l are followed through forward passes that keep them, without a bias; "
            f"this trace is {trace.algorithm} {trace.direction}"
            + (", with a bias" if p.bias is not None else "")
        )
    schedule = trace.schedule
    row = int(schedule.rows[schedule.t_r // 2, 1]) - 1 if row is None else row
    for name, value, stop in (("row", row, p.n_q), ("head", head, p.batch * p.heads)):
        if not 0 <= value < stop:
            raise OptionError(f"{name} must be from 0 to {stop - 1}, got {value}")
    query = _rows("q", q, p.batch * p.heads, p.n_q, p.head_dim)[head, row]
    keys = _rows("k", k, p.batch * p.kv_heads, p.n_kv, p.head_dim)[head // p.group]
    tile = int(np.searchsorted(schedule.rows[:, 1], row, side="right"))
    walk = Steps(trace)
    steps = np.flatnonzero((walk.visit >= 0) & (walk.i == tile))
    m, l = np.full(len(steps), -np.inf), np.zeros(len(steps))
    top, total = -np.inf, 0.0
    for n, step in enumerate(steps):
        cols = schedule.col_slice(int(walk.j[step]))
        scores = p.scale * (keys[cols] @ query)
        if p.softcap:
            scores = p.softcap * np.tanh(scores / p.softcap)
        keep = schedule.keep(tile, int(walk.j[step]))
        if keep is not None:
            scores = scores[keep[row - schedule.rows[tile, 0]]]
        new = max(top, scores.max(initial=-np.inf))
        if np.isfinite(new):
            total = total * np.exp(top - new) + np.exp(scores - new).sum()
        top = new
        m[n], l[n] = top, total
    return RowStatistics(row, tile, head, steps, m, l)


def _rows(name: str, array: np.ndarray, heads: int, n: int, d: int) -> np.ndarray:
    """As float64 (heads, n, d)."""
    array = np.asarray(array, np.float64)
    if array.size != heads * n * d or array.shape[-2:] != (n, d):
        raise ShapeError(
            f"{name} must be the array that ran, (.., {n}, {d}) with {heads} heads in all, "
            f"got {array.shape}"
        )
    return array.reshape(heads, n, d)
