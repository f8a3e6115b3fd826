"""Plots of distributed attention: when each rank computes, and efficiency against rank count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from flashsim.counts.questions import in_words
from flashsim.errors import OptionError
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme
from flashsim.viz.style import beside_axes, heading, note, series_style, themed


@themed
def rank_timeline(accounts: Any, *, ax: Axes, theme: Theme) -> None:
    """Draw when each rank of a group computes and when it waits, with one diagram per scheme.

    The rank with the most work determines how long a step lasts. A bar's length is the number of
    FLOPs in matrix products. This length is proportional to time if all GPUs are equal and
    transfers take no time.

    Parameters
    ----------
    accounts : Account, or a list of them
        Results of `flashsim.distributed.count` or `simulate`.

    Raises
    ------
    OptionError
        If `accounts` is an empty list.
    """
    shown = sources.all_made_by("flashsim.distributed.count", accounts, "idle_share")
    unit = max(int(a.flops.max(axis=0).sum()) for a in shown)
    level, ticks, labels = 0.0, [], []
    for account in shown:
        busiest = account.flops.max(axis=0)
        start = np.concatenate([[0], np.cumsum(busiest)])[:-1] / unit
        ranks = account.group.ranks
        rows = level + np.arange(ranks)
        for n, flops in enumerate(account.flops.T):
            shade = theme.cycle[1] if n % 2 else theme.cycle[3]
            ax.barh(rows, flops / unit, left=start[n], height=0.86, color=shade, lw=0, zorder=3)
            idle = (busiest[n] - flops) / unit
            ax.barh(
                rows, idle, left=start[n] + flops / unit, height=0.86, fill=False, hatch="////",
                edgecolor=theme.grid, lw=0, zorder=2,
            )  # fmt: skip
        end = (start[-1] * unit + busiest[-1]) / unit
        idle = f"{account.group.scheme}: idle {100 * account.idle_share:.0f} %"
        look = {"ha": "right", "va": "bottom", "fontweight": "bold", "color": theme.text}
        note(ax, idle, (end, level - 0.45), (0, 4), **look)
        step = max(1, ranks // 4)
        ticks += [level + rank for rank in range(0, ranks, step)]
        labels += [f"rank {rank}" for rank in range(0, ranks, step)]
        level += ranks + 1.6
    ax.set_yticks(ticks, labels)
    ax.set_ylim(level - 1.4, -1.7)
    ax.set_xlim(0, 1.005)
    ax.set(xlabel="time, relative to the slowest scheme", ylabel="")
    first = shown[0]
    heading(
        ax, theme, f"When each rank computes and waits, {first.direction}",
        f"{in_words(first.group.problem)} over {first.group.ranks} ranks; one shade per step",
    )  # fmt: skip
    works = Patch(color=theme.cycle[1], label="computes")
    waits = Patch(fill=False, hatch="////", edgecolor=theme.muted, lw=0, label="waits")
    beside_axes(ax, handles=[works, waits])


@themed
def scaling(times: Mapping[str, Sequence[Any]], *, ax: Axes, theme: Theme) -> None:
    """Draw the parallel efficiency of groups of GPUs against the number of GPUs (ranks).

    Efficiency is the time of one GPU alone, divided by the summed times of all GPUs.

    Parameters
    ----------
    times : mapping of str to list of SpreadTime
        Results of `flashsim.predict.spread`, by label.

    Raises
    ------
    OptionError
        If a label has no results.
    """
    if not times or not all(times.values()):
        raise OptionError(
            "nothing to draw: every label must have at least one result, as in {label: "
            "[flashsim.predict.spread(...), ...]}"
        )
    for each in chain.from_iterable(times.values()):
        sources.made_by("flashsim.predict.spread", each, "efficiency")
    for n, (label, spreads) in enumerate(times.items()):
        at = [t.account.group.ranks for t in spreads]
        shares = [100 * t.efficiency for t in spreads]
        ax.plot(at, shares, label=label, zorder=3, **series_style(theme, n))
    ranks = sorted({t.account.group.ranks for spreads in times.values() for t in spreads})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ranks, [str(r) for r in ranks])
    ax.minorticks_off()
    ax.set_ylim(0, 103)
    ax.grid()
    ax.set(xlabel="ranks", ylabel="efficiency, %")
    first = next(iter(times.values()))[0]
    p = first.account.group.problem
    heading(
        ax, theme, f"Predicted efficiency of several GPUs, {first.account.direction}",
        f"N = {p.n_q:,}{', causal' if p.causal else ''}, {p.heads} / {p.kv_heads} heads, "
        f"d = {p.head_dim}; {first.device.name}, {first.link.name}, {first.network.name}",
    )  # fmt: skip
    beside_axes(ax)
