"""Trace files: a versioned ``.npz`` without pickle, written whole or not at all.

An archive holds ``header`` (JSON, as UTF-8 bytes): format, version, problem, device, stages and
provenance; and arrays: ``events_0``, ``events_1``, ... (dtype `events.EVENT`), one a stage;
``block_mask``, if there is one; and ``mask_0_ptr``, ``mask_0_col``, ``mask_0_kind``, the tiles that
a mask function kept under the trace's first tiling (see `SavedMask`), and so on. A timeline is
stored field by field, ``timeline_sm`` and so on (`events.TIMELINE`), each start as its distance
from the one before and each end as a duration: a third of the size.

What the codes of operations, tensors, phases and roles mean is spelled out in the header, so a
later flashsim may renumber them.
"""

from __future__ import annotations

import json
import os
import secrets
import tokenize
import zipfile
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from flashsim.errors import TraceError
from flashsim.problem.hardware import Device
from flashsim.problem.masks import BlockMask
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.names import OPS, TENSORS
from flashsim.schedule.savedmask import Csr, SavedMask
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import EVENT, PHASES, ROLES, TIMELINE, StageTrace
from flashsim.trace.recording import Recording
from flashsim.version import __version__

FORMAT = "flashsim-trace"
VERSION = 1
_CSR_PARTS = ("ptr", "col", "kind")
_NAMES = {"op": OPS, "tensor": TENSORS, "phase": PHASES, "role": ROLES}

#: What reading a damaged archive can raise, from zipfile, zlib, NumPy, JSON or our own checks.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,  # an archive that claims to be encrypted; NotImplementedError is one too
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    SyntaxError,  # these two: NumPy parsing the text of an array's header
    tokenize.TokenError,
)


def save(trace: Recording, path: str | os.PathLike) -> None:
    """Write `trace` to `path`, replacing what was there only once the new file is complete.

    Raises
    ------
    TraceError
        If the file cannot be written.
    """
    path = Path(path)
    header, arrays = _pack(trace)
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        try:
            with part.open("xb") as file:
                np.savez_compressed(file, header=text, **arrays)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(
            f"cannot write a trace to {str(path)!r}: {error.strerror or error}; the folder must "
            "exist and be writable"
        ) from error


def load(path: str | os.PathLike) -> Recording:
    """Read a trace that `save` wrote.

    Raises
    ------
    TraceError
        If there is no such file, it is damaged, is not a trace, or comes from a newer flashsim.
    """
    try:
        with Path(path).open("rb") as file:
            if file.read(2) != b"PK":  # every .npz is a zip archive
                raise TraceError(f"{str(path)!r} is not a flashsim trace file (a zip archive)")
            file.seek(0)
            return _read(file, str(path))
    except OSError as error:
        raise TraceError(
            f"cannot read a trace from {str(path)!r}: {error.strerror or error}"
        ) from error


def _read(file: Any, path: str) -> Recording:
    try:
        archive = np.load(file, allow_pickle=False)
        names = archive.files
    except _DAMAGE as error:
        raise _damaged(path, error) from error
    if "header" not in names:
        raise TraceError(
            f"{path!r} is an archive, but not a flashsim trace: it holds {', '.join(names[:5])}"
        )
    try:
        header = json.loads(archive["header"].tobytes())
        known = isinstance(header, dict) and header.get("format") == FORMAT
        version = int(header["version"]) if known else 0
    except _DAMAGE as error:
        raise _damaged(path, error) from error
    if not known:
        raise TraceError(f"{path!r} is an archive with a header, but not a flashsim trace")
    if version > VERSION:
        raise TraceError(
            f"{path!r} has trace format {version}, written by flashsim "
            f"{header.get('flashsim', '?')}; flashsim {__version__} reads formats up to {VERSION}: "
            "install a newer flashsim"
        )
    try:
        return _unpack(header, archive)
    except _DAMAGE as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> TraceError:
    return TraceError(
        f"{path!r} is truncated or damaged ({type(error).__name__}: {error}); save the trace again"
    )


# -- a trace as JSON and arrays -----------------------------------------------------------------


def _pack(trace: Recording) -> tuple[dict[str, Any], dict[str, Any]]:
    problem, mask, grid = trace.problem, trace.problem.mask, trace.problem.block_mask
    arrays: dict[str, Any] = {f"events_{n}": stage.events for n, stage in enumerate(trace.stages)}
    header: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "flashsim": __version__,
        "names": _NAMES,
        "problem": {
            field.name: getattr(problem, field.name)
            for field in fields(problem)
            if field.name not in ("mask", "block_mask")
        },
        "device": trace.device.to_dict(),
        "algorithm": trace.algorithm,
        "direction": trace.direction,
        "backend": trace.backend,
        "provenance": trace.provenance,
        "stages": [_pack_stage(stage) for stage in trace.stages],
    }
    if trace.timeline is not None:
        arrays |= _pack_timeline(trace.timeline)
    if grid is not None:
        header["block_mask"] = [grid.block_q, grid.block_k]
        arrays["block_mask"] = grid.grid
    if mask is not None:
        tilings = list(dict.fromkeys(stage.schedule.tiling for stage in trace.stages))
        header["mask"] = {
            "name": getattr(mask, "__name__", type(mask).__name__),
            "tilings": [[t.block_q, t.block_k] for t in tilings],
        }
        for n, tiling in enumerate(tilings):
            table = Schedule(problem, tiling).row_csr
            for part, array in zip(_CSR_PARTS, table, strict=True):
                arrays[f"mask_{n}_{part}"] = array
    return header, arrays


def _pack_stage(stage: StageTrace) -> dict[str, Any]:
    schedule = stage.schedule
    return {
        **{key: getattr(stage.stage, key) for key in ("name", "outer", "dense", "per", "buffers")},
        "tiling": [schedule.tiling.block_q, schedule.tiling.block_k],
        "key_order": schedule.key_order,
        "repeat": stage.repeat,
        "stride": stage.stride,
    }


def _unpack(header: dict[str, Any], archive: Any) -> Recording:
    block_mask = mask = None
    if "block_mask" in header:
        block_mask = BlockMask(archive["block_mask"], *header["block_mask"])
    if "mask" in header:
        saved = header["mask"]
        tables: dict[Tiling, Csr] = {
            Tiling(*tiling): _table(archive, n) for n, tiling in enumerate(saved["tilings"])
        }
        mask = SavedMask(saved["name"], tables)
    problem = Problem(**header["problem"], block_mask=block_mask, mask=mask)
    names = header["names"]
    known = {s.name: s for s in plans.stages(problem, header["algorithm"], header["direction"])}
    stages = [
        _unpack_stage(
            entry, known[entry["name"]], problem, _recoded(archive[f"events_{n}"], EVENT, names)
        )
        for n, entry in enumerate(header["stages"])
    ]
    timeline = None
    if "timeline_sm" in archive.files:
        timeline = _recoded(_unpack_timeline(archive), TIMELINE, names)
    return Recording(
        problem,
        Device(**header["device"]),
        header["algorithm"],
        header["direction"],
        header["backend"],
        stages,
        header["provenance"],
        timeline,
    )


def _pack_timeline(spans: np.ndarray) -> dict[str, np.ndarray]:
    fields = {name: spans[name] for name in TIMELINE.names or ()}
    fields["end_ns"] = fields["end_ns"] - fields["start_ns"]
    fields["start_ns"] = np.diff(fields["start_ns"], prepend=0)
    return {f"timeline_{name}": values for name, values in fields.items()}


def _unpack_timeline(archive: Any) -> np.ndarray:
    stored = {name: archive[f"timeline_{name}"] for name in TIMELINE.names or ()}
    spans = np.zeros(len(stored["sm"]), TIMELINE)
    for name, values in stored.items():
        if values.dtype != TIMELINE[name] or values.shape != spans.shape:
            raise ValueError(f"timeline_{name} has dtype {values.dtype} and shape {values.shape}")
        spans[name] = values
    spans["start_ns"] = np.cumsum(spans["start_ns"])
    spans["end_ns"] += spans["start_ns"]
    return spans


def _table(archive: Any, n: int) -> Csr:
    ptr, col, kind = (archive[f"mask_{n}_{part}"] for part in _CSR_PARTS)
    return ptr, col, kind


def _recoded(table: np.ndarray, dtype: np.dtype, names: dict[str, list[str]]) -> np.ndarray:
    """`table` with the file's codes turned into ours, by what they are called; read-only."""
    if table.dtype != dtype:
        raise ValueError(f"a table has dtype {table.dtype}")
    for field, ours in _NAMES.items():
        if field in (dtype.names or ()):
            if unknown := set(names[field]) - set(ours):
                raise ValueError(f"unknown {field} {', '.join(map(repr, sorted(unknown)))}")
            codes = np.array([ours.index(name) for name in names[field]], np.uint8)
            table[field] = codes[table[field]]
    table.setflags(write=False)
    return table


def _unpack_stage(
    entry: dict[str, Any], stage: plans.Stage, problem: Problem, events: np.ndarray
) -> StageTrace:
    schedule = Schedule(
        problem, Tiling(*entry["tiling"]), stage.outer, entry["key_order"], stage.dense
    )
    return StageTrace(stage, schedule, entry["repeat"], entry["stride"], events)
