"""Check that an exercise's reference gets every point and that wrong solutions are explained."""

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

#: How often the reference is graded, each time with new inputs.
ROUNDS = 10
#: How often a reference for kernels is graded, each time in a new process.
KERNEL_ROUNDS = 3


def check(one: Exercise | KernelExercise) -> Table:
    """Return a table with one row per check of an exercise; `right` says whether it passed."""
    table = Table(f"{one.name}: {one.title}", ("checked", "right", "points", "words"))

    def row(what: str, right: bool, points: int | None, said: str) -> None:
        table.add(what, right, points, " ".join(said.split()))

    rounds = KERNEL_ROUNDS if isinstance(one, KernelExercise) else ROUNDS
    points, said = reference(one, rounds)
    row(f"the reference, {rounds} times", not said, points, said)
    if points is None:  # without a reference that runs, nothing else can be checked
        return table
    marks = graded(one.skeleton, one)
    row("the skeleton", not marks.points, marks.points, marks.marks[0].words)
    source = one.solution_source
    for find, put, expected in one.wrong:
        if find not in source:
            said = f"the reference does not contain {find!r}"
            row(f"wrong: {find!r} -> {put!r}", False, None, said)
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
    """Grade a solution with this text, and return the marks."""
    if not isinstance(one, KernelExercise):
        return grade(text, one)[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "solution.py")
        path.write_text(text, encoding="utf-8")
        return grade_kernels(path, one)[0]


def reference(one: Exercise | KernelExercise, rounds: int = 1) -> tuple[int | None, str]:
    """Grade the reference `rounds` times; return the fewest points (None if it fails) and why."""
    try:
        every = [graded(one.solution_source, one) for _ in range(rounds)]
        if isinstance(one, Exercise):
            one.executed  # noqa: B018 - raises an error if the reference does not run
    except FlashSimError as error:
        return None, str(error)
    worst = min(every, key=lambda marks: marks.points)
    return worst.points, "; ".join(mark.words for mark in worst.marks if mark.kind)


def _told(one: Exercise, mistake: str) -> tuple[bool, None, str]:
    """Return a row of `check`: whether the grader rejects a known mistake and explains it."""
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
    return False, None, next(filter(None, seen), "its result is graded as right")
