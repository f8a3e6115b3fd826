r"""Compare flashsim's kernels with the fastest others on random shapes.

    python benchmarks/random_shapes.py --seed 1 2 3 [--shapes 40] [--csv out.csv] [--seconds 300] \
        [--jobs 14] [--grouped]

Draws shapes from the distribution in `draw`, and times every implementation of benchmarks/gpu.py on
each. All are interleaved in one process, after the same spinning kernel. `ours` is `backend="cupy"`
with default options. The best other is the fastest of FlashAttention's CuTe kernels (if they are
installed), cuDNN and FlashAttention-2. Prints for each pass the time of the best other divided by
ours (above 1: ours is faster). For all shapes it prints the fraction at least as fast, the
geometric mean, the worst, and every shape below 1.00, the worst first. Choose the seed after the
kernels are written. With `--jobs`, several processes first run each shape once, and so compile all
kernels at the same time; after that, one process after the other times its shapes. Similar shapes
go to the same process, which then compiles their common kernels once. The seconds begin with the
timing. `--grouped` keeps only the shapes with grouped heads, and also times our
forward with packed query heads and without (`pack_gqa=`).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu import COLUMNS, DIRECTIONS, Shape, Worker
from gpu_lab import csv_file

OURS = "flashsim cupy"
FORMS = "flashsim cupy heads packed", "flashsim cupy heads apart"
OTHERS = ("flash-attn cute", "torch cudnn", "torch flash2")
#: Maximum number of scores and of elements of Q per shape: each pass takes a few ms at most.
SCORES, ELEMENTS = 4e9, 2**28


def draw(rng: random.Random) -> Shape:
    """Return a random shape in bfloat16.

    The head dimension is one of 32, 64, 80, 96, 128, 160, 192 and 256 (64 and 128 twice as often).
    There are 4 to 64 heads, and as many KV heads, or a quarter or an eighth of them. The length is
    128 to 20,000 (log-uniform), the batch a power of two up to 64. A third of the shapes has no
    mask, a third is causal, a sixth has a causal window, a sixth another number of keys. A shape
    that is too large is drawn again.
    """
    while True:
        d = rng.choice((32, 64, 64, 80, 96, 128, 128, 160, 192, 256))
        heads = 4 * rng.randint(1, 16)
        group = rng.choice((1, 1, 4))
        if heads % 8 == 0 and rng.random() < 0.25:
            group = 8
        n = round(math.exp(rng.uniform(math.log(128), math.log(20000))))
        batch = 2 ** rng.randint(0, 6)
        kind = rng.choice(("full", "full", "causal", "causal", "window", "keys"))
        window = rng.randint(64, max(65, n // 2)) if kind == "window" else 0
        n_kv = round(n * math.exp(rng.uniform(-1.5, 1.5))) if kind == "keys" else 0
        n_kv = max(n_kv, 16) if n_kv else 0
        shape = Shape(
            d,
            kind in ("causal", "window"),
            n,
            batch,
            heads,
            heads // group if group > 1 else 0,
            window,
            n_kv,
        )
        keys = n_kv or n
        if batch * heads * n * keys <= SCORES and batch * heads * max(n, keys) * d <= ELEMENTS:
            return shape


def variant(s: Shape) -> tuple[Any, ...]:
    """Return what decides which kernels a shape runs, to sort similar shapes side by side."""
    return s.head_dim, s.causal, s.window > 0, s.n_kv > 0, s.heads // (s.kv_heads or s.heads), s.n


def ratio(rows: Sequence[dict[str, Any]], direction: str) -> tuple[float, str] | None:
    """Return the best other's time divided by ours, and its name; None if either has no time."""
    times = {r["implementation"]: r[f"{direction}_ms"] for r in rows if r[f"{direction}_ms"] != ""}
    others = [name for name in OTHERS if name in times]
    if OURS not in times or not others:
        return None
    best = min(others, key=lambda name: times[name])
    return times[best] / times[OURS], best


def packing(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the forward's time without packed heads divided by the time with them, or None."""
    times = {r["implementation"]: r["forward_ms"] for r in rows}
    packed, apart = (times.get(name) or None for name in FORMS)
    return apart / packed if packed and apart else None


def summary(direction: str, found: Sequence[tuple[float, str]]) -> str:
    """Return a summary of all shapes, from each shape's ratio and description."""
    n, ratios = len(found), [ratio for ratio, _ in found]
    mean = math.exp(sum(map(math.log, ratios)) / n)
    level, near = (sum(r >= least for r in ratios) / n for least in (1.0, 0.98))
    behind = [f"  {ratio:.3f}  {what}" for ratio, what in sorted(found) if ratio < 1.0]
    return "\n".join(
        [
            f"{direction}: {n} shapes, at least 1.00 x the best other on {level:.0%}, at least "
            f"0.98 x on {near:.0%}, geometric mean {mean:.3f}, worst {min(ratios):.3f}",
            *behind,
        ]
    )


def main() -> None:
    """Draw shapes, time them, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, nargs="+", required=True)
    parser.add_argument("--shapes", type=int, default=40, help="number of random shapes per seed")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no shape after so many seconds"
    )
    parser.add_argument("--csv", default="random_shapes.csv", help="file for the table")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile first")
    parser.add_argument("--grouped", action="store_true", help="only shapes with grouped heads")
    options = parser.parse_args()
    drawn = []
    for seed in options.seed:
        rng = random.Random(seed)
        shapes = [draw(rng) for _ in range(options.shapes)]
        drawn += [(seed, shape) for shape in shapes if shape.kv_heads or not options.grouped]
    workers = [Worker() for _ in range(max(options.jobs, 1))]
    alike = sorted(range(len(drawn)), key=lambda n: variant(drawn[n][1]))
    homes = {n: workers[rank * len(workers) // len(drawn)] for rank, n in enumerate(alike)}
    everyone = (OURS, *(FORMS if options.grouped else ()), *OTHERS)

    def warm_up(worker: Worker) -> None:
        for n in alike:
            if homes[n] is worker:
                worker.measure(drawn[n][1], "bfloat16", everyone, 0, False)

    began = time.monotonic()
    if options.jobs:
        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(warm_up, workers))
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    began = time.monotonic()
    found: dict[tuple[int, str], list[tuple[float, str]]] = {}
    with csv_file(options.csv, ("seed", *COLUMNS)) as write:
        for n, (seed, shape) in enumerate(drawn):
            if time.monotonic() - began > options.seconds:
                print(f"out of time after {n} of {len(drawn)} shapes")
                break
            rows = homes[n].measure(shape, "bfloat16", everyone, options.repetitions, False)
            write(*({"seed": seed} | row for row in rows))
            text = f"{shape!s:<50}"
            for direction in DIRECTIONS:
                here = ratio(rows, direction)
                if here is None:
                    why = "; ".join(f"{r['implementation']} {r['status']}" for r in rows)
                    text += f"  {direction} - ({why})"
                    continue
                ratios = found.setdefault((seed, direction), [])
                ratios.append((here[0], f"{shape} ({here[1]})"))
                ours = rows[0][f"{direction}_ms"]
                text += f"  {direction} {ours * 1e3:8.1f} us {here[0]:.3f} ({here[1]})"
            if (gain := packing(rows)) is not None:
                text += f"  apart / packed {gain:.3f}"
            print(text, flush=True)
    for worker in workers:
        worker.close()
    if not found:
        sys.exit("no shape was timed with both flashsim and another implementation")
    for (seed, direction), ratios in found.items():
        print(f"seed {seed}, {summary(direction, ratios)}")


if __name__ == "__main__":
    main()
