"""`Recording`: the data of a trace.

Trace files, timelines and Perfetto export use it; `Trace` adds the questions.
"""

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
    """The description of a user's own algorithm, which has no itinerary and no closed form.

    `tensors` maps names that are not in `TENSORS` to the axis that each is cut along (see
    `schedule.tensors`). Their codes follow those of `TENSORS`, in this order. `compulsory` is the
    bytes that any algorithm for these results must move. `workspace` is the bytes kept in HBM
    besides.
    """

    tensors: Mapping[str, int]
    compulsory: int
    workspace: int = 0


@own_errors
@dataclass(eq=False, repr=False)
class Recording:
    """The record of a run.

    Attributes
    ----------
    problem, device, algorithm, direction, backend
        The problem that ran, and how it ran.
    stages : tuple of StageTrace
        One for each pass, in order.
    provenance : dict
        Versions and how the trace came about.
    timeline : ndarray of dtype `TIMELINE`, or None
        Where and when each part of each visit ran on a GPU, from ``trace="timeline"``.
    own : Own or None
        Describes the algorithm of a pass by `flashsim.simulate`.
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
        """Names of tensors, indexed by the codes in the events."""
        return TENSORS if self.own is None else (*TENSORS, *self.own.tensors)

    @property
    def axes(self) -> Mapping[str, int]:
        """The axis that each tensor is cut along."""
        return AXES if self.own is None else {**AXES, **self.own.tensors}
