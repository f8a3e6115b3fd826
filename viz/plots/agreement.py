"""A plot of how far predictions are from measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from flashsim.errors import OptionError
from flashsim.problem import checks
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme
from flashsim.viz.style import MARKERS, heading, themed, unit_axis


@themed
def predicted_against_measured(
    points: Mapping[str, Sequence[tuple[float, float]]],
    *,
    unit: str = "s",
    targets: tuple[float, ...] = (0.05, 0.12),
    ax: Axes,
    theme: Theme,
) -> None:
    """Draw the error of predictions, in per cent, against the measured values.

    Parameters
    ----------
    points : mapping of str to a sequence of (predicted, measured)
        The keys are the names of the series.
    unit : str
        The unit of both values.
    targets : tuple of float
        Error bounds as fractions; a band is drawn for each.

    Raises
    ------
    OptionError
        If there is no point, or a measured value is not positive.
    """
    every = np.array([pair for those in points.values() for pair in those], float)
    if not every.size:
        raise OptionError("no points to draw; pass {name: [(predicted, measured), ...]}")
    if (every[:, 1] <= 0).any():
        raise OptionError(f"measured values must be positive, got {every[:, 1].min():g}")
    for share in (checks.number("targets", share, low=0.0) for share in targets):
        ax.axhspan(-100 * share, 100 * share, color=theme.muted, alpha=0.12, lw=0, zorder=0)
        ax.annotate(
            f"{share:.0%}", (1, 100 * share), xycoords=("axes fraction", "data"), xytext=(-3, -2),
            textcoords="offset points", ha="right", va="top", fontsize=11, color=theme.muted,
        )  # fmt: skip
    ax.axhline(0, color=theme.muted, lw=1.2, zorder=1)
    colors = len(theme.cycle)
    for n, (label, those) in enumerate(points.items()):
        pairs, shade = np.array(those, float).reshape(-1, 2), theme.cycle[n % colors]
        ax.plot(
            pairs[:, 1], 100 * (pairs[:, 0] / pairs[:, 1] - 1), ls="", ms=6, alpha=0.85,
            marker=MARKERS[n % len(MARKERS)], color=shade,
            mfc=theme.background if n >= colors else shade,  # the palette begins again: hollow
            label=sources.writable("label", label),
        )  # fmt: skip
    ax.set_xscale("log")
    unit_axis(ax.xaxis, unit)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.0f} %"))
    ax.grid(axis="y")
    ax.set(xlabel="measured", ylabel="predicted / measured − 1")
    inside = np.abs(every[:, 0] / every[:, 1] - 1)
    # Rounded down, so that "100%" means every point.
    parts = [f"{100 * np.sum(inside <= t) // len(inside)}% within {t:.0%}" for t in targets]
    heading(
        ax, theme, "Predicted against measured",
        f"{len(every)} points, mean error {np.mean(inside):.1%}, " + ", ".join(parts),
    )  # fmt: skip
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
