"""Programming exercises, graded by results, on-chip memory and the bytes that a solution moves.

Students use three commands: ``flashsim exercise list``, ``flashsim exercise start NAME``, which
writes a skeleton to complete, and ``flashsim exercise grade FILE``. Each exercise is one file with
a statement, a skeleton, hints, a reference solution and a grader. The folders `course` and
`kernels` hold the bundled exercises. A lecturer's own exercise is named by the path of its file.
See docs/guides/course.md.
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
