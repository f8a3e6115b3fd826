"""Random problems for as long as one likes: python benchmarks/soak.py --seconds 600 [--seed 1]

Each input is right, by an oracle and a counter of transfers that share nothing with flashsim
(tests/tools/fuzz.py), or is refused with a FlashSimError: one in eight is a good call with one bad
argument. What fails is printed as code that runs it again; the exit status is then 1.

  --seconds N     how long
  --backend NAME  "numpy" or "numba" (default: both in turn)
  --seed S        where the sequence of inputs begins (default: 0); the same seed, the same inputs
  --keep-going    after a failure, too
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "tools"))

import fuzz

SPOILT = 1 / 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--backend", choices=sorted(fuzz.ALGORITHMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-going", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    begin = said = time.monotonic()
    number = 0
    while time.monotonic() - begin < options.seconds:
        # A generator for each input: the code of one that fails does not depend on those before.
        rng = np.random.default_rng([options.seed, number])
        number += 1
        failed = one(rng, options.backend, counts)
        if failed:
            print(f"\n# input {number - 1} of seed {options.seed}\n{failed}", flush=True)
            counts["failed"] += 1
            if not options.keep_going:
                break
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(summary(counts, said - begin), file=sys.stderr, flush=True)
    print(summary(counts, time.monotonic() - begin))
    return 1 if counts["failed"] else 0


def one(rng: np.random.Generator, backend: str | None, counts: Counter[str]) -> str | None:
    """Run one input; what went wrong, and how to see it again, or None."""
    spoilt: tuple[str, ...] = ()
    if rng.random() < SPOILT:
        case, *spoilt = fuzz.draw_spoilt(rng, backend)
    else:
        case = fuzz.draw(rng, backend)
    try:
        if spoilt:
            counts["refused" if fuzz.spoil(case, *spoilt) else "spoilt, but fine"] += 1
        else:
            fuzz.check(case)
            counts[f"right ({case.backend} {case.algorithm})"] += 1
    except Exception as error:
        last = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return f"{fuzz.code(case, *spoilt)}\n# {type(error).__name__} ({where}): {error}"
    return None


def summary(counts: Counter[str], seconds: float) -> str:
    total = sum(counts.values())
    parts = ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items()))
    return f"{total:,} inputs in {seconds:.0f} s: {parts}"


if __name__ == "__main__":
    sys.exit(main())
