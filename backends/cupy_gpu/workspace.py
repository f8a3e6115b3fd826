"""Memory of decode calls: results, partial results, and counters of arrived splits."""

from typing import Any

import cupy

from flashsim.backends.cupy_gpu import arrays
from flashsim.backends.cupy_gpu.launching import PER_THREAD, aside, capture_of, shares_nothing
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch_policy import decode_plan
from flashsim.problem.problem import Problem


class Workspace:
    """Memory that decode calls reuse, passed to each call as ``workspace=``.

    A workspace holds the splits' partial results, their arrival counters, and the results `out` and
    `lse`. Each call overwrites the results of the previous call. When a call needs a larger array
    than the workspace has, the array is reallocated. A call that needs no larger arrays allocates
    nothing, so a CUDA graph can capture the call. Two calls that may run at the same time, on two
    streams, need two workspaces.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[Any, Any]] = {}

    def results(self, space: arrays.Space, problem: Problem, like: Any) -> tuple[Any, Any]:
        """Return uninitialised arrays for `out` (with padded rows) and for `lse`."""
        p, width = problem, launch.row_elements(problem.head_dim_v)
        shape = (p.batch, p.heads, p.n_q)
        key, held = (space, p.dtype, shape, width), self._held.get("results")
        if held is None or held[0] != key:
            made = space.empty((*shape, width), like), space.empty(shape)
            self._held["results"] = held = key, made
        return held[1]

    def partial(
        self, space: arrays.Space, made: decode_plan.Decode
    ) -> tuple[tuple[int, int, int], Any]:
        """Return three addresses, and the arrays that own them.

        The addresses are those of the partial O, the partial LSE and the arrival counters.
        """
        outputs, sums = made.partial_elements
        if not outputs:
            return NO_PARTS
        parts, counters, arrived = self._room("parts", space, outputs + sums), None, 0
        if not made.merge:
            counters = self._room("counters", space, made.counters)
            arrived = counters.data.ptr
        at = parts.data.ptr
        return (at, at + 4 * outputs, arrived), (parts, counters)

    def _room(self, name: str, space: arrays.Space, n: int) -> Any:
        held = self._held.get(name)
        if held is None or held[0][0] is not space or held[0][1] < n:
            with space.active():
                array = space.zeros((n,), "uint32")
            self._held[name] = held = (space, n), array
        return held[1]


NO_PARTS = (0, 0, 0), None  # nothing is split, or clusters merge the splits
#: Workspaces of calls that pass none, one per stream; results are new arrays at each call.
WORKSPACES: dict[tuple[int, int], Workspace] = {}


def parts_of(
    space: arrays.Space, made: decode_plan.Decode, given: Workspace | None, stream: int
) -> tuple[tuple[int, int, int], Any]:
    """Return the addresses that `Workspace.partial` returns, and the owner of that memory.

    While a CUDA graph is captured, a call without a workspace allocates from the graph's private
    memory. A captured graph may later run in any stream, at the same time as other work. The
    arrival counters of a captured graph are never freed.
    """
    if given is not None:
        return given.partial(space, made)
    outputs, sums = made.partial_elements
    if not outputs:
        return NO_PARTS
    if shares_nothing(stream):
        parts, counters, arrived = space.empty((outputs + sums,)), None, 0
        at = space.pointer(parts)
        if not made.merge and stream == PER_THREAD:
            counters = space.counters((made.counters,))
            arrived = space.pointer(counters)
        elif not made.merge:
            arrived = captured_counters(space, made.counters, stream)
        return (at, at + 4 * outputs, arrived), (parts, counters)
    own = WORKSPACES.get((space.device, stream))
    if own is None:
        own = WORKSPACES.setdefault((space.device, stream), Workspace())
    return own.partial(space, made)


#: Counters of captured calls, by device, capture and stream. A graph may be replayed at any time,
#: so they are never freed: a few KiB per capture.
CAPTURED: dict[tuple[int, int, int], list[cupy.ndarray]] = {}


def captured_counters(space: arrays.Space, n: int, stream: int) -> int:
    """Return the address of `n` counters for a captured graph; each launch resets them to 0."""
    held = CAPTURED.setdefault((space.device, capture_of(stream), stream), [])
    if not held or held[-1].size < n:
        with aside():
            held.append(cupy.zeros(max(n, 1024), "uint32"))
    return held[-1].data.ptr
