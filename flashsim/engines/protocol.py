"""The interface between api and engines: the `Job` that `run` passes in, the `Outcome` it gets.

An engine is a module with ``OPTIONS``, `forward`, `recall` and `backward`, of the types below.
Engines never import the api or each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.schedule import KeyOrder
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import StageTrace


@dataclass(frozen=True)
class Job:
    """One forward pass to run.

    Attributes
    ----------
    problem, tiling, device, algorithm, key_order
        What to compute and how. `tiling` is None if the engine may choose it.
    q, k, v : array, (batch, heads, n_q, d), (batch, kv_heads, n_kv, d), (batch, kv_heads, n_kv, dv)
        Arrays of the user's library (NumPy, CuPy, torch), validated against `problem`.
    bias : array (1 or batch, 1 or heads, n_q, n_kv) or None
    sinks : array (heads,), in the accumulator's type, or None
    score_arrays, mask_arrays : tuple of array
        The captured arrays of `problem.score_mod` and `problem.mask_mod`, in their graphs' order.
    trace : bool or str
        False, True (counts) or "timeline".
    options : mapping
        The engine's own options, by the names it lists in ``OPTIONS``.
    deterministic : bool
        Backward, "flash2-fused": add to dQ in a fixed order. True only if the engine's `orders_dq`
        said that it can.
    memo : dict
        Cached facts about this job that also hold for the same job with other arrays.
    """

    problem: Problem
    q: Any
    k: Any
    v: Any
    bias: Any = None
    tiling: Tiling | None = None
    device: Device = field(default_factory=lambda: Device.get("H100"))
    algorithm: str = "flash2"
    key_order: KeyOrder = "ascending"
    trace: bool | str = False
    options: Mapping[str, Any] = field(default_factory=dict)
    deterministic: bool = False
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    sinks: Any = None
    score_arrays: tuple[Any, ...] = ()
    mask_arrays: tuple[Any, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the engine's memo; a pickled `Result` holds only the request."""
        return {**self.__dict__, "memo": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def arrays(self) -> dict[str, Any]:
        """The user's arrays, by name."""
        arrays = {"q": self.q, "k": self.k, "v": self.v, "bias": self.bias}
        return {name: x for name, x in arrays.items() if x is not None}

    def given(self, q: Any, k: Any, v: Any, **others: Any) -> Job:
        """The job with other arrays and fields; it shares the memo unless `others` names one."""
        job = object.__new__(Job)  # `replace` takes as long as a launch
        job.__dict__.update(self.__dict__, q=q, k=k, v=v, **others)
        return job


class Outcome(NamedTuple):
    """The results of a pass.

    Attributes
    ----------
    arrays : dict
        Forward: "out", "lse"; backward: "dq", "dk", "dv" and, with a bias, "dbias"; 4-D (LSE 3-D).
        With sinks "dsinks", (heads,), and for each captured array of `problem.score_grads`
        "d:<name>", of its shape; both in the accumulator's type.
    tiling : Tiling
        The tiling that ran.
    stages : tuple of StageTrace or None
        The events, if they were requested.
    kernel : str
        A readable name of what ran: "simulator" or a kernel's name.
    saved : dict
        What the engine's `backward` needs besides the job.
    timeline : ndarray of dtype `events.TIMELINE`, or None
        Where and when each part of each visit (tile pair) ran on a GPU, from ``trace="timeline"``.
    gpu : str
        The GPU's name; "" if no GPU ran the pass.
    problem : Problem or None
        The traced problem if it differs from the job's: the live keys of a cache.
    finite : set of str
        Arrays that are known to hold no NaN or infinity: the engine checked as it wrote them.
    """

    arrays: dict[str, Any]
    tiling: Tiling
    stages: tuple[StageTrace, ...] | None
    kernel: str
    saved: Mapping[str, Any] = MappingProxyType({})
    timeline: Any = None
    gpu: str = ""
    problem: Problem | None = None
    finite: Set[str] = frozenset()

    def unseen(self, *names: str) -> dict[str, Any]:
        """Return those of the named arrays that may hold NaN or infinity."""
        return {name: self.arrays[name] for name in names if name not in self.finite}


class Engine(Protocol):
    """The functions of an engine module.

    An engine may have more functions. `orders_dq(job, saved)`: see `Job.deterministic`.
    `fuses(job, saved)`: whether the fused backward is the fastest if dQ may be summed in any order.
    `stores_dq(job, saved)`: whether "flash2-once" is faster than the job's algorithm.
    `adopt(name, array)` converts an array that supports only DLPack to a kind that the engine
    knows.
    """

    OPTIONS: frozenset[str]

    def forward(self, job: Job) -> Outcome:
        """Run the forward pass."""

    def recall(self, job: Job, out: Any, lse: Any) -> Mapping[str, Any]:
        """Return `Outcome.saved` of a forward pass when only `out` (4-D) and `lse` (3-D) were kept.

        Raises
        ------
        UnsupportedError
            If the algorithm's backward pass needs more than these.
        """

    def backward(self, job: Job, saved: Mapping[str, Any], dout: Any, dlse: Any = None) -> Outcome:
        """Run the backward pass; `job.tiling`, `algorithm` and `trace` are the backward's.

        `dlse`, (batch, heads, n_q) like the LSE, is given if ``job.problem.dlse`` is true.
        """

    def constant(self, job: Job, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        """Return a constant array of the same kind and device as the job's, for `engines.nothing`.

        Raises the same errors as `forward` for a job that the engine does not support.
        """
