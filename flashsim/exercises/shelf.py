"""Find exercises: bundled ones by name, or a lecturer's own by the path of its file."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from pkgutil import iter_modules

from flashsim.errors import OptionError, choices, own_errors, shown
from flashsim.exercises import course, kernels
from flashsim.exercises.exercise import Exercise
from flashsim.exercises.kernel_exercise import KernelExercise
from flashsim.own_kernels.files import imported

AnyExercise = Exercise | KernelExercise


@cache
def _bundled() -> dict[str, AnyExercise]:
    found = []
    for shelf in (course, kernels):
        pages = sorted(page.name for page in iter_modules(shelf.__path__))
        found += [importlib.import_module(f"{shelf.__name__}.{page}").EXERCISE for page in pages]
    return {exercise.name: exercise for exercise in found}


@own_errors
def names() -> list[str]:
    """Return the names of the bundled exercises on the simulated machine, in the course's order."""
    return [name for name, one in _bundled().items() if isinstance(one, Exercise)]


@own_errors
def kernel_names() -> list[str]:
    """Return the names of the bundled exercises for kernels in Triton or Pallas."""
    return [name for name, one in _bundled().items() if isinstance(one, KernelExercise)]


def of_course(name: str) -> AnyExercise:
    """Return the bundled exercise with that name.

    A student's file may name only bundled exercises. If it could name a path, grading would run the
    code at that path.
    """
    if name not in _bundled():
        raise OptionError(
            f"the course has no exercise {shown(name)}; choose from {choices(name, _bundled())}; "
            "to use a lecturer's own exercise, pass --exercise FILE"
        )
    return _bundled()[name]


@own_errors
def get(name: str) -> Exercise:
    """Return the exercise on the simulated machine with that name, or in the file at that path.

    A missing exercise, or a file that defines no EXERCISE, raises an `OptionError`.
    """
    found = find(name)
    if not isinstance(found, Exercise):
        raise OptionError(
            f"{found.name} is an exercise for Triton or Pallas kernels, not for the simulated "
            "machine; grade a solution with `flashsim exercise grade FILE`"
        )
    return found


def find(name: str) -> AnyExercise:
    """Return any exercise with that name or in the file at that path; errors are those of `get`."""
    if name in _bundled():
        return _bundled()[name]
    if not name.endswith(".py"):
        raise OptionError(
            f"there is no exercise {shown(name)}; pass the path of an exercise's .py file, or "
            f"choose from {choices(name, _bundled())}"
        )
    path = Path(name)
    if not path.is_file():
        raise OptionError(
            f"cannot read an exercise from {name!r}: the file does not exist; pass the path of "
            "an existing .py file, or the name of an exercise of the course"
        )
    exercise = getattr(imported(path), "EXERCISE", None)
    if not isinstance(exercise, AnyExercise):
        raise OptionError(
            f"{name} defines no exercise; it must contain EXERCISE = "
            "flashsim.exercises.Exercise(...) or KernelExercise(...)"
        )
    return replace(exercise, file=name)
