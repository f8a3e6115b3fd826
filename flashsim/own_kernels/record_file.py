"""Serializes a kernel's record, so that a user's file and its grader run in separate processes.

The bytes are an .npz archive of plain arrays, so a reader runs no code from the file.
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flashsim.errors import TraceError
from flashsim.own_kernels.record import ACCESS, WORK, Clash, KernelRecord, Launch, float64
from flashsim.own_kernels.tensors import KernelTensor


@dataclass(frozen=True, eq=False)
class Recorded:
    """A kernel's record, the tensors' names, and the tensors' final values in order of code."""

    record: KernelRecord
    names: Mapping[str, str]
    values: tuple[np.ndarray, ...]


def packed(runs: Sequence[Recorded]) -> bytes:
    """Return the records of several runs, serialized as bytes."""
    arrays: dict[str, np.ndarray] = {}
    about = []
    for n, run in enumerate(runs):
        r = run.record
        arrays |= {f"{n} accesses": r.accesses, f"{n} work": r.work}
        arrays |= {f"{n} stored {code}": mask for code, mask in r.stored.items()}
        # NumPy's file format has no bfloat16, so all values are written as float64.
        arrays |= {f"{n} value {c}": float64(x) for c, x in enumerate(run.values)}
        said: dict[str, Any] = {
            "source": r.source,
            "lines": r.lines,
            "notes": r.notes,
            "names": dict(run.names),
        }
        said |= {key: [asdict(x) for x in getattr(r, key)] for key in _PARTS}
        about.append({**said, "stored": list(r.stored)})
    arrays["about"] = np.frombuffer(json.dumps(about, default=_number).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def unpacked(data: bytes, most: int = 1 << 28) -> list[Recorded]:
    """Return the records that the function `packed` serialized.

    TraceError is raised if `packed` did not write `data`, or if `data` unpacks to more than `most`
    bytes.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(one.file_size for one in archive.infolist()) > most:
                raise TraceError(
                    f"a kernel's record may have at most {most:,} bytes; trace fewer launches"
                )
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            return [_one(n, said, arrays) for n, said in enumerate(about)]
    except (ValueError, KeyError, TypeError, IndexError, OSError, zipfile.BadZipFile) as error:
        raise TraceError(
            f"flashsim cannot read these bytes as a kernel's record: {error}"
        ) from None


_PARTS = {"tensors": KernelTensor, "launches": Launch, "clashes": Clash}


def _one(n: int, said: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Recorded:
    parts: dict[str, Any] = {
        key: tuple(kind(**{k: _tuples(v) for k, v in x.items()}) for x in said[key])
        for key, kind in _PARTS.items()
    }
    tables = {"accesses": (arrays[f"{n} accesses"], ACCESS), "work": (arrays[f"{n} work"], WORK)}
    codes, lines = len(parts["tensors"]), tuple((file, int(at)) for file, at in said["lines"])
    limits = {"launch": len(parts["launches"]), "tensor": codes, "line": len(lines)}
    for name, (table, dtype) in tables.items():
        if table.dtype != dtype:
            raise ValueError(
                f"the table {name} in the kernel's record has the wrong columns "
                f"{table.dtype.names}; trace the kernel again"
            )
        for column, end in limits.items():
            if column in (dtype.names or ()) and (table[column].astype(np.int64) >= end).any():
                raise ValueError(
                    f"the table {name} in the kernel's record refers to a {column} that does not "
                    "exist; trace the kernel again"
                )
    record = KernelRecord(
        str(said["source"]),
        accesses=tables["accesses"][0],
        work=tables["work"][0],
        lines=lines,
        stored={int(code): arrays[f"{n} stored {code}"] for code in said["stored"]},
        notes=tuple(map(str, said["notes"])),
        **parts,
    )
    values = tuple(arrays[f"{n} value {code}"] for code in range(codes))
    for tensor, value in zip(record.tensors, values, strict=True):
        if value.shape != tensor.shape:
            raise ValueError(
                f"the recorded tensor {tensor.name} has shape {tensor.shape}, but its values have "
                f"shape {value.shape}; trace the kernel again"
            )
    return Recorded(record, {str(k): str(v) for k, v in said["names"].items()}, values)


def _tuples(x: Any) -> Any:
    """Convert lists and nested lists to tuples, because JSON has no tuples."""
    if isinstance(x, list):
        return tuple(map(_tuples, x))
    return {k: _tuples(v) for k, v in x.items()} if isinstance(x, dict) else x


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, np.generic) else str(x)
