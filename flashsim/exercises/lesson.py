"""Questions of a notebook, judged at once: readers guess first, then see the result.

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
    """The answers of a reader to one lesson; only the last answer to each question counts.

    Attributes
    ----------
    title : str
    """

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
        """Judge one answer, and print the mark. The right value is shown only after a right answer.

        Parameters
        ----------
        question : str
            The question, in a few words.
        said : number, str, or ...
            The reader's answer; ``...`` means that there is none yet.
        right : number or str
            The right answer, counted or measured in the same cell.
        within : float
            Allowed relative error of the answer; 0 demands the exact number.
        slips : mapping of number to str, optional
            Known wrong answers, with the reason for each.
        choices : sequence of str
            Allowed answers, if the answer is one of a few words.
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
        """The kind of mistake and an explanation; empty if the answer is right."""
        if said is ...:
            wanted = f"one of {', '.join(map(repr, choices))}" if choices else "a number"
            return "open", f"no answer yet; write {wanted} in place of ..."
        if isinstance(right, str):
            if said not in choices:
                return "answer", f"{shown(said)} is none of {', '.join(map(repr, choices))}"
            return () if said == right else ("answer", f"not {said!r}; think again, then run it")
        if isinstance(said, bool) or not isinstance(said, (int, float, np.integer, np.floating)):
            return "answer", f"{shown(said)} is no number"
        value = said.item() if isinstance(said, np.generic) else said
        if not abs(value) < 1e300:  # nan as well
            return "answer", f"{shown(value)} is not it"
        near = lambda x: abs(value - x) <= within * abs(x)  # noqa: E731
        if near(float(right)):
            return ()
        why = next((text for x, text in slips.items() if near(x)), "")
        return "answer", words.of_number(value, float(right), why)

    def solve(
        self, exercise: str, solution: Callable[..., None] | Mapping[str, int] | EllipsisType
    ) -> Trace | None:
        """Grade a solution of one of the course's exercises, and print its marks.

        Parameters
        ----------
        exercise : str
            A name from ``flashsim exercise list``, or a path.
        solution : function of the machine, dict of answers, or ...

        Returns
        -------
        Trace or None
            The solution's transfers; None if it did not finish.
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
        """The lesson's marks so far; they print as text and export as JSON or for Gradescope."""
        return Marks(self.title, tuple(self._marks.values()), {})
