"""Converts a kernel's arguments: each array gets a separate range of simulated addresses.

A pointer identifies its tensor, even if it points outside of the tensor. An array that is passed
twice gets two ranges, and so keeps two names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from flashsim.errors import DTypeError, UnsupportedError, shown
from flashsim.own_kernels import KernelTensor, Recorder
from flashsim.triton.installed import installed
from flashsim.triton.narrow_floats import exact_dtype

#: Tensor k has the simulated addresses from START + k * REGION on. Real addresses are below START.
START, REGION = 1 << 60, 1 << 40
#: Element types: the name in NumPy, ml_dtypes and torch, and the name in Triton.
_TYPES = {
    **{name: name for name in ("float64", "float32", "float16", "bfloat16")},
    **{"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"},
    **{"float8_e4m3fnuz": "float8e4b8", "float8_e5m2fnuz": "float8e5b16"},
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (64, 32, 16, 8)},
    "bool": "int1",
}


class ArrayLayout(NamedTuple):
    """The memory layout of an array argument.

    Attributes
    ----------
    dtype : the element type, as `Problem` names types
    itemsize : bytes per element
    memory, size : the allocation's real address, and its size in bytes
    start : bytes from the allocation's start to the first element
    array : the user's array, or a copy of it if it cannot be written to
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    memory: int
    size: int
    start: int
    array: Any


@dataclass(eq=False)
class Pointer:
    """An array argument's simulated address, which the interpreter passes to the kernel.

    Attributes
    ----------
    tensor : the tensor in the record
    memory, size : the allocation's real address, and its size in bytes
    array : the user's array, or a copy of it if it cannot be written to
    given : the kernel's argument, which is kept alive, so that its address stays unique
    """

    tensor: KernelTensor
    memory: int
    size: int
    array: Any = field(repr=False)
    given: Any = field(repr=False)

    @property
    def code(self) -> int:
        """Return the tensor's code in the record."""
        return self.tensor.code

    @property
    def element(self) -> Any:
        """Return Triton's element type."""
        return getattr(installed().tl, _TYPES[self.tensor.dtype])

    @cached_property
    def address(self) -> int:
        """Return the simulated address that the kernel gets."""
        return START + self.code * REGION + REGION // 2 + self.tensor.start

    @property
    def begin(self) -> int:
        """Return the real address of the first element."""
        return self.memory + self.tensor.start

    def allocation(self) -> np.ndarray:
        """Return the bytes of the complete allocation as a NumPy array, without a copy."""
        raw: Any = (ctypes.c_uint8 * max(self.size, 1)).from_address(self.memory)
        return np.frombuffer(raw, np.uint8, self.size)

    def values(self, allocation: np.ndarray | None = None) -> np.ndarray:
        """Return the tensor's values, without a copy: those of now, or of a copied allocation."""
        its, dtype = self.tensor, exact_dtype(self.tensor.dtype)
        steps = tuple(step * dtype.itemsize for step in its.strides)
        held: Any = self.allocation() if allocation is None else allocation
        return np.ndarray(its.shape, dtype, held, its.start, steps)


class Arguments:
    """Converts the arguments of all kernel launches, and keeps the arrays alive."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.pointers: list[Pointer] = []

    def take(
        self, name: str, given: Any, taken: dict[str, int], visible: Callable[[str], bool]
    ) -> Any:
        """Convert an argument's arrays to `Pointer`s; add each array's tensor code to `taken`."""
        if isinstance(given, np.generic):
            return given.item()
        if given is None or isinstance(given, (bool, int, float, str)) or not visible(name):
            return given
        if isinstance(given, tuple):
            parts = [self.take(f"{name}_{n}", x, taken, visible) for n, x in enumerate(given)]
            return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
        base = getattr(given, "base", None)
        if hasattr(given, "block_shape") and hasattr(given, "padding"):  # a TensorDescriptor
            return Descriptor(given, self.take(name, base, taken, visible))
        if type(given).__name__ == "TensorWrapper":  # triton.reinterpret: another element type
            return self._point(name, base, _dtype_name(name, given.dtype), taken)
        if type(given).__module__.startswith("triton."):  # a type, a constexpr, a helper
            return given
        if callable(given) and not hasattr(given, "dtype"):
            return given
        return self._point(name, given, None, taken)

    def _point(self, name: str, given: Any, dtype: str | None, taken: dict[str, int]) -> Pointer:
        its = layout_of(name, given)
        if its.start >= REGION // 4 or its.size >= REGION // 4:
            raise UnsupportedError(
                f"{name} is part of an allocation of {its.size:,} B, but at most 2^38 B can be "
                "traced; pass a copy of only the part that the kernel needs"
            )
        code = self._recorder.tensor(
            *(name, its.shape, its.strides, dtype or its.dtype, its.itemsize),
            buffer=its.memory,
            start=its.start,
            unlike=taken.values(),
        )
        taken[name] = code
        if code == len(self.pointers):  # a new tensor
            tensor = self._recorder.tensors[code]
            self.pointers.append(Pointer(tensor, its.memory, its.size, its.array, given))
        return self.pointers[code]


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor made on the host, whose base is a `Pointer`."""

    given: Any
    base: Any


def _dtype_name(name: str, dtype: Any) -> str:
    tl = installed().tl
    word = str(dtype).removeprefix("torch.")
    word = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.get(word, word)
    for ours, theirs in _TYPES.items():
        if word in (ours, theirs, str(getattr(tl, theirs))):
            return ours
    raise DTypeError(
        f"{name} has elements of {shown(dtype)}, which Triton's interpreter does not support; "
        f"convert them to one of {', '.join(_TYPES)}"
    )


def layout_of(name: str, given: Any) -> ArrayLayout:
    """Return the memory layout of a NumPy, torch or JAX array."""
    if isinstance(given, np.ndarray):
        return _of_numpy(name, given)
    if hasattr(given, "untyped_storage"):
        return _of_torch(name, given)
    module = type(given).__module__.partition(".")[0]
    if module in ("jax", "jaxlib"):  # cannot be written to: the kernel gets a copy
        return _of_numpy(name, np.array(given))
    raise DTypeError(
        f"{name} is {shown(given)}, which is not an array; pass a NumPy, torch or JAX array, a "
        "number, or any constant for a tl.constexpr parameter"
    )


def _of_numpy(name: str, array: np.ndarray) -> ArrayLayout:
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    dtype = _dtype_name(name, array.dtype)
    for along, step in enumerate(array.strides):
        if array.shape[along] > 1 and (step < 0 or step % array.itemsize):
            raise DTypeError(
                f"{name} has strides of {array.strides} B: a stride is negative or not a multiple "
                f"of the element size; pass numpy.ascontiguousarray({name})"
            )
    low, high = np.lib.array_utils.byte_bounds(root)
    strides = tuple(step // array.itemsize for step in array.strides)
    memory = low, high - low, array.ctypes.data - low
    return ArrayLayout(array.shape, strides, dtype, array.itemsize, *memory, array)


def _of_torch(name: str, tensor: Any) -> ArrayLayout:
    if str(tensor.device) != "cpu":
        raise DTypeError(
            f"{name} is on {tensor.device}, but kernels are traced on the CPU; pass {name}.cpu()"
        )
    storage, itemsize = tensor.untyped_storage(), tensor.element_size()
    memory = storage.data_ptr(), storage.nbytes(), tensor.storage_offset() * itemsize
    layout = tuple(tensor.shape), tuple(tensor.stride()), _dtype_name(name, tensor.dtype)
    return ArrayLayout(*layout, itemsize, *memory, tensor)
