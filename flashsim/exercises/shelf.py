"""Find exercises: those of `course`, and any file of a lecturer's."""

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
    """The names of the course's exercises on the simulated machine, in order."""
    return [name for name, one in _bundled().items() if isinstance(one, Exercise)]


@own_errors
def kernel_names() -> list[str]:
    """The names of the bundled exercises for kernels in Triton or Pallas."""
    return [name for name, one in _bundled().items() if isinstance(one, KernelExercise)]


def of_course(name: str) -> AnyExercise:
    """The bundled exercise with that name; a student's file may not name another."""
    if name not in _bundled():
        raise OptionError(
            f"no exercise {shown(name)} in the course; {choices(name, _bundled())}; to use a "
            "lecturer's own exercise, give --exercise FILE"
        )
    return _bundled()[name]


@own_errors
def get(name: str) -> Exercise:
    """The exercise on the simulated machine with that name, or in the file at that path.

    Raises
    ------
    OptionError
        If it does not exist, or the file defines no EXERCISE.
    """
    found = find(name)
    if not isinstance(found, Exercise):
        raise OptionError(
            f"{found.name} is solved with kernels, not on the simulated machine; grade the file "
            "with `flashsim exercise grade FILE`"
        )
    return found


def find(name: str) -> AnyExercise:
    """The exercise of any kind with that name, or the one in the file at that path.

    Raises
    ------
    OptionError
        If it does not exist, or the file defines no EXERCISE.
    """
    if name in _bundled():
        return _bundled()[name]
    if not name.endswith(".py"):
        raise OptionError(f"no exercise {shown(name)}; {choices(name, _bundled())}, or a .py file")
    path = Path(name)
    if not path.is_file():
        raise OptionError(f"cannot read an exercise from {name!r}: there is no such file")
    exercise = getattr(imported(path), "EXERCISE", None)
    if not isinstance(exercise, AnyExercise):
        raise OptionError(
            f"{name} defines no EXERCISE = flashsim.exercises.Exercise(...) or KernelExercise(...)"
        )
    return replace(exercise, file=name)
