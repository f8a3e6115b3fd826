"""Tables of benchmarks/ring.py as one picture: python benchmarks/ring_plot.py 2.csv 4.csv out.png

How many times one GPU several of them are, forward above, with the backward pass below; a panel for
each length and mask. A dash is what `flashsim.predict.spread` says, with the link's bandwidth as
two H200s reach it. Each table brings its own run's time of one GPU.
"""

from __future__ import annotations

import argparse
import csv

from matplotlib.figure import Figure
from ring_table import HEAD_DIM, HEADS, PASSES, predicted

#: Names in the table, and how they are drawn; colours apart for every kind of sight.
BARS = {
    "flashsim, zigzag": ("zigzag", "#1a6fb5"),
    "flashsim, ulysses": ("ulysses", "#7fb3dc"),
    "context_parallel, cuDNN": ("context_parallel, cuDNN", "#8a8a8a"),
}


def draw(rows: list[dict[str, str]]) -> Figure:
    """Bars of the contenders in `BARS`."""
    timed = [r for r in rows if r["implementation"] in BARS]
    panels = sorted({(int(r["n"]), r["causal"] != "True") for r in timed})
    groups = sorted({int(r["ranks"]) for r in timed})
    width = 0.84 / len(BARS)
    figure = Figure(figsize=(2.9 * len(panels), 5), layout="constrained")
    axes = figure.subplots(2, len(panels), sharex=True, sharey=True, squeeze=False)
    for column, (n, full) in enumerate(panels):
        for line, passes in enumerate(PASSES):
            ax = axes[line][column]
            for group, ranks in enumerate(groups):
                ax.plot([group - 0.46, group + 0.46], [ranks] * 2, color="#cccccc", lw=1, zorder=0)
            for number, (name, (label, colour)) in enumerate(BARS.items()):
                here = [
                    r
                    for r in timed
                    if (int(r["n"]), r["causal"] != "True") == (n, full)
                    and (r["pass"], r["implementation"]) == (passes, name)
                ]
                shift = (number - (len(BARS) - 1) / 2) * width
                at = [groups.index(int(r["ranks"])) + shift for r in here]
                bars = ax.bar(
                    at, [float(r["of_one"]) for r in here], width, color=colour, label=label
                )
                ax.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
                model = [(x, y) for x, r in zip(at, here, strict=True) if (y := predicted(r))]
                if model:
                    xs, ys = zip(*model, strict=True)
                    ax.scatter(xs, ys, 90, "#222222", marker="_", label="predicted")
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_xticks(range(len(groups)), [f"{ranks} GPUs" for ranks in groups])
        axes[0][column].set_title(f"{n:,} rows, {'no mask' if full else 'causal'}", fontsize=10)
    for line, label in enumerate(("forward", "with backward")):
        axes[line][0].set_ylabel(f"{label}, times one GPU")
    figure.suptitle(f"{timed[0]['gpu']}, NVLink, {HEADS} heads, d = {HEAD_DIM}, bfloat16")
    found = dict(zip(*axes[0][0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=len(found), frameon=False
    )
    return figure


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="+", help="what benchmarks/ring.py wrote with --csv")
    parser.add_argument("picture", help="a file of any kind that Matplotlib writes")
    options = parser.parse_args()
    rows: list[dict[str, str]] = []
    for table in options.tables:
        with open(table, newline="") as stream:
            rows += csv.DictReader(stream)
    draw(rows).savefig(options.picture, dpi=130)


if __name__ == "__main__":
    main()
