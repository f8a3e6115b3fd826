"""Tables of a CPU's speed in docs/guides/performance.md, from what benchmarks kept of it.

benchmarks/cpu.py and benchmarks/cpu_queue.py wrote the files (--csv); benchmarks/doc_tables.py puts
the tables into the page.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from speed_tables import Row, kept, markdown

WORDS = "heads, N, d|mask|pass"
#: × PyTorch that was meant to be reached, in the order of the benchmark's shapes and passes.
AVX512_AIMS = (*(1.3, 1.25, 1.4, 1.4) * 2, *(1.1, 1.1, 1.2, 1.2))
AMX_AIMS = (1.25, 1.1) * 6


def _shape(row: Row) -> list[str]:
    return [f"{row['heads']}, {row['N']}, {row['d']}", row["mask"], row["pass"]]


def speed() -> str:
    """Medians of five runs' ratios, and the milliseconds of the fourth."""
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
    """Medians by turns, and the ratio of the least times."""
    rows = []
    for row, aim in zip(kept("cpu-avx512.csv"), AVX512_AIMS, strict=True):
        times = [f"{float(row[name]):.3g}" for name in ("ms", "torch ms")]
        ratio, least = float(row["x torch"]), float(row["least torch ms"]) / float(row["least ms"])
        ratios = [f"{x:.2f}" for x in (ratio, least, float(row["of sgemm"]))]
        rows.append([*_shape(row), *times, *ratios, aim])
    columns = f"{WORDS}|numba, ms|PyTorch, ms|× PyTorch|least times|of sgemm|aim"
    return markdown(columns.split("|"), rows, WORDS)


def amx() -> str:
    """bfloat16 on eight CPUs and on two, and eight in an earlier run; bold reaches its aim."""
    files = ("cpu-amx.csv", "cpu-amx-before.csv", "cpu-amx-two.csv")
    eight, before, two = ({tuple(_shape(row)): row for row in kept(name)} for name in files)

    def ratio(row: Row | None, aim: float) -> str:
        found = float(row["x torch"]) if row else 0.0
        return f"**{found:.2f}**" if found >= aim else f"{found:.2f}" if row else ""

    rows = []
    for (at, last), aim in zip(two.items(), AMX_AIMS, strict=True):
        one = eight.get(at)
        times = [one["numba ms"], one["torch ms"]] if one else ["", ""]
        ratios = ratio(one, aim), ratio(before[at], aim)
        rows.append(
            [*at, *times, *ratios, last["numba ms"], last["torch ms"], ratio(last, aim), aim]
        )
    columns = f"{WORDS}|eight: numba|PyTorch|× PyTorch|before|two: numba|PyTorch|× PyTorch|aim"
    return markdown(columns.split("|"), rows, WORDS)


def decoding() -> str:
    """Two runs of each shape and type."""
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
    """float16 and bfloat16, multiplied in float32; four digits at most."""
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
    """What of all threads' time is work."""
    threads = (2, 4, 8, 16, 32, 64)
    rows = [
        [f"{row['heads']}, {row['N']}", row["mask"]]
        + [f"{float(row[f'{n} threads']):.2f}" for n in threads]
        for row in kept("cpu-queue.csv")
    ]
    return markdown(["heads, N", "mask", *map(str, threads)], rows, "heads, N|mask")


def scaling() -> str:
    """Time and memory over the length."""
    rows = []
    for row in kept("cpu-scaling.csv"):
        line = [row["N"]]
        for name in ("numba", "torch", "naive", "simulator"):
            ms = float(row[f"{name} ms"])
            took = f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"
            line.append(f"{took}, {row[f'{name} MiB']} MiB")
        rows.append(line)
    return markdown(["N", "numba", "PyTorch", "naive NumPy", "simulator"], rows)


#: Of performance.md: the sections and their tables.
SECTIONS: list[tuple[str, Callable[[], str]]] = [
    ("## CPU", speed),
    ("### AVX-512", avx512),
    ("### Decoding on a CPU", decoding),
    ("### bfloat16 on AMX", amx),
    ("### float16 and bfloat16 without AMX", halves),
    ("### More threads than there were", queue),
    ("### Over the length", scaling),
]
