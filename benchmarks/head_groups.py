r"""Compare sizes of head groups of causal forwards with grouped heads: needs a Hopper GPU and CuPy.

    python benchmarks/head_groups.py --csv docs/data/packed-head-groups-h100.csv [--jobs 14] \
        [--seconds 160]
    python benchmarks/head_groups.py --fresh 24 --csv docs/data/packed-head-groups-fresh-h100.csv

The heads of a head group run at the same time (`Hopper.clump`). At each of 20 shapes, forwards with
packed query heads run with head groups of a quarter of a wave up to five waves, and forwards
without packed heads with half a wave to two waves. The rule's head groups are among them, and those
of the old rule, which did not distinguish packed heads. `--fresh` draws so many other shapes
(`random_shapes.draw`, one seed) on which the rules differ, and runs each with the head groups of
the old rule (`old` is True) and of the rule. All passes of a shape are interleaved, in the way of
`benchmarks/times.py`; `us` is the median of five. `waves_in_group` is the number of work tiles in a
head group, divided by the number of SMs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import random_shapes
import random_times
import times
from forced import forced, forward, kernels
from forms import Shape
from gpu_compile import compile_all
from gpu_lab import csv_file, open_lab

from flashsim import Problem
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch.passes import KernelPass
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.schedule.head_grouping import clump_size

COLUMNS = (
    *("n", "head_dim", "batch", "heads", "kv_heads", "causal", "window", "packed", "tile"),
    *("heads_in_group", "waves_in_group", "us", "lowest us"),
)
#: (head_dim, batch, heads, kv_heads, tokens, keys before the query's own under a window)
SHAPES = (
    *((192, 32, 44, 11, 391, 0), (256, 32, 8, 2, 626, 0), (192, 8, 48, 12, 321, 0)),
    *((160, 64, 24, 6, 282, 0), (192, 16, 48, 12, 1059, 0), (96, 16, 44, 11, 197, 0)),
    *((80, 16, 64, 8, 228, 0), (80, 64, 52, 13, 727, 244), (96, 16, 56, 14, 789, 0)),
    *((64, 16, 44, 11, 449, 0), (64, 32, 32, 8, 979, 0), (160, 2, 64, 8, 411, 0)),
    *((192, 32, 4, 1, 300, 0), (32, 8, 48, 12, 1902, 767), (256, 16, 8, 1, 1184, 0)),
    *((64, 2, 36, 9, 1684, 506), (160, 8, 48, 6, 272, 96), (128, 8, 60, 15, 1865, 0)),
    *((160, 32, 12, 3, 3011, 1048), (64, 16, 12, 3, 1720, 744)),
)
#: Waves per head group, by whether heads are packed.
WAVES = {True: (0.25, 0.5, 1, 1.5, 2, 3, 5), False: (0.5, 1, 2)}
SEED = 552901  # of the fresh shapes


def problems() -> list[Problem]:
    """Return the 20 shapes."""
    found = []
    for d, batch, heads, kv_heads, n, left in SHAPES:
        found.append(Shape(d, True, n, n, batch, heads, kv_heads, left + 1 if left else 0).problem)
    return found


def pass_of(p: Problem, gpu: Gpu, *, packed: bool | None) -> KernelPass:
    """Return the launch of a forward by the rule; `clump` is its number of heads per head group."""
    (one,) = HOPPER.forward_passes(p, None, gpu, "ascending", "", packed)
    return one


def sizes(p: Problem, gpu: Gpu, *, packed: bool) -> list[int]:
    """Return the sizes that are compared, in heads; those of both rules are among them."""
    one = pass_of(p, gpu, packed=packed)
    group, tiles = 1 if packed else p.group, one.tables.tiles
    near = (round(waves * gpu.multiprocessors / tiles / group) * group for waves in WAVES[packed])
    rules = {one.clump, old_size(one, gpu)} if packed else {one.clump}
    return sorted({min(size, one.walks) for size in (*rules, *(max(group, x) for x in near))})


def old_size(one: KernelPass, gpu: Gpu) -> int:
    """Return the number of heads per head group by the old rule, which has no case for packing."""
    p, tiles, processors = one.tables.schedule.problem, one.tables.tiles, gpu.multiprocessors
    size = clump_size(one.stage, p, tiles, l2_bytes=gpu.l2_bytes, processors=processors)
    few = processors // 8
    short = few * tiles <= processors and one.walks * tiles >= 8 * processors
    return min(size, few) if short else size


def fresh(count: int, gpu: Gpu) -> Iterator[tuple[Problem, int, int]]:
    """Yield random shapes that the rule for packed heads changes, with its old and new sizes."""
    rng = random.Random(SEED)
    while count:
        p = random_times.problem(random_shapes.draw(rng))
        if p.group == 1 or p.head_dim <= 64 or not p.causal:
            continue
        one = pass_of(p, gpu, packed=None)
        old = old_size(one, gpu)
        if one.tables.schedule.split.pack_gqa and one.clump != old:
            yield p, old, one.clump
            count -= 1


def measure(
    path: Path, asked: list[tuple[Problem, list[tuple[bool, int]]]], seconds: float, *, fresh: bool
) -> None:
    """Time each problem's pairs (packed, heads per head group), and write a row for each pair."""
    began, (lab, _), gpu = time.monotonic(), open_lab(), times.this_gpu()
    split, clock = times.Split(lab), times.sm_clock()
    with csv_file(path, (*COLUMNS, "old") if fresh else COLUMNS) as write:
        for done, (p, pairs) in enumerate(asked):
            if time.monotonic() - began > seconds:
                print(f"out of time: {len(asked) - done} shapes were not measured")
                break
            everyone = list(timed(lab, p, pairs))
            times.measure(lab, split, clock, everyone)
            for number, ((packed, size), one) in enumerate(zip(pairs, everyone, strict=True)):
                tiles = pass_of(p, gpu, packed=packed).tables.tiles
                row = shape_of(p) | {"packed": packed, "tile": one.tile, "heads_in_group": size}
                row["waves_in_group"] = f"{size * tiles / gpu.multiprocessors:.2f}"
                row["us"] = f"{1e6 * statistics.median(one.times):.2f}"
                row["lowest us"] = f"{1e6 * min(one.times):.2f}"
                row |= {"old": number == 0} if fresh else {}
                write(row)
                print(*row.values(), sep=",", flush=True)
            everyone.clear()
            lab.release()


def timed(lab: Any, p: Problem, pairs: list[tuple[bool, int]]) -> Iterator[times.Timed]:
    """Yield the forward of each pair (packed, heads per head group)."""
    q = lab.array((p.batch, p.heads, p.n_q, p.head_dim), p.dtype)
    k, v = (lab.array((p.batch, p.kv_heads, p.n_kv, p.head_dim), p.dtype) for _ in range(2))
    for packed, size in pairs:
        call = forward(p, q, k, v, forced(heads_in_group=size), pack_gqa=packed)
        yield times.Timed("hopper", "forward", call)


def shape_of(p: Problem) -> dict[str, Any]:
    """Return a shape's columns."""
    row: dict[str, Any] = {name: getattr(p, name) for name in COLUMNS[1:6]}
    return {"n": p.n_q} | row | {"window": p.window[0] if p.window else ""}


def main() -> None:
    """Compile, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--fresh", type=int, help="number of shapes to draw, instead of the 20")
    parser.add_argument("--few", type=int, help="maximum number of shapes")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument(
        "--seconds", type=float, default=160, help="start no shape after so many seconds"
    )
    chosen = parser.parse_args()
    gpu, both = times.this_gpu(), (True, False)
    asked: list[tuple[Problem, list[tuple[bool, int]]]]
    if chosen.fresh:
        asked = [(p, [(True, old), (True, new)]) for p, old, new in fresh(chosen.fresh, gpu)]
    else:
        asked = [
            (p, [(packed, size) for packed in both for size in sizes(p, gpu, packed=packed)])
            for p in problems()
        ]
    asked, made = asked[: chosen.few], list[Any]()
    for p, pairs in asked:
        for packed in dict.fromkeys(packed for packed, _ in pairs):
            made += HOPPER.forward_passes(p, None, gpu, "ascending", "", packed)
    compile_all(kernels(made), chosen.jobs)
    measure(chosen.csv, asked, chosen.seconds, fresh=bool(chosen.fresh))


if __name__ == "__main__":
    main()
