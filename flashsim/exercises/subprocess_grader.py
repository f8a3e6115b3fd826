"""Judge a file in a process of its own, with limits on time and memory.

``python -m flashsim.exercises.subprocess_grader`` is the child process.

It writes its result to a file, so a solution may print anything. It is no
sandbox: run a file from the internet in a container.
"""

from __future__ import annotations

import os
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
from flashsim.exercises.source import exercise_of, text_of
from flashsim.trace.trace import Trace

#: Seconds that a solution may take, and MiB beyond what Python, NumPy and flashsim take themselves.
LIMIT, MEMORY = 60.0, 1024
#: BLAS would set memory aside for each of a large machine's CPUs.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def grade_file(
    path: str | Path,
    exercise: str | None = None,
    *,
    limit: float = LIMIT,
    memory: int | None = None,
) -> tuple[Marks, Trace | None]:
    """The marks of a file, and the trace of its transfers.

    Parameters
    ----------
    path : path-like
        The student's file.
    exercise : str, optional
        A name, or a path of a lecturer's file. Default: the exercise that the file's first line
        names.
    limit : float
        Seconds.
    memory : int, optional
        MiB. Default: `MEMORY` on Linux; other systems set no limit.

    Raises
    ------
    OptionError
        If there is no such file or exercise, or `memory` is set on a system without such limits.
    """
    path = Path(path)
    linux = sys.platform == "linux"
    if memory is not None and not linux:
        raise OptionError(f"memory={memory}: only Linux can limit it; leave it out")
    memory = (MEMORY if linux else 0) if memory is None else memory
    unreadable = ""
    try:
        text = text_of(path)
    except OSError as error:
        raise OptionError(f"cannot read {str(path)!r}: {error}") from None
    except (SyntaxError, UnicodeDecodeError) as error:  # a student's fault: points, no error
        unreadable = f"Python cannot read the file: {error}; save it as UTF-8"
        text = path.read_text(encoding="latin-1")  # which takes every byte
    name = exercise or exercise_of(text)
    if name is None:
        raise OptionError(
            f"{path.name} does not say which exercise it solves; begin it with "
            "`# flashsim exercise: NAME`, or give --exercise NAME"
        )
    one = shelf.get(name)
    if unreadable:
        return _failed(one, "syntax", unreadable, None), None
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", __name__, name, str(path), folder, str(memory)]
        child = subprocess.Popen(
            command,
            env={**os.environ, **_ONE_THREAD},
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


def missing(path: Path, exercise: str) -> Marks:
    """The marks for a file that was not handed in."""
    there = sorted(other.name for other in path.parent.glob("*.py"))
    said = f"there is no {path.name}" + (f", but {', '.join(there)}" if there else "")
    return _failed(shelf.get(exercise), "missing", f"{said}: hand in a file of that name", None)


def _failed(one: Exercise, kind: str, text: str, began: float | None) -> Marks:
    seconds = 0.0 if began is None else time.perf_counter() - began
    return Marks(one.name, nothing(kind, text), {}, (), seconds)


def main(name: str, path: str, folder: str, memory: str = "0") -> None:
    """Grade in the child process; memory 0 means no limit."""
    text, one = text_of(Path(path)), shelf.get(name)
    if int(memory):
        _bound(int(memory))
    marks, trace = grade(text, one, Path(path).name)
    if trace is not None:
        trace.save(Path(folder, "trace.npz"))
    Path(folder, "marks.json").write_text(marks.json(), encoding="utf-8")


def _bound(mebibytes: int) -> None:
    """Limit this process to so much more memory than it uses now."""
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + mebibytes * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main(*sys.argv[1:])
