"""Check an exercise before students get it: can it be solved, and are mistakes named?"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from flashsim.errors import FlashSimError
from flashsim.exercises import words
from flashsim.exercises.exercise import KINDS, Exercise
from flashsim.exercises.grading import grade
from flashsim.exercises.kernel_exercise import KernelExercise
from flashsim.exercises.kernel_grading import grade_kernels
from flashsim.exercises.marks import Marks
from flashsim.report import Table

#: Times that the reference is graded, each with new inputs.
ROUNDS = 10
#: The same for kernels, each time in a process of its own.
KERNEL_ROUNDS = 3


def check(one: Exercise | KernelExercise) -> Table:
    """A table of what was checked; `right` says whether it is as it should be."""
    table = Table(f"{one.name}: {one.title}", ("checked", "right", "points", "words"))

    def row(what: str, right: bool, points: int | None, said: str) -> None:
        table.rows.append((what, right, points, " ".join(said.split())))

    rounds = KERNEL_ROUNDS if isinstance(one, KernelExercise) else ROUNDS
    points, said = reference(one, rounds)
    row(f"the reference, {rounds} times", not said, points, said)
    if points is None:  # nothing can be compared with it
        return table
    marks = graded(one.skeleton, one)
    row("the skeleton", not marks.points, marks.points, marks.marks[0].words)
    source = one.solution_source
    for find, put, expected in one.wrong:
        if find not in source:
            row(f"wrong: {find!r} -> {put!r}", False, None, "the reference has no such text")
            continue
        marks = graded(source.replace(find, put, 1), one)
        said = "; ".join(mark.words for mark in marks.marks if mark.points < mark.most)
        right = marks.points < marks.most and expected in said
        row(f"wrong: {find!r} -> {put!r}", right, marks.points, "" if right else said)
    if isinstance(one, Exercise):
        for mistake in one.mistakes:
            row(f"mistake: {mistake}", *_told(one, mistake))
    return table


def graded(text: str, one: Exercise | KernelExercise) -> Marks:
    """The marks of a file's text."""
    if not isinstance(one, KernelExercise):
        return grade(text, one)[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "solution.py")
        path.write_text(text, encoding="utf-8")
        return grade_kernels(path, one)[0]


def reference(one: Exercise | KernelExercise, rounds: int = 1) -> tuple[int | None, str]:
    """The fewest points that the reference gets, and the reason why they are not all; "" if none.

    The points are None if it does not run on the exercise's own machine.
    """
    try:
        every = [graded(one.solution_source, one) for _ in range(rounds)]
        if isinstance(one, Exercise):
            one.executed  # noqa: B018 - what others are compared with
    except FlashSimError as error:
        return None, str(error)
    worst = min(every, key=lambda marks: marks.points)
    return worst.points, "; ".join(mark.words for mark in worst.marks if mark.kind)


def _told(one: Exercise, mistake: str) -> tuple[bool, None, str]:
    """Whether a mistake's own result is judged wrong, and for its own reason."""
    seen = []
    for kind in KINDS:
        arrays = one.task.arrays(kind)
        with np.errstate(all="ignore"):
            made = one.mistakes[mistake](arrays, one.task.problem, "float64")
        for name in {*made} & {*one.task.outputs}:
            said = words.off(one, arrays, kind, name, made[name])
            if mistake in said:
                return True, None, ""
            seen.append(said)
    return False, None, next(filter(None, seen), "its result counts as right")
