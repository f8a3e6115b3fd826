"""Grade a file of kernels: results, safety on a GPU, on-chip memory and bytes moved.

The user's file runs in a separate process (`kernel_runner`), which returns the file's results and a
record of the kernels' accesses. The grading process draws the inputs and computes the right
results, and never runs the file.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flashsim.errors import FlashSimError, TraceError
from flashsim.exercises import kernel_runner, words
from flashsim.exercises.exercise import Arrays
from flashsim.exercises.kernel_exercise import KernelCase, KernelExercise
from flashsim.exercises.kernel_runner import KernelOrder
from flashsim.exercises.marks import Mark, Marks, Refused, beside, bytes_mark, room_mark
from flashsim.exercises.runner import Handover, ask
from flashsim.own_kernels import KernelTrace
from flashsim.own_kernels.record_file import unpacked
from flashsim.schedule.names import LOAD
from flashsim.trace.trace import Trace

#: Points for results, safety on a GPU, on-chip memory, and bytes moved.
RESULTS, SAFE, ROOM, BYTES = 40, 10, 10, 40
#: Seconds that a file may take, and MiB beyond the memory of torch, Triton and JAX themselves.
LIMIT, MEMORY = 120.0, 4096
#: Kinds of findings that are errors on a GPU.
_UNSAFE = ("outside", "next head", "two stores", "race", "never stored")
_MOST = 1 << 28


@dataclass(frozen=True, eq=False)
class _Run:
    """A graded call that has run: its inputs, and the trace of its kernels."""

    case: KernelCase
    arrays: Arrays
    traced: KernelTrace


def grade_kernels(
    path: Path,
    exercise: KernelExercise,
    *,
    root: Path | None = None,
    limit: float | None = None,
    memory: int | None = None,
    runner: Callable[[KernelOrder], Handover] | None = None,
) -> tuple[Marks, Trace | None]:
    """Grade a file of kernels; return its marks, and the trace of its last graded call.

    The file may import modules from its own folder and from the folder `root`.
    """
    began = time.perf_counter()
    cases = exercise.cases
    drawn = [case.task.arrays(case.kind, secrets.randbits(32)) for case in cases]
    calls = tuple(
        (exercise.arguments(arrays), case.task.problem.causal if exercise.flag else None)
        for case, arrays in zip(cases, drawn, strict=True)
    )
    folder = path.resolve().parent
    order = KernelOrder(
        str(path.resolve()),
        str(folder if root is None else root.resolve()),
        exercise.calls,
        exercise.given,
        exercise.outputs,
        calls,
        LIMIT if limit is None else limit,
        MEMORY if memory is None else memory,
    )
    kind, said, data, _ = (runner or handed)(order)
    try:
        if kind:
            raise Refused(kind, said)
        marks, figures, moved, trace = _judged(exercise, cases, drawn, data)
    except (Refused, FlashSimError) as error:
        marks = (Mark("runs", 0, 100, getattr(error, "kind", "record"), str(error)),)
        figures, moved, trace = {}, (), None
    marks = words.with_todo(marks, path.read_text("utf-8", "replace"), exercise.skeleton)
    hint = f"flashsim exercise hint {exercise.file or exercise.name}"
    seconds = time.perf_counter() - began
    return Marks(exercise.name, marks, figures, moved, seconds, hint), trace


def handed(order: KernelOrder) -> Handover:
    """Run a file in a separate process, with the calls and limits of a `KernelOrder`."""
    return ask(kernel_runner.__name__, order, _MOST, line=_MOST)  # tests may say much


def _judged(
    exercise: KernelExercise, cases: Sequence[KernelCase], drawn: Sequence[Arrays], data: bytes
) -> tuple[tuple[Mark, ...], dict[str, int], tuple[tuple[str, str, int, int], ...], Trace]:
    runs, recorded = [], unpacked(data, _MOST)
    if len(recorded) != len(cases):
        raise TraceError(
            f"the grader called the submission {len(cases)} times, but {len(recorded)} calls were "
            "recorded"
        )
    for case, arrays, one in zip(cases, drawn, recorded, strict=True):
        values = list(one.values)
        p = case.task.problem  # in the arrays, the batch entries are additional heads
        p = replace(p, batch=1, heads=p.batch * p.heads, kv_heads=p.batch * p.kv_heads)
        traced = KernelTrace(one.record, names=one.names, problem=p, values=values)
        for name, array in zip(exercise.given, exercise.arguments(arrays), strict=True):
            if name in traced.tensors:  # the inputs drawn here, not those that the process returned
                code = traced.tensors.index(name)
                values[code] = array.reshape(values[code].shape)
        traced.values = tuple(values)
        runs.append(_Run(case, arrays, traced))
    marks, each = [], RESULTS // len(runs)
    for n, run_ in enumerate(runs):
        most = each + (n < RESULTS % len(runs))
        why = _unread(exercise, run_) or _wrong(exercise, run_)
        name = f"results, {_short(run_.case)}"
        marks.append(Mark(name, 0, most, "result", why) if why else Mark(name, most, most))
    wrong = [mark for mark in marks if mark.kind]
    mine: Counter[tuple[str, str]] = Counter()
    for run_ in runs:
        for row in run_.traced.byte_rows:
            mine[row.op, row.tensor] += row.nbytes
    moved = beside(mine, exercise.full_marks)
    peak = max(run_.traced.trace.peak_sram() for run_ in runs)
    most, all_wrong = exercise.tasks[0].sram_bytes, len(wrong) == len(runs)
    overflow = f"a program holds about {peak:,} B at once, but {most:,} B fit: use smaller tiles"
    overflow = overflow if peak > most else ""
    marks += [_safe(runs), room_mark(ROOM, all_wrong=all_wrong, overflow=overflow)]
    marks.append(_bytes(exercise, runs, moved, right=not wrong))
    figures = {
        "bytes": sum(one.traced.bytes() for one in runs),
        "budget": exercise.full_marks_bytes,
        "peak": peak,
        "sram": most,
    }
    return tuple(marks), figures, moved, runs[-1].traced.trace


def _short(case: KernelCase) -> str:
    p = case.task.problem
    if case.kind != "normal":
        return case.kind
    sizes = str(p.n_q) if p.n_q == p.n_kv else f"{p.n_q} x {p.n_kv}"
    return sizes + ", causal" * p.causal


def _unread(exercise: KernelExercise, one: _Run) -> str:
    """Return a text about an input or output that no kernel uses, or "" if all are used."""
    traced = one.traced
    a, stored = traced.record.accesses, [traced.tensors[code] for code in traced.record.stored]
    for name in exercise.outputs:
        if name not in stored:
            return f"no kernel stores {name}"
    needed = [
        n for n in exercise.given if n not in ("O", "L") or exercise.full_marks.get(("load", n))
    ]
    loads = a["tensor"][(a["op"] == LOAD) & (a["active"] > 0)]
    for name in needed:
        if name not in traced.tensors or traced.tensors.index(name) not in loads:
            return (
                f"no kernel loads {name} itself; pass {name} to a kernel, and do not compute on it "
                "outside of the kernels"
            )
    return ""


def _wrong(exercise: KernelExercise, one: _Run) -> str:
    """Return why the results are wrong, or "" if they are right."""
    truth, traced = exercise.truth, one.traced

    def reference(_: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert truth is not None
        found = truth(one.arrays, one.case.task.problem, "float64")
        shape = {name: traced.values[traced.tensors.index(name)].shape for name in found}
        return {name: x.reshape(shape[name]) for name, x in found.items()}

    verdict = traced.check(None if truth is None else reference)
    missing = [name for name in exercise.outputs if name not in {x.tensor for x in verdict.outputs}]
    if missing:
        return f"{' and '.join(missing)} cannot be compared; check that its shape is the task's"
    if verdict.right:
        return ""
    lines = [line for line in str(verdict).splitlines() if " (error " not in line]
    others = [x.tensor for x in verdict.outputs if x.right]
    right = f"; {' and '.join(others)} {'are' if len(others) > 1 else 'is'} right" if others else ""
    return f"{one.case.title}: {'; '.join(lines)}{right}"


def _safe(runs: Sequence[_Run]) -> Mark:
    name = "safe on a GPU"
    refused = [note for one in runs for note in one.traced.record.refusals]
    if refused:
        return Mark(name, 0, SAFE, "compile", "\n".join([*dict.fromkeys(refused)][:3]))
    unsafe = [x for one in runs for x in one.traced.findings if x.kind in _UNSAFE]
    if not unsafe:
        return Mark(name, SAFE, SAFE)
    said = [*dict.fromkeys(map(str, unsafe))]
    return Mark(name, 0, SAFE, unsafe[0].kind.replace(" ", "-"), "\n".join(said[:3]))


def _bytes(
    exercise: KernelExercise,
    runs: Sequence[_Run],
    moved: Sequence[tuple[str, str, int, int]],
    *,
    right: bool,
) -> Mark:
    why: dict[tuple[str, str], str] = {}
    for one in runs:
        for row in one.traced.byte_rows:
            if row.why:
                why.setdefault((row.op, row.tensor), f": {row.why}")
    lines = [
        f"{op} {tensor}: {mine:,} B; {theirs:,} B is enough{why.get((op, tensor), '')}"
        for op, tensor, mine, theirs in sorted(moved, key=lambda row: row[3] - row[2])
        if mine > theirs
    ]
    tile, ours = runs[-1].traced.tiling, exercise.tasks[0].tiling
    if (tile.block_q, tile.block_k) != (ours.block_q, ours.block_k):
        lines.append(f"your tiles are {tile}; the bytes for full marks assume tiles of {ours}")
    total, budget = sum(row[2] for row in moved), exercise.full_marks_bytes
    return bytes_mark(BYTES, total, budget, right=right, more=lines)
