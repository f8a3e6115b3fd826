"""Which unit of the GPU a kernel keeps busiest, where flashsim's is behind another's.

    python benchmarks/limits.py [--sets papers,short,serving,widths] [--below 1.0]
                                [--csv docs/data/limits-h200.csv]

Takes from the tables in docs/data that benchmarks/gpu.py wrote on an H200 every pass whose time is
beyond the best of FA-CuTe, cuDNN and FlashAttention-2 (`--below 0.97`: the ratio of times is below
that) and runs it once under Nsight Compute, flashsim's kernels and those of the fastest other that
is there: one row a kernel, with its time under the profiler and, in per cent of what each unit can
sustain over that time, the parts that Nsight Compute's "speed of light" is the maximum of.
`sm__cycles_active` is how much of the time an SM holds any block. Needs a GPU, torch and Nsight
Compute (`ncu`; where counters are kept from users, root). A kernel measured alone runs at other
clocks and with a cold L2: compare columns, not times with those of other tables.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
#: A kernel of torch's that stands between two runs.
BETWEEN = "spin_kernel"


@dataclass(frozen=True)
class Run:
    """One pass at one shape with one implementation."""

    name: str  # of the set of shapes
    shape: Shape
    direction: str
    implementation: str


def behind(sets: list[str], below: float) -> Iterator[Run]:
    """flashsim's kernel and the fastest other's, wherever flashsim's is behind."""
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
                for one in (speed_tables.OURS, min(others, key=others.__getitem__)):
                    yield Run(name, shape, direction, one)


def launch(runs: list[Run], *, profiled: bool) -> None:
    """Every run once, a spinning kernel before each; everything compiled before."""
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
            print(f"left out: {run.implementation}: {error}", file=sys.stderr)
            work = None
        if profiled:
            torch.cuda.cudart().cudaProfilerStart()
            torch.cuda._sleep(1000)
            if work:
                work()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
        torch.cuda.empty_cache()


def kernels(text: str) -> list[list[dict[str, str]]]:
    """What ``ncu --csv --page raw`` printed, a list of kernels for each run."""
    found: list[list[dict[str, str]]] = []
    for row in nsight.rows(text)[1:]:  # behind the units
        if BETWEEN in row["Kernel Name"]:
            found.append([])
        else:
            found[-1].append(row)
    return found


def main() -> None:
    """Run under Nsight Compute and write what it counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--below", type=float, default=1.0)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    runs = list(behind(options.sets.split(","), options.below))
    if options.launch:
        launch(runs, profiled=True)
        return
    nsight.tool()  # before minutes of compiling
    launch(runs, profiled=False)  # compiles
    how = "--page", "raw", "--profile-from-start", "off", "--metrics", ",".join(METRICS)
    printed = nsight.profile(*how)
    found = kernels(printed)
    if len(found) != len(runs):
        sys.exit(f"benchmarks/limits.py: {len(found)} of {len(runs)} runs:\n{printed[:2000]}")
    rows = [
        {
            **{"set": run.name, "head_dim": run.shape.head_dim, "causal": run.shape.causal},
            **{"n": run.shape.n, "batch": run.shape.batch, "heads": run.shape.heads},
            **{"kv_heads": run.shape.key_sizes[1], "window": run.shape.window},
            **{"pass": run.direction, "implementation": run.implementation},
            **{"kernel": one["Kernel Name"].split("(")[0][:60]},
            "us": float(one["gpu__time_duration.sum"].replace(",", "")) / 1e3,
            **{key.removesuffix(PERCENT): one[key] for key in one if key.endswith(PERCENT)},
        }
        for run, some in zip(runs, found, strict=True)
        for one in some
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with options.csv.open("w", newline="") if options.csv else sys.stdout as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
