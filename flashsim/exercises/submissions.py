"""Grade students' files: one file, or a folder of files.

A student's file runs once, in a separate, sandboxed process (`flashsim.engines.sandbox.recorder`),
which returns a recorded program. The grading process replays the program and never runs the file.
docs/guides/grader.md describes what this separation protects from, and what it does not.
"""

import io
import os
import re
import stat
import sys
import time
import tokenize
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flashsim.engines.sandbox import recorder, walls
from flashsim.engines.sandbox.recorder import Handed, Order
from flashsim.engines.sandbox.tape import MOST
from flashsim.errors import OptionError
from flashsim.exercises import shelf
from flashsim.exercises.grading import judge
from flashsim.exercises.homework import students_in
from flashsim.exercises.kernel_exercise import KernelExercise
from flashsim.exercises.kernel_grading import grade_kernels
from flashsim.exercises.marks import Marks, Refused
from flashsim.exercises.runner import ask, plain
from flashsim.trace.trace import Trace

#: Seconds that a solution may take, and MiB beyond the memory of Python, NumPy and flashsim.
LIMIT, MEMORY = 60.0, 1024
#: The largest size of a file in bytes; a solution has a few thousand.
MOST_FILE = 1 << 20


@dataclass(frozen=True)
class _Lines:
    """Iterates over the lines of a text, without storing millions of lines."""

    text: bytes

    def __iter__(self) -> Iterator[bytes]:
        return io.BytesIO(self.text)


def grade_file(
    path: str | Path,
    exercise: str | None = None,
    *,
    limit: float | None = None,
    memory: int | None = None,
) -> tuple[Marks, Trace | None]:
    """Grade a student's file; return its marks, and the trace of its transfers.

    `exercise` is an exercise's name, or the path of a lecturer's file. By default, the first line
    of the student's file names a bundled exercise. `limit` is in seconds (default: `LIMIT`, or
    `kernel_grading.LIMIT` for kernels). `memory` is in MiB: by default, `MEMORY` on Linux, more for
    kernels, and unlimited on other systems.

    Raises
    ------
    OptionError
        If the file or the exercise does not exist, or `memory` is passed on a system other than
        Linux.
    """
    one = None if exercise is None else shelf.find(exercise)
    return _graded(Path(path), one, limit, memory)


def grade_folder(
    folder: Path,
    exercise: str | None = None,
    *,
    limit: float | None = None,
    memory: int | None = None,
    jobs: int | None = None,
) -> Iterator[tuple[Path, Marks]]:
    """Grade all .py files in a folder and its subfolders, several at once; yield results by name.

    If `exercise` is None, the first line of each file must name an exercise, or the file gets no
    points. A subfolder without any .py file gets 0 points.
    """
    paths = sorted(
        Path(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if name.endswith(".py") and not name.startswith(".")
    )
    empty = {
        below
        for below in students_in(folder)
        if not any(below == path or below in path.parents for path in paths)
    }
    if not paths:
        raise OptionError(
            f"the folder {str(folder)!r} contains no .py file to grade; pass the folder that "
            "contains the submissions"
        )
    one = None if exercise is None else shelf.find(exercise)

    def graded(path: Path) -> tuple[Path, Marks]:
        if path in empty:
            said = "the folder contains no .py file: hand in a file"
            return path, Marks.none(one.name if one else "", "missing", said)
        try:
            return path, _graded(path, one, limit, memory)[0]
        except OptionError as error:
            return path, Marks.none(one.name if one else "", "file", str(error))

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        yield from pool.map(graded, sorted([*paths, *empty]))


def missing(path: Path, exercise: str) -> Marks:
    """Return marks of 0 points for a file that was not handed in."""
    there = sorted(plain(other.name, 200) for other in path.parent.glob("*.py"))
    said = f"the file {path.name} is missing" + (f"; found {', '.join(there)}" if there else "")
    said += f": hand in a file named {path.name}"
    return Marks.none(shelf.find(exercise).name, "missing", said)


def exercise_of(text: str) -> str | None:
    """Return the name of the exercise that a file's text states, or None if it states no name."""
    found = re.search(r"^# flashsim exercise: *(\S+)", text, re.M)
    return found[1] if found else None


def missing_walls() -> list[str]:
    """Return what no sandbox stops a graded file's code from doing on this system."""
    order = Order("ANSWERS = {}", "none.py", None, LIMIT, MEMORY)
    found = ask(recorder.__name__, order, MOST).about["walls"]
    return [wall for wall in (walls.FILES, walls.PROCESSES, walls.NETWORK) if wall not in found]


def _graded(
    path: Path, one: shelf.AnyExercise | None, limit: float | None, memory: int | None
) -> tuple[Marks, Trace | None]:
    began = time.perf_counter()
    if memory is not None and sys.platform != "linux":
        raise OptionError(
            f"memory={memory} was passed, but memory can be limited only on Linux; leave out "
            "memory="
        )
    text, unreadable = "", None
    try:
        text = _text_of(path)
    except OSError as error:
        raise OptionError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except Refused as error:  # the student's mistake: it gets 0 points and raises no error
        unreadable = error
    if one is None:
        name = exercise_of(text)
        if name is None:
            raise OptionError(
                f"{plain(path.name, 200)} does not name its exercise; begin the file with the line "
                "`# flashsim exercise: NAME`, or pass --exercise NAME"
            )
        one = shelf.of_course(name)
    if unreadable is not None:
        return Marks.none(one.name, unreadable.kind, str(unreadable)), None
    if isinstance(one, KernelExercise):
        return grade_kernels(path, one, limit=limit, memory=memory)
    limit = LIMIT if limit is None else limit
    setting = None if one.questions else one.task.setting
    order = Order(text, plain(path.name, 200), setting, limit, MEMORY if memory is None else memory)
    return judge(_handed(order), one, text, began, limit)


def _text_of(path: Path) -> str:
    """Return a file's text, decoded as UTF-8 unless the file declares another encoding."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise Refused(
            "file",
            f"{plain(path.name, 200)} is a link, a folder or a device; hand in a regular file",
        )
    with open(path, "rb") as file:
        data = file.read(MOST_FILE + 1)
    if len(data) > MOST_FILE:
        raise Refused(
            "file",
            f"{plain(path.name, 200)} is larger than {MOST_FILE:,} bytes; hand in only the code",
        )
    try:
        with io.TextIOWrapper(
            io.BytesIO(data), tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        ) as lines:
            text = lines.read()
        text.encode()  # raises an error for lone surrogates, which cannot be printed
    except (SyntaxError, LookupError, ValueError) as error:
        said = f"Python cannot read the file: {plain(str(error), 200)}; save it as UTF-8"
        raise Refused("syntax", said) from None
    return text


def _handed(order: Order) -> Handed:
    """Run a file; return its recorded program, or an explanation of why there is none."""
    kind, words, program, about = ask(recorder.__name__, order, MOST + (1 << 20))
    given = about.get("answers")
    answers: dict[str, int | str] | None = None
    if isinstance(given, dict):
        answers = {
            plain(key, 200): value if isinstance(value, int) else plain(str(value), 200)
            for key, value in given.items()
        }
    return Handed(_Lines(program), answers, kind, words)
