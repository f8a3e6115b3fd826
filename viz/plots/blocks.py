"""A plot of visits (tile pairs), bytes and predicted time against the tile size."""

from __future__ import annotations

from itertools import pairwise
from math import nan
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from flashsim.problem import checks
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme
from flashsim.viz.style import heading, human, series_style, themed


@themed
def block_sizes(data: Any, *, stage: str | None = None, ax: Axes, theme: Theme) -> None:
    """Draw visits, bytes and predicted time of one stage, each divided by its smallest value.

    A visit is the work on one pair of a query tile and a key tile. The bytes are requested bytes,
    before any cache. A line joins tile sizes with the same number of rows. Labels state the number
    of columns. A hollow mark shows a tile size that does not fit on chip.

    Parameters
    ----------
    data : BlockSizes
        The result of `flashsim.blocks.sizes`.
    stage : str, optional
        Default: the first.

    Raises
    ------
    OptionError
        If the stage does not exist.
    """
    sources.made_by("flashsim.blocks.sizes", data, "found")
    stages = list(dict.fromkeys(b.stage for b in data.found))
    stage = stages[0] if stage is None else checks.one_of("stage", stage, stages)
    blocks = [b for b in data.found if b.stage == stage]
    series: dict[str, tuple[list[float], Any]] = {
        "visits": ([b.visits for b in blocks], lambda x: f"{x:,}"),
        "requested bytes": ([b.bytes for b in blocks], human),
        "predicted time": ([b.seconds or nan for b in blocks], lambda x: f"{1e3 * x:.3g} ms"),
    }
    rows = [b.tiling.block_q for b in blocks]
    gap = np.cumsum([0, *(a != b for a, b in pairwise(rows))])  # between tiles of other rows
    at = np.arange(len(blocks)) + gap
    fits = np.array([bool(b.blocks) for b in blocks])
    for n, (name, (values, written)) in enumerate(series.items()):
        heights = np.array(values, float)
        if np.isnan(heights).all():
            continue
        least = float(np.nanmin(heights))
        over, style = heights / least, {**series_style(theme, n), "zorder": 3 + n}
        label = f"{name} (1× = {written(int(least) if name == 'visits' else least)})"
        for height in dict.fromkeys(rows):
            mine = np.array(rows) == height
            ax.plot(at[mine], over[mine], label=label, ms=8 - 1.5 * n, **style)
            label = "_"
        # Later marks are smaller, so that both are visible where series meet.
        hollow = {**style, "mfc": theme.background, "mew": 2, "ls": "none", "ms": 10 - 2.5 * n}
        ax.plot(at[~fits], over[~fits], **hollow)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_xticks(at, [f"{b.tiling.block_k}" for b in blocks])
    for height in dict.fromkeys(rows):
        mine = at[np.array(rows) == height]
        ax.axvspan(mine[0] - 0.5, mine[-1] + 0.5, color=theme.panel, zorder=0, lw=0)
        ax.annotate(
            f"{height} rows", (float(mine.mean()), 0), (0, -24), ha="center", va="top",
            xycoords=("data", "axes fraction"), textcoords="offset points", fontweight="bold",
        )  # fmt: skip
    ax.grid(axis="y")
    ax.set_ylim(top=ax.get_ylim()[1] * 2.6)  # leaves room for the legend
    ax.set_ylabel("relative to the smallest value")
    ax.set_xlabel("columns per tile, grouped by rows per tile", labelpad=22)
    about = (
        f"{data.algorithm} {data.direction}, stage {stage}, {data.device.name}; hollow: does not "
        "fit on chip"
    )
    heading(ax, theme, _message(blocks), about)
    ax.legend(loc="upper right", ncols=len(series), fontsize=11, columnspacing=1.2)


def _message(blocks: list[Any]) -> str:
    """Return a title that names the fastest tile size; without times, the one with fewest bytes."""
    timed = [b for b in blocks if b.blocks and b.seconds]
    if timed:
        best = min(timed, key=lambda b: b.seconds)
        return f"{best.tiling} tiles are predicted to be fastest: {1e3 * best.seconds:.3g} ms"
    best = min([b for b in blocks if b.blocks] or blocks, key=lambda b: b.bytes)
    return f"{best.tiling} tiles move the fewest bytes: {human(best.bytes)}"
