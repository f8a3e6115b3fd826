"""A plot of HBM bytes against a length, a tile size or the SRAM size M, with papers' bounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from flashsim.counts import bounds
from flashsim.errors import OptionError
from flashsim.problem import checks
from flashsim.problem.problem import numpy_dtype
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme
from flashsim.viz.style import binary_axis, count_axis, heading, series_style, themed, unit_axis

#: Possible x axes of an IO curve: the column of a sweep, and the axis label.
AXES = {
    "n_q": "sequence length N",
    "head_dim": "head dimension d",
    "block_q": "query rows per tile",
    "block_k": "key columns per tile",
    "sram_bytes": "SRAM per block, M",
}


@themed
def io_curve(data: Any, *, x: str | None = None, ax: Axes, theme: Theme) -> None:
    """Draw requested bytes against N, d, a tile size or the SRAM size M, with papers' bounds.

    Three bounds are drawn for the first FlashAttention series, from each point's own sizes. The
    compulsory bytes (each input read once, each output written once) are exact. The bound of
    FlashAttention's theorem, N² d² / M, is multiplied by a constant that is fitted to all points.
    The lower bound of Saha and Ye has an unknown constant factor, drawn as 1, so only its slope has
    a meaning. With a sliding window, only the compulsory bytes are drawn, because the other two
    bounds do not hold.

    Parameters
    ----------
    data : Sweep, DataFrame, list of rows, or a list of Traffic or Trace
    x : str, optional
        One of `AXES`; default: the first of them that varies.

    Raises
    ------
    OptionError
        If `x` is unknown, or nothing varies.
    """
    rows = sources.rows(data)
    x = checks.one_of("x", _varying(rows) if x is None else x, AXES)
    series = _series(rows, x)
    positions = sources.places(points[0]["algorithm"] for points in series.values())
    for n, (label, points) in sorted(zip(positions, series.items(), strict=True)):
        ax.plot(
            [p[x] for p in points], [p["requested_bytes"] for p in points], label=label, zorder=3,
            **series_style(theme, n),
        )  # fmt: skip
    reference = next(
        (points for points in series.values() if points[0]["algorithm"] != "standard"),
        next(iter(series.values())),
    )
    _bounds(reference, x, len(series) > 1, ax, theme)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    (binary_axis if x == "sram_bytes" else count_axis)(ax.xaxis)
    ax.set_xticks(sorted({row[x] for row in rows}))
    ax.minorticks_off()
    unit_axis(ax.yaxis)
    ax.grid()
    ax.set(xlabel=AXES[x], ylabel="requested HBM bytes")
    heading(ax, theme, f"HBM traffic against {AXES[x]}", sources.fixed(rows, x))
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _bounds(points: list[dict[str, Any]], x: str, among: bool, ax: Axes, theme: Theme) -> None:
    """Draw the bounds of a series, labelled with the series' name if `among` several series."""
    at = [p[x] for p in points]
    quiet: dict[str, Any] = {"color": theme.muted, "lw": 1.6, "zorder": 2}
    compulsory = [p["compulsory_bytes"] for p in points]
    if any(p["window"] for p in points):
        ax.plot(at, compulsory, ls="-", label="compulsory (exact)", **quiet)
        return
    heads = [p["batch"] * p["heads"] * numpy_dtype(p["dtype"]).itemsize for p in points]
    sizes = [
        (p["n_q"], p["n_kv"], p["head_dim"], p["sram_bytes"] // numpy_dtype(p["dtype"]).itemsize)
        for p in points
    ]
    theorem = np.array([h * bounds.flash_theorem(*s) for h, s in zip(heads, sizes, strict=True)])
    lower = [h * bounds.lower_bound(*s) for h, s in zip(heads, sizes, strict=True)]
    counted = np.array([p["requested_bytes"] for p in points])
    fitted = float(np.exp(np.mean(np.log(counted / theorem))))
    ax.plot(
        at, fitted * theorem, color=theme.muted, lw=9, alpha=0.3, solid_capstyle="butt", zorder=1,
        label=f"Θ(N²d²/M), × {fitted:.3g} fitted"
        + (f"\nto {sources.title(points[0]['algorithm'])}" if among else ""),
    )  # fmt: skip
    ax.plot(at, compulsory, ls="-", label="compulsory (exact)", **quiet)
    ax.plot(at, lower, ls=(0, (6, 3)), label="Ω, Saha and Ye (slope only)", **quiet)


def _varying(rows: Sequence[dict[str, Any]]) -> str:
    for name in AXES:
        if len({row[name] for row in rows}) > 1:
            return name
    raise OptionError(
        f"an IO curve needs points that differ in one of {', '.join(AXES)}, but these points are "
        "equal in all of them; sweep one of them"
    )


def _series(rows: Iterable[dict[str, Any]], x: str) -> dict[str, list[dict[str, Any]]]:
    """Split rows into series: rows of a series differ only in x, and are sorted by x."""
    rows = list(rows)
    # A fitted tile and a machine's M depend on x, so they do not distinguish series.
    follows = {"block_q", "block_k", "n_kv", "sram_bytes", "head_dim_v", x}
    if x.startswith("block"):
        follows -= {"block_q", "block_k"} - {x}
    if x == "sram_bytes":  # a device with another M has another name
        follows.add("device")
    names = ("direction", "dtype", "causal", "window", "kv_heads", "device", *AXES)
    telling = [k for k in names if k not in follows and len({row[k] for row in rows}) > 1]
    series: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row[x]):
        window = row["window"]
        words = {
            "causal": "causal" if row["causal"] else "not causal",
            "window": f"window {window.replace(',', ':')}" if window else "no window",
            "kv_heads": sources.heads(row["heads"], row["kv_heads"]),
        }
        label = [sources.title(row["algorithm"])]
        label += [words.get(k) or (f"{k} = {row[k]}" if k in AXES else row[k]) for k in telling]
        series.setdefault(", ".join(label), []).append(row)
    return series
