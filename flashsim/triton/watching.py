"""`trace` one launch, or `watch` a program's own launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flashsim.errors import DTypeError, TraceError, own_errors, shown
from flashsim.own_kernels import KernelTrace
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.triton.machine import Machine


class Watch:
    """The launches seen by `watch`; `result()` is their trace."""

    def __init__(self, machine: Machine, options: Mapping[str, Any]) -> None:
        self._machine, self._options = machine, dict(options)

    @property
    def launches(self) -> int:
        """Number of launches so far."""
        return len(self._machine.recorder.launches)

    def result(self) -> KernelTrace:
        """Return the trace of all launches so far.

        Raises
        ------
        TraceError
            If there was none.
        """
        record = self._machine.recorder.done()
        made = KernelTrace(record, **self._options)
        stored = self._machine.outputs(list(record.stored))
        made.outputs = {made.geometry.labels[code]: array for code, array in stored.items()}
        made.values = self._machine.numbers
        return made


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
) -> Iterator[Watch]:
    """Execute on the CPU, and note, every Triton kernel that is launched inside the block.

    Parameters
    ----------
    names : mapping of str to str, optional
        The papers' names of tensors, by the kernels' parameters: ``{"a_ptr": "K"}``. Usual ones
        (`q_ptr`, `out`, `lse`) are known.
    problem : Problem, optional
        The attention that the kernels compute. Default: as shapes and arguments say.
    device : str or Device
        For capacities and predictions.
    name : str, optional
        The name in tables and pictures. Default: the kernels' names.
    config : int or mapping, optional
        The configuration of autotuned kernels: its number, or values that choose it.
    programs : sequence of tuple of int, optional
        Run these programs only, by their place in the grid.
    """
    machine = Machine(config, programs)
    options = {"names": names, "problem": problem, "device": device, "name": name}
    with machine.entered():
        yield Watch(machine, options)


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
    **meta: Any,
) -> KernelTrace:
    """Launch a Triton kernel on the CPU and return what it did.

    Parameters
    ----------
    kernel : a `@triton.jit` function, also autotuned or with heuristics
    grid : tuple of int, or function of the arguments
    *args, **meta
        The kernel's arguments. Arrays are NumPy's, torch's on the CPU, or JAX's. JAX's cannot be
        written to: what a kernel stores is in `KernelTrace.outputs`.
    names, problem, device, name, config, programs
        As for `watch`.

    Raises
    ------
    BackendUnavailable
        If Triton is missing.
    FlashSimError
        For arguments that are wrong, and for errors inside the kernel, which name its line.
    """
    if not hasattr(kernel, "run") or not hasattr(kernel, "fn"):
        raise DTypeError(
            f"trace takes a kernel, a function decorated with @triton.jit, got {shown(kernel)}"
        )
    options = {"names": names, "problem": problem, "device": device, "name": name}
    with watch(**options, config=config, programs=programs) as seen:  # type: ignore[arg-type]
        kernel[grid](*args, **meta)
    if not seen.launches:
        raise TraceError(f"{shown(kernel)} launched nothing")
    return seen.result()
