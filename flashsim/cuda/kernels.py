"""`trace`: record the loads and stores of a Numba-CUDA kernel, thread block by thread block."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashsim.cuda.simulator import SECTOR, WARP, BlockAccess, BlockWatch, address, run_watched
from flashsim.errors import OptionError, own_errors
from flashsim.own_kernels import ATOMIC, LOAD, STORE, KernelTrace, Recorder
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
    pairs = zip(args, arrays, strict=True)
    given = dict(zip(inspect.signature(function).parameters, pairs, strict=False))
    held = {name: array for name, (_, array) in given.items() if array is not None}
    package = __import__(type(kernel).__module__.partition(".")[0])
    version = getattr(package, "__version__", "")
    recorder = Recorder(f"numba {version}, CUDA simulator")
    codes: dict[str, int] = {}
    for parameter, array in held.items():
        codes[parameter] = _tensor(recorder, parameter, array, list(codes.values()))
    recorder.launch(
        function.__name__,
        kernel.grid_dim,
        arguments=codes,
        constants={name: arg for name, (arg, _) in given.items() if name not in held},
        file=function.__code__.co_filename,
        line=function.__code__.co_firstlineno,
    )
    recorder.held(
        {f"shared line {line}": (x.shape, x.nbytes) for (_, line), x in watch.shared.items()}
    )
    _note(recorder, watch, list(codes.items()))
    by_code = {codes[name]: array.copy() for name, array in held.items()}
    values = [by_code[code] for code in sorted(by_code)]
    how: Any = {"names": names, "problem": problem, "device": device, "name": name}
    return KernelTrace(recorder.done(), values=values, **how)


def _tensor(recorder: Recorder, name: str, array: np.ndarray, before: Sequence[int]) -> int:
    """Register an array argument as a tensor; views of one array share the array's buffer."""
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    return recorder.tensor(
        *(name, array.shape, [step // array.itemsize for step in array.strides]),
        *(array.dtype.name, array.itemsize),
        buffer=id(whole),
        start=address(array) - address(whole),
        unlike=before,
    )


def _note(recorder: Recorder, watch: BlockWatch, tensors: Sequence[tuple[str, int]]) -> None:
    """Pass a launch's accesses to the recorder, in the order in which a GPU launches the blocks."""
    scattered: dict[tuple[tuple[str, int], str], list[BlockAccess]] = {}
    for block in sorted(watch.accesses, key=lambda block: block[::-1]):
        recorder.program(block)
        for access in watch.accesses[block]:
            name, code = tensors[access.tensor]
            # L1 caches the elements that a block loaded before. Every store reaches L2.
            sectors = None if access.kind == "load" else access.sectors
            recorder.access(
                *(OPERATIONS[access.kind], code, access.offsets),
                outside=access.outside,
                sectors=sectors,
                line=access.line,
            )
            scattered.setdefault((access.line, name), []).append(access)
    for ((file, number), tensor), accesses in scattered.items():
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
