"""Build the tables of GPU speed in docs/notebooks from CSV files of benchmarks.

"vs best" is the fastest competitor's time divided by ours. The competitors are those that the run
timed: FlashAttention's CuTe-DSL kernels (FA-CuTe), cuDNN and FlashAttention-2.
benchmarks/doc_tables.py puts the tables into the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean

from gpu_lab import read_table

DATA = Path(__file__).parent.parent / "docs" / "data"
OURS = "flashsim cupy"
OTHERS = {"flash-attn cute": "FA-CuTe", "torch cudnn": "cuDNN", "torch flash2": "FA-2"}
Row = dict[str, str]
#: Units of the GPU, by their Nsight Compute counter (benchmarks/limits.py).
UNITS = {
    "tensor cores": "sm__pipe_tensor_cycles_active",
    "exponentials": "sm__inst_executed_pipe_xu",
    "instructions": "sm__issue_active",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts",
    "L2, in": "lts__xbar2lts_cycles_active",
    "L2, out": "lts__lts2xbar_cycles_active",
    "DRAM": "dram__cycles_active",
}


def kept(name: str) -> list[Row]:
    """Return the rows of a CSV file of docs/data."""
    return read_table(DATA / name)


class Shape:
    """One shape of a run, with a row per implementation that was timed at it."""

    def __init__(self, row: Row) -> None:
        self.d, self.n = int(row["head_dim"]), int(row["seq_len"])
        self.causal = row["causal"] == "True"
        self.batch, self.window = int(row["batch"]), int(row["window"])
        self.heads, self.kv_heads = int(row["heads"]), int(row["kv_heads"])
        self.rows: dict[str, Row] = {}

    def ms(self, direction: str, name: str = OURS) -> float | None:
        """Return the milliseconds of a pass, or None if it was not timed."""
        found = self.rows.get(name, {}).get(f"{direction}_ms")
        return float(found) if found else None

    def speed(self, direction: str, name: str) -> str:
        """Return the TFLOP/s of a pass."""
        found = self.rows.get(name, {}).get(f"{direction}_tflops")
        return f"{float(found):.0f}" if found else ""

    def ratio(self, direction: str) -> float | None:
        """Return the time of the fastest other implementation divided by ours."""
        ours = self.ms(direction)
        others = [ms for name in OTHERS if (ms := self.ms(direction, name))]
        return min(others) / ours if ours and others else None

    def of_the_best(self, direction: str) -> str:
        """Return the ratio as the tables show it."""
        found = self.ratio(direction)
        return "" if found is None else f"{found:.2f}"


def shapes(name: str, key: Callable[[Shape], tuple]) -> list[Shape]:
    """Return the shapes of a CSV file of docs/data, sorted by `key`."""
    found: dict[tuple, Shape] = {}
    for row in kept(name):
        one = Shape(row)
        where = (one.d, one.causal, one.n, one.batch, one.heads, one.kv_heads, one.window)
        found.setdefault(where, one).rows[row["implementation"]] = row
    return sorted(found.values(), key=key)


def _mask(one: Shape) -> str:
    return "yes" if one.causal else "no"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]], words: str = "") -> str:
    """Return a Markdown table: numbers right-aligned, the columns in `words` left-aligned."""
    sides = ["---" if name in words.split("|") else "---:" for name in columns]
    lines = [f"| {' | '.join(map(str, line))} |\n" for line in (columns, *rows)]
    return "".join([lines[0], f"|{'|'.join(sides)}|\n", *lines[1:]])


def papers(name: str = "gpu-papers-h200.csv") -> str:
    """Return the table of TFLOP/s of all timed implementations on the papers' twelve shapes."""
    found = shapes(name, lambda s: (-s.d, s.causal, s.n))
    others = [name for name in OTHERS if any(name in one.rows for one in found)]
    columns, rows = ["d", "causal", "N"], []
    for direction in ("forward", "backward"):
        columns += [direction, *(OTHERS[name] for name in others), "vs best"]
    for one in found:
        line = [str(one.d), _mask(one), str(one.n)]
        for direction in ("forward", "backward"):
            line += [one.speed(direction, name) for name in (OURS, *others)]
            line.append(one.of_the_best(direction))
        rows.append(line)
    return markdown(columns, rows, "causal")


def short(name: str = "gpu-short-h200.csv") -> str:
    """Return the table of ratios at N = 128 to 768, for 1, 8 and 64 sequences."""
    columns = ["d", "causal", "N", "forward, 1", "8", "64 sequences", "backward, 1", "8", "64"]
    rows: dict[tuple, list[object]] = {}
    found = shapes(name, lambda s: (s.d, s.causal, s.n, s.batch))
    for direction in ("forward", "backward"):
        for one in found:
            line = rows.setdefault((one.d, one.causal, one.n), [one.d, _mask(one), one.n])
            line.append(one.of_the_best(direction))
    return markdown(columns, [*rows.values()], "causal")


def serving(name: str = "gpu-serving-h200.csv") -> str:
    """Return the table of times and ratios for grouped query heads."""
    columns = "heads|key heads|N|sequences|window|forward, µs|vs best|backward, µs|vs best"
    rows = []
    for one in shapes(name, lambda s: (s.heads, s.n, s.batch, s.window)):
        line: list[object] = [one.heads, one.kv_heads, one.n, one.batch, one.window or ""]
        for direction in ("forward", "backward"):
            ms = one.ms(direction)
            line += ["" if ms is None else f"{1e3 * ms:.0f}", one.of_the_best(direction)]
        rows.append(line)
    return markdown(columns.split("|"), rows, "window")


def widths(name: str = "gpu-widths-h200.csv") -> str:
    """Return the table of ratios by head dimension."""
    columns = ["d", "forward", "backward", "causal, forward", "backward"]
    rows: dict[int, list[object]] = {}
    for one in shapes(name, lambda s: (s.d, s.causal)):
        line = rows.setdefault(one.d, [one.d])
        line += [one.of_the_best("forward"), one.of_the_best("backward")]
    return markdown(columns, [*rows.values()])


def drawn_ratios(name: str = "random-shapes-h100.csv") -> dict[tuple[str, str], list[float]]:
    """Return the sorted ratios of random shapes, by pass and seed ("all" for all seeds)."""
    found: dict[tuple[str, str], list[float]] = {}
    keys = ("seed", "head_dim", "causal", "seq_len", "batch", "heads", "kv_heads", "window", "n_kv")
    for _, rows in groupby(kept(name), lambda row: [row[key] for key in keys]):
        first, *others = rows
        one = Shape(first)
        one.rows = {row["implementation"]: row for row in (first, *others)}
        for direction in ("forward", "backward"):
            if (ratio := one.ratio(direction)) is not None:
                for seed in (first["seed"], "all"):
                    found.setdefault((direction, seed), []).append(ratio)
    return {key: sorted(ratios) for key, ratios in sorted(found.items(), reverse=True)}


def drawn(name: str = "random-shapes-h100.csv") -> str:
    """Return the table of ratios on shapes drawn at random, per pass and seed."""
    columns = "pass|seed|shapes|at least 1.00|at least 0.98|geometric mean|worst|next"
    rows = [
        [
            *(direction, seed, len(ratios)),
            *(sum(ratio >= least for ratio in ratios) for least in (1, 0.98)),
            f"{geometric_mean(ratios):.3f}",
            *(f"{ratio:.3f}" for ratio in ratios[:2]),
        ]
        for (direction, seed), ratios in drawn_ratios(name).items()
    ]
    return markdown(columns.split("|"), rows, "pass|seed")


def limits() -> str:
    """Return the table of each unit's utilisation in the longest kernel of our slower passes."""
    longest: dict[tuple[str, ...], Row] = {}
    shape = ("head_dim", "causal", "n", "batch", "heads", "kv_heads", "window", "pass")
    for row in kept("limits-h200.csv"):
        if row["implementation"] == OURS:
            where = tuple(row[name] for name in shape)
            longest[where] = max(row, longest.get(where, row), key=lambda x: float(x["us"]))
    rows = []
    for (d, causal, n, batch, heads, kv_heads, _, direction), row in longest.items():
        on = heads if heads == kv_heads else f"{heads} on {kv_heads}"
        line = [d, "yes" if causal == "True" else "no", n, batch, on, direction]
        rows.append([*line, *(f"{float(row[x]):.0f}" for x in ("us", *UNITS.values()))])
    columns = ["d", "causal", "N", "sequences", "heads", "pass", "µs", *UNITS]
    return markdown(columns, rows, "causal|pass")


def fp8(name: str = "fp8-h200.csv") -> str:
    """Return the table of TFLOP/s of the FP8 forward, and its speed relative to bfloat16."""
    found: dict[tuple[int, bool, int], dict[str, Row]] = {}
    for row in kept(name):
        if row["what"] == "forward":
            where = int(row["head_dim"]), row["causal"] == "True", int(row["n"])
            found.setdefault(where, {})[row["way"]] = row
    rows = []
    for (d, causal, n), ways in sorted(found.items()):
        speed = {way: f"{float(row['tflops']):.0f}" for way, row in ways.items()}
        line: list[object] = [d, "yes" if causal else "no", n, speed["bfloat16"]]
        for way in ("fp8", "fp8, v transposed", "quantised"):
            line += [speed[way], f"{float(ways[way]['over bfloat16']):.2f}"]
        rows.append([*line, speed["cuDNN FP8"]])
    columns = "d|causal|N|bfloat16|FP8|×|FP8, V transposed here|×|quantised here, too|×|cuDNN FP8"
    return markdown(columns.split("|"), rows, "causal")


def quantisers(name: str = "fp8-h200.csv") -> str:
    """Return the table of quantisers' bandwidth relative to a copy's."""
    rows: dict[str, dict[str, str]] = {}
    for row in kept(name):
        if row["way"] in ("plain", "rotated"):
            scale = row["what"].rpartition(" ")[2] + ", rotated" * (row["way"] == "rotated")
            rows.setdefault(row["head_dim"], {})[scale] = f"{float(row['of a copy']):.2f}"
    columns = ("block", "block, rotated", "head", "head, rotated")
    return markdown(("d", *columns), [[d, *(x[c] for c in columns)] for d, x in rows.items()])


def forms(direction: str) -> str:
    """Return the table of TFLOP/s of flashsim's forms of a pass."""
    names = {
        "forward": {
            "cupy": "flashsim cupy",
            "numba_cuda": "flashsim numba_cuda",
            "cupy, portable": "flashsim cupy portable",
            "numba_cuda, tensor": "flashsim numba_cuda tensor",
        },
        "backward": {
            "cupy": "flashsim cupy",
            "in order": "flashsim cupy deterministic",
            "three passes": "flashsim cupy three passes",
            "portable": "flashsim cupy portable",
            "portable, three passes": "flashsim cupy portable deterministic",
            "numba_cuda, tensor": "flashsim numba_cuda",
        },
    }[direction] | {"FlashAttention-2": "torch flash2", "cuDNN": "torch cudnn"}
    return _speeds("gpu-h200.csv", [(x, direction, name) for x, name in names.items()])


def in_python() -> str:
    """Return the table of TFLOP/s of Hopper's kernels in C++ and in Python."""
    ways = {
        "forward": "",
        "fused": "",
        "in order": " deterministic",
        "three passes": " three passes",
    }
    columns = []
    for way, suffix in ways.items():
        direction = "forward" if way == "forward" else "backward"
        columns.append((f"{way}, C++", direction, f"flashsim cupy{suffix}"))
        columns.append(("Python", direction, f"flashsim numba_cuda{suffix}"))
    return _speeds("gpu-python-h200.csv", [*columns, ("cuDNN", "backward", "torch cudnn")])


def _speeds(name: str, columns: Sequence[tuple[str, str, str]]) -> str:
    """Return a table of TFLOP/s; each column has a heading, a direction and an implementation."""
    rows: dict[tuple[int, bool, int], dict[str, Row]] = {}
    for row in kept(name):
        where = -int(row["head_dim"]), row["causal"] == "True", int(row["seq_len"])
        rows.setdefault(where, {})[row["implementation"]] = row
    lines = []
    for (d, causal, n), of in sorted(rows.items()):
        cells = [f"{float(of[who][f'{way}_tflops']):.0f}" for _, way, who in columns]
        lines.append([-d, "yes" if causal else "no", n, *cells])
    return markdown(["d", "causal", "N", *(head for head, *_ in columns)], lines, "causal")


def decoding(name: str = "decode-h200.csv") -> str:
    """Return the decoding table: µs of one query, and ratios to others, pages, a copy."""
    found: dict[tuple[int, int, int], dict[str, Row]] = {}
    for row in kept(name):
        if row["n_q"] == "1":
            where = -int(row["head_dim"]), int(row["keys"]), int(row["batch"])
            found.setdefault(where, {})[row["implementation"]] = row
    rows = []
    for (d, keys, batch), of in sorted(found.items()):
        us = {which: float(row["us"]) for which, row in of.items()}
        ours, *others = (us[which] for which in ("flashsim", "cuDNN", "FlashAttention-2"))
        cells = [f"{batch} x {keys:,}, {-d}", of["flashsim"]["splits"]]
        cells += [f"{x:.1f}" if x < 1000 else f"{x:,.0f}" for x in (ours, *others)]
        cells.append(f"{min(others) / ours:.3f}")
        cells += [f"{us[f'flashsim, pages of {size}'] / ours:.2f}" for size in (64, 16, 1)]
        rows.append([*cells, f"{float(of['flashsim']['of_copy']):.2f}"])
    columns = "batch x keys, head_dim|splits|flashsim|cuDNN|FlashAttention-2|vs better"
    columns += "|pages of 64|of 16|of 1|of a copy"
    return markdown(columns.split("|"), rows, "batch x keys, head_dim")


def latent() -> str:
    """Return the table of TFLOP/s of latent attention by page size."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for row in kept("latent-h200.csv"):
        where = f"{row['batch']} x {int(row['keys']):,}", row["n_q"]
        rows.setdefault(where, {})[row["page"]] = f"{float(row['tflop_per_s']):.0f}"
    columns = ("batch x keys", "queries", "contiguous", "pages of 64", "of 16", "of 1")
    cells = [[*at, *(of[page] for page in ("0", "64", "16", "1"))] for at, of in rows.items()]
    return markdown(columns, cells, columns[0])


def flex(name: str = "gpu-flex-h100.csv") -> str:
    """Return the table of TFLOP/s of mask and score functions.

    "×" divides by FlexAttention's TFLOP/s, "of named" by flashsim's with a built-in mask.
    """
    found: dict[tuple[str, ...], dict[tuple[str, str], float]] = {}
    for row in kept(name):
        shape = row["n"], row["head_dim"], row["row"]
        which = row["direction"], row["implementation"]
        found.setdefault(shape, {})[which] = float(row["tflops"])
    rows = []
    for shape, speed in found.items():
        line = [*shape]
        for direction in ("forward", "backward"):
            named, theirs = (speed.get((direction, name)) for name in ("named", "flex"))
            ours = speed.get((direction, "functions"), named)
            assert ours is not None
            line += [f"{ours:.0f}", f"{ours / named:.2f}" if named else ""]
            line += [f"{theirs:.0f}", f"{ours / theirs:.2f}"] if theirs else ["", ""]
        rows.append(line)
    columns = ["N", "d", "mask, score"]
    for direction in ("forward", "backward"):
        columns += [direction, "of named", "FlexAttention", "×"]
    return markdown(columns, rows, "mask, score")


#: Pages of docs/, with their sections and their tables.
PAGES: dict[str, list[tuple[str, Callable[[], str]]]] = {
    "notebooks/speed_gpu.md": [
        ("## The papers' shapes", papers),
        ("## Short sequences, few key heads, other widths", short),
        ("### Grouped query heads", serving),
        ("### Head dimensions", widths),
        ("### Why the slower shapes are slower", limits),
        ("## An H100", partial(papers, "gpu-papers-h100.csv")),
        ("### Short sequences on the H100", partial(short, "gpu-short-h100.csv")),
        ("### Grouped query heads on the H100", partial(serving, "gpu-serving-h100.csv")),
        ("### Head dimensions on the H100", partial(widths, "gpu-widths-h100.csv")),
        ("### Shapes drawn at random", drawn),
        ("### Shapes drawn at random on an H200", partial(drawn, "random-shapes-h200.csv")),
        ("## FP8", fp8),
        ("## FP8", quantisers),
        ("### FP8 on the H100", partial(fp8, "fp8-h100.csv")),
        ("### FP8 on the H100", partial(quantisers, "fp8-h100.csv")),
        ("## Our forms beside each other", partial(forms, "forward")),
        ("## Our forms beside each other", partial(forms, "backward")),
        ("### Kernels in Python against those in C++", in_python),
    ],
    "notebooks/functions_gpu.md": [
        ("## Beside FlexAttention", flex),
        ("### FlexAttention on an H200", partial(flex, "gpu-flex-h200.csv")),
    ],
    "notebooks/speed_decoding.md": [
        ("## One query, a long cache", decoding),
        ("## One query, on an H100", partial(decoding, "decode-h100.csv")),
        ("## Latent attention", latent),
    ],
}
