"""The table and the plot of what benchmarks/flex.py measured.

python benchmarks/flex_table.py flex.csv [flex.png]
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import NamedTuple

DIRECTIONS = ("forward", "backward")
NAMES = {"named": "named mask", "functions": "functions", "flex": "FlexAttention"}


class Key(NamedTuple):
    """A row of the table."""

    n: int
    head_dim: int
    row: str


def read(path: Path) -> dict[Key, dict[tuple[str, str], float]]:
    """TFLOP/s by (direction, implementation) of each row, in the file's order."""
    found: dict[Key, dict[tuple[str, str], float]] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            key = Key(int(line["n"]), int(line["head_dim"]), line["row"])
            which = line["direction"], line["implementation"]
            found.setdefault(key, {})[which] = float(line["tflops"])
    return found


def table(rows: dict[Key, dict[tuple[str, str], float]]) -> str:
    """A table in Markdown; "×" divides by FlexAttention's throughput, "of named" by ours."""
    head = [("N", "d", "mask, score")]
    for direction in DIRECTIONS:
        head.append((direction, "of named", "FlexAttention", "×"))
    titles = [title for part in head for title in part]
    lines = [
        "| " + " | ".join(titles) + " |",
        "|---:|---:|---|" + "---:|" * (len(titles) - 3),
    ]
    for key, found in rows.items():
        cells = [str(key.n), str(key.head_dim), key.row]
        for direction in DIRECTIONS:
            named, flex = (found.get((direction, name)) for name in ("named", "flex"))
            mine = found.get((direction, "functions"), named)
            assert mine is not None
            cells += [f"{mine:.0f}", f"{mine / named:.2f}" if named else ""]
            cells += [f"{flex:.0f}", f"{mine / flex:.2f}"] if flex else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: dict[Key, dict[tuple[str, str], float]], to: Path) -> None:
    """Bars of TFLOP/s, forward above backward."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(12, 7), sharex=True, layout="constrained")
    labels = [f"{key.row}\nd = {key.head_dim}" for key in rows]
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        for i, (name, label) in enumerate(NAMES.items()):
            heights = [found.get((direction, name), 0.0) for found in rows.values()]
            axis.bar([x + 0.28 * (i - 1) for x in range(len(rows))], heights, 0.26, label=label)
        axis.set_ylabel(f"{direction}, TFLOP/s")
    axes[0].legend(ncols=3)
    axes[1].set_xticks(range(len(rows)), labels, rotation=60, ha="right", fontsize=8)
    figure.savefig(to, dpi=110)


def main() -> None:
    """Print the table, and draw the plot if a second file is named."""
    rows = read(Path(sys.argv[1]))
    print(table(rows))
    if len(sys.argv) > 2:
        plot(rows, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
