"""Runs the grid of a `pallas_call`; a GPU model or a TPU model decides which accesses move bytes.

In the model ``gpu``, a block is a view of device memory, and bytes move when the kernel reads or
writes a ref. The first axis of the grid runs fastest, as Pallas lowers programs to Triton.

In the model ``tpu``, one core runs the grid's steps in order, with the last axis fastest. A
pipeline copies each operand's block to VMEM before a grid step, unless the previous step had the
same block. The pipeline copies an output's block back if the next step has another block. Reads and
writes by the kernel itself stay on chip. `pltpu.make_async_copy` copies refs in HBM (`pl.ANY`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast, get_args

import jax
import numpy as np

from flashsim.errors import OptionError, UnsupportedError, choices
from flashsim.jax.jaxpr_walk import Observer, SourceLine, Walker, scratch, source_line
from flashsim.jax.live_values import most_live
from flashsim.jax.refs import HbmTensor, Lanes, Ref, locate, uninitialized

Model = Literal["gpu", "tpu"]


class Programs(Observer, Protocol):
    """An `Observer` that also receives the start of each kernel and each program of the grid."""

    def kernel(self, launch: KernelCall) -> None:
        """Report that a kernel starts."""

    def program(self, index: tuple[int, ...]) -> None:
        """Report that a program (on a TPU, a grid step) starts."""

    def revisit(self, operand: BlockOperand, where: SourceLine) -> None:
        """Report that a TPU's grid returns to an output block that was already copied back."""

    def finish(self, launch: KernelCall, outputs: Sequence[Any]) -> None:
        """Report that the kernel has ended; `outputs` are the kernel's results as JAX arrays."""


@dataclass(eq=False)
class BlockOperand:
    """An operand of a kernel: a tensor in device memory, divided into blocks."""

    tensor: HbmTensor
    mapping: Any
    output: bool
    where: SourceLine
    space: str
    block: tuple[int, ...] = ()
    squeezed: tuple[bool, ...] = ()
    before: tuple[int, ...] = ()  # padding of `pl.Element` dimensions
    ref: Ref | None = None
    visited: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def in_hbm(self) -> bool:
        """Return True if the operand stays in HBM, and the kernel itself copies parts on chip."""
        return self.space in ("any", "hbm")


@dataclass(eq=False)
class KernelCall:
    """One call of a kernel: the kernel's name, grid, and operands with final values."""

    name: str
    grid: tuple[int, ...]
    model: Model
    operands: list[BlockOperand]
    scalars: list[HbmTensor]
    where: SourceLine
    #: Grid axes that identify programs. On a GPU the first one runs fastest. On a TPU, steps that
    #: work on the same blocks of all outputs are one program.
    axes: tuple[int, ...] = ()
    #: The values that are on chip at the same time, by name: shape and bytes.
    held: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    @property
    def tensors(self) -> list[HbmTensor]:
        """Return all tensors in device memory, in the order of the kernel's parameters."""
        return [*self.scalars, *(operand.tensor for operand in self.operands)]


def launcher(model: str | None, recorder: Programs):
    """Return the function with which a `Walker` runs each `pallas_call`."""

    def run(walker: Walker, step: Any, inputs: list[Any]) -> list[Any]:
        return launch(walker, recorder, step.equation, inputs, model)

    return run


def launch(
    walker: Walker, recorder: Programs, equation: Any, inputs: list[Any], model: str | None
) -> list[Any]:
    """Run one `pallas_call`, and return the outputs as JAX arrays."""
    params = equation.params
    mapping, jaxpr = params["grid_mapping"], params["jaxpr"]
    inputs = list(inputs)
    grid = []
    for size in mapping.grid:  # dynamic grid sizes are the first inputs of the call
        grid.append(int(size) if isinstance(size, int) else int(inputs.pop(0)))
    model = chosen_model(params, jaxpr, model)
    names = parameter_names(jaxpr)
    scalars = [
        HbmTensor(name, held(value), value)
        for name, value in zip(names, inputs[: mapping.num_index_operands], strict=False)
    ]
    operands = operands_of(params, names[len(scalars) :], inputs[len(scalars) :], equation)
    here = KernelCall(
        str(params.get("name") or kernel_name(jaxpr)),
        tuple(grid),
        model,
        operands,
        scalars,
        source_line(equation),
    )
    refuse_unknown(here, jaxpr, names)
    if model == "tpu":
        starts = [
            [block_start(one, index, scalars, walker) for one in operands]
            for index in itertools.product(*map(range, grid))
        ]
        here.axes = tpu_axes(here, starts)
        here.held = on_tpu(here, jaxpr, names)
        recorder.kernel(here)
        run_tpu(walker, recorder, here, mapping, jaxpr, starts)
    else:
        here.axes = gpu_axes(len(grid), mapping.vmapped_dims)
        here.held = most_live(jaxpr)
        recorder.kernel(here)
        run_gpu(walker, recorder, here, mapping, jaxpr)
    outputs = [jax.numpy.asarray(o.tensor.array.copy()) for o in operands if o.output]
    recorder.finish(here, outputs)
    return outputs


# -- the two models --------------------------------------------------------------------------------


def run_gpu(walker: Walker, recorder: Programs, here: KernelCall, mapping: Any, jaxpr: Any) -> None:
    """Run a kernel's programs, each with new scratch buffers; refs are views of device memory."""
    scalars = [Ref.whole(one.array, one, one.name) for one in here.scalars]
    count = len(here.scalars) + len(here.operands)
    vmapped = mapping.vmapped_dims
    for index in in_order(here.grid, here.axes):
        recorder.program(index)
        refs = []
        for operand in here.operands:
            start = block_start(operand, index, here.scalars, walker)
            refs.append(window(operand, start))
        run_program(walker, here, vmapped, index, jaxpr, [*scalars, *refs], count, {})


def run_tpu(
    walker: Walker,
    recorder: Programs,
    here: KernelCall,
    mapping: Any,
    jaxpr: Any,
    starts: Sequence[Sequence[tuple[int, ...]]],
) -> None:
    """Run a TPU kernel's grid steps in order; copy changed blocks to and from VMEM."""
    count = len(here.scalars) + len(here.operands)
    kept: dict[int, Any] = {}  # scratch buffers, which persist through the whole grid
    scalars = []
    for number, index in enumerate(itertools.product(*map(range, here.grid))):
        recorder.program(index)
        if not number:
            for one in here.scalars:  # prefetched to SMEM before the first step
                whole = Ref.whole(one.array, one, one.name)
                recorder.access("load", everything(whole), None, here.where)
                scalars.append(Ref.whole(one.array.copy(), name=one.name))
        refs: list[Ref] = []
        for place, operand in enumerate(here.operands):
            if operand.in_hbm:
                refs.append(Ref.whole(operand.tensor.array, operand.tensor, operand.tensor.name))
                continue
            if not number or starts[number][place] != starts[number - 1][place]:
                fetch(recorder, operand, starts[number][place])
            assert operand.ref is not None
            refs.append(operand.ref)
        run_program(
            walker, here, mapping.vmapped_dims, index, jaxpr, [*scalars, *refs], count, kept
        )
        last = number + 1 == len(starts)
        for place, operand in enumerate(here.operands):
            if operand.output and not operand.in_hbm:
                here_now = starts[number][place]
                if last or starts[number + 1][place] != here_now:
                    write_back(recorder, operand, here_now)


def fetch(recorder: Programs, operand: BlockOperand, start: tuple[int, ...]) -> None:
    """Set `operand.ref` to a block in VMEM; only blocks of inputs are copied from device memory."""
    view = window(operand, start)
    lanes = everything(view)
    buffer = lanes.read(None)
    if operand.output and start in operand.visited:
        recorder.revisit(operand, operand.where)
    operand.visited.add(start)
    if not operand.output:
        recorder.access("load", inner(view), None, operand.where)
    gone = tuple(d for d, off in enumerate(operand.squeezed) if off)
    operand.ref = Ref.whole(np.squeeze(buffer, gone), name=operand.tensor.name)


def write_back(recorder: Programs, operand: BlockOperand, start: tuple[int, ...]) -> None:
    """Copy an output's block from VMEM to device memory."""
    view = window(operand, start)
    assert operand.ref is not None
    recorder.access("store", inner(view), None, operand.where)
    lanes = everything(view)
    lanes.write(operand.ref.array.reshape(lanes.shape), None)


def run_program(
    walker: Walker,
    here: KernelCall,
    vmapped: Sequence[int],
    index: tuple[int, ...],
    jaxpr: Any,
    refs: list[Any],
    count: int,
    kept: dict[int, Any],
) -> None:
    """Run the kernel's body for one program of the grid."""
    buffers = []
    for number, variable in enumerate(jaxpr.invars[count:]):
        if number not in kept:
            kept[number] = scratch(variable.aval, f"scratch {number}")
        buffers.append(kept[number])
    names = parameter_names(jaxpr)[count:]
    walker.buffers = {n: ref for n, ref in zip(names, buffers, strict=False) if ref is not None}
    walker.carried = {}
    axes = [d for d in range(len(index)) if d not in vmapped]
    walker.program = tuple(index[d] for d in axes)
    walker.sizes = tuple(here.grid[d] for d in axes)
    try:
        walker.run(jaxpr, (), [*refs, *buffers])
    finally:
        walker.program = None


def gpu_axes(rank: int, vmapped: Sequence[int]) -> tuple[int, ...]:
    """Return the grid's axes in a GPU's order: the fastest axis first, `vmap`'s axes last."""
    return (*(d for d in range(rank) if d not in vmapped), *reversed(vmapped))


def tpu_axes(here: KernelCall, starts: Sequence[Sequence[tuple[int, ...]]]) -> tuple[int, ...]:
    """Return the fewest leading axes of a grid that determine the blocks of all outputs."""
    blocked = [n for n, o in enumerate(here.operands) if o.output and not o.in_hbm]
    steps = list(itertools.product(*map(range, here.grid)))
    for leading in range(len(here.grid)):
        seen: dict[tuple[int, ...], Any] = {}
        for index, step in zip(steps, starts, strict=True):
            blocks = [step[n] for n in blocked]
            if seen.setdefault(index[:leading], blocks) != blocks:
                break
        else:
            return tuple(range(leading))
    return tuple(range(len(here.grid)))


def in_order(grid: Sequence[int], axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield each program's index in a grid, in order; the first axis in `axes` runs fastest."""
    for slow_first in itertools.product(*(range(grid[d]) for d in reversed(axes))):
        index = [0] * len(grid)
        for d, i in zip(reversed(axes), slow_first, strict=True):
            index[d] = i
        yield tuple(index)


def on_tpu(
    here: KernelCall, jaxpr: Any, names: Sequence[str]
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return, by name, the shape and bytes of each block and scratch buffer in VMEM.

    One buffer per input is not counted, because the trace lists that buffer as a loaded tile.
    """
    found = {}
    for operand in here.operands:
        if operand.in_hbm:
            continue
        mode = getattr(operand.mapping, "pipeline_mode", None)
        copies = getattr(mode, "buffer_count", 2) - (not operand.output)
        size = math.prod(operand.block) * operand.tensor.array.itemsize
        found[operand.tensor.name] = (operand.block, copies * size)
    count = len(here.scalars) + len(here.operands)
    for variable, name in itertools.zip_longest(jaxpr.invars[count:], names[count:]):
        if size := bytes_of(variable.aval):
            found[name] = (tuple(variable.aval.shape), size)
    return found


# -- operands and blocks ---------------------------------------------------------------------------


def operands_of(
    params: dict[str, Any], names: Sequence[str], inputs: Sequence[Any], equation: Any
) -> list[BlockOperand]:
    """Return a `pallas_call`'s inputs and outputs; an aliased output is the input operand."""
    mapping = params["grid_mapping"]
    aliases = {output: given for given, output in params["input_output_aliases"]}
    operands: list[BlockOperand] = []
    n_inputs = len(inputs)
    for number, (one, name) in enumerate(zip(mapping.block_mappings, names, strict=False)):
        output = number >= n_inputs
        if not output:
            array = held(inputs[number])
        elif number - n_inputs in aliases:
            given = aliases[number - n_inputs] - mapping.num_index_operands
            array = operands[given].tensor.array
        else:
            aval = one.array_aval
            array = uninitialized(aval.shape, np.dtype(aval.dtype))
        tensor = HbmTensor(name, array, None if output else inputs[number])
        if output and number - n_inputs in aliases:
            tensor = operands[given].tensor
        block, squeezed, before = block_of(one, name)
        operands.append(
            BlockOperand(
                tensor,
                one,
                output,
                spec_line(one, equation),
                space_of(one),
                block,
                squeezed,
                before,
            )
        )
    return operands


def held(value: Any) -> np.ndarray:
    """Return a copy of an operand as a NumPy array, which stores may change."""
    dtype = getattr(value, "dtype", None)
    try:
        array = np.array(value)
        narrow = array.dtype.name in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn")
    except TypeError:
        narrow = True
    if narrow or array.dtype.kind == "O":
        raise UnsupportedError(
            f"an operand has type {dtype}, whose elements are smaller than a byte, but only "
            "larger types are supported; pass the operand as int8 or as a wider float"
        )
    return array


def block_of(mapping: Any, name: str) -> tuple[tuple[int, ...], tuple[bool, ...], tuple[int, ...]]:
    """Return each block dimension's length, squeezed flag and padding, as three sequences."""
    lengths, squeezed, before = [], [], []
    for dimension in mapping.block_shape:
        kind = type(dimension).__name__
        gone = dimension is None or kind in ("Squeezed", "Mapped")
        if not gone and kind not in ("int", "Blocked", "Element"):
            raise UnsupportedError(
                f"{name} has a block dimension of kind {kind}, which is not supported; use only "
                "integers, None and pl.Element in its BlockSpec"
            )
        lengths.append(1 if gone else int(getattr(dimension, "block_size", dimension)))
        squeezed.append(gone)
        before.append(int(getattr(dimension, "padding", (0, 0))[0]))
    return tuple(lengths), tuple(squeezed), tuple(before)


def block_start(
    operand: BlockOperand, index: tuple[int, ...], scalars: Sequence[HbmTensor], walker: Walker
) -> tuple[int, ...]:
    """Return where an operand's block begins in each dimension of the operand's tensor."""
    closed = operand.mapping.index_map_jaxpr
    refs = [Ref.whole(one.array, None, one.name) for one in scalars]  # reads on the scalar core
    blocks = walker.run(closed.jaxpr, closed.consts, [*map(np.int32, index), *refs])
    starts = []
    for place, (number, length) in enumerate(zip(blocks, operand.block, strict=True)):
        kind = type(operand.mapping.block_shape[place]).__name__
        whole = kind == "Element" or operand.squeezed[place]
        starts.append(int(number) * (1 if whole else length) - operand.before[place])
    return tuple(starts)


def window(operand: BlockOperand, start: tuple[int, ...]) -> Ref:
    """Return a view of an operand's block in device memory."""
    tensor = operand.tensor
    return Ref(tensor.array, start, operand.block, operand.squeezed, tensor, tensor.name)


def everything(ref: Ref) -> Lanes:
    """Return all lanes (elements) of a ref, including squeezed dimensions and any past the end."""
    return locate(replace(ref, squeezed=(False,) * len(ref.shape)), ())


def inner(ref: Ref) -> Lanes:
    """Return the lanes (elements) of a ref inside the array, which a TPU's pipeline copies."""
    start, shape = [], []
    for first, length, size in zip(ref.start, ref.shape, ref.array.shape, strict=True):
        low, high = max(first, 0), min(first + length, size)
        start.append(min(low, size))
        shape.append(max(high - low, 0))
    cut = Ref(ref.array, tuple(start), tuple(shape), ref.squeezed, ref.tensor, ref.name)
    return everything(cut)


# -- properties of a call --------------------------------------------------------------------------


def chosen_model(params: dict[str, Any], jaxpr: Any, model: str | None) -> Model:
    """Return the requested model, or "tpu" if the kernel uses features of TPUs, else "gpu"."""
    if model is not None and model not in get_args(Model):
        raise OptionError(
            f"there is no model {model!r}; choose from {choices(model, get_args(Model))}"
        )
    marks = [type(params.get("compiler_params")).__module__]
    marks += [type(getattr(v.aval, "memory_space", None)).__module__ for v in jaxpr.invars]
    for_tpu = any(".mosaic.core" in mark or ".pallas.tpu" in mark for mark in marks)
    for_tpu = for_tpu or bool(params["grid_mapping"].num_index_operands)
    return cast(Model, model or ("tpu" if for_tpu else "gpu"))


def refuse_unknown(here: KernelCall, jaxpr: Any, names: Sequence[str]) -> None:
    """Raise an error if the chosen model ("gpu" or "tpu") does not support the kernel."""
    for variable, name in itertools.zip_longest(jaxpr.invars, names):
        space = getattr(variable.aval, "memory_space", None)
        module = type(space).__module__ if space is not None else ""
        if "mosaic_gpu" in module:
            raise UnsupportedError(
                f"in kernel {here.name}, {name} lies in {space} of Pallas's Mosaic GPU backend, "
                "which flashsim does not support; write the kernel with plain refs, as for "
                "jax.experimental.pallas.triton"
            )
        if here.model == "gpu" and ".mosaic.core" in module:
            raise OptionError(
                f"in kernel {here.name}, {name} lies in the memory space {space}, which only a "
                "TPU has; trace the kernel with model='tpu'"
            )


def space_of(mapping: Any) -> str:
    """Return the name of an operand's memory space, as Pallas writes it."""
    aval = getattr(mapping, "transformed_block_aval", None) or mapping.block_aval
    return str(getattr(aval, "memory_space", None)).lower().rpartition(".")[2]


def parameter_names(jaxpr: Any) -> list[str]:
    """Return the kernel's parameter names without "_ref", with numbers for nameless parameters."""
    known = getattr(jaxpr.debug_info, "arg_names", None) or ()
    given = [str(name).rpartition(".")[2] for name in known]
    given += [""] * (len(jaxpr.invars) - len(given))
    names: list[str] = []
    for number, name in enumerate(given):
        short = re.sub(r"_ref$|^ref_", "", name) or f"arg{number}"
        names.append(short if short not in names else f"{short}{number}")
    return names


def kernel_name(jaxpr: Any) -> str:
    """Return the name of the kernel's function."""
    told = str(getattr(jaxpr.debug_info, "func_src_info", "") or "kernel")
    return told.split(" ")[0]


def spec_line(mapping: Any, equation: Any) -> SourceLine:
    """Return the source line of an operand's index map, or of the call if the map has no line."""
    told = getattr(mapping.index_map_jaxpr.jaxpr.debug_info, "func_src_info", None) or ""
    found = re.fullmatch(r"(.*) at (.*):(\d+)", told)
    if found is None or "/jax/_src/" in found[2].replace("\\", "/"):
        return source_line(equation)
    return SourceLine(found[2], int(found[3]), found[1])


def bytes_of(aval: Any) -> int:
    """Return the number of bytes of a scratch buffer, or 0 if the argument is a semaphore."""
    inner_aval = getattr(aval, "inner_aval", aval)
    try:
        return int(np.prod(inner_aval.shape, dtype=np.int64)) * np.dtype(inner_aval.dtype).itemsize
    except TypeError:
        return 0
