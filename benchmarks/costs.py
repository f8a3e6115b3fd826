"""Measure what recording, counting, the L2 model and grading cost.

    python benchmarks/costs.py [PART ...]

- `trace`: the simulator with and without ``trace=True``, interleaved; the bytes of an event; a
  closed-form count of a million causal queries; ``import flashsim`` in a fresh interpreter.
- `l2`: the L2 model on batch 4, 16 heads, d = 128, bfloat16, at each of `--lengths`: the replay at
  one size of L2, and all sizes at once. A small problem is replayed first, because the first call
  of a fresh installation compiles.
- `grading`: the course's reference solutions one after the other, and a class of `--files` at once.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import flashsim
from flashsim import Device, Problem, Tiling, l2
from flashsim.exercises import get, names, submissions


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternating(repeats: int, *works: Callable[[], object]) -> list[float]:
    """Return the median seconds of each work, interleaved, without the first round."""
    rounds = [[seconds(work) for work in works] for _ in range(repeats + 1)][1:]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def recording(table: Table, n: int, repeats: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((n, 64)).astype(np.float32) for _ in range(4))
    tiling = Tiling(64, 64)

    def forward(trace):
        return flashsim.run(q, k, v, tiling=tiling, trace=trace)

    result = forward(False)
    passes = {
        "forward": forward,
        "backward": lambda trace: result.backward(dout, tiling=tiling, trace=trace),
    }
    for name, run in passes.items():
        off, on = alternating(repeats, lambda run=run: run(False), lambda run=run: run(True))
        where = f"{name}, N = {n:,}, d = 64, 64 x 64, float32"
        table.add_row(f"{where}: untraced", f"{off * 1e3:,.1f} ms")
        table.add_row(f"{where}: traced / untraced", f"{on / off:.3f}")
    trace = forward(True).trace
    held = sum(stage.events.nbytes for stage in trace.stages)
    table.add_row("bytes an event", f"{held / trace.n_events:.0f} B ({trace.n_events:,} events)")


def counting(table: Table, repeats: int) -> None:
    n = 1_048_576
    problem = Problem(n, head_dim=128, dtype="bfloat16", causal=True)

    def count(direction):
        traffic = flashsim.count(problem, direction=direction, tiling=Tiling(128, 128))
        return traffic.bytes(), traffic.flops(), traffic.peak_sram()

    (forward,) = alternating(repeats, lambda: count("forward"))
    table.add_row(f"count(), causal N = {n:,}, 128 x 128, forward", f"{forward * 1e3:.2f} ms")


def importing(table: Table, repeats: int) -> None:
    def fresh(statement):
        return lambda: subprocess.run([sys.executable, "-c", statement], check=True)

    nothing, numpy, ours = alternating(
        repeats, fresh("pass"), fresh("import numpy"), fresh("import flashsim")
    )
    table.add_row("import numpy, fresh interpreter", f"{(numpy - nothing) * 1e3:.0f} ms")
    table.add_row("import flashsim, fresh interpreter", f"{(ours - nothing) * 1e3:.0f} ms")


def tracing(table: Table, options: argparse.Namespace) -> None:
    recording(table, options.n, options.repeats)
    counting(table, options.repeats)
    importing(table, options.repeats)


def replaying(table: Table, options: argparse.Namespace) -> None:
    # Kernels keep accumulators in registers, so a block may use these besides shared memory.
    device = replace(Device.get("H200"), sram_bytes=(228 + 256) * 1024)
    small = flashsim.count(Problem(64, head_dim=16))
    l2.dram(small)
    l2.curves(small)
    for n in options.lengths:
        problem = Problem(n, head_dim=128, batch=4, heads=16, dtype="bfloat16")
        for direction, tiling in (("forward", Tiling(128, 64)), ("backward", Tiling(64, 128))):
            how = {"algorithm": "flash2-fused", "direction": direction, "tiling": tiling}
            requested = flashsim.count(problem, device=device, **how)
            replay = seconds(lambda requested=requested: l2.dram(requested))
            curve = seconds(lambda requested=requested: l2.curves(requested))
            what = (
                f"L2, N = {n:,}, {direction}, {requested.bytes() / 1e9:.1f} GB: replay, all sizes"
            )
            table.add_row(what, f"{replay:.2f} s, {curve:.2f} s")


def grading(table: Table, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        exercises = [get(name) for name in names()]
        paths = []
        for at in range(max(options.files, len(exercises))):
            exercise = exercises[at % len(exercises)]
            paths.append(Path(folder, f"{at:03}.py"))
            head = f"# flashsim exercise: {exercise.name}\n"
            paths[at].write_text(head + exercise.solution_source, "utf-8")
        began = time.perf_counter()
        for path in paths[: len(exercises)]:
            assert submissions.grade_file(path)[0].points == 100, path
        took = time.perf_counter() - began
        table.add_row(f"{len(exercises)} reference solutions, one by one", f"{took:.2f} s")
        for path in paths[options.files :]:
            path.unlink()
        began = time.perf_counter()
        graded = list(submissions.grade_folder(Path(folder)))
        took = time.perf_counter() - began
        assert all(marks.points == 100 for _, marks in graded)
        table.add_row(f"{len(graded)} files at once", f"{took:.2f} s")


PARTS = {"trace": tracing, "l2": replaying, "grading": grading}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--n", type=int, default=4096, help="queries and keys (default 4096)")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds (default 7)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[16_384], help="sequence lengths of the part l2"
    )
    parser.add_argument("--files", type=int, default=40, help="files of the part grading")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}; possible: {', '.join(PARTS)}")
    table = Table("what", "median", title="Costs")
    for part in options.parts or PARTS:
        PARTS[part](table, options)
    Console().print(table)


if __name__ == "__main__":
    main()
