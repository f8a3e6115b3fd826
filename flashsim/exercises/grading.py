"""Judge a student's source: results, on-chip memory, bytes."""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import CodeType
from typing import Any

import numpy as np

from flashsim.errors import SramOverflow, own_errors, shown
from flashsim.exercises import words
from flashsim.exercises.exercise import KINDS, Exercise
from flashsim.exercises.marks import Mark, Marks
from flashsim.exercises.source import Refused, checked
from flashsim.problem.hardware import Device
from flashsim.trace.trace import Trace

#: Points of the three things that are judged.
RESULTS, ROOM, BYTES = 40, 20, 40
#: A machine on which room is no question: results are judged apart from it.
_ROOMY = Device(name="a machine with room", sram_bytes=1 << 40, sram_per_sm=1 << 40)


@own_errors
def grade(
    given: str | Callable[..., None] | Mapping[str, int],
    exercise: Exercise,
    file: str = "solution.py",
) -> tuple[Marks, Trace | None]:
    """Judge a solution in this process; returns its marks and the trace of its transfers.

    Parameters
    ----------
    given : str, function of the machine, or mapping
        A file's text; or, in a notebook, the function itself or the answers by question.
    exercise : Exercise
    file : str
        The text's name in error messages. Judge a file from someone else in a process of its own:
        `apart.grade_file`.
    """
    began = time.perf_counter()
    trace: Trace | None = None
    figures: dict[str, int] = {}
    try:
        if isinstance(given, str):
            scope = _executed(given, file)
        else:
            scope = {"solution": given, "ANSWERS": given}
        if exercise.questions:
            marks = _answers(exercise, scope.get("ANSWERS"))
        else:
            solution = scope.get("solution")
            if not callable(solution):
                raise Refused("function", "the file defines no function solution(machine)")
            marks, figures, trace = _judged(exercise, solution)
    except Refused as error:
        marks = nothing(error.kind, str(error))
    moved = _moved(trace, exercise) if trace is not None else ()
    return Marks(exercise.name, marks, figures, moved, time.perf_counter() - began), trace


def nothing(kind: str, text: str) -> tuple[Mark, ...]:
    """Marks without points, for a file that could not be judged."""
    return (Mark("the file", 0, 100, kind, text),)


def _executed(text: str, file: str) -> dict[str, Any]:
    """The names that the file defines."""
    code: CodeType = compile(checked(text, file), file, "exec")
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    scope: dict[str, Any] = {"__name__": "solution"}
    try:
        exec(code, scope)
    except (Exception, SystemExit) as error:
        said = f"the file ends with {words.of_error(error)}"
        raise Refused(words.kind_of(error), said) from None
    return scope


def _judged(
    exercise: Exercise, solution: Callable[..., None]
) -> tuple[tuple[Mark, ...], dict[str, int], Trace | None]:
    task, marks, seen = exercise.task, list[Mark](), list[str]()
    trace: Trace | None = None
    each = RESULTS // len(KINDS)
    for kind in KINDS:
        arrays = task.arrays(kind)
        found, why = "", ""
        try:
            result = task.run(solution, arrays, _ROOMY)
        except (Exception, SystemExit) as error:
            found, why = words.kind_of(error), words.of_error(error)
        else:
            if kind == "normal":
                trace = result.trace
                trace.device = task.device  # the one that it is judged by
            for name in task.outputs:
                why = words.off(exercise, arrays, kind, name, result.tensors[name])
                if why:
                    found = "result"
                    break
        if not why:
            seen.append(kind)
        marks.append(Mark(f"results, {kind}", 0 if why else each, each, found, why))
        if why and trace is None:  # it never ran to its end: the others would say the same
            break
    if trace is None:
        first = marks[0]
        return (Mark("runs", 0, 100, first.kind, first.words),), {}, None
    right = len(seen) == len(KINDS)
    why = words.UNREAD.format(" and ".join(unread)) if (unread := words.unread(trace)) else ""
    if not why and "falling" in seen and "rising" not in seen:
        why = words.FALLING
    if why and not right:
        at = next(n for n, mark in enumerate(marks) if mark.kind)
        marks[at] = replace(marks[at], words=f"{marks[at].words}; {why}")
    marks += [_room(exercise, solution, trace), _bytes(exercise, trace, right=right)]
    figures = {
        "bytes": trace.bytes(),
        "budget": exercise.full_marks_bytes,
        "peak": trace.peak_sram(),
        "sram": task.sram_bytes,
    }
    if exercise.bound is not None:
        figures["bound"] = exercise.bound(task)
    return tuple(marks), figures, trace


def _room(exercise: Exercise, solution: Callable[..., None], trace: Trace) -> Mark:
    task = exercise.task
    if trace.peak_sram() <= task.sram_bytes:
        return Mark("room on chip", ROOM, ROOM)
    try:
        task.run(solution, task.arrays())
    except SramOverflow as error:
        return Mark("room on chip", 0, ROOM, "overflow", str(error))
    raise AssertionError("a peak beyond the capacity is an overflow")


def _bytes(exercise: Exercise, trace: Trace, *, right: bool) -> Mark:
    name = "bytes"
    if not right:
        return Mark(name, 0, BYTES, "result", "bytes count when the results are right")
    budget, moved = exercise.full_marks_bytes, trace.bytes()
    reference = exercise.executed.trace
    more = words.excess(trace, reference)
    if moved > budget:
        said = f"{moved:,} B moved, {budget:,} B get full marks:\n" + "\n".join(more)
        return Mark(name, min(BYTES * budget // moved, BYTES - 1), BYTES, "bytes", said)
    mine, theirs = words.transfers(trace), words.transfers(reference)
    over = [key for key in exercise.at_most if mine.get(key, 0) > theirs.get(key, 0)]
    if over:
        tensors = {tensor for _, tensor in over}
        said = "\n".join(line for line in more if line.split()[0] in tensors)
        return Mark(name, BYTES // 2, BYTES, "order", said)
    asked = exercise.demand(trace) if exercise.demand else ""
    if asked:
        return Mark(name, BYTES // 2, BYTES, "demand", asked)
    fewer = f"{budget - moved:,} B fewer than full marks ask for" if moved < budget else ""
    return Mark(name, BYTES, BYTES, words=fewer)


def _moved(trace: Trace, exercise: Exercise) -> tuple[tuple[str, str, int, int], ...]:
    mine, theirs = words.transfers(trace), words.transfers(exercise.executed.trace)
    keys = list(dict.fromkeys([*theirs, *mine]))
    return tuple((op, t, mine.get((op, t), 0), theirs.get((op, t), 0)) for op, t in keys)


def _answers(exercise: Exercise, given: Any) -> tuple[Mark, ...]:
    if not isinstance(given, Mapping):
        raise Refused("function", "the file defines no dict ANSWERS: {question: number}")
    trace, n = exercise.executed.trace, len(exercise.questions)
    marks = []
    for at, question in enumerate(exercise.questions):
        most = 100 // n + (at < 100 % n)
        value, right = given.get(question.ask), question.answer(trace)
        if not isinstance(value, (int, np.integer)):
            said = f"{shown(value)} is no integer"
        elif value == right:
            marks.append(Mark(question.ask, most, most))
            continue
        else:
            said = words.of_number(int(value), right, question.slips(trace).get(int(value), ""))
        marks.append(Mark(question.ask, 0, most, "answer", said))
    return tuple(marks)
