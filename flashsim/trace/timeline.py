"""Finds the thread block and the drawing row of each span in a GPU timeline.

Several thread blocks may share an SM. Within a block, visits overlap if a kernel starts the next
tile's scores during the softmax of the current tile. Two spans on the same row are nested or
disjoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashsim.errors import TraceError
from flashsim.trace.events import ROLES, Structured
from flashsim.trace.recording import Recording


@dataclass(frozen=True, eq=False)
class Rows:
    """The thread block and the drawing row of each span of a timeline.

    `block`, (n,), numbers the spans' thread blocks in order of start. `slot`, (n,), differs for
    blocks that are on the same SM at the same time. `row`, (n,), is the span's row on the SM; spans
    of one visit by one role share a row. `names` has the name of each row, which is the same on
    every SM. A name consists of the row's block and role. A row of visits that overlap the previous
    row's visits has "next" in the name.
    """

    block: np.ndarray
    slot: np.ndarray
    row: np.ndarray
    names: tuple[str, ...]


def rows(trace: Recording, spans: Structured) -> Rows:
    """Return a drawing row for each span in `spans`, the complete or a partial timeline of `trace`.

    Raises
    ------
    TraceError
        If `spans` is empty.
    """
    if not len(spans):
        raise TraceError(
            "the timeline is empty, because the kernel computed no tile pair; record a problem "
            "with unmasked scores"
        )
    stride = np.array([stage.stride for stage in trace.stages])
    keys_outside = np.array([stage.stage.outer == "keys" for stage in trace.stages])
    stage = spans["stage"].astype(np.int64)
    outer = np.where(keys_outside[stage], spans["j"], spans["i"])
    block = numbers(stage, spans["sm"], spans["head"] // stride[stage], outer)
    starts, _ = _extents(spans, block)
    by_start = np.argsort(starts, kind="stable")
    rank = np.empty_like(by_start)
    rank[by_start] = np.arange(len(by_start))
    block = rank[block]
    # A persistent kernel's producer begins the next work tile while its consumers finish this one.
    # So two blocks count as being on an SM at the same time only if spans of one role overlap.
    part = numbers(block, spans["role"])
    _, first = np.unique(part, return_index=True)
    sm_and_role = numbers(spans["sm"], spans["role"])[first]
    slots = _greedy(sm_and_role, *_extents(spans, part))
    slot = slots[part]

    # Within a block's slot and a role, a visit is drawn on the first row that is free.
    visit = numbers(part, spans["head"], spans["visit"])
    _, first = np.unique(visit, return_index=True)
    owner = numbers(sm_and_role[part], slot)[first]
    layer = _greedy(owner, *_extents(spans, visit))[visit]

    roles = np.unique(spans["role"])
    depth = [int(layer[spans["role"] == role].max()) + 1 for role in roles]
    begin = np.concatenate([[0], np.cumsum(depth)])
    offset = np.zeros(len(ROLES), np.int64)
    offset[roles] = begin[:-1]
    row = slot * begin[-1] + offset[spans["role"]] + layer
    blocks = [""] if not slots.any() else [f"block {n}" for n in range(int(slots.max()) + 1)]
    names = tuple(
        _name(block_name, ROLES[role], n)
        for block_name in blocks
        for role, deep in zip(roles, depth, strict=True)
        for n in range(deep)
    )
    return Rows(block, slot, row, names)


def _name(block_name: str, role: str, layer: int) -> str:
    words = [block_name, "" if role == "block" else role, "next" if layer else ""]
    return ", ".join(word for word in words if word) or "visits"


def numbers(*columns: np.ndarray) -> np.ndarray:
    """Return one number per row of the stacked columns; equal rows get equal numbers."""
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(order), bool)
    for column in columns:
        new[1:] |= np.diff(column[order]) != 0
    found = np.empty(len(order), np.int64)
    found[order] = np.cumsum(new)
    return found


def _extents(spans: Structured, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays in ns: each owner's first start of a span, and each owner's last end."""
    n = int(owner.max()) + 1
    start, end = np.full(n, np.iinfo(np.int64).max), np.full(n, np.iinfo(np.int64).min)
    np.minimum.at(start, owner, spans["start_ns"])
    np.maximum.at(end, owner, spans["end_ns"])
    return start, end


def _greedy(owner: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return a layer per interval, so that intervals of one owner and layer do not overlap."""
    layer = np.zeros(len(start), np.int64)
    taken: dict[int, list[int]] = {}  # the time at which each layer of an owner becomes free
    for at in np.lexsort((end, start)).tolist():
        free = taken.setdefault(int(owner[at]), [])
        fits = next((n for n, stop in enumerate(free) if stop <= start[at]), len(free))
        layer[at] = fits
        free[fits : fits + 1] = [int(end[at])]
    return layer
