"""Predictions against hardware counters over many shapes: needs a GPU, CuPy and Nsight Compute.

    python benchmarks/verify.py --device H200 --out docs/verify-h200.csv

Forward and backward, 16 Ki tokens a batch, 2048 / d heads: d 64 and 128, N 1 Ki to 16 Ki, causal
and not, then grouped heads, a window and ragged lengths. One row a kernel and counter. Shapes are
written as they are measured, so what an interrupted run has measured is kept.
"""

import argparse
import csv
import sys
from pathlib import Path

from flashsim import FlashSimError
from flashsim.verify import verify
from flashsim.verify.measure import measure

TOKENS, WIDTH = 16_384, 2048


def shapes():
    """Keyword arguments of `Problem`, one dict a shape."""
    for d in (128, 64):
        for causal in (False, True):
            for n in (1024, 4096, 16_384):
                yield {"n_q": n, "head_dim": d, "batch": TOKENS // n, "causal": causal}
    grouped = {"n_q": 4096, "head_dim": 128, "batch": 4, "heads": 16, "causal": True}
    yield {**grouped, "kv_heads": 4}
    yield {**grouped, "window": (1024, 0)}
    yield {**grouped, "n_q": 4001}
    yield {**grouped, "n_q": 1000, "n_kv": 4001}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="H200")
    parser.add_argument("--backend", default="cupy")
    parser.add_argument("--algorithm", default="flash2")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    how = {name: getattr(chosen, name) for name in ("device", "backend", "algorithm")}
    with chosen.out.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        for number, shape in enumerate(shapes()):
            problem = {"heads": WIDTH // shape["head_dim"], "dtype": "bfloat16", **shape}
            wanted = {"problem": problem, "tilings": [None, None], "backward": True, **how}
            try:
                launches, traces, _ = measure(wanted)
            except FlashSimError as error:
                sys.exit(f"{problem}: {error}")
            table = verify([t.predicted() for t in traces], launches, traces=traces).table()
            if number == 0:
                writer.writerow(("shape", *table.columns))
            writer.writerows((table.title, *row) for row in table.rows)
            stream.flush()
            print(table.title)


if __name__ == "__main__":
    main()
