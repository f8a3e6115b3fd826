"""Checks the content of a trace file: types, ranges, and lengths of tables.

A table is read only if its length is plausible for the file's problem, so that a small file cannot
fill the memory. After a read, every index in a table must be in range, so that queries of the trace
need no checks.
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
from flashsim.trace.events import PHASES, ROLES, StageTrace, Structured, gain, step_ends
from flashsim.trace.recording import Own

#: Limits for a user's own algorithm: tensors, stages, and events per stage.
MOST_NAMES, MOST_STAGES, MOST_EVENTS = 64, 64, 1 << 22
#: The longest text that a header may contain.
MOST_CHARACTERS = 2_000
SIDES = (ROW, COL, TILE)
#: Tables store indices as int32, so every index is less than this.
INDEX = 1 << 31
#: Python's types of JSON values, as error messages name them.
_JSON: dict[type, str] = {
    **{dict: "an object", list: "a list", str: "a string"},
    **{int: "an integer", bool: "true or false"},
}
_STAGE = {
    **{"name": str, "outer": str, "dense": bool, "per": str},
    **{"tiling": list, "key_order": str, "repeat": int, "stride": int},
}


def typed(what: str, entry: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return `entry` if it is a JSON object with these keys and types; otherwise raise an error."""
    if not isinstance(entry, dict):
        raise ValueError(f"{what} must be a JSON object, got {shown(entry)}")
    for key, kind in kinds.items():
        if key not in entry:
            raise ValueError(f"{what} lacks the key {key!r}")
        value = entry[key]
        of_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not of_kind:
            raise ValueError(f"in {what}, {key!r} must be {_JSON[kind]}, got {shown(value)}")
    return entry


def integers(what: str, entry: Any, n: int, low: int = 0) -> list[int]:
    """Return `entry` if it is a list of n indices of at least `low`; otherwise raise an error."""
    if not isinstance(entry, list) or len(entry) != n:
        raise ValueError(f"{what} must be a list of {n} integers, got {shown(entry)}")
    for value in entry:
        if type(value) is not int or not low <= value < INDEX:
            raise ValueError(
                f"{what} must be integers from {low} to {INDEX - 1}, got {shown(entry)}"
            )
    return entry


def header(fields: dict[str, Any], tensors: Sequence[str] = TENSORS) -> None:
    """Raise an error unless the top-level fields of a trace file's header are valid."""
    kinds = {
        **{"names": dict, "problem": dict, "device": dict, "stages": list, "provenance": dict},
        **{"algorithm": str, "direction": str, "backend": str},
    }
    typed("the header", fields, kinds)
    _strings(fields)
    for name, value in fields["provenance"].items():
        if not isinstance(value, str):
            raise ValueError(
                f"in the header's entry 'provenance', {name!r} must be a string, got {shown(value)}"
            )
    for field, ours in (("op", OPS), ("tensor", tensors), ("phase", PHASES), ("role", ROLES)):
        names = fields["names"].get(field, [] if field in ("phase", "role") else None)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"in the header's entry 'names', {field!r} must be a list of strings, got "
                f"{shown(names)}"
            )
        if unknown := set(names) - set(ours):
            raise ValueError(
                f"in the header's entry 'names', {field!r} has unknown names: "
                f"{', '.join(map(repr, sorted(unknown)))}"
            )
    if not fields["stages"]:
        raise ValueError("the header lists no stages; a trace has at least one")
    if len(fields["stages"]) > MOST_STAGES:
        raise ValueError(
            f"the header lists {len(fields['stages'])} stages, but the limit is {MOST_STAGES}"
        )


def _strings(tree: Any) -> None:
    """Raise an error for text that is too long, or that contains terminal control characters."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            _strings(key)
            _strings(value)
    elif isinstance(tree, list):
        for value in tree:
            if isinstance(value, (str, dict, list)):  # skips lists of up to a million integers
                _strings(value)
    elif isinstance(tree, str) and (len(tree) > MOST_CHARACTERS or printable(tree) != tree):
        raise ValueError(
            f"each text in the header must have at most {MOST_CHARACTERS:,} characters, all of "
            f"them printable, got {shown(tree)}"
        )


def own(value: Any) -> Own | None:
    """Return a file's description of a user's own algorithm, or None for a built-in algorithm."""
    if value is None:
        return None
    kinds = {"tensors": list, "compulsory": int, "workspace": int}
    entry = typed("own", value, kinds)
    tensors: dict[str, int] = {}
    for pair in entry["tensors"]:
        if not isinstance(pair, list) or len(pair) != 2 or not own_name(pair[0]):
            raise ValueError(
                "in the header's entry 'own', each tensor must be a list [name, axis], whose "
                f"name is an identifier of at most 24 characters, got {shown(pair)}"
            )
        name, axis = pair
        if name in TENSORS or name in tensors or type(axis) is not int or axis not in SIDES:
            raise ValueError(
                "in the header's entry 'own', each tensor must have a name that no other tensor "
                f"has, and one of the axes {SIDES}, got {shown(pair)}"
            )
        tensors[name] = axis
    if len(tensors) > MOST_NAMES:
        raise ValueError(
            f"in the header's entry 'own', there must be at most {MOST_NAMES} tensors, got "
            f"{len(tensors)}"
        )
    sizes = entry["compulsory"], entry["workspace"]
    if not all(0 <= nbytes < 1 << 62 for nbytes in sizes):
        raise ValueError(
            "in the header's entry 'own', the numbers of bytes 'compulsory' and 'workspace' must "
            f"be from 0 to 2**62 - 1, got {sizes[0]} and {sizes[1]}"
        )
    return Own(tensors, *sizes)


def own_name(name: Any) -> bool:
    """Return True if a tensor of a user's own algorithm may have this name."""
    return isinstance(name, str) and name.isidentifier() and len(name) <= 24


def shape_of_costs(shape: tuple[int, ...], events: Structured) -> None:
    """Raise an error unless a stage's table of FLOPs and bytes has one row per "compute" event."""
    needed = int((events["op"] == COMPUTE).sum()), len(KINDS) + 2
    if shape != needed:
        raise ValueError(
            f"a stage's table of costs must have shape {needed}, one row per compute event, got "
            f"{shape}"
        )


def problem(fields: dict[str, Any], **masks: Any) -> Problem:
    """Return the header's problem, after checking that int32 tables can index all lengths."""
    if own_masks := {"mask", "block_mask", "mask_mod", "score_mod"} & fields.keys():
        raise ValueError(
            "the header itself, and not its entry 'problem', must contain "
            f"{', '.join(sorted(own_masks))}"
        )
    checked = Problem(**fields, **masks)
    sizes = {n: getattr(checked, n) for n in ("n_q", "n_kv", "batch", "kv_heads", "shared_prefix")}
    for name, size in {**sizes, "batch * heads": checked.batch * checked.heads}.items():
        if size and size >= INDEX:
            raise ValueError(
                f"in the header's entry 'problem', {name} must be less than 2**31, because tables "
                f"store indices as int32, got {size}"
            )
    return checked


def split(entry: Mapping[str, Any]) -> Split:
    """Return the `Split` of a stage in the file; stages of older versions do not split keys."""
    value = entry.get("split", [1, False])
    if not isinstance(value, list) or len(value) not in (2, 3):
        raise ValueError(
            "a stage's split must be a list [splits, pack_gqa] or [splits, pack_gqa, part_tiles], "
            f"got {shown(value)}"
        )
    integers("a stage's splits and part_tiles", [value[0], *value[2:]], len(value) - 1, 1)
    return Split(*value)


def stage(
    value: Any, of: Problem, algorithm: str, direction: str, *, own: bool = False
) -> tuple[plans.Stage, Tiling, int, int]:
    """Return a stage of the file, the tiling, and the `repeat` and `stride` of the `StageTrace`."""
    entry = typed("a stage", value, _STAGE)
    name = entry["name"]
    if own:
        known = entry["outer"] in ("queries", "keys") and entry["per"] in ("head", "group")
        if not known or entry["dense"] or len(name) > 60:
            raise ValueError(
                "a stage of your own algorithm must have a name of at most 60 characters, 'outer' "
                "queries or keys, 'per' head or group, and 'dense' false, got "
                f"{shown(entry)}"
            )
        plan = plans.Stage(name, entry["outer"], per=entry["per"])
    else:
        planned = {s.name: s for s in plans.stages(of, algorithm, direction, split(entry))}
        if name not in planned:
            raise ValueError(
                f"the {direction} pass of {algorithm} has no stage {name!r}; its stages are "
                f"{', '.join(map(repr, planned))}"
            )
        plan = planned[name]
    repeat, stride = plans.heads_of(plan, of)
    wanted = {"outer": plan.outer, "dense": plan.dense, "per": plan.per}
    for key, value in {**wanted, "repeat": repeat, "stride": stride}.items():
        if entry[key] != value:
            got = shown(entry[key])
            raise ValueError(f"in stage {name!r}, {key!r} must be {value!r}, got {got}")
    return plan, Tiling(*integers("a stage's tiling", entry["tiling"], 2, 1)), repeat, stride


# -- lengths of tables --------------------------------------------------------------------------


def tilings(tiles: Mapping[str, Tiling]) -> None:
    """Raise an error unless all stages have tiles of one `Tiling`."""
    whole = Tiling.joined(tiles)
    if wrong := [name for name, tile in tiles.items() if tile != whole.of(name)]:
        raise ValueError(f"stage {wrong[0]!r} has {tiles[wrong[0]]} tiles, but others {whole}")


def tiles(of: Problem, tiling: Tiling, rows_each: int = 1) -> tuple[int, int, int]:
    """Return the numbers of row tiles, column tiles, and pairs of both within one sequence."""
    t_r = t_c = pairs = 0
    for s in of.sequences:
        rows = -(-(s.q_stop - s.q_start) * rows_each // tiling.block_q)
        cols = -(-(s.k_stop - s.k_start) // tiling.block_k)
        t_r, t_c, pairs = t_r + rows, t_c + cols, pairs + rows * cols
    return t_r, t_c, pairs


def length_of_mask(
    ptr: tuple[int, ...],
    col: tuple[int, ...],
    kind: tuple[int, ...],
    of: Problem,
    tiling: Tiling,
    rows_each: int,
) -> None:
    """Raise an error if the length of a mask's table of tiles does not match the tiling."""
    t_r, _, pairs = tiles(of, tiling, rows_each)
    if ptr[0] != t_r + 1 or col != kind or col[0] > pairs:
        raise ValueError(
            f"a mask's table must have {t_r} row tiles, got {ptr[0] - 1}; at most {pairs} tiles, "
            f"got {col[0]}; and as many kinds as tiles, got {kind[0]}"
        )


def grid(shape: tuple[int, ...], of: Problem, rows: int, cols: int) -> None:
    """Raise an error for a block mask whose grid reaches past the score matrix."""
    if shape[0] * rows >= of.n_q + rows or shape[1] * cols >= of.n_kv + cols:
        raise ValueError(
            f"a block mask of {shape[0]} x {shape[1]} blocks, each of {rows} x {cols} scores, "
            f"reaches past the last of {of.n_q} queries or {of.n_kv} keys"
        )


def length_of_timeline(length: int, events: int) -> None:
    """Raise an error if a timeline has more spans than events x phases x warp roles."""
    if length > (most := events * len(PHASES) * len(ROLES)):
        raise ValueError(
            f"the timeline must have at most {most} spans, for a trace of {events} events, got "
            f"{length}"
        )


# -- values in tables ---------------------------------------------------------------------------


def within(what: str, values: np.ndarray, low: int, high: int) -> None:
    """Raise an error if any value is outside low .. high - 1."""
    if len(values) and not (low <= int(values.min()) and int(values.max()) < high):
        raise ValueError(
            f"{what}: the values must be from {low} to {high - 1}, but are from {values.min()} to "
            f"{values.max()}"
        )


class StageLimits:
    """The numbers of tiles, heads and events that a stage of a file can have.

    `rows_each` is the number of score rows per query: 1, or one row per packed head.
    """

    def __init__(
        self, stage: plans.Stage, of: Problem, tiling: Tiling, of_split: Split, *, own: bool
    ) -> None:
        self.stage, self.of, self.own = stage, of, own
        self.what = f"stage {stage.name!r}"
        self.rows_each = of.group if of_split.pack_gqa else 1
        self.heads = plans.members_of(stage, of, of_split)
        self.t_r, self.t_c, self.pairs = tiles(of, tiling, self.rows_each)

    def check_length(self, length: int) -> None:
        """Raise an error if the stage's table of events is too long or too short."""
        stage = self.stage
        steps = self.t_r if stage.outer == "queries" else self.t_c
        # A visit or a step allocates, frees and perhaps stores each buffer. A stage that works on
        # strips of rows has at most `n_q` strips.
        most = (self.pairs * self.heads + steps + self.of.n_q) * (3 * len(stage.buffers) + 8)
        if self.own:
            steps, most = 1, MOST_EVENTS
        elif stage.parts:  # each part has a step with at least one visit; a merge may do nothing
            most, steps = 2 * most, steps if stage.parts == "walks" else 0
        if not steps <= length <= most:
            needs = "" if self.own else ", for its problem and tiling"
            raise ValueError(f"{self.what} must have {steps} to {most} events{needs}, got {length}")

    def check_events(self, table: Structured, length: int) -> None:
        """Raise an error unless consecutive events have valid heads, tiles and byte counts.

        The argument `length` is the number of all events of the stage.
        """
        of, what = self.of, self.what + ": "
        within(what + "head", table["head"], 0, self.heads)
        within(what + "i", table["i"], -1, self.t_r)
        within(what + "j", table["j"], -1, self.t_c)
        within(what + "visit", table["visit"], -1, length if self.own else self.pairs)
        # An event moves one tile of one tensor. Each row of the tile is a row of scores or of
        # head_dim elements, of at most 8 B each.
        widest = max(of.head_dim, of.head_dim_v)
        largest = of.n_q * self.rows_each * max(of.n_kv, widest) * 8
        moves = (move.tile.nbytes(of.n_q, of.n_kv) for move in self.stage.moves)
        largest = max(largest, of.n_kv * widest * 8, *moves)
        most = (1 << 62) // max(length, 1)  # sums of the bytes then fit in int64
        within(what + "bytes", table["bytes"], 0, (most if self.own else min(largest, most)) + 1)
        if (table["level"] != ~np.isin(table["op"], TRANSFERS)).any() or table["stage"].any():
            raise ValueError(
                what + "the level of an event must be 0 for a transfer and 1 otherwise, and its "
                "stage must be 0"
            )
        outer = table["i"] if self.stage.outer == "queries" else table["j"]
        visiting = table["visit"] >= 0
        if (outer < 0).any() or ((table["i"] < 0) | (table["j"] < 0))[visiting].any():
            raise ValueError(
                what + "an event lacks its tile: i or j is -1 where the loops have a tile"
            )
        # The table is read in chunks with far more events than a step or visit has, so each chunk
        # must have a "compute" event.
        if not (table["op"] == COMPUTE).any() and self.stage.parts != "merges":
            raise ValueError(what + "its events compute nothing")


def order(table: Structured, what: str) -> None:
    """Raise an error unless each visit computes something, and each step frees all buffers."""
    if not len(table):
        return
    visiting, computes = table["visit"] >= 0, table["op"] == COMPUTE
    visit = table["visit"] + (int(table["visit"].max()) + 1) * table["head"].astype(np.int64)
    if not np.isin(visit[visiting], visit[visiting & computes]).all():
        raise ValueError(f"{what}: the events of a visit include no compute event")
    held = np.cumsum(gain(table))
    if int(held.min()) < 0:
        raise ValueError(f"{what}: its events free more bytes than are on chip")
    if int(held[-1]) != 0:
        raise ValueError(f"{what}: its events leave {held[-1]} bytes on chip at the end")
    if (np.diff(step_ends(table)) == 0).any():
        raise ValueError(f"{what}: a step ends before it has freed all its buffers")


def moved(stages: Sequence[StageTrace]) -> None:
    """Raise an error for a trace that moves no bytes between HBM and SRAM."""
    if not any(
        np.isin(stage.events["op"], TRANSFERS)[stage.events["bytes"] > 0].any() for stage in stages
    ):
        raise ValueError("the trace moves no bytes between HBM and SRAM")


def timeline(spans: Structured, stages: Sequence[StageLimits], of: Problem) -> None:
    """Raise an error unless spans have known stages, heads and tiles, and end after they begin."""
    within("timeline: stage", spans["stage"], 0, len(stages))
    within("timeline: sm", spans["sm"], 0, 1 << 15)
    within("timeline: head", spans["head"], 0, of.batch * of.heads)
    for number, limits in enumerate(stages):
        own = spans[spans["stage"] == number]
        within("timeline: i", own["i"], -1, limits.t_r)
        within("timeline: j", own["j"], -1, limits.t_c)
        within("timeline: visit", own["visit"], -1, limits.pairs)
    within("timeline: start", spans["start_ns"], 0, 1 << 62)
    if (spans["end_ns"] < spans["start_ns"]).any():
        raise ValueError("in the timeline, a span's end_ns is less than its start_ns")


def mask_table(table: Csr, of: Problem, tiling: Tiling, rows_each: int) -> None:
    """Raise an error unless each row tile lists key tiles of its own sequence, in key order."""
    ptr, col, kind = table
    within("kinds of a mask's tiles", kind, 0, 2)
    if ptr[0] != 0 or ptr[-1] != len(col) or (np.diff(ptr) < 0).any():
        raise ValueError(
            f"a mask's row pointers must rise from 0 to {len(col)}, the number of its tiles"
        )
    first = row = 0
    for s in of.sequences:
        rows = -(-(s.q_stop - s.q_start) * rows_each // tiling.block_q)
        cols = -(-(s.k_stop - s.k_start) // tiling.block_k)
        within("key tiles of a mask", col[ptr[row] : ptr[row + rows]], first, first + cols)
        first, row = first + cols, row + rows
    rising = np.diff(col.astype(np.int64)) > 0
    rising[ptr[1:-1][(ptr[1:-1] > 0) & (ptr[1:-1] < len(col))] - 1] = True  # a new row begins
    if not rising.all():
        raise ValueError("a mask's key tiles must be in ascending order within a row tile")
