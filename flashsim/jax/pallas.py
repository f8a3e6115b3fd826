"""`trace_kernel`: what the Pallas kernels of a function load and store, step by step."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flashsim.errors import BackendUnavailable, OptionError, own_errors, shown
from flashsim.jax.jaxpr_walk import SourceLine, Walker, calls_a_kernel
from flashsim.jax.pallas_launch import BlockOperand, KernelCall, Model, launcher
from flashsim.jax.refs import Lanes
from flashsim.own_kernels import ATOMIC, LOAD, STORE, KernelTrace, Recorder
from flashsim.own_kernels.check import Verdict
from flashsim.own_kernels.names import labels
from flashsim.own_kernels.record import KernelRecord
from flashsim.own_kernels.steps import Look
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem

#: As in setup.cfg, which a test compares.
OLDEST = (0, 10, 2)
#: Primitives that move nothing: XLA gives the same bytes another shape.
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
    """Return what the Pallas kernels that `function(*args)` calls load and store, step by step.

    The function runs on the CPU: its kernels one primitive after another, everything else by JAX.
    Nothing in it need be changed; `interpret=True` makes no difference.

    Parameters
    ----------
    function : callable
        Calls `pl.pallas_call`, once or several times: a forward pass, or its gradient by `jax.vjp`.
    *args
        Its arguments. Arrays of NumPy or JAX are traced; anything else is passed on as it is.
    model : {"gpu", "tpu"}, optional
        Who moves bytes. "gpu": every load and store of a ref. "tpu": the pipeline, which copies a
        block when its index changes from one grid step to the next. Default: "tpu" for kernels with
        a TPU's memory spaces, compiler parameters or prefetched scalars, "gpu" for all others.
    names : mapping of str to str, optional
        The papers' names of kernel parameters, such as ``{"residual_refs[0]": "L"}``. Parameters
        called `q_ref`, `k`, `out`, `lse`, `do` and the like are known.
    problem : Problem, optional
        The attention problem. Default: what shapes and arguments say.
    device : str or Device
        Whose roofline, L2 and on-chip memory the trace is compared with.
    name : str, optional
        The name in tables and pictures. Default: the kernels'.

    Raises
    ------
    OptionError
        If the function calls no kernel, or a name or model does not exist.
    UnsupportedError
        For what cannot be computed on a CPU, with the line and what to write instead.
    """
    record, values, _ = record_kernels(function, args, model)

    def again(verdict: Verdict, look: Look) -> None:
        record_kernels(function, args, model, (verdict.launch, verdict.program, look))

    found = labels([tensor.name for tensor in record.tensors], names)
    return KernelTrace(
        record,
        names=names,
        problem=problem,
        device=device,
        name=name,
        outputs={found[code]: values[code] for code in record.stored},
        values=[values[code] for code in range(len(found))],
        again=None if "tpu" in record.source else again,  # a TPU spreads a row tile over many steps
    )


def record_kernels(
    function: Callable[..., Any],
    args: Sequence[Any],
    model: str | None,
    watched: tuple[int, tuple[int, ...], Look] | None = None,
) -> tuple[KernelRecord, dict[int, np.ndarray], Any]:
    """Run `function(*args)`; what its kernels did, their tensors by code, and the result.

    `watched` is a launch, one of its programs, and what looks on as that runs.
    """
    if not callable(function):
        raise OptionError(
            f"trace_kernel takes a function that calls pl.pallas_call; got {shown(function)}"
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
        # An array that is passed twice stays one array.
        moved = {id(leaves[n]): jax.device_put(leaves[n], cpu) for n in places}
        given = [moved[id(leaves[n])] for n in places]
        with own_lines():
            closed, shape = jax.make_jaxpr(traced, return_shape=True)(*given)
        if not calls_a_kernel(closed.jaxpr):
            raise OptionError(
                f"{shown(function)} calls no pl.pallas_call with these arguments: give the "
                "function that calls it, not the kernel itself"
            )
        notes = PallasNotes(given, constants_of(function, args))
        walker = Walker(notes, launcher(model, notes))
        notes.watched, notes.variables = watched, walker.variables
        results = walker.run(closed.jaxpr, closed.consts, given)
    output = jax.tree.unflatten(jax.tree.structure(shape), results)
    return notes.done(), notes.values, output


def constants_of(function: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """The numbers and flags that a function is called with, by name."""
    found: dict[str, Any] = {}
    try:
        call = inspect.signature(function).bind(*args)
        call.apply_defaults()
        found.update(call.arguments)
    except (TypeError, ValueError):  # built in C, or called in another way: it names nothing
        pass
    inner = getattr(function, "__wrapped__", function)
    for name, cell in zip(
        getattr(getattr(inner, "__code__", None), "co_freevars", ()),
        getattr(inner, "__closure__", None) or (),
        strict=False,
    ):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            found.setdefault(name, cell.cell_contents)
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float))}


def cpu_device() -> Any:
    """JAX's CPU, on which kernels are evaluated."""
    if jax.__version_info__ < OLDEST:
        raise BackendUnavailable(
            f"trace_kernel needs JAX {'.'.join(map(str, OLDEST))} or newer, but found "
            f"{jax.__version__}: pip install --upgrade jax"
        )
    try:
        return jax.devices("cpu")[0]
    except RuntimeError as error:
        raise BackendUnavailable(
            f"trace_kernel evaluates kernels on the CPU, and JAX has none here ({error}): leave "
            "JAX_PLATFORMS unset, or add cpu to it (JAX_PLATFORMS=cuda,cpu)"
        ) from None


def is_array(leaf: Any) -> bool:
    """Whether an argument is an array; numbers and flags stay as the function wrote them."""
    return hasattr(leaf, "__array__") and hasattr(leaf, "dtype") and hasattr(leaf, "shape")


@contextlib.contextmanager
def own_lines() -> Iterator[None]:
    """While this lasts, JAX gives each equation the line that made it.

    In the backward pass of a `custom_vjp` it would give the line of the forward call, and every
    load of a backward kernel would stand on one line.
    """
    try:
        from jax._src import source_info_util
        from jax._src.lib import xla_client

        plain = source_info_util.current
        take = xla_client.Traceback.get_traceback
    except (ImportError, AttributeError):  # a private name of JAX moved: lines are coarser
        yield
        return

    def current() -> Any:
        return plain().replace(traceback=take())

    source_info_util.current = current
    try:
        yield
    finally:
        source_info_util.current = plain


class PallasNotes:
    """Passes on to a `Recorder` what a `Walker` reports."""

    def __init__(self, arrays: Sequence[Any], constants: Mapping[str, Any]) -> None:
        self.recorder = Recorder("pallas")
        self.constants = constants
        #: What each tensor holds at last, by its code.
        self.values: dict[int, np.ndarray] = {}
        self.models: set[Model] = set()
        self._outside: dict[str, int] = {}
        self._buffers: dict[int, int] = {}
        self._kept: list[Any] = []  # arrays whose ids stand in `_buffers`
        self._codes: dict[int, int] = {}
        self._launch: KernelCall | None = None
        self._at: tuple[int, tuple[int, ...]] = (-1, ())
        self.watched: tuple[int, tuple[int, ...], Look] | None = None
        self.variables: Callable[[], dict[str, np.ndarray]] = dict
        for array in arrays:
            self._buffer(array)

    def _buffer(self, array: Any) -> int:
        """The number of an array's memory: the same for the same array of JAX."""
        if id(array) not in self._buffers:
            self._buffers[id(array)] = len(self._kept)
            self._kept.append(array)
        return self._buffers[id(array)]

    def kernel(self, launch: KernelCall) -> None:
        """Called when a kernel starts."""
        self._launch = launch
        self.models.add(launch.model)
        self._codes = {}
        arguments: dict[str, int] = {}
        for tensor in launch.tensors:
            if id(tensor) in self._codes:  # an output that is an input's memory
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
                f"{launch.name}: TPU model. A block is copied when its index changes from one grid "
                "step to the next; the GPU model counts each load instead. No TPU is among the "
                "devices: time and the share of on-chip memory are a GPU's"
            )

    def _place(self, index: Sequence[int]) -> tuple[int, ...]:
        """A place in the grid of the record, whose first axis runs fastest."""
        launch = self._launch
        assert launch is not None
        return tuple(index[axis] for axis in launch.axes)

    def program(self, index: tuple[int, ...]) -> None:
        """Called when a program starts."""
        self._at = len(self.recorder.launches) - 1, self._place(index)
        self.recorder.program(self._at[1])

    def revisit(self, operand: BlockOperand, where: SourceLine) -> None:
        """Called when a TPU returns to a block that it copied back before."""
        assert self._launch is not None
        self.recorder.note(
            f"{self._launch.name}: the grid returns to a block of {operand.tensor.name} that was "
            f"copied back before ({where}); on a TPU the block's content is undefined then: let "
            "the axes that this output does not depend on run last"
        )

    def finish(self, launch: KernelCall, outputs: Sequence[Any]) -> None:
        """Called when a kernel has ended; `outputs` are its results as arrays of JAX."""
        for tensor in launch.tensors:
            self.values[self._codes[id(tensor)]] = tensor.array
        results = [o.tensor for o in launch.operands if o.output]
        for tensor, array in zip(results, outputs, strict=True):
            source = tensor if tensor.source is None else tensor.source
            self._buffers[id(array)] = self._buffer(source)
            self._kept.append(array)

    def outside(self, primitive: str, outvars: Sequence[Any]) -> None:
        """Called when JAX computes something outside of every kernel; its bytes are not counted."""
        if primitive not in VIEWS:
            sizes = [
                math.prod(v.aval.shape) * v.aval.dtype.itemsize
                for v in outvars
                if getattr(v.aval, "shape", ())
            ]
            self._outside[primitive] = self._outside.get(primitive, 0) + sum(sizes)

    def done(self) -> KernelRecord:
        """Return the record of everything that was noted."""
        models = " and ".join(sorted(self.models))
        self.recorder.source = f"pallas {jax.__version__}, {models} model"
        others = [f"{name} ({size:,} B)" for name, size in sorted(self._outside.items()) if size]
        if others:
            self.recorder.note(
                f"outside of the kernels, JAX computed {', '.join(others)}: the sizes are those of "
                "the results, and what they load and store is not counted"
            )
        return self.recorder.done()

    def dot(self, flops: int, where: SourceLine) -> None:
        """A matrix product."""
        if self._launch is not None:
            self.recorder.work("matmul", flops, line=(where.file, where.line))

    def _on_chip(self, kind: str, lanes: Lanes, kept: np.ndarray | None, where: SourceLine) -> None:
        """An access to a buffer on the chip moves nothing, but must stay inside of it."""
        outside = 0 if lanes.all_inside else reached(lanes, kept)[2]
        if outside:
            self.recorder.note(
                f"{where}: a {kind} of {lanes.ref.name} reaches {outside} elements outside of its "
                "block, whose content is undefined: mask them, or choose blocks that hold them"
            )

    def access(self, kind: str, lanes: Lanes, kept: np.ndarray | None, where: SourceLine) -> None:
        """One load, store or atomic operation."""
        tensor, line = lanes.ref.tensor, (where.file, where.line)
        if tensor is None:
            self._on_chip(kind, lanes, kept, where)
            return
        code = self._codes[id(tensor)]
        offsets, masked, outside = reached(lanes, kept)
        self.recorder.access(
            OPERATIONS[kind], code, offsets, masked=masked, outside=outside, line=line
        )
        if self.watched is not None and self.watched[:2] == self._at and offsets.size:
            self.watched[2](OPERATIONS[kind], code, offsets, self.variables)


def reached(lanes: Lanes, kept: np.ndarray | None) -> tuple[np.ndarray, int, int]:
    """Offsets of the lanes that ask for elements, lanes masked off, and lanes outside."""
    total = np.zeros((1,) * len(lanes.shape), np.int64)
    step = 1
    for at, size in zip(reversed(lanes.coordinates), reversed(lanes.ref.array.shape), strict=True):
        total = total + at * step
        step *= size
    offsets = np.broadcast_to(total, lanes.shape)
    masked = 0 if kept is None else int(kept.size - np.count_nonzero(kept))
    if lanes.all_inside:
        return (offsets.ravel() if kept is None else offsets[kept]), masked, 0
    inside = lanes.inside if kept is None else lanes.inside & kept
    outside = lanes.inside.size - masked - int(np.count_nonzero(inside))
    return offsets[inside], masked, outside
