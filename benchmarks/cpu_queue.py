"""Estimate how evenly the CPU engine's forward pass would load 2 to 64 threads.

    python benchmarks/cpu_queue.py [--repeats 9] [--out out/cpu]

Needs no machine with so many cores. The work tiles that the engine would give to so many threads
are timed one by one on one thread. Then they are assigned in the engine's order, each to the thread
that is free first. The table shows the fraction of all threads' time that is work, and the number
of work tiles. It leaves out what threads share: memory, the last-level cache, the clock.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import flashsim
from flashsim.engines.cpu import engine, work_tiles
from flashsim.engines.protocol import Job

THREADS = (2, 4, 8, 16, 32, 64)
#: Heads, N, causal; d = 64.
SHAPES = ((8, 4096, False), (8, 4096, True), (8, 1024, True), (1, 4096, False), (1, 4096, True))


def makespan(items: list[float], n_threads: int) -> float:
    """Return the seconds until all `items` are done, each taken by the first free thread."""
    free = [0.0] * n_threads
    for seconds in items:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def runs_of(heads: int, n: int, causal: bool, n_threads: int) -> list[tuple[int, int]]:
    """Return first and last + 1 query of each work tile of a head, in the order of assignment."""
    problem = flashsim.Problem(n_q=n, heads=heads, head_dim=64, causal=causal, dtype="float32")
    empty = np.zeros((1, heads, n, 64), np.float32)
    walk = engine._CpuPass(Job(problem, *[empty] * 3, options={"threads": n_threads}), "forward")
    schedule = walk.schedule(walk._plan["forward"])
    # Lanes matter only with a mask function.
    (tiles,) = work_tiles.tiles(schedule, "forward", n_threads, 16)
    return [(int(schedule.rows[a, 0]), int(schedule.rows[b - 1, 1])) for a, b in tiles.runs]


class Clock:
    """Times work tiles on one thread: the minimum of several calls, minus their overhead."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.known: dict[tuple[int, int, bool], float] = {}
        self.call = self.least(2, 2, False)

    def item(self, first: int, last: int, n: int, causal: bool) -> float:
        """Return the seconds for queries first .. last - 1 of one head.

        Causal queries see only the keys up to themselves.
        """
        return self.least(last - first, last if causal else n, causal) - self.call

    def least(self, n_q: int, n_kv: int, causal: bool) -> float:
        """Return the minimum seconds of a call with one head."""
        case = n_q, n_kv, causal
        if case not in self.known:
            rng = np.random.default_rng(0)
            q, k, v = (rng.standard_normal((n, 64), dtype=np.float32) for n in (n_q, n_kv, n_kv))
            took = []
            for _ in range(self.repeats + 1):
                start = time.perf_counter()
                flashsim.run(q, k, v, causal=causal, backend="numba", threads=1)
                took.append(time.perf_counter() - start)
            self.known[case] = min(took)
        return self.known[case]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="calls per minimum (default 9)")
    parser.add_argument("--out", type=Path, default=Path("out/cpu"), help="folder for the CSV")
    options = parser.parse_args()
    clock, rows = Clock(options.repeats), []
    for heads, n, causal in SHAPES:
        row: dict = {"heads": heads, "N": n, "mask": "causal" if causal else "none"}
        for n_threads in THREADS:
            runs = runs_of(heads, n, causal, n_threads)
            items = [clock.item(*run, n, causal) for run in runs for _ in range(heads)]
            even = sum(items) / n_threads / makespan(items, n_threads)
            row[f"{n_threads} threads"], row[f"{n_threads}: items"] = round(even, 3), len(items)
        rows.append(row)
    table = Table(*rows[0], title="work / (threads x time), simulated from items timed on one")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=170).print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "queue.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
