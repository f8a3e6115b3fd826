"""Predictions against hardware counters over many shapes: needs a GPU, CuPy and Nsight Compute.

    python benchmarks/verify.py --out docs/verify-h200.csv [--keep FOLDER]
    python benchmarks/verify.py --out docs/verify-h200.csv --from FOLDER   # anywhere

Forward, three-pass and fused backward, both kernel families; 16 Ki tokens a batch, 2048 / d heads:
d 64 and 128, N 1 Ki to 16 Ki, causal and not, then grouped heads, a window and ragged lengths. One
row a kernel and quantity. Two processes measure (one counts, one is profiled); --keep saves what
they gave, --from reads it again. `flashsim verify --summary FILE` sums the table up. What the
quantities are: docs/truth.md.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

from flashsim import FlashSimError, Problem
from flashsim.verify import Case, measure, passes_of, verify

TOKENS, WIDTH = 16_384, 2048
FILES = ("ncu.csv", "counted.json")


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


def cases(device, kernels):
    """Every shape with every kernel family."""
    for kernel in kernels:
        for shape in shapes():
            whole = {"heads": WIDTH // shape["head_dim"], "dtype": "bfloat16", **shape}
            yield Case(Problem(**whole), device=device, kernel=kernel, backward=(None, False))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="H200")
    parser.add_argument("--kernels", default="hopper,portable")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--from", type=Path, dest="source")
    parser.add_argument("--cases", action="store_true", help="only print the cases, as JSON")
    chosen = parser.parse_args()
    wanted = list(cases(chosen.device, chosen.kernels.split(",")))
    if chosen.cases:
        chosen.out.write_text(json.dumps([case.to_dict() for case in wanted]))
        return
    try:
        if chosen.source:
            measured = passes_of(wanted, *((chosen.source / f).read_text() for f in FILES))
        else:
            measured, *texts = measure(wanted)
            if chosen.keep:
                chosen.keep.mkdir(exist_ok=True)
                for name, text in zip(FILES, texts, strict=True):
                    (chosen.keep / name).write_text(text)
    except FlashSimError as error:
        sys.exit(str(error))
    with chosen.out.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        for number, (case, passes) in enumerate(zip(wanted, measured, strict=True)):
            for one in passes:
                table = verify([one], str(case)).table()
                if number == 0 and one is passes[0]:
                    writer.writerow(("shape", "kernels", "pass", "tile", *table.columns))
                name = "forward" if one.traffic.direction == "forward" else one.traffic.algorithm
                where = table.title, case.kernel, name, str(one.traffic.tiling)
                writer.writerows((*where, *row) for row in table.rows)


if __name__ == "__main__":
    main()
