"""What recording costs: python benchmarks/trace.py [--n 4096] [--repeats 7]

Runs the simulator with and without ``trace=True`` in turn, so that both see the same machine, and
compares medians. Then the size of an event, the time of a closed-form count of a million causal
queries, and the time of ``import flashsim`` in a fresh interpreter.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

import flashsim
from flashsim import Problem, Tiling


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternating(repeats: int, *works: Callable[[], object]) -> list[float]:
    """Median seconds of each, taken turn by turn after one round that is thrown away."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=4096, help="queries and keys (default 4096)")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds (default 7)")
    options = parser.parse_args()
    table = Table("what", "median", title="Cost of recording and counting")
    recording(table, options.n, options.repeats)
    counting(table, options.repeats)
    importing(table, options.repeats)
    Console().print(table)


if __name__ == "__main__":
    main()
