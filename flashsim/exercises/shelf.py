"""Find exercises: those of `course`, and any file of a lecturer's."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path
from pkgutil import iter_modules

from flashsim.errors import OptionError, choices, own_errors, shown
from flashsim.exercises import course
from flashsim.exercises.exercise import Exercise


@cache
def _course() -> dict[str, Exercise]:
    pages = sorted(page.name for page in iter_modules(course.__path__))
    found = [importlib.import_module(f"{course.__name__}.{page}").EXERCISE for page in pages]
    return {exercise.name: exercise for exercise in found}


@own_errors
def names() -> list[str]:
    """The names of the bundled exercises, in the order of the course."""
    return list(_course())


@own_errors
def of_course(name: str) -> Exercise:
    """The bundled exercise with that name; a student's file may not name another."""
    if name not in _course():
        raise OptionError(
            f"no exercise {shown(name)} in the course; {choices(name, names())}; a lecturer's own "
            "is named by --exercise FILE"
        )
    return _course()[name]


@own_errors
def get(name: str) -> Exercise:
    """The exercise with that name, or the one in the file at that path.

    Raises
    ------
    OptionError
        If it does not exist, or the file defines no EXERCISE.
    """
    if name in _course():
        return _course()[name]
    if not name.endswith(".py"):
        raise OptionError(f"no exercise {shown(name)}; {choices(name, names())}, or a .py file")
    path = Path(name)
    if not path.is_file():
        raise OptionError(f"no exercise in {name!r}: there is no such file")
    spec = importlib.util.spec_from_file_location("flashsim_exercise", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    exercise = getattr(module, "EXERCISE", None)
    if not isinstance(exercise, Exercise):
        raise OptionError(f"{name} defines no EXERCISE = flashsim.exercises.Exercise(...)")
    return replace(exercise, file=name)
