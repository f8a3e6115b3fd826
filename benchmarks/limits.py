"""Show which unit of the GPU a kernel keeps busiest, where flashsim is slower than others.

    python benchmarks/limits.py [--csv limits.csv] [--seconds 480] [--rows 20] [--below 1.0]
                                [--sets papers,short,serving,widths]

Selects from the H200 tables in docs/data that benchmarks/gpu.py wrote every pass that is slower
than the best of FA-CuTe, cuDNN and FlashAttention-2, the slowest first. (`--below 0.97`: only
passes whose ratio of times is below 0.97; `--rows`: at most so many.) It runs each pass once under
Nsight Compute, with flashsim's kernels and with the fastest other implementation that is installed.
There is one row per kernel, with its time under the profiler. The other columns are in percent of
what each unit can sustain over that time: the components of which Nsight Compute's "speed of light"
is the maximum. `sm__cycles_active` is the fraction of the time in which an SM holds any block.
Needs a GPU, torch and Nsight Compute (`ncu`; root, if the system reserves counters for root). A
kernel that is measured alone runs at other clocks and with a cold L2: compare columns, not times
with those of other tables.

Everything is compiled first, in several processes. FA-CuTe keeps its compiled kernels on disk if an
environment variable says so, which is set here. Then each process measures a few passes, and its
rows are written when it ends. Passes that the file already has are not measured again: a run that
was interrupted, or whose `--seconds` were over, continues where it stopped.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import nsight
import speed_tables
from gpu import Shape
from gpu_implementations import IMPLEMENTATIONS, Inputs

SETS = ("papers", "short", "serving", "widths")
PERCENT = ".avg.pct_of_peak_sustained_elapsed"
METRICS = (
    *("gpu__time_duration.sum", f"sm__cycles_active{PERCENT}"),
    f"breakdown:sm__throughput{PERCENT}",
    f"breakdown:gpu__compute_memory_throughput{PERCENT}",
)
#: A kernel of torch that separates two runs.
BETWEEN = "spin_kernel"
#: Makes FA-CuTe keep compiled kernels on disk: otherwise each process compiles each for seconds.
CUTE_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One pass at one shape with one implementation."""

    name: str  # the name of the set of shapes
    shape: Shape
    direction: str
    implementation: str

    @property
    def row(self) -> Row:
        """Return the columns that identify the run."""
        s = self.shape
        return {
            **{"set": self.name, "head_dim": s.head_dim, "causal": s.causal, "n": s.n},
            **{"batch": s.batch, "heads": s.heads, "kv_heads": s.key_sizes[1]},
            **{"window": s.window, "pass": self.direction},
            "implementation": self.implementation,
        }

    def of(self, rows: Sequence[Row]) -> bool:
        """Whether these rows, as numbers or as a file's text, include this run."""
        mine = {name: str(x) for name, x in self.row.items()}
        return any(mine == {name: str(row.get(name)) for name in mine} for row in rows)


def behind(sets: Sequence[str], below: float) -> list[tuple[Run, Run]]:
    """Return pairs of runs, ours and the fastest, where ours is slower, the slowest first."""
    pairs: list[tuple[float, tuple[Run, Run]]] = []
    for name in sets:
        found = speed_tables.shapes(
            f"gpu-{name}-h200.csv", lambda s: (s.d, s.causal, s.n, s.batch, s.heads, s.kv_heads)
        )
        for s in found:
            grouped = s.kv_heads if s.kv_heads != s.heads else 0
            shape = Shape(s.d, s.causal, s.n, s.batch, s.heads, grouped, s.window)
            for direction in ("forward", "backward"):
                ratio = s.ratio(direction)
                if ratio is None or ratio >= below:
                    continue
                others = {x: s.ms(direction, x) or float("inf") for x in speed_tables.OTHERS}
                fastest = min(others, key=others.__getitem__)
                one = partial(Run, name, shape, direction)
                pairs.append((ratio, (one(speed_tables.OURS), one(fastest))))
    return [pair for _, pair in sorted(pairs, key=lambda x: x[0])]


def launch(runs: Sequence[Run], *, profiled: bool) -> None:
    """Launch every run once, after a spinning kernel; what it compiles is compiled before."""
    import torch

    for run in runs:
        sizes = run.shape.sizes, run.shape.key_sizes, run.shape.key_sizes, run.shape.sizes
        x = Inputs(
            *(torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes),
            run.shape.causal,
            run.shape.window,
        )
        one = IMPLEMENTATIONS[run.implementation]
        work: Callable[[], Any] | None
        try:
            if run.direction == "forward":
                work = partial(one.inference, x)
            else:
                work = partial(one.backward, x, one.forward(x))
            work()
            torch.cuda.synchronize()
        except ImportError as error:
            print(f"skipped: {run.implementation}: {error}", file=sys.stderr)
            work = None
        if profiled:
            torch.cuda.cudart().cudaProfilerStart()
            torch.cuda._sleep(1000)
            if work:
                work()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
        torch.cuda.empty_cache()


def compile_all(runs: Sequence[Run], jobs: int) -> None:
    """Launch every run once, unprofiled, in several processes; print failures."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        made = [pool.submit(launch, runs[i::jobs], profiled=False) for i in range(jobs)]
    for error in filter(None, (one.exception() for one in made)):
        print(f"not compiled before: {type(error).__name__}: {error}"[:300], file=sys.stderr)


def kernels(text: str) -> list[list[dict[str, str]]]:
    """Return the output of ``ncu --csv --page raw`` as a list of kernels per run."""
    found: list[list[dict[str, str]]] = []
    for row in nsight.rows(text)[1:]:  # skips the row of units
        if BETWEEN in row["Kernel Name"]:
            found.append([])
        else:
            found[-1].append(row)
    return found


def measured(runs: Sequence[Run], printed: str) -> list[Row]:
    """Return a row per kernel of these runs; exit unless the output has one list per run."""
    found = kernels(printed)
    if len(found) != len(runs):
        sys.exit(f"benchmarks/limits.py: only {len(found)} of {len(runs)} runs:\n{printed[:2000]}")
    return [
        {
            **run.row,
            "kernel": one["Kernel Name"].split("(")[0][:60],
            "us": float(one["gpu__time_duration.sum"].replace(",", "")) / 1e3,
            **{key.removesuffix(PERCENT): one[key] for key in one if key.endswith(PERCENT)},
        }
        for run, some in zip(runs, found, strict=True)
        for one in some
    ]


class Table:
    """Rows in a file, which may already have some; without a file, on the screen.

    Attributes
    ----------
    rows : list of dict
        The file's rows, and those written since.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.columns: list[str] = []
        if path and path.exists():
            with path.open(newline="", encoding="utf-8") as stream:
                reader = csv.DictReader(stream)
                self.rows, self.columns = [*reader], [*(reader.fieldnames or ())]

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows at once. A counter that no earlier row has is an error."""
        first = not self.columns
        if first:
            self.columns = [*dict.fromkeys(key for row in rows for key in row)]
        with self.path.open("a", newline="") if self.path else nullcontext(sys.stdout) as stream:
            writer = csv.DictWriter(stream, self.columns, lineterminator="\n")
            if first:
                writer.writeheader()
            writer.writerows(rows)
        self.rows += rows


def main() -> None:
    """Run under Nsight Compute and write the counters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--below", type=float, default=1.0)
    parser.add_argument("--rows", type=int, help="maximum number of passes, slowest first")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no pass after so many seconds"
    )
    parser.add_argument("--each", type=int, default=2, help="passes per process")
    parser.add_argument("--jobs", type=int, default=8, help="number of processes that compile")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--launch", help=argparse.SUPPRESS)  # numbers of runs
    options = parser.parse_args()
    os.environ.setdefault(CUTE_CACHE, "1")
    begin = time.monotonic()
    pairs = behind(options.sets.split(","), options.below)[: options.rows]
    runs = [run for pair in pairs for run in pair]
    if options.launch:
        launch([runs[int(number)] for number in options.launch.split(",")], profiled=True)
        return
    nsight.tool()  # fails early, before minutes of compiling
    table = Table(options.csv)
    left = [number for number, run in enumerate(runs) if not run.of(table.rows)]
    compile_all([runs[number] for number in left], options.jobs)
    how = "--page", "raw", "--profile-from-start", "off", "--metrics", ",".join(METRICS)
    longest, failed = 0.0, []
    while left and time.monotonic() - begin + longest < options.seconds:
        now, left = left[: 2 * options.each], left[2 * options.each :]
        start = time.monotonic()
        try:
            printed = nsight.profile(*how, launch=",".join(map(str, now)))
            table.write(measured([runs[number] for number in now], printed))
        except SystemExit as why:  # other passes may still work
            print(why, file=sys.stderr)
            failed += now
        longest = max(longest, time.monotonic() - start)
    for what, numbers in (("failed", failed), ("no time left for", left)):
        for number in numbers:
            run = runs[number]
            print(f"{what}: {run.shape}, {run.direction}, {run.implementation}", file=sys.stderr)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
