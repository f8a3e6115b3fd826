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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

import jax
import numpy as np

from flashsim.errors import OptionError, UnsupportedError, choices
from flashsim.jax.jaxpr_walk import SourceLine, Walker, has, scratch, source_line
from flashsim.jax.live_values import most_live
from flashsim.jax.refs import HbmTensor, Lanes, Ref, locate, uninitialized

PallasNotes = Any  # `pallas.PallasNotes`, whose module imports this one

Model = Literal["gpu", "tpu"]


@dataclass(eq=False)
class BlockOperand:
    """An operand of a kernel: a tensor in device memory, divided into blocks."""

    tensor: HbmTensor
    mapping: Any
    output: bool
    where: SourceLine
    block: tuple[int, ...]
    squeezed: tuple[bool, ...]
    before: tuple[int, ...]  # padding of `pl.Element` dimensions
    ref: Ref | None = None
    visited: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def in_hbm(self) -> bool:
        """Return True if the operand stays in HBM, and the kernel itself copies parts on chip."""
        aval = getattr(self.mapping, "transformed_block_aval", None) or self.mapping.block_aval
        space = str(getattr(aval, "memory_space", None)).lower().rpartition(".")[2]
        return space in ("any", "hbm")

    def window(self, start: tuple[int, ...]) -> Ref:
        """Return a view of the block that begins at `start` in device memory."""
        tensor = self.tensor
        return Ref(tensor.array, start, self.block, self.squeezed, tensor, tensor.name)


class KernelCall:
    """One call of a kernel: the kernel's name, grid, and operands with final values.

    Attributes
    ----------
    scalars : the operands that are prefetched, before the blocked `operands`
    axes : grid axes that identify programs; on a GPU the first one runs fastest; on a TPU, steps
        that work on the same blocks of all outputs are one program
    held : the values that are on chip at the same time, by name: shape and bytes
    """

    def __init__(self, walker: Walker, equation: Any, inputs: list[Any], model: str | None) -> None:
        params = equation.params
        self._walker, self._jaxpr, self._mapping = walker, params["jaxpr"], params["grid_mapping"]
        self.name = str(params.get("name") or kernel_name(self._jaxpr))
        self.where = source_line(equation)
        # Dynamic grid sizes are the first inputs of the call.
        grid = [n if isinstance(n, int) else inputs.pop(0) for n in self._mapping.grid]
        self.grid = tuple(map(int, grid))
        self.model = chosen_model(params, self._jaxpr, model)
        names, count = parameter_names(self._jaxpr), self._mapping.num_index_operands
        self.scalars = [
            HbmTensor(name, held(value), value)
            for name, value in zip(names, inputs[:count], strict=False)
        ]
        self.operands = operands_of(params, names[count:], inputs[count:], equation)
        count += len(self.operands)
        self._scratch = list(zip(names[count:], self._jaxpr.invars[count:], strict=False))
        self.axes: tuple[int, ...] = ()
        self.held: dict[str, tuple[tuple[int, ...], int]] = {}
        self._refuse_unknown(names)

    @property
    def tensors(self) -> list[HbmTensor]:
        """Return all tensors in device memory, in the order of the kernel's parameters."""
        return [*self.scalars, *(operand.tensor for operand in self.operands)]

    def _refuse_unknown(self, names: Sequence[str]) -> None:
        """Raise an error if the chosen model ("gpu" or "tpu") does not support the kernel."""
        for variable, name in itertools.zip_longest(self._jaxpr.invars, names):
            space = getattr(variable.aval, "memory_space", None)
            module = type(space).__module__ if space is not None else ""
            if "mosaic_gpu" in module:
                raise UnsupportedError(
                    f"in kernel {self.name}, {name} lies in {space} of Pallas's Mosaic GPU "
                    "backend, which flashsim does not support; write the kernel with plain refs, "
                    "as for jax.experimental.pallas.triton"
                )
            if self.model == "gpu" and ".mosaic.core" in module:
                raise OptionError(
                    f"in kernel {self.name}, {name} lies in the memory space {space}, which only a "
                    "TPU has; trace the kernel with model='tpu'"
                )

    def run(self, notes: PallasNotes) -> list[Any]:
        """Run all programs, and return the outputs as JAX arrays."""
        (self._on_tpu if self.model == "tpu" else self._on_gpu)(notes)
        outputs = [jax.numpy.asarray(o.tensor.array.copy()) for o in self.operands if o.output]
        notes.finish(self, outputs)
        return outputs

    def _on_gpu(self, notes: PallasNotes) -> None:
        """Run the programs, each with new scratch buffers; refs are views of device memory."""
        vmapped = self._mapping.vmapped_dims  # these axes run slowest
        plain = [d for d in range(len(self.grid)) if d not in vmapped]
        self.axes = (*plain, *reversed(vmapped))
        self.held = most_live(self._jaxpr)
        notes.kernel(self)
        scalars = [Ref.whole(one.array, one, one.name) for one in self.scalars]
        for slow_first in itertools.product(*(range(self.grid[d]) for d in reversed(self.axes))):
            at = dict(zip(reversed(self.axes), slow_first, strict=True))
            index = tuple(at[d] for d in range(len(self.grid)))
            notes.program(index)
            refs = [one.window(self._start(one, index)) for one in self.operands]
            self._program(index, [*scalars, *refs], {})

    def _on_tpu(self, notes: PallasNotes) -> None:
        """Run the grid steps in order; copy changed blocks to and from VMEM."""
        steps = list(itertools.product(*map(range, self.grid)))
        starts = [[self._start(one, index) for one in self.operands] for index in steps]
        self.axes = self._tpu_axes(steps, starts)
        self.held = self._in_vmem()
        notes.kernel(self)
        kept: dict[int, Any] = {}  # scratch buffers, which persist through the whole grid
        scalars: list[Ref] = []
        for number, index in enumerate(steps):
            notes.program(index)
            if not number:
                for one in self.scalars:  # prefetched to SMEM before the first step
                    whole = Ref.whole(one.array, one, one.name)
                    notes.access("load", everything(whole), None, self.where)
                    scalars.append(Ref.whole(one.array.copy(), name=one.name))
            refs: list[Ref] = []
            for place, operand in enumerate(self.operands):
                if operand.in_hbm:
                    tensor = operand.tensor
                    refs.append(Ref.whole(tensor.array, tensor, tensor.name))
                    continue
                if not number or starts[number][place] != starts[number - 1][place]:
                    fetch(notes, operand, starts[number][place])
                assert operand.ref is not None
                refs.append(operand.ref)
            self._program(index, [*scalars, *refs], kept)
            for place, operand in enumerate(self.operands):
                start, after = starts[number][place], starts[number + 1 : number + 2]
                leaves = not after or after[0][place] != start
                if operand.output and not operand.in_hbm and leaves:
                    write_back(notes, operand, start)

    def _start(self, operand: BlockOperand, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return where an operand's block begins in each dimension of the operand's tensor."""
        closed = operand.mapping.index_map_jaxpr
        # The scalar core reads prefetched scalars, which moves no bytes.
        refs = [Ref.whole(one.array, None, one.name) for one in self.scalars]
        found = self._walker.run(closed.jaxpr, closed.consts, [*map(np.int32, index), *refs])
        starts = []
        for place, (number, length) in enumerate(zip(found, operand.block, strict=True)):
            kind = type(operand.mapping.block_shape[place]).__name__
            whole = kind == "Element" or operand.squeezed[place]
            starts.append(int(number) * (1 if whole else length) - operand.before[place])
        return tuple(starts)

    def _program(self, index: tuple[int, ...], refs: list[Any], kept: dict[int, Any]) -> None:
        """Run the kernel's body for one program; `kept` has the scratch buffers that exist."""
        walker = self._walker
        for number, (_, variable) in enumerate(self._scratch):
            if number not in kept:
                kept[number] = scratch(variable.aval, f"scratch {number}")
        walker.buffers = {
            name: kept[n] for n, (name, _) in enumerate(self._scratch) if kept[n] is not None
        }
        walker.carried = {}
        axes = [d for d in range(len(index)) if d not in self._mapping.vmapped_dims]
        walker.program = tuple(index[d] for d in axes)
        walker.sizes = tuple(self.grid[d] for d in axes)
        try:
            walker.run(self._jaxpr, (), [*refs, *(kept[n] for n in range(len(self._scratch)))])
        finally:
            walker.program = None

    def _tpu_axes(
        self, steps: Sequence[tuple[int, ...]], starts: Sequence[Sequence[tuple[int, ...]]]
    ) -> tuple[int, ...]:
        """Return the fewest leading axes of a grid that determine the blocks of all outputs."""
        blocked = [n for n, o in enumerate(self.operands) if o.output and not o.in_hbm]
        blocks = [[start[n] for n in blocked] for start in starts]
        for leading in range(len(self.grid)):
            seen: dict[tuple[int, ...], Any] = {}
            pairs = zip(steps, blocks, strict=True)
            if all(seen.setdefault(index[:leading], block) == block for index, block in pairs):
                return tuple(range(leading))
        return tuple(range(len(self.grid)))

    def _in_vmem(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return, by name, the shape and bytes of each block and scratch buffer in VMEM.

        One buffer per input is not counted, because the trace lists that buffer as a loaded tile.
        """
        found = {}
        for operand in (one for one in self.operands if not one.in_hbm):
            mode = getattr(operand.mapping, "pipeline_mode", None)
            copies = getattr(mode, "buffer_count", 2) - (not operand.output)
            size = math.prod(operand.block) * operand.tensor.array.itemsize
            found[operand.tensor.name] = (operand.block, copies * size)
        for name, variable in self._scratch:
            buffer = scratch(variable.aval, name)
            if buffer is not None and buffer.array.nbytes:
                found[name] = (buffer.shape, buffer.array.nbytes)
        return found


def fetch(notes: PallasNotes, operand: BlockOperand, start: tuple[int, ...]) -> None:
    """Set `operand.ref` to a block in VMEM; only blocks of inputs are copied from device memory."""
    view = operand.window(start)
    if operand.output and start in operand.visited:
        notes.revisit(operand, operand.where)
    operand.visited.add(start)
    if not operand.output:
        notes.access("load", inner(view), None, operand.where)
    gone = tuple(d for d, off in enumerate(operand.squeezed) if off)
    buffer = np.squeeze(everything(view).read(None), gone)
    operand.ref = Ref.whole(buffer, name=operand.tensor.name)


def write_back(notes: PallasNotes, operand: BlockOperand, start: tuple[int, ...]) -> None:
    """Copy an output's block from VMEM to device memory."""
    view = operand.window(start)
    assert operand.ref is not None
    notes.access("store", inner(view), None, operand.where)
    lanes = everything(view)
    lanes.write(operand.ref.array.reshape(lanes.shape), None)


def everything(ref: Ref) -> Lanes:
    """Return all lanes (elements) of a ref, including squeezed dimensions and any past the end."""
    return locate(replace(ref, squeezed=(False,) * len(ref.shape)), ())


def inner(ref: Ref) -> Lanes:
    """Return the lanes (elements) of a ref inside the array, which a TPU's pipeline copies."""
    bounds = list(ref.bounds)
    start = tuple(min(low, size) for (low, _), size in zip(bounds, ref.array.shape, strict=True))
    shape = tuple(max(end - low, 0) for low, end in bounds)
    return everything(replace(ref, start=start, shape=shape))


# -- operands and blocks ---------------------------------------------------------------------------


def operands_of(
    params: dict[str, Any], names: Sequence[str], inputs: Sequence[Any], equation: Any
) -> list[BlockOperand]:
    """Return a `pallas_call`'s inputs and outputs; an aliased output is the input operand."""
    mapping = params["grid_mapping"]
    aliases = {output: given for given, output in params["input_output_aliases"]}
    operands: list[BlockOperand] = []
    for number, (one, name) in enumerate(zip(mapping.block_mappings, names, strict=False)):
        output = number - len(inputs)
        if output < 0:
            tensor = HbmTensor(name, held(inputs[number]), inputs[number])
        elif output in aliases:
            tensor = operands[aliases[output] - mapping.num_index_operands].tensor
        else:
            aval = one.array_aval
            tensor = HbmTensor(name, uninitialized(aval.shape, np.dtype(aval.dtype)))
        where = spec_line(one, equation)
        operands.append(BlockOperand(tensor, one, output >= 0, where, *block_of(one, name)))
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
    for_tpu = for_tpu or bool(params["grid_mapping"].num_index_operands) or has(jaxpr, "dma_start")
    return cast(Model, model or ("tpu" if for_tpu else "gpu"))


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
