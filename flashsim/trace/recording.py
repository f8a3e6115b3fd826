"""`Recording`: the data of a trace, without the query methods that `Trace` adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flashsim.errors import own_errors
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.names import TENSORS
from flashsim.schedule.tensors import AXES
from flashsim.trace.events import StageTrace, Structured


class Own(NamedTuple):
    """The description of a user's own algorithm, which has no dataflow table and no closed form.

    `tensors` maps the name of each tensor that is not in `TENSORS` to the axis along which it is
    divided into tiles (see `schedule.tensors`). In events, the codes of the additional tensors
    follow the codes of `TENSORS`, in the order of the mapping `tensors`. `compulsory` is the number
    of bytes that any algorithm with the same results must move. `workspace` is the number of bytes
    that the algorithm keeps in HBM besides inputs and results.
    """

    tensors: Mapping[str, int]
    compulsory: int
    workspace: int = 0


@own_errors
@dataclass(eq=False, repr=False)
class Recording:
    """The recorded data of a run; the class `Trace` adds methods that query the data.

    `stages` are in order of execution. `provenance` has the versions of flashsim and its libraries,
    and how the trace was recorded. `timeline`, of dtype `TIMELINE`, has the SM and the time of each
    phase of each visit on a GPU, from ``trace="timeline"``. `own` describes a user's own algorithm,
    if `flashsim.simulate` ran one.
    """

    problem: Problem
    device: Device
    algorithm: str
    direction: str
    backend: str
    stages: Sequence[StageTrace]
    provenance: Mapping[str, str] = field(default_factory=dict)
    timeline: Structured | None = None
    own: Own | None = None

    def __post_init__(self) -> None:
        self.stages = tuple(self.stages)
        self.provenance = dict(self.provenance)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors, indexed by the tensor codes in events."""
        return TENSORS if self.own is None else (*TENSORS, *self.own.tensors)

    @property
    def axes(self) -> Mapping[str, int]:
        """The axis along which each tensor is divided into tiles."""
        return AXES if self.own is None else {**AXES, **self.own.tensors}
