"""`KernelExercise`: an exercise that asks for kernels in Triton or Pallas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flashsim.api.counting import count
from flashsim.counts.questions import by_operation, in_words
from flashsim.errors import OptionError, own_errors
from flashsim.exercises.exercise import Arrays, Assignment, Task, gapped, headed, solved
from flashsim.problem.problem import Problem

#: Bytes by operation and tensor.
Transfers = Mapping[tuple[str, str], int]


class KernelCase(NamedTuple):
    """One graded call of a solution: a `Task`, and the kind of its inputs."""

    task: Task
    kind: str

    @property
    def title(self) -> str:
        """The call's problem and kind of inputs, as text."""
        return f"{in_words(self.task.problem)}, {self.kind} inputs"


def attention_bytes(task: Task) -> dict[tuple[str, str], int]:
    """Count the bytes that FlashAttention-2 moves with a task's tiles, by operation and tensor."""
    direction = "backward" if "dQ" in task.outputs else "forward"
    counted = count(task.problem, tiling=task.tiling, direction=direction)
    return by_operation(counted.transfers)


@own_errors
@dataclass(frozen=True, eq=False, kw_only=True)
class KernelExercise(Assignment):
    """An exercise that asks for kernels; its file assigns it to the name EXERCISE.

    Besides the attributes of `Assignment`:

    Attributes
    ----------
    tasks : tuple of Task
        The problems that the solution is called with, in float32. `Task.tiling` determines the
        bytes for full marks. `Task.sram_bytes` limits the estimated on-chip memory of a program.
    reference : str
        The text of a Triton file that gets every point. Students start from it without the lines
        from each ``# TODO`` to ``# END``.
    calls : tuple of str
        Possible names of the graded function or ``torch.autograd.Function`` in a student's file;
        the first one that exists is graded.
    given : tuple of str
        The arrays that the function is called with, in order, each (heads, n, d). The last argument
        is a flag: whether attention is causal.
    path : str
        The file's path in a homework folder, such as "softmax_matmul/softmax_matmul.py".
    flag : bool
        Whether the function takes the causal flag.
    truth : function of (arrays, problem, dtype), optional
        Returns the right outputs by name; needed for exercises that do not compute attention.
    budget : function of the task, optional
        Returns the most bytes that get full marks, by operation and tensor. Default:
        FlashAttention-2's.
    """

    tasks: tuple[Task, ...]
    reference: str
    calls: tuple[str, ...]
    given: tuple[str, ...]
    path: str = ""
    flag: bool = True
    truth: Callable[[Arrays, Problem, str], Arrays] | None = None
    budget: Callable[[Task], Transfers] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks or not self.calls:
            raise OptionError(
                f"the exercise {self.name} needs at least one task in `tasks` and one name in "
                f"`calls`, got {len(self.tasks)} tasks and {len(self.calls)} names"
            )

    @property
    def cases(self) -> list[KernelCase]:
        """The graded calls: all tasks with normal inputs, plus the first task with rising scores.

        Backward passes have no rising scores, which test the running maximum.
        """
        rising = [] if "dO" in self.given else [KernelCase(self.tasks[0], "rising")]
        return [*rising, *(KernelCase(one, "normal") for one in self.tasks)]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The output tensors that the kernels must store."""
        return self.tasks[0].outputs

    def arguments(self, arrays: Arrays) -> list[np.ndarray]:
        """Return the arguments of a graded call: arrays whose first axis joins batch and heads."""
        return [np.ascontiguousarray(x.reshape(-1, *x.shape[2:])) for x in
                (arrays[name] for name in self.given)]  # fmt: skip

    @cached_property
    def full_marks(self) -> dict[tuple[str, str], int]:
        """The bytes for full marks by operation and tensor, summed over all graded calls."""
        found: Counter[tuple[str, str]] = Counter()
        for case in self.cases:
            found.update((self.budget or attention_bytes)(case.task))
        return dict(found)

    @property
    def full_marks_bytes(self) -> int:
        """The largest number of bytes that gets full marks, summed over all graded calls."""
        return sum(self.full_marks.values())

    @property
    def solution_source(self) -> str:
        """The reference solution's source code, as a student would write it."""
        return solved(self.reference).strip() + "\n"

    @property
    def skeleton(self) -> str:
        """The code of the file that students start from, without the comment at its top."""
        return gapped(self.reference)

    @property
    def sizes(self) -> str:
        """The problems on which a solution runs, as one line of text."""
        return "; ".join(dict.fromkeys(in_words(one.problem) for one in self.tasks))

    @property
    def file_text(self) -> str:
        """The text of the file that a student starts from."""
        tile = self.tasks[0].tiling
        about = (
            f"{self.statement.strip()}\n\nIt is called with {self.sizes}.\nFull marks: at most "
            f"{self.full_marks_bytes:,} B in all {len(self.cases)} calls, which is what tiles of "
            f"{tile.block_q} x {tile.block_k} move.\nA program may hold at most "
            f"{self.tasks[0].sram_bytes:,} B on chip (estimated from its values)."
        )
        return headed(self.name, about, self.skeleton)
