"""A plot of the error that arises if one rounding point (such as "P") is less precise."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from flashsim.errors import OptionError, shown
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme
from flashsim.viz.style import heading, series_style, themed

_RESULTS = ("out", "dq", "dk", "dv")


@themed
def precision(
    data: Any, *, kind: str | None = None, n: int | None = None, ax: Axes, theme: Theme
) -> None:
    """Draw the errors of out, dq, dk and dv with one rounding point at a time in lower precision.

    The rounding points are on the x axis; at the first position, all points are float32. Infinite
    errors are drawn at the upper edge of the logarithmic y axis.

    Parameters
    ----------
    data : Laboratory
        The result of `flashsim.precision.laboratory`.
    kind : str, optional
        The kind of input; default: the first.
    n : int, optional
        The sequence length; default: the longest.

    Raises
    ------
    OptionError
        If the results do not have this kind or length.
    """
    sources.made_by("flashsim.precision.laboratory", data, "findings")
    kind = data.kinds[0] if kind is None else kind
    n = max(finding.n for finding in data.findings) if n is None else n
    findings = [finding for finding in data.findings if finding.kind == kind and finding.n == n]
    if not findings:
        raise OptionError(
            f"there are no results for {shown(kind)} inputs of length {shown(n)}; pass a kind and "
            "a length that were measured"
        )
    errors = np.array([[finding.errors[name] for name in _RESULTS] for finding in findings])
    finite = errors[np.isfinite(errors) & (errors > 0)]
    low, high = finite.min(initial=1e-8) / 2, finite.max(initial=1e-7) * 4
    behind = {"facecolor": theme.panel, "edgecolor": "none", "pad": 1, "alpha": 0.8}
    for column, name in enumerate(_RESULTS):
        at = np.arange(len(findings)) + 0.21 * (column - 1.5)
        value = np.clip(
            np.where(np.isfinite(errors[:, column]), errors[:, column], high), low, high
        )
        style = {**series_style(theme, column), "ls": "none", "ms": 6}
        ax.vlines(at, low, value, color=style["color"], lw=1.2, alpha=0.5)
        ax.plot(at, value, label=name, zorder=3, **style)
        ax.annotate(  # once, above the marks of the first place
            name, (at[0], value[0]), (0, 7), textcoords="offset points", rotation=90, ha="center",
            va="bottom", fontsize=11, color=theme.text, bbox=behind,
        )  # fmt: skip
    for position in range(0, len(findings), 2):
        ax.axvspan(position - 0.5, position + 0.5, color=theme.panel, lw=0, zorder=0)
    ax.set_yscale("log")
    ax.set_xticks(range(len(findings)), [finding.point for finding in findings])
    ax.set(
        ylim=(low, high * 1.3),
        xlabel="the only value that is rounded",
        ylabel="error relative to the result",
    )
    ax.grid(axis="y")
    about = (
        f"{data.algorithm}, {kind} inputs, N = {n:,}, d = {data.head_dim}; all other values are "
        "float32"
    )
    worst = int(np.argmax(np.nan_to_num(errors[1:], posinf=np.inf).max(axis=1))) + 1
    title = f"Rounding {findings[worst].point} to {data.dtype} causes the largest error"
    heading(ax, theme, title if len(findings) > 1 else f"The error of {data.dtype}", about)
    ax.margins(x=0.01)
