"""The online softmax of one query row: its running maximum m and sum l, key tile by key tile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from flashsim import report
from flashsim.errors import DTypeError, ShapeError, UnsupportedError, own_errors
from flashsim.problem import checks
from flashsim.trace.steps import Steps
from flashsim.trace.trace import Trace

#: The most scores for which every row tile is followed; beyond, only one row tile is.
_MOST_SCORES = 1 << 28


@dataclass(frozen=True)
class RowStatistics:
    """The softmax's running m and l of one query row (arXiv:2307.08691, Algorithm 1, lines 9, 10).

    A visit is the computation of one key tile for the query tile that contains the row.

    Attributes
    ----------
    row, tile, head : int
        The query row (packed index), the row tile that contains it, and the query head.
    steps, j : ndarray of int64, (n_visits,)
        The steps of `Steps` that visit the row's tile, and the key tile of each.
    m, l : ndarray of float64, (n_visits,)
        The maximum of the scores so far, and the sum of exp(score - m), after each visit. They are
        -inf and 0 until the row has a key.
    alpha : ndarray of float64, (n_visits,)
        exp(m before - m after): the factor by which the visit rescaled l and O. It is 1 if the
        maximum did not change, and 0 at the row's first key.
    others : tuple of RowStatistics
        The statistics of one row of each other row tile, for players and animations. Empty if `row`
        was passed.
    """

    row: int
    tile: int
    head: int
    steps: np.ndarray
    j: np.ndarray
    m: np.ndarray
    l: np.ndarray
    alpha: np.ndarray
    others: tuple[RowStatistics, ...] = field(default=(), repr=False)

    @property
    def by_tile(self) -> dict[int, RowStatistics]:
        """A dict from row tile to statistics, of this object and of all objects in `others`."""
        return {s.tile: s for s in sorted((self, *self.others), key=lambda s: s.tile)}

    __repr__ = report.short
    _repr_html_ = report.tabled

    def table(self) -> report.Table:
        """Return a table with one row per visit."""
        rows = zip(*(x.tolist() for x in (self.j, self.m, self.alpha, self.l)), strict=True)
        return report.Table(
            f"Online softmax of query row {self.row}, head {self.head}",
            ("key tile j", "m", "alpha", "l"),
            [*rows],
            note="alpha = exp(m before - m after) rescales l and O",
        )


@own_errors
def row_statistics(
    trace: Trace, q: np.ndarray, k: np.ndarray, *, row: int | None = None, head: int = 0
) -> RowStatistics:
    """Follow one row of scores through the key tiles of a forward trace.

    Parameters
    ----------
    trace : Trace
        A forward pass that keeps m and l ("flash1", "flash2"), without a bias.
    q, k : ndarray, (batch, heads, n_q, head_dim), (batch, kv_heads, n_kv, head_dim)
        The inputs of the pass; leading axes may be left out.
    row : int, optional
        Query row. By default, one row per row tile is followed: the row whose maximum changes most
        often. The result is that of the middle row tile, and its `others` those of the other row
        tiles. For more than 2**28 scores, only the middle row tile is followed.
    head : int
        Query head, counted over the batch.

    Raises
    ------
    UnsupportedError, OptionError, ShapeError
    """
    p = trace.problem
    running = any(b.name == "m" for stage in trace.stages for b in stage.stage.buffers)
    running &= not any(stage.stage.parts for stage in trace.stages)  # m begins anew with each part
    if trace.direction != "forward" or not running or p.bias is not None:
        raise UnsupportedError(
            "m and l can be followed only in a forward pass that computes them, without a bias; "
            f"this trace is {trace.algorithm} {trace.direction}"
            + (", with a bias" if p.bias is not None else "")
        )
    schedule = trace.schedule
    for name, value, stop in (("row", row or 0, p.n_q), ("head", head, p.batch * p.heads)):
        checks.place(name, value, stop)
    queries = _rows("q", q, p.batch * p.heads, p.n_q, p.head_dim)[head]
    keys = _rows("k", k, p.batch * p.kv_heads, p.n_kv, p.head_dim)[head // p.group]
    walk, middle = Steps(trace), schedule.t_r // 2
    if row is not None:
        tile = int(np.searchsorted(schedule.rows[:, 1], row, side="right"))
        return _followed(walk, queries, keys, tile, head, row)
    tiles = range(schedule.t_r) if p.n_q * p.n_kv <= _MOST_SCORES else [middle]
    followed = {tile: _followed(walk, queries, keys, tile, head, None) for tile in tiles}
    others = tuple(s for tile, s in followed.items() if tile != middle and len(s.steps))
    return replace(followed[middle], others=others)


def _followed(
    walk: Steps[Trace], queries: np.ndarray, keys: np.ndarray, tile: int, head: int, row: int | None
) -> RowStatistics:
    """Return the softmax statistics of one query row of a row tile.

    If `row` is None, the function chooses the row whose maximum changes most often.
    """
    schedule, p = walk.trace.schedule, walk.trace.problem
    start, stop = schedule.rows[tile, :2]
    steps = np.flatnonzero((walk.visit >= 0) & (walk.i == tile))
    m, l, alpha = (np.zeros((len(steps), stop - start)) for _ in range(3))
    top, total = np.full(stop - start, -np.inf), np.zeros(stop - start)
    for n, step in enumerate(steps):
        j = int(walk.j[step])
        scores = p.scale * (queries[start:stop] @ keys[schedule.col_slice(j)].T)
        if p.softcap:
            scores = p.softcap * np.tanh(scores / p.softcap)
        keep = schedule.keep(tile, j)
        if keep is not None:
            scores = np.where(keep, scores, -np.inf)
        new = np.maximum(top, scores.max(axis=1))
        base = np.where(np.isneginf(new), 0, new)  # no key yet: no inf - inf
        alpha[n] = np.exp(top - base)
        total = alpha[n] * total + np.exp(scores - base[:, None]).sum(axis=1)
        m[n], l[n], top = new, total, new
    if row is None:
        moves = ((alpha > 0) & (alpha < 1)).sum(axis=0)
        row = int(stop - 1 - np.argmax(moves[::-1]))
    at = row - start
    return RowStatistics(row, tile, head, steps, walk.j[steps], m[:, at], l[:, at], alpha[:, at])


def _rows(name: str, array: np.ndarray, heads: int, n: int, d: int) -> np.ndarray:
    """Return an array as float64, with the shape (heads, n, d)."""
    array = checks.as_array(name, array)
    if array.dtype.kind not in "fiuV":  # V: bfloat16
        raise DTypeError(f"{name} must be an array of numbers, got {array.dtype}")
    array = array.astype(np.float64)
    if array.size != heads * n * d or array.shape[-2:] != (n, d):
        raise ShapeError(
            f"{name} must be the array of the traced run, of shape (..., {n}, {d}) with {heads} "
            f"heads in total, got shape {array.shape}"
        )
    return array.reshape(heads, n, d)
