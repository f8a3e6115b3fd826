"""`simulate`: run an algorithm that you wrote on the simulated machine."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType, MappingProxyType
from typing import Any

import numpy as np

from flashsim.api import array_libraries, dispatch, inputs
from flashsim.api.arrays import require_numpy, squeeze
from flashsim.api.inputs import Request
from flashsim.api.request import Checked
from flashsim.api.result import Result, provenance
from flashsim.engines.protocol import Job
from flashsim.engines.sandbox.hbm import require_shape
from flashsim.engines.sandbox.machine import OpenMachine
from flashsim.engines.sandbox.running import one_argument, put, require_stored, run, size
from flashsim.engines.sandbox.tape import TAPE
from flashsim.errors import (
    DTypeError,
    MemoryModelError,
    OptionError,
    UnsupportedError,
    choices,
    own_errors,
    shown,
)
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule.names import TENSORS
from flashsim.schedule.tensors import BIASES, shape, whole_bytes
from flashsim.schedule.tensors import dtype as dtype_of
from flashsim.schedule.tiling import Tiling
from flashsim.trace.recording import Own
from flashsim.trace.trace import Trace

#: The possible inputs and outputs of an algorithm, by the papers' names.
NAMES = tuple(
    name
    for name in TENSORS[1:]
    if name not in BIASES and name != "table" and not name.endswith(("_acc", "_part"))
)


@dataclass(frozen=True, eq=False, repr=False)
class OwnResult(Result):
    """The result of `simulate`: a `Result` of an algorithm that you wrote.

    Attributes
    ----------
    out : array
        The first of the outputs: O by default.
    lse : array or None
        L, if the algorithm stored it.
    tensors : mapping of str to array
        Every output by its name.
    """

    tensors: Mapping[str, Any] = field(default_factory=dict)

    def backward(self, *_: Any, **__: Any) -> Any:
        """Raise `UnsupportedError`: an algorithm that you wrote has no automatic backward pass."""
        raise UnsupportedError(
            "your own algorithm has no automatic backward pass; write one, and run it with "
            "flashsim.simulate(my_backward, q, k, v, inputs={'dO': dout, ...}, outputs=['dQ'])"
        )


@own_errors
def simulate(
    algorithm: Callable[[OpenMachine], None],
    q: Any,
    k: Any,
    v: Any,
    *,
    inputs: Mapping[str, Any] | None = None,
    outputs: Iterable[str] = ("O",),
    tiling: Tiling | None = None,
    device: str | Device = "H100",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    mask: Callable[..., Any] | None = None,
) -> OwnResult:
    """Run an algorithm that you wrote on the simulated machine, and count every byte.

    The algorithm is a Python function of one argument, the simulated machine. The function moves
    tiles between HBM and SRAM, as the built-in algorithms do (`flashsim/algorithms/`).
    `docs/guides/your_own_algorithm.md` has examples.

    Parameters
    ----------
    algorithm : function of an `OpenMachine`
        Tables and pictures use its name.
    q, k, v : array
        As for `run`. They are copied: the function sees ``machine.hbm.Q``, ``K`` and ``V``.
    inputs : mapping of str to array, optional
        More tensors by the papers' names ("dO", "L", "delta", "S", ...): (.., n, width), or (.., n)
        for one number per row, with as many leading axes as q.
    outputs : iterable of str
        The tensors that the function must store completely. With "O" it may also store "L" (LSE).
    tiling : Tiling, optional
        ``machine.tiling``, the grid of pictures; default: 64 x 64, or the whole matrix if smaller.
    device : str or Device
        Its `sram_bytes` limit the bytes that a step may keep on chip.
    causal, window, softcap, scale, mask
        See `Problem`. The function itself must apply them (``machine.keep(rows, cols)``).

    Returns
    -------
    OwnResult
        With `out`, `lse`, `tensors` and a `trace` like that of `run`.

    Raises
    ------
    SramOverflow
        If a step keeps more on chip than the device can.
    MemoryModelError
        If the function breaks a rule of the machine. It used a tile that was not loaded, never
        stored or already freed; it moved numbers off the chip or in from outside; or it did not
        store a result completely.
    FlashSimError
        If the arguments make no valid problem. Errors inside the function name its line.
    """
    if not callable(algorithm):
        raise DTypeError(
            f"simulate takes a function with one argument, the machine, got {shown(algorithm)}; "
            "built-in algorithms run through flashsim.run(q, k, v, algorithm=...)"
        )
    name = getattr(algorithm, "__name__", type(algorithm).__name__)[:60]
    one_argument(algorithm, name)
    asked = list(dict.fromkeys(outputs))
    more = dict(inputs or {})
    for tensor in (*more, *asked):
        if tensor not in NAMES:
            raise OptionError(
                f"no input or output is named {shown(tensor)}; choose from {choices(tensor, NAMES)}"
            )
    if not asked or set(asked) & {"Q", "K", "V", *more}:
        raise OptionError(
            f"outputs must not contain an input, got outputs {asked} and inputs {[*more]}"
        )
    problem, arrays, ndim, host = _problem(
        *(q, k, v, more),
        Request(causal, window, softcap, scale, mask, tiling=tiling),
    )
    _check_outsiders(algorithm, name, {"q": q, "k": k, "v": v, **more})
    tiling = (tiling or Tiling(64, 64)).clip(problem)
    machine = OpenMachine(problem, tiling, Device.get(device))
    optional = put(machine, arrays, asked)
    recording = TAPE.set(None)  # a recorded function may run another one on a machine of its own
    try:
        run(algorithm, name, machine)
    finally:
        TAPE.reset(recording)
    asked += [tensor for tensor in optional if machine.hbm._stored(tensor) != "none"]
    require_stored(name, machine, asked)
    axes = {tensor: ndim - shape(problem, tensor).vector for tensor in asked}
    results = {t: host.give(squeeze(machine.hbm._array(t), n)) for t, n in axes.items()}
    job = Job(
        *(problem, arrays["Q"], arrays["K"], arrays["V"], None, tiling, machine.device, name),
        trace=True,
    )
    return OwnResult(
        out=results[asked[0]],
        lse=results.get("L"),
        kernel="simulator",
        tiling=tiling,
        tensors=MappingProxyType(results),
        _trace=trace_of(name, machine, arrays, asked),
        _job=job,
        _saved={},
        _asked=Checked(dispatch.engine("simulator"), "simulator", host, job, ndim, None),
    )


def _problem(
    q: Any,
    k: Any,
    v: Any,
    more: Mapping[str, Any],
    request: Request,
) -> tuple[Problem, dict[str, np.ndarray], int, array_libraries.Host]:
    """Return the problem, copies of the inputs by their names in papers, `ndim` and the `Host`."""
    inputs.check_tiling(request.tiling)
    host = array_libraries.host_of(q)
    q, k, v = array_libraries.take(host, q=q, k=k, v=v)
    prepared = inputs.prepare(q, k, v, request)
    require_numpy("simulator", q=prepared.q, k=prepared.k, v=prepared.v)
    if prepared.problem.fp8:
        raise UnsupportedError(
            f"simulate does not support {prepared.problem.dtype} inputs, because an algorithm "
            "cannot state which values it rounds to that type; convert q, k and v to bfloat16"
        )
    p, ndim = prepared.problem, prepared.ndim
    arrays = {"Q": prepared.q, "K": prepared.k, "V": prepared.v}
    for name, x in zip(more, array_libraries.take(host, **more), strict=True):
        want = size(p, name)
        x = np.asarray(x)
        full = x.reshape((1,) * (len(want) - x.ndim) + x.shape) if x.ndim <= len(want) else x
        require_shape(name, full.shape, want)
        arrays[name] = full.astype(numpy_dtype(dtype_of(p, name)))
    return p, {name: np.array(x) for name, x in arrays.items()}, ndim, host


def trace_of(name: str, machine: OpenMachine, arrays: Iterable[str], asked: Iterable[str]) -> Trace:
    """Return the trace of a run; `arrays` names the input tensors, `asked` the output tensors."""
    p, hbm = machine.problem, machine.hbm
    backward = any(tensor.startswith("d") for tensor in asked)
    direction, origin = "backward" if backward else "forward", provenance("simulator")
    facts = p, machine.device, name, direction, "simulator", machine.stages, origin
    trace = Trace(*facts, own=Own(hbm._own, 0))
    used = [tensor for tensor in arrays if trace.bytes("load", tensor)]
    compulsory = sum(whole_bytes(p, tensor) for tensor in (*used, *asked))
    inner = [tensor for tensor in hbm.tensors if tensor not in (*arrays, *asked, "L")]
    held = sum(hbm._behind(getattr(hbm, tensor)).data.nbytes for tensor in inner)
    trace.own = Own(hbm._own, compulsory, held // hbm._samples)
    return trace


# -- find reads of outside arrays, which the machine cannot prevent --------------------------------


def _check_outsiders(function: Any, name: str, arrays: Mapping[str, Any]) -> None:
    """Raise if the user's function reads an input array directly: no load would be counted.

    The check covers the globals, closures and defaults of the function and of its inner functions.
    The simulated machine itself refuses to store an outside array, or to combine it with a tile.
    But the machine cannot tell whether a single number comes from an outside array.
    """
    for label, value in _outside(function):
        held = value.values() if isinstance(value, dict) else value
        for item in held if isinstance(value, (list, tuple, dict)) else [value]:
            for which, array in arrays.items():
                both = isinstance(item, np.ndarray) and isinstance(array, np.ndarray)
                if both and np.may_share_memory(item, array):
                    raise MemoryModelError(
                        f"{name} uses {label}, which is the {which} that you passed to simulate; "
                        "inside the function, use the tensor's copy in machine.hbm, and load it "
                        "with sram.load",
                        "outside",
                    )


def _outside(function: Any) -> Iterable[tuple[str, Any]]:
    code = getattr(function, "__code__", None)
    if code is None:
        return
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    for label, cell in cells:
        try:
            yield label, cell.cell_contents
        except ValueError:  # not yet bound
            continue
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "a default argument", value
    scope = function.__globals__
    for label in global_names(code):
        if label in scope:
            yield label, scope[label]


@functools.lru_cache(maxsize=64)  # disassembling bytecode costs as much as a small task's tiles
def global_names(code: CodeType) -> set[str]:
    """Return the global names that a function and its inner functions read."""
    names = {
        i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= global_names(constant)
    return names


__all__ = ["NAMES", "OwnResult", "simulate"]
