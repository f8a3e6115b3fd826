"""Exercises graded by bytes: a statement, a skeleton, hints, a reference solution, a grader.

``flashsim exercise list`` names them, ``flashsim exercise start NAME`` writes one's skeleton,
``flashsim exercise grade FILE`` grades what was made of it. An exercise is one file: `course` has
those that come along, and a lecturer's own is named by its path. See docs/guides/course.md.
"""

from flashsim.exercises.exercise import Exercise, Question, Task
from flashsim.exercises.grading import grade
from flashsim.exercises.lesson import Lesson
from flashsim.exercises.marks import Mark, Marks
from flashsim.exercises.shelf import get, names

__all__ = ["Exercise", "Lesson", "Mark", "Marks", "Question", "Task", "get", "grade", "names"]
