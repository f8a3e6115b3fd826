"""Converts a schedule to each kernel's requests to L2: tile numbers, in the order of issue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from flashsim.counts.traffic import Traffic
from flashsim.errors import UnsupportedError, require_numba
from flashsim.l2 import captured
from flashsim.l2.launch import SIDE, L2Launch
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans, tensors
from flashsim.schedule.dq_order import turns
from flashsim.schedule.names import REDUCE, STORE
from flashsim.schedule.schedule import Csr, Schedule
from flashsim.schedule.tables import MASKED

#: The most requests of a stage, and the most distinct tiles, to replay: 5 B and 40 B each.
MOST_REQUESTS, MOST_TILES = 400_000_000, 50_000_000
#: An axis besides `tensors.ROW`, COL and TILE: a tensor with a tile per part of a row tile's keys.
PART = 3
#: The axes of requests for several row tiles, or for their score tiles, at once.
_COARSE = {tensors.ROW: 4, tensors.TILE: 5}


@dataclass(frozen=True)
class Stream:
    """The requests that one stage (kernel) makes to L2, in the order in which the SMs issue them.

    `ids`, int32 (n,), are tile numbers. `codes`, uint8 (n,), are operations (`names.OPS`), plus
    `launch.SIDE` if the SM belongs to the second partition.
    """

    stage: plans.Stage
    ids: np.ndarray
    codes: np.ndarray


class SetCache(NamedTuple):
    """A set-associative cache with partitions, for `caches.replay_sets`: lines, state and counts.

    Tile t consists of the cache lines ``first[t] .. first[t + 1] - 1``. Each line has a set
    (`place_of`, int32), a home partition (`home_of`, uint8) and a tile (`tile_of`, int32). The
    state has the shape (partitions, sets, ways): `held`, int32, is a line number, or -1 if empty;
    `touched`, int64, is the time of its last use by `clock`, int64 (1,); `dirty` is bool. Each
    tile's DRAM reads are added to `fetched`, and DRAM writes to `lost`, int64 (tiles,), in lines.
    """

    first: np.ndarray
    place_of: np.ndarray
    home_of: np.ndarray
    tile_of: np.ndarray
    held: np.ndarray
    touched: np.ndarray
    dirty: np.ndarray
    clock: np.ndarray
    fetched: np.ndarray
    lost: np.ndarray

    @classmethod
    def empty(cls, *lines: np.ndarray, shape: tuple[int, ...]) -> SetCache:
        """Return an empty cache of `shape`, for lines with a `first`, place, home and tile."""
        state = np.full(shape, -1, np.int32), np.zeros(shape, np.int64), np.zeros(shape, bool)
        counts = np.zeros((2, len(lines[0]) - 1), np.int64)
        return cls._make((*lines, *state, np.zeros(1, np.int64), *counts))


class TileNumbers:
    """Numbers and sizes of all tiles of all tensors of one pass.

    A tensor's tiles have consecutive numbers, head by head, and start at ``first[name]``. The tiles
    of a captured array are its cache lines. `size`, int64 (tiles,), has the bytes of each tile.
    """

    def __init__(self, problem: Problem, schedule: Schedule, names: list[str]) -> None:
        self.problem, self.schedule, self.names = problem, schedule, names
        rows, cols = (np.diff(t[:, :2], axis=1)[:, 0] for t in (schedule.rows, schedule.cols))
        self.heights, self.widths = rows.astype(np.int64), cols.astype(np.int64)
        self.first: dict[str, int] = {}
        self.tensors = {name: _shape(problem, name) for name in names}
        sizes: list[np.ndarray] = []
        at = 0
        for name, tensor in self.tensors.items():
            lines = captured.line_sizes(problem, name) if name in captured.LINED else None
            owners = self.matrices(tensor) if lines is None else 1
            count = owners * self.tiles(tensor) if lines is None else len(lines)
            self.first[name] = at
            at += count
            if at > MOST_TILES:
                raise UnsupportedError(
                    f"the L2 model replays at most {MOST_TILES:,} distinct tiles, but this "
                    f"problem's tensors have at least {at:,}; use larger tiles, fewer heads or a "
                    "shorter sequence"
                )
            sizes.append(np.tile(self._sizes(name, tensor), owners) if lines is None else lines)
        self.size = np.concatenate(sizes)

    @classmethod
    def of(cls, requested: Traffic) -> TileNumbers:
        """Return numbers for the tiles of each tensor that a pass loads, stores or reduces."""
        r, ops = requested, ("load", "store", "reduce")
        used = plans.tensors_of(r.problem, r.algorithm, r.direction, *ops)
        names = [*dict.fromkeys(map(captured.lined, used))]
        return cls(r.problem, r.schedule(r.stages[0]), names)

    def matrices(self, tensor: tensors.TensorShape) -> int:
        """Return a tensor's number of matrices: one per head, or one per group of packed heads."""
        members = self.schedule.members if tensor.owner == tensors.QUERY else 1
        return tensors.matrices(self.problem, tensor.owner) // members

    def tiles(self, tensor: tensors.TensorShape) -> int:
        """Return the number of tiles in one matrix of a tensor."""
        t_r, t_c = self.schedule.t_r, self.schedule.t_c
        parts = int(self.schedule.part_counts.sum()) if tensor.axis == PART else 0
        return {tensors.ROW: t_r, tensors.COL: t_c, PART: parts}.get(tensor.axis, t_r * t_c)

    def _sizes(self, name: str, tensor: tensors.TensorShape) -> np.ndarray:
        if tensor.axis == tensors.TILE:
            return np.multiply.outer(self.heights, self.widths).ravel() * tensor.width
        if name == "table":
            return self.schedule.page_counts * tensors.TABLE_ITEM
        if tensor.axis == PART:
            return np.repeat(self.heights, self.schedule.part_counts) * tensor.width
        return (self.heights if tensor.axis == tensors.ROW else self.widths) * tensor.width

    def range_of(self, name: str) -> slice:
        """Return the range of a tensor's tile numbers."""
        edges = [*self.first.values(), len(self.size)]
        at = self.names.index(name)
        return slice(edges[at], edges[at + 1])

    def by_tensor(self, per_tile: np.ndarray) -> dict[str, int]:
        """Sum `per_tile` over each tensor's tiles; return the sums by name, without sums of 0."""
        edges = [*self.first.values(), len(self.size)]
        sums = [int(per_tile[a:b].sum()) for a, b in pairwise(edges)]
        return {name: total for name, total in zip(self.names, sums, strict=True) if total}


def numbered_rows(schedule: Schedule, numbered: Schedule) -> np.ndarray:
    """Return the first row tile of `numbered` in each of a stage's row tiles, int32 (T_r + 1,).

    A stage's row tile may consist of several row tiles of `numbered` (`Tiling.dq_rows`).
    """
    if schedule.t_r == numbered.t_r:
        return np.arange(schedule.t_r + 1, dtype=np.int32)
    starts = np.append(schedule.rows[:, 0], schedule.n_rows)
    return np.searchsorted(numbered.rows[:, 0], starts).astype(np.int32)


def requests(stage: plans.Stage, schedule: Schedule, numbered: Schedule) -> int:
    """Return the number of tiles that one kernel requests, summed over all heads.

    `numbered` is the schedule of `TileNumbers`. Captured arrays count as one request per tile and
    array access in the function.
    """
    before, each, whole, rest = (
        sum(_count(schedule.problem, stage, move) for move in moves) for moves in _moves(stage)
    )
    if stage.parts:
        _, inner, _, tile_of, several = _visits(stage, schedule)
        outers, visits, divided = len(tile_of), len(inner), int(several.sum())
    else:
        outers, divided = schedule.t_r if stage.outer == "queries" else schedule.t_c, 0
        visits = schedule.t_r * schedule.t_c if stage.per == "bias" else schedule.sums.visits
    ends = (outers - divided) * whole + divided * rest
    members = plans.members_of(stage, schedule.problem, schedule.split)
    repeat, _ = plans.heads_of(stage, schedule.problem)
    found = repeat * (outers * before + ends + members * visits * each)
    if numbered.t_r > schedule.t_r:  # a row tile of this stage is several requests
        owns, each = (
            sum(m.transfers and _by_rows(m) for m in moves)
            for moves in ((*stage.before, *stage.after), stage.visit)
        )
        more = np.diff(numbered_rows(schedule, numbered)) - 1
        found += repeat * (
            owns * int(more.sum()) + each * int((more * schedule.visit_counts).sum())
        )
    return found


def _by_rows(move: plans.Move) -> bool:
    """Return whether a move's tile has a row tile's rows, and is no line of a captured array."""
    name = move.tensor
    lined = captured.lined(name) in captured.LINED
    return not lined and tensors.AXES[name] in _COARSE


def _count(problem: Problem, stage: plans.Stage, move: plans.Move) -> int:
    """Return the number of L2 requests per tile of one move."""
    if captured.lined(move.tensor) in captured.LINED and move.transfers:
        return len(captured.accesses(problem, move.tensor, stage.outer))
    return int(move.transfers)


def _moves(stage: plans.Stage) -> tuple[tuple[plans.Move, ...], ...]:
    """Return a stage's moves in four lists: before visits, at each visit, and two after visits.

    The third list is for an outer tile with unsplit keys, and the fourth list for one of several
    parts.
    """
    if stage.parts != "walks":
        return stage.before, stage.visit, stage.after, ()
    partial = tuple(move for move in stage.after if move.tensor.endswith("_part"))
    return stage.before, stage.visit, tuple(m for m in stage.after if m not in partial), partial


def stream(launch: L2Launch, tiles: TileNumbers, cache: SetCache | None = None) -> Stream:
    """Return one kernel's requests to L2, interleaved as thread blocks would issue requests.

    In `cache`, visits find their lines, or wait for them; its state changes. Without `cache`,
    visits do not wait.

    Raises
    ------
    UnsupportedError
        If there are more than `MOST_REQUESTS` requests.
    BackendUnavailable
        If Numba is not installed.
    """
    require_numba("the model of the L2 cache")
    from flashsim.l2.interleave import weave

    stage, schedule, model = launch.stage, launch.schedule, launch.model
    p, n = schedule.problem, requests(stage, schedule, tiles.schedule)
    if n > MOST_REQUESTS:
        raise _too_many(stage, n)
    touched = captured.Requests(schedule, len(tiles.size))
    coarse = tiles.schedule.t_r > schedule.t_r
    parts = [_requests(tiles, stage, moves, touched, coarse=coarse) for moves in _moves(stage)]
    members = plans.members_of(stage, p, schedule.split)
    ptr, inner, masked, tile_of, several = _visits(stage, schedule)
    columns, ranks, waiting = None, np.zeros(0, np.int32), (0, 0)
    if model.launch == "in-turns" and any(move.op == "reduce" for move in stage.visit):
        columns, ranks = turns(ptr, inner)
        waiting = p.batch * p.heads, schedule.t_r
    walks, outers = launch.order(np.diff(ptr), columns)
    wave = launch.waves(len(ptr) - 1, len(walks))
    in_step = model.walk == "in-step" and stage.outer == "keys" and not len(ranks)
    flipped = (wave % 2 == (not in_step)) & (in_step or model.walk == "sawtooth")
    cluster = model.cluster if stage.outer == "keys" and stage.visit and not len(ranks) else 1
    walks, outers, flipped = (np.repeat(x, cluster) for x in (walks, outers, flipped))
    slots, share = min(launch.slots, len(walks)), launch.shares()
    wait = 0.0 if cache is None else share.wait
    ids, codes = np.empty(n, np.int32), np.empty(n, np.uint8)
    table, edges = [row for part in parts for row in part], np.cumsum([0, *map(len, parts)])
    written = weave(
        *(walks, outers, ptr.astype(np.int64), inner.astype(np.int32), masked * share.masked),
        *(tile_of.astype(np.int32), several),
        *(np.array(table, np.int64).reshape(-1, 6), edges, _head_table(p, stage, schedule.members)),
        *(1 if stage.per == "bias" else launch.stride, members, in_step, flipped, cluster),
        *(np.zeros(slots), np.arange(slots), np.zeros(slots, np.int64)),
        *(np.arange(slots), model.sides(slots, launch.device), _pace(slots, launch.device)),
        *(share.jitter, model.seed),
        *(stage.outer == "keys", numbered_rows(schedule, tiles.schedule), ids, codes),
        *(ranks, np.zeros(waiting, np.int32), np.zeros(waiting), share.turn),
        *(wait, SetCache.empty(*_NO_LINES, shape=(1, 1, 1)) if cache is None else cache),
    )
    assert written == n
    expanded = touched.expand(ids, codes, MOST_REQUESTS)
    if isinstance(expanded, int):
        raise _too_many(stage, expanded)
    ids, codes = expanded
    if stage.stores_first:
        (dq,) = (m.tensor for m in stage.visit if m.op == "reduce" and m.tile.name == "dQ")
        its = tiles.range_of(dq)
        (adds,) = np.nonzero((codes % SIDE == REDUCE) & (its.start <= ids) & (ids < its.stop))
        _, first = np.unique(ids[adds], return_index=True)
        codes[adds[first]] -= REDUCE - STORE
    return Stream(stage, ids, codes)


#: The lines of a cache for no tiles.
_NO_LINES = np.zeros(1, np.int64), *(np.zeros(0, kind) for kind in (np.int32, np.uint8, np.int32))


def _too_many(stage: plans.Stage, n: int) -> UnsupportedError:
    return UnsupportedError(
        f"stage {stage.name!r} makes {n:,} tile requests, but the L2 model replays at most "
        f"{MOST_REQUESTS:,}; use larger tiles or fewer heads (bytes per head hardly change "
        "once there are many more blocks than run at once)"
    )


def _pace(slots: int, device: Device) -> np.ndarray:
    """Return the relative time (at most 1) of one visit in each slot of an SM.

    Blocks on an SM share execution units, so blocks are faster on SMs with fewer blocks.
    """
    sm = np.arange(slots) % device.sm_count
    sharing = np.bincount(sm)[sm]
    return sharing / max(1, sharing.max(initial=1))


def _shape(problem: Problem, name: str) -> tensors.TensorShape:
    """Return a tensor's layout from `tensors.shape`, but with axis PART for a partial result."""
    its = tensors.shape(problem, name)
    return its._replace(axis=PART) if name.endswith("_part") else its


def _visits(
    stage: plans.Stage, schedule: Schedule
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return each block's visits and outer tile: ``(ptr, inner, masked, tile_of, several)``.

    `masked`, bool, says which visits have a tile that is masked in part. A block owns an outer
    tile. If a row tile's keys are split over several blocks, each block owns one part (`several` is
    True). In a stage that merges partial results, a block owns a row tile, and visits the row
    tile's parts.
    """
    by_row = stage.outer == "queries"
    t_outer = schedule.t_r if by_row else schedule.t_c
    own, alone = np.arange(t_outer), np.zeros(t_outer, bool)
    if stage.parts:
        counts = schedule.part_counts
        first = np.cumsum(counts) - counts
        tile, several = np.repeat(own, counts), np.repeat(counts > 1, counts)
        if stage.parts == "merges":
            merged = np.flatnonzero(schedule.merged)
            ptr = np.concatenate([[0], np.cumsum(counts[merged])])
            parts = np.flatnonzero(several)
            return ptr, parts, np.zeros(len(parts), bool), merged, np.zeros(len(merged), bool)
        ptr, inner, kind = schedule.row_csr
        nth = np.arange(len(tile)) - first[tile]
        starts = ptr[tile] + np.diff(ptr)[tile].astype(np.int64) * nth // counts[tile]
        return np.append(starts, len(inner)), inner, kind == MASKED, tile, several
    if not stage.visit:
        none = np.zeros(0, np.int32)
        return np.zeros(t_outer + 1, np.int64), none, none > 0, own, alone
    if stage.per == "bias":
        t_inner = schedule.t_c if by_row else schedule.t_r
        every = np.tile(np.arange(t_inner), t_outer)
        return np.arange(t_outer + 1) * t_inner, every, every < 0, own, alone
    csr: Csr = schedule.row_csr if by_row else schedule.col_csr
    return csr[0], csr[1], csr[2] == MASKED, own, alone


def _requests(
    tiles: TileNumbers,
    stage: plans.Stage,
    moves: Iterable[plans.Move],
    touched: captured.Requests,
    *,
    coarse: bool,
) -> list[tuple[int, ...]]:
    """Return the table of requests for `weave`, with one row per move between HBM and SRAM.

    A move of captured arrays has one row per array access in the score or mask function. In a
    merging kernel, the inner tiles are the parts of the keys. With `coarse`, a row tile of the
    stage consists of several row tiles of the numbering.
    """
    rows: list[tuple[int, ...]] = []
    for move in moves:
        name = captured.lined(move.tensor)
        if move.transfers and name in captured.LINED:
            rows += touched.rows(stage, move, tiles.first[name])
        elif move.transfers:
            its = tiles.tensors[move.tensor]
            numbering = tiles.first[move.tensor], tiles.tiles(its), tiles.schedule.t_c
            axis = tensors.COL if stage.parts == "merges" and its.axis == PART else its.axis
            axis = _COARSE.get(axis, axis) if coarse else axis
            rows.append((move.code, axis, its.owner, *numbering))
    return rows


def _head_table(p: Problem, stage: plans.Stage, members: int) -> np.ndarray:
    """Return each query head's query, key and bias matrix numbers, int32 (3, batch * heads).

    In a kernel that loops over bias matrices, all three are the number of the bias matrix. With
    packed heads, `members` query heads share one query matrix.
    """
    head = np.arange(p.batch * p.heads)
    if stage.per == "bias":
        return np.stack([head, head, head]).astype(np.int32)
    b, h = divmod(head, p.heads)
    lead_b, lead_h = p.bias or (1, 1)
    shared = (b if lead_b > 1 else 0) * lead_h + (h if lead_h > 1 else 0)
    key_head, query_head = b * p.kv_heads + h // p.group, head // members
    return np.stack([query_head, key_head, shared + 0 * head]).astype(np.int32)
