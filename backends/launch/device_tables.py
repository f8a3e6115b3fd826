"""Build, on the host, the tables of a schedule that kernels read from GPU memory."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from flashsim.errors import UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule.dq_order import turns
from flashsim.schedule.file_mask import Csr
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tables import FULL
from flashsim.schedule.tiling import Tiling


@dataclass(frozen=True, eq=False)
class Lowered:
    """The tables for one loop over a schedule's tiles: by row (Q-outer) or by column (KV-outer).

    A visit is one iteration of the inner loop: one query tile times one key tile. `rows` (T_r, 4)
    and `cols` (T_c, 4) are the int32 arrays of the same names in `Schedule`. `spans` is
    `Schedule.row_spans` or `col_spans`, an int32 array (tiles, 4), or None. `ptr`, `index` and
    `kind` are the int32 arrays of `Schedule.row_csr` or `col_csr`, computed at first use.

    `visits`, an int64 array (tiles,), holds the number of visits per outer tile. `masked`, an int64
    array (tiles,), holds the number of visits that need a mask. `order`, an int32 array (tiles,),
    lists the outer tiles in the order in which blocks take them. Outer tiles with the most visits
    come first, so that the last tiles to start are short. `ranks`, an int32 array (n_visits,) that
    only `in_turns` computes, orders the additions to dQ. `shares`, a uint16 array (tiles, 4, 4)
    that only `in_shares` computes, has the visits that each part of a row tile's rows needs. The 32
    bytes of a row tile are one sector of memory. `parts` is the number of parts of a complete row
    tile.
    """

    schedule: Schedule
    by: Literal["row", "col"]
    rows: np.ndarray
    cols: np.ndarray
    spans: np.ndarray | None
    visits: np.ndarray
    masked: np.ndarray
    order: np.ndarray
    ranks: np.ndarray | None = None
    shares: np.ndarray | None = None
    parts: int = 1

    def table(self, name: str) -> np.ndarray | None:
        """Return the table with this name in `launch.TABLES`; `shares` takes the place of ranks."""
        found = self.shares if name == "ranks" and self.shares is not None else getattr(self, name)
        assert found is None or isinstance(found, np.ndarray)
        return found

    @property
    def tiles(self) -> int:
        """The number of outer tiles (row tiles if Q-outer, column tiles if KV-outer)."""
        return len(self.order)

    @property
    def n_visits(self) -> int:
        """The number of visits (tile pairs) of one head."""
        return int(self.visits.sum())

    @property
    def ptr(self) -> np.ndarray:
        """For each outer tile, the index of its first visit in `index` and `kind`."""
        return self._csr[0]

    @property
    def index(self) -> np.ndarray:
        """The number of the inner tile of each visit (tile pair)."""
        return self._csr[1]

    @property
    def kind(self) -> np.ndarray:
        """The kind of each visit: MASKED if the mask removes some of its scores, otherwise FULL."""
        return self._csr[2]

    @property
    def starts(self) -> np.ndarray:
        """The first query and first key of each outer tile's sequence, as int32 (tiles, 2)."""
        s = self.schedule
        number = s.sequence_of_rows if self.by == "row" else s.sequence_of_cols
        sequences = s.problem.sequences
        return np.array([(sequences[n].q_start, sequences[n].k_start) for n in number], np.int32)

    @property
    def _csr(self) -> Csr:
        return self.schedule.row_csr if self.by == "row" else self.schedule.col_csr

    @property
    def descending(self) -> bool:
        """Whether the loop processes inner tiles from the last to the first."""
        return self.by == "row" and self.schedule.key_order == "descending"


@lru_cache(maxsize=64)
def lower(schedule: Schedule, by: Literal["row", "col"]) -> Lowered:
    """Build the tables for one loop over a schedule, or raise `UnsupportedError`.

    Tables cannot express an arbitrary mask function, a bias, or a block mask whose cells the tiles
    do not divide.
    """
    check(schedule.problem, schedule.tiling)
    spans = schedule.row_spans if by == "row" else schedule.col_spans
    if spans is None and schedule.problem.mask_mod is not None:
        spans = _as_spans(schedule, by)
    # spans are counted in closed form, since a list of visits has O(N^2) entries
    if spans is not None:
        lo, full_lo, full_hi, hi = spans.T.astype(np.int64)
        visits, masked = hi - lo, full_lo - lo + hi - full_hi
    else:
        ptr, _, kind = schedule.row_csr if by == "row" else schedule.col_csr
        visits = np.diff(ptr).astype(np.int64)
        marked = np.concatenate([[0], np.cumsum(kind != FULL)])
        masked = marked[ptr[1:]] - marked[ptr[:-1]]
    order = np.argsort(-visits, kind="stable").astype(np.int32)
    return Lowered(schedule, by, schedule.rows, schedule.cols, spans, visits, masked, order)


def _as_spans(schedule: Schedule, by: Literal["row", "col"]) -> np.ndarray | None:
    """Return each outer tile's range of inner tiles under a mask function, or None.

    The result is None if the visits of some outer tile, or its FULL visits, skip an inner tile.
    Without ranges, kernels read a list of visits from memory.
    """
    ascending = replace(schedule, key_order="ascending")
    ptr, index, kind = ascending.row_csr if by == "row" else ascending.col_csr
    count, full = np.diff(ptr), kind == FULL
    filled = count > 0
    first = np.zeros(len(count), np.int64)
    first[filled] = index[ptr[:-1][filled]]
    # position of each visit in its own list
    nth = np.arange(len(index)) - np.repeat(ptr[:-1], count)
    owner = np.repeat(np.arange(len(count)), count)
    if not (index == first[owner] + nth).all():
        return None
    fulls = np.bincount(owner, full, len(count)).astype(np.int64)
    lead = np.where(fulls > 0, len(index), count)
    np.minimum.at(lead, owner[full], nth[full])
    inside = (nth >= lead[owner]) & (nth < lead[owner] + fulls[owner])
    if not (inside == full).all():
        return None
    spans = np.stack([first, first + lead, first + lead + fulls, first + count], axis=1)
    return np.ascontiguousarray(spans, np.int32)


#: Kernels without shares have fewer instructions.
_WORTH = 0.01


@lru_cache(maxsize=64)
def in_shares(walk: Lowered, rows: int) -> Lowered:
    """Add `shares` to the tables of a Q-outer loop, for parts of `rows` rows of each row tile.

    A part's four numbers are first, full_first, full_stop and stop, counted from the row tile's
    first visit. The part needs visits first .. stop - 1, and no mask in full_first .. full_stop -
    1. A part without visits has zeros. They come from the schedule whose row tiles are the parts. A
    row tile has at most four parts. The tables stay without shares if these would save less than
    `_WORTH` of the parts' visits, if the visits of a row tile or of a part skip a key tile, or if a
    row tile has more visits than 16 bits can count.
    """
    schedule = walk.schedule
    if walk.spans is None or walk.visits.max() > 0xFFFF:
        return walk
    tiling = replace(schedule.tiling, block_q=rows)
    spans = lower(replace(schedule, tiling=tiling), "row").spans
    if spans is None:
        return walk
    at = rows * np.arange(4)
    exists = (at < schedule.tiling.block_q) & (walk.rows[:, :1] + at < walk.rows[:, 1:2])
    own = np.repeat(walk.spans, exists.sum(1), axis=0)  # parts follow the order of row tiles
    found = own[:, 3:] - spans[:, ::-1] if walk.descending else spans - own[:, :1]
    found[found[:, 0] >= found[:, 3]] = 0
    parts = schedule.tiling.block_q // rows
    if (found[:, 3] - found[:, 0]).sum() > (1 - _WORTH) * parts * walk.visits.sum():
        return walk
    shares = np.zeros((*exists.shape, 4), np.uint16)
    shares[exists] = found
    return replace(walk, shares=shares, parts=parts)


def parts_of(walk: Lowered) -> np.ndarray:
    """Return the `shares` of the parts that a complete row tile has: uint16 (tiles, parts, 4)."""
    assert walk.shares is not None
    return walk.shares[:, : walk.parts]


@lru_cache(maxsize=64)
def in_turns(walk: Lowered) -> Lowered:
    """Return the tables of a KV-outer loop whose blocks add to dQ in a fixed order.

    `schedule.turns` computes the order of the outer tiles, and each visit's position in the order
    of additions.
    """
    order, ranks = turns(walk.ptr, walk.index)
    return replace(walk, order=order, ranks=ranks)


def refuse(problem: Problem) -> None:
    """Raise `UnsupportedError` if the problem has a mask function written in Python, or a bias."""
    if problem.mask is not None:
        raise UnsupportedError(
            "the GPU kernels cannot call a Python mask function (mask=); use backend='simulator' "
            "or 'numba', or express the mask by causal=, window=, block_mask= or mask_mod="
        )
    if problem.bias is not None:
        raise UnsupportedError(
            "these GPU kernels do not support a bias; use backend='cupy', or backend='simulator' "
            "or 'numba' with arrays in the CPU's memory"
        )


def refuse_functions(problem: Problem, kernels: str, instead: str) -> None:
    """Raise `UnsupportedError` if a problem has `mask_mod`, `score_mod` or `sinks`.

    The error text names the `kernels`, and ends with the advice `instead`. A bias is an error too,
    since callers turn it into a score function first.
    """
    for name, text in (
        ("mask_mod", "mask_mod"),
        ("score_mod", "score_mod or bias"),
        ("sinks", "sinks"),
    ):
        if getattr(problem, name):
            raise UnsupportedError(f"the {kernels} kernels do not support {text}; {instead}")


def check(problem: Problem, tiling: Tiling) -> None:
    """Raise `UnsupportedError` if GPU kernels cannot evaluate the masks with this tiling."""
    refuse(problem)
    cells = problem.block_mask
    if cells is not None and not tiling.divides(cells):
        raise UnsupportedError(
            "on a GPU, tile sides must divide the sides of the block mask's blocks, got "
            f"{tiling} tiles and {cells.block_q} x {cells.block_k} blocks; pass a tiling= that "
            "divides them"
        )
