"""What each unit of a GPU does, measured alone: needs a GPU and CuPy, and some ten seconds.

    python benchmarks/units.py --csv docs/data/units-h200.csv

Matrix products by instruction and shape, exponentials and other arithmetic, shared memory, L2, HBM,
reductions, barriers, launches, the clock: `flashsim.backends.cupy_gpu.units`.
"""

import argparse
import csv
import sys
import time
from pathlib import Path

from flashsim import FlashSimError


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path)
    chosen = parser.parse_args()
    begin = time.monotonic()
    try:
        from flashsim.backends.cupy_gpu import units

        found = units.measure()
    except FlashSimError as error:
        sys.exit(str(error))
    for one in found:
        print(f"{one.name:<50}{one.value:>16,.6g} {one.unit}")
    if chosen.csv:
        with chosen.csv.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerows([("name", "value", "unit"), *found])
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
