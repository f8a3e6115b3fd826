"""Plots of the tiles that a kernel's counters imply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from flashsim.errors import OptionError
from flashsim.viz.palette import Theme
from flashsim.viz.style import MARKERS, heading, themed, unit_axis


@themed
def tile_evidence(data: Sequence[Mapping[str, Any]], *, ax: Axes, theme: Theme) -> None:
    """Draw the bytes that each tile would read, and where each kernel lies on its curve.

    Parameters
    ----------
    data : sequence of mappings
        From `flashsim.studies.xray.XRay.evidence`; at most six kernels are drawn.

    Raises
    ------
    OptionError
        If no kernel has a tile.
    """
    if not data:
        raise OptionError("nothing to draw: no kernel's counters fit a tile")
    drawn: list[Mapping[str, Any]] = []
    for one in data:
        if all(one["curve"] != other["curve"] or one["name"] != other["name"] for other in drawn):
            drawn.append(one)
    for n, one in enumerate(drawn[:6]):
        shade, marker = theme.cycle[n % len(theme.cycle)], MARKERS[n % len(MARKERS)]
        sides, read = zip(*one["curve"], strict=True)
        ax.plot(sides, read, color=shade, lw=1.4, alpha=0.6)
        places = [side for side in one["found"] if side in sides]
        ax.plot(
            places, [one["measured"]] * len(places), ls="", marker=marker, ms=9, color=shade,
            markeredgecolor=theme.text, label=f"{one['name']} ({one['title']})", zorder=4,
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks := [16, 32, 64, 128, 256, 512], labels=map(str, ticks))
    ax.set_yscale("log", base=2)
    unit_axis(ax.yaxis)
    ax.set_xlabel(" or ".join(dict.fromkeys(one["side"] for one in drawn[:6])))
    ax.set_ylabel("bytes from L2 into the SMs")
    ax.legend(fontsize=10)
    heading(ax, theme, "Bytes read tell the tile", "lines: each tile; marks: measured kernels")
