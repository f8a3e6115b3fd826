"""Measure the forms of the Hopper backward on random shapes, beside the one that the rule takes.

    python benchmarks/backward_forms.py --seed 1 2 > FILE.csv   # measures; an H100 or H200, CuPy
    python benchmarks/backward_forms.py --judge FILE            # judges the rule; no GPU

Draws shapes from the distribution in `draw`, and times every form that Hopper's kernels have for
them, interleaved, after a spinning kernel: three passes with 64 or 128 rows in the tiles of dQ's
own pass, the fused form, and "flash2-fused-first" ("first"). The form "rule" is
``backward(deterministic=False)``. `previous` is the form that the rule took before dQ's pass had
tiles of its own. `--changed` keeps only shapes on which the two rules differ. Shapes with one visit
per row tile are left out, because "flash2-once" needs no dQ pass. `--judge` divides
the previous form's time by the time of the form that the rule chooses now, and prints the geometric
mean. It also prints how much longer each of the two forms takes than the fastest one.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from forms import Shape, gpu_of
from gpu_lab import medians, open_lab, read_table

import flashsim
from flashsim import Tiling
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy import cost_model
from flashsim.backends.launch_policy.hopper import HOPPER

#: The forms that are timed: algorithm and tiling.
FORMS: dict[str, tuple[str, Tiling | None]] = {
    "64 rows": ("flash2", Tiling(64, 128)),
    "128 rows": ("flash2", Tiling(64, 128, dq_rows=128)),
    "fused": ("flash2-fused", None),
    "first": ("flash2-fused-first", None),
    "three": ("flash2", None),
}
THREE_PASSES = ("64 rows", "128 rows", "three")
HEAD_DIMS = (80, 96, 128, 128)
#: Shapes that were behind FlashAttention's CuTe kernels.
BEHIND = (
    Shape(96, True, 831, 831, 2, 8, 8, 225),
    Shape(96, True, 250, 250, 2, 16, 16),
    Shape(80, False, 242, 242, 1, 36, 36),
    Shape(80, True, 171, 171, 16, 4, 4),
    Shape(80, False, 330, 330, 1, 52, 52),
    Shape(128, False, 512, 512, 1, 16, 16),
)
REPETITIONS, CALLS = 7, 4


def draw(rng: random.Random, head_dims: Sequence[int] = HEAD_DIMS) -> Shape:
    """Return a random shape of 136 to 3,000 tokens and up to 1e11 FLOPs per backward product."""
    while True:
        d, heads = rng.choice(head_dims), 4 * rng.randint(1, 14)
        group = rng.choice((1, 1, 1, 4))
        n, batch = round(math.exp(rng.uniform(*map(math.log, (136, 3000))))), 2 ** rng.randint(0, 5)
        kind = rng.choice(("full", "full", "causal", "causal", "window"))
        window = rng.randint(64, max(65, n // 2)) if kind == "window" else 0
        if 2 * batch * heads * n * n * d <= 1e11:
            return Shape(d, kind != "full", n, n, batch, heads, heads // group, window)


def forms_of(shape: Shape, gpu: Gpu) -> list[str]:
    """Return the forms that Hopper's kernels have for a shape; "three" only without "64 rows"."""
    given = shape.problem, gpu, "backward"
    found = [
        form
        for form, (algorithm, tiling) in FORMS.items()
        if not HOPPER.refusal(given[0], tiling, *given[1:], algorithm)
    ]
    return [form for form in found if form != "three" or "64 rows" not in found]


def passes(shape: Shape, form: str, gpu: Gpu) -> Any:
    """Return the launches of a form."""
    algorithm, tiling = FORMS[form]
    return HOPPER.backward_passes(shape.problem, tiling, gpu, "ascending", "", algorithm)


def predicted(shape: Shape, gpu: Gpu) -> dict[str, float]:
    """Return the predicted µs of each form."""
    takes = cost_model.backward_microseconds
    return {form: takes(passes(shape, form, gpu), gpu) for form in forms_of(shape, gpu)}


def previous(shape: Shape, gpu: Gpu) -> str:
    """Return the form by the previous rule, whose times did not depend on a head_dim of 80."""
    kept = dict(cost_model.HOPPER_BACKWARD)
    takes = cost_model.backward_microseconds.__wrapped__
    try:
        del cost_model.HOPPER_BACKWARD[80]
        form = forms_of(shape, gpu)[0]
        three, fused = (takes(passes(shape, form, gpu), gpu) for form in (form, "fused"))
    finally:
        cost_model.HOPPER_BACKWARD.clear()
        cost_model.HOPPER_BACKWARD.update(kept)
    return "fused" if fused < three else form


def today(shape: Shape, gpu: Gpu) -> str:
    """Return the form by today's rule."""
    took = predicted(shape, gpu)
    if HOPPER.fuses(shape.problem, gpu):
        return "first" if HOPPER.stores_first(shape.problem, gpu) else "fused"
    return min(took.keys() & set(THREE_PASSES), key=lambda form: took[form])


def chosen(
    seeds: Sequence[int], count: int, gpu: Gpu, head_dims: Sequence[int], *, changed: bool
) -> Iterator[Shape]:
    """Yield `BEHIND` for the usual head dims, and `count` random shapes per seed."""
    yield from BEHIND if tuple(head_dims) == HEAD_DIMS else ()
    for seed in seeds:
        rng, left = random.Random(seed), count
        while left:
            shape = draw(rng, head_dims)
            if not HOPPER.stores_dq(shape.problem, gpu, ordered=False) and not (
                changed and previous(shape, gpu) == today(shape, gpu)
            ):
                yield shape
                left -= 1


def measure(options: argparse.Namespace) -> None:
    """Write a row per shape and form to the standard output."""
    from gpu_compile import compile_all

    from flashsim.backends.cupy_gpu import engine

    lab, _ = open_lab()
    gpu, began = engine.gpu_of(0), time.monotonic()
    given = options.seed, options.shapes, gpu, options.head_dims
    shapes = list(chosen(*given, changed=options.changed))
    launches = [
        x for shape in shapes for form in forms_of(shape, gpu) for x in passes(shape, form, gpu)
    ]
    launches += [
        x
        for shape in shapes
        for x in HOPPER.forward_passes(shape.problem, None, gpu, "ascending", "")
    ]
    with_their_own = [x for one in launches for x in (*one.before, one)]
    sys.stdout, out = sys.stderr, sys.stdout
    compile_all((("hopper", x.kernel) for x in with_their_own), options.jobs)
    write = csv.writer(out)
    write.writerow([*Shape._fields, "previous", "form", "us"])
    for n, shape in enumerate(shapes):
        if time.monotonic() - began > options.seconds:
            print(f"out of time after {n} of {len(shapes)} shapes", file=sys.stderr)
            break
        took, before = times(lab, shape, gpu), previous(shape, gpu)
        write.writerows([*shape, before, form, f"{us:.2f}"] for form, us in took.items())
        out.flush()
        each = "  ".join(f"{form} {us:.1f}" for form, us in took.items())
        print(f"{shape}: {each}  previous {before}: {took[before] / took['rule']:.3f}")


def times(lab: Any, shape: Shape, gpu: Gpu) -> dict[str, float]:
    """Return the µs of each form, and of the rule."""
    p = shape.problem
    q, dout = (lab.array((p.batch, p.heads, p.n_q, p.head_dim), p.dtype) for _ in range(2))
    k, v = (lab.array((p.batch, p.kv_heads, p.n_kv, p.head_dim), p.dtype) for _ in range(2))
    how = {"causal": p.causal, "window": p.window, "backend": "cupy", "kernel": "hopper"}
    works = {}
    for form in forms_of(shape, gpu):
        algorithm, tiling = FORMS[form]
        result = flashsim.run(q, k, v, algorithm=algorithm, **how)
        works[form] = partial(result.backward, dout, tiling=tiling)
    result = flashsim.run(q, k, v, **how)
    works["rule"] = partial(result.backward, dout, deterministic=False)
    return medians(lab, works, REPETITIONS, CALLS, 2)


def read(path: Path) -> tuple[dict[Shape, dict[str, float]], dict[Shape, str]]:
    """Return a file's times in µs by shape and form, and each shape's previous form."""
    found: dict[Shape, dict[str, float]] = {}
    before: dict[Shape, str] = {}
    for row in read_table(path):
        fields = (row[name] for name in Shape._fields)
        shape = Shape(*(x == "True" if x in ("True", "False") else int(x) for x in fields))
        found.setdefault(shape, {})[row["form"]] = float(row["us"])
        before[shape] = row["previous"]
    return found, before


def gains_of_first(
    found: dict[Shape, dict[str, float]], gpu: Gpu
) -> Iterator[tuple[str, list[float]]]:
    """Yield kinds of shapes, and for each shape the time of "fused" divided by that of "first"."""
    groups: dict[str, list[float]] = {
        "the rule runs this form": [],
        "not chosen, no mask": [],
        "not chosen, a mask": [],
    }
    for shape, took in found.items():
        kind = f"not chosen, {'a' if shape.causal else 'no'} mask"
        if HOPPER.stores_first(shape.problem, gpu):
            kind = "the rule runs this form" if HOPPER.fuses(shape.problem, gpu) else ""
        if kind and "first" in took:
            groups[kind].append(took["fused"] / took["first"])
    yield from ((kind, gains) for kind, gains in groups.items() if gains)


def judge(path: Path) -> None:
    """Print how today's rule and the previous one do on a file's times."""
    gpu, (found, before) = gpu_of(path), read(path)
    gains, losses = [], dict[str, list[float]](today=[], previous=[])
    for shape, took in found.items():
        form = today(shape, gpu)
        if form not in took:  # a file from before "first"
            known = predicted(shape, gpu)
            form = min(known.keys() & took.keys(), key=lambda x: (known[x], x != "128 rows"))
        now, then = took[form], took[before[shape]]
        best = min(us for name, us in took.items() if name != "rule")
        gains.append((then / now, shape))
        losses["today"].append(now / best - 1)
        losses["previous"].append(then / best - 1)
        if max(now, then) > 1.01 * best:
            times_of = ", ".join(f"{name} {us:.1f}" for name, us in took.items())
            print(f"{then / now:6.3f} {shape}: {times_of}; {before[shape]} -> {form}")
    for kind, each in gains_of_first(found, gpu):
        print(
            f"first, {kind}: {len(each)} shapes, {geometric_mean(each):.3f} x as fast as fused, "
            f"{min(each):.3f} to {max(each):.3f}, slower on {sum(x < 1 for x in each)}"
        )
    mean = geometric_mean(gain for gain, _ in gains)
    print(f"{len(gains)} shapes: {mean:.3f} x as fast, {min(gains)} to {max(gains)}")
    for rule, loss in losses.items():
        mean, over = sum(loss) / len(loss), sum(x > 0.02 for x in loss)
        print(
            f"{rule}: {mean:.2%} slower than the fastest, at most {max(loss):.1%}, over 2 % on "
            f"{over}"
        )


def main() -> None:
    """Measure or judge, by the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--shapes", type=int, default=40, help="number of random shapes per seed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start none after these")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile first")
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--changed", action="store_true", help="only if the rules differ")
    parser.add_argument("--judge", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.judge:
        judge(options.judge)
    else:
        measure(options)


if __name__ == "__main__":
    main()
