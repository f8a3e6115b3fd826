"""Measure which form of the Hopper backward is faster: three passes, or fused.

    python benchmarks/forms.py > FILE.csv      # measures; an H100 or H200, CuPy; a minute
    python benchmarks/forms.py --judge [FILE]  # what `Hopper.fuses` takes of it; no GPU
    python benchmarks/forms.py --fit [FILE]    # its constants again, from what is not held out

FILE is docs/data/forms-h200.csv, or that of another GPU, by the end of its name. The shapes of
`fitted` have few lengths and heads. Those of `held_out` are random, with other lengths, heads,
groups, windows and head dimensions. The fused form adds to dQ in any order. Times are medians of 8
runs of the whole backward, interleaved, after a spinning kernel.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gpu_lab import medians, read_table

import flashsim
from flashsim import Problem
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy import cost_model
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.problem.hardware import Device

DATA = Path(__file__).parent.parent / "docs" / "data" / "forms-h200.csv"
FORMS = {"three passes": "flash2", "fused": "flash2-fused"}
REPETITIONS, CALLS = 8, 4


class Shape(NamedTuple):
    """A problem's sizes; `window` counts the query's own position, and 0 means no window."""

    head_dim: int
    causal: bool
    n_q: int
    n_kv: int
    batch: int
    heads: int
    kv_heads: int
    window: int = 0

    @property
    def problem(self) -> Problem:
        """Bfloat16."""
        sizes = {"batch": self.batch, "heads": self.heads, "kv_heads": self.kv_heads}
        window = (self.window - 1, 0) if self.window else None
        how = {"causal": self.causal, "window": window, "dtype": "bfloat16"}
        return Problem(self.n_q, self.n_kv, self.head_dim, **sizes, **how)


def fitted() -> Iterator[Shape]:
    """Yield shapes of models."""
    for d, heads in ((64, 12), (128, 16)):
        for n in (128, 256, 384, 512, 768, 1024):
            both = (1, True), (1, False), (8, True), (8, False)
            for batch, causal in (*both, (2, n % 256 == 0), (32, n % 512 == 0)):
                if n * batch < 32 * 1024:
                    yield Shape(d, causal, n, n, batch, heads, heads)
        yield Shape(d, True, 2048, 2048, 1, heads, heads)
    yield Shape(64, False, 128, 128, 64, 12, 12)
    for n, batch in ((256, 1), (512, 1), (1024, 1), (512, 4)):
        yield Shape(128, True, n, n, batch, 32, 8)
        yield Shape(96, True, n, n, batch, 16, 16)
    for d, causal, heads in ((192, True, 12), (192, False, 8), (160, True, 12)):
        for n, batch in ((128, 1), (256, 2), (512, 1), (512, 8), (1024, 1), (1024, 4)):
            yield Shape(d, causal, n, n, batch, heads, heads)
    for n, batch in ((256, 1), (512, 1), (512, 4)):
        yield Shape(80, False, n, n, batch, 25, 25)


def held_out(count: int = 96) -> Iterator[Shape]:
    """Yield random shapes from a fixed seed, and some windows."""
    draw = np.random.default_rng(618)
    kinds = [*((d, c) for d in (64, 128) for c in (True, False))]
    kinds += [(96, True), (80, False), (192, True), (192, False), (160, True)]
    chances = [0.2, 0.15, 0.2, 0.15, 0.06, 0.06, 0.06, 0.06, 0.06]
    while count:
        d, causal = kinds[draw.choice(len(kinds), p=chances)]
        any_n, round_n = int(np.exp(draw.uniform(*np.log((100, 2200))))), 64 * draw.integers(2, 24)
        n = int(draw.choice([any_n, round_n]))
        kv_heads, group = int(draw.integers(1, 33)), int(draw.choice([1, 1, 1, 2, 4, 8]))
        batch = int(draw.choice([1, 1, 2, 3, 4, 6, 12, 24]))
        keys = n if draw.random() < 0.8 else int(n * draw.uniform(0.4, 3))
        keys = max(n, keys) if causal else keys
        heads = group * kv_heads
        work = batch * heads * n * keys * d * 10 / (1 + causal)
        if work <= 6e10 and batch * heads >= 4 and batch * kv_heads * keys >= 1500:
            yield Shape(d, causal, n, keys, batch, heads, kv_heads)
            count -= 1
    for n, batch, heads, kv_heads in ((1024, 1, 16, 16), (2048, 1, 16, 4), (700, 4, 12, 12)):
        yield Shape(128, True, n, n, batch, heads, kv_heads, 257)
    yield Shape(192, True, 4096, 4096, 1, 32, 8, 1024)
    yield Shape(192, True, 2048, 2048, 1, 16, 4, 300)


class Row(NamedTuple):
    """A row of FILE; times in µs."""

    held_out: bool
    shape: Shape
    three: float
    fused: float


def measure() -> None:
    """Write FILE to the standard output."""
    from gpu_lab import open_lab

    lab, _ = open_lab()
    write = csv.writer(sys.stdout)
    write.writerow(["held_out", *Shape._fields, "three_us", "fused_us"])
    for kept, shapes in ((False, dict.fromkeys(fitted())), (True, held_out())):
        for shape in shapes:
            took = times(lab, shape)
            write.writerow([kept, *shape, *(f"{took[form]:.2f}" for form in FORMS)])
            sys.stdout.flush()


def times(lab: Any, shape: Shape) -> dict[str, float]:
    """Return the µs of each form."""
    p = shape.problem
    q, dout = (lab.array((p.batch, p.heads, p.n_q, p.head_dim), p.dtype) for _ in range(2))
    k, v = (lab.array((p.batch, p.kv_heads, p.n_kv, p.head_dim), p.dtype) for _ in range(2))
    how = {"causal": p.causal, "window": p.window, "backend": "cupy", "kernel": "hopper"}
    ran = {form: flashsim.run(q, k, v, algorithm=name, **how) for form, name in FORMS.items()}
    works = {form: partial(result.backward, dout) for form, result in ran.items()}
    return medians(lab, works, REPETITIONS, CALLS, 1)


def gpu_of(path: Path) -> Gpu:
    """Return the GPU that a file's name states, as in forms-h100.csv."""
    return Gpu.like(Device.get(path.stem.split("-")[-1].upper()))


def read(path: Path) -> list[Row]:
    """Return the rows of FILE."""
    kinds = {"True": True, "False": False}
    return [
        Row(
            kinds[row["held_out"]],
            Shape(*(kinds[x] if x in kinds else int(x) for x in map(row.get, Shape._fields))),  # type: ignore[index, arg-type]
            float(row["three_us"]),
            float(row["fused_us"]),
        )
        for row in read_table(path)
    ]


def lost(row: Row, gpu: Gpu) -> float:
    """Return the relative loss of the form that flashsim selects against the faster form."""
    taken = row.fused if HOPPER.fuses(row.shape.problem, gpu) else row.three
    return taken / min(row.three, row.fused) - 1


def as_measured(row: Row, gpu: Gpu) -> bool:
    """Return whether today's passes have launches and tiles like those that were measured.

    Launches of several cluster sizes, tiles of 128 rows for dQ alone, and fused passes whose first
    visit stores dQ came later.
    """
    if HOPPER.stores_first(row.shape.problem, gpu):
        return False
    *_, last = HOPPER.backward_passes(row.shape.problem, None, gpu, "ascending", "", "flash2")
    if 64 < row.shape.head_dim <= 128 and last.tables.schedule.tiling.block_q > 64:
        return False
    given = row.shape.problem, None, gpu, "ascending", "", "flash2-fused"
    launches = (
        x for one in HOPPER.backward_passes(*given) for x in (*one.before, one) if x.kernel.boxes
    )
    return len({x.kernel.cluster for x in launches}) <= 1


def judge(rows: list[Row], gpu: Gpu) -> None:
    """Print how often the slower form is selected, and the loss, for launches as measured."""
    rows = [row for row in rows if as_measured(row, gpu)]
    for kept in (False, True):
        found = {row: lost(row, gpu) for row in rows if row.held_out == kept}
        over = [row for row, loss in found.items() if loss > 0.01]
        mean, worst = np.mean(list(found.values())), max(found.values())
        always = [np.mean([r[i] / min(r[2:]) - 1 for r in found]) for i in (2, 3)]
        print(
            f"{'held out' if kept else 'fitted'}: {len(found)} shapes, the slower form by more "
            f"than 1 % on {len(over)}; {mean:.2%} in the mean, at most {worst:.1%}; always three "
            f"passes {always[0]:.1%}, always fused {always[1]:.1%}"
        )
        for row in sorted(over, key=found.__getitem__, reverse=True):
            print(
                f"  {found[row]:6.1%}  three {row.three:7.1f}  fused {row.fused:7.1f}  {row.shape}"
            )


@cache
def passes(shape: Shape, form: str, gpu: Gpu) -> Any:
    """Return the launches of a form."""
    return HOPPER.backward_passes(shape.problem, None, gpu, "ascending", "", FORMS[form])


def fit(rows: list[Row], gpu: Gpu) -> None:
    """Print the constants that minimise the errors of `cost_model.backward_microseconds`."""
    from scipy.optimize import least_squares

    widths = tuple(cost_model.HOPPER_BACKWARD)
    takes = cost_model.backward_microseconds.__wrapped__

    def use(values: np.ndarray) -> None:
        cost_model.CONVERTING, cost_model.CONVERTED = values[1], values[2]
        for width, of in zip(widths, values[3:].reshape(-1, 3, 2), strict=True):
            cost_model.HOPPER_BACKWARD[width] = cost_model.BackwardTimes(
                *(cost_model.Times(*x) for x in of)
            )

    def errors(values: np.ndarray) -> list[float]:
        use(values)
        found = []
        for row in rows:
            p = row.shape.problem
            read = p.batch * p.heads * p.n_q * p.head_dim * 4
            delta = values[0] + read / (values[2] * gpu.hbm_bandwidth) * 1e6
            three, fused = (delta + takes(passes(row.shape, form, gpu), gpu) for form in FORMS)
            found += [three / row.three - 1, fused / row.fused - 1]
            found += [2 * np.log(three / fused * row.fused / row.three)]
        return found

    before = list(chain.from_iterable(chain.from_iterable(cost_model.HOPPER_BACKWARD.values())))
    begin = np.array([5.0, cost_model.CONVERTING, cost_model.CONVERTED, *before])
    made = least_squares(
        errors, begin, bounds=(0, 30), diff_step=1e-3, loss="soft_l1", f_scale=0.05
    )
    use(made.x)
    print(f"delta {made.x[0]:.2f}, CONVERTING, CONVERTED = {made.x[1]:.2f}, {made.x[2]:.3f}")
    for width, times in cost_model.HOPPER_BACKWARD.items():
        print(f"{width}: " + ", ".join(f"Times({a:.2f}, {b:.2f})" for a, b in times))


def main() -> None:
    """Measure, judge or fit, by the options."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--judge", nargs="?", const=DATA, type=Path, metavar="FILE")
    asked.add_argument("--fit", nargs="?", const=DATA, type=Path, metavar="FILE")
    given = asked.parse_args()
    if given.fit:
        fit([row for row in read(given.fit) if not row.held_out], gpu_of(given.fit))
    elif given.judge:
        judge(read(given.judge), gpu_of(given.judge))
    else:
        measure()


if __name__ == "__main__":
    main()
