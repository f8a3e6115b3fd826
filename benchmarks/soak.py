"""Run random problems for a given time: python benchmarks/soak.py --seconds 600 [--jobs 16]

Each input must be right, by an oracle and a transfer counter that share nothing with flashsim
(tests/tools/fuzz.py), or be rejected with a FlashSimError: one in eight is a good call with one bad
argument. Anything else is WRONG: it is printed as code that runs it again, and the exit status is
1. At the end, and once per minute, the program prints inputs per second and their number by
outcome.

  --seconds N     duration (default: 60, or until all --inputs have run)
  --inputs N      number of inputs; with --first M, the inputs M .. M + N - 1 of the seed
  --jobs N        processes (default: 1)
  --backend NAME  "simulator" or "numba" (default: alternating)
  --seed S        seed of the sequence of inputs (default: 0); the same seed gives the same inputs
                  for any number of processes
  --keep-going    continue after a wrong input
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # the matrices are small; must be set before NumPy is imported

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "tools"))

import fuzz

SPOILT = 1 / 8
#: Inputs per batch of a process: about a second's work.
BATCH = 100

Counts = Counter[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--inputs", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--backend", choices=sorted(fuzz.ALGORITHMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-going", action="store_true")
    options = parser.parse_args()
    seconds = options.seconds or (60 if options.inputs is None else float("inf"))
    counts: Counts = Counter()
    if options.backend != "simulator":
        compile_first()
    begin = said = time.monotonic()
    results = run(batches(options), options, begin + seconds)
    for done, failures in results:
        counts.update(done)
        for text in failures:
            print(f"\n{text}", flush=True)
        if failures and not options.keep_going:
            break
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(summary(counts, said - begin), file=sys.stderr, flush=True)
    results.close()
    print(summary(counts, time.monotonic() - begin))
    return 1 if counts["WRONG"] else 0


def compile_first() -> None:
    """Compile "numba" kernels into the disk cache, before several processes would."""
    for dtype in ("float32", "float64"):
        for fused in (True, False):
            case = fuzz.Case(0, backend="numba", dtype=dtype, deterministic=not fused)
            fuzz.check(case)


def batches(options: argparse.Namespace) -> Iterator[range]:
    """Yield ranges of input numbers: without end, unless --inputs limits them."""
    if options.inputs is None:
        yield from (range(n, n + BATCH) for n in itertools.count(options.first, BATCH))
    else:
        stop = options.first + options.inputs
        for n in range(options.first, stop, BATCH):
            yield range(n, min(n + BATCH, stop))


def run(
    numbers: Iterator[range], options: argparse.Namespace, until: float
) -> Iterator[tuple[Counts, list[str]]]:
    """Yield the outcome of each batch that begins before `until`, as the batches finish."""
    asked = options.seed, options.backend, options.keep_going
    if options.jobs == 1:
        for some in numbers:
            if time.monotonic() >= until:
                return
            yield batch(some, *asked)
        return
    pool = ProcessPoolExecutor(options.jobs, get_context("spawn"))
    waiting: set[Future] = set()
    try:
        while True:
            while len(waiting) < 2 * options.jobs and time.monotonic() < until:
                if (some := next(numbers, None)) is None:
                    break
                waiting.add(pool.submit(batch, some, *asked))
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in done)
    finally:
        pool.shutdown(cancel_futures=True)


def batch(
    numbers: range, seed: int, backend: str | None, keep_going: bool
) -> tuple[Counts, list[str]]:
    """Run some inputs; return their number by outcome, and the failures."""
    counts: Counts = Counter()
    failures = []
    for number in numbers:
        # One generator per input: the code of a failing input does not depend on earlier inputs.
        failed = one(np.random.default_rng([seed, number]), backend, counts)
        if failed:
            counts["WRONG"] += 1
            failures.append(f"# input {number} of seed {seed}\n{failed}")
            if not keep_going:
                break
    return counts, failures


def one(rng: np.random.Generator, backend: str | None, counts: Counts) -> str | None:
    """Run one input; return None, or the failure and the code that reproduces it."""
    spoilt: tuple[str, ...] = ()
    if rng.random() < SPOILT:
        case, *spoilt = fuzz.draw_spoilt(rng, backend)
    else:
        case = fuzz.draw(rng, backend)
    try:
        if spoilt:
            counts["clear error" if fuzz.spoil(case, *spoilt) else "spoilt, but fine"] += 1
        else:
            fuzz.check(case)
            counts[f"right ({case.backend} {case.algorithm})"] += 1
    except Exception as error:
        last = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return f"{fuzz.code(case, *spoilt)}\n# {type(error).__name__} ({where}): {error}"
    return None


def summary(counts: Counts, seconds: float) -> str:
    total = sum(counts.values())
    right = sum(n for what, n in counts.items() if what.startswith("right"))
    clear, fine = counts["clear error"], counts["spoilt, but fine"]
    parts = ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items()) if n)
    return (
        f"{total:,} inputs in {seconds:.0f} s, {total / max(seconds, 1e-9):.0f} a second: "
        f"{right + fine:,} right, {clear:,} clear error, {counts['WRONG']:,} WRONG ({parts})"
    )


if __name__ == "__main__":
    sys.exit(main())
