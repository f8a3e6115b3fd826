"""Write the tables of docs/ that come from kept measurements: python benchmarks/doc_tables.py

All tables are in docs/notebooks, and their data in docs/data:

- predictions.md: errors of predicted times and joules, counters of decoding (times-h100.csv,
  times-h200.csv, random-times-judged-h100.csv, power-h200.csv, decode-counters-h200.csv and others)
- counters.md: an H200's counters (verify-h200.csv, verify-widths-h200.csv) and the passes of a soak
  test (soak-counts-h200.csv)
- many_gpus.md: predicted speed on many GPUs, and measured speed on two and four (ring_table.py,
  from ring-h200.csv and ring4-h200.csv)
- speed_gpu.md, speed_decoding.md, functions_gpu.md and speed_cpu.md: speeds (speed_tables.py,
  cpu_tables.py), and a course's times (softmax-matmul-h200.csv, gpu-course-h200.csv)

It also draws the plot of the residuals. A table is found by its section and its first line. Needs
no GPU, but numba-cuda, since the times of its kernels are predicted too.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import cpu_tables
import power
import predict
import predict_decode
import predict_times
import random_times
import ring_table
import speed_tables
from speed_tables import kept

from flashsim import Problem, distributed, viz
from flashsim.report import Table
from flashsim.studies import verify
from flashsim.studies.energy import energy_of
from flashsim.studies.predict import spread

DOCS = Path(__file__).parent.parent / "docs"
PAPER = "## On paper, up to 1,024 GPUs"
COUNTERS = "## Decoding under the counters"
REAL = "## On real GPUs"
H200 = "## Hopper's kernels on an H200"
JUDGED = "## Judging run on an H100"
COURSE = "## A course's homework: softmax(X) V, then attention"


def rewrite(text: str, section: str, table: str) -> str:
    """Return the page with `table` in place of the section's first table with the same header.

    Raises
    ------
    ValueError
        If the page has no such section, or no such table after it.
    """
    head = table.splitlines()[0]
    lines = text.splitlines(keepends=True)
    try:
        start = lines.index(f"{head}\n", lines.index(f"{section}\n"))
    except ValueError:
        raise ValueError(f"in {section!r} no table begins with {head}") from None
    stop = next((n for n in range(start, len(lines)) if lines[n][0] != "|"), len(lines))
    return "".join([*lines[:start], table, *lines[stop:]])


def main() -> None:
    found = predict.errors(predict_times.everything())
    requested, dram, conflicts, _ = _summary("verify-h200.csv")
    widths, *_ = _summary("verify-widths-h200.csv")
    joules = power_tables()
    tables: dict[str, list[tuple[str, str | Table]]] = {
        **{
            page: [(at, made()) for at, made in those]
            for page, those in (speed_tables.PAGES | cpu_tables.PAGES).items()
        },
        "notebooks/many_gpus.md": [
            *((PAPER, on_paper(x)) for x in ("forward", "backward")),
            (REAL, on_real_gpus()),
        ],
        "notebooks/predictions.md": [
            (COUNTERS, decode_counters()),
            ("## Times", predict.errors_table(found)),
            (H200, predict.errors_table(predict.errors(predict_times.unchanged()))),
            (JUDGED, judged()),
            ("## Standard attention", predict.library_table()),
            ("## Other people's kernels", predict.others_table()),
            ("## FP8", predict.fp8_table()),
            ("## Another chip: an H100", predict.chip_table()),
            ("## Decoding's time", predict_decode.decode_table(predict_decode.decode_cases())),
            ("## Power", joules[0]),
            ("## Power", joules[1]),
        ],
        "notebooks/counters.md": [
            ("## Requested bytes and FLOPs", requested),
            ("## Random shapes", soaked_counts()),
            ("## Other head dimensions", widths),
            ("## DRAM", dram),
            ("## Bank conflicts", conflicts),
        ],
    }
    tables["notebooks/speed_gpu.md"] += [(COURSE, softmax_matmul()), (COURSE, attention())]
    for page, those in tables.items():
        path = DOCS / page
        text = before = path.read_text("utf-8")
        for section, table in those:
            made = table if isinstance(table, str) else table.markdown()
            text = rewrite(text, section, made)
        path.write_text(text, "utf-8")
        print(f"{path}: {'as it was' if text == before else 'written'}")
    picture = DOCS / "data" / "predicted-times.png"
    viz.predicted_against_measured(predict.pairs(found), unit="ms").figure.savefig(picture)
    print(picture)


def judged() -> Table:
    """Return the table of errors on random shapes that were drawn after the fit."""
    kept = DOCS / "data" / "random-times-judged-h100.csv"
    return next(random_times.tables(random_times.compared(kept), 0))


def on_paper(direction: str) -> Table:
    """Return the table of predicted speed on many H200s, in % of ranks x one GPU's."""
    shape = {"head_dim": 128, "heads": 32, "kv_heads": 8, "dtype": "bfloat16"}
    million = Problem(2**20, **shape, causal=True)
    every = (2, 4, 8, 16, 64, 256, 1024)
    table = Table("", (f"{direction}, ranks", *map(str, every)))

    def row(name: str, scheme: str, ranks: tuple[int, ...], **network: str) -> None:
        shares = {
            n: spread(
                million, ranks=n, scheme=scheme,
                algorithm="flash2-fused", direction=direction, **network,
            ).efficiency
            for n in ranks
        }  # fmt: skip
        cells = (f"{100 * shares[n]:.1f}" if n in shares else "" for n in every)
        table.add(name, *cells)

    for scheme in distributed.SCHEMES:
        row(scheme, scheme, every[:3] if scheme == "ulysses" else every)
    if direction == "forward":
        for scheme in ("zigzag", "usp"):
            row(f"{scheme}, InfiniBand EDR", scheme, every[3:], network="InfiniBand EDR")
    return table


def softmax_matmul() -> Table:
    """Return the table of times and memory of softmax(X) V over the length of a row of X."""
    rows = kept("softmax-matmul-h200.csv")
    table = Table(
        "",
        ("d2", *("fused, block 16, ms", "block 32, ms", "block 64, ms", "torch, two kernels, ms"),
         "fused, MiB", "two kernels, MiB"),
    )  # fmt: skip
    for d2 in dict.fromkeys(row["d2"] for row in rows):
        each = {row["BLOCK"]: row for row in rows if row["d2"] == d2}
        times = [float(each[block]["forward_ms_mean"]) for block in ("16", "32", "64", "NA")]
        peaks = [float(each[block]["forward_peak_MiB"]) for block in ("16", "NA")]
        table.add(int(d2), *times, *peaks)
    return table


def attention() -> Table:
    """Return the table of forward / backward ms of the course's shapes, beside torch's."""
    names = {"ours": "flashsim cupy", "torch": "torch sdpa compiled"}
    columns = [(dtype, x) for dtype in ("float32", "bfloat16") for x in names]
    table = Table("", ("N", *(f"{dtype}, {x}" for dtype, x in columns)))
    found = {
        (r["seq_len"], r["dtype"], r["implementation"]): r for r in kept("gpu-course-h200.csv")
    }
    for n in dict.fromkeys(n for n, *_ in found):
        each = [found[n, dtype, names[x]] for dtype, x in columns]
        pairs = ((float(r["forward_ms"]), float(r["backward_ms"])) for r in each)
        table.add(int(n), *(f"{one:.3g} / {other:.3g}" for one, other in pairs))
    return table


def on_real_gpus() -> Table:
    """Return the table of two and four GPUs beside one."""
    return ring_table.table(kept("ring-h200.csv"), kept("ring4-h200.csv"))


def decode_counters() -> Table:
    """Return the table of decoding's bytes, kernel-reported and hardware-measured."""
    named = {
        "loads": ("read by the SMs: counted", "measured"),
        "stores": ("stored: counted", "measured at L2"),
        "DRAM reads": ("read from DRAM: by the L2 model", "measured"),
    }
    table = Table("", ("launch", *(name for pair in named.values() for name in pair)))
    rows = kept("decode-counters-h200.csv")
    for launch in dict.fromkeys(row["launch"] for row in rows):
        of = {row["quantity"]: row for row in rows if row["launch"] == launch}
        pairs = ((int(of[x]["counted_B"]), int(of[x]["measured_B"])) for x in named)
        table.add(launch, *(n for pair in pairs for n in pair))
    return table


def power_tables() -> tuple[Table, Table]:
    """Return the tables of joules of sustained passes, and of prediction errors."""
    energy = energy_of("H200")
    assert energy is not None
    _, passes = power.read(DOCS / "data" / "power-h200.csv")
    return power.table(passes, energy), power.errors(passes, energy)


def soaked_counts() -> Table:
    """Return the table of passes that benchmarks/soak_gpu.py found to agree, and to disagree."""
    with (DOCS / "data" / "soak-counts-h200.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    table = Table("", tuple(head))
    table.rows += [(*row[:2], *map(int, row[2:])) for row in rows]
    whole = [sum(column) for column in zip(*(row[2:] for row in table.rows), strict=True)]
    table.add("all", "", *whole)
    return table


def _summary(name: str) -> list:
    return verify.summary((DOCS / "data" / name).read_text("utf-8"))


if __name__ == "__main__":
    sys.exit(main())
