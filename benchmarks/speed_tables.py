"""Tables of docs/guides/performance.md from what benchmarks/gpu.py wrote with --csv.

A ratio is the best of the others' time by ours, the others being those of the run that were timed
there: FA-CuTe, cuDNN and FlashAttention-2. benchmarks/doc_tables.py puts the tables into the page.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

DATA = Path(__file__).parent.parent / "docs" / "data"
OURS = "flashsim cupy"
OTHERS = {"flash-attn cute": "FA-CuTe", "torch cudnn": "cuDNN", "torch flash2": "FA-2"}
Row = dict[str, str]


class Shape:
    """One shape of a run, with a row for each implementation that was timed at it."""

    def __init__(self, row: Row) -> None:
        self.d, self.n = int(row["head_dim"]), int(row["seq_len"])
        self.causal = row["causal"] == "True"
        self.batch, self.window = int(row["batch"]), int(row["window"])
        self.heads, self.kv_heads = int(row["heads"]), int(row["kv_heads"])
        self.rows: dict[str, Row] = {}

    def ms(self, direction: str, name: str = OURS) -> float | None:
        """Milliseconds of a pass, or None where it was not timed."""
        found = self.rows.get(name, {}).get(f"{direction}_ms")
        return float(found) if found else None

    def speed(self, direction: str, name: str) -> str:
        """TFLOP/s of a pass."""
        found = self.rows.get(name, {}).get(f"{direction}_tflops")
        return f"{float(found):.0f}" if found else ""

    def ratio(self, direction: str) -> float | None:
        """The time of the best of the others by ours."""
        ours = self.ms(direction)
        others = [ms for name in OTHERS if (ms := self.ms(direction, name))]
        return min(others) / ours if ours and others else None

    def of_the_best(self, direction: str) -> str:
        """The ratio, as the tables have it."""
        found = self.ratio(direction)
        return "" if found is None else f"{found:.2f}"


def shapes(name: str, key: Callable[[Shape], tuple]) -> list[Shape]:
    """Of a CSV file of docs/data, in an order."""
    found: dict[tuple, Shape] = {}
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            one = Shape(row)
            where = (one.d, one.causal, one.n, one.batch, one.heads, one.kv_heads, one.window)
            found.setdefault(where, one).rows[row["implementation"]] = row
    return sorted(found.values(), key=key)


def _mask(one: Shape) -> str:
    return "yes" if one.causal else "no"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[object]], words: str = "") -> str:
    """Numbers to the right, the columns named in `words` to the left."""
    sides = ["---" if name in words.split("|") else "---:" for name in columns]
    lines = [f"| {' | '.join(map(str, line))} |\n" for line in (columns, *rows)]
    return "".join([lines[0], f"|{'|'.join(sides)}|\n", *lines[1:]])


def papers(name: str = "gpu-papers-h200.csv") -> str:
    """TFLOP/s of everybody who was timed on the papers' twelve shapes."""
    found = shapes(name, lambda s: (-s.d, s.causal, s.n))
    others = [name for name in OTHERS if any(name in one.rows for one in found)]
    columns, rows = ["d", "causal", "N"], []
    for direction in ("forward", "backward"):
        columns += [direction, *(OTHERS[name] for name in others), "of the best"]
    for one in found:
        line = [str(one.d), _mask(one), str(one.n)]
        for direction in ("forward", "backward"):
            line += [one.speed(direction, name) for name in (OURS, *others)]
            line.append(one.of_the_best(direction))
        rows.append(line)
    return _markdown(columns, rows, "causal")


def h100() -> str:
    """The same on an H100."""
    return papers("gpu-papers-h100.csv")


def short() -> str:
    """Ratios at N = 128 to 768, of one, 8 and 64 sequences."""
    columns = ["d", "causal", "N", "forward, 1", "8", "64 sequences", "backward, 1", "8", "64"]
    rows: dict[tuple, list[object]] = {}
    found = shapes("gpu-short-h200.csv", lambda s: (s.d, s.causal, s.n, s.batch))
    for one in found:
        rows.setdefault((one.d, one.causal, one.n), [one.d, _mask(one), one.n])
    for direction in ("forward", "backward"):
        for one in found:
            rows[one.d, one.causal, one.n].append(one.of_the_best(direction))
    return _markdown(columns, [*rows.values()], "causal")


def serving() -> str:
    """Times and ratios with several query heads to a key head."""
    columns = "heads|key heads|N|sequences|window|forward, µs|of the best|backward, µs|of the best"
    rows = []
    for one in shapes("gpu-serving-h200.csv", lambda s: (s.heads, s.n, s.batch, s.window)):
        line: list[object] = [one.heads, one.kv_heads, one.n, one.batch, one.window or ""]
        for direction in ("forward", "backward"):
            ms = one.ms(direction)
            line += ["" if ms is None else f"{1e3 * ms:.0f}", one.of_the_best(direction)]
        rows.append(line)
    return _markdown(columns.split("|"), rows, "window")


def widths() -> str:
    """Ratios of head dimensions."""
    columns = ["d", "forward", "backward", "causal, forward", "backward"]
    rows: dict[int, list[object]] = {}
    for one in shapes("gpu-widths-h200.csv", lambda s: (s.d, s.causal)):
        line = rows.setdefault(one.d, [one.d])
        line += [one.of_the_best("forward"), one.of_the_best("backward")]
    return _markdown(columns, [*rows.values()])


#: Of performance.md: the sections and their tables.
SECTIONS: list[tuple[str, Callable[[], str]]] = [
    ("## GPU", papers),
    *(
        ("### Short sequences, few key heads, other widths", table)
        for table in (short, serving, widths)
    ),
    ("### An H100", h100),
]
