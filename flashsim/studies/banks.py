"""Counts the bank conflicts and the memory sectors of one warp's request to memory.

Shared memory has 32 banks of 4 bytes: word w is in bank w % 32. Per cycle, shared memory serves one
*wavefront*: at most one word from each bank. If lanes request different words of the same bank,
each of these words needs its own wavefront. A word that several lanes request is sent to all of
them in one wavefront. Global memory is read in sectors of 32 bytes.

>>> from flashsim import banks
>>> banks.access("column", "row-major").wavefronts
32
>>> banks.access("column", "padded").wavefronts
1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashsim import report
from flashsim.errors import OptionError, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.problem import numpy_dtype
from flashsim.report import Table

#: Lanes of a warp; banks, and bytes of each (CUDA C++ Programming Guide, "Shared Memory"); bytes of
#: a sector and of a cache line of global memory.
LANES, BANKS, WORD, SECTOR, LINE = 32, 32, 4, 32, 128
#: Bytes of a wavefront, and of a piece, the unit in which `ldmatrix` and TMA move data.
FRONT, PIECE = BANKS * WORD, 16
#: The most elements of a row, and of its padding: addresses of 32 such rows fit in 64 bits.
LONGEST = 2**31

#: Requests of a warp: name -> (description, bytes per lane; 0 means one element).
PATTERNS = {
    "row": ("lane n reads element n of a row", 0),
    "column": ("lane n reads one element of row n", 0),
    "row-16B": ("eight lanes read a row of 128 B, 16 B each", PIECE),
    "column-16B": ("lane n reads 16 B of row n", PIECE),
    "ldmatrix": ("ldmatrix.x4: a 16 x 16 tile of 2-byte elements, 8 of a row per lane", PIECE),
}
#: Layouts of a tile: name -> description.
LAYOUTS = {
    "row-major": "row r begins at r times the bytes of a row",
    "padded": "rows are one element longer, or 16 B longer if lanes read 16 B",
    "xor": "4-byte word w of row r is at position w ^ (r % 32); for reads of up to 4 B",
    "swizzle": "16-byte piece c of row r is at position c ^ (r % 8): TMA's 128-byte swizzle",
}


@dataclass(frozen=True, eq=False)
class Access:
    """The request of a warp to a tile in shared memory.

    Attributes
    ----------
    addresses : ndarray of int, (32,)
        The address of the first byte that each lane reads.
    width : int
        Bytes per lane.
    global_addresses : ndarray of int, (32,)
        The addresses of the same elements in a row-major matrix in global memory.
    """

    pattern: str
    layout: str
    addresses: np.ndarray
    width: int
    global_addresses: np.ndarray

    __repr__ = report.short
    _repr_html_ = report.card

    def fronts(self) -> np.ndarray:
        """Return one row (address // 4, lane, wavefront) for each 4-byte word that a lane requests.

        The hardware serves lanes in groups whose bytes fill a wavefront: 32 lanes at 4 bytes each,
        8 lanes at 16 bytes each. In each wavefront, each bank serves one word to the group. Words
        with lower addresses are served first.
        """
        group, wavefronts, first = max(1, FRONT // max(self.width, WORD)), [], 0
        for start in range(0, LANES, group):
            words: dict[int, list[int]] = {}
            for lane in range(start, start + group):
                begin, stop = self.addresses[lane], self.addresses[lane] + self.width
                for word in range(int(begin) // WORD, (int(stop) - 1) // WORD + 1):
                    words.setdefault(word, []).append(lane)
            depth = [0] * BANKS
            for word in sorted(words):
                bank = word % BANKS
                wavefronts += [(word, lane, first + depth[bank]) for lane in words[word]]
                depth[bank] += 1
            first += max(depth)
        return np.array(wavefronts)

    @property
    def wavefronts(self) -> int:
        """The request's number of wavefronts: the cycles for which shared memory is busy."""
        return int(self.fronts()[:, 2].max()) + 1

    @property
    def ideal(self) -> int:
        """The smallest number of wavefronts in which shared memory could serve this request."""
        distinct = len(np.unique(self.fronts()[:, 0]))
        return -(-distinct // BANKS)

    @property
    def conflicts(self) -> int:
        """The number of bank conflicts: the wavefronts of the request, minus `ideal`."""
        return self.wavefronts - self.ideal

    @property
    def sectors(self) -> int:
        """The number of 32-byte sectors that the same request to global memory would read."""
        last = self.global_addresses + self.width - 1
        ends = np.concatenate([self.global_addresses // SECTOR, last // SECTOR])
        return len(np.unique(ends))

    @property
    def ideal_sectors(self) -> int:
        """The smallest number of sectors that can contain the request's bytes."""
        elements = np.unique(self.global_addresses)
        return -(-len(elements) * self.width // SECTOR)


@own_errors
def access(
    pattern: str = "column",
    layout: str = "row-major",
    *,
    dtype: str | None = None,
    columns: int | None = None,
    pad: int | None = None,
) -> Access:
    """Return the request of one warp to a tile in shared memory.

    Parameters
    ----------
    pattern : a name in `PATTERNS`
    layout : a name in `LAYOUTS`
    dtype : str, optional
        Element type; default: float32, or bfloat16 for "ldmatrix".
    columns : int, optional
        Elements per row; default: as many as fill 128 bytes.
    pad : int, optional
        Elements that "padded" adds to a row; default: 1, or 16 bytes if lanes read 16 bytes,
        because 16-byte reads must begin at a multiple of 16.

    Raises
    ------
    OptionError
        If a name is unknown, rows are too short for the pattern, the padding leaves 16-byte reads
        unaligned, rows are no multiple of 128 bytes in a layout that permutes 128 bytes, or "xor"
        would split the reads.
    """
    checks.one_of("pattern", pattern, PATTERNS)
    checks.one_of("layout", layout, LAYOUTS)
    dtype = dtype or ("bfloat16" if pattern == "ldmatrix" else "float32")
    item = numpy_dtype(checks.one_of("dtype", dtype, checks.DTYPES)).itemsize
    width = PATTERNS[pattern][1] or item
    if pattern == "ldmatrix" and item != 2:
        raise OptionError(
            f"ldmatrix moves elements of 2 bytes, but {dtype} elements have {item} bytes; use a "
            "16-bit type"
        )
    columns = FRONT // item if columns is None else checks.positive_int("columns", columns)
    if pad is None:
        pad = PIECE // item if width == PIECE else 1
    for name, elements in (("columns", columns), ("pad", checks.count("pad", pad))):
        if elements > LONGEST:
            raise OptionError(f"{name} must be at most {LONGEST:,}, got {shown(elements)}")
    row_bytes = columns * item
    pitch = row_bytes + (pad * item if layout == "padded" else 0)
    rows, at = _where(pattern, item)
    if at.max() + width > row_bytes:
        raise OptionError(
            f"the access pattern {pattern} reads {at.max() + width} bytes of a row, but a row of "
            f"{columns} elements of type {dtype} has only {row_bytes} bytes; use more columns"
        )
    if pitch % min(width, PIECE):
        raise OptionError(
            f"with rows of {pitch} bytes, reads of {width} bytes are not aligned; pad by a "
            f"multiple of {width // item} elements"
        )
    addresses = rows * pitch + at
    if layout in ("xor", "swizzle"):
        if row_bytes % FRONT:
            raise OptionError(
                f"{layout} permutes parts of 128 bytes, but a row has {row_bytes} bytes, which "
                "is not a multiple of 128; use a number of columns that is a multiple of "
                f"{FRONT // item}"
            )
        part, times = (WORD, BANKS) if layout == "xor" else (PIECE, FRONT // PIECE)
        if width > part:
            raise OptionError(
                f"an xor of 4-byte words would split reads of {width} bytes; use the layout "
                "'swizzle'"
            )
        addresses = rows * pitch + (at // part ^ rows % times) * part + at % part
    return Access(pattern, layout, addresses, width, rows * row_bytes + at)


def _where(pattern: str, item: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: the tile row that each lane reads, and the byte offset in that row."""
    lane = np.arange(LANES)
    zero = np.zeros(LANES, int)
    if pattern == "row":
        return zero, lane * item
    if pattern == "row-16B":
        return lane // 8, lane % 8 * PIECE
    if pattern == "ldmatrix":  # lanes 0-7, 8-15, ... address the rows of the four 8 x 8 parts
        return lane % 16, lane // 16 * PIECE
    return lane, zero


@own_errors
def table(
    *,
    dtype: str | None = None,
    columns: int | None = None,
    pad: int | None = None,
    pattern: str | None = None,
) -> Table:
    """Return a table of bank conflicts, with one row per access pattern and layout of the tile."""
    names = [*PATTERNS] if pattern is None else [checks.one_of("pattern", pattern, PATTERNS)]
    result = Table(
        "A warp's request to shared memory, and to global memory",
        ("pattern", "layout", "wavefronts", "ideal", "conflicts", "sectors", "ideal sectors"),
        note="; ".join(f"{name}: {PATTERNS[name][0]}" for name in names)
        + "; sectors: 32-byte sectors of a row-major matrix in global memory. TMA writes like "
        "row-16B reads: a row of 128 B per wavefront",
    )
    for name in names:
        kind = None if name == "ldmatrix" and pattern is None else dtype
        for layout in LAYOUTS:
            if layout == "xor" and PATTERNS[name][1]:
                continue
            a = access(name, layout, dtype=kind, columns=columns, pad=pad)
            figures = (a.wavefronts, a.ideal, a.conflicts, a.sectors, a.ideal_sectors)
            result.add(name, layout, *figures)
    return result


__all__ = ["LAYOUTS", "PATTERNS", "Access", "access", "table"]
