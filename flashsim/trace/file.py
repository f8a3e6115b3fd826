"""Saves and loads traces as versioned ``.npz`` files without pickle.

The member ``header`` (JSON, as UTF-8 bytes) has the format, version, problem, device, stages and
provenance, and the shape of each array by name. The arrays are:

- ``events_0`` and so on, of dtype `events.EVENT`, one per stage;
- ``block_mask``, if there is one;
- ``mask_0_ptr``, ``mask_0_col``, ``mask_0_kind``, the tiles that a mask function kept under the
  trace's first tiling (see `SavedMask`), and so on for its other tilings;
- ``costs_0`` and so on, the field `StageTrace.costs` of each stage of a user's own algorithm;
- ``timeline_sm`` and so on, the fields of a timeline (`events.TIMELINE`). Starts are stored as
  differences from the previous start, and ends as durations, which reduces the file to a third of
  its size.

The header also names the operations, tensors, phases and roles behind the numeric codes, so that a
later flashsim may renumber them.

A trace file may come from an untrusted source. So the module `archive` checks sizes before memory
is allocated, and the module `validate` checks values before use. A damaged or inconsistent file
raises a `TraceError`.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from flashsim.errors import TraceError, shown
from flashsim.functions.builder import graph_of
from flashsim.functions.graph import Graph
from flashsim.functions.mask import MaskFunction
from flashsim.problem.hardware import Device
from flashsim.problem.masks import BlockMask
from flashsim.problem.problem import Problem
from flashsim.report import beside
from flashsim.schedule.file_mask import Csr, SavedMask
from flashsim.schedule.names import OPS, TENSORS
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling
from flashsim.trace import validate
from flashsim.trace.archive import Archive
from flashsim.trace.events import EVENT, PHASES, ROLES, TIMELINE, StageTrace, Structured
from flashsim.trace.recording import Recording
from flashsim.version import __version__

FORMAT = "flashsim-trace"
VERSION = 1
_CSR_PARTS = ("ptr", "col", "kind")
_NAMES = {"op": OPS, "tensor": TENSORS, "phase": PHASES, "role": ROLES}

#: The largest header. Most headers have a few KiB; one that lists many packed lengths has more.
_HEADER_BYTES = 1 << 24
_INT32 = np.dtype(np.int32)


def save(trace: Recording, path: str | os.PathLike) -> None:
    """Write `trace` to `path`; an existing file is replaced only once the new one is complete.

    Raises
    ------
    TraceError
        If the file cannot be written.
    """
    path = _path(path)
    header, arrays = _pack(trace)
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    if len(text) > _HEADER_BYTES:
        raise TraceError(
            f"the header of this trace has {len(text):,} B, but a trace file's header is limited "
            f"to {_HEADER_BYTES:,} B; save a trace with fewer packed sequences"
        )
    try:
        with beside(path) as part, part.open("wb") as file:
            if part.is_file():
                np.savez_compressed(file, header=text, **arrays)
                file.flush()
                os.fsync(file.fileno())
            else:  # /dev/null or a pipe, which cannot seek; zipfile must
                buffer = io.BytesIO()
                np.savez_compressed(buffer, header=text, **arrays)
                file.write(buffer.getvalue())
    except OSError as error:
        raise TraceError(
            f"cannot write a trace to {str(path)!r}: {error.strerror or error}; the folder must "
            "exist and be writable"
        ) from error


def load(path: str | os.PathLike) -> Recording:
    """Read a trace that `save` wrote; a missing, damaged or newer file raises a `TraceError`."""
    path = _path(path)
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":  # every .npz is a zip archive
                raise TraceError(
                    f"{str(path)!r} is not a flashsim trace file, which is a zip archive; name a "
                    "file that Trace.save wrote"
                )
            file.seek(0)
            return _read(file, str(path))
    except OSError as error:
        raise TraceError(
            f"cannot read a trace from {str(path)!r}: {error.strerror or error}"
        ) from error


def _path(value: Any) -> Path:
    try:
        path = Path(value)
        os.fsencode(path)
    except (TypeError, ValueError) as error:
        raise TraceError(
            f"a trace's path must be a string or a Path, got {shown(value)}"
        ) from error
    if "\0" in str(path):
        raise TraceError(f"a file's name cannot contain a null character, got {value!r}")
    return path


def _read(file: Any, path: str) -> Recording:
    # zipfile, zlib and json may raise any error for a damaged file; all become one TraceError.
    try:
        archive = Archive(file)
        if "header" not in archive.names:
            names = ", ".join(archive.names[:5])
            raise TraceError(
                f"{path!r} is an archive, but not a flashsim trace, because it has the members "
                f"{names} and no 'header'; name a file that Trace.save wrote"
            )
        header = _header(archive)
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise TraceError(
                f"{path!r} is an archive with a header, but not a flashsim trace: its header's "
                f"'format' is not {FORMAT!r}"
            )
        validate.typed("the header", header, {"version": int})
        if header["version"] > VERSION:
            raise TraceError(
                f"{path!r} has trace format {header['version']} and was written by flashsim "
                f"{header.get('flashsim', '?')}, but flashsim {__version__} reads only formats up "
                f"to {VERSION}; install a newer flashsim"
            )
        return _unpack(header, archive)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(
            f"{path!r} is truncated or damaged ({type(error).__name__}: {error}); "
            "save the trace again"
        ) from error


def _header(archive: Archive) -> Any:
    archive.declare("header", np.dtype(np.uint8))
    (length,) = archive.shapes["header"]
    if length > _HEADER_BYTES:
        raise ValueError(f"the header must have at most {_HEADER_BYTES:,} B, got {length:,}")
    return json.loads(archive.read("header").tobytes())


# -- converting a trace to JSON and arrays, and back --------------------------------------------


def _pack(trace: Recording) -> tuple[dict[str, Any], dict[str, Any]]:
    problem, mask, grid = trace.problem, trace.problem.mask, trace.problem.block_mask
    arrays: dict[str, Any] = {f"events_{n}": stage.events for n, stage in enumerate(trace.stages)}
    own = trace.own
    if own is not None:
        arrays |= {f"costs_{n}": stage.costs for n, stage in enumerate(trace.stages)}
    header: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "flashsim": __version__,
        "names": {**_NAMES, "tensor": trace.tensors},
        "problem": {
            field.name: getattr(problem, field.name)
            for field in fields(problem)
            if field.name not in ("mask", "block_mask", "mask_mod", "score_mod")
        },
        "device": trace.device.to_dict(),
        "algorithm": trace.algorithm,
        "direction": trace.direction,
        "backend": trace.backend,
        "provenance": trace.provenance,
        "stages": [_pack_stage(stage) for stage in trace.stages],
    }
    if own is not None:
        header["own"] = {**own._asdict(), "tensors": [[*pair] for pair in own.tensors.items()]}
    if trace.timeline is not None:
        arrays |= _pack_timeline(trace.timeline)
    if grid is not None:
        header["block_mask"] = [grid.block_q, grid.block_k]
        arrays["block_mask"] = grid.grid
    for name, graph, values in _functions(problem):
        header[name] = graph.entry()
        arrays |= {f"{name}_{n}": np.atleast_1d(x) for n, x in enumerate(values)}
    if mask is not None:
        tilings = list(dict.fromkeys(stage.schedule.tiling for stage in trace.stages))
        header["mask"] = {
            "name": getattr(mask, "__name__", type(mask).__name__),
            "tilings": [[t.block_q, t.block_k] for t in tilings],
        }
        for n, tiling in enumerate(tilings):
            table = Schedule(problem, tiling, split=trace.stages[0].schedule.split).row_csr
            for part, array in zip(_CSR_PARTS, table, strict=True):
                arrays[f"mask_{n}_{part}"] = array
    header["members"] = {name: list(array.shape) for name, array in arrays.items()}
    return header, arrays


def _functions(problem: Problem) -> Iterator[tuple[str, Graph, tuple[np.ndarray, ...]]]:
    """Yield the name, graph and captured arrays of each score or mask function of a problem.

    A score function's captured arrays are left out, because the schedule does not depend on them.
    """
    if problem.mask_mod is not None:
        yield "mask_mod", problem.mask_mod.graph, problem.mask_mod.arrays
    if problem.score_mod is not None:
        yield "score_mod", problem.score_mod, ()


def _array_types(entry: Any) -> list[tuple[np.dtype, int]]:
    """Return (type, number of axes) of each array that a mask function captured."""
    graph = graph_of(entry)
    names = ("float32" if a.dtype == "bfloat16" else a.dtype for a in graph.arrays)
    pairs = zip(names, graph.arrays, strict=True)
    return [(np.dtype(name), max(1, len(a.shape))) for name, a in pairs]


def _pack_stage(stage: StageTrace) -> dict[str, Any]:
    schedule, split = stage.schedule, stage.schedule.split
    parts = () if split.part_tiles is None else (split.part_tiles,)
    return {
        **{key: getattr(stage.stage, key) for key in ("name", "outer", "dense", "per")},
        "buffers": [],  # earlier versions read a list that they do not use
        "tiling": [schedule.tiling.block_q, schedule.tiling.block_k],
        "key_order": schedule.key_order,
        "split": [split.splits, split.pack_gqa, *parts],
        "repeat": stage.repeat,
        "stride": stage.stride,
    }


def _unpack(header: dict[str, Any], archive: Archive) -> Recording:
    own = validate.own(header.get("own"))
    tensors = TENSORS if own is None else (*TENSORS, *own.tensors)
    validate.header(header, tensors)
    _declare(header, archive)
    shapes, read = archive.shapes, archive.read
    held = {name: list(shape) for name, shape in shapes.items() if name != "header"}
    said = header.get("members", held)
    if wrong := [name for name in {*said, *held} if said.get(name) != held.get(name)]:
        raise ValueError(
            "the shapes of arrays in the header and in the file differ: the header says "
            f"{_sizes(wrong, said)}; the file has {_sizes(wrong, held)}"
        )

    plain = {k: x for k, x in header["problem"].items() if k != "score_grads"}
    problem = validate.problem(plain)
    masks: dict[str, Any] = {}
    if "block_mask" in header:
        cells = validate.integers("block_mask", header["block_mask"], 2, 1)
        validate.grid(shapes["block_mask"], problem, *cells)
        masks["block_mask"] = BlockMask(read("block_mask"), *cells)
    if "mask" in header:
        tables: dict[Tiling, Csr] = {}
        packed = validate.split(header["stages"][0]).pack_gqa
        rows_each = problem.group if packed else 1
        for n, sides in enumerate(header["mask"]["tilings"]):
            tiling = Tiling(*sides)
            of_tables = problem, tiling, rows_each
            of_ptr, of_col, of_kind = (shapes[name] for name in _csr(n))
            validate.length_of_mask(of_ptr, of_col, of_kind, *of_tables)
            ptr, col, kind = map(read, _csr(n))
            tables[tiling] = ptr, col, kind
            validate.mask_table(tables[tiling], *of_tables)
        masks["mask"] = SavedMask(header["mask"]["name"], tables)
    if "score_mod" in header:
        masks["score_mod"] = graph_of(header["score_mod"])
    if "mask_mod" in header:
        graph = graph_of(header["mask_mod"])
        values = [read(f"mask_mod_{n}") for n in range(len(graph.arrays))]
        for spec, array in zip(graph.arrays, values, strict=True):
            if array.size != math.prod(spec.shape):
                raise ValueError(
                    f"captured array {spec.name} must have {math.prod(spec.shape)} elements, got "
                    f"{array.size}"
                )
        pairs = zip(values, graph.arrays, strict=True)
        masks["mask_mod"] = MaskFunction(graph, (x.reshape(a.shape) for x, a in pairs))
    problem = validate.problem(header["problem"], **masks)

    algorithm, direction = header["algorithm"], header["direction"]
    codes = {  # this version's codes, by those of the file
        field: np.array([ours.index(name) for name in header["names"].get(field, ())], np.uint8)
        for field, ours in {**_NAMES, "tensor": tensors}.items()
    }
    stages: list[StageTrace] = []
    limits: list[validate.StageLimits] = []
    for n, entry in enumerate(header["stages"]):
        mine = own is not None
        stage = validate.stage(entry, problem, algorithm, direction, own=mine)
        walk, tiling, repeat, stride = stage
        if "mask" in masks and tiling not in masks["mask"].tables:
            raise ValueError(
                f"stage {walk.name!r} has {tiling} tiles, but the file has no table of the "
                "mask's tiles for that tiling"
            )
        how = walk.outer, entry["key_order"], walk.dense, validate.split(entry)
        schedule = Schedule(problem, tiling, *how)
        limits.append(validate.StageLimits(walk, problem, tiling, how[-1], own=mine))
        table = _events(archive, f"events_{n}", limits[-1], codes)
        costs = None
        if mine:
            validate.shape_of_costs(shapes[f"costs_{n}"], table)
            costs = read(f"costs_{n}")
            # sums of the FLOPs and bytes must not overflow
            validate.within("costs", costs.ravel(), 0, (1 << 62) // max(len(costs), 1))
        stages.append(StageTrace(walk, schedule, repeat, stride, table, costs))
    validate.moved(stages)
    if own is None:
        validate.tilings({stage.name: stage.schedule.tiling for stage in stages})
    timeline = None
    if "timeline_sm" in shapes:
        total = sum(len(stage.events) * stage.repeat for stage in stages)
        validate.length_of_timeline(shapes["timeline_sm"][0], total)
        timeline = _unpack_timeline(archive)
        _recode(timeline, codes)
        timeline.setflags(write=False)
        validate.timeline(timeline, limits, problem)
    return Recording(
        problem,
        Device(**header["device"]),
        algorithm,
        direction,
        # Older files call the simulator "numpy".
        "simulator" if header["backend"] == "numpy" else header["backend"],
        stages,
        header["provenance"],
        timeline,
        own,
    )


def _events(
    archive: Archive, name: str, limits: validate.StageLimits, codes: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return a stage's read-only events from a file, with the current version's codes."""
    (length,) = archive.shapes[name]
    limits.check_length(length)

    def check(part: Structured) -> None:
        _recode(part, codes)
        limits.check_events(part, length)

    table = archive.read(name, check)
    table.setflags(write=False)
    validate.order(table, limits.what)
    return table


def _declare(header: dict[str, Any], archive: Archive) -> None:
    """Declare the type and axes of each array that the header requires; check that all exist."""
    kinds: dict[str, tuple[np.dtype, int]] = {
        f"events_{n}": (EVENT, 1) for n in range(len(header["stages"]))
    }
    if "own" in header:
        width = np.dtype(np.int64), 2
        kinds |= {f"costs_{n}": width for n in range(len(header["stages"]))}
    if "block_mask" in header:
        kinds["block_mask"] = np.dtype(bool), 2
    if "mask_mod" in header:
        kinds |= {f"mask_mod_{n}": x for n, x in enumerate(_array_types(header["mask_mod"]))}
    if "mask" in header:
        saved = validate.typed("mask", header["mask"], {"name": str, "tilings": list})
        for n, tiling in enumerate(saved["tilings"]):
            validate.integers("a mask's tiling", tiling, 2, 1)
            kinds |= dict.fromkeys(_csr(n), (_INT32, 1))
    validate.typed("members", header.get("members", {}), {})
    # Older headers do not name their arrays. If such a file has any array of a timeline, it must
    # have all of them.
    if any(name.startswith("timeline_") for name in header.get("members", archive.names)):
        kinds |= {f"timeline_{name}": (TIMELINE[name], 1) for name in TIMELINE.names or ()}
    stored = set(archive.names) - {"header"}
    if stored != kinds.keys():
        missing, unknown = sorted(kinds.keys() - stored), sorted(stored - kinds.keys())
        raise ValueError(
            "the file must have exactly the arrays that its header implies; missing: "
            f"{missing or 'none'}, unknown: {unknown or 'none'}"
        )
    for name, kind in kinds.items():
        archive.declare(name, *kind)


def _csr(n: int) -> list[str]:
    return [f"mask_{n}_{part}" for part in _CSR_PARTS]


def _sizes(names: Iterable[str], shapes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {shapes.get(name, 'missing')}" for name in sorted(names))


def _pack_timeline(spans: Structured) -> dict[str, np.ndarray]:
    fields = {name: spans[name] for name in TIMELINE.names or ()}
    fields["end_ns"] = fields["end_ns"] - fields["start_ns"]
    fields["start_ns"] = np.diff(fields["start_ns"], prepend=0)
    return {f"timeline_{name}": values for name, values in fields.items()}


def _unpack_timeline(archive: Archive) -> np.ndarray:
    shapes = archive.shapes
    spans: Structured = np.zeros(shapes["timeline_sm"], TIMELINE)
    for name in TIMELINE.names or ():
        if shapes[f"timeline_{name}"] != spans.shape:
            raise ValueError(
                f"the array timeline_{name} must have the same shape as timeline_sm, which is "
                f"{spans.shape}, got {shapes[f'timeline_{name}']}"
            )
        spans[name] = archive.read(f"timeline_{name}")
    spans["start_ns"] = np.cumsum(spans["start_ns"])
    spans["end_ns"] += spans["start_ns"]
    return spans


def _recode(table: Structured, codes: Mapping[str, np.ndarray]) -> None:
    """Replace the codes in a table of a file by this version's codes for the same names."""
    for field, ours in codes.items():
        if field in (table.dtype.names or ()):
            validate.within(f"codes of {field}", table[field], 0, len(ours))
            table[field] = ours[table[field]] if len(table) else 0
