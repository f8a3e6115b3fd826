"""Plot tables that benchmarks wrote with --csv.

    python benchmarks/gpu_plot.py gpu gpu.csv gpu.png          # of benchmarks/gpu.py
    python benchmarks/gpu_plot.py ring 2.csv 4.csv out.png     # of benchmarks/ring.py
    python benchmarks/gpu_plot.py flex flex.csv flex.png       # of benchmarks/flex.py

Forward is above, backward below, with a panel per column and a group of bars per sequence length or
number of GPUs. "gpu" draws flashsim's fastest form beside those of FA-CuTe, cuDNN and
FlashAttention-2 that were timed; all figures of a table are from one run. "ring" draws the speed of
several GPUs relative to one GPU in the same run. A dot is the prediction of
`flashsim.predict.spread`, with the link's bandwidth as two H200s reach it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from gpu_lab import read_table
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from ring_table import HEAD_DIM, HEADS, PASSES, predicted

from flashsim.viz import palette
from flashsim.viz.palette import Theme
from flashsim.viz.style import rc

Row = dict[str, str]
#: Names in the tables, and in the plot; the colours are distinct for colour-blind readers.
GPU = {
    "flashsim cupy": ("flashsim", "#1a6fb5"),
    "flash-attn cute": ("FA-CuTe", "#e08214"),
    "torch cudnn": ("cuDNN", "#8a8a8a"),
    "torch flash2": ("FlashAttention-2", "#d3d3d3"),
}
FLEX = {
    "named": ("named mask", "#1a6fb5"),
    "functions": ("functions", "#7fb3dc"),
    "flex": ("FlexAttention", "#8a8a8a"),
}
RING = {
    "flashsim, zigzag": ("zigzag", "#1a6fb5", ""),
    "flashsim, ulysses": ("ulysses", "#7fb3dc", "//"),
    "context_parallel, cuDNN": ("context_parallel", "#8a8a8a", ".."),
}


def gpu(rows: list[Row]) -> Figure:
    """Plot TFLOP/s of the rows that were timed."""
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
    title = f"{first['gpu']}, {first['dtype']}, 16,384 tokens per batch, d_model {first['d_model']}"
    return _finished(figure, axes, title)


def flex(rows: list[Row]) -> Figure:
    """Plot TFLOP/s of each mask and score function, forward above backward."""
    labels = list(dict.fromkeys(f"{r['row']}\nd = {r['head_dim']}" for r in rows))
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True, squeeze=False)
    for (ax,), direction in zip(axes, ("forward", "backward"), strict=True):
        speed: dict[str, dict[int, float]] = {name: {} for name in FLEX}
        for r in rows:
            if r["direction"] == direction and r["implementation"] in FLEX:
                at = labels.index(f"{r['row']}\nd = {r['head_dim']}")
                speed[r["implementation"]][at] = float(r["tflops"])
        _bars(ax, speed, FLEX, range(len(labels)), labels)
        ax.set_ylabel(f"{direction}, TFLOP/s")
        ax.tick_params(axis="x", rotation=60, labelsize=8)
    return _finished(figure, axes, f"{rows[0]['gpu']}, bfloat16, 16,384 tokens per batch")


def ring(rows: list[Row]) -> Figure:
    """Plot speeds relative to one GPU, for `RING`; the prediction is a hollow dot."""
    look = palette.theme("light")
    timed = [r for r in rows if r["implementation"] in RING]
    panels = sorted({(int(r["n"]), r["causal"] != "True") for r in timed})
    groups = sorted({int(r["ranks"]) for r in timed})
    names = [name for name in RING if any(r["implementation"] == name for r in timed)]
    with mpl.rc_context(rc(look)):
        figure = Figure(figsize=(9.6, 7.2), layout="constrained")
        axes = figure.subplots(len(panels), len(PASSES), sharex=True, squeeze=False)
        for across, (n, full) in zip(axes, panels, strict=True):
            for ax, passes, words in zip(across, PASSES, ("forward", "with backward"), strict=True):
                here = [
                    r
                    for r in timed
                    if (int(r["n"]), r["causal"] != "True", r["pass"]) == (n, full, passes)
                ]
                _ring_bars(ax, look, here, names, groups)
                ax.set_title(
                    f"{n:,} rows, {'no mask' if full else 'causal'}, {words}",
                    fontsize=11.5, fontweight="normal",
                )  # fmt: skip
        for ax in axes[-1]:
            ax.set_xlabel("times the speed of one GPU")
        best = max(timed, key=lambda r: float(r["of_one"]))
        figure.suptitle(
            f"{best['ranks']} GPUs are up to {float(best['of_one']):.1f} times as fast as one\n"
            f"({timed[0]['gpu']}, NVLink, {HEADS} heads, d = {HEAD_DIM}, bfloat16; dot: predicted)",
            fontsize=13, fontweight="bold", x=0.02, ha="left",
        )  # fmt: skip
    return figure


def _ring_bars(ax: Axes, look: Theme, rows: list[Row], names: list[str], groups: list[int]) -> None:
    """Draw the bars of one panel, from top to bottom, with their names and figures."""
    y, ticks, labels = 0.0, [], []
    for ranks in groups:
        ax.plot([ranks] * 2, [y - 0.6, y + len(names) - 0.4], color=look.muted, lw=1, ls=":")
        ax.annotate(
            f"{ranks} GPUs", (ranks, y - 0.6), (2, 0), textcoords="offset points", fontsize=9,
            color=look.muted, va="bottom",
        )  # fmt: skip
        for name in names:
            mine = [r for r in rows if r["implementation"] == name and int(r["ranks"]) == ranks]
            if mine:
                times, model = float(mine[0]["of_one"]), predicted(mine[0])
                color, hatch = RING[name][1:]
                ax.barh(y, times, 0.8, color=color, hatch=hatch, edgecolor=look.background, lw=0)
                near = model is not None and times < model < times + 0.45
                # beside the dot, if the dot is where the figure would be
                at = model if near else times
                if model:
                    ax.plot(model, y, "o", ms=7, mfc=look.background, mec=look.text, mew=1.6)
                ax.annotate(
                    f"{times:.2f}", (at, y), (7, 0), va="center", fontsize=10,
                    textcoords="offset points", color=look.text,
                    path_effects=[withStroke(linewidth=3, foreground=look.background)],
                )  # fmt: skip
                ticks.append(y)
                labels.append(RING[name][0])
                y += 1
        y += 1.1
    ax.set_yticks(ticks, labels, fontsize=9.5)
    ax.set(ylim=(y - 1.4, -1.5), xlim=(0, max(groups) + 0.8))
    ax.tick_params(axis="y", length=0)


def _panels(columns: int, **shared: Any) -> tuple[Figure, Any]:
    """Return a figure and its Axes, (2, columns)."""
    figure = Figure(figsize=(2.9 * columns, 5), layout="constrained")
    return figure, figure.subplots(2, columns, squeeze=False, **shared)


def _bars(
    ax: Axes,
    heights: Mapping[str, Mapping[int, float]],
    looks: Mapping[str, tuple[str, str]],
    groups: Sequence[int],
    ticks: Sequence[str],
) -> list[tuple[list[float], Any]]:
    """Draw groups of bars side by side; return each name's positions and bars."""
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
    """Add a title and one legend below; return the figure."""
    figure.suptitle(title)
    found = dict(zip(*axes[0][0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=len(found), frameon=False
    )
    return figure


def main() -> None:
    """Read the table, draw it, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=("gpu", "ring", "flex"))
    parser.add_argument("tables", nargs="+", help="CSV files that the benchmark wrote")
    parser.add_argument("picture", help="output file, in any format of Matplotlib")
    options = parser.parse_args()
    draw = {"gpu": gpu, "ring": ring, "flex": flex}[options.kind]
    draw(read_table(*options.tables)).savefig(options.picture, dpi=130)


if __name__ == "__main__":
    main()
