"""A plot of the shared-memory banks that a warp's requests use."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from flashsim.errors import OptionError
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme
from flashsim.viz.style import heading, ramp, themed

_BANKS, _GAP, _MOST_ROWS = 32, 5, 72


@themed
def banks(data: Any, *, ax: Axes, theme: Theme) -> None:
    """Draw the words that a warp requests, by bank, shaded by the wavefront that serves each word.

    Each request is drawn as a panel with one column per bank (32, each 4 bytes wide) and one row
    per 128 bytes of shared memory. Two different words in the same column are a bank conflict: each
    needs a separate wavefront.

    Parameters
    ----------
    data : Access or sequence of Access
        The result of `flashsim.banks.access`.

    Raises
    ------
    OptionError
        If there is no access, or one spans more than 72 rows of 128 bytes.
    """
    requests = sources.all_made_by("flashsim.banks.access", data, "fronts")
    words_of = [np.unique(request.fronts()[:, [0, 2]], axis=0) for request in requests]
    rows = 1 + max(int(words[:, 0].max()) // _BANKS for words in words_of)
    if rows > _MOST_ROWS:
        raise OptionError(
            f"these accesses span {rows} rows of 128 bytes in shared memory, but at most "
            f"{_MOST_ROWS} rows can be drawn; use fewer columns"
        )
    shades = ramp(theme)
    for n, (request, words) in enumerate(zip(requests, words_of, strict=True)):
        left, last = n * (_BANKS + _GAP), max(request.wavefronts, 4)
        cells = [
            Rectangle(
                (left + word % _BANKS, word // _BANKS), 1, 1, facecolor=shades((front + 0.5) / last)
            )
            for word, front in words
        ]
        ax.add_patch(Rectangle((left, 0), _BANKS, rows, facecolor=theme.panel, zorder=0))
        lines: dict[str, Any] = {"color": theme.grid, "lw": 0.4, "zorder": 0.5}
        ax.vlines(left + np.arange(0, _BANKS + 1, 4), 0, rows, **lines)
        ax.hlines(np.arange(rows + 1), left, left + _BANKS, **lines)
        ax.add_collection(PatchCollection(cells, match_original=True, zorder=2))
        title = f"{request.layout}: {request.wavefronts} wavefront"
        title += "s" if request.wavefronts > 1 else ""
        ax.text(left + _BANKS / 2, -0.03 * rows, title, ha="center", va="bottom", fontsize=11)
    width = len(requests) * (_BANKS + _GAP) - _GAP
    ax.set(xlim=(-0.5, width + 0.5), ylim=(rows + 0.2, -0.09 * rows))
    ax.set_xticks(
        [n * (_BANKS + _GAP) + bank + 0.5 for n in range(len(requests)) for bank in (0, 15, 31)],
        ["0", "15", "31"] * len(requests),
    )
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="bank, 4 bytes wide", ylabel="shared memory, rows of 128 bytes")
    names = ", ".join(dict.fromkeys(request.pattern for request in requests))
    fewest = f"fewest wavefronts possible: {requests[0].ideal}"
    about = f"{names}; darker words are served later; {fewest}"
    if theme.name == "dark":
        about = about.replace("darker", "brighter")
    heading(ax, theme, "Shared-memory banks that a warp's request uses", about)
