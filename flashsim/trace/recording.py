"""`Recording`: the data of a trace. Files, timelines and Perfetto take it; `Trace` asks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.trace.events import StageTrace


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
    """

    problem: Problem
    device: Device
    algorithm: str
    direction: str
    backend: str
    stages: Sequence[StageTrace]
    provenance: Mapping[str, str] = field(default_factory=dict)
    timeline: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.stages = tuple(self.stages)
        self.provenance = dict(self.provenance)
