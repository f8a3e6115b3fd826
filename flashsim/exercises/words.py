"""Explain in words why a solution lost points."""

from dataclasses import replace

import numpy as np

from flashsim.counts.questions import OPS, by_operation
from flashsim.exercises.exercise import KINDS, Arrays, Exercise
from flashsim.exercises.marks import Mark
from flashsim.schedule.names import CODES
from flashsim.schedule.tensors import whole_bytes
from flashsim.trace.trace import Trace

#: The explanation if results are right only for inputs whose first keys have the largest scores.
FALLING = (
    "it is right if the first keys have the largest scores, so check the rescaling: when m grows, "
    "multiply the previous sums by exp(m - m_new)"
)
#: The explanation if an input was not loaded completely.
UNREAD = "a part of {} was never loaded"
_DONE = {"load": "was loaded", "store": "was stored", "reduce": "was added to"}


def transfers(trace: Trace) -> dict[tuple[str, str], int]:
    """Return the bytes moved for each (operation, tensor), summed over all stages."""
    found = by_operation(trace.transfers)
    order = lambda key: (OPS.index(key[0]), CODES.get(key[1], len(CODES)), key[1])  # noqa: E731
    return {key: found[key] for key in sorted(found, key=order)}


def excess(trace: Trace, reference: Trace) -> list[str]:
    """Return texts about excess transfers, such as "K was loaded 64 times; 8 times is enough"."""
    mine, theirs, p = transfers(trace), transfers(reference), trace.problem
    over = {key: n - theirs.get(key, 0) for key, n in mine.items() if n > theirs.get(key, 0)}
    said = []
    for op, tensor in sorted(over, key=lambda key: -over[key]):
        moved, need = mine[op, tensor], theirs.get((op, tensor), 0)
        if tensor not in CODES or not need:
            said.append(f"{tensor} {_DONE[op]}, {moved:,} B; {need:,} B is enough")
            continue
        whole = whole_bytes(p, tensor)
        said.append(f"{tensor} {_DONE[op]} {times(moved / whole)}; {times(need / whole)} is enough")
    return said


#: Inputs, and the index of an event (i: row tile, j: key tile) that identifies their tiles.
_BY = {"Q": "i", "dO": "i", "K": "j", "V": "j"}


def unread(trace: Trace) -> list[str]:
    """Return the inputs that a solution loads only in part."""
    loads = trace.events[trace.events["op"] == OPS.index("load")]
    found = []
    for tensor, index in _BY.items():
        mine = loads[loads["tensor"] == CODES[tensor]]
        most: dict[tuple[int, int], dict[int, int]] = {}  # by tile, and by the other tile's index
        other = "j" if index == "i" else "i"
        for event in mine:
            places = most.setdefault((int(event["head"]), int(event[index])), {})
            place = int(event[other])
            places[place] = places.get(place, 0) + int(event["bytes"])
        read = sum(max(places.values()) for places in most.values())
        if 0 < read < whole_bytes(trace.problem, tensor):
            found.append(tensor)
    return found


def times(n: float) -> str:
    """Return how often something happens as text: "once" or "N times"."""
    return "once" if n == 1 else f"{number(n)} times"


def of_number(said: float, right: float, why: str = "") -> str:
    """Return the reply to a wrong answer: `why` it is wrong, or that it is too large or small."""
    why = why or f"it is too {'large' if said > right else 'small'}"
    return f"{said:,} is wrong: {why}"


def number(n: float) -> str:
    """Return a number as text, without decimals if it is a whole number."""
    return f"{n:.0f}" if n == int(n) else f"{n:.2f}".rstrip("0").rstrip(".")


def off(exercise: Exercise, arrays: Arrays, kind: str, name: str, got: np.ndarray) -> str:
    """Return why a result is wrong, or "" if it is right.

    A result is right if its error is at most twice the error of plain float32 attention, plus one
    rounding error.
    """
    p = exercise.task.problem
    exact = exercise.truth(arrays, p, "float64")[name]
    rough = exercise.truth(arrays, p, "float32")[name]
    # A score's rounding error, which is relative to its terms, is a relative error of its exp.
    k = np.repeat(np.abs(arrays["K"]), p.group, axis=1)
    spread = float((np.abs(arrays["Q"]) @ k.mT).max() * p.scale)
    size = exact if exercise.terms is None else exercise.terms(arrays, p)[name]
    # The same holds for the rounding error of L, where L is an input.
    rounding = 2 * np.finfo(np.float32).eps * (1 + spread) * np.abs(size).max()
    allowed = 2 * np.abs(rough - exact).max() + rounding
    wrong = ~(np.abs(got - exact) <= allowed)
    if not wrong.any():
        return ""
    said = f"{name}, {kind} inputs: "
    if not np.isfinite(got).all():
        if kind in KINDS[:1]:
            return (
                f"{said}NaN or infinity: check for a division by 0, and for tiles that are used "
                "before they are written"
            )
        return f"{said}NaN or infinity for large scores: exp overflows unless m is subtracted first"
    for words, variant in exercise.mistakes.items():
        other = variant(arrays, p, "float64")
        if name in other:
            small = 1e-4 * np.abs(other[name]).max()
            if np.allclose(exact, other[name], 1e-4, small):
                continue  # the mistake does not change this output
            if np.allclose(got, other[name], 1e-4, small):
                return f"{said}{words}"
    row = int(np.argwhere(wrong)[0][2])
    worst = float(np.abs(got - exact).max())
    return f"{said}off by up to {worst:.3g}, but {allowed:.2g} is allowed; first in row {row}"


def untouched(text: str, skeleton: str) -> bool:
    """Return whether a solution still has the skeleton's code, apart from comments."""
    return _code(text) == _code(skeleton)


def todo(text: str, skeleton: str) -> str:
    """Return a text about the first line that still has a TODO, or "" if no line has one."""
    left = {line.strip() for line in skeleton.splitlines() if "# TODO" in line}
    lines = enumerate(text.splitlines(), 1)
    return next((f"line {n} still has its TODO" for n, line in lines if line.strip() in left), "")


def with_todo(marks: tuple[Mark, ...], text: str, skeleton: str) -> tuple[Mark, ...]:
    """If the text still has a TODO, mention it in the first wrong mark; return the marks."""
    first = next((at for at, mark in enumerate(marks) if mark.kind), None)
    if first is None or not (left := todo(text, skeleton)):
        return marks
    more = replace(marks[first], words=f"{marks[first].words}; {left}")
    return (*marks[:first], more, *marks[first + 1 :])


def _code(text: str) -> list[str]:
    lines = (line.split("#")[0].rstrip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(("import ", "from "))]
