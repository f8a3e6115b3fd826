"""`Exercise` and `Task`: an exercise on the simulated machine, with inputs and outputs.

The file of an exercise also imports `Problem` and `Tiling` from here.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flashsim.api.simulate import OwnResult, global_names, simulate
from flashsim.engines.sandbox.program import Setting
from flashsim.errors import OptionError, own_errors
from flashsim.problem import checks, oracle
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling
from flashsim.trace.trace import Trace

#: Kinds of inputs: random, scores that rise or fall along the keys, or heavy-tailed scores. With
#: purely random scores, a row's running maximum hardly changes.
KINDS = ("normal", "rising", "falling", "heavy")
Arrays = Mapping[str, np.ndarray]


@own_errors
@dataclass(frozen=True)
class Task:
    """A solution's inputs, the outputs that it must store, and the sizes of the simulated machine.

    Attributes
    ----------
    problem : Problem
        The attention problem, in float32.
    tiling : Tiling
        The tile sizes; the solution reads them as ``machine.tiling``.
    sram_bytes : int
        On-chip memory in bytes.
    inputs : tuple of str
        Input tensors besides Q, K and V: "S" (the scaled scores), "O", "L", "dO", "delta".
    outputs : tuple of str
        Tensors that the solution must store.
    spread : float
        Rising and falling scores go from -spread to spread; heavy-tailed scores stay between.
    """

    problem: Problem
    tiling: Tiling
    sram_bytes: int
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("O",)
    spread: float = 50.0

    @property
    def device(self) -> Device:
        """The simulated device: an H100 whose thread blocks have `sram_bytes` of SRAM each."""
        name, size = "this exercise's machine", self.sram_bytes
        return replace(Device.get("H100"), name=name, sram_bytes=size, sram_per_sm=size)

    def arrays(self, kind: str = "normal", seed: int = 0) -> dict[str, np.ndarray]:
        """Return random Q, K, V and the other inputs in float32; `kind` is one of `KINDS`."""
        p = self.problem
        checks.one_of("kind of input", kind, KINDS)
        rng = np.random.default_rng([checks.seed(seed), KINDS.index(kind)])
        draw = rng.standard_normal
        q, dout = (draw((p.batch, p.heads, p.n_q, d)) for d in (p.head_dim, p.head_dim_v))
        k, v = (draw((p.batch, p.kv_heads, p.n_kv, d)) for d in (p.head_dim, p.head_dim_v))
        if kind == "heavy":
            for x in (q, k, v, dout):
                x[rng.random(x.shape) < 0.02] *= 8
            scores = q @ np.repeat(k, p.group, axis=1).mT * p.scale
            q *= min(1.0, self.spread / np.abs(scores).max())
        elif kind != "normal":
            ramp = np.linspace(-self.spread, self.spread, p.n_kv)
            along = np.full(p.head_dim, p.head_dim**-0.5)  # q.along is about 1
            q = 0.1 * q + along
            k = k + (ramp if kind == "rising" else -ramp)[:, None] * along / p.scale
        given = {"Q": q, "K": k, "V": v, "dO": dout}
        given = {name: x.astype(np.float32) for name, x in given.items()}
        return {**given, **self._derived(given)}

    def _derived(self, given: Arrays) -> dict[str, np.ndarray]:
        q, k, v = (given[name] for name in "QKV")
        wide = np.repeat(k.astype(np.float64), self.problem.group, axis=1)
        found = {"S": (q.astype(np.float64) @ wide.mT) * self.problem.scale}
        if {"O", "L", "delta"} & {*self.inputs}:
            found["O"], found["L"] = oracle.attention(q, k, v, self.problem)
            found["delta"] = (found["O"] * given["dO"]).sum(axis=-1)
        return {name: x.astype(np.float32) for name, x in found.items()}

    @property
    def setting(self) -> Setting:
        """The problem, tiling, device and tensors that recording and replaying a solution need."""
        return Setting(self.problem, self.tiling, self.device, self.inputs, self.outputs)

    def run(
        self, solution: Callable[..., None], arrays: Arrays, device: Device | None = None
    ) -> OwnResult:
        """Run a solution on these arrays and return its result; by default on the task's device."""
        p = self.problem
        if lacking := {"Q", "K", "V", *self.inputs} - {*arrays}:
            raise OptionError(
                f"arrays= lacks {', '.join(sorted(lacking))}; pass the inputs that Task.arrays() "
                "returns"
            )
        return simulate(
            *(solution, arrays["Q"], arrays["K"], arrays["V"]),
            inputs={name: arrays[name] for name in self.inputs},
            outputs=self.outputs,
            tiling=self.tiling,
            device=self.device if device is None else device,
            causal=p.causal,
            window=p.window,
            scale=p.scale,
        )


@own_errors
class Question(NamedTuple):
    """A number that students work out by hand; `answer` computes it from the reference's trace.

    `slips` returns known wrong answers from the same trace, as a dict from number to explanation.
    """

    ask: str
    answer: Callable[[Trace], int]
    slips: Callable[[Trace], Mapping[int, str]] = lambda trace: {}


@dataclass(frozen=True, eq=False, kw_only=True)
class Assignment:
    """The attributes that all kinds of exercises share.

    Attributes
    ----------
    name : str
        Name on the command line.
    statement : str
        The assignment, in Markdown: the file's docstring (``__doc__``), whose first line is the
        title.
    hints : tuple of str
        Hints in the order shown: the first tells little, the last nearly the full solution.
    wrong : tuple of (find, put, words)
        Wrong solutions for ``flashsim exercise check``: in the reference solution, `put` replaces
        `find`, and the grader's words must contain `words`.
    revealed : bool
        Whether ``flashsim exercise reveal`` may show the reference solution.
    file : str
        The path of a lecturer's own exercise; ``shelf.get`` sets it.
    """

    name: str
    statement: str
    hints: tuple[str, ...]
    wrong: tuple[tuple[str, str, str], ...] = ()
    revealed: bool = True
    file: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.statement, str) or not self.statement.strip():
            raise OptionError(
                f"the exercise {self.name} has no statement. The docstring of its file is its "
                "statement: write a docstring at the top of the file, and do not run python -OO "
                "(PYTHONOPTIMIZE=2), which removes docstrings"
            )

    @property
    def title(self) -> str:
        """The exercise's title: the first line of the statement."""
        return self.statement.strip().splitlines()[0].rstrip(".")


@own_errors
@dataclass(frozen=True, eq=False, kw_only=True)
class Exercise(Assignment):
    """One exercise on the simulated machine; its file assigns it to the name EXERCISE.

    Besides the attributes of `Assignment`:

    Attributes
    ----------
    reference : function of the machine
        A solution that gets every point. It may use no global names except `np`.
    truth : function of (arrays, problem, dtype)
        Returns the right outputs by name, in NumPy of that dtype. The grader compares with
        "float64"; the error of "float32" sets the tolerance.
    skeleton : str, optional
        The student's function ``solution``, to be completed. Default: the reference, in which each
        line ``# TODO: ...`` replaces the lines from it to ``# END``, and the lines from
        ``# LEFT OUT`` to ``# END`` are removed. For questions, the default is ANSWERS with zeros.
    terms : function of (arrays, problem), optional
        Returns, for each output, the sum of its terms' absolute values in float64; rounding errors
        are relative to this sum. Default: the output itself.
    budget : function of the task, optional
        Returns the most bytes that get full marks. Default: the reference's bytes.
    at_most : tuple of (op, tensor)
        Transfers that may move no more bytes than in the reference. More bytes, even if the total
        is small, cost at least half of the points for bytes.
    demand : function of a trace, optional
        A further condition: returns an explanation if a solution violates it, else "".
    mistakes : mapping of str to function
        Explanations of common mistakes, each with a function like `truth` that returns the
        mistake's outputs.
    questions : tuple of Question
        Questions that the student answers in a dict ANSWERS, instead of programming.
    bound : function of the task, optional
        Returns a lower bound on the bytes of any solution; the picture shows it.
    """

    task: Task
    reference: Callable[..., None]
    truth: Callable[[Arrays, Problem, str], Arrays]
    skeleton: str = ""
    terms: Callable[[Arrays, Problem], Arrays] | None = None
    budget: Callable[[Task], int] | None = None
    at_most: tuple[tuple[str, str], ...] = ()
    demand: Callable[[Trace], str] | None = None
    mistakes: Mapping[str, Callable[[Arrays, Problem, str], Arrays]] = field(default_factory=dict)
    questions: tuple[Question, ...] = ()
    bound: Callable[[Task], int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.skeleton:
            object.__setattr__(self, "skeleton", self._skeleton())

    @cached_property
    def executed(self) -> OwnResult:
        """The result of running the reference solution on normally distributed inputs."""
        return self.task.run(self.reference, self.task.arrays())

    @property
    def full_marks_bytes(self) -> int:
        """The largest number of bytes that gets full marks."""
        return self.budget(self.task) if self.budget else self.executed.trace.bytes()

    @cached_property
    def solution_source(self) -> str:
        """The reference solution's source code, as a student would write it."""
        if self.questions:
            answers = [q.answer(self.executed.trace) for q in self.questions]
            lines = (f"    {q.ask!r}: {n},\n" for q, n in zip(self.questions, answers, strict=True))
            return f"ANSWERS = {{\n{''.join(lines)}}}\n"
        return solved(self._marked)

    @property
    def _marked(self) -> str:
        """The reference's source, named ``solution``, with the comments TODO, LEFT OUT and END."""
        text = textwrap.dedent(inspect.getsource(self.reference))
        name, imports = self.reference.__name__, "\n".join(_imports(self.reference))
        return f"{imports}\n\n\n{text.replace(f'def {name}(', 'def solution(', 1)}"

    def _skeleton(self) -> str:
        if self.questions:
            zeros = "".join(f'    "{q.ask}": 0,\n' for q in self.questions)
            return f"ANSWERS = {{\n{zeros}}}\n"
        return gapped(re.sub(r'^    """.*?"""\n', "", self._marked, count=1, flags=re.M | re.S))

    @property
    def sizes(self) -> str:
        """The sizes of the problem and its tiles, as one line of text."""
        p, t = self.task.problem, self.task.tiling
        heads = f"{p.heads} query heads, {p.kv_heads} KV heads, " if p.heads > 1 else ""
        return (
            f"{heads}{p.n_q} queries, {p.n_kv} keys, head_dim {p.head_dim}, {p.dtype}"
            f"{', causal' if p.causal else ''}; tiles of {t.block_q} × {t.block_k}"
        )

    @property
    def file_text(self) -> str:
        """The file that a student starts from: the statement as a comment, and the skeleton."""
        about = f"{self.statement.strip()}\n\n{self.sizes}."
        if not self.questions:
            about += (
                f"\nOn-chip memory: {self.task.sram_bytes:,} B. Full marks: at most "
                f"{self.full_marks_bytes:,} B moved."
            )
        return headed(self.name, about, self.skeleton)


def solved(marked: str) -> str:
    """Return a reference's source code without the comments TODO, LEFT OUT and END."""
    return re.sub(r"^ *# (TODO.*|LEFT OUT|END)\n", "", marked, flags=re.M)


def gapped(marked: str) -> str:
    """Return a reference's source code as a skeleton for students.

    The lines between "# TODO ..." and "# END" are removed, but the TODO comment stays. The lines
    from "# LEFT OUT" to "# END" are removed.
    """
    text = re.sub(r"^( *)# LEFT OUT\n.*?^\1# END\n", "", marked, flags=re.M | re.S)
    text = re.sub(r"^( *)(# TODO.*\n)(?s:.*?)^\1# END\n", r"\1\2", text, flags=re.M)
    # A block without any other statement needs a `pass`.
    return re.sub(r"(:(?:  #.*)?\n *)(# TODO.*\n)", r"\1pass  \2", text)


def headed(name: str, about: str, skeleton: str) -> str:
    """Return the text of a file that a student completes; its first line names the exercise."""
    comment = textwrap.indent(about, "# ", lambda line: True)
    lines = "\n".join(line.rstrip() for line in comment.splitlines())
    return f"# flashsim exercise: {name}\n#\n{lines}\n\n{skeleton.strip()}\n"


def _imports(function: Callable[..., None]) -> list[str]:
    """Return the lines that import NumPy and the other names that a function uses."""
    found, used = ["import numpy as np"], global_names(function.__code__)
    for node in ast.parse("".join(inspect.findsource(function)[0])).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound = [one.asname or one.name.split(".")[0] for one in node.names]
            node.names = [one for one, name in zip(node.names, bound, strict=True) if name in used]
            if node.names and ast.unparse(node) not in found:
                found.append(ast.unparse(node))
    return found
