"""`KernelExercise`: an exercise that is solved by kernels in Triton or Pallas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flashsim.api.counting import count
from flashsim.counts.questions import by_operation, in_words
from flashsim.errors import OptionError, own_errors
from flashsim.exercises.exercise import Arrays, Task, gapped, headed, require_statement, solved
from flashsim.problem.problem import Problem

#: Bytes by operation and tensor.
Transfers = Mapping[tuple[str, str], int]


class KernelCase(NamedTuple):
    """One call of a solution: a task, and the kind of its inputs."""

    task: Task
    kind: str

    @property
    def title(self) -> str:
        """The case in words."""
        return f"{in_words(self.task.problem)}, {self.kind} inputs"


def attention_bytes(task: Task) -> dict[tuple[str, str], int]:
    """The bytes that FlashAttention-2 moves with the task's tiles, by `flashsim.count`."""
    direction = "backward" if "dQ" in task.outputs else "forward"
    counted = count(task.problem, tiling=task.tiling, direction=direction)
    return by_operation(counted.transfers)


@own_errors
@dataclass(frozen=True, eq=False)
class KernelExercise:
    """One exercise for kernels; its file assigns it to the name EXERCISE.

    Attributes
    ----------
    name : str
        Name on the command line.
    statement : str
        The assignment, in Markdown: the file's own docstring; its first line is the title.
    tasks : tuple of Task
        What the solution is called with, one after another: problems in float32. `Task.tiling` sets
        the bytes of full marks, and `Task.sram_bytes` what a program may hold by the estimate.
    reference : str
        The text of a file in Triton that gets every point. Students start from it without the lines
        from each ``# TODO`` to ``# END``.
    calls : tuple of str
        Names in a student's file, the first that exists is graded: a function, or a
        ``torch.autograd.Function``.
    given : tuple of str
        The arrays that it is called with, in order, (heads, n, d) each. A flag follows: whether
        attention is causal.
    hints : tuple of str
    path : str
        Where the file lies in a homework folder, such as "softmax_matmul/softmax_matmul.py".
    flag : bool
        Whether the function takes the flag.
    truth : function of (arrays, problem, dtype), optional
        The outputs by name, where it is not attention.
    budget : function of the task, optional
        Bytes of full marks, by operation and tensor. Default: those of attention.
    wrong : tuple of (find, put, words)
        Wrong solutions for ``flashsim exercise check``, as for `Exercise`.
    revealed, file
        As for `Exercise`.
    """

    name: str
    statement: str
    tasks: tuple[Task, ...]
    reference: str
    calls: tuple[str, ...]
    given: tuple[str, ...]
    hints: tuple[str, ...]
    path: str = ""
    flag: bool = True
    truth: Callable[[Arrays, Problem, str], Arrays] | None = None
    budget: Callable[[Task], Transfers] | None = None
    wrong: tuple[tuple[str, str, str], ...] = ()
    revealed: bool = True
    file: str = ""
    questions: tuple[()] = field(default=(), init=False)

    def __post_init__(self) -> None:
        require_statement(self.name, self.statement)
        if not self.tasks or not self.calls:
            raise OptionError(
                f"the exercise {self.name} needs tasks and calls, one of each or more; got "
                f"{len(self.tasks)} tasks and {len(self.calls)} calls"
            )

    @property
    def title(self) -> str:
        """The first line of the statement."""
        return self.statement.strip().splitlines()[0].rstrip(".")

    @property
    def cases(self) -> list[KernelCase]:
        """Every task with normal inputs; the first also with scores that rise along the keys.

        A backward pass has no running maximum, so rising scores would test nothing there.
        """
        rising = [] if "dO" in self.given else [KernelCase(self.tasks[0], "rising")]
        return [*rising, *(KernelCase(one, "normal") for one in self.tasks)]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Tensors that the kernels must store."""
        return self.tasks[0].outputs

    def arguments(self, arrays: Arrays) -> list[np.ndarray]:
        """The arrays of a call, with batch and heads on one axis."""
        return [np.ascontiguousarray(x.reshape(-1, *x.shape[2:])) for x in
                (arrays[name] for name in self.given)]  # fmt: skip

    @cached_property
    def full_marks(self) -> dict[tuple[str, str], int]:
        """Bytes of full marks over all cases, by operation and tensor."""
        budget = self.budget or attention_bytes
        found: dict[tuple[str, str], int] = {}
        for case in self.cases:
            for key, nbytes in budget(case.task).items():
                found[key] = found.get(key, 0) + nbytes
        return found

    @property
    def full_marks_bytes(self) -> int:
        """Bytes that get full marks, over all cases."""
        return sum(self.full_marks.values())

    @property
    def solution_source(self) -> str:
        """The reference as a student would write it."""
        return solved(self.reference).strip() + "\n"

    @property
    def skeleton(self) -> str:
        """The file that students start from, without its task."""
        return gapped(self.reference)

    @property
    def sizes(self) -> str:
        """The problems that the solution is called with, in one line."""
        return "; ".join(dict.fromkeys(in_words(one.problem) for one in self.tasks))

    @property
    def file_text(self) -> str:
        """The file that a student starts from."""
        tile = self.tasks[0].tiling
        about = (
            f"{self.statement.strip()}\n\nIt is called with {self.sizes}.\nFull marks: "
            f"{self.full_marks_bytes:,} B in all {len(self.cases)} calls, which tiles of "
            f"{tile.block_q} x {tile.block_k} move.\nA program may hold "
            f"{self.tasks[0].sram_bytes:,} B (an estimate from its values)."
        )
        return headed(self.name, about, self.skeleton)
