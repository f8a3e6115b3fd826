"""`Frame`: a walk after one of its visits, for drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flashsim import report
from flashsim.counts.work import KINDS, StageWork, total_flops
from flashsim.schedule.names import COMPUTE, OPS, TENSORS, TRANSFERS
from flashsim.trace.events import StageTrace, buffer_of, gain


class Frame(NamedTuple):
    """The state of a walk right after visit `step`, for drawing. Tile grids are (T_r, T_c)."""

    step: int
    stage: str
    i: int
    j: int
    head: int
    order: np.ndarray  # visit number of each tile seen so far in this stage; NaN elsewhere
    hbm_bytes: int  # moved by this head's walk up to and including this visit, all stages
    moved: dict[str, int]  # the same by "op tensor", e.g. {"load K": ...}
    on_chip: dict[str, int]  # what SRAM holds during the visit: bytes by buffer
    flops: int

    def __repr__(self) -> str:
        return report.short(self)

    def _repr_html_(self) -> str:
        return report.card(self)


def frame(
    stages: Sequence[StageTrace],
    works: Sequence[StageWork],
    step: int,
    number: int,
    position: int,
    head: int,
    tensors: Sequence[str] = TENSORS,
) -> Frame:
    """The state after visit `step`, whose compute event is at `position` in stage `number`.

    `works` is what a visit of each stage computes, `tensors` are names by code.
    """
    stage = stages[number]
    events = stage.events[: position + 1]
    seen = events[(events["op"] == COMPUTE) & (events["visit"] >= 0)]
    order = np.full((stage.schedule.t_r, stage.schedule.t_c), np.nan)
    order[seen["i"], seen["j"]] = np.arange(len(seen))
    moved: dict[str, int] = {}
    flops = 0
    for at, part in enumerate(stages[: number + 1]):
        e = part.events if at < number else events
        for op in TRANSFERS:
            for code in np.unique(e["tensor"][e["op"] == op]):
                key = f"{OPS[op]} {tensors[code]}"
                chosen = (e["op"] == op) & (e["tensor"] == code)
                moved[key] = moved.get(key, 0) + int(e["bytes"][chosen].sum())
        done = e[(e["op"] == COMPUTE) & (e["visit"] >= 0)]
        flops += sum(total_flops(works[at].visit, *part.extent(done)).values())
        if part.costs is not None:
            visits = e["visit"][e["op"] == COMPUTE] >= 0
            flops += int(part.costs[: len(visits), : len(KINDS)][visits].sum())
    change, owner = gain(events), buffer_of(events["tensor"])
    on_chip = {
        tensors[code]: int(change[owner == code].sum()) for code in np.unique(owner[change != 0])
    }
    last = events[position]
    return Frame(
        step=step,
        stage=stage.name,
        i=int(last["i"]),
        j=int(last["j"]),
        head=head + int(last["head"]),
        order=order,
        hbm_bytes=sum(moved.values()),
        moved=moved,
        on_chip={name: size for name, size in on_chip.items() if size},
        flops=flops,
    )
