"""Splits a program's accesses into visits (tile pairs), one per inner-loop iteration.

A new visit begins when an inner-loop tensor is accessed at a new tile, so two loads of one tile in
one iteration belong to one visit.
"""

from dataclasses import dataclass

import numpy as np

from flashsim.own_kernels.geometry import Geometry
from flashsim.schedule.tensors import COL, TILE


@dataclass(frozen=True, eq=False)
class Visits:
    """The accesses of one launch, ordered by program, and the visit (tile pair) of each access.

    Attributes
    ----------
    outer : the dimension over which the outer loop runs, "queries" or "keys"
    block_q, block_k : rows of a query tile, and of a key tile
    at : index of each access in the record, ordered by program, int64 (n,) like all arrays here
    program, head : the program and the query head of each access; a program may have several heads
    tile : outer tile of each access's program
    inner : inner tile of each access's visit; -1 for accesses outside the inner loop
    visit : number of each access's visit, counted from 0 in the launch; -1 before a program's first
        visit and after its last one
    """

    outer: str
    block_q: int
    block_k: int
    at: np.ndarray
    program: np.ndarray
    head: np.ndarray
    tile: np.ndarray
    inner: np.ndarray
    visit: np.ndarray


def visits_of(geometry: Geometry, launch: int) -> Visits:
    """Return one launch's accesses, split into visits (tile pairs)."""
    g, a = geometry, geometry.record.accesses
    block_q, block_k = g.heights[launch]
    mine = np.flatnonzero((a["launch"] == launch) & (a["active"] > 0))
    mine = mine[np.argsort(a["program"][mine], kind="stable")]
    axis = np.array([s.axis for s in g.sides] + [-1])[a["tensor"][mine]]
    program = a["program"][mine].astype(np.int64)
    outer = g.outer[launch]
    # Row tile and column tile of each access, -1 where its tensor has none.
    i = np.where(axis != COL, g.row[mine] // block_q, -1)
    j = np.where(axis == COL, g.row[mine], np.where(axis == TILE, g.col[mine], -1))
    j = np.where(j >= 0, j // block_k, -1)
    own, other = (i, j) if outer == "queries" else (j, i)
    inner = other >= 0

    starts = np.flatnonzero(np.diff(program, prepend=-1))
    which = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(program))))
    tile = _first(own, starts, which, np.arange(len(starts)))
    head = _head(g, mine, axis, starts, which)

    at = np.flatnonzero(inner)
    new = np.ones(len(at), bool)
    # A change of head within a group also begins a visit.
    key = other[at] * (int(head.max(initial=0)) + 1) + head[at]
    new[1:] = (np.diff(key) != 0) | (np.diff(which[at]) != 0)
    visit = np.full(len(mine), -1, np.int64)
    visit[at] = np.cumsum(new) - 1
    # An access between two inner-loop accesses belongs to the visit of the first of them.
    last = np.maximum.accumulate(np.where(inner, np.arange(len(mine)), -1))
    after = np.full(len(mine), len(mine))
    after[inner] = np.flatnonzero(inner)
    after = np.minimum.accumulate(after[::-1])[::-1]
    between = ~inner & (last >= 0) & (after < len(mine))
    between[between] &= which[last[between]] == which[between]
    between[between] &= which[np.minimum(after[between], len(mine) - 1)] == which[between]
    visit[between] = visit[last[between]]
    seen = np.where(inner, other, -1)
    seen[between] = other[last[between]]
    if not len(at):  # no inner loop: the whole program is one visit
        visit, seen = which.astype(np.int64), np.zeros(len(mine), np.int64)
    return Visits(outer, block_q, block_k, mine, program, head, tile, seen, visit)


def _first(
    values: np.ndarray, starts: np.ndarray, which: np.ndarray, default: np.ndarray
) -> np.ndarray:
    """Return, per access, the program's first value of at least 0, or `default` if no value is."""
    found = default.copy()
    known = np.flatnonzero(values >= 0)[::-1]
    found[which[known]] = values[known]
    return found[which]


def _head(
    g: Geometry, mine: np.ndarray, axis: np.ndarray, starts: np.ndarray, which: np.ndarray
) -> np.ndarray:
    """Return the number of the query head that each access belongs to."""
    p = g.problem
    heads = p.batch * p.heads
    tensor = g.record.accesses["tensor"][mine]
    has_all = np.array([lead == heads for lead in g.leads] + [False])[tensor]
    query = np.where((axis != COL) & has_all, g.lead[mine], -1)
    key = np.array([lead == p.batch * p.kv_heads for lead in g.leads] + [False])[tensor]
    by_key = np.where((axis == COL) & key, g.lead[mine] * p.group, -1)
    first = _first(by_key, starts, which, np.zeros(len(starts), np.int64))
    alone = _first(query, starts, which, np.full(len(starts), -1, np.int64))
    # The head of the last access that determines one; before that, the program's first head.
    last = np.maximum.accumulate(np.where(query >= 0, np.arange(len(mine)), -1))
    ok = last >= 0
    ok[ok] &= which[last[ok]] == which[ok]
    found = np.where(ok, query[last], alone)
    return np.where(found >= 0, found, first)
