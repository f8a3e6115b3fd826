"""Graded questions in a notebook: readers predict a number, then run code that computes it.

>>> from flashsim.exercises import Lesson
>>> lesson = Lesson("tiles")
>>> lesson.ask("tiles of 64 rows in 1,024", 16, 1024 // 64)
✓ tiles of 64 rows in 1,024: 16   (10 of 10 points)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from flashsim.errors import own_errors, shown
from flashsim.exercises import shelf, words
from flashsim.exercises.grading import grade
from flashsim.exercises.marks import Mark, Marks
from flashsim.problem import checks
from flashsim.trace.trace import Trace

#: Points of a question, and of an exercise of the course.
QUESTION, EXERCISE = 10, 50


@own_errors
class Lesson:
    """A reader's answers to one lesson; only the last answer to each question counts."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._marks: dict[str, Mark] = {}

    def ask(
        self,
        question: str,
        said: Any,
        right: float | str,
        *,
        within: float = 0.0,
        slips: Mapping[float, str] | None = None,
        choices: Sequence[str] = (),
    ) -> None:
        """Grade one answer and print its mark; only a right answer shows the right value.

        Parameters
        ----------
        question : str
            The question, in a few words.
        said : number, str, or ...
            The reader's answer; ``...`` means that the reader has not answered yet.
        right : number or str
            The right answer, counted or measured in the same cell.
        within : float
            Allowed relative error of the answer; 0 requires the exact number.
        slips : mapping of number to str, optional
            Explanations of known wrong answers.
        choices : sequence of str
            The possible answers, if the answer is a word.
        """
        if not isinstance(right, str):
            checks.number("right", right)
        checks.number("within", within, low=0.0)
        why = self._wrong(said, right, within, slips or {}, choices)
        self._marks[question] = Mark(question, 0 if why else QUESTION, QUESTION, *why)
        if why:
            print(f"{'·' if why[0] == 'open' else '✗'} {question}: {why[1]}")
        else:
            value = right if isinstance(right, str) else f"{right:,.6g}"
            if isinstance(right, (int, np.integer)):
                value = f"{right:,}"
            print(f"✓ {question}: {value}   ({QUESTION} of {QUESTION} points)")

    @staticmethod
    def _wrong(
        said: Any,
        right: float | str,
        within: float,
        slips: Mapping[float, str],
        choices: Sequence[str],
    ) -> tuple[()] | tuple[str, str]:
        """Return the kind and the explanation of an answer's mistake; () for a right answer."""
        if said is ...:
            wanted = f"one of {', '.join(map(repr, choices))}" if choices else "a number"
            return "open", f"no answer yet; replace ... with {wanted}"
        if isinstance(right, str):
            if said not in choices:
                wanted = ", ".join(map(repr, choices))
                return "answer", f"the answer must be one of {wanted}, got {shown(said)}"
            wrong = f"{said!r} is wrong; think again, then run the cell again"
            return () if said == right else ("answer", wrong)
        if isinstance(said, bool) or not isinstance(said, (int, float, np.integer, np.floating)):
            return "answer", f"the answer must be a number, got {shown(said)}"
        value = said.item() if isinstance(said, np.generic) else said
        if not abs(value) < 1e300:  # also NaN
            return "answer", f"{shown(value)} is wrong; answer with a finite number"
        near = lambda x: abs(value - x) <= within * abs(x)  # noqa: E731
        if near(float(right)):
            return ()
        why = next((text for x, text in slips.items() if near(x)), "")
        return "answer", words.of_number(value, float(right), why)

    def solve(
        self, exercise: str, solution: Callable[..., None] | Mapping[str, int] | EllipsisType
    ) -> Trace | None:
        """Grade a solution, print its marks, and return the trace of its transfers.

        The trace is None if the solution did not run to its end.

        Parameters
        ----------
        exercise : str
            A name from ``flashsim exercise list``, or the path of a lecturer's file.
        solution : function of the machine, dict of answers, or ...
            The solution; ``...`` means that there is no solution yet.
        """
        if solution is ...:
            said = "no solution yet"
            self._marks[exercise] = Mark(exercise, 0, EXERCISE, "open", said)
            print(f"· {exercise}: {said}")
            return None
        marks, trace = grade(solution, shelf.get(exercise))
        print(marks.text())
        points = marks.points * EXERCISE // marks.most
        first = next((mark for mark in marks.marks if mark.kind), Mark("", 0, 0))
        self._marks[exercise] = Mark(exercise, points, EXERCISE, first.kind, first.words)
        return trace

    def marks(self) -> Marks:
        """Return the lesson's marks so far; `Marks` has methods for text, JSON and Gradescope."""
        return Marks(self.title, tuple(self._marks.values()), {})
