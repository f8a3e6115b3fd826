"""`KernelTensor`: the memory layout of a kernel's argument, and the element at each offset."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flashsim.errors import ShapeError


@dataclass(frozen=True)
class KernelTensor:
    """An argument of a kernel: its name, shape, strides and element type.

    Attributes
    ----------
    name : the kernel's parameter name
    strides : per axis, the step in elements to the next index, which is never negative
    dtype : the element type's name, such as "float16" or "int32"
    itemsize : bytes per element
    code : the tensor's number in the record
    buffer : the number of the allocation that holds the tensor, shared by views of one array
    start : the byte offset of the first element in the allocation
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    code: int
    buffer: int
    start: int = 0

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides):
            raise ShapeError(
                f"{self.name} has {len(self.shape)} axes but {len(self.strides)} strides; pass one "
                "stride per axis"
            )
        if any(stride < 0 for stride in self.strides):
            raise ShapeError(
                f"{self.name} has a negative stride: {self.strides}. Negative strides are not "
                "supported; pass a contiguous copy"
            )

    @property
    def size(self) -> int:
        """Return the number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all elements together, without gaps between elements."""
        return self.size * self.itemsize

    @cached_property
    def span(self) -> int:
        """Return the length in elements from the first to the last element, gaps included."""
        if not self.size:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    @cached_property
    def contiguous(self) -> bool:
        """Return True if the elements are contiguous in memory, in the order of their indices."""
        step = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != step:
                return False
            step *= n
        return True

    @cached_property
    def _axes(self) -> list[int]:
        """Return the axes of length over 1 and stride over 0, the largest stride first."""
        moving = [a for a, n in enumerate(self.shape) if n > 1 and self.strides[a] > 0]
        return sorted(moving, key=lambda a: -self.strides[a])

    def coordinates(self, offsets: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Return indices of the elements at offsets, one array per axis, and a mask: True if real.

        No element exists at an offset past the end, or in a gap between rows.
        """
        rest = offsets
        found = [np.zeros_like(offsets) for _ in self.shape]
        exists = offsets >= 0
        for axis in self._axes:
            index, rest = np.divmod(rest, self.strides[axis])
            exists = exists & (index < self.shape[axis])
            found[axis] = index
        return found, exists & (rest == 0)

    def offsets(self, index: tuple[slice | np.ndarray | int, ...]) -> np.ndarray:
        """Return the offsets of the elements that a NumPy-like index selects, in the same shape."""
        whole = np.zeros(self.shape, np.int64)
        for along, step in zip(np.indices(self.shape, sparse=True), self.strides, strict=True):
            whole += along * step
        return whole[index]
