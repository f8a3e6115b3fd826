"""`trace_kernel`: traces the loads and stores of the Pallas kernels that a function calls."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np

from flashsim.errors import BackendUnavailable, OptionError, own_errors, shown
from flashsim.jax.jaxpr_walk import SourceLine, Walker, has
from flashsim.jax.pallas_launch import BlockOperand, KernelCall, Model
from flashsim.jax.refs import Lanes
from flashsim.own_kernels import ATOMIC, LOAD, STORE, KernelTrace, Recorder
from flashsim.own_kernels.check import Verdict
from flashsim.own_kernels.record import KernelRecord
from flashsim.own_kernels.steps import Look
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem

#: Primitives that move no bytes outside of kernels: XLA only changes an array's shape.
VIEWS = {"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "iota"}
OPERATIONS = {"load": LOAD, "store": STORE, "reduce": ATOMIC}


@own_errors
def trace_kernel(
    function: Callable[..., Any],
    *args: Any,
    model: str | None = None,
    names: Mapping[str, str] | None = None,
    problem: Problem | None = None,
    device: str | Device = "H100",
    name: str | None = None,
) -> KernelTrace:
    """Return a trace of the Pallas kernels that `function(*args)` calls: each load and store.

    The unchanged function runs on the CPU: Pallas kernels are evaluated one primitive after
    another, and JAX evaluates the rest. The option `interpret=True` has no effect.

    Parameters
    ----------
    function : callable
        A function that calls `pl.pallas_call` at least once, such as a forward pass, or its
        gradient by `jax.vjp`.
    *args
        The function's arguments. NumPy and JAX arrays are traced; others are passed unchanged.
    model : {"gpu", "tpu"}, optional
        Which accesses move bytes. "gpu": every load and store of a ref. "tpu": the pipeline, which
        copies a block when its index changes from one grid step to the next. Default: "tpu" for
        kernels with a TPU's memory spaces, compiler parameters or prefetched scalars, else "gpu".
    names : mapping of str to str, optional
        The papers' names of kernel parameters, such as ``{"residual_refs[0]": "L"}``. Usual names
        such as `q_ref`, `k`, `out`, `lse` and `do` are recognized.
    problem : Problem, optional
        The attention problem. Default: derived from shapes and arguments.
    device : str or Device
        The device whose roofline, L2 and on-chip memory the trace is compared with.
    name : str, optional
        The name in tables and pictures. Default: the kernels' names.

    Raises
    ------
    OptionError
        If the function calls no kernel, or a name or model does not exist.
    UnsupportedError
        If an operation cannot be computed on the CPU. The error names the line, and what to write
        instead.
    """
    record, values, _ = record_kernels(function, args, model)

    def again(verdict: Verdict, look: Look) -> None:
        record_kernels(function, args, model, (verdict.launch, verdict.program, look))

    return KernelTrace(
        record,
        names=names,
        problem=problem,
        device=device,
        name=name,
        values=[values[code] for code in sorted(values)],
        again=None if "tpu" in record.source else again,  # on a TPU, a row tile takes many steps
    )


def record_kernels(
    function: Callable[..., Any],
    args: Sequence[Any],
    model: str | None,
    watched: tuple[int, tuple[int, ...], Look] | None = None,
) -> tuple[KernelRecord, dict[int, np.ndarray], Any]:
    """Run `function(*args)`; return a record of all kernels, the tensors by code, and the result.

    `watched` is (launch, program, callback): the callback gets each access of that program.
    """
    if not callable(function):
        raise OptionError(
            f"trace_kernel takes a function that calls pl.pallas_call, got {shown(function)}"
        )
    leaves, tree = jax.tree.flatten(list(args))
    places = [n for n, leaf in enumerate(leaves) if is_array(leaf)]

    def traced(*arrays: Any) -> Any:
        mixed = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            mixed[place] = array
        return function(*jax.tree.unflatten(tree, mixed))

    cpu = cpu_device()
    with jax.default_device(cpu):
        # An array that is passed twice remains one array.
        moved = {id(leaves[n]): jax.device_put(leaves[n], cpu) for n in places}
        given = [moved[id(leaves[n])] for n in places]
        with own_lines(), tpu_sizes():
            closed, shape = jax.make_jaxpr(traced, return_shape=True)(*given)
        if not has(closed.jaxpr, "pallas_call"):
            raise OptionError(
                f"{shown(function)} does not call pl.pallas_call with these arguments: pass the "
                "function that calls pl.pallas_call, not the kernel itself"
            )
        notes = PallasNotes(given, constants_of(function, args))

        def launch(walker: Walker, equation: Any, inputs: list[Any]) -> list[Any]:
            return KernelCall(walker, equation, inputs, model).run(notes)

        walker = Walker(notes, launch)
        notes.watched, notes.variables = watched, walker.variables
        results = walker.run(closed.jaxpr, closed.consts, given)
    output = jax.tree.unflatten(jax.tree.structure(shape), results)
    return notes.done(), notes.values, output


def constants_of(function: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Return the numbers and flags among a function's arguments and captured values, by name."""
    found: dict[str, Any] = {}
    try:
        call = inspect.signature(function).bind(*args)
        call.apply_defaults()
        found.update(call.arguments)
    except (TypeError, ValueError):  # the function has no Python signature
        pass
    inner = getattr(function, "__wrapped__", function)
    for name, cell in zip(
        getattr(getattr(inner, "__code__", None), "co_freevars", ()),
        getattr(inner, "__closure__", None) or (),
        strict=False,
    ):
        with contextlib.suppress(ValueError):  # the variable has no value yet
            found.setdefault(name, cell.cell_contents)
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float))}


def cpu_device() -> Any:
    """Return JAX's CPU device, on which kernels are evaluated."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError as error:
        raise BackendUnavailable(
            f"trace_kernel evaluates kernels on the CPU, but JAX has no CPU device ({error}): "
            "unset JAX_PLATFORMS, or add cpu to it (JAX_PLATFORMS=cuda,cpu)"
        ) from None


def is_array(leaf: Any) -> bool:
    """Return True if an argument is an array; numbers and flags are not traced."""
    return hasattr(leaf, "__array__") and hasattr(leaf, "dtype") and hasattr(leaf, "shape")


@contextlib.contextmanager
def own_lines() -> Iterator[None]:
    """Inside the ``with`` block, make JAX record the source line of each equation.

    By default, JAX records the line of the forward call for all loads of a `custom_vjp`'s backward
    kernel.
    """
    try:
        from jax._src import source_info_util
        from jax._src.lib import xla_client

        plain = source_info_util.current
        take = xla_client.Traceback.get_traceback
    except (ImportError, AttributeError):  # JAX renamed a private function: lines are coarser
        yield
        return

    def current() -> Any:
        return plain().replace(traceback=take())

    source_info_util.current = current
    try:
        yield
    finally:
        source_info_util.current = plain


@contextlib.contextmanager
def tpu_sizes() -> Iterator[None]:
    """Inside the ``with`` block, JAX tiles copies of `pltpu.emit_pipeline` as for a TPU v5e."""
    try:
        from jax._src.pallas.mosaic import tpu_info

        known, v5e = tpu_info.registry, tpu_info.ChipVersion.TPU_V5E
    except (ImportError, AttributeError):  # renamed: emit_pipeline then raises an error of JAX
        yield
        return
    with mock.patch.dict(known, cpu=lambda: tpu_info.get_tpu_info_for_chip(v5e, 1)):
        yield


class PallasNotes:
    """Records a `Walker`'s reports about kernels in a `Recorder`."""

    def __init__(self, arrays: Sequence[Any], constants: Mapping[str, Any]) -> None:
        self.recorder = Recorder("pallas")
        self.constants = constants
        #: The final values of each tensor, by its code.
        self.values: dict[int, np.ndarray] = {}
        self.models: set[Model] = set()
        self._outside: dict[str, int] = {}
        self._buffers: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps arrays alive whose ids are keys of `_buffers`
        self._codes: dict[int, int] = {}
        self._launch: KernelCall | None = None
        self._at: tuple[int, tuple[int, ...]] = (-1, ())
        self.watched: tuple[int, tuple[int, ...], Look] | None = None
        self.variables: Callable[[], dict[str, np.ndarray]] = dict
        for array in arrays:
            self._buffer(array)

    def _buffer(self, array: Any) -> int:
        """Return a number that is unique to this JAX array."""
        if id(array) not in self._buffers:
            self._buffers[id(array)] = len(self._kept)
            self._kept.append(array)
        return self._buffers[id(array)]

    def kernel(self, launch: KernelCall) -> None:
        """Record that a kernel starts."""
        self._launch = launch
        self.models.add(launch.model)
        self._codes = {}
        arguments: dict[str, int] = {}
        for tensor in launch.tensors:
            if id(tensor) in self._codes:  # an output that is aliased to an input
                continue
            array = tensor.array
            code = self.recorder.tensor(
                tensor.name,
                array.shape,
                [math.prod(array.shape[d + 1 :]) for d in range(array.ndim)],
                array.dtype.name,
                array.itemsize,
                buffer=self._buffer(tensor if tensor.source is None else tensor.source),
                unlike=self._codes.values(),
            )
            self._codes[id(tensor)] = code
            arguments[tensor.name] = code
        self.recorder.launch(
            launch.name,
            self._place(launch.grid),
            arguments=arguments,
            constants=self.constants,
            file=launch.where.file,
            line=launch.where.line,
            ordered=launch.model == "tpu",
        )
        self.recorder.held(launch.held)
        if launch.model == "tpu":
            self.recorder.note(
                f"{launch.name} uses the TPU model: a block is copied when its index changes from "
                "one grid step to the next (the GPU model counts each load instead). flashsim has "
                "no TPU device, so the predicted time and the share of on-chip memory are a GPU's"
            )

    def _place(self, index: Sequence[int]) -> tuple[int, ...]:
        """Return a program's coordinates in the recorded grid; the first axis runs fastest."""
        launch = self._launch
        assert launch is not None
        return tuple(index[axis] for axis in launch.axes)

    def program(self, index: tuple[int, ...]) -> None:
        """Record that a program starts."""
        self._at = len(self.recorder.launches) - 1, self._place(index)
        self.recorder.program(self._at[1])

    def revisit(self, operand: BlockOperand, where: SourceLine) -> None:
        """Note that a TPU kernel's grid returns to an output block that was already copied back."""
        assert self._launch is not None
        self.recorder.note(
            f"{self._launch.name}: the grid returns to a block of {operand.tensor.name} that was "
            f"already copied back ({where}). On a TPU the block's content is then undefined; move "
            "the grid axes that this output does not depend on to the end of the grid"
        )

    def finish(self, launch: KernelCall, outputs: Sequence[Any]) -> None:
        """Record a kernel's final tensors; `outputs` are the kernel's results as JAX arrays."""
        for tensor in launch.tensors:
            self.values[self._codes[id(tensor)]] = tensor.array
        results = [o.tensor for o in launch.operands if o.output]
        for tensor, array in zip(results, outputs, strict=True):
            source = tensor if tensor.source is None else tensor.source
            self._buffers[id(array)] = self._buffer(source)
            self._kept.append(array)

    def outside(self, primitive: str, outvars: Sequence[Any]) -> None:
        """Count the bytes of a primitive's results, which JAX computes outside of kernels."""
        if primitive not in VIEWS:
            sizes = [
                math.prod(v.aval.shape) * v.aval.dtype.itemsize
                for v in outvars
                if getattr(v.aval, "shape", ())
            ]
            self._outside[primitive] = self._outside.get(primitive, 0) + sum(sizes)

    def done(self) -> KernelRecord:
        """Return the record of all accesses and FLOPs reported so far."""
        models = " and ".join(sorted(self.models))
        self.recorder.source = f"pallas {jax.__version__}, {models} model"
        others = [f"{name} ({size:,} B)" for name, size in sorted(self._outside.items()) if size]
        if others:
            self.recorder.note(
                f"outside of the kernels, JAX computed {', '.join(others)}. The sizes are those of "
                "the results; the loads and stores of these operations are not counted"
            )
        return self.recorder.done()

    def dot(self, flops: int, where: SourceLine) -> None:
        """Record the FLOPs of a matrix product."""
        if self._launch is not None:
            self.recorder.work("matmul", flops, line=(where.file, where.line))

    def _on_chip(self, kind: str, lanes: Lanes, kept: np.ndarray | None, where: SourceLine) -> None:
        """Add a note if an on-chip access, which moves no HBM bytes, exceeds the buffer."""
        outside = 0 if lanes.index is not None else reached(lanes, kept)[2]
        if outside:
            self.recorder.note(
                f"{where}: a {kind} of {lanes.ref.name} accesses {outside} elements outside of its "
                "block, which are undefined: mask these elements, or use a larger block"
            )

    def access(self, kind: str, lanes: Lanes, kept: np.ndarray | None, where: SourceLine) -> None:
        """Record a load, store or atomic operation."""
        tensor = lanes.ref.tensor
        if tensor is None:
            self._on_chip(kind, lanes, kept, where)
            return
        if not where.line and self._launch is not None:  # a copy by JAX's own emit_pipeline
            where = self._launch.where
        line = where.file, where.line
        code = self._codes[id(tensor)]
        offsets, masked, outside = reached(lanes, kept)
        self.recorder.access(
            OPERATIONS[kind], code, offsets, masked=masked, outside=outside, line=line
        )
        if self.watched is not None and self.watched[:2] == self._at and offsets.size:
            self.watched[2](OPERATIONS[kind], code, offsets, self.variables)


def reached(lanes: Lanes, kept: np.ndarray | None) -> tuple[np.ndarray, int, int]:
    """Return the active lanes' offsets, and how many lanes are masked or outside of the array."""
    total = np.zeros((1,) * len(lanes.shape), np.int64)
    step = 1
    for at, size in zip(reversed(lanes.at), reversed(lanes.ref.array.shape), strict=True):
        total = total + at * step
        step *= size
    offsets = np.broadcast_to(total, lanes.shape)
    masked = 0 if kept is None else int(kept.size - np.count_nonzero(kept))
    if lanes.index is None:
        kept = lanes.inside(kept)
    active = offsets.ravel() if kept is None else offsets[kept]
    return active, masked, offsets.size - masked - active.size
