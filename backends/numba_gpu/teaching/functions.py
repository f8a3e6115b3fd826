"""Generate the teaching kernels' device functions from traced score and mask functions.

All captured arrays are concatenated into two flat device arrays, one of floats and one of integers.
The generated text contains each captured array's offset. Kernels add gradients of captured arrays
to a third flat array, atomically.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int64

from flashsim.engines.protocol import Job
from flashsim.functions.derivative import adjoints
from flashsim.functions.emit_numba import Written
from flashsim.functions.graph import ArraySpec, Graph
from flashsim.functions.operations import FLOAT
from flashsim.functions.tracing import host_values
from flashsim.problem.problem import Problem


class TracedFunctions(NamedTuple):
    """A problem's mask and score function, and the captured arrays that need gradients."""

    mask: Graph | None
    score: Graph | None
    wanted: tuple[str, ...]
    sinks: bool

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All captured arrays: the score function's arrays precede the mask's."""
        return tuple(a for graph in (self.score, self.mask) if graph for a in graph.arrays)

    def places(self) -> list[int]:
        """Return each captured array's offset in the flat array of floats or integers."""
        ends, found = {True: 0, False: 0}, []
        for spec in self.arrays:
            floats = spec.kind == FLOAT
            found.append(ends[floats])
            ends[floats] += math.prod(spec.shape)
        return found


def functions_of(problem: Problem) -> TracedFunctions:
    """Return a problem's traced mask function and score function."""
    return TracedFunctions(
        problem.mask_graph, problem.score_mod, problem.score_grads, problem.sinks
    )


class Compiled(NamedTuple):
    """Device functions that apply the mask and score functions to a single score.

    - ``keep(floats, wholes, b, h, q, k)`` returns whether the mask keeps the score.
    - ``score(floats, wholes, s, b, h, q, k)`` returns the new score.
    - ``slope(floats, wholes, sums, s, ds, b, h, q, k)`` returns the gradient of `s`, and adds
      captured arrays' gradients to `sums`. ``slope_alone`` only returns the gradient of `s`.
    """

    keep: Any
    score: Any
    slope: Any
    slope_alone: Any


@lru_cache(maxsize=64)
def compiled(functions: TracedFunctions) -> Compiled:
    """Compile a mask and a score function's device functions (identities if there are none)."""
    places = functions.places()
    score, mask = functions.score, functions.mask
    at, arguments = "b, h, i, j", "floats, wholes"
    keep = [f"def made({arguments}, {at}):", "    return True"]
    new = [f"def made({arguments}, s, {at}):", "    return s"]
    slopes = [[f"def made({arguments}, sums, s, dout, {at}):", "    return dout"]] * 2
    if mask is not None:
        text = Flat(mask.nodes, mask.arrays, places[len(score.arrays) if score else 0 :])
        keep[1:] = [*text.lines(range(len(mask.nodes))), f"    return {text.name(mask.root)}"]
    if score is not None:
        text = Flat(score.nodes, score.arrays, places)
        new[1:] = [*text.lines(range(len(score.nodes))), f"    return {text.name(score.root)}"]
        slopes = [
            [slopes[0][0], *_derivative(score, wanted, places)] for wanted in (functions.wanted, ())
        ]
    return Compiled(*(_device("\n".join(text)) for text in (keep, new, *slopes)))


def _derivative(score: Graph, wanted: tuple[str, ...], places: list[int]) -> list[str]:
    made = adjoints(score, wanted)
    text = Flat(made.nodes, made.arrays, places)
    lines = text.lines(made.numbers)
    for n, g in made.reads:
        lines.append(f"    cuda.atomic.add(sums, {text.element(made.nodes[n])}, {text.name(g)})")
    return [*lines, f"    return {'F(0)' if made.score is None else text.name(made.score)}"]


class Flat(Written):
    """Writes Python statements in which captured arrays are slices of two flat arrays."""

    def __init__(self, nodes: Any, arrays: Any, places: Iterable[int]) -> None:
        super().__init__(nodes, arrays)
        self.places = [*places]

    def lines(self, numbers: Iterable[int]) -> list[str]:
        """Return the statements of a function's body, one per line."""
        return [f"    {line}" for line in self.statements(numbers)]

    def element(self, node: Any) -> str:
        """Return an expression for the index of `node`'s element in the flat array."""
        return f"{self.places[node.value]} + ({self.offset(node)})"

    def read(self, node: Any) -> str:
        """Return an expression that reads an element of a captured array."""
        which = "floats" if self.arrays[node.value].kind == FLOAT else "wholes"
        return f"{which}[{self.element(node)}]"


def _device(text: str) -> Any:
    """Compile a device function from its source text, with numba-cuda's names for NumPy's types."""
    text = text.replace("np.int64", "I").replace("np.", "math.")
    names = {"I": int64, "F": float32, "math": math, "cuda": cuda}
    exec(compile(text, "<a function for the teaching kernels>", "exec"), names)
    return cuda.jit(device=True, inline="always")(names["made"])


def captured(job: Job, functions: TracedFunctions) -> tuple[np.ndarray, np.ndarray]:
    """Return all floats, and all integers, that the functions read, as flat non-empty arrays."""
    found: dict[bool, list[np.ndarray]] = {True: [], False: []}
    mask = job.problem.mask_mod
    arrays = (*job.score_arrays, *(() if mask is None else mask.arrays))
    for array, spec in zip(arrays, functions.arrays, strict=True):
        floats = spec.kind == FLOAT
        values = host_values(array, spec, copy=False)
        found[floats].append(values.astype(np.float32 if floats else np.int64).ravel())
    return tuple(
        np.concatenate([*found[floats], np.zeros(1, dtype)])
        for floats, dtype in ((True, np.float32), (False, np.int64))
    )


def gradients(functions: TracedFunctions, sums: np.ndarray) -> dict[str, np.ndarray]:
    """Return the gradients of captured arrays as slices of `sums`, which the kernels filled."""
    pairs = zip(functions.arrays, functions.places(), strict=True)
    return {
        f"d:{spec.name}": sums[at : at + math.prod(spec.shape)].reshape(spec.shape)
        for spec, at in pairs
        if spec.name in functions.wanted
    }
