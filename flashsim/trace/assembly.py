"""Builds the events of one stage from the numbers of bytes that an engine's kernels reported.

The dataflow table lists a stage's transfers and allocations in order. The kernels report the
executed visits, and the bytes of every transfer. So the trace shows a tile that a kernel skips or
moves only in part.
"""

import numpy as np

from flashsim.schedule.names import ALLOC, CODES, COMPUTE, FREE
from flashsim.schedule.plans import Move, Stage, heads_of
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tables import FULL
from flashsim.trace.events import StageTrace

#: Operation, tensor, and the column of the sizes with its bytes; -1 for a computation.
Event = tuple[int, int, int]
_COMPUTE: Event = (COMPUTE, 0, -1)


def assemble(
    stage: Stage, schedule: Schedule, steps: np.ndarray, visits: np.ndarray, executed: np.ndarray
) -> StageTrace:
    """Return the events of a stage that visits score tiles.

    A move is one transfer or allocation of the dataflow table. `steps`, int64 (T, moves), has the
    bytes of each move outside the visits, per outer tile. `visits`, int64 (members, n, moves), has
    the bytes of each move per query head of a group and per visit. `executed`, bool (members, n),
    is True for visits that were executed.
    """
    by_row = stage.outer == "queries"
    ptr, inner, _ = schedule.row_csr if by_row else schedule.col_csr
    order = np.array(schedule.outer_order())
    owner = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    begin, after = _events(stage.before), _events(stage.after, len(stage.before))
    freed = _frees(stage.before)
    # A "convert" stage frees each strip of rows once it is stored, before its step ends.
    end = [*after, *freed, _COMPUTE] if stage.converts else [*after, _COMPUTE, *freed]
    visit = [*_events(stage.visit), _COMPUTE, *_frees(stage.visit)] if stage.visit else []

    members, at = np.nonzero(executed)
    walk = np.lexsort((at, members, rank[owner[at]]))  # step by step, member by member
    members, at = members[walk], at[walk]
    step = rank[owner[at]]
    count = np.bincount(step, minlength=len(order))
    length = len(begin) + count * len(visit) + len(end)
    start = np.cumsum(length) - length
    table = np.zeros((int(length.sum()), 7), np.int64)
    none = np.full(len(order), -1)
    where = (0 * none, *((order, none) if by_row else (none, order)), none)
    _put(table, start, begin, where, steps[order])
    _put(table, start + len(begin) + count * len(visit), end, where, steps[order])
    nth = np.arange(len(at)) - (np.cumsum(count) - count)[step]
    tiles = (owner[at], inner[at]) if by_row else (inner[at], owner[at])
    first = start[step] + len(begin) + nth * len(visit)
    _put(table, first, visit, (members, *tiles, at), visits[members, at])
    full = np.flatnonzero((schedule.row_csr if by_row else schedule.col_csr)[2][at] == FULL)
    for k, move in enumerate(stage.visit):
        if move.for_masked:  # the buffer of a FULL tile stays unused
            table[first[full] + k, 0] = ALLOC
    return StageTrace.build(stage, schedule, *heads_of(stage, schedule.problem), table)


def assemble_rows(stage: Stage, schedule: Schedule, heights: np.ndarray, strip: int) -> StageTrace:
    """Return the events of a stage that processes complete rows of scores, `strip` rows at a time.

    `heights`, int64 (T,), has the number of rows of each row tile. Each row of scores spans the
    keys of the row's sequence. Each row of a bias gradient spans all keys, because kernels clear
    and round the complete matrix.
    """
    keys = (
        schedule.key_counts if stage.per != "bias" else np.full(schedule.t_r, schedule.problem.n_kv)
    )
    events = [*_events(stage.visit), *_frees(stage.visit)]
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    for i, height in enumerate(heights.tolist()):
        for first in range(0, height, strip):
            count = min(strip, height - first)
            sizes = [move.tile.nbytes(count, int(keys[i])) for move in stage.visit]
            rows += [(op, code, 0, i, -1, -1, sizes[k]) for op, code, k in events]
        rows.append((COMPUTE, 0, 0, i, -1, -1, 0))
    return StageTrace.build(stage, schedule, *heads_of(stage, schedule.problem), rows)


def tile_bytes(moves, rows, cols, reported=None) -> np.ndarray:
    """Return the bytes of each move (last axis) for tiles of `rows` x `cols`.

    The array `reported`, (.., slots), has a kernel's reported bytes, one slot per move between HBM
    and SRAM. Reported bytes replace computed bytes. Moves of captured arrays and sinks have no
    slot: computed bytes stay, or become 0 where all reported bytes are 0.
    """
    shape = np.shape(rows + cols) if reported is None else reported.shape[:-1]
    sizes, slot = np.zeros((*shape, len(moves)), np.int64), 0
    for k, move in enumerate(moves):
        sizes[..., k] = move.tile.nbytes(rows, cols)
        if reported is None or not move.transfers:
            continue
        if move.of_functions:
            sizes[..., k] *= reported.any(-1)
        else:
            sizes[..., k] = reported[..., slot]
            slot += 1
    return sizes


def _events(moves: tuple[Move, ...], first: int = 0) -> list[Event]:
    return [(m.code, CODES[m.tensor], first + k) for k, m in enumerate(moves)]


def _frees(moves: tuple[Move, ...]) -> list[Event]:
    """Return, for each tile that was loaded or allocated, the event that frees it, in order."""
    return [(FREE, CODES[m.tile.name], k) for k, m in enumerate(moves) if m.holds]


def _put(table, at, events, where, sizes) -> None:
    """Write copies of a sequence of events into `table`, one at each of the positions `at`."""
    columns = np.stack(where, axis=1)
    for k, (op, tensor, column) in enumerate(events):
        table[at + k, :2] = op, tensor
        table[at + k, 2:6] = columns
        if column >= 0:
            table[at + k, 6] = sizes[:, column]
