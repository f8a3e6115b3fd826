"""Build the tables of docs/notebooks/speed_cpu.md from kept benchmark results.

benchmarks/cpu.py and benchmarks/cpu_queue.py write the CSV files; benchmarks/doc_tables.py writes
the tables into the page.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from speed_tables import Row, kept, markdown

WORDS = "heads, N, d|mask|pass"
#: Targets as multiples of PyTorch's speed, in the order of the benchmark's shapes and passes.
AVX512_AIMS = (*(1.3, 1.25, 1.4, 1.4) * 2, *(1.1, 1.1, 1.2, 1.2))
AMX_AIMS = (1.25, 1.1) * 6


def _shape(row: Row) -> list[str]:
    return [f"{row['heads']}, {row['N']}, {row['d']}", row["mask"], row["pass"]]


def speed() -> str:
    """Return the table of five runs' median ratios, and the milliseconds of the fourth run."""
    rows: dict[tuple[str, ...], list[Row]] = {}
    for row in kept("cpu-speed.csv"):
        rows.setdefault(tuple(_shape(row)), []).append(row)
    lines = []
    for shape, runs in rows.items():
        (one,) = (row for row in runs if row["run"] == "wall 4")
        ratios = (f"{median(float(x[name]) for x in runs):.2f}" for name in ("of sgemm", "x torch"))
        lines.append([*shape, one["numba ms"], one["torch ms"], *ratios])
    columns = f"{WORDS}|numba, ms|PyTorch, ms|of sgemm|× PyTorch"
    return markdown(columns.split("|"), lines, WORDS)


def avx512() -> str:
    """Return the table of medians of interleaved runs, with the ratio of the minimum times."""
    rows = []
    for row, aim in zip(kept("cpu-avx512.csv"), AVX512_AIMS, strict=True):
        times = [f"{float(row[name]):.3g}" for name in ("ms", "torch ms")]
        ratio, least = float(row["x torch"]), float(row["least torch ms"]) / float(row["least ms"])
        ratios = [f"{x:.2f}" for x in (ratio, least, float(row["of sgemm"]))]
        rows.append([*_shape(row), *times, *ratios, aim])
    columns = f"{WORDS}|numba, ms|PyTorch, ms|× PyTorch|least times|of sgemm|aim"
    return markdown(columns.split("|"), rows, WORDS)


def zen4() -> str:
    """Return the table for float32, and for bfloat16 by AVX512-BF16; bold reaches the target."""
    by_type: dict[str, list[Row]] = {}
    for row in kept("cpu-zen4.csv"):
        by_type.setdefault(row["type"], []).append(row)
    rows = []
    aims = zip(AVX512_AIMS, AMX_AIMS, strict=True)
    for one, two, aim in zip(by_type["float32"], by_type["bfloat16"], aims, strict=True):
        line: list[object] = [*_shape(one)]
        for row, least in zip((one, two), aim, strict=True):
            line += [row["numba ms"], row["torch ms"], _bold(row["x torch"], least), least]
        rows.append([*line[:6], one["of sgemm"], *line[6:]])
    columns = f"{WORDS}|float32: numba, ms|PyTorch, ms|× PyTorch|of sgemm|aim"
    columns += "|bfloat16: numba, ms|PyTorch, ms|× PyTorch|aim"
    return markdown(columns.split("|"), rows, WORDS)


def _bold(ratio: str, aim: float) -> str:
    return f"**{float(ratio):.2f}**" if float(ratio) >= aim else f"{float(ratio):.2f}"


def decoding_elsewhere() -> str:
    """Return the table of decoding speed relative to a copy and to PyTorch."""
    rows: dict[tuple[str, ...], dict[str, Row]] = {}
    runs: dict[str, None] = {}
    for row in kept("cpu-decode-others.csv"):
        run = f"{row['cpu']}, {row['threads']}, {row['type']}"
        runs.setdefault(run)
        at = row["batch"], row["heads"], f"{int(row['keys']):,}", row["d"]
        rows.setdefault(at, {})[run] = row
    lines = [
        [
            *at,
            *(f"{float(of[run]['of copy']):.2f}, {float(of[run]['x torch']):.1f}" for run in runs),
        ]
        for at, of in rows.items()
    ]
    return markdown(["batch", "heads", "keys", "d", *runs], lines)


def amx() -> str:
    """Return the bfloat16 table for eight and for two CPUs; bold reaches the target."""
    files = ("cpu-amx.csv", "cpu-amx-before.csv", "cpu-amx-two.csv")
    eight, before, two = ({tuple(_shape(row)): row for row in kept(name)} for name in files)

    rows = []
    for (at, one), aim in zip(eight.items(), AMX_AIMS, strict=True):
        line: list[object] = [*at, one["numba ms"], one["torch ms"]]
        line += [_bold(run[at]["x torch"], aim) for run in (eight, before)]
        last = two[at]
        line += [last["numba ms"], last["torch ms"], _bold(last["x torch"], aim), aim]
        rows.append(line)
    columns = f"{WORDS}|eight: numba|PyTorch|× PyTorch|before|two: numba|PyTorch|× PyTorch|aim"
    return markdown(columns.split("|"), rows, WORDS)


def decoding() -> str:
    """Return the decoding table, with two runs of each shape and type."""
    rows: dict[tuple[str, ...], list[Row]] = {}
    for row in kept("cpu-decode.csv"):
        shape = row["type"], row["batch"], row["heads"], f"{int(row['keys']):,}", row["d"]
        rows.setdefault(shape, []).append(row)
    names = ("numba ms", "torch ms", "x torch", "GB/s", "copy GB/s", "of copy")
    columns = "type|batch|heads|keys|d|numba, ms|PyTorch, ms|× PyTorch|GB/s|copy|of copy"
    lines = [
        [*at, *(", ".join(x[name] for x in runs) for name in names)] for at, runs in rows.items()
    ]
    return markdown(columns.split("|"), lines, "type")


def halves() -> str:
    """Return the table for float16 and bfloat16 multiplied in float32; at most four digits."""
    rows = []
    for row in kept("cpu-halves.csv"):
        how = "decoding" if row["pass"] == "decode" else f"{row['mask']}, {row['pass']}"
        torch, ratio = float(row["torch ms"]), float(row["x torch"])
        times = row["ms before"], row["ms"], f"{torch:.0f}" if torch > 1000 else torch
        at = row["dtype"], f"{row['heads']}, {row['N']}, {row['d']}", how
        rows.append([*at, *times, f"{ratio:.1f}" if ratio > 10 else ratio])
    columns = "type|heads, N, d|mask, pass|before|numba|PyTorch|× PyTorch"
    return markdown(columns.split("|"), rows, "type|heads, N, d|mask, pass")


def queue() -> str:
    """Return the table of the fraction of all threads' time that is work."""
    threads = (2, 4, 8, 16, 32, 64)
    rows = [
        [f"{row['heads']}, {row['N']}", row["mask"]]
        + [f"{float(row[f'{n} threads']):.2f}" for n in threads]
        for row in kept("cpu-queue.csv")
    ]
    return markdown(["heads, N", "mask", *map(str, threads)], rows, "heads, N|mask")


def scaling() -> str:
    """Return the table of time and memory over the length."""
    rows = []
    for row in kept("cpu-scaling.csv"):
        line = [row["N"]]
        for name in ("numba", "torch", "naive", "simulator"):
            ms = float(row[f"{name} ms"])
            took = f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"
            line.append(f"{took}, {row[f'{name} MiB']} MiB")
        rows.append(line)
    return markdown(["N", "numba", "PyTorch", "naive NumPy", "simulator"], rows)


#: The page of docs/, with its sections and their tables.
PAGES: dict[str, list[tuple[str, Callable[[], str]]]] = {
    "notebooks/speed_cpu.md": [
        ("## float32 on AVX2", speed),
        ("## AVX-512", avx512),
        ("## AVX-512", zen4),
        ("## Decoding on a CPU", decoding),
        ("## Decoding on a CPU", decoding_elsewhere),
        ("## bfloat16 on AMX", amx),
        ("## float16 and bfloat16 without AMX", halves),
        ("## More threads than were measured", queue),
        ("## Over the length", scaling),
    ],
}
