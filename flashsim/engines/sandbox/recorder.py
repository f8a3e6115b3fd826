"""Runs a student's file and returns a program, answers, or an error as text.

``python -m flashsim.engines.sandbox.recorder`` runs the file in a separate process that the module
`walls` restricts. The separate process has no inputs, reference results, answers or marks, so a
student's code cannot find or change them.
"""

import json
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flashsim.engines.sandbox.program import Setting, record
from flashsim.errors import FlashSimError, MemoryModelError, ShapeError, SramOverflow, shown

#: The most characters of an error's text.
WORDS = 2000


@dataclass(frozen=True)
class Handed:
    """The result of running a student's solution.

    If the solution cannot be graded, `kind` and `words` say why. `program` contains the
    instructions for `program.replay`. If the file has a dict ANSWERS, `answers` is this dict, in
    which text replaces values that are not integers. Without ANSWERS, `answers` is None.
    """

    program: Iterable[str | bytes] = ()
    answers: Mapping[str, int | str] | None = None
    kind: str = ""
    words: str = ""
    name: str = "solution"


class Order(NamedTuple):
    """The text of a Python file to run, which has a dict ANSWERS if `setting` is None."""

    text: str
    file: str
    setting: Setting | None
    seconds: float
    memory: int


def from_text(text: str, file: str, setting: Setting | None) -> Handed:
    """Run the text of a student's file, which has a dict ANSWERS if `setting` is None."""
    try:
        code = compile(text, file, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        said = f"Python cannot read the file: {where}{(error.args or ('too deep',))[0]}"
        return Handed(kind="syntax", words=said)
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    scope: dict[str, Any] = {"__name__": "solution"}
    try:
        exec(code, scope)
    except (Exception, SystemExit) as error:
        return Handed(kind=kind_of(error), words=f"the file ends with {of_error(error)}")
    if setting is None:
        return from_answers(scope.get("ANSWERS"))
    solution = scope.get("solution")
    if not callable(solution):
        said = "the file defines no function solution(machine)"
        return Handed(kind="function", words=said)
    return from_function(solution, setting)


def from_function(solution: Callable[..., None], setting: Setting) -> Handed:
    """Record a student's function, which takes the machine as argument."""
    name = str(getattr(solution, "__name__", "solution"))[:60]
    try:
        return Handed(record(solution, name, setting), name=name)
    except (Exception, SystemExit) as error:
        return Handed(kind=kind_of(error), words=of_error(error))


def from_answers(mapping: Any) -> Handed:
    """Read the answers from the file's variable ANSWERS."""
    if not isinstance(mapping, Mapping):
        said = "the file defines no dict ANSWERS: {question: number}"
        return Handed(kind="function", words=said)
    answers: dict[str, int | str] = {}
    for key, x in mapping.items():
        integer = isinstance(x, (int, np.integer)) and abs(int(x)) < 1e300
        answers[str(key)] = int(x) if integer else shown(x)
    return Handed(answers=answers)


def kind_of(error: BaseException) -> str:
    """Return a word for the kind of an error, such as the broken rule of the machine."""
    if isinstance(error, MemoryModelError):
        return error.kind
    kinds = {SramOverflow: "overflow", MemoryError: "memory", ShapeError: "shape"}
    return next(
        (kind for known, kind in kinds.items() if isinstance(error, known)),
        "machine" if isinstance(error, FlashSimError) else "error",
    )


def of_error(error: BaseException) -> str:
    """Return an error's message for a student: the text and, from the notes, the line."""
    try:
        text = str(error)[:WORDS]
    except Exception:
        text = "(its message cannot be shown)"
    if isinstance(error, FlashSimError):
        return text
    if isinstance(error, MemoryError):
        what = f": {text}" if text else ""
        return f"MemoryError{what}; a solution needs kilobytes, and its memory is limited"
    notes = "; ".join(map(str, getattr(error, "__notes__", ())))[:WORDS]
    return f"{type(error).__name__}: {text}" + (f" ({notes})" if notes else "")


def main() -> None:
    """Read an `Order` from the standard input, and write the result to the standard output.

    The first line of the output is the result as JSON, and the program follows. The file's own
    prints go to stderr.
    """
    from flashsim.engines.sandbox import walls  # not available in a browser

    order: Order = pickle.load(sys.stdin.buffer)
    out = os.dup(1)
    os.dup2(2, 1)
    walls.limit(seconds=order.seconds, memory=order.memory)
    closed_off = walls.close()
    handed = from_text(order.text, order.file, order.setting)
    about = {
        "kind": handed.kind,
        "words": handed.words,
        "answers": handed.answers,
        "walls": closed_off,
    }
    with os.fdopen(out, "w", encoding="ascii") as result:
        result.write(json.dumps(about) + "\n")
        result.writelines(f"{line!s}\n" for line in handed.program)
    os._exit(0)  # skips functions that the file registered for the end of the process


if __name__ == "__main__":
    main()
