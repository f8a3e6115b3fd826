"""Translate simulated addresses to tensor elements and real memory, and record each access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsim.errors import MemoryModelError, UnsupportedError
from flashsim.own_kernels import Recorder
from flashsim.triton.arguments import REGION, START, Pointer

Line = tuple[str, int]
#: A callback for each access, with operation, tensor code and element offsets.
Observer = Callable[[int, int, np.ndarray], None]


@dataclass(eq=False)
class Reached:
    """The real memory that the lanes (elements) of one access refer to.

    Attributes
    ----------
    addresses : real addresses, uint64, in the pointers' shape; undefined where `real` is False
    real : True for lanes whose memory may be accessed
    lost : True for active lanes whose address is outside of the tensor's allocation
    """

    addresses: np.ndarray
    real: np.ndarray
    lost: np.ndarray


class Memory:
    """The tensors of one kernel launch, found by simulated address."""

    def __init__(self, recorder: Recorder, pointers: list[Pointer]) -> None:
        self._recorder = recorder
        self._by_code = {one.code: one for one in pointers}
        self._launch: list[Pointer] = []
        self.observer: Observer | None = None
        self.silent = False  # while a program runs again: its accesses are not recorded twice

    def begin(self, pointers: list[Pointer]) -> None:
        """Set the array arguments of the kernel launch that now begins."""
        self._launch = pointers
        self._by_code |= {one.code: one for one in pointers}

    def reach(
        self, op: int, pointers: np.ndarray, mask: np.ndarray, itemsize: int, line: Line
    ) -> Reached:
        """Record an access, and return the real memory that the lanes (elements) refer to.

        MemoryModelError is raised if an active lane's address belongs to no argument of the kernel.
        """
        shape = np.broadcast_shapes(pointers.shape, mask.shape)
        addresses = np.broadcast_to(pointers, shape).astype(np.int64)
        active = np.broadcast_to(mask, shape).astype(bool)
        masked = int(active.size - np.count_nonzero(active))
        real, lost = active.copy(), np.zeros(shape, bool)
        where = np.zeros(shape, np.uint64)
        if masked == active.size:
            self._note(op, -1, np.zeros(0, np.int64), masked, 0, line)
            return Reached(where, real, lost)
        addresses = self._foreign(addresses, active)
        some = addresses if not masked else addresses[active]
        low, high = (int(x - START) // REGION for x in (some.min(), some.max()))
        region = None if low == high else (addresses - START) // REGION
        codes = [low] if region is None else np.unique(region[active]).tolist()
        for code in codes:
            its = self._by_code[code]
            chosen: Any = active
            if region is not None:
                chosen = active & (region == code)
            elif not masked:
                chosen = ...
            moved = addresses[chosen] - its.address  # bytes from the first element
            self._one(op, its, moved, itemsize, masked if code == codes[0] else 0, line)
            at = its.start + moved
            where[chosen] = (its.memory + at).astype(np.uint64)
            if int(at.min()) < 0 or int(at.max()) + itemsize > its.size:
                inside = (at >= 0) & (at + itemsize <= its.size)
                real[chosen] = inside
                lost[chosen] = ~inside
        return Reached(where, real, lost)

    def _foreign(self, addresses: np.ndarray, active: np.ndarray) -> np.ndarray:
        """Translate real addresses to simulated addresses, for a tensor that holds pointers."""
        first, most = START, START + len(self._recorder.tensors) * REGION
        if int(addresses.min()) >= first and int(addresses.max()) < most:
            return addresses
        strange = active & ((addresses < first) | (addresses >= most))
        if not strange.any():
            return addresses
        addresses = addresses.copy()
        for its in self._by_code.values():
            begin = its.memory + its.start
            mine = strange & (addresses >= begin) & (addresses < its.memory + its.size)
            addresses[mine] += its.address - begin
            strange &= ~mine
        if strange.any():
            names = ", ".join(t.name for t in self._recorder.tensors)
            raise MemoryModelError(
                f"{int(strange.sum())} of {strange.size} pointers point to no tensor that was "
                f"passed ({names}); compute each pointer from an argument of the kernel, and "
                "check whether a load or store lacks its mask, or uses a number as a pointer",
                "outside",
            )
        return addresses

    def _one(
        self, op: int, its: Pointer, moved: np.ndarray, itemsize: int, masked: int, line: Line
    ) -> None:
        """Record the lanes of an access whose pointers were computed from one tensor's address."""
        if itemsize % its.itemsize:
            raise UnsupportedError(
                f"{self._recorder.tensors[its.code].name} has elements of {its.itemsize} B, but "
                f"the kernel accesses elements of {itemsize} B; pass it with the element type that "
                "the kernel uses"
            )
        tensor = self._recorder.tensors[its.code]
        offsets, rest = np.divmod(moved.ravel(), its.itemsize)
        plain = tensor.contiguous and itemsize == its.itemsize and not rest.any()
        if plain and int(offsets.min()) >= 0 and int(offsets.max()) < tensor.span:
            self._note(op, its.code, offsets, masked, 0, line)
            return
        if tensor.contiguous:
            exists = (offsets >= 0) & (offsets < tensor.span)
        else:
            _, exists = tensor.coordinates(offsets)
        exists &= rest == 0
        if itemsize > its.itemsize:  # an accessed element spans several of the tensor's
            steps = np.arange(itemsize // its.itemsize)
            exists &= offsets + steps[-1] < tensor.span
        good = offsets[exists]
        if itemsize > its.itemsize:
            good = (good[:, None] + steps).ravel()
        if not exists.all():
            others, outside = self._others(its, moved.ravel()[~exists], itemsize)
            for code, found in others.items():
                self._note(op, code, found, 0, 0, line)
            self._note(op, its.code, good, masked, outside, line)
            return
        self._note(op, its.code, good, masked, 0, line)

    def _others(
        self, its: Pointer, moved: np.ndarray, itemsize: int
    ) -> tuple[dict[int, np.ndarray], int]:
        """Find elements past the tensor `its` that belong to another tensor in the allocation."""
        found: dict[int, np.ndarray] = {}
        left = its.start + moved
        for other in self._launch:
            if other.memory != its.memory or other is its or other.itemsize != itemsize:
                continue
            offsets, rest = np.divmod(left - other.start, itemsize)
            _, exists = self._recorder.tensors[other.code].coordinates(offsets)
            exists &= rest == 0
            if exists.any():
                found[other.code] = offsets[exists]
                left = left[~exists]
        return found, int(left.size)

    def _note(
        self, op: int, code: int, offsets: np.ndarray, masked: int, outside: int, line: Line
    ) -> None:
        if not self.silent:
            if code < 0 or not offsets.size:
                self._recorder.access(
                    op, code if outside else -1, offsets, masked=masked, outside=outside, line=line
                )
            else:
                self._recorder.access(op, code, offsets, masked=masked, outside=outside, line=line)
        if self.observer is not None and offsets.size:
            self.observer(op, code, offsets)


def dtype_of(handle: Any) -> int:
    """Return the number of bytes of an element that a pointer handle points to."""
    return max(1, handle.get_element_ty().primitive_bitwidth // 8)
