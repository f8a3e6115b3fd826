"""`Recording`: the data of a trace. Files, timelines and Perfetto take it; `Trace` asks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flashsim.errors import own_errors
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.names import TENSORS
from flashsim.schedule.tensors import AXES
from flashsim.trace.events import StageTrace


class Own(NamedTuple):
    """What is known of an algorithm of one's own, of which no itinerary and no closed form exists.

    `tensors` are names that are not in `TENSORS`, in the order of their codes, which follow, with
    what each is cut along (see `schedule.tensors`); `compulsory` is what no algorithm for these
    results can do without, and `workspace` what it keeps in HBM besides, in bytes.
    """

    tensors: Mapping[str, int]
    compulsory: int
    workspace: int = 0


@own_errors
@dataclass(eq=False, repr=False)
class Recording:
    """What was recorded of a run.

    Attributes
    ----------
    problem, device, algorithm, direction, backend
        What ran.
    stages : tuple of StageTrace
        One for each pass, in order.
    provenance : dict
        Versions and how the trace came about.
    timeline : ndarray of dtype `TIMELINE`, or None
        Where and when each part of each visit ran on a GPU, from ``trace="timeline"``.
    own : Own or None
        Of a pass by `flashsim.simulate`.
    """

    problem: Problem
    device: Device
    algorithm: str
    direction: str
    backend: str
    stages: Sequence[StageTrace]
    provenance: Mapping[str, str] = field(default_factory=dict)
    timeline: np.ndarray | None = None
    own: Own | None = None

    def __post_init__(self) -> None:
        self.stages = tuple(self.stages)
        self.provenance = dict(self.provenance)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of tensors by the codes that events have."""
        return TENSORS if self.own is None else (*TENSORS, *self.own.tensors)

    @property
    def axes(self) -> Mapping[str, int]:
        """What each tensor is cut along."""
        return AXES if self.own is None else {**AXES, **self.own.tensors}
