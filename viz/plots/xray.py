"""A plot that compares the bytes read with each tile size to a kernel's hardware counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from flashsim.errors import OptionError
from flashsim.viz.palette import Theme
from flashsim.viz.style import MARKERS, heading, themed


@themed
def tile_evidence(data: Sequence[Mapping[str, Any]], *, ax: Axes, theme: Theme) -> None:
    """Draw the bytes that a kernel would read with each tile size, divided by the measured bytes.

    Parameters
    ----------
    data : sequence of mappings
        The result of `flashsim.studies.xray.XRay.evidence`; at most six kernels are drawn.

    Raises
    ------
    OptionError
        If no kernel has a tile.
    """
    if not data:
        raise OptionError(
            "nothing to draw: no tile size matches the measured counters of any kernel"
        )
    drawn: list[Mapping[str, Any]] = []
    for e in data:
        if all(e["curve"] != other["curve"] or e["name"] != other["name"] for other in drawn):
            drawn.append(e)
    for n, e in enumerate(drawn[:6]):
        shade, marker = theme.cycle[n % len(theme.cycle)], MARKERS[n % len(MARKERS)]
        sides, read = zip(*e["curve"], strict=True)
        ratios = [nbytes / e["measured"] for nbytes in read]
        ax.plot(sides, ratios, color=shade, lw=1.4, alpha=0.6)
        places = [(side, y) for side, y in zip(sides, ratios, strict=True) if side in e["found"]]
        ax.plot(
            *zip(*places, strict=True), ls="", marker=marker, ms=9, color=shade,
            markeredgecolor=theme.text, label=f"{e['name']} ({e['title']})", zorder=4,
        )  # fmt: skip
    ax.axhline(1, color=theme.muted, lw=1.2, ls="--", zorder=1)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks := [16, 32, 64, 128, 256, 512], labels=map(str, ticks))
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g} x")
    ax.set_xlabel(" or ".join(dict.fromkeys(e["side"] for e in drawn[:6])))
    ax.set_ylabel("predicted / measured bytes read")
    ax.legend(fontsize=10)
    heading(
        ax, theme, "Tile sizes that explain the measured reads",
        "lines: prediction for each tile size; marks: tile sizes that agree with the counters",
    )  # fmt: skip
