"""`trace`: record the loads and stores of a Numba-CUDA kernel, thread block by thread block."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashsim.cuda.simulator import SECTOR, WARP, BlockAccess, BlockWatch, run_watched
from flashsim.errors import OptionError, own_errors
from flashsim.own_kernels import ATOMIC, LOAD, STORE, KernelTrace, Recorder
from flashsim.own_kernels.names import labels
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem

OPERATIONS = {"load": LOAD, "store": STORE, "reduce": ATOMIC}
MOST_THREADS = 1024


@own_errors
def trace(
    kernel: Any,
    *args: Any,
    names: Mapping[str, str] | None = None,
    problem: Problem | None = None,
    device: str | Device = "H100",
    name: str | None = None,
) -> KernelTrace:
    """Return a trace of the loads and stores of a kernel's thread blocks in global memory.

    The kernel runs in Numba's CUDA simulator, thread by thread, and writes its results to the
    arguments. In the trace, one event has all accesses of a thread block from one source line
    between two barriers. Accesses to shared and local memory move no HBM bytes; shared arrays
    appear as the trace's on-chip values. A load past the end of an array returns 0, and a store
    past the end has no effect; the trace marks both.

    Parameters
    ----------
    kernel : kernel of numba.cuda.jit
        The kernel with its launch: ``flashsim.cuda.trace(kernel[grid, block], q, k, v, o)``.
    *args
        The kernel's arguments: NumPy arrays, arrays of `numba.cuda.to_device`, and numbers.
    names : mapping of str to str, optional
        The papers' names of the kernel's parameters. Common names such as `q`, `K`, `out` and `lse`
        need no entry.
    problem : Problem, optional
        The attention problem. Default: inferred from the shapes and the arguments.
    device : str or Device
        The device whose roofline, L2 and on-chip memory the trace is compared with.
    name : str, optional
        The name in tables and pictures. Default: the kernel's name.

    Raises
    ------
    BackendUnavailable
        If Numba was imported without its simulator.
    UnsupportedError
        If the kernel uses a feature that the simulator lacks. The message names the line.
    """
    block = getattr(kernel, "block_dim", None)
    if block is not None and math.prod(block) > MOST_THREADS:
        raise OptionError(
            f"a thread block of shape {tuple(block)} has {math.prod(block):,} threads, but a "
            f"GPU's limit is {MOST_THREADS:,}: use a smaller block"
        )
    watch, arrays = run_watched(kernel, args)
    function = kernel.fn
    parameters = list(inspect.signature(function).parameters)
    recorder = Recorder(f"numba {_version(kernel)}, CUDA simulator")
    codes: list[int] = []
    for parameter, array in zip(parameters, arrays, strict=False):
        if array is not None:
            codes.append(_tensor(recorder, parameter, array, codes))
    held = [(p, a) for p, a in zip(parameters, arrays, strict=False) if a is not None]
    recorder.launch(
        function.__name__,
        kernel.grid_dim,
        arguments={p: code for (p, _), code in zip(held, codes, strict=True)},
        constants={
            p: arg for p, arg, a in zip(parameters, args, arrays, strict=False) if a is None
        },
        file=function.__code__.co_filename,
        line=function.__code__.co_firstlineno,
    )
    recorder.held(
        {
            f"shared line {line}": (array.shape, array.nbytes)
            for (_, line), array in watch.shared.items()
        }
    )
    _note(recorder, watch, codes, [p for p, _ in held])
    record = recorder.done()
    found = labels([tensor.name for tensor in record.tensors], names)
    values = dict(zip(codes, (array for _, array in held), strict=True))
    return KernelTrace(
        record,
        names=names,
        problem=problem,
        device=device,
        name=name,
        outputs={found[code]: values[code].copy() for code in record.stored},
        values=[values[code].copy() for code in range(len(found))],
    )


def _version(kernel: Any) -> str:
    package = __import__(type(kernel).__module__.partition(".")[0])
    return str(getattr(package, "__version__", ""))


def _tensor(recorder: Recorder, name: str, array: np.ndarray, before: Sequence[int]) -> int:
    """Register an array argument as a tensor; views of one array share the array's buffer."""
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    start = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    strides = [step // array.itemsize for step in array.strides]
    return recorder.tensor(
        *(name, array.shape, strides, array.dtype.name, array.itemsize),
        buffer=id(whole),
        start=start,
        unlike=before,
    )


def _note(
    recorder: Recorder, watch: BlockWatch, codes: Sequence[int], names: Sequence[str]
) -> None:
    """Pass a launch's accesses to the recorder, in the order in which a GPU launches the blocks."""
    scattered: dict[tuple[str, int, str], list[BlockAccess]] = {}
    for block in sorted(watch.accesses, key=lambda block: block[::-1]):
        recorder.program(block)
        for access in watch.accesses[block]:
            line = (access.file, access.line)
            recorder.access(
                OPERATIONS[access.kind],
                codes[access.tensor],
                access.offsets,
                outside=access.outside,
                # L1 caches the elements that a block loaded before. Every store reaches L2.
                sectors=None if access.kind == "load" else access.sectors,
                line=line,
            )
            key = (*line, names[access.tensor])
            scattered.setdefault(key, []).append(access)
    for (file, number, tensor), accesses in scattered.items():
        requests = sum(one.requests for one in accesses)
        sectors = sum(one.sectors for one in accesses)
        lanes = sum(one.offsets.size for one in accesses)
        itemsize = watch.itemsizes[accesses[0].tensor]
        most = -(-min(lanes // max(requests, 1), WARP) * itemsize // SECTOR)
        if requests and sectors > 2 * most * requests:
            recorder.note(
                f"line {number} of {file}: a warp's {accesses[0].kind} of {tensor} touches "
                f"{sectors / requests:.1f} sectors of {SECTOR} bytes, but its elements would fit "
                f"in {most}: let neighbouring threads access neighbouring elements"
            )
