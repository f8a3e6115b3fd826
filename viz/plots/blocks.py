"""A plot of visited tiles, bytes and predicted time against the size of a tile."""

from __future__ import annotations

from math import isnan, nan
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from flashsim.errors import OptionError, shown
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme
from flashsim.viz.style import heading, human, series_style, themed


@themed
def block_sizes(data: Any, *, stage: str | None = None, ax: Axes, theme: Theme) -> None:
    """Draw visits, requested bytes and predicted time of one stage, each divided by its smallest.

    A visit is one query tile times one key tile. Below each tile size is the number of blocks per
    SM. A tile that does not fit is hollow.

    Parameters
    ----------
    data : BlockSizes
        The result of `flashsim.blocks.sizes`.
    stage : str, optional
        Default: the first.

    Raises
    ------
    OptionError
        If there is no such stage.
    """
    sources.made_by("flashsim.blocks.sizes", data, "found")
    stages = list(dict.fromkeys(b.stage for b in data.found))
    stage = stages[0] if stage is None else stage
    blocks = [b for b in data.found if b.stage == stage]
    if not blocks:
        raise OptionError(f"no stage {shown(stage)}; possible: {', '.join(stages)}")
    series: dict[str, tuple[list[float], Any]] = {
        "visits": ([b.visits for b in blocks], lambda x: f"{x:,}"),
        "requested bytes": ([b.bytes for b in blocks], human),
        "predicted time": ([b.seconds or nan for b in blocks], lambda x: f"{1e3 * x:.3g} ms"),
    }
    at = range(len(blocks))
    large = [x for x in at if not blocks[x].blocks]
    for n, (name, (values, written)) in enumerate(series.items()):
        known = [value for value in values if not isnan(value)]
        if not known:
            continue
        least = min(known)
        over = [value / least for value in values]
        style = {**series_style(theme, n), "zorder": 3}
        ax.plot(at, over, label=f"{name}, 1 = {written(least)}", **style)
        hollow = {**style, "mfc": theme.background, "mew": 2, "ls": "none"}
        ax.plot(large, [over[x] for x in large], **hollow)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    labels = [f"{b.tiling.block_q}\n{b.tiling.block_k}\n{b.blocks or '–'}" for b in blocks]
    ax.set_xticks(at, labels)
    ax.grid(axis="y")
    ax.set(
        xlabel="rows and columns of a tile, blocks that an SM holds", ylabel="times the smallest"
    )
    about = (
        f"{data.algorithm} {data.direction}, stage {stage}, {data.device.name}; hollow: too large"
    )
    heading(ax, theme, "What the size of a tile costs", about)
    ax.legend(loc="upper right")
