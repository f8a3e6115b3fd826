"""Builds the tables of tiles and of visits."""

import numpy as np

from flashsim.errors import TilingError
from flashsim.schedule.file_mask import Csr

FULL, MASKED = 0, 1

#: The most tiles along one axis; the tables and their sums then take about 4 GB.
MOST_TILES = 1 << 24
#: With more tiles per sequence along one axis, sums over visits use closed forms if they can.
FEW_TILES = 1 << 14
INT32 = int(np.iinfo(np.int32).max)


def cut(start: int, stop: int, block: int, offset: int, other_stop: int, kind: type) -> np.ndarray:
    """Return a sequence's tiles, (n, 4), with start, stop, offset and the opposite axis's stop."""
    begins = np.arange(start, stop, block, dtype=np.int64)
    table: np.ndarray = np.empty((len(begins), 4), kind)
    table[:, 0], table[:, 1] = begins, np.minimum(begins + block, stop)
    table[:, 2], table[:, 3] = offset, other_stop
    return table


def check_visits(visits: int) -> None:
    """Raise `TilingError` if an int32 table cannot index this many visits (tile pairs)."""
    if visits > INT32:
        raise TilingError(
            f"the loop visits {visits:,} tile pairs, but a table of them can hold at most "
            f"{INT32:,}; use larger tiles"
        )


def expand(spans: np.ndarray) -> Csr:
    """Return a CSR matrix with one row per span of tiles, and one entry per tile of the span."""
    lo, full_lo, full_hi, hi = (spans[:, x].astype(np.int64) for x in range(4))
    ptr = np.concatenate([[0], np.cumsum(hi - lo)])
    check_visits(int(ptr[-1]))
    owner = np.repeat(np.arange(len(spans)), hi - lo)
    tile = np.arange(ptr[-1]) - ptr[owner] + lo[owner]
    full = (tile >= full_lo[owner]) & (tile < full_hi[owner])
    return ptr, tile, np.where(full, FULL, MASKED)


def frozen(*arrays: np.ndarray) -> Csr:
    """Return the arrays converted to contiguous, read-only int32 arrays."""
    result = tuple(np.ascontiguousarray(array, np.int32) for array in arrays)
    for array in result:
        array.setflags(write=False)
    return result  # type: ignore[return-value]
