"""`trace` launches one Triton kernel and traces it; `watch` traces all launches of a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from flashsim.errors import DTypeError, OptionError, TraceError, own_errors, shown
from flashsim.own_kernels import KernelTrace
from flashsim.own_kernels.check import Reference, Verdict
from flashsim.own_kernels.record import KernelRecord, float64
from flashsim.own_kernels.steps import Look
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.names import LOAD
from flashsim.triton.arguments import layout_of
from flashsim.triton.machine import Interpreter


class Watch:
    """The kernel launches that `watch` recorded; `result()` returns the trace."""

    def __init__(
        self, machine: Interpreter, options: Mapping[str, Any], check: bool | Reference
    ) -> None:
        self._machine, self._options, self._check = machine, dict(options), check

    @property
    def launches(self) -> int:
        """Return the number of kernel launches recorded so far."""
        return len(self._machine.recorder.launches)

    def result(self, *, unchecked: bool = False) -> KernelTrace:
        """Return the trace of all kernel launches so far; `unchecked` skips the check of results.

        Raises
        ------
        TraceError
            If no kernel was launched.
        OptionError
            If there is a `config`, and no kernel is autotuned.
        """
        record = self.record()
        if self._machine.config is not None and record.launches and not self._machine.tuned:
            kernels = ", ".join(dict.fromkeys(one.kernel for one in record.launches))
            raise OptionError(
                f"config={shown(self._machine.config)} chooses a configuration of an autotuned "
                f"kernel, but {kernels} has no @triton.autotune; leave it out"
            )
        again = self._again if self._machine.ran else None
        made = KernelTrace(record, **self._options, values=self.values(), again=again)
        pointers = self._machine.arguments.pointers
        made.outputs = {made.tensors[code]: pointers[code].array for code in record.stored}
        if self._check and not unchecked:
            made.check(self._check if callable(self._check) else None)
        return made

    def _again(self, verdict: Verdict, look: Look) -> None:
        machine = self._machine

        def watched(op: int, code: int, offsets: np.ndarray) -> None:
            look(op, code, offsets, machine.variables)

        machine.again(machine.ran[verdict.launch], verdict.program, watched)

    def record(self) -> KernelRecord:
        """Return the record of all launches so far."""
        return self._machine.recorder.done()

    def values(self) -> list[np.ndarray]:
        """Return copies of all tensors' current values, in the order of their codes."""
        return [one.values().copy() for one in self._machine.arguments.pointers]

    def computed_outside(self, given: Iterable[Any]) -> list[str]:
        """Return the names of tensors with numbers that neither a kernel stored nor `given` holds.

        A tensor counts if it holds floats that kernels load, and not the same number everywhere.
        The block of `watch` must have `check`, which keeps the memory from before each launch.
        """
        a = self.record().accesses
        known = [layout_of("given", one) for one in given]
        before, names = self._before(), []
        for one in self._machine.arguments.pointers:
            ops = a["op"][(a["tensor"] == one.code) & (a["active"] > 0)]
            if not len(ops) or ops[0] != LOAD or "float" not in one.tensor.dtype:
                continue
            if any(its.memory <= one.begin < its.memory + its.size for its in known):
                continue
            numbers = float64(one.values(before[one.memory]))
            if np.unique(numbers[~np.isnan(numbers)]).size > 1:
                names.append(one.tensor.name)
        return names

    def changed_outside(self, given: Any, original: np.ndarray) -> bool:
        """Return True if an array was not `original` before the first launch that got it.

        The block of `watch` must have `check`.
        """
        held = self._before().get(layout_of("given", given).memory)
        return held is not None and held.tobytes() != original.tobytes()

    def _before(self) -> dict[int, np.ndarray]:
        """Return each allocation's bytes from before the first launch that got it, by address."""
        found: dict[int, np.ndarray] = {}
        for ran in self._machine.ran:
            found = {**ran.before, **found}
        return found

    def codes_of(self, array: Any) -> list[int]:
        """Return the codes of all tensors and views that start at an array's first element."""
        own = array.data_ptr() if hasattr(array, "data_ptr") else np.asarray(array).ctypes.data
        return [one.code for one in self._machine.arguments.pointers if one.begin == own]


@contextmanager
@own_errors
def watch(
    *,
    names: Mapping[str, str] | None = None,
    problem: Problem | None = None,
    device: str | Device = "H100",
    name: str | None = None,
    config: int | Mapping[str, Any] | None = None,
    programs: Sequence[tuple[int, ...]] | None = None,
    check: bool | Reference = False,
) -> Iterator[Watch]:
    """Run every Triton kernel that the ``with`` block launches on the CPU, and record it.

    Parameters
    ----------
    names : mapping of str to str, optional
        The papers' names of tensors, by kernel parameter: ``{"a_ptr": "K"}``. Usual parameter names
        (`q_ptr`, `out`, `lse`) are recognized.
    problem : Problem, optional
        The attention problem that the kernels compute. Default: derived from the tensors' shapes
        and the kernels' arguments.
    device : str or Device
        The GPU whose on-chip memory and bandwidth the results are compared with.
    name : str, optional
        The name in tables and pictures. Default: the kernels' names.
    config : int or mapping, optional
        The configuration of autotuned kernels: its index, or keyword arguments that it must have.
    programs : sequence of tuple of int, optional
        Run only the programs with these grid coordinates.
    check : bool or function
        Compare the stored tensors with attention in float64, or with a reference function: it takes
        the loaded arrays by label, and returns the arrays that should be stored. See
        `KernelTrace.check`.
    """
    machine = Interpreter(config, programs, keep=bool(check))
    options = {"names": names, "problem": problem, "device": device, "name": name}
    with machine.entered():
        yield Watch(machine, options, check)


@own_errors
def trace(
    kernel: Any,
    grid: Any,
    *args: Any,
    names: Mapping[str, str] | None = None,
    problem: Problem | None = None,
    device: str | Device = "H100",
    name: str | None = None,
    config: int | Mapping[str, Any] | None = None,
    programs: Sequence[tuple[int, ...]] | None = None,
    check: bool | Reference = False,
    **meta: Any,
) -> KernelTrace:
    """Launch a Triton kernel on the CPU and return the trace of its accesses.

    Parameters
    ----------
    kernel : a `@triton.jit` function, also autotuned or with heuristics
    grid : tuple of int, or function of the arguments
    *args, **meta
        The kernel's arguments. Arrays may be NumPy arrays, torch tensors on the CPU, or JAX arrays.
        A JAX array cannot be written to; results are in `KernelTrace.outputs`.
    names, problem, device, name, config, programs, check
        As for `watch`.

    Raises
    ------
    BackendUnavailable
        If Triton is missing.
    FlashSimError
        If an argument is wrong, or if the kernel fails; the error names the kernel's line.
    """
    if not hasattr(kernel, "run") or not hasattr(kernel, "fn"):
        raise DTypeError(
            f"trace takes a kernel (a function decorated with @triton.jit), got {shown(kernel)}"
        )
    options = {"names": names, "problem": problem, "device": device, "name": name}
    with watch(**options, config=config, programs=programs, check=check) as seen:  # type: ignore[arg-type]
        kernel[grid](*args, **meta)
    if not seen.launches:
        raise TraceError(
            f"{shown(kernel)} launched no Triton kernel; pass a function decorated with "
            "@triton.jit, or a function that launches one"
        )
    return seen.result()
