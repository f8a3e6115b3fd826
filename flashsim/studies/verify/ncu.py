"""Names the counters to request from Nsight Compute, builds its command line and reads its CSV."""

from __future__ import annotations

import csv
import math
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashsim.errors import BackendUnavailable, TraceError, own_errors

SECTOR = 32  # bytes that L2 sends at once

#: The start of the names of flashsim's kernels, as a regular expression.
KERNELS = "(?:flash|hopper)_"

#: Nsight Compute's counters by flashsim's names. Sectors are converted to bytes.
#: docs/guides/truth.md explains the choice of counters.
METRICS = {
    "bytes into SMs": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "reads at L2": "lts__t_sectors_srcunit_tex_op_read.sum",
    "writes at L2": "lts__t_sectors_srcunit_tex_op_write.sum",
    "reductions at L2": "lts__t_sectors_srcunit_tex_op_red.sum",
    "local memory writes": "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
    "local memory reads": "l1tex__t_sectors_pipe_lsu_mem_local_op_ld_lookup_miss.sum",
    "reads from L1": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum",
    "DRAM read": "dram__bytes_read.sum",
    "DRAM write": "dram__bytes_write.sum",
    "shared-memory wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "shared bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "tensor FLOPs, bf16": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "tensor FLOPs, fp16": "sm__ops_path_tensor_src_fp16.sum",
    "seconds": "gpu__time_duration.sum",
    "cycles": "sm__cycles_elapsed.max",
    "blocks an SM by registers": "launch__occupancy_limit_registers",
    "blocks an SM by shared memory": "launch__occupancy_limit_shared_mem",
}

#: Nsight Compute's units, in bytes, seconds or counts; by default it scales values by thousands.
UNITS: dict[str, float] = {"": 1, "byte": 1, "sector": SECTOR, "inst": 1, "cycle": 1, "block": 1}
UNITS |= {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3}
PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class MeasuredLaunch:
    """One launch of a kernel: the kernel's name, and its counters under flashsim's names.

    The field `blocks` is the number of thread blocks, `threads` the threads per block, and `ranges`
    the NVTX ranges as Nsight Compute writes them. A field is 0 or "" if its column is missing.
    """

    kernel: str
    number: int
    counters: dict[str, float] = field(default_factory=dict)
    blocks: int = field(default=0, compare=False)
    ranges: str = field(default="", compare=False)
    threads: int = field(default=0, compare=False)

    @property
    def blocks_per_sm(self) -> int | None:
        """The number of thread blocks that run on an SM at the same time, or None if unknown."""
        limits = [n for name, n in self.counters.items() if name.startswith("blocks an SM")]
        return int(min(limits)) if limits else None


def stage_of(kernel: str) -> str | None:
    """Return the stage that a kernel runs, or None if the kernel is not flashsim's.

    A KV-outer kernel (``dkdv`` or ``backward`` in its name) gets the stage "dkdv", even if it runs
    the stage "fused".
    """
    found = re.search(KERNELS + r"([a-z]+)", kernel)
    if found is None:
        return None
    return "dkdv" if found[1] == "backward" else found[1]


def table(text: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return the column names and the rows of the table that ``ncu --csv`` prints.

    With ``--page raw``, the table's first row has the units of the columns.

    Raises
    ------
    TraceError
        If the text contains no table, or a row is cut off.
    """
    lines = text.splitlines()
    start = next((n for n, x in enumerate(lines) if x.startswith('"ID"') or x[:3] == "ID,"), None)
    if start is None:
        raise TraceError(
            'no Nsight Compute table found: expected a header line that begins with "ID", as '
            "`ncu --csv` prints it; save the complete output of `ncu --csv` to a file"
        )
    body = (x for x in lines[start:] if x.strip() and not x.startswith("=="))
    header, *rows = csv.reader(body)
    for row in rows:
        if len(row) != len(header):
            raise TraceError(
                f"a row of the table has {len(row)} cells, but its header has {len(header)}: "
                f"{','.join(row)[:80]!r}; the file is cut off: save the complete output of ncu "
                "again"
            )
    return header, [dict(zip(header, row, strict=True)) for row in rows]


@own_errors
def parse(text: str) -> list[MeasuredLaunch]:
    """Return the launches in ncu's table, with one counter or one launch (``--page raw``) per row.

    Raises
    ------
    TraceError
        If the text contains no table or no known counter, or a value or unit is unknown.
    """
    header, rows = table(text)
    long = "Metric Name" in header
    needed = ("ID", "Kernel Name", *(("Metric Unit", "Metric Value") if long else ()))
    for column in needed:
        if column not in header:
            raise TraceError(f"the table has no column {column!r}; it has {', '.join(header)}")
    units, rows = ({}, rows) if long or not rows else (rows[0], rows[1:])
    launches = _launches(rows, units)
    if not any(launch.counters for launch in launches):
        raise TraceError(
            "the table contains none of the counters that flashsim compares: "
            + ", ".join(METRICS.values())
        )
    return launches


_OURS = {counter: name for name, counter in METRICS.items()}


def _launches(rows: Iterable[dict[str, str]], units: Mapping[str, str]) -> list[MeasuredLaunch]:
    """Return the launches in rows of one launch each, or (without `units`) of one counter each."""
    launches: dict[int, MeasuredLaunch] = {}
    for cell in rows:
        number = _number(cell["ID"])
        if number not in launches:
            launches[number] = MeasuredLaunch(
                cell["Kernel Name"],
                number,
                blocks=_product(cell.get("Grid Size", "")),
                threads=_product(cell.get("Block Size", "")),
                ranges=next((text for name, text in cell.items() if "Push/Pop" in name), ""),
            )
        counters = {name: (cell[name], unit) for name, unit in units.items()}
        if not units:
            counters = {cell["Metric Name"]: (cell["Metric Value"], cell["Metric Unit"])}
        for counter, (value, unit) in counters.items():
            if counter in _OURS:
                launches[number].counters[_OURS[counter]] = _value(counter, value, unit)
    return list(launches.values())


def _product(text: str) -> int:
    """Return the product of the numbers in a text such as "(4, 2, 1)", or 0 if it has none."""
    sizes = re.findall(r"\d+", text)
    return math.prod(map(int, sizes)) if sizes else 0


def _number(text: str) -> int:
    if not text.isdecimal():
        raise TraceError(
            f"a launch's ID must be a whole number, got {text!r}; pass ncu's output without edits"
        )
    return int(text)


def _value(counter: str, text: str, unit: str) -> float:
    """Return the value of a counter, converted to bytes, seconds or counts."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        raise TraceError(
            f"the value of {counter} must be a number, got {text!r}; either the GPU does not "
            "have this counter, or you have no permission to read it (ERR_NVGPUCTRPERM, see "
            "docs/guides/truth.md)"
        ) from None
    for prefix, thousands in PREFIXES.items():
        if unit.startswith(prefix) and unit[len(prefix) :] in UNITS:
            return value * thousands * UNITS[unit[len(prefix) :]]
    raise TraceError(
        f"{counter} has the unknown unit {unit!r}; run ncu again with --print-units base"
    )


@own_errors
def command(
    program: Sequence[str],
    *,
    metrics: Sequence[str] = tuple(METRICS.values()),
    kernels: str | None = KERNELS,
) -> list[str]:
    """Return the command line with which Nsight Compute profiles a program's kernels.

    The command does not lock the clocks, and flushes the cache before each kernel, as the L2 model
    assumes.

    Parameters
    ----------
    program : sequence of str
        The program and its arguments, after further options of ``ncu``.
    metrics : sequence of str
    kernels : str, optional
        Profile only kernels whose names match this regular expression.

    Raises
    ------
    BackendUnavailable
        If ``ncu`` is not installed.
    """
    found = shutil.which("ncu")
    if found is None:
        raise BackendUnavailable(
            "this command needs NVIDIA's Nsight Compute, but the command `ncu` was not found on "
            "PATH; install it, or measure on another machine and read the result with --from "
            "FILE (see docs/guides/truth.md)"
        )
    options = ["--csv", *("--clock-control", "none"), *("--cache-control", "all")]
    options += ["--print-units", "base"]
    chosen = ["--metrics", ",".join(metrics)]
    chosen += [] if kernels is None else ["--kernel-name", f"regex:{kernels}"]
    return [found, *options, *chosen, *program]


def output_of(words: Sequence[str]) -> str:
    """Run a command and return its stdout; raise `BackendUnavailable` if the command fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise BackendUnavailable(
            f"the command {Path(words[0]).name} ended with exit code {done.returncode}: {last}"
        )
    return done.stdout
