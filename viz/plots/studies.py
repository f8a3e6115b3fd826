"""Plots of studies' results: bank conflicts, tile sizes, roundings, predictions and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import nan
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from flashsim.errors import OptionError, shown
from flashsim.problem import checks
from flashsim.viz import style
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme


@style.themed
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
        style.note(
            ax, f"{share:.0%}", (1, 100 * share), (-3, -2), ("axes fraction", "data"), ha="right",
            va="top", fontsize=11, color=theme.muted,
        )  # fmt: skip
    ax.axhline(0, color=theme.muted, lw=1.2, zorder=1)
    colors = len(theme.cycle)
    for n, (label, those) in enumerate(points.items()):
        pairs, shade = np.array(those, float).reshape(-1, 2), theme.cycle[n % colors]
        ax.plot(
            pairs[:, 1], 100 * (pairs[:, 0] / pairs[:, 1] - 1), ls="", ms=6, alpha=0.85,
            marker=style.MARKERS[n % len(style.MARKERS)], color=shade,
            mfc=theme.background if n >= colors else shade,  # the palette begins again: hollow
            label=sources.writable("label", label),
        )  # fmt: skip
    ax.set_xscale("log")
    style.unit_axis(ax.xaxis, unit)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.0f} %"))
    ax.grid(axis="y")
    ax.set(xlabel="measured", ylabel="predicted / measured − 1")
    inside = np.abs(every[:, 0] / every[:, 1] - 1)
    # Rounded down, so that "100%" means every point.
    parts = [f"{100 * np.sum(inside <= t) // len(inside)}% within {t:.0%}" for t in targets]
    about = f"{len(every)} points, mean error {np.mean(inside):.1%}, " + ", ".join(parts)
    style.heading(ax, theme, "Predicted against measured", about)
    style.beside_axes(ax)


@style.themed
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
        shade, marker = theme.cycle[n % len(theme.cycle)], style.MARKERS[n % len(style.MARKERS)]
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
    style.heading(
        ax, theme, "Tile sizes that explain the measured reads",
        "lines: prediction for each tile size; marks: tile sizes that agree with the counters",
    )  # fmt: skip


_BANKS, _GAP, _MOST_ROWS = 32, 5, 72


@style.themed
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
    shades = style.ramp(theme)
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
    style.heading(ax, theme, "Shared-memory banks that a warp's request uses", about)


@style.themed
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
        "requested bytes": ([b.bytes for b in blocks], style.human),
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
        over, marks = heights / least, {**style.series_style(theme, n), "zorder": 3 + n}
        label = f"{name} (1× = {written(int(least) if name == 'visits' else least)})"
        for height in dict.fromkeys(rows):
            mine = np.array(rows) == height
            ax.plot(at[mine], over[mine], label=label, ms=8 - 1.5 * n, **marks)
            label = "_"
        # Later marks are smaller, so that both are visible where series meet.
        hollow = {**marks, "mfc": theme.background, "mew": 2, "ls": "none", "ms": 10 - 2.5 * n}
        ax.plot(at[~fits], over[~fits], **hollow)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    small = min(12.5, 150 / len(blocks))  # so that numbers do not touch on a slide
    ax.set_xticks(at, [f"{b.tiling.block_k}" for b in blocks], fontsize=small)
    for height in dict.fromkeys(rows):
        mine = at[np.array(rows) == height]
        ax.axvspan(mine[0] - 0.5, mine[-1] + 0.5, color=theme.panel, zorder=0, lw=0)
        style.note(
            ax, f"{height} rows", (float(mine.mean()), 0), (0, -24), ("data", "axes fraction"),
            ha="center", va="top", fontweight="bold",
        )  # fmt: skip
    ax.grid(axis="y")
    ax.set_ylim(top=ax.get_ylim()[1] * 6)  # leaves room for the legend
    ax.set_ylabel("relative to the smallest value")
    ax.set_xlabel("columns per tile, grouped by rows per tile", labelpad=22)
    about = (
        f"{data.algorithm} {data.direction}, stage {stage}, {data.device.name}; hollow: does not "
        "fit on chip"
    )
    style.heading(ax, theme, _message(blocks), about)
    ax.legend(loc="upper right", fontsize=11)


def _message(blocks: list[Any]) -> str:
    """Return a title that names the fastest tile size; without times, the one with fewest bytes."""
    timed = [b for b in blocks if b.blocks and b.seconds]
    if timed:
        best = min(timed, key=lambda b: b.seconds)
        return f"{best.tiling} tiles are predicted to be fastest: {1e3 * best.seconds:.3g} ms"
    best = min([b for b in blocks if b.blocks] or blocks, key=lambda b: b.bytes)
    return f"{best.tiling} tiles move the fewest bytes: {style.human(best.bytes)}"


_RESULTS = ("out", "dq", "dk", "dv")


@style.themed
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
        marks = {**style.series_style(theme, column), "ls": "none", "ms": 6}
        ax.vlines(at, low, value, color=marks["color"], lw=1.2, alpha=0.5)
        ax.plot(at, value, label=name, zorder=3, **marks)
        style.note(  # once, above the marks of the first place
            ax, name, (at[0], value[0]), (0, 7), rotation=90, ha="center", va="bottom", fontsize=11,
            color=theme.text, bbox=behind,
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
    about = f"{data.algorithm}, {kind} inputs, N = {n:,}, d = {data.head_dim}"
    about += "; all other values are float32"
    worst = int(np.argmax(np.nan_to_num(errors[1:], posinf=np.inf).max(axis=1))) + 1
    title = f"Rounding {findings[worst].point} to {data.dtype} causes the largest error"
    style.heading(ax, theme, title if len(findings) > 1 else f"The error of {data.dtype}", about)
    ax.margins(x=0.01)
