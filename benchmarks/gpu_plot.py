"""Pictures of tables that benchmarks wrote with --csv.

    python benchmarks/gpu_plot.py gpu gpu.csv gpu.png          # of benchmarks/gpu.py
    python benchmarks/gpu_plot.py ring 2.csv 4.csv out.png     # of benchmarks/ring.py

Forward above, backward below; a panel for each column's shape, a group of bars for each sequence
length, or number of GPUs. "gpu" draws flashsim's fastest form and whoever of FA-CuTe, cuDNN and
FlashAttention-2 was timed beside it; all figures of a table are of one run. "ring" draws how many
times one GPU several of them are; each table brings its own run's time of one GPU. A dash is what
`flashsim.predict.spread` says, with the link's bandwidth as two H200s reach it.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ring_table import HEAD_DIM, HEADS, PASSES, predicted

Row = dict[str, str]
#: Names in the tables, and what a kernel engineer calls them; colours apart for every sight.
GPU = {
    "flashsim cupy": ("flashsim", "#1a6fb5"),
    "flash-attn cute": ("FA-CuTe", "#e08214"),
    "torch cudnn": ("cuDNN", "#8a8a8a"),
    "torch flash2": ("FlashAttention-2", "#d3d3d3"),
}
RING = {
    "flashsim, zigzag": ("zigzag", "#1a6fb5"),
    "flashsim, ulysses": ("ulysses", "#7fb3dc"),
    "context_parallel, cuDNN": ("context_parallel, cuDNN", "#8a8a8a"),
}


def gpu(rows: list[Row]) -> Figure:
    """TFLOP/s of the rows that were timed."""
    timed = [r for r in rows if r["implementation"] in GPU and r["forward_tflops"]]
    names = {x: look for x, look in GPU.items() if any(r["implementation"] == x for r in timed)}
    panels = list({(int(r["head_dim"]), r["causal"] == "True") for r in timed})
    panels.sort(key=lambda panel: (-panel[0], panel[1]))
    figure, axes = _panels(len(panels), sharex="col", sharey="row")
    for column, (d, causal) in enumerate(panels):
        here = [r for r in timed if (int(r["head_dim"]), r["causal"] == "True") == (d, causal)]
        lengths = sorted({int(r["seq_len"]) for r in here})
        for ax, direction in zip(axes[:, column], ("forward", "backward"), strict=True):
            speed: dict[str, dict[int, float]] = {name: {} for name in names}
            for r in here:
                if r[f"{direction}_tflops"]:
                    found = float(r[f"{direction}_tflops"])
                    speed[r["implementation"]][int(r["seq_len"])] = found
            ours = _bars(ax, speed, names, lengths, [f"{n:,}" for n in lengths])[0][1]
            ax.bar_label(ours, fmt="%.0f", fontsize=7, padding=1)
            ax.set_ylabel("" if column else f"{direction}, TFLOP/s")
        axes[0][column].set_title(f"d = {d}, {'causal' if causal else 'no mask'}", fontsize=10)
        axes[-1][column].set_xlabel("sequence length")
    first = timed[0]
    title = f"{first['gpu']}, {first['dtype']}, 16,384 tokens a batch, d_model {first['d_model']}"
    return _finished(figure, axes, title)


def ring(rows: list[Row]) -> Figure:
    """How many times one GPU, of the contenders in `RING`."""
    timed = [r for r in rows if r["implementation"] in RING]
    panels = sorted({(int(r["n"]), r["causal"] != "True") for r in timed})
    groups = sorted({int(r["ranks"]) for r in timed})
    figure, axes = _panels(len(panels), sharex=True, sharey=True)
    for column, (n, full) in enumerate(panels):
        for ax, passes, words in zip(
            axes[:, column], PASSES, ("forward", "with backward"), strict=True
        ):
            for group, ranks in enumerate(groups):
                ax.plot([group - 0.46, group + 0.46], [ranks] * 2, color="#cccccc", lw=1, zorder=0)
            here: dict[str, dict[int, Row]] = {name: {} for name in RING}
            for r in timed:
                if (int(r["n"]), r["causal"] != "True", r["pass"]) == (n, full, passes):
                    here[r["implementation"]][int(r["ranks"])] = r
            times = {x: {k: float(r["of_one"]) for k, r in of.items()} for x, of in here.items()}
            drawn = _bars(ax, times, RING, groups, [f"{ranks} GPUs" for ranks in groups])
            for of, (at, bars) in zip(here.values(), drawn, strict=True):
                ax.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
                model = [
                    (x, y) for x, r in zip(at, of.values(), strict=True) if (y := predicted(r))
                ]
                if model:
                    xs, ys = zip(*model, strict=True)
                    ax.scatter(xs, ys, 90, "#222222", marker="_", label="predicted")
            ax.set_ylabel("" if column else f"{words}, times one GPU")
        axes[0][column].set_title(f"{n:,} rows, {'no mask' if full else 'causal'}", fontsize=10)
    title = f"{timed[0]['gpu']}, NVLink, {HEADS} heads, d = {HEAD_DIM}, bfloat16"
    return _finished(figure, axes, title)


def _panels(columns: int, **shared: Any) -> tuple[Figure, Any]:
    """A figure, and its Axes, (2, columns)."""
    figure = Figure(figsize=(2.9 * columns, 5), layout="constrained")
    return figure, figure.subplots(2, columns, squeeze=False, **shared)


def _bars(
    ax: Axes,
    heights: Mapping[str, Mapping[int, float]],
    looks: Mapping[str, tuple[str, str]],
    groups: Sequence[int],
    ticks: Sequence[str],
) -> list[tuple[list[float], Any]]:
    """Groups of bars side by side; where each name's stand, and they."""
    width, drawn = 0.84 / len(heights), []
    for number, (name, of) in enumerate(heights.items()):
        shift = (number - (len(heights) - 1) / 2) * width
        at = [groups.index(group) + shift for group in of]
        label, colour = looks[name]
        drawn.append((at, ax.bar(at, list(of.values()), width, color=colour, label=label)))
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xticks(range(len(groups)), ticks)
    return drawn


def _finished(figure: Figure, axes: Any, title: str) -> Figure:
    """With a title, and one legend below."""
    figure.suptitle(title)
    found = dict(zip(*axes[0][0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=len(found), frameon=False
    )
    return figure


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=("gpu", "ring"))
    parser.add_argument("tables", nargs="+", help="what the benchmark wrote with --csv")
    parser.add_argument("picture", help="a file of any kind that Matplotlib writes")
    options = parser.parse_args()
    rows: list[Row] = []
    for table in options.tables:
        with open(table, newline="") as stream:
            rows += csv.DictReader(stream)
    {"gpu": gpu, "ring": ring}[options.kind](rows).savefig(options.picture, dpi=130)


if __name__ == "__main__":
    main()
