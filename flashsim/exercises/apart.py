"""A file judged in a process of its own, with a time limit: ``python -m flashsim.exercises.apart``.

The child writes what it found to a file, so that a solution may print what it likes. It is no
sandbox: a file from the internet belongs into a container.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flashsim.errors import OptionError
from flashsim.exercises import shelf
from flashsim.exercises.exercise import Exercise
from flashsim.exercises.grading import grade, nothing
from flashsim.exercises.marks import Marks
from flashsim.exercises.source import exercise_of
from flashsim.trace.trace import Trace

#: Seconds that a solution may take.
LIMIT = 60.0


def grade_file(
    path: str | Path, exercise: str | None = None, *, limit: float = LIMIT
) -> tuple[Marks, Trace | None]:
    """The marks of a file, and the trace of what it moved.

    Parameters
    ----------
    path : path-like
        The student's file.
    exercise : str, optional
        A name, or a path of a lecturer's file. Default: what the file's first line says.
    limit : float
        Seconds.

    Raises
    ------
    OptionError
        If there is no such file or exercise.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {str(path)!r}: {error}") from None
    name = exercise or exercise_of(text)
    if name is None:
        raise OptionError(
            f"{path.name} does not say which exercise it solves; begin it with "
            "`# flashsim exercise: NAME`, or give --exercise NAME"
        )
    one = shelf.get(name)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", __name__, name, str(path), folder]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, complaint = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            said = f"not done after {limit:g} s: a loop that does not end?"
            return _failed(one, "time", said, began), None
        found, trace = Path(folder, "marks.json"), Path(folder, "trace.npz")
        if child.returncode or not found.is_file():
            said = (complaint.strip().splitlines() or ["no word"])[-1]
            text = f"the solution ended its process before it was judged ({said})"
            return _failed(one, "process", text, began), None
        marks = Marks.from_json(found.read_text(encoding="utf-8"))
        return marks, Trace.load(trace) if trace.is_file() else None


def _failed(one: Exercise, kind: str, text: str, began: float) -> Marks:
    return Marks(one.name, nothing(kind, text), {}, (), time.perf_counter() - began)


def main(name: str, path: str, folder: str) -> None:
    """What the child does."""
    text = Path(path).read_text(encoding="utf-8")
    marks, trace = grade(text, shelf.get(name), Path(path).name)
    if trace is not None:
        trace.save(Path(folder, "trace.npz"))
    Path(folder, "marks.json").write_text(marks.json(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
