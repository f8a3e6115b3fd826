"""The interface between `flashsim.api` and engines, which turn a `Job` into an `Outcome`.

An engine is a module with ``OPTIONS``, `forward`, `recall`, `backward` and `constant`, typed as in
the class `Engine`. Engines never import `flashsim.api` or each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.schedule import KeyOrder
from flashsim.schedule.split import WHOLE, Split
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import StageTrace


@dataclass(frozen=True)
class Job:
    """A request to run one forward pass, as an engine receives it.

    Attributes
    ----------
    problem, tiling, device, algorithm, key_order
        The problem, and how to compute it. `tiling` is None if the engine may choose it.
    q, k, v : array, (batch, heads, n_q, d), (batch, kv_heads, n_kv, d), (batch, kv_heads, n_kv, dv)
        Arrays of the user's library (NumPy, CuPy, torch), validated against `problem`.
    bias : array (1 or batch, 1 or heads, n_q, n_kv) or None
    sinks : array (heads,), in the accumulator's type, or None
    score_arrays, mask_arrays : tuple of array
        The captured arrays of `problem.score_mod` and `problem.mask_mod`, in their graphs' order.
    trace : bool or "timeline"
    options : mapping
        The engine's own options, whose names are in ``OPTIONS``.
    deterministic : bool
        Whether the backward pass of "flash2-fused" adds to dQ in a fixed order. True only if the
        engine's `fastest_backward` says so.
    memo : dict
        Cached values that depend on the job, but not on the content of its arrays.
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
        """Return the fields without the memo, so that a pickled `Result` holds only the request."""
        return {**self.__dict__, "memo": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def arrays(self) -> dict[str, Any]:
        """Return the user's arrays by name: q, k, v and, if there is one, bias."""
        arrays = {"q": self.q, "k": self.k, "v": self.v, "bias": self.bias}
        return {name: x for name, x in arrays.items() if x is not None}

    @property
    def inputs(self) -> dict[str, Any]:
        """Return `arrays` and, if there are any, the sinks."""
        return self.arrays if self.sinks is None else {**self.arrays, "sinks": self.sinks}

    def given(self, q: Any, k: Any, v: Any, **others: Any) -> Job:
        """Return a copy of this job with other arrays and fields; the memo is kept by default."""
        job = object.__new__(Job)  # `dataclasses.replace` takes as long as a kernel launch
        job.__dict__.update(self.__dict__, q=q, k=k, v=v, **others)
        return job


class Outcome(NamedTuple):
    """The results of a pass.

    Attributes
    ----------
    arrays : dict
        Forward: "out" and "lse". Backward: "dq", "dk", "dv" and, with a bias, "dbias". They have 4
        axes, except for the LSE, which has 3. With sinks there is also "dsinks", (heads,), and for
        each captured array of `problem.score_grads` "d:<name>", with the array's shape. Both have
        the accumulator type.
    tiling : Tiling
        The tiling that the engine used.
    stages : tuple of StageTrace or None
        The events, if a trace was requested.
    kernel : str
        A readable name of the implementation: "simulator" or a kernel's name.
    saved : dict
        The values that the engine's `backward` needs besides the job.
    timeline : ndarray of dtype `events.TIMELINE`, or None
        The SM and the time of each phase of each visit (tile pair), from ``trace="timeline"``.
    gpu : str
        The name of the GPU that ran the pass, or "" if no GPU did.
    problem : Problem or None
        The traced problem if it differs from the job's problem, such as the live keys of a cache.
    finite : set of str
        Arrays without NaN or infinity: the engine checked them as it wrote them.
    split : Split
        Whether query heads shared row tiles, and in how many parts the keys were processed.
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
    split: Split = WHOLE

    def unseen(self, *names: str) -> dict[str, Any]:
        """Return those of the named arrays that may hold NaN or infinity."""
        return {name: self.arrays[name] for name in names if name not in self.finite}


#: A function of q, k and v that have the shapes and types of an earlier job's arrays. It returns
#: out, the LSE and `Outcome.saved`, or None if the engine has to check these arrays.
Repeat = Callable[[Any, Any, Any], tuple[Any, Any, Mapping[str, Any]] | None]


class Engine(Protocol):
    """The functions that every engine module has.

    Three more functions are optional. `fastest_backward(job, saved, algorithm, deterministic)`
    returns the algorithm of the fastest backward pass after a forward pass of `algorithm`, and
    whether it adds to dQ in a fixed order (`Job.deterministic`). `adopt(name, array)` converts an
    array that supports only DLPack to a type that the engine accepts. `repeat(job)` returns a
    function that repeats a forward pass without checks (see `Repeat`), or None if the job needs
    them.
    """

    OPTIONS: frozenset[str]

    def forward(self, job: Job) -> Outcome:
        """Run the forward pass of `job`."""

    def recall(self, job: Job, out: Any, lse: Any) -> Mapping[str, Any]:
        """Return `Outcome.saved` of a forward pass, from the results `out` (4-D) and `lse` (3-D).

        `UnsupportedError` is raised if the algorithm's backward pass needs more saved tensors than
        these.
        """

    def backward(self, job: Job, saved: Mapping[str, Any], dout: Any, dlse: Any = None) -> Outcome:
        """Run the backward pass, with the tiling, algorithm and trace setting of `job`.

        If ``job.problem.dlse`` is true, `dlse` is an array (batch, heads, n_q), the LSE's gradient.
        """

    def constant(self, job: Job, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        """Return an array of `value` in the job's library; raise the same errors as `forward`."""
