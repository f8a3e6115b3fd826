"""Grade a homework folder, without a GPU: the kernel files and the tests in that folder.

A homework folder contains one file per kernel exercise, at the path `KernelExercise.path`, and may
contain a folder `tests`. Grading changes no file of the folder.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from flashsim.exercises import shelf
from flashsim.exercises.kernel_exercise import KernelExercise
from flashsim.exercises.kernel_grading import LIMIT, MEMORY, grade_kernels, handed
from flashsim.exercises.kernel_runner import KernelOrder
from flashsim.exercises.marks import Mark, Marks
from flashsim.exercises.runner import plain

#: The exercise name of the marks for a folder's own tests.
TESTS = "its own tests"


def homework_in(
    folder: Path, exercises: Sequence[KernelExercise] = (), *, single: bool = False
) -> list[Path]:
    """Return the homework folders: `folder` if it is one, otherwise its subfolders.

    A homework folder contains a file of a bundled exercise or of one of `exercises`. If any
    subfolder is a homework folder, all subfolders are returned, so that students with misplaced
    files still get marks. If `single` is true, only subfolders that are homework folders are
    returned.
    """
    paths = {one.path for one in (*_bundled(), *exercises) if one.path}
    below = students_in(folder)
    good = [root for root in below if _has_any(root, paths)]
    if _has_any(folder, paths):
        return [folder]
    return good if single or not good else below


def students_in(folder: Path) -> list[Path]:
    """Return a folder's subfolders, without hidden folders and folders like __MACOSX."""
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))
    )


def exercises_of(roots: Sequence[Path]) -> list[KernelExercise]:
    """Return the exercises that have a file in any homework folder; if none has, all exercises."""
    every = [one for one in _bundled() if one.path]
    return [one for one in every if any((root / one.path).is_file() for root in roots)] or every


def _bundled() -> list[KernelExercise]:
    found = [shelf.find(name) for name in shelf.kernel_names()]
    return [one for one in found if isinstance(one, KernelExercise)]


def _has_any(root: Path, paths: Iterable[str]) -> bool:
    return any((root / path).is_file() for path in paths)


def grade_homework(
    roots: Sequence[Path],
    exercises: Sequence[KernelExercise],
    *,
    limit: float | None = None,
    memory: int | None = None,
    jobs: int | None = None,
) -> Iterator[tuple[Path, list[tuple[Path, Marks]]]]:
    """Grade homework folders and run their tests; yield each folder with the marks per file."""

    def graded(work: tuple[Path, KernelExercise | None]) -> tuple[Path, Marks]:
        root, one = work
        if one is None:
            return root / "tests", _tests(root, limit, memory)
        path = root / one.path
        if not path.is_file():
            return path, Marks.none(one.name, "missing", _missing(root, one))
        return path, grade_kernels(path, one, root=root, limit=limit, memory=memory)[0]

    works = [
        (root, one) for root in roots for one in (*exercises, *[None] * (root / "tests").is_dir())
    ]
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        done = zip(works, pool.map(graded, works), strict=True)
        for root, found in groupby(done, key=lambda pair: pair[0][0]):
            yield root, [marks for _, marks in found]


def _missing(root: Path, one: KernelExercise) -> str:
    """Return a text that states a missing file's right path and lists the files in the folder."""
    there = sorted(
        plain(str(Path(place, name).relative_to(root)), 200)
        for place, _, names in os.walk(root)
        for name in names
    )
    more = f" and {len(there) - 5} more" if len(there) > 5 else ""
    found = f"found {', '.join(there[:5])}{more}" if there else "the folder is empty"
    return f"the file {one.path} is missing; {found}: hand it in as {one.path}"


def _tests(root: Path, limit: float | None, memory: int | None) -> Marks:
    """Run a homework folder's own tests, which give no points: students can write any tests."""
    began = time.perf_counter()
    tests, top = str((root / "tests").resolve()), str(root.resolve())
    seconds, size = LIMIT if limit is None else limit, MEMORY if memory is None else memory
    order = KernelOrder(tests, top, (), (), (), (), seconds, size, tests=True)
    kind, said, _, about = handed(order)
    outcomes = about.get("tests", ())
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
    """Combine the marks of a homework folder's files into one `Marks`, for Gradescope."""
    marks = [
        replace(mark, name=f"{one.exercise}: {mark.name}") for _, one in found for mark in one.marks
    ]
    return Marks("homework", tuple(marks), {}, seconds=sum(one.seconds for _, one in found))
