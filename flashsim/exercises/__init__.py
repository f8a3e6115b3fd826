"""Exercises graded by bytes: a statement, a skeleton, hints, a reference solution, a grader.

``flashsim exercise list`` names them, ``flashsim exercise start NAME`` writes the skeleton of one,
and ``flashsim exercise grade FILE`` grades the completed file. An exercise is one file. `course`
contains the bundled ones; a lecturer's own exercise is named by its path. See
docs/guides/course.md.
"""

from flashsim.exercises.exercise import Exercise, Question, Task
from flashsim.exercises.grading import grade
from flashsim.exercises.kernel_exercise import KernelExercise
from flashsim.exercises.lesson import Lesson
from flashsim.exercises.marks import Mark, Marks
from flashsim.exercises.shelf import get, kernel_names, names

__all__ = [
    "Exercise",
    "KernelExercise",
    "Lesson",
    "Mark",
    "Marks",
    "Question",
    "Task",
    "get",
    "grade",
    "kernel_names",
    "names",
]
