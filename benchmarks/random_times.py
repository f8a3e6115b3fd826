r"""Compare predicted with measured times of flashsim's kernels on random shapes.

    python benchmarks/random_times.py --seeds 1,2,3 --csv out.csv [--shapes 12] [--jobs 14] \
        [--dtype float16] [--grouped]
    python benchmarks/random_times.py --from out.csv [--worst 10]       # predicts again; no GPU

Measuring needs a GPU and CuPy. Shapes are those of `random_shapes.draw`. Each is timed forward, and
backward in the form that `backward(deterministic=False)` selects, in the way of
`benchmarks/times.py`: interleaved, after a spinning kernel, the median of five. The file has one
row per pass and one per stage. The table compares them with `flashsim.predict.predict` for the same
GPU. `--grouped` keeps only shapes with grouped heads, and times only their forwards: with packed
query heads and without (`pack_gqa=`).
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import random_shapes
import times
from gpu_compile import compile_all
from gpu_lab import open_lab
from predict_times import (
    added_by_events,
    device_of,
    problem_of,
    rows_of,
    tiling_of,
    without_shares,
)

import flashsim
from flashsim import FlashSimError, Problem
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.report import Table
from flashsim.studies import verify
from flashsim.studies.predict import predict

COLUMNS = ("seed", "dtype", *times.COLUMNS, "clusters")


def drawn(seeds: list[int], count: int, dtype: str) -> list[tuple[int, Problem]]:
    """Return `count` shapes per seed, alternating between the seeds."""
    streams = [(seed, random.Random(seed)) for seed in seeds]
    return [
        (seed, problem(random_shapes.draw(rng), dtype))
        for _ in range(count)
        for seed, rng in streams
    ]


def problem(shape: Any, dtype: str = "bfloat16") -> Problem:
    """Return a shape of `random_shapes` as a problem."""
    sizes = {"n_q": shape.n, "head_dim": shape.head_dim, "batch": shape.batch}
    sizes |= {"heads": shape.heads, "kv_heads": shape.kv_heads or shape.heads}
    if shape.n_kv:
        sizes["n_kv"] = shape.n_kv
    if shape.window:
        return Problem(**sizes, dtype=dtype, window=(shape.window, 0), causal=True)
    return Problem(**sizes, dtype=dtype, causal=shape.causal)


def form(p: Problem) -> str:
    """Return the algorithm that `backward(deterministic=False)` selects for a problem."""
    device = replace(flashsim.Device.get(verify.here()), clusters=times.this_gpu().clusters)
    how = {"direction": "backward", "deterministic": False, "device": device}
    return predict(p, **how).traffic.algorithm


def measure(
    shapes: list[tuple[int, Problem]], until: float, path: Path, *, grouped: bool = False
) -> None:
    """Time the shapes and write a row per pass and stage; start none after the time `until`."""
    lab, _ = open_lab()
    split, clock = times.Split(lab), times.sm_clock()
    clusters = " ".join(f"{size}:{count}" for size, count in times.this_gpu().clusters)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for done, (seed, p) in enumerate(shapes):
            if time.monotonic() > until:
                print(f"out of time: {len(shapes) - done} shapes were not measured")
                break
            everyone = list(_passes(lab, p, grouped=grouped))
            times.measure(lab, split, clock, everyone)
            for one in everyone:
                named = {"seed": seed, "dtype": p.dtype, "clusters": clusters}
                writer.writerows(named | row for row in times.rows(p, one, lab.name))
            stream.flush()
            everyone.clear()
            lab.release()


def _passes(lab: Any, p: Problem, *, grouped: bool) -> Iterator[times.Timed]:
    queries, keys = (p.batch, p.heads, p.n_q), (p.batch, p.kv_heads, p.n_kv)
    q, k, v, dout = (lab.array((*x, p.head_dim), p.dtype) for x in (queries, keys, keys, queries))
    options: dict[str, Any] = {"backend": "cupy", "trace": False, "causal": p.causal}
    call = partial(flashsim.run, q, k, v, **options, window=p.window)
    try:
        if grouped:
            for packed in (True, False):
                yield times.Timed("hopper", "forward", partial(call, pack_gqa=packed))
            return
        result = call()
        yield times.Timed("hopper", "forward", call)
        call = partial(result.backward, dout, deterministic=False)
        call()
        yield times.Timed("hopper", form(p), call)
    except FlashSimError as error:
        print(f"{p}: {error}"[:200])


def compile_first(shapes: list[Problem], jobs: int, *, grouped: bool = False) -> None:
    """Compile every kernel of these shapes."""
    gpu, kernels = times.this_gpu(), []
    for p in shapes:
        if grouped:
            for packed in (True, False):
                (one,) = HOPPER.forward_passes(p, None, gpu, "ascending", "", packed)
                kernels.append(("hopper", one.kernel))
            continue
        for name in ("forward", form(p)):
            for one in times.passes_of("hopper", p, name, gpu=gpu):
                kernels += [("hopper", x.kernel) for x in (*one.before, one)]
    compile_all(kernels, jobs)


def compared(path: Path) -> list[dict[str, Any]]:
    """Return each pass of a file with its prediction, and its stages with theirs, in µs."""
    found: list[dict[str, Any]] = []
    for row, stages in rows_of(path):
        p, name = problem_of(row), row["pass"]
        direction = "forward" if name == "forward" else "backward"
        algorithm = "flash2" if name == "forward" else name
        # the tile that ran, whatever the current rules choose
        tiling = tiling_of(row["tile"])
        how = {"direction": direction, "algorithm": algorithm, "device": device_of(row)}
        how["pack_gqa"] = row.get("pack_gqa") == "True"  # older files have no such column
        with nullcontext() if row.get("shares") == "True" else without_shares():
            said = predict(p, **how, tiling=tiling)
        found.append(
            {"seed": row["seed"], "problem": p, "pass": name}
            | {"us": float(row["us"]) - 1e6 * added_by_events(path, row)[0]}
            | {"predicted": 1e6 * said.seconds, "tile": row["tile"], "prediction": said}
            | {"stages": {s: 1e6 * t for s, t in stages.items()}}
            | {"said": {s.name: 1e6 * s.seconds for s in said.stages}}
        )
    return found


def error(row: dict[str, Any]) -> float:
    """Return predicted / measured - 1, in percent."""
    return 100 * (row["predicted"] / row["us"] - 1)


def tables(rows: list[dict[str, Any]], worst: int) -> Iterator[Table]:
    """Yield tables of errors by direction and by seed; then of the worst passes."""
    table = Table(
        "Times on random shapes: predicted / measured - 1, %",
        ("pass", "seed", "passes", "mean", "worst"),
        note="mean: of absolute values",
    )
    for forward in (True, False):
        those = [row for row in rows if (row["pass"] == "forward") == forward]
        if not those:
            continue
        for seed in (*dict.fromkeys(row["seed"] for row in those), "all"):
            wrong = [error(row) for row in those if seed in (row["seed"], "all")]
            mean = statistics.fmean(map(abs, wrong))
            name = "forward" if forward else "backward"
            cells = f"{mean:.1f}", f"{max(wrong, key=abs):+.1f}"
            table.add(name, seed, len(wrong), *cells)
    yield table
    table = Table(
        "The worst", ("error, %", "pass", "us", "tile", "shape", "stages: measured, predicted, us")
    )
    for row in sorted(rows, key=lambda row: -abs(error(row)))[:worst]:
        p = row["problem"]
        shape = f"{p.batch} x {p.heads}/{p.kv_heads}, {p.n_q} x {p.n_kv}, d={p.head_dim}"
        shape += f"{' causal' * p.causal} {p.window or ''}"
        stages = (f"{s} {us:.1f} {row['said'].get(s, 0):.1f}" for s, us in row["stages"].items())
        cells = f"{row['us']:.1f}", row["tile"], shape, "; ".join(stages)
        table.add(f"{error(row):+.1f}", row["pass"], *cells)
    yield table


def main() -> None:
    """Measure if requested; compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--shapes", type=int, default=12, help="shapes per seed")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--csv", type=Path, help="measure, and write this file")
    parser.add_argument("--from", type=Path, dest="source", help="a file that --csv wrote")
    parser.add_argument("--grouped", action="store_true", help="forwards of grouped heads only")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument(
        "--seconds",
        type=float,
        default=160,
        help="start no shape after so many seconds, of which compiling takes most",
    )
    parser.add_argument("--worst", type=int, default=10)
    chosen, began = parser.parse_args(), time.monotonic()
    path = chosen.source or chosen.csv
    if path is None:
        parser.error("nothing to do: pass --csv FILE to measure, or --from FILE")
    if chosen.source is None:
        seeds = [int(seed) for seed in chosen.seeds.split(",")]
        shapes = drawn(seeds, chosen.shapes, chosen.dtype)
        if chosen.grouped:
            shapes = [(seed, p) for seed, p in shapes if p.group > 1]
        compile_first([p for _, p in shapes], chosen.jobs, grouped=chosen.grouped)
        measure(shapes, began + chosen.seconds, path, grouped=chosen.grouped)
    for table in tables(compared(path), chosen.worst):
        print(table.text(width=160))


if __name__ == "__main__":
    sys.exit(main())
