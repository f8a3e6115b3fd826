"""`Recorder`: collects a kernel's accesses and FLOPs from the frontends that run kernels."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashsim.counts.work import KINDS
from flashsim.errors import TraceError
from flashsim.own_kernels.record import ACCESS, ATOMIC, SECTOR, WORK, Clash, KernelRecord, Launch
from flashsim.own_kernels.tensors import KernelTensor
from flashsim.schedule.names import LOAD

_CHUNK = 1 << 14


class Recorder:
    """Collects a kernel's accesses and FLOPs, and finds data races, as the kernel runs.

    For each launch, a frontend calls `tensor` for each argument, and calls `launch` last. For each
    program the frontend calls `program`, then `access` or `block` for each load, store and atomic
    operation, and `work` for each matrix product. At the end the frontend calls `done`.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.tensors: list[KernelTensor] = []
        self.launches: list[Launch] = []
        self.notes: list[str] = []
        self._lines: dict[tuple[str, int], int] = {}
        self._accesses = _Columns(ACCESS)
        self._work = _Columns(WORK)
        self._clashes: dict[tuple[str, int, int], Clash] = {}
        self._program = -1
        self._ordered = self._locked = False
        self._held_most = 0
        self._buffers: dict[int, _Buffer] = {}

    # -- tensors and launches -------------------------------------------------------------------

    def tensor(
        self,
        name: str,
        shape: Iterable[int],
        strides: Iterable[int],
        dtype: str,
        itemsize: int,
        *,
        buffer: int | None = None,
        start: int = 0,
        unlike: Iterable[int] = (),
    ) -> int:
        """Record a tensor and return the tensor's code; a known tensor keeps its code and name.

        Parameters
        ----------
        strides : strides in elements
        buffer, start : a number for the allocation (default: one per name and layout), and the byte
            offset of the first element in the allocation
        unlike : codes of the launch's other arguments, so that a tensor passed twice gets two codes
        """
        shape, strides = tuple(map(int, shape)), tuple(map(int, strides))
        known = [
            one
            for one in self.tensors
            if (one.shape, one.strides, one.dtype) == (shape, strides, dtype)
            and one.code not in unlike
            and (one.name == name if buffer is None else (one.buffer, one.start) == (buffer, start))
        ]
        if known:
            return min(known, key=lambda one: one.name != name).code
        code = len(self.tensors)
        names = {one.name for one in self.tensors}
        label, n = name, 2
        while label in names:  # another tensor under the same parameter, in a later launch
            label, n = f"{name}_{n}", n + 1
        where = -1 - code if buffer is None else buffer
        made = KernelTensor(label, shape, strides, dtype, int(itemsize), code, where, int(start))
        self.tensors.append(made)
        its = self._buffers.setdefault(where, _Buffer(made.itemsize))
        if made.itemsize < its.unit:
            raise TraceError(
                f"{label} has elements of {made.itemsize} B, but a tensor of an earlier launch, "
                f"whose elements have {its.unit} B, shares its memory; pass a view with the "
                "smaller elements to the earlier launch too"
            )
        its.end = max(its.end, made.start + made.span * made.itemsize)
        return code

    def launch(
        self,
        kernel: str,
        grid: Iterable[int],
        *,
        arguments: Mapping[str, int] | None = None,
        constants: Mapping[str, Any] | None = None,
        file: str = "?",
        line: int = 0,
        ordered: bool = False,
    ) -> int:
        """Record a launch, return its number; `ordered` programs run one by one and never race."""
        sides = tuple(map(int, grid)) or (1,)
        self.launches.append(
            Launch(kernel, sides, dict(arguments or {}), dict(constants or {}), file, line)
        )
        self._program = -1
        self._ordered = ordered
        self._held_most = 0
        for buffer in self._buffers.values():
            buffer.writer = buffer.reader = None
        return len(self.launches) - 1

    def program(self, place: Iterable[int]) -> None:
        """Record that the program at these grid coordinates now starts."""
        self._program = self.launches[-1].number(place)
        self._locked = False

    def lock(self) -> None:
        """Record that the running program takes a lock, so its later accesses do not race."""
        self._locked = True

    # -- accesses and work ----------------------------------------------------------------------

    def access(
        self,
        op: int,
        tensor: int,
        offsets: np.ndarray,
        *,
        masked: int = 0,
        outside: int = 0,
        sectors: int | None = None,
        line: tuple[str, int] = ("?", 0),
    ) -> None:
        """Record a load, a store or an atomic operation.

        Parameters
        ----------
        op : LOAD, STORE or ATOMIC
        tensor : the code that `tensor` returned; -1 if no lane is active
        offsets : offsets in elements, int64, of the active lanes inside the tensor
        masked, outside : how many lanes the mask turns off, and how many are outside of the tensor
        sectors : number of 32-byte sectors moved; default: the sectors that hold the elements
        line : the line in the user's file, (file, number)
        """
        number = self._line(line)
        place = len(self.launches) - 1, op, tensor, number, self._program
        if tensor < 0 or not offsets.size:
            self._accesses.add((*place, -1, -1, 0, masked, outside, 0, 0))
            return
        its, unique = self.tensors[tensor], _distinct(offsets)
        corners = self._corners(its, unique)
        sectors = _sectors(its, unique) if sectors is None else sectors
        lanes = offsets.size, masked, outside, unique.size
        self._accesses.add((*place, *corners, *lanes, sectors))
        self._watch(op, its, unique, number)

    def block(
        self,
        op: int,
        tensor: int,
        index: tuple[slice | np.ndarray | int, ...],
        *,
        mask: np.ndarray | None = None,
        line: tuple[str, int] = ("?", 0),
    ) -> None:
        """Record an access to the elements that a NumPy-like index selects."""
        offsets = self.tensors[tensor].offsets(index)
        mask = np.broadcast_to(True if mask is None else mask, offsets.shape)
        self.access(op, tensor, offsets[mask], masked=int((~mask).sum()), line=line)

    def work(self, kind: str, flops: int, *, line: tuple[str, int] = ("?", 0)) -> None:
        """Record FLOPs; `kind` is one of `flashsim.counts.work.KINDS`."""
        at, launch = len(self._accesses), len(self.launches) - 1
        self._work.add((at, launch, self._program, KINDS.index(kind), self._line(line), flops))

    def held(self, values: Mapping[str, tuple[tuple[int, ...], int]]) -> None:
        """Record a program's tile values (shape, bytes) if they take the most bytes so far."""
        total = sum(nbytes for _, nbytes in values.values())
        if total > self._held_most:
            self._held_most = total
            self.launches[-1].held = dict(values)

    def note(self, text: str) -> None:
        """Add a sentence to the notes for the user, unless the notes already have it."""
        if text not in self.notes:
            self.notes.append(text)

    def done(self) -> KernelRecord:
        """Return the record so far; later calls can record more accesses."""
        stored = {}
        for one in self.tensors:
            whole = self._buffers[one.buffer].stored
            if whole is not None and one.size:
                offsets = one.offsets(tuple(slice(None) for _ in one.shape))
                mask = whole[self._places(one, offsets)]
                if mask.any():
                    stored[one.code] = mask
        return KernelRecord(
            self.source,
            tuple(self.tensors),
            tuple(self.launches),
            self._accesses.array(),
            self._work.array(),
            tuple(self._lines),
            tuple(self._clashes.values()),
            stored,
            tuple(self.notes),
        )

    # -- inside ---------------------------------------------------------------------------------

    def _line(self, line: tuple[str, int]) -> int:
        return self._lines.setdefault(line, len(self._lines))

    @staticmethod
    def _corners(its: KernelTensor, unique: np.ndarray) -> tuple[int, int]:
        """Return row-major numbers of the first and last elements of an access's bounding box."""
        if its.contiguous and _is_run(unique):
            first, last = int(unique[0]), int(unique[-1])
            width = its.shape[-1] if its.shape else 1
            matrix = width * (its.shape[-2] if len(its.shape) > 1 else 1)
            whole_rows = first % width == 0 and (last + 1) % width == 0
            if whole_rows and first // matrix == last // matrix and last < its.size:
                return first, last
        index, exists = its.coordinates(unique)
        if not exists.all():
            raise TraceError(
                f"an access to {its.name} was recorded with offsets outside of the tensor; this is "
                "a bug in flashsim, so please report it"
            )
        first = last = 0
        for n, along in zip(its.shape, index, strict=True):
            first, last = first * n + int(along.min()), last * n + int(along.max())
        return first, last

    def _places(self, its: KernelTensor, offsets: np.ndarray) -> np.ndarray:
        return (its.start + offsets * its.itemsize) // self._buffers[its.buffer].unit

    def _watch(self, op: int, its: KernelTensor, unique: np.ndarray, line: int) -> None:
        """Note which program accessed these elements; record data races with other programs."""
        buffer, me = self._buffers[its.buffer], self._program + 1
        run = _is_run(unique) and its.itemsize == buffer.unit
        places: Any = self._places(its, unique[:1] if run else unique)
        if run:
            places = slice(int(places[0]), int(places[0]) + len(unique))
        if op == LOAD:
            if buffer.writer is not None:
                before = buffer.grown("writer", np.int32)[places]
                self._clash("read of another's store", its, unique, before, line)
            reader = buffer.grown("reader", np.int32)
            before = reader[places]
            if not before.any():
                reader[places] = me
            elif before.min() != _SEVERAL and (before != me).any():
                reader[places] = np.where((before == 0) | (before == me), me, _SEVERAL)
            return
        writer = buffer.grown("writer", np.int32)
        before = writer[places]
        atomic = op == ATOMIC
        others = np.where(before < 0, 0, before) if atomic else before
        self._clash("two stores", its, unique, others, line)
        if buffer.reader is not None:
            readers = buffer.grown("reader", np.int32)[places]
            self._clash("read of another's store", its, unique, readers, line)
        several = (before < 0) & (before != -me)
        writer[places] = np.where(several, -_SEVERAL, -me) if atomic else me
        buffer.grown("stored", bool)[places] = True

    def _clash(
        self, kind: str, its: KernelTensor, unique: np.ndarray, before: np.ndarray, line: int
    ) -> None:
        me, launch = self._program + 1, len(self.launches) - 1
        other = (before != 0) & (np.abs(before) != me)
        if self._ordered or self._locked or not other.any():
            return
        known = self._clashes.get((kind, launch, its.code))
        if known is None:
            at = int(np.argmax(other))
            element, _ = self._corners(its, unique[at : at + 1])
            who = abs(int(before[at]))
            first = -1 if who == _SEVERAL else who - 1
            known = Clash(kind, launch, its.code, first, me - 1, line, element, count=0)
        self._clashes[kind, launch, its.code] = replace(known, count=known.count + 1)


@dataclass(eq=False)
class _Buffer:
    """One allocation, and which programs accessed each of its units.

    Attributes
    ----------
    unit : bytes per entry of the three arrays, which are None until they are needed
    end : the end of the allocation's last tensor, in bytes
    writer : the program + 1 that stored in this launch, negative if by an atomic operation
    reader : the program + 1 that loaded in this launch, or _SEVERAL
    stored : whether any launch stored the unit
    """

    unit: int
    end: int = 0
    writer: np.ndarray | None = None
    reader: np.ndarray | None = None
    stored: np.ndarray | None = None

    def grown(self, name: str, dtype: Any) -> np.ndarray:
        """Return one of the arrays, which is extended to the end of the last tensor."""
        board, size = getattr(self, name), -(-self.end // self.unit)
        if board is None or len(board) < size:
            grown = np.zeros(size, dtype)  # takes no memory where nothing is written
            if board is not None:
                grown[: len(board)] = board
            setattr(self, name, grown)
            return grown
        return board


_SEVERAL = np.iinfo(np.int32).max


def _is_run(unique: np.ndarray) -> bool:
    """Return True if these ascending offsets have no gaps."""
    return int(unique[-1]) - int(unique[0]) + 1 == len(unique)


def _distinct(offsets: np.ndarray) -> np.ndarray:
    """Return the distinct offsets in ascending order, without sorting if they already ascend."""
    flat = offsets.ravel()
    if len(flat) > 1 and not (flat[1:] > flat[:-1]).all():
        flat = np.sort(flat)
        flat = flat[np.concatenate([[True], flat[1:] != flat[:-1]])]
    return flat


def _sectors(its: KernelTensor, unique: np.ndarray) -> int:
    """Return how many 32-byte sectors of memory hold these elements.

    The allocation is assumed to start at the start of a sector.
    """
    at = its.start + unique * its.itemsize  # ascending, so the sectors are ascending too
    if _is_run(unique):
        end = int(at[-1]) + its.itemsize - 1
        return end // SECTOR - int(at[0]) // SECTOR + 1
    first = at // SECTOR
    count = 1 + int(np.count_nonzero(np.diff(first)))
    if (its.start % its.itemsize) and its.itemsize > 1:  # an element may span two sectors
        ends = np.concatenate([first, (at + its.itemsize - 1) // SECTOR])
        count = int(np.unique(ends).size)
    return count


class _Columns:
    """A structured array that grows in chunks."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._full: list[np.ndarray] = []
        self._open = np.zeros(_CHUNK, dtype)
        self._before = self._used = 0  # rows in `_full` and in `_open`

    def __len__(self) -> int:
        return self._before + self._used

    def add(self, row: tuple[int, ...]) -> None:
        """Append a row."""
        if self._used == _CHUNK:
            self._full.append(self._open)
            self._before += _CHUNK
            self._open, self._used = np.zeros(_CHUNK, self._dtype), 0
        self._open[self._used] = row
        self._used += 1

    def array(self) -> np.ndarray:
        """Return all rows so far, as a read-only array that later rows do not change."""
        whole = np.concatenate([*self._full, self._open[: self._used]])
        whole.setflags(write=False)
        self._full, self._before, self._used = [whole], len(whole), 0
        return whole
