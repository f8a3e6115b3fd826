"""Translate simulated addresses to tensor elements and real memory, and record each access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
        self._pointers = pointers  # in the order of the tensors' codes
        self._launch: list[Pointer] = []
        self.observer: Observer | None = None
        self.silent = False  # while a program runs again: its accesses are not recorded twice

    def begin(self, pointers: list[Pointer]) -> None:
        """Set the array arguments of the kernel launch that now begins."""
        self._launch = pointers

    def reach(self, op: int, pointers: Any, active: np.ndarray, line: Line) -> Reached:
        """Record an access by an interpreter's handle of pointers; return the real memory.

        MemoryModelError is raised if an active lane's address belongs to no argument of the kernel.
        """
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        shape = np.broadcast_shapes(pointers.data.shape, active.shape)
        addresses = np.broadcast_to(pointers.data, shape).astype(np.int64)
        active = np.broadcast_to(active, shape).astype(bool)
        masked = int(active.size - np.count_nonzero(active))
        real, lost = active.copy(), np.zeros(shape, bool)
        where = np.zeros(shape, np.uint64)
        note = partial(self._note, op, line)
        if masked == active.size:
            note(-1, np.zeros(0, np.int64), masked)
            return Reached(where, real, lost)
        addresses = self._foreign(addresses, active)
        some = addresses if not masked else addresses[active]
        low, high = (int(x - START) // REGION for x in (some.min(), some.max()))
        region = None if low == high else (addresses - START) // REGION
        codes = [low] if region is None else np.unique(region[active]).tolist()
        for code in codes:
            its = self._pointers[code]
            chosen: Any = active
            if region is not None:
                chosen = active & (region == code)
            elif not masked:
                chosen = ...
            moved = addresses[chosen] - its.address  # bytes from the first element
            self._one(note, its, moved, itemsize, masked if code == codes[0] else 0)
            at = its.tensor.start + moved
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
        for its in self._pointers:
            mine = strange & (addresses >= its.begin) & (addresses < its.memory + its.size)
            addresses[mine] += its.address - its.begin
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
        self,
        note: Callable[..., None],
        its: Pointer,
        moved: np.ndarray,
        itemsize: int,
        masked: int,
    ) -> None:
        """Record the lanes of an access whose pointers were computed from one tensor's address."""
        tensor = its.tensor
        if itemsize % tensor.itemsize:
            raise UnsupportedError(
                f"{tensor.name} has elements of {tensor.itemsize} B, but the kernel accesses "
                f"elements of {itemsize} B; pass it with the element type that the kernel uses"
            )
        offsets, rest = np.divmod(moved.ravel(), tensor.itemsize)
        plain = tensor.contiguous and itemsize == tensor.itemsize and not rest.any()
        if plain and int(offsets.min()) >= 0 and int(offsets.max()) < tensor.span:
            note(its.code, offsets, masked)
            return
        if tensor.contiguous:
            exists = (offsets >= 0) & (offsets < tensor.span)
        else:
            _, exists = tensor.coordinates(offsets)
        # An accessed element may span several of the tensor's.
        steps = np.arange(itemsize // tensor.itemsize)
        exists &= (rest == 0) & (offsets + steps[-1] < tensor.span)
        outside = 0
        if not exists.all():
            others, outside = self._others(its, moved.ravel()[~exists], itemsize)
            for code, found in others.items():
                note(code, found)
        note(its.code, (offsets[exists][:, None] + steps).ravel(), masked, outside)

    def _others(
        self, its: Pointer, moved: np.ndarray, itemsize: int
    ) -> tuple[dict[int, np.ndarray], int]:
        """Find elements past the tensor `its` that belong to another tensor in the allocation."""
        found: dict[int, np.ndarray] = {}
        left = its.tensor.start + moved
        for other in self._launch:
            tensor = other.tensor
            if other.memory != its.memory or other is its or tensor.itemsize != itemsize:
                continue
            offsets, rest = np.divmod(left - tensor.start, itemsize)
            _, exists = tensor.coordinates(offsets)
            exists &= rest == 0
            if exists.any():
                found[tensor.code] = offsets[exists]
                left = left[~exists]
        return found, int(left.size)

    def _note(
        self,
        op: int,
        line: Line,
        code: int,
        offsets: np.ndarray,
        masked: int = 0,
        outside: int = 0,
    ) -> None:
        if not self.silent:
            known = code if offsets.size or outside else -1
            self._recorder.access(op, known, offsets, masked=masked, outside=outside, line=line)
        if self.observer is not None and offsets.size:
            self.observer(op, code, offsets)
