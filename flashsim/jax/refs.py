"""Refs (array references) of a Pallas kernel: which elements an access touches, and element values.

A `Ref` is a window of a NumPy array, which is a tensor in device memory or an on-chip buffer.
`locate` converts the transforms of one access (`ref[...]`, `ref.at[...]`, reshape, transpose) to
`Lanes`, with one lane per element. For a lane outside of the window or the array, a load gives
`poison`, and a store has no effect, as in Pallas's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsim.errors import UnsupportedError


@dataclass(eq=False)
class HbmTensor:
    """An operand of a kernel in device memory; `source` is the JAX array that was copied."""

    name: str
    array: np.ndarray
    source: Any = None


@dataclass(eq=False)
class Ref:
    """A window of the array `array`, which starts at `start` and has the lengths `shape`.

    The kernel does not see the dimensions in `squeezed`, whose length is 1. `tensor` is the operand
    in device memory, or None for an on-chip buffer.
    """

    array: np.ndarray
    start: tuple[int, ...]
    shape: tuple[int, ...]
    squeezed: tuple[bool, ...]
    tensor: HbmTensor | None = None
    name: str = ""

    @classmethod
    def whole(cls, array: np.ndarray, tensor: HbmTensor | None = None, name: str = "") -> Ref:
        """Return a ref to a complete array."""
        none = (False,) * array.ndim
        return cls(array, (0,) * array.ndim, array.shape, none, tensor, name)

    @property
    def bounds(self) -> Iterator[tuple[int, int]]:
        """Yield, per dimension, the first index inside the window and the array, and the end."""
        for first, length, size in zip(self.start, self.shape, self.array.shape, strict=True):
            yield max(first, 0), min(first + length, size)


@dataclass(eq=False)
class Lanes:
    """The array elements that one load or store accesses, one lane per element.

    `at` has the lanes' indices in the array, one int64 array per dimension. The arrays have the
    shape `shape` of the loaded or stored value. For a box of lanes that all lie inside the window
    and the array, `index` selects the lanes faster.
    """

    ref: Ref
    shape: tuple[int, ...]
    at: tuple[np.ndarray, ...]
    index: tuple[slice | int, ...] | None = None

    def inside(self, kept: np.ndarray | None) -> np.ndarray:
        """Return a boolean per lane: True if it is kept, and inside the window and the array."""
        found = np.ones(self.shape, bool) if kept is None else kept.copy()
        for at, (low, end) in zip(self.at, self.ref.bounds, strict=True):
            found &= (at >= low) & (at < end)
        return found

    def read(self, kept: np.ndarray | None) -> np.ndarray:
        """Return the lanes' values, with `poison` for lanes outside of the array or not kept."""
        if self.index is not None:
            value = np.array(self.ref.array[self.index])
            if kept is not None:
                value[~kept] = poison(value.dtype)
            return value
        kept = self.inside(kept)
        value = uninitialized(self.shape, self.ref.array.dtype)
        value[kept] = self.ref.array[tuple(at[kept] for at in self.at)]
        return value

    def write(self, value: np.ndarray, kept: np.ndarray | None) -> None:
        """Store `value` in those lanes that are kept and inside the array."""
        if kept is None and self.index is not None:
            self.ref.array[self.index] = value
        else:
            kept = self.inside(kept)
            self.ref.array[tuple(at[kept] for at in self.at)] = value[kept]

    def combine(self, operation: np.ufunc, value: np.ndarray, kept: np.ndarray | None) -> None:
        """Combine `value` with the lanes' elements in place; two lanes may share one element."""
        kept = self.inside(kept)
        operation.at(self.ref.array, tuple(at[kept] for at in self.at), value[kept])


def poison(dtype: np.dtype) -> Any:
    """Return the value that stands for memory that was never written: NaN or the least integer."""
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else np.array(np.nan).astype(dtype)


def uninitialized(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return an array filled with `poison`, which stands for memory that was never written."""
    return np.full(tuple(shape), poison(dtype), dtype)


def grid(axes: Sequence[tuple[int, int, int]], dims: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return the coordinates of a box's lanes, one array per dimension, with the axes `dims`.

    A box has (first, length, step) per dimension of the array.
    """
    shape = tuple(axes[d][1] for d in dims)
    arrays = []
    for d, (first, length, step) in enumerate(axes):
        at = first + step * np.arange(length, dtype=np.int64)
        at = at.reshape([length if d == along else 1 for along in dims])
        arrays.append(np.broadcast_to(at, shape))
    return tuple(arrays)


def is_slice(index: Any) -> bool:
    """Return True if one entry of an index is a Pallas slice, with a start, a size and a stride."""
    return hasattr(index, "start") and hasattr(index, "size") and hasattr(index, "stride")


def locate(ref: Ref, transforms: Sequence[Any]) -> Lanes:
    """Return the lanes (elements) that transforms of a ref, such as indices, select."""
    axes = [(first, length, 1) for first, length in zip(ref.start, ref.shape, strict=True)]
    dims = [d for d, gone in enumerate(ref.squeezed) if not gone]
    arrays: tuple[np.ndarray, ...] | None = None
    for transform in transforms:
        indices = getattr(transform, "indices", None)
        if arrays is not None or indices is None:
            arrays = transformed(grid(axes, dims) if arrays is None else arrays, transform)
        elif all(is_slice(index) or np.ndim(index) == 0 for index in indices):
            axes, dims = sliced(axes, dims, indices)
        else:
            arrays = gathered(axes, dims, indices)
    index: tuple[slice | int, ...] | None = None
    if arrays is None:
        arrays = grid(axes, dims)
        if all(
            low <= first and first + (length - 1) * step < end
            for (first, length, step), (low, end) in zip(axes, ref.bounds, strict=True)
        ):
            index = tuple(
                slice(first, first + length * step, step) if d in dims else first
                for d, (first, length, step) in enumerate(axes)
            )
    return Lanes(ref, arrays[0].shape if arrays else (), arrays, index)


def sliced(
    axes: Sequence[tuple[int, int, int]], dims: Sequence[int], indices: Sequence[Any]
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Return `Lanes.axes` and `Lanes.dims` of a box that is indexed by slices and integers."""
    axes, left = list(axes), []
    for d, index in zip(dims, indices, strict=True):
        first, _, step = axes[d]
        if is_slice(index):
            axes[d] = (first + int(index.start) * step, length_of(index), step * int(index.stride))
            left.append(d)
        else:
            axes[d] = (first + int(index) * step, 1, 1)
    return axes, left


def length_of(index: Any) -> int:
    """Return the length of a slice, which must be known when the kernel is traced."""
    try:
        return int(index.size)
    except TypeError:
        raise UnsupportedError(
            f"a slice whose length is computed inside the kernel ({index.size}) cannot be traced; "
            "pass pl.ds a Python integer as size, and mask the elements that you do not need"
        ) from None


def gathered(
    axes: Sequence[tuple[int, int, int]], dims: Sequence[int], indices: Sequence[Any]
) -> tuple[np.ndarray, ...]:
    """Return the coordinates of lanes after a box is indexed by slices and arrays of integers."""
    steps = [
        np.arange(length_of(i), dtype=np.int64) * int(i.stride) + int(i.start)
        if is_slice(i)
        else np.asarray(i, np.int64)
        for i in indices
    ]
    common = np.broadcast_shapes(
        *(step.shape for step, i in zip(steps, indices, strict=True) if not is_slice(i))
    )
    # NumPy arranges the axes: each array is replaced by one that numbers its elements.
    numbers = np.arange(math.prod(common)).reshape(common)
    index = tuple(slice(None) if is_slice(i) else numbers for i in indices)
    values = [
        step if is_slice(i) else np.broadcast_to(step, common).ravel()
        for step, i in zip(steps, indices, strict=True)
    ]
    places = [at[index] for at in grid([(0, len(x), 1) for x in values], range(len(values)))]
    shape = places[0].shape
    coordinates = [np.broadcast_to(np.int64(first), shape) for first, _, _ in axes]
    for d, x, at in zip(dims, values, places, strict=True):
        first, _, step = axes[d]
        coordinates[d] = first + step * x[at]
    return tuple(coordinates)


def transformed(arrays: tuple[np.ndarray, ...], transform: Any) -> tuple[np.ndarray, ...]:
    """Return the coordinates of lanes after a reshape, a transpose or a further index."""
    kind = type(transform).__name__
    if kind == "ReshapeTransform":
        return tuple(at.reshape(transform.shape) for at in arrays)
    if kind == "TransposeTransform":
        return tuple(at.transpose(transform.permutation) for at in arrays)
    if hasattr(transform, "indices"):
        index = tuple(
            slice(int(i.start), int(i.start) + length_of(i) * int(i.stride), int(i.stride))
            if is_slice(i)
            else np.asarray(i)
            for i in transform.indices
        )
        return tuple(at[index] for at in arrays)
    raise UnsupportedError(
        f"a ref is transformed by {kind}, which flashsim does not support; index the ref itself, "
        "and reshape or convert the value"
    )
