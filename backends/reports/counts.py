"""From the bytes that a GPU kernel's threads reported to a stage's events.

Shared by every GPU backend. A kernel reports into two uint32 arrays, ``(walks, tiles, SLOTS)`` for
outer steps and ``(batch * heads, n_visits, SLOTS)`` for visits; `WALKS` says which slot is which
tensor. Bytes in the events are the reported ones. What lies on chip in between is not reported:
its events (alloc, free, compute) are those of `schedule.plans`, in the simulated algorithm's
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flashsim.errors import TraceError
from flashsim.schedule import plans
from flashsim.schedule.names import ALLOC, CODES, COMPUTE, FREE, LOAD, REDUCE, STORE
from flashsim.schedule.schedule import Schedule
from flashsim.trace.events import StageTrace


class Item(NamedTuple):
    """One event of a step or a visit. Transfers have a slot; on-chip events do not."""

    op: int
    tensor: str = "-"
    slot: int = -1


class Walk(NamedTuple):
    """The events of one stage: before a step's visits, in each visit, after them."""

    head: tuple[Item, ...]
    visit: tuple[Item, ...] = ()
    tail: tuple[Item, ...] = ()
    strip: bool = False  # frees what it loaded before it counts as computed (`convert`)


def _items(op: int, names: str) -> tuple[Item, ...]:
    """``"Q:0 dO:1"`` with an operation."""
    pairs = (name.split(":") for name in names.split())
    return tuple(Item(op, name, int(slot)) for name, slot in pairs)


def _held(names: str) -> tuple[Item, ...]:
    return tuple(Item(ALLOC, name) for name in names.split())


_DKDV_VISIT = (*_items(LOAD, "Q:0 dO:1 L:2 delta:3"), *_held("S gate dP"))
_DKDV = Walk((*_items(LOAD, "K:0 V:1"), *_held("dK dV")), _DKDV_VISIT, _items(STORE, "dK:2 dV:3"))
#: What each stage's kernel reports, and where. "gate" exists with a softcap only.
WALKS = {
    "forward": Walk(
        (*_items(LOAD, "Q:0"), *_held("O l m")),
        (*_items(LOAD, "K:0 V:1"), *_held("S")),
        _items(STORE, "O:1 L:2"),
    ),
    "delta": Walk((*_items(LOAD, "O:0 dO:1"), *_held("delta"), *_items(STORE, "delta:2 dQ_acc:3"))),
    "dkdv": _DKDV,
    "fused": _DKDV._replace(
        visit=(*_DKDV_VISIT, *_held("dQ"), *_items(REDUCE, "dQ_acc:4")),
    ),
    "dq": Walk(
        (*_items(LOAD, "Q:0 dO:1 L:2 delta:3"), *_held("dQ")),
        (*_items(LOAD, "K:0 V:1"), *_held("S gate dP")),
        _items(STORE, "dQ:4"),
    ),
    "convert": Walk((*_items(LOAD, "dQ_acc:0"), *_items(STORE, "dQ:1")), strip=True),
}


def stage_trace(
    stage: plans.Stage,
    schedule: Schedule,
    tile_counts: np.ndarray,
    visit_counts: np.ndarray,
    *,
    fused: bool,
) -> StageTrace:
    """The events of one stage from what its kernel reported.

    Parameters
    ----------
    stage : plans.Stage
    schedule : Schedule
        The stage's walk.
    tile_counts : ndarray of uint32, (walks, tiles, SLOTS)
    visit_counts : ndarray of uint32, (batch * heads, n_visits, SLOTS)
    fused : bool
        Whether dQ is reduced into an accumulator in HBM, which the delta stage then clears.

    Raises
    ------
    TraceError
        If two heads did not move the same bytes, which only a broken kernel can cause.
    """
    repeat, stride = plans.heads_of(stage, schedule.problem)
    tiles = _one_walk(stage.name, tile_counts.reshape(repeat, -1, tile_counts.shape[-1]))
    visits = _one_walk(stage.name, visit_counts.reshape(repeat, -1, visit_counts.shape[-1]))
    visits = visits.reshape(stride, -1, visits.shape[-1])
    rows = _Assembly(stage, schedule, tiles, visits, fused).rows()
    return StageTrace.build(stage, schedule, repeat, stride, rows)


def _one_walk(name: str, counts: np.ndarray) -> np.ndarray:
    if (counts != counts[:1]).any():
        walk, place, slot = (int(x[0]) for x in np.nonzero(counts != counts[:1]))
        raise TraceError(
            f"stage {name!r}: walk {walk} reported {int(counts[walk, place, slot]):,} B in slot "
            f"{slot} of record {place}, walk 0 reported {int(counts[0, place, slot]):,} B"
        )
    return counts[0].astype(np.int64)


class _Assembly:
    """Puts a stage's events in order: by outer step, then place in the step, then item."""

    def __init__(
        self,
        stage: plans.Stage,
        schedule: Schedule,
        tiles: np.ndarray,
        visits: np.ndarray,
        fused: bool,
    ) -> None:
        self.stage, self.schedule = stage, schedule
        self.tiles, self.visits, self.fused = tiles, visits, fused
        self.buffers = {b.name: b for b in stage.buffers}
        self.by_row = stage.outer == "queries"
        self.ptr, self.inner, _ = schedule.row_csr if self.by_row else schedule.col_csr
        order = np.array(schedule.outer_order())
        self.rank = np.empty_like(order)
        self.rank[order] = np.arange(len(order))
        self.heights = np.diff(schedule.rows[:, :2], axis=1)[:, 0].astype(np.int64)
        self.widths = np.diff(schedule.cols[:, :2], axis=1)[:, 0].astype(np.int64)
        self.parts: list[np.ndarray] = []

    def rows(self) -> np.ndarray:
        """(events, 7): op, tensor, member, i, j, visit, bytes."""
        walk = WALKS[self.stage.name]
        outer = np.arange(len(self.ptr) - 1)
        n_tiles, counts = len(outer), np.diff(self.ptr)
        blank = np.full(n_tiles, -1)
        place = (outer, blank) if self.by_row else (blank, outer)
        extent = (self.heights, 0) if self.by_row else (0, self.widths)
        middle = () if walk.strip else (Item(COMPUTE),)
        head, freed = self._spell(walk.head), self._frees(walk.head)
        tail = (*self._spell(walk.tail), *middle, *freed, *((Item(COMPUTE),) if walk.strip else ()))
        where = (np.zeros(n_tiles, int), *place, blank)
        self._emit(head, self.tiles, extent, self.rank, np.zeros(n_tiles, int), where)
        after = 1 + counts * len(self.visits)
        self._emit(tail, self.tiles, extent, self.rank, after, where)
        if walk.visit:
            items = (*self._spell(walk.visit), Item(COMPUTE), *self._frees(walk.visit))
            of = np.repeat(outer, counts)
            i, j = (of, self.inner) if self.by_row else (self.inner, of)
            number = np.arange(len(of))
            for member, reported in enumerate(self.visits):
                at = 1 + member * counts[of] + number - self.ptr[of]
                where = (np.full(len(of), member), i, j, number)
                size = (self.heights[i], self.widths[j])
                self._emit(items, reported, size, self.rank[of], at, where)
        table = np.concatenate(self.parts)
        return table[np.lexsort(table[:, :3].T[::-1])][:, 3:]

    def _spell(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """The items this problem has, under the names it gives them."""
        kept = []
        for item in items:
            if item.op == ALLOC and item.tensor not in self.buffers:
                continue  # no softcap, no gate
            if item.tensor == "dQ_acc" and not self.fused:
                continue
            if item.tensor == "dQ_acc" and self.schedule.problem.dtype == "float32":
                item = item._replace(tensor="dQ")  # the accumulator is dQ itself
            kept.append(item)
        return tuple(kept)

    def _frees(self, items: Sequence[Item]) -> tuple[Item, ...]:
        held = (x for x in self._spell(items) if x.op in (LOAD, ALLOC))
        return tuple(Item(FREE, x.tensor.removesuffix("_acc"), x.slot) for x in held)

    def _emit(self, items, reported, extent, rank, place, where) -> None:
        """Append rows of (rank, place, item, op, tensor, member, i, j, visit, bytes)."""
        for number, item in enumerate(items):
            table = np.zeros((len(rank), 10), np.int64)
            table[:, 0], table[:, 1], table[:, 2] = rank, place, number
            table[:, 3], table[:, 4] = item.op, CODES[item.tensor]
            table[:, 5:9] = np.stack(where, axis=1)
            if item.slot >= 0:
                table[:, 9] = reported[:, item.slot]
            elif item.op != COMPUTE:
                table[:, 9] = self.buffers[item.tensor].nbytes(*extent)
            self.parts.append(table)
