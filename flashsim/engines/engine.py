"""What `run` hands to an engine and what an engine hands back: the seam between api and engines.

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
        What, how and on what. `tiling` is None where the engine may choose.
    q, k, v : array, (batch, heads, n_q, d), (batch, kv_heads, n_kv, d), (batch, kv_heads, n_kv, dv)
        Of the kind the user gave (NumPy, CuPy, torch), validated against `problem`.
    bias : array (1 or batch, 1 or heads, n_q, n_kv) or None
    trace : bool or str
        False, True (counts) or "timeline".
    options : mapping
        The engine's own options, by the names it lists in ``OPTIONS``.
    deterministic : bool
        Backward, "flash2-fused": add to dQ in a fixed order. Only where the engine's `orders_dq`
        said that it can.
    memo : dict
        Whatever was found out for this job and holds for the same one with other arrays.
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

    def __getstate__(self) -> dict[str, Any]:
        """Without its memo, which is an engine's own: a `Result` pickles what was asked."""
        return {**self.__dict__, "memo": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def arrays(self) -> dict[str, Any]:
        """What was given, by name."""
        arrays = {"q": self.q, "k": self.k, "v": self.v, "bias": self.bias}
        return {name: x for name, x in arrays.items() if x is not None}

    def given(self, q: Any, k: Any, v: Any, **others: Any) -> Job:
        """The same job with other arrays and other fields; its memo is this one's, if not named."""
        made = object.__new__(Job)  # `replace` takes as long as a launch
        made.__dict__.update(self.__dict__, q=q, k=k, v=v, **others)
        return made


class Outcome(NamedTuple):
    """What a pass produced.

    Attributes
    ----------
    arrays : dict
        Forward: "out", "lse"; backward: "dq", "dk", "dv" and, with a bias, "dbias"; 4-D (LSE 3-D).
    tiling : Tiling
        The tiling that ran.
    stages : tuple of StageTrace or None
        The events, if they were asked for.
    kernel : str
        What ran, for people: "simulator", a kernel's name.
    saved : dict
        What the engine's `backward` wants back, besides the job.
    timeline : ndarray of dtype `events.TIMELINE`, or None
        Where and when each part of each visit ran on a GPU, from ``trace="timeline"``.
    gpu : str
        The GPU's name; "" where none ran it.
    problem : Problem or None
        What was traced, where that is not the job's problem: the live keys of a cache.
    finite : set of str
        Arrays that are known to hold no NaN or infinity: the engine looked as it wrote them.
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
        """Those of the arrays that may hold NaN or infinity."""
        return {name: self.arrays[name] for name in names if name not in self.finite}


class Engine(Protocol):
    """The functions of an engine module.

    One may have more: `orders_dq(job, saved)` (see `Job.deterministic`), `fuses(job, saved)`
    (whether the fused backward is the fastest one where dQ may be summed in any order),
    `stores_dq(job, saved)` (whether "flash2-once" is faster than what the job asks for), and
    `adopt(name, array)`, which makes of an array that speaks DLPack only one of a kind that the
    engine knows.
    """

    OPTIONS: frozenset[str]

    def forward(self, job: Job) -> Outcome:
        """Run the forward pass."""

    def recall(self, job: Job, out: Any, lse: Any) -> Mapping[str, Any]:
        """The `Outcome.saved` of a forward pass of which only `out` and `lse` were kept (4-D, 3-D).

        Raises
        ------
        UnsupportedError
            If the algorithm's backward pass needs more than these.
        """

    def backward(self, job: Job, saved: Mapping[str, Any], dout: Any, dlse: Any = None) -> Outcome:
        """Run the backward pass; `job.tiling`, `algorithm` and `trace` are the backward's.

        `dlse`, (batch, heads, n_q) like the LSE, is given where ``job.problem.dlse`` says so.
        """

    def constant(self, job: Job, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        """An array of one value, of the kind and where the job's are, for `engines.nothing`.

        Raises what `forward` raises for a job that the engine does not take.
        """
