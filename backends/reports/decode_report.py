"""Convert the decode kernel's byte counts and time stamps into events and times of two stages.

In one launch, the kernel processes parts of each sequence's keys, and merges the partial results. A
trace has two stages, as in the simulator: the loop over key tiles, and the merge. Kernels do not
report events on chip, so these come from the stage's description (`plans.Stage`).
"""

from collections.abc import Sequence

import numpy as np

from flashsim.backends.launch_policy.decode_plan import (
    ALGORITHM,
    ITEM_SLOTS,
    VISIT_SLOTS,
    Decode,
    live,
)
from flashsim.backends.reports import timeline as stamps
from flashsim.backends.reports.counts import one_walk
from flashsim.errors import UnsupportedError
from flashsim.schedule import plans
from flashsim.schedule.names import CODES, COMPUTE, FREE
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import PHASES, ROLES, TIMELINE, StageTrace

Row = tuple[int, int, int, int, int, int, int]
#: A visit: its index, its column tile, the width of that tile, and bytes by tensor.
_Seen = tuple[int, int, int, dict[str, int]]
#: Bytes that each block reports for itself, by tensor.
_OWN = ("Q", "O_part", "L_part")
_BLOCK = ROLES.index("block")


def walk_of(launch: Decode, lengths: tuple[int, ...], page: int) -> Schedule:
    """Return a decode launch's schedule, whose packed sequences contain only live keys.

    `UnsupportedError` is raised if no sequence has a key, if sequences share a prefix, or if a mask
    lets a sequence's row tiles see different key tiles. Under a mask, every row tile visits all key
    tiles that any row tile of the sequence sees.
    """
    if launch.prefix:
        raise UnsupportedError(
            "a GPU run with shared_prefix= cannot be traced; use backend='simulator', or leave "
            "out trace="
        )
    if not any(lengths):
        raise UnsupportedError(
            "the trace would be empty, because no sequence has a key; leave out trace="
        )
    tiling = Tiling(dict(launch.kernel.constants)["FS_BLOCK_Q"], launch.block_k)
    schedule = Schedule(live(launch.problem, lengths, page), tiling, split=launch.split)
    tiles = np.zeros(len(lengths), np.int64)
    np.add.at(tiles, launch.items[:, 0], launch.items[:, 2] - launch.items[:, 1])
    if (schedule.visit_counts != np.repeat(tiles, launch.row_tiles)).any():
        raise UnsupportedError(
            "this decoding call cannot be traced, because the mask keeps different key tiles for "
            f"its {launch.row_tiles} row tiles, but the kernel computes the same key tiles for all "
            "row tiles; use backend='simulator', or leave out trace="
        )
    return schedule


def stages(
    launch: Decode, schedule: Schedule, visit_counts: np.ndarray, item_counts: np.ndarray
) -> tuple[StageTrace, ...]:
    """Return the events of two stages: the loop over key tiles, and the merge.

    `visit_counts` is uint32 (batch * kv_heads * row_tiles, n_visits, SLOTS), and `item_counts`
    uint32 (items * kv_heads, row_tiles, SLOTS). `TraceError` means that two KV heads moved
    different numbers of bytes, which only a broken kernel does.
    """
    p, heads, slots = launch.problem, launch.problem.kv_heads, visit_counts.shape[-1]
    split, combine = plans.stages(schedule.problem, ALGORITHM, split=schedule.split)
    by_head = visit_counts.reshape(p.batch, heads, -1, slots).swapaxes(0, 1)
    visits = one_walk("split", by_head.reshape(heads, -1, slots))
    visits = visits.reshape(p.batch * launch.row_tiles, -1, slots)
    ends = item_counts.reshape(-1, heads, launch.row_tiles, slots).swapaxes(0, 1)
    # The report does not say which block of a sequence is last and merges, so their bytes are
    # summed.
    own = [ITEM_SLOTS.index(name) for name in _OWN]
    items = one_walk("split", ends[..., own].reshape(heads, -1, len(own)))
    items = items.reshape(-1, launch.row_tiles, len(own))
    starts = [s.k_start for s in schedule.problem.sequences]
    sequence_tiles = np.searchsorted(schedule.cols[:, 0], starts)
    walked: list[Row] = []
    merged: list[Row] = []
    for i in range(schedule.t_r):
        b, tile = divmod(i, launch.row_tiles)
        mine = np.flatnonzero(launch.items[:, 0] == b)
        mine = mine[np.argsort(launch.items[mine, 1], kind="stable")]
        last = one_walk("combine", ends[:, mine, tile].sum(1, dtype=np.int64)[:, None])[0]
        results, rows_of_tile = _named(ITEM_SLOTS, last), schedule.row_slice(i)
        rows, first = rows_of_tile.stop - rows_of_tile.start, int(sequence_tiles[b])
        for part, item in enumerate(mine.tolist()):
            moved = _named(_OWN, items[item, tile])
            moved |= {name: results[name] for name in ("O", "L")} if len(mine) == 1 else {}
            walk: list[_Seen] = []
            for v in schedule.visits(i, part):
                # The kernel counts a sequence's tiles from its first.
                said = _named(VISIT_SLOTS, visits[i, v.j - first])
                walk.append((v.index, v.j, v.cols.stop - v.cols.start, said))
            walked += _step(split, i, rows, moved, walk)
        if len(mine) > 1:
            each = {name: results[f"{name} read"] // len(mine) for name in ("O_part", "L_part")}
            merged += _step(combine, i, rows, results, [(-1, -1, 0, each)] * len(mine))
    return tuple(
        StageTrace.build(stage, schedule, *plans.heads_of(stage, schedule.problem), events)
        for stage, events in ((split, walked), (combine, merged))
    )


def timeline(
    launch: Decode,
    schedule: Schedule,
    visit_stamps: np.ndarray,
    item_stamps: np.ndarray,
    clock_khz: int,
) -> np.ndarray:
    """Return the SM and time span of each visit, store and merge, as `events.TIMELINE`.

    Times are in ns since the first thread block started. Only the first warp of a block records
    time stamps, so they describe that warp's keys of a tile. `visit_stamps` is uint64 (batch *
    kv_heads * row_tiles, n_visits, VISIT_STAMPS), and `item_stamps` uint64 (items * kv_heads,
    row_tiles, ITEM_STAMPS). `clock_khz` is the clock rate for SMs whose blocks were too short to
    measure it.
    """
    p, heads = launch.problem, launch.problem.kv_heads
    items = item_stamps.astype(np.int64).reshape(-1, heads, launch.row_tiles, item_stamps.shape[-1])
    visits = visit_stamps.astype(np.int64).reshape(
        p.batch, heads, launch.row_tiles, launch.n_visits, -1
    )
    clock = stamps.SmClocks(items[..., :5].reshape(-1, 5), clock_khz)
    starts = [s.k_start for s in schedule.problem.sequences]
    sequence_tiles = np.searchsorted(schedule.cols[:, 0], starts)
    parts = []

    def span(
        stage: int, phase: str, sm: np.ndarray, i: int, j: int, visit: int, *times: np.ndarray
    ):
        part = np.zeros(len(sm), TIMELINE)
        part["stage"], part["phase"], part["role"] = stage, PHASES.index(phase), _BLOCK
        part["head"], part["sm"], part["i"] = np.arange(len(sm)) * p.group, sm, i
        part["j"], part["visit"] = j, visit
        part["start_ns"], part["end_ns"] = (clock.ns(sm, x) for x in times)
        parts.append(part)
        return part

    for i in range(schedule.t_r):
        b, tile = divmod(i, launch.row_tiles)
        mine = np.flatnonzero(launch.items[:, 0] == b)
        for part, item in enumerate(
            mine[np.argsort(launch.items[mine, 1], kind="stable")].tolist()
        ):
            at = items[item, :, tile]
            last, merges = at[:, 1], at[:, 5] > 0
            for v in schedule.visits(i, part):
                seen = visits[b, :, tile, v.j - int(sequence_tiles[b])]
                for phase, (begin, end) in stamps.SPANS.items():
                    span(0, phase, at[:, 0], i, v.j, v.index, seen[:, begin], seen[:, end])
                last = seen[:, 4]
            span(0, "store", at[:, 0], i, -1, -1, last, np.where(merges, at[:, 5], at[:, 3]))
            merged = span(1, "store", at[:, 0], i, -1, -1, at[:, 5], at[:, 3])
            parts[-1] = merged[merges]
    spans = np.concatenate(parts)
    first = spans["start_ns"].min()
    spans["start_ns"] -= first
    spans["end_ns"] -= first
    return spans


def _named(names: tuple[str, ...], values: np.ndarray) -> dict[str, int]:
    return dict(zip(names, values.tolist(), strict=False))


def _step(
    stage: plans.Stage, i: int, rows: int, moved: dict[str, int], visits: Sequence[_Seen]
) -> list[Row]:
    """Return all events of one outer iteration, with the reported bytes."""
    begin = _moves(stage.before, moved, i, -1, -1, rows, 0)
    rows_of_events = list(begin)
    for at, j, cols, said in visits:
        events = _moves(stage.visit, said, i, j, at, rows, cols)
        # during the merge, a part is no visit
        done = [(COMPUTE, 0, 0, i, j, at, 0)] if at >= 0 else []
        rows_of_events += [*events, *done, *_frees(stage.visit, events)]
    rows_of_events += _moves(stage.after, moved, i, -1, -1, rows, 0)
    return [*rows_of_events, (COMPUTE, 0, 0, i, -1, -1, 0), *_frees(stage.before, begin)]


def _moves(
    moves: tuple[plans.Move, ...],
    said: dict[str, int],
    i: int,
    j: int,
    at: int,
    rows: int,
    cols: int,
) -> list[Row]:
    """Return an event with the bytes per transfer in `moves`, without stores of 0 bytes."""
    events = []
    for m in moves:
        nbytes = said.get(m.tensor, 0) if m.transfers else int(m.tile.nbytes(rows, cols))
        if nbytes or m.op != "store":
            events.append((m.code, CODES[m.tensor], 0, i, j, at, nbytes))
    return events


def _frees(moves: tuple[plans.Move, ...], events: list[Row]) -> list[Row]:
    """Return a "free" event for each buffer that `events` load or allocate, in this order."""
    held = {CODES[m.tensor]: CODES[m.tile.name] for m in moves if m.holds}
    return [(FREE, held[e[1]], *e[2:]) for e in events if e[1] in held]
