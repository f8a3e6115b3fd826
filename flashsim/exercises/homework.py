"""Grade a homework folder: its files of kernels, and the tests that it contains.

Grading needs no GPU.

A homework folder contains files at the paths that the kernel exercises name
(`KernelExercise.path`), and maybe a folder `tests`. Grading changes no file in the homework folder.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flashsim.exercises import shelf
from flashsim.exercises.kernel_exercise import KernelExercise
from flashsim.exercises.kernel_grading import LIMIT, MEMORY, grade_kernels, handed
from flashsim.exercises.kernel_runner import KernelOrder
from flashsim.exercises.marks import Mark, Marks
from flashsim.exercises.runner import plain

#: The exercise name of the marks for a folder's own tests.
TESTS = "its own tests"


def homework_in(folder: Path) -> list[Path]:
    """Return the homework folders: `folder` if it is one, otherwise those among its subfolders."""
    below = sorted(path for path in folder.iterdir() if path.is_dir())
    return [folder] if _files(folder) else [path for path in below if _files(path)]


def _files(root: Path) -> list[tuple[Path, KernelExercise]]:
    """Return a homework folder's files, each with the exercise that it solves."""
    found = [shelf.find(name) for name in shelf.kernel_names()]
    return [
        (root / one.path, one)
        for one in found
        if isinstance(one, KernelExercise) and one.path and (root / one.path).is_file()
    ]


def grade_homework(
    root: Path,
    exercise: str | None = None,
    *,
    limit: float | None = None,
    memory: int | None = None,
) -> Iterator[tuple[Path, Marks]]:
    """Grade each file of a homework folder for each exercise that it solves; run its tests."""
    only = None if exercise is None else shelf.find(exercise).name
    for path, one in _files(root):
        if only in (None, one.name):
            yield path, grade_kernels(path, one, root=root, limit=limit, memory=memory)[0]
    if only is None and (root / "tests").is_dir():
        yield root / "tests", _tests(root, limit, memory)


def _tests(root: Path, limit: float | None, memory: int | None) -> Marks:
    """Run a folder's own tests. They give no points, because students can write any tests."""
    began = time.perf_counter()
    tests, top = str((root / "tests").resolve()), str(root.resolve())
    seconds, size = LIMIT if limit is None else limit, MEMORY if memory is None else memory
    order = KernelOrder(tests, top, (), (), (), (), seconds, size, tests=True)
    kind, said, _, outcomes = handed(order)
    if kind or not outcomes:
        marks = [Mark("all", 0, 0, kind or "missing", said or "pytest found no test")]
    else:
        passed = sum(outcome == "passed" for _, outcome, _ in outcomes)
        marks = [Mark("all", 0, 0, words=f"{passed} of {len(outcomes)} tests pass")]
    for name, outcome, words in outcomes:
        right = outcome == "passed"
        why = "" if right else plain(f"{outcome}: {words}", 500)
        marks.append(Mark(plain(name, 200), 0, 0, "" if right else "test", why))
    return Marks(TESTS, tuple(marks), {}, seconds=time.perf_counter() - began)


def together(found: list[tuple[Path, Marks]]) -> Marks:
    """Return all marks of a homework folder combined into one `Marks`, for Gradescope."""
    marks = [
        replace(mark, name=f"{one.exercise}: {mark.name}") for _, one in found for mark in one.marks
    ]
    return Marks("homework", tuple(marks), {}, seconds=sum(one.seconds for _, one in found))


__all__ = ["TESTS", "grade_homework", "homework_in", "together"]
