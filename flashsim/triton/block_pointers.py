"""Block pointers (`tl.make_block_ptr` and `tl.advance`) for Triton 3.9, which removed them.

Many homework files use block pointers, which Triton's own interpreter supports up to version 3.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashsim.triton.installed import installed
from flashsim.triton.narrow_floats import handle


@dataclass(frozen=True)
class BlockPointer:
    """A block of a tensor: base, shape, strides, offsets and block shape, counted in elements."""

    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offsets: tuple[int, ...]
    block_shape: tuple[int, ...]

    @property
    def element(self) -> Any:
        """Return Triton's element type of the tensor."""
        return self.base.dtype.element_ty

    @property
    def dtype(self) -> Any:
        """Return the type of the pointer `base`, so that `p.dtype.element_ty` works in kernels."""
        return self.base.dtype

    #: Kernels also write `p.type.element_ty`.
    type = dtype

    def lanes(self, boundary_check: Iterable[int]) -> tuple[Any, Any]:
        """Return the pointers of the block's elements, and a mask that is False out of bounds."""
        tl = installed().tl
        size = max(1, self.element.primitive_bitwidth // 8)
        pointers = np.broadcast_to(self.base.handle.data.astype(np.int64), self.block_shape)
        mask = np.ones(self.block_shape, bool)
        for axis, block in enumerate(self.block_shape):
            side = [1] * len(self.block_shape)
            side[axis] = block
            at = (self.offsets[axis] + np.arange(block, dtype=np.int64)).reshape(side)
            pointers = pointers + at * self.strides[axis] * size
            if axis in boundary_check:
                mask = mask & (at >= 0) & (at < self.shape[axis])
        return self._tile(pointers.astype(np.uint64), self.base.dtype), self._tile(mask, tl.int1)

    def _tile(self, data: np.ndarray, dtype: Any) -> Any:
        tl = installed().tl
        return tl.tensor(handle(data, dtype), tl.block_type(dtype, list(self.block_shape)))

    def advance(self, offsets: Any, **_: Any) -> BlockPointer:
        """Return this block pointer moved by `offsets`, as `tl.advance` did up to Triton 3.8."""
        moved = tuple(a + b for a, b in zip(self.offsets, numbers(offsets), strict=True))
        return replace(self, offsets=moved)

    def store(self, value: Any, *args: Any, **options: Any) -> None:
        """Store to the block, as `tl.store` did with a block pointer up to Triton 3.8."""
        installed().tl.store(self, value, *args, **options)


def number(value: Any) -> int:
    """Return a kernel's integer (one-element tensor, constexpr or int) as a Python int."""
    value = getattr(value, "value", value)
    data = getattr(getattr(value, "handle", None), "data", None)
    return int(value if data is None else data.item())


def numbers(given: Any) -> tuple[int, ...]:
    """Return several of a kernel's integers as Python ints."""
    return tuple(number(one) for one in given)


def make_block_ptr(
    base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any, **_: Any
) -> BlockPointer:
    """Make a block pointer, as `tl.make_block_ptr` did up to Triton 3.8."""
    sides = shape, strides, offsets, block_shape
    return BlockPointer(base, *(numbers(one) for one in sides))


def advance(base: BlockPointer, offsets: Any, **_: Any) -> BlockPointer:
    """Return a block pointer moved by `offsets`, as `tl.advance` did up to Triton 3.8."""
    return base.advance(offsets)


def loading(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `tl.load` that also accepts block pointers."""

    def load(pointer: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(pointer, BlockPointer):
            return plain(pointer, *args, **_without(options))
        checked = numbers(options.get("boundary_check", args[2] if len(args) > 2 else ()))
        padding = options.get("padding_option", "")
        other = float("nan") if getattr(padding, "value", padding) == "nan" else 0
        return plain(*pointer.lanes(checked), other=other)

    return load


def storing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `tl.store` that also accepts block pointers."""

    def store(pointer: Any, value: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(pointer, BlockPointer):
            return plain(pointer, value, *args, **_without(options))
        checked = numbers(options.get("boundary_check", args[1] if len(args) > 1 else ()))
        lanes, mask = pointer.lanes(checked)
        return plain(lanes, value, mask)

    return store


def _without(options: dict[str, Any]) -> dict[str, Any]:
    """Drop block pointers' options, which Triton up to 3.8 also accepts for plain pointers."""
    return {k: v for k, v in options.items() if k not in ("boundary_check", "padding_option")}
