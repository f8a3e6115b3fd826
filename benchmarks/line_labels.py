"""Write names at the ends of a figure's lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from flashsim.viz import palette
from flashsim.viz.style import theme_of


def end_labels(
    ax: Axes, ends: Sequence[tuple[float, float, str, str]], *, size: float = 11
) -> None:
    """Write each line's name at its end, in its colour; names that would overlap move apart.

    Call it when the axes have their final limits and scales.

    Parameters
    ----------
    ends : sequence of (x, y, text, color)
    """
    line = size * 1.35  # points between names
    to_points = 72 / ax.figure.dpi
    high = [text.count("\n") * line for _, _, text, _ in ends]
    level = [float(ax.transData.transform(end[:2])[1]) * to_points for end in ends]
    middle, order = list(level), sorted(range(len(ends)), key=lambda n: level[n])
    lowest, top = -np.inf, ax.bbox.y1 * to_points
    for n in order:  # move up, away from the one below
        middle[n] = max(middle[n], lowest + high[n] / 2)
        lowest = middle[n] + high[n] / 2 + line
    for n in reversed(order):  # move down again, if that leaves the axes
        middle[n] = min(middle[n], top - high[n] / 2)
        top = middle[n] - high[n] / 2 - line
    for n, (x, y, text, color) in enumerate(ends):
        ax.annotate(
            text, (x, y), (9, middle[n] - level[n]), textcoords="offset points", va="center",
            color=palette.ink(color, theme_of(ax)), fontsize=size, fontweight="bold",
            annotation_clip=False,
        )  # fmt: skip
