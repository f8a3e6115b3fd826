"""Grade a solution's recorded program on random inputs: results, on-chip memory and bytes."""

from __future__ import annotations

import inspect
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flashsim.api.simulate import trace_of
from flashsim.engines.sandbox import recorder
from flashsim.engines.sandbox.machine import OpenMachine
from flashsim.engines.sandbox.program import ProgramError, replay
from flashsim.engines.sandbox.recorder import Handed
from flashsim.engines.sandbox.running import require_stored
from flashsim.errors import FlashSimError, SramOverflow, own_errors
from flashsim.exercises import words
from flashsim.exercises.exercise import KINDS, Exercise
from flashsim.exercises.marks import Mark, Marks, beside, bytes_mark, room_mark
from flashsim.trace.trace import Trace

#: Points for the results, for fitting in on-chip memory, and for the bytes moved.
RESULTS, ROOM, BYTES = 40, 20, 40
#: Random inputs drawn per kind; a result has to be right for all of them.
DRAWS = 2


@own_errors
def grade(
    given: str | Callable[..., None] | Mapping[str, int],
    exercise: Exercise,
    file: str = "solution.py",
) -> tuple[Marks, Trace | None]:
    """Grade a solution inside this process; return its marks and the trace of its transfers.

    The solution runs on symbolic tiles without values. This run records the operations as a
    program, which the grader replays on inputs. The code of a solution runs in this process: for
    files that you do not trust, use `submissions.grade_file`.

    Parameters
    ----------
    given : str, function of the machine, or mapping
        The text of a solution's file; or, in a notebook, the solution's function, or a dict of
        answers by question.
    exercise : Exercise
    file : str
        The name of the file in error messages.
    """
    began = time.perf_counter()
    setting = None if exercise.questions else exercise.task.setting
    if isinstance(given, str):
        return judge(recorder.from_text(given, file, setting), exercise, given, began)
    if setting is None:
        return judge(recorder.from_answers(given), exercise, "", began)
    file_text, text = _source_of(given)
    handed = recorder.from_function(given, setting)  # type: ignore[arg-type]
    return judge(handed, exercise, file_text, began, text=text)


def judge(
    handed: Handed,
    exercise: Exercise,
    source: str,
    began: float,
    limit: float = float("inf"),
    *,
    text: str | None = None,
) -> tuple[Marks, Trace | None]:
    """Grade a solution that has run: its recorded program, or its answers to questions.

    `handed` may come from a process that is not trusted. Messages quote `source`, the text of the
    file. If the file has more than the solution, `text` is the solution alone. Grading began at the
    time `began` of `time.perf_counter`. Replaying the program may take up to `limit` seconds.
    """
    text = source if text is None else text
    trace, figures = None, dict[str, int]()
    if handed.kind:
        marks: tuple[Mark, ...] = (Mark("the file", 0, 100, handed.kind, handed.words),)
    elif exercise.questions:
        marks = _answers(exercise, handed.answers or {})
    else:
        marks, figures, trace = _Judge(exercise, handed, source, time.monotonic() + limit).judged()
    if any(mark.kind for mark in marks) and words.untouched(text, exercise.skeleton):
        said = "the file is still the skeleton: replace its TODO with your code"
        marks, figures, trace = (Mark("the file", 0, 100, "todo", said),), {}, None
    else:
        marks = words.with_todo(marks, text, exercise.skeleton)
    hint = f"flashsim exercise hint {exercise.file or exercise.name}" if exercise.hints else ""
    moved: tuple[tuple[str, str, int, int], ...] = ()
    if trace is not None:
        moved = beside(words.transfers(trace), words.transfers(exercise.executed.trace))
    seconds = time.perf_counter() - began
    return Marks(exercise.name, marks, figures, moved, seconds, hint), trace


def _source_of(function: Any) -> tuple[str, str]:
    """Return the source of a function's file or cell, and the function's source; "" if unknown."""
    try:
        return "".join(inspect.findsource(function)[0]), inspect.getsource(function)
    except (TypeError, OSError):
        return "", ""


class _Judge:
    """Grades the recorded program of one solution."""

    def __init__(self, exercise: Exercise, handed: Handed, source: str, until: float) -> None:
        self.exercise, self.task, self.handed = exercise, exercise.task, handed
        self.source, self.until = source.splitlines(), until

    def judged(self) -> tuple[tuple[Mark, ...], dict[str, int], Trace | None]:
        """Return the marks, the figures (such as bytes moved), and the trace of one run."""
        task, each = self.task, RESULTS // len(KINDS)
        draws = [
            (kind, task.arrays(kind, secrets.randbits(32))) for kind in KINDS for _ in range(DRAWS)
        ]
        try:
            machine = self._replayed([arrays for _, arrays in draws])
            require_stored(self.handed.name, machine, task.outputs)
        except (ProgramError, FlashSimError) as error:
            kind = "program" if isinstance(error, ProgramError) else recorder.kind_of(error)
            return (Mark("runs", 0, 100, kind, str(error)),), {}, None
        asked = [*task.outputs]
        if "L" in machine.hbm.tensors and "L" not in (*asked, *task.inputs):
            asked += ["L"] if machine.hbm._stored("L") != "none" else []
        trace = trace_of(self.handed.name, machine, ("Q", "K", "V", *task.inputs), asked)
        wrong: dict[str, str] = {}
        for at, (kind, arrays) in enumerate(draws):
            if kind not in wrong and (why := self._wrong(machine, at, kind, arrays)):
                wrong[kind] = why
        unread = words.unread(trace)
        why = words.UNREAD.format(" and ".join(unread)) if unread else ""
        if not why and "rising" in wrong and "falling" not in wrong:
            why = words.FALLING
        if why and wrong:
            first = next(iter(wrong))
            wrong[first] = f"{wrong[first]}; {why}"
        marks = [
            Mark(f"results, {kind}", 0, each, "result", wrong[kind])
            if kind in wrong
            else Mark(f"results, {kind}", each, each)
            for kind in KINDS
        ]
        overflow = self._overflow(trace)
        marks.append(room_mark(ROOM, all_wrong=len(wrong) == len(KINDS), overflow=overflow))
        marks.append(_bytes(self.exercise, trace, right=not wrong))
        figures = {
            "bytes": trace.bytes(),
            "budget": self.exercise.full_marks_bytes,
            "peak": trace.peak_sram(),
            "sram": task.sram_bytes,
        }
        if self.exercise.bound is not None:
            figures["bound"] = self.exercise.bound(task)
        return tuple(marks), figures, trace

    def _replayed(
        self, draws: Sequence[Mapping[str, np.ndarray]], **limits: int | None
    ) -> OpenMachine:
        """Run the recorded program on all sets of inputs at once; return the simulated machine."""
        setting = self.task.setting
        names = ("Q", "K", "V", *setting.inputs)
        arrays = {name: np.concatenate([draw[name] for draw in draws]) for name in names}
        machine = setting.machine(arrays, samples=len(draws), **limits)
        replay(self.handed.program, machine, self.handed.name, self.source, until=self.until)
        return machine

    def _wrong(
        self, machine: OpenMachine, at: int, kind: str, arrays: Mapping[str, np.ndarray]
    ) -> str:
        """Return why the results for one set of inputs are wrong, or "" if they are right."""
        batch, right = self.task.problem.batch, list[str]()
        for name in self.task.outputs:
            got = machine.hbm._array(name)[at * batch : (at + 1) * batch]
            if why := words.off(self.exercise, arrays, kind, name, got):
                return why + (f"; {' and '.join(right)} is right" if right else "")
            right.append(name)
        return ""

    def _overflow(self, trace: Trace) -> str:
        """Return why a solution exceeds the on-chip memory, or "" if it fits."""
        if trace.peak_sram() <= self.task.sram_bytes:
            return ""
        try:
            self._replayed([self.task.arrays()], most=None)
        except (SramOverflow, ProgramError) as error:
            return str(error)
        raise AssertionError(
            "the program needs more on-chip memory than the machine has; use smaller tiles"
        )


def _bytes(exercise: Exercise, trace: Trace, *, right: bool) -> Mark:
    reference = exercise.executed.trace
    more = words.excess(trace, reference)
    mark = bytes_mark(BYTES, trace.bytes(), exercise.full_marks_bytes, right=right, more=more)
    if not right:
        return mark
    mine, theirs = words.transfers(trace), words.transfers(reference)
    over = [t for op, t in exercise.at_most if mine.get((op, t), 0) > theirs.get((op, t), 0)]
    if over:
        lines = [mark.words] if mark.kind else [x for x in more if x.split()[0] in over]
        lines.append(
            f"{' and '.join(dict.fromkeys(over))}: moved more often than in the exercise's loop "
            "order, which costs at least half of these points"
        )
        kind, most = mark.kind or "order", BYTES // 2
        return Mark("bytes", min(mark.points, most), BYTES, kind, "\n".join(lines))
    if mark.kind:
        return mark
    asked = exercise.demand(trace) if exercise.demand else ""
    return Mark("bytes", BYTES // 2, BYTES, "demand", asked) if asked else mark


def _answers(exercise: Exercise, given: Mapping[str, int | str]) -> tuple[Mark, ...]:
    trace, n = exercise.executed.trace, len(exercise.questions)
    marks = []
    for at, question in enumerate(exercise.questions):
        most = 100 // n + (at < 100 % n)
        value, right = given.get(question.ask), question.answer(trace)
        if not isinstance(value, int):
            said = f"the answer must be an integer, got {value}"
        elif value == right:
            marks.append(Mark(question.ask, most, most))
            continue
        else:
            said = words.of_number(value, right, question.slips(trace).get(value, ""))
        marks.append(Mark(question.ask, 0, most, "answer", said))
    return tuple(marks)
