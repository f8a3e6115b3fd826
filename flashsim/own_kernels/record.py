"""`KernelRecord`: a kernel's accesses and FLOPs as NumPy arrays, about 50 bytes per access."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from flashsim.own_kernels.tensors import KernelTensor
from flashsim.problem import checks
from flashsim.schedule.names import LOAD, REDUCE
from flashsim.trace.events import Structured

ATOMIC = REDUCE
#: Bytes per sector: the smallest transfer between L2 and an SM.
SECTOR = 32

#: In notes on kernels that no GPU can run. The note on block pointers is none of them, because
#: older versions of Triton compile these.
NO_GPU = "for a GPU, although its interpreter runs it"

#: One load, store or atomic operation of one program.
ACCESS = np.dtype(
    [
        ("launch", "u2"),
        ("op", "u1"),
        ("tensor", "i2"),  # -1: no lane was active, so no tensor is known
        ("line", "u4"),
        ("program", "i4"),
        ("first", "i8"),  # the tile's corners with the lowest and the highest indices, each as
        ("last", "i8"),  # an element's row-major number
        ("active", "i4"),  # lanes that access an element of the tensor
        ("masked", "i4"),  # lanes that the mask turns off
        ("outside", "i4"),  # lanes that access memory outside of the tensor
        ("distinct", "i4"),  # different elements
        ("sectors", "i4"),  # 32-byte sectors that hold these elements
    ]
)
#: FLOPs of one tile operation, which runs before access number `at`.
WORK = np.dtype(
    [
        ("at", "i8"),
        ("launch", "u2"),
        ("program", "i4"),
        ("kind", "u1"),
        ("line", "u4"),
        ("flops", "i8"),
    ]
)


def float64(values: Any) -> np.ndarray:
    """Return a tensor's values in float64.

    Elements that no program stored may hold signaling NaNs, for which NumPy's cast warns.
    """
    with np.errstate(invalid="ignore"):
        return np.asarray(values).astype(np.float64)


@dataclass(eq=False)
class Launch:
    """One launch of a user's kernel: the kernel, its grid and its arguments.

    Attributes
    ----------
    grid : programs along each axis; program (x, y, z) of a grid (X, Y, Z) has number
        x + X (y + Y z), and a GPU starts programs in this order
    arguments : the tensors' codes by parameter name; a tensor that is passed twice has two codes
    constants : the other arguments by parameter name, such as numbers, tile sizes and flags
    file, line : where the kernel is defined
    held : estimated tile values (shape, bytes) of one program when their total size was largest
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: Mapping[str, int]
    constants: Mapping[str, Any]
    file: str = "?"
    line: int = 0
    held: Mapping[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    @property
    def programs(self) -> int:
        """Return the number of programs in the launch's grid."""
        return int(np.prod(self.grid, dtype=np.int64))

    def place(self, program: int) -> tuple[int, ...]:
        """Return the grid coordinates of the program with this number."""
        found = []
        for side in self.grid:
            program, at = divmod(program, side)
            found.append(at)
        return tuple(found)

    def number(self, place: Iterable[int]) -> int:
        """Return the number of the program at these grid coordinates."""
        steps = accumulate(self.grid, mul, initial=1)
        return sum(at * step for at, step in zip(place, steps, strict=False))


@dataclass(frozen=True)
class Clash:
    """A data race: two programs of a launch access the same element, and at least one writes it.

    Attributes
    ----------
    kind : "two stores" or "read of another's store"
    first, second : program numbers, in the order in which the simulation ran the programs
    line : source line of the second program's access
    element : row-major number of the first element with this conflict
    count : number of accesses that conflict in this way
    """

    kind: str
    launch: int
    tensor: int
    first: int
    second: int
    line: int
    element: int
    count: int = 1


@dataclass(frozen=True, eq=False)
class KernelRecord:
    """A `Recorder`'s results: tensors, launches, accesses in order, FLOPs and data races.

    Attributes
    ----------
    source : the frontend, such as "triton 3.9.0, interpreted"
    accesses, work : arrays of dtype `ACCESS` and `WORK`
    lines : the source lines (file, number) that the column `line` numbers
    stored : per code of a written tensor, a mask of its written elements, in the tensor's shape
    notes : sentences about assumptions, and about operations that were not computed as on a GPU
    """

    source: str
    tensors: tuple[KernelTensor, ...]
    launches: tuple[Launch, ...]
    accesses: Structured
    work: Structured
    lines: tuple[tuple[str, int], ...]
    clashes: tuple[Clash, ...]
    stored: Mapping[int, np.ndarray]
    notes: tuple[str, ...] = ()

    def tensor(self, name: str) -> KernelTensor:
        """Return the tensor with this name; raise OptionError if no tensor has this name."""
        tensors = {one.name: one for one in self.tensors}
        return tensors[checks.one_of("tensor", name, tensors)]

    @property
    def refusals(self) -> list[str]:
        """Return the notes on kernels that no GPU can run."""
        return [note for note in self.notes if NO_GPU in note]

    @property
    def bytes_asked(self) -> np.ndarray:
        """Return the number of bytes that each access requests, int64 (accesses,)."""
        sizes = np.array([t.itemsize for t in self.tensors] + [0], np.int64)
        return self.accesses["active"] * sizes[self.accesses["tensor"]]

    def by_line(self, chosen: np.ndarray) -> list[tuple[int, int, int, np.ndarray]]:
        """Return `chosen` accesses in groups: (index into `lines`, operation, tensor, accesses)."""
        at = np.flatnonzero(chosen)
        a, codes = self.accesses, len(self.tensors) + 1
        key = a["line"][at].astype(np.int64)
        key = (key * 4 + a["op"][at]) * codes + a["tensor"][at] + 1
        order = np.argsort(key, kind="stable")
        found, first = np.unique(key[order], return_index=True)
        parts = np.split(at[order], first[1:])
        return [
            (one // codes // 4, one // codes % 4, one % codes - 1, part)
            for one, part in zip(found.tolist(), parts, strict=False)
        ]

    @property
    def nbytes(self) -> int:
        """Return the memory size of the record's arrays in bytes."""
        return self.accesses.nbytes + self.work.nbytes


def restricted(record: KernelRecord, launches: Sequence[int]) -> KernelRecord:
    """Return a record with only the chosen launches."""
    new = np.full(len(record.launches), -1)
    new[list(launches)] = np.arange(len(launches))
    parts = []
    for table in (record.accesses, record.work):
        part = table[new[table["launch"]] >= 0].copy()
        part["launch"] = new[part["launch"]]
        parts.append(part)
    accesses, work = parts
    kept = np.flatnonzero(new[record.accesses["launch"]] >= 0)
    work["at"] = np.searchsorted(kept, work["at"])
    written = accesses["tensor"][accesses["op"] != LOAD]
    clashes = [one for one in record.clashes if new[one.launch] >= 0]
    return replace(
        record,
        launches=tuple(record.launches[n] for n in launches),
        accesses=accesses,
        work=work,
        clashes=tuple(replace(one, launch=int(new[one.launch])) for one in clashes),
        stored={code: mask for code, mask in record.stored.items() if code in written},
    )
