"""Builds the tables of tiles, and refuses problems that need too large tables."""

import numpy as np

from flashsim.errors import TilingError, UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule.file_mask import Csr
from flashsim.schedule.tiling import Tiling

FULL, MASKED = 0, 1

#: The most tiles along one axis; the tables and their sums then take about 4 GB.
MOST_TILES = 1 << 24
INT32 = int(np.iinfo(np.int32).max)


def refusal(
    problem: Problem, tiling: Tiling, blocks: tuple[int, int], members: int, *, contiguous: bool
) -> UnsupportedError | TilingError | None:
    """Return an error if a problem has too many tiles for a table, or None if all tiles fit.

    The error is a `TilingError` if larger tiles would make the tables fit, and otherwise an
    `UnsupportedError`.
    """
    p, size = problem, f"{problem.n_q:,} queries x {problem.n_kv:,} keys"
    if p.n_q * members * p.n_kv >= 2**63:
        return UnsupportedError(
            f"{size} are more scores than the 64-bit sums of a table can count; use a shorter "
            "sequence"
        )
    if max(p.n_q, p.n_kv) > INT32 and not contiguous:
        return UnsupportedError(
            f"{size} with a mask or block_mask need a table of visits, whose indices are limited "
            f"to {INT32:,}; use a shorter sequence, or a mask of causal and window alone, which "
            "needs no table"
        )
    cut_q = sum(-(-(s.q_stop - s.q_start) * members // blocks[0]) for s in p.sequences)
    cut_k = sum(-(-(s.k_stop - s.k_start) // blocks[1]) for s in p.sequences)
    for what, side, tiles in (("row", "block_q", cut_q), ("column", "block_k", cut_k)):
        if tiles > MOST_TILES:
            return TilingError(
                f"{tiling} tiles divide {size} into {tiles:,} {what} tiles, but the limit for a "
                f"schedule is {MOST_TILES:,}; use a larger {side}"
            )
    return None


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
