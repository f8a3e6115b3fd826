"""Checks that a trace file's content is possible: types, ranges, and lengths of tables.

A file may come from anywhere. The checks before a table is read bound its memory by the size that
the problem itself implies. The checks after it is read keep every index in range for later queries
of the trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashsim.counts.work import KINDS
from flashsim.errors import printable, shown
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.file_mask import Csr
from flashsim.schedule.names import COMPUTE, OPS, TENSORS, TRANSFERS
from flashsim.schedule.split import Split
from flashsim.schedule.tensors import COL, ROW, TILE
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import PHASES, ROLES, StageTrace, gain, step_ends
from flashsim.trace.recording import Own

#: Of an algorithm of one's own: names of tensors, stages, events of a stage.
MOST_NAMES, MOST_STAGES, MOST_EVENTS = 64, 64, 1 << 22
#: Of any text in a header.
MOST_CHARACTERS = 2_000
SIDES = (ROW, COL, TILE)
#: Indices are int32 wherever tables hold them.
INDEX = 1 << 31
_STAGE = {
    **{"name": str, "outer": str, "buffers": list, "dense": bool, "per": str},
    **{"tiling": list, "key_order": str, "repeat": int, "stride": int},
}


def typed(what: str, entry: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """`entry` as a JSON object that has at least these keys, each of its kind."""
    if not isinstance(entry, dict):
        raise ValueError(f"{what} is {shown(entry)}, not an object")
    for key, kind in kinds.items():
        value = entry[key]
        of_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not of_kind:
            raise ValueError(f"{what}: {key} is {shown(value)}")
    return entry


def integers(what: str, entry: Any, n: int, low: int = 0) -> list[int]:
    """`entry` as a list of n integers, from `low` up to the largest possible index."""
    if not isinstance(entry, list) or len(entry) != n:
        raise ValueError(f"{what} is {shown(entry)}, not {n} integers")
    for value in entry:
        if type(value) is not int or not low <= value < INDEX:
            raise ValueError(f"{what} is {shown(entry)}: not from {low} up to {INDEX - 1}")
    return entry


def header(fields: dict[str, Any], tensors: Sequence[str] = TENSORS) -> None:
    """Check the header's own fields.

    The fields of its problem, device and stages are checked when these are built.
    """
    kinds = {
        **{"names": dict, "problem": dict, "device": dict, "stages": list, "provenance": dict},
        **{"algorithm": str, "direction": str, "backend": str},
    }
    typed("the header", fields, kinds)
    _strings(fields)
    for name, value in fields["provenance"].items():
        if not isinstance(value, str):
            raise ValueError(f"provenance: {name} is {shown(value)}")
    for field, ours in (("op", OPS), ("tensor", tensors), ("phase", PHASES), ("role", ROLES)):
        names = fields["names"].get(field, [] if field in ("phase", "role") else None)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"names: {field} is {shown(names)}")
        if unknown := set(names) - set(ours):
            raise ValueError(f"unknown {field} {', '.join(map(repr, sorted(unknown)))}")
    if not fields["stages"]:
        raise ValueError("there is no stage")
    if len(fields["stages"]) > MOST_STAGES:
        raise ValueError(
            f"there are {len(fields['stages'])} stages, but the limit is {MOST_STAGES}"
        )


def _strings(tree: Any) -> None:
    """Refuse text that is too long for a name or note, or has characters that a terminal obeys."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            _strings(key)
            _strings(value)
    elif isinstance(tree, list):
        for value in tree:
            if isinstance(value, (str, dict, list)):  # not each of a million lengths
                _strings(value)
    elif isinstance(tree, str) and (len(tree) > MOST_CHARACTERS or printable(tree) != tree):
        raise ValueError(
            f"the header holds {shown(tree)}: not text of at most {MOST_CHARACTERS:,} characters "
            "that print"
        )


def own(value: Any) -> Own | None:
    """The file's description of a user's own algorithm; None for a built-in one."""
    if value is None:
        return None
    kinds = {"tensors": list, "compulsory": int, "workspace": int}
    entry = typed("own", value, kinds)
    tensors: dict[str, int] = {}
    for pair in entry["tensors"]:
        if not isinstance(pair, list) or len(pair) != 2 or not own_name(pair[0]):
            raise ValueError(
                "own: each tensor must be a list of a name, which is an identifier of at most 24 "
                f"characters, and an axis, got {shown(pair)}"
            )
        name, axis = pair
        if name in TENSORS or name in tensors or type(axis) is not int or axis not in SIDES:
            raise ValueError(
                "own: each tensor must have a name that no other tensor has, and an axis from "
                f"{SIDES}, got {shown(pair)}"
            )
        tensors[name] = axis
    if len(tensors) > MOST_NAMES:
        raise ValueError(f"own: there are {len(tensors)} tensors, but the limit is {MOST_NAMES}")
    sizes = entry["compulsory"], entry["workspace"]
    if not all(0 <= nbytes < 1 << 62 for nbytes in sizes):
        raise ValueError(
            "own: compulsory and workspace must be numbers of bytes from 0 to 2**62 - 1, got "
            f"{sizes[0]} and {sizes[1]}"
        )
    return Own(tensors, *sizes)


def own_name(name: Any) -> bool:
    """Whether a tensor of a user's own algorithm may have this name."""
    return isinstance(name, str) and name.isidentifier() and len(name) <= 24


def shape_of_costs(shape: tuple[int, ...], events: np.ndarray) -> None:
    """Check that there is one row of work per computation."""
    needed = int((events["op"] == COMPUTE).sum()), len(KINDS) + 2
    if shape != needed:
        raise ValueError(f"a stage's table of work is {shape}, but its events need {needed}")


def own_costs(costs: np.ndarray) -> None:
    """Check that sums of work cannot overflow."""
    within("work", costs.ravel(), 0, (1 << 62) // max(len(costs), 1))


def problem(fields: dict[str, Any], **masks: Any) -> Problem:
    """The problem, with lengths that tables can hold."""
    if own_masks := {"mask", "block_mask", "mask_mod", "score_mod"} & fields.keys():
        raise ValueError(f"problem: a header holds no {', '.join(sorted(own_masks))}")
    checked = Problem(**fields, **masks)
    sizes = {n: getattr(checked, n) for n in ("n_q", "n_kv", "batch", "kv_heads", "shared_prefix")}
    for name, size in {**sizes, "batch * heads": checked.batch * checked.heads}.items():
        if size and size >= INDEX:
            raise ValueError(f"problem: {name} is {size}: no table holds that many")
    return checked


def split(entry: Mapping[str, Any]) -> Split:
    """Parts of the keys and packed heads of a stage. Older files have no entry for them."""
    value = entry.get("split", [1, False])
    if not isinstance(value, list) or len(value) not in (2, 3):
        raise ValueError(f"a split is {shown(value)}, not parts and whether heads are packed")
    integers("a split", [value[0], *value[2:]], len(value) - 1, 1)
    return Split(*value)


def split_entry(split: Split) -> list[Any]:
    """A file's entry for a split, which `split` reads."""
    entry = [split.splits, split.pack_gqa]
    return entry if split.part_tiles is None else [*entry, split.part_tiles]


def stage(
    value: Any, of: Problem, algorithm: str, direction: str, *, own: bool = False
) -> tuple[plans.Stage, Tiling, int, int]:
    """A stage, its tiling, how often its loops repeat, and how many query heads apart.

    For a user's `own` algorithm the file describes the stage; otherwise the algorithm's plan does.
    """
    entry = typed("a stage", value, _STAGE)
    name = entry["name"]
    if own:
        known = entry["outer"] in ("queries", "keys") and entry["per"] in ("head", "group")
        if not known or entry["dense"] or entry["buffers"] or len(name) > 60:
            raise ValueError(f"a stage is {shown(entry)}")
        plan = plans.Stage(name, entry["outer"], per=entry["per"])
    else:
        planned = {s.name: s for s in plans.stages(of, algorithm, direction, split(entry))}
        if name not in planned:
            raise ValueError(f"{algorithm} {direction} has no stage {name!r}")
        plan = planned[name]
        for key in ("outer", "dense", "per"):
            if entry[key] != getattr(plan, key):
                raise ValueError(f"stage {name!r}: {key} is not {getattr(plan, key)!r}")
        _check_buffers(entry["buffers"])
    heads = plans.heads_of(plan, of)
    if (entry["repeat"], entry["stride"]) != heads:
        counts = entry["repeat"], entry["stride"]
        raise ValueError(f"stage {name!r}: repeat and stride are {counts}, not {heads}")
    return plan, Tiling(*integers("a tiling", entry["tiling"], 2, 1)), *heads


def _check_buffers(buffers: list[Any]) -> None:
    """Check that the file's buffers are well-formed.

    The stage's buffers come from the itinerary, which may have changed since the file was written.
    """
    if len(buffers) > len(TENSORS):
        raise ValueError(f"a stage has {len(buffers)} buffers")
    for entry in buffers:
        if not isinstance(entry, list) or len(entry) != 5 or entry[0] not in TENSORS:
            raise ValueError(f"a buffer is {shown(entry)}")
        integers("a buffer", entry[1:4], 3)
        if not isinstance(entry[4], bool):
            raise ValueError(f"a buffer is {shown(entry)}")


# -- how long tables can be ---------------------------------------------------------------------


def members(walk: plans.Stage, of: Problem) -> int:
    """Rows per query in a stage's loops: one for each packed head (`Split`)."""
    return of.group if walk.parts and walk.per == "group" else 1


def tiles(of: Problem, tiling: Tiling, members: int = 1) -> tuple[int, int, int]:
    """Numbers of row tiles, column tiles and score tiles (pairs of them in one sequence)."""
    t_r = t_c = pairs = 0
    for s in of.sequences:
        rows = -(-(s.q_stop - s.q_start) * members // tiling.block_q)
        cols = -(-(s.k_stop - s.k_start) // tiling.block_k)
        t_r, t_c, pairs = t_r + rows, t_c + cols, pairs + rows * cols
    return t_r, t_c, pairs


def length_of_events(
    length: int, walk: plans.Stage, of: Problem, tiling: Tiling, *, own: bool = False
) -> None:
    """Refuse a table of events that is too long or too short for the stage.

    The problem does not bound the length for a user's `own` algorithm, so only a fixed limit
    applies.
    """
    if own:
        if not 0 < length <= MOST_EVENTS:
            raise ValueError(f"stage {walk.name!r} has {length} events, over {MOST_EVENTS}")
        return
    rows_each = members(walk, of)
    t_r, t_c, pairs = tiles(of, tiling, rows_each)
    steps = t_r if walk.outer == "queries" else t_c
    heads = of.group // rows_each if walk.per == "group" else 1
    # Each buffer of a visit or a step comes and goes and may be stored; `n_q` for single rows.
    most = (pairs * heads + steps + of.n_q) * (3 * len(walk.buffers) + 8)
    if walk.parts:  # an outer step for each part, of a visit at least; merging, for several
        most, steps = 2 * most, steps if walk.parts == "walks" else 0
    if not steps <= length <= most:
        raise ValueError(
            f"stage {walk.name!r} has {length} events, not from {steps} to {most} as in such a walk"
        )


def length_of_mask(
    ptr: tuple[int, ...],
    col: tuple[int, ...],
    kind: tuple[int, ...],
    of: Problem,
    tiling: Tiling,
    rows_each: int,
) -> None:
    """Refuse a mask's table of tiles whose length does not match its tiling."""
    t_r, _, pairs = tiles(of, tiling, rows_each)
    if ptr[0] != t_r + 1 or col != kind or col[0] > pairs:
        raise ValueError(f"a mask's table has {ptr[0] - 1} rows and {col[0]} of {pairs} tiles")


def grid(shape: tuple[int, ...], of: Problem, rows: int, cols: int) -> None:
    """Refuse a block mask's grid that reaches past the scores."""
    if shape[0] * rows >= of.n_q + rows or shape[1] * cols >= of.n_kv + cols:
        raise ValueError(
            f"a block mask of {shape} cells of {rows} x {cols} reaches past the scores"
        )


def length_of_timeline(length: int, events: int) -> None:
    """Refuse a timeline with more spans than events x phases x roles."""
    if length > events * len(PHASES) * len(ROLES):
        raise ValueError(f"the timeline has {length} spans of {events} events")


# -- what tables hold ---------------------------------------------------------------------------


def within(what: str, values: np.ndarray, low: int, high: int) -> None:
    """Refuse values outside low .. high - 1."""
    if len(values) and not (low <= int(values.min()) and int(values.max()) < high):
        raise ValueError(f"{what} goes from {values.min()} to {values.max()}, not {low} to {high}")


def events(
    table: np.ndarray,
    walk: plans.Stage,
    of: Problem,
    tiling: Tiling,
    length: int,
    *,
    own: bool = False,
) -> None:
    """Check a part of one stage's events: tiles and heads exist, and byte counts are possible.

    `length` is the number of all events of the stage.
    """
    rows_each = members(walk, of)
    t_r, t_c, pairs = tiles(of, tiling, rows_each)
    what = f"stage {walk.name!r}: "
    heads = of.group // rows_each if walk.per == "group" else 1
    within(what + "head", table["head"], 0, heads)
    within(what + "i", table["i"], -1, t_r)
    within(what + "j", table["j"], -1, t_c)
    within(what + "visit", table["visit"], -1, length if own else pairs)
    # One tile of one tensor: a row of it is at most a row of scores, or of head_dim, of 8 B.
    largest = of.n_q * rows_each * max(of.n_kv, of.head_dim, of.head_dim_v) * 8
    largest = max(largest, of.n_kv * max(of.head_dim, of.head_dim_v) * 8)
    largest = max(largest, *(m.tile.nbytes(of.n_q, of.n_kv) for m in walk.moves), 0)
    most = (1 << 62) // max(length, 1)  # so that sums are no overflow
    within(what + "bytes", table["bytes"], 0, (most if own else min(largest, most)) + 1)
    if (table["level"] != ~np.isin(table["op"], TRANSFERS)).any() or table["stage"].any():
        raise ValueError(what + "an event's level or stage is not as it must be")
    outer = table["i"] if walk.outer == "queries" else table["j"]
    visiting = table["visit"] >= 0
    if (outer < 0).any() or ((table["i"] < 0) | (table["j"] < 0))[visiting].any():
        raise ValueError(what + "an event belongs to no tile")
    # No step or visit has nearly as many events as a part of the table that is read at once.
    if not (table["op"] == COMPUTE).any() and walk.parts != "merges":
        raise ValueError(what + "nothing is computed")


def order(table: np.ndarray, walk: plans.Stage) -> None:
    """Check that each visit computes something, and that each step frees all that it holds."""
    if not len(table):
        return
    what = f"stage {walk.name!r}: "
    visiting, computes = table["visit"] >= 0, table["op"] == COMPUTE
    visit = table["visit"] + (int(table["visit"].max()) + 1) * table["head"].astype(np.int64)
    if not np.isin(visit[visiting], visit[visiting & computes]).all():
        raise ValueError(what + "a visit computes nothing")
    held = np.cumsum(gain(table))
    if int(held.min()) < 0:
        raise ValueError(what + "more bytes are freed than were on chip")
    if int(held[-1]) != 0:
        raise ValueError(what + f"{held[-1]} bytes are on chip at the end")
    if (np.diff(step_ends(table)) == 0).any():
        raise ValueError(what + "a step ends before it frees what it holds")


def moved(stages: Sequence[StageTrace]) -> None:
    """Refuse a trace without a byte between HBM and SRAM."""
    if not any(
        np.isin(stage.events["op"], TRANSFERS)[stage.events["bytes"] > 0].any() for stage in stages
    ):
        raise ValueError("no byte is loaded or stored")


def timeline(spans: np.ndarray, stages: Sequence[Any], of: Problem) -> None:
    """Check the spans: stages, heads and tiles exist, and no span ends before it begins."""
    within("timeline: stage", spans["stage"], 0, len(stages))
    within("timeline: sm", spans["sm"], 0, 1 << 15)
    within("timeline: head", spans["head"], 0, of.batch * of.heads)
    for number, (walk, tiling, *_) in enumerate(stages):
        t_r, t_c, pairs = tiles(of, tiling, members(walk, of))
        own = spans[spans["stage"] == number]
        within("timeline: i", own["i"], -1, t_r)
        within("timeline: j", own["j"], -1, t_c)
        within("timeline: visit", own["visit"], -1, pairs)
    within("timeline: start", spans["start_ns"], 0, 1 << 62)
    if (spans["end_ns"] < spans["start_ns"]).any():
        raise ValueError("timeline: a span ends before it begins")


def mask_table(table: Csr, of: Problem, tiling: Tiling, rows_each: int) -> None:
    """Check a mask's table: each row tile lists tiles of its own sequence, with keys ascending."""
    ptr, col, kind = table
    within("a mask's kinds", kind, 0, 2)
    if ptr[0] != 0 or ptr[-1] != len(col) or (np.diff(ptr) < 0).any():
        raise ValueError("a mask's rows of tiles do not add up")
    first = row = 0
    for s in of.sequences:
        rows = -(-(s.q_stop - s.q_start) * rows_each // tiling.block_q)
        cols = -(-(s.k_stop - s.k_start) // tiling.block_k)
        within("a mask's tiles", col[ptr[row] : ptr[row + rows]], first, first + cols)
        first, row = first + cols, row + rows
    rising = np.diff(col.astype(np.int64)) > 0
    rising[ptr[1:-1][(ptr[1:-1] > 0) & (ptr[1:-1] < len(col))] - 1] = True  # a new row begins
    if not rising.all():
        raise ValueError("a mask's tiles are not in ascending order")
