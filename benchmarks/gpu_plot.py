"""The table of benchmarks/gpu.py as one picture: python benchmarks/gpu_plot.py gpu.csv gpu.png

Forward above, backward below; a panel for each head_dim and mask, a group of bars for each sequence
length. Drawn are flashsim's fastest form and whoever of FA-CuTe, cuDNN and FlashAttention-2 was
timed beside it; all figures of a table are of one run.
"""

from __future__ import annotations

import argparse
import csv

from matplotlib.figure import Figure

#: Names in the table, and what a kernel engineer calls them; colours apart for every kind of sight.
BARS = {
    "flashsim cupy": ("flashsim", "#1a6fb5"),
    "flash-attn cute": ("FA-CuTe", "#e08214"),
    "torch cudnn": ("cuDNN", "#8a8a8a"),
    "torch flash2": ("FlashAttention-2", "#d3d3d3"),
}
DIRECTIONS = ("forward", "backward")


def draw(rows: list[dict[str, str]]) -> Figure:
    """TFLOP/s of the rows that were timed."""
    timed = [r for r in rows if r["implementation"] in BARS and r["forward_tflops"]]
    names = [name for name in BARS if any(r["implementation"] == name for r in timed)]
    panels = list({(int(r["head_dim"]), r["causal"] == "True") for r in timed})
    panels.sort(key=lambda panel: (-panel[0], panel[1]))
    figure = Figure(figsize=(2.9 * len(panels), 5), layout="constrained")
    axes = figure.subplots(2, len(panels), sharex="col", sharey="row", squeeze=False)
    width = 0.84 / len(names)
    for column, (d, causal) in enumerate(panels):
        here = [r for r in timed if (int(r["head_dim"]), r["causal"] == "True") == (d, causal)]
        lengths = sorted({int(r["seq_len"]) for r in here})
        for line, direction in enumerate(DIRECTIONS):
            ax = axes[line][column]
            for number, name in enumerate(names):
                label, colour = BARS[name]
                speed = {
                    int(r["seq_len"]): float(r[f"{direction}_tflops"])
                    for r in here
                    if r["implementation"] == name and r[f"{direction}_tflops"]
                }
                at = [lengths.index(n) + (number - (len(names) - 1) / 2) * width for n in speed]
                bars = ax.bar(at, list(speed.values()), width, color=colour, label=label)
                if number == 0:
                    ax.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axes[0][column].set_title(f"d = {d}, {'causal' if causal else 'no mask'}", fontsize=10)
        axes[-1][column].set_xlabel("sequence length")
    for line, direction in enumerate(DIRECTIONS):
        axes[line][0].set_ylabel(f"{direction}, TFLOP/s")
    gpu, dtype = timed[0]["gpu"], timed[0]["dtype"]
    figure.suptitle(f"{gpu}, {dtype}, 16,384 tokens a batch, d_model {timed[0]['d_model']}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names), frameon=False)
    return figure


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", help="what benchmarks/gpu.py wrote with --csv")
    parser.add_argument("picture", help="a file of any kind that Matplotlib writes")
    options = parser.parse_args()
    with open(options.table, newline="") as stream:
        draw(list(csv.DictReader(stream))).savefig(options.picture, dpi=130)


if __name__ == "__main__":
    main()
