"""Plots of a device's roofline, with algorithms or with series of measured kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from matplotlib.transforms import blended_transform_factory

from flashsim.counts import traffic
from flashsim.errors import OptionError
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.viz import palette
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme
from flashsim.viz.style import beside_axes, heading, human, note, series_style, themed, unit_axis

_LOWEST = 1e-3  # FLOP/s, below every axis
_BAR = 0.07  # of a roofline's height, for each bar without one


@themed
def roofline(
    data: Any,
    *,
    device: str | Device | None = None,
    seconds: dict[str, float] | None = None,
    dram_bytes: dict[str, int] | None = None,
    ax: Axes,
    theme: Theme,
) -> None:
    """Draw algorithms on a device's roofline.

    Each algorithm is a horizontal bar between two arithmetic intensities (matrix FLOPs divided by
    bytes). At the bar's hollow end, every requested byte comes from HBM. At the bar's filled end,
    L2 is perfect: each kernel reads and writes each of its tensors in HBM only once
    (`counts.traffic.once`). Standard attention's N x N matrices still cross HBM between its
    kernels. The real intensity lies between the two ends; a diamond marks it if `dram_bytes` is
    passed. If `seconds` has an algorithm's time, the height of its bar shows the measured FLOP/s.
    Without a time, the bar lies in a strip at the bottom, and dotted lines lead from the bar's ends
    up to the roof.

    Parameters
    ----------
    data : Trace, Traffic, Result, Comparison, Sweep, or a list or dict of them
    device : str or Device, optional
        Default: the first source's.
    seconds : dict, optional
        Measured times in seconds, by label (a key of the dict `data`, or an algorithm's name).
    dram_bytes : dict, optional
        DRAM bytes by label or algorithm, measured or predicted by `flashsim.l2`.
    """
    rows = sources.rows(data)
    machine = Device.get(device or rows[0]["device"])
    dtype = rows[0]["dtype"]
    labels = _labels(rows) if hasattr(data, "rows") else list(sources.labelled(data))
    peak, cuda = machine.peak(dtype), machine.peak(dtype, tensor_cores=False)
    moved = [(row["requested_bytes"], row.get("once_bytes") or _once(row)) for row in rows]
    spots = [
        (row["matmul_flops"] / most, row["matmul_flops"] / least)
        for row, (most, least) in zip(rows, moved, strict=True)
    ]
    for label, spot in zip(labels, spots, strict=True):
        if not max(spot):
            raise OptionError(
                f"{label} has no matrix products, because the mask keeps no score, and a "
                "logarithmic axis has no place for 0; leave it out, or draw viz.traffic"
            )
    # At least two decades, so that slopes are visible and ticks are powers of ten.
    low = min(min(min(s) for s in spots) / 4, machine.ridge(dtype) / 200)
    high = max(max(max(s) for s in spots), machine.ridge(dtype)) * 4
    reach = np.geomspace(low, high, 200)
    roof = np.minimum(reach * machine.hbm_bandwidth, peak)
    ridge = machine.ridge(dtype)
    ax.plot(reach, roof, color=theme.text, lw=2.4)
    right: dict[str, Any] = {"color": theme.muted, "ha": "right"}
    note(ax, f"peak {human(peak, 'FLOP/s')}, {dtype}", (high, peak), (-4, 12), **right)
    if cuda < peak:
        ax.axhline(cuda, color=theme.muted, ls=(0, (1, 1.2)), lw=1.4)
        text = f"without tensor cores {human(cuda, 'FLOP/s')}"
        right |= {"va": "top", "bbox": _plate(theme), "zorder": 2.5}
        note(ax, text, (high, cuda), (-4, -6), **right)
    _name_slope(ax, theme, low * 1.6, machine.hbm_bandwidth, "HBM", below=True)
    if machine.l2_bandwidth:
        below = reach[reach * machine.l2_bandwidth < peak]  # beyond, it is the roof itself
        slope = below * machine.l2_bandwidth
        ax.plot(below, slope, color=theme.muted, lw=1.4, ls=(0, (6, 3)))
        _name_slope(ax, theme, low * 1.6, machine.l2_bandwidth, "L2", below=False)
    places = sources.places(row["algorithm"] for row in rows)
    times = _given("seconds", seconds, labels, rows, least=1e-12)
    left = _given("dram_bytes", dram_bytes, labels, rows, least=1)
    unmeasured = bars = times.count(None)
    names: list[tuple[tuple[float, float], float, str, str, dict[str, Any]]] = []
    for n, (row, spot, position) in enumerate(zip(rows, spots, places, strict=True)):
        label, took = labels[n], times[n]
        height = [min(intensity * machine.hbm_bandwidth, peak) for intensity in spot]
        if took is not None:
            height = [row["matmul_flops"] / took] * 2
        style = {**series_style(theme, position), "ls": "none", "zorder": 4}
        hollow = {**style, "mfc": theme.background, "mew": 2, "ms": 10}
        where: dict[str, Any] = {"transform": blended_transform_factory(ax.transData, ax.transAxes)}
        level = [_BAR * (unmeasured - 0.5)] * 2
        if took is not None:
            where, level = {}, height
        else:
            unmeasured -= 1
            for end, top in zip(spot, height, strict=True):  # from the strip to the roof
                ax.plot([end, end], [_LOWEST, top], color=style["color"], lw=1.2, ls=(0, (1, 2)))
        ax.plot(spot, level, color=style["color"], lw=5, alpha=0.35, zorder=3, **where)
        ax.plot(spot[:1], level[:1], **hollow, **where)
        ax.plot(spot[1:], level[1:], **style, ms=10, **where)
        nbytes = left[n]
        if nbytes is not None:  # hollow and larger, so that a mark below it is seen
            diamond: dict[str, Any] = {"marker": "D", "ls": "none", "ms": 14, "mfc": "none"}
            diamond |= {"mec": theme.text, "mew": 1.6, "zorder": 6, **where}
            ax.plot([row["matmul_flops"] / nbytes], level[:1], **diamond)
        text = label + (f" (measured: {human(height[0], 'FLOP/s')})" if took is not None else "")
        names.append((spot, level[0], text, palette.ink(style["color"], theme), where))
    slowest = [row["matmul_flops"] / t for row, t in zip(rows, times, strict=True) if t is not None]
    floor = min([low * machine.hbm_bandwidth, *(x / 2 for x in slowest)])
    _axes(ax, (low, high), floor, peak * 2.2, "matrix FLOP")
    if bars:
        _strip(ax, theme, (bars + 0.7) * _BAR)  # and a line for its name
    for spot, tall, text, color, where in names:  # at the side of a bar that has more room
        if not where:  # above a bar of a measured height, which lies among the lines
            beside, offset, ha = float(np.sqrt(min(spot) * max(spot))), (0, 18), "center"
        elif np.log(high / max(spot)) > np.log(min(spot) / low):
            beside, offset, ha = max(spot), (12, 0), "left"
        else:
            beside, offset, ha = min(spot), (-12, 0), "right"
        note(
            ax, text, (beside, tall), offset, where.get("transform", "data"), va="center", ha=ha,
            color=color, fontsize=11, fontweight="bold", zorder=7, bbox=_plate(theme),
        )  # fmt: skip
    bound = [label for label, spot in zip(labels, spots, strict=True) if max(spot) < ridge]
    about = ", ".join(
        [sources.fixed(rows, "device"), "hollow: all bytes from HBM", "filled: perfect L2"]
        + ["diamond: DRAM bytes"] * bool(dram_bytes)
    )
    heading(ax, theme, _message(labels, bound, machine.name), about)


def _plate(theme: Theme) -> dict[str, Any]:
    """Return the style of a box behind a text, so that no line runs through the text."""
    return {"facecolor": theme.background, "edgecolor": "none", "pad": 1.5, "alpha": 0.85}


def _message(labels: Sequence[str], bound: Sequence[str], name: str) -> str:
    """Return the title: whether compute or HBM limits the algorithms if L2 is perfect."""
    free = [label for label in labels if label not in bound]
    if len(labels) > 1 and 1 in (len(bound), len(free)):
        (single,), what = (bound, "HBM") if len(bound) == 1 else (free, "FLOPs")
        return f"With a perfect L2, only {single} is limited by the {what} of {name}"
    if bound and free:
        return f"With a perfect L2, {len(bound)} of {len(labels)} are limited by the HBM of {name}"
    what = "HBM" if bound else "FLOPs"
    who = f"{labels[0]} is" if len(labels) == 1 else "all are"
    return f"With a perfect L2, {who} limited by the {what} of {name}"


def _name_slope(
    ax: Axes, theme: Theme, x: float, bandwidth: float, name: str, *, below: bool
) -> None:
    """Write a memory's bandwidth beside the sloped line that it bounds."""
    offset, color, va = ((8, -6), theme.text, "top") if below else ((-4, 8), theme.muted, "bottom")
    note(
        ax, f"{name} {human(bandwidth, 'B/s')}", (x, x * bandwidth), offset, color=color,
        fontsize=11, ha="left", va=va, bbox=_plate(theme), zorder=2.5,
    )  # fmt: skip


def _given(
    what: str,
    values: Mapping[str, float] | None,
    labels: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    least: float,
) -> list[float | None]:
    """Return each row's entry of `values`: by the row's label, else by its algorithm, else None."""
    values, names = values or {}, [row["algorithm"] for row in rows]
    known = dict.fromkeys((*labels, *names))
    for name, value in values.items():
        checks.one_of(f"label in {what}=", name, known)
        checks.number(f"{what} of {name!r}", value, least)
    return [values.get(a, values.get(b)) for a, b in zip(labels, names, strict=True)]


def _once(row: dict[str, Any]) -> int:
    """Return the bytes of a sweep's row if each kernel moves each of its tensors once."""
    names = ("n_q", "n_kv", "head_dim", "head_dim_v", "batch", "heads", "kv_heads", "dtype")
    problem = Problem(**{name: row[name] for name in names})
    return traffic.once(problem, row["algorithm"], row["direction"])


def _labels(rows: list[dict[str, Any]]) -> list[str]:
    """Return the labels of a sweep's points: the algorithm, and values in which points differ."""
    words = {"direction": "{}", "n_q": "N = {:,}", "head_dim": "d = {}", "causal": "causal: {}"}
    words["kv_heads"] = "{} KV heads"
    telling = [name for name in words if len({row[name] for row in rows}) > 1]
    return [
        ", ".join([sources.title(row["algorithm"]), *(words[t].format(row[t]) for t in telling)])
        for row in rows
    ]


def _axes(
    ax: Axes, reach: tuple[float, float], bottom: float | None, top: float, work: str
) -> None:
    """Set up logarithmic axes: intensity in x, and FLOP/s from `bottom` to `top` in y."""
    ax.set(xscale="log", yscale="log", xlim=reach, ylabel="FLOP/s")
    ax.set_xlabel(f"{work} per byte of HBM")
    ax.set_ylim(bottom, top)
    unit_axis(ax.yaxis, "FLOP/s")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.grid()


def _strip(ax: Axes, theme: Theme, share: float) -> None:
    """Reserve a strip (`share` of the axes' height) for algorithms without a measured time."""
    floor, top = ax.get_ylim()
    ticks = [tick for tick in ax.get_yticks() if floor <= tick <= top]
    bottom = top * (floor / top) ** (1 / (1 - share))
    ax.axhspan(bottom, floor, facecolor=theme.panel, zorder=0)
    ax.set_ylim(bottom, top)
    ax.set_yticks(ticks)
    look: dict[str, Any] = {"color": theme.muted, "va": "top", "fontsize": 11}
    note(ax, "intensity only", (0, share), (6, -4), "axes fraction", **look)


@themed
def roofline_series(
    data: Mapping[str, Sequence[tuple[str, float, float]]],
    *,
    device: str | Device,
    dtype: str = "bfloat16",
    ax: Axes,
    theme: Theme,
) -> None:
    """Draw kernels at several problem sizes, each at its intensity and its measured FLOP/s.

    Parameters
    ----------
    data : mapping of str to sequence of (str, float, float)
        By series: the name of each point, its FLOPs per byte, and the FLOP/s it achieved.
    device : str or Device
        The device whose HBM bandwidth and peak for `dtype` form the roof. The axis at the right is
        in per cent of that peak.
    dtype : str

    Raises
    ------
    OptionError
        If there is no point, or a value is not positive.
    """
    machine = Device.get(device)
    points = [p for series in data.values() for p in series]
    if not points or min(min(p[1:]) for p in points) <= 0:
        raise OptionError(
            "a roofline needs points (name, FLOP/B, FLOP/s), with both numbers positive"
        )
    peak, ridge = machine.peak(dtype), machine.ridge(dtype)
    low = min(ridge / 4, *(p[1] for p in points)) / 2
    high = max(ridge * 4, *(p[1] for p in points)) * 2
    reach = np.geomspace(low, high, 200)
    ax.plot(reach, np.minimum(reach * machine.hbm_bandwidth, peak), color=theme.text, lw=2.4)
    roofs = f"{human(peak, 'FLOP/s')} in {dtype}, HBM {human(machine.hbm_bandwidth, 'B/s')}"
    note(ax, roofs, (high, peak), (-4, 8), color=theme.muted, ha="right", fontsize=11)
    for n, (label, series) in enumerate(data.items()):
        at, achieved = [p[1] for p in series], [p[2] for p in series]
        name, _, last = series[-1]
        text = f"{label}\n{name}: {100 * last / peak:.3g} % of peak"
        ax.plot(at, achieved, label=text, lw=1.8, zorder=3, **series_style(theme, n))
    _axes(ax, (low, high), None, peak * 2, "FLOP")
    to_share: Any = (lambda y: 100 * y / peak, lambda share: share * peak / 100)
    shares = ax.secondary_yaxis("right", functions=to_share)
    unit_axis(shares.yaxis, "%")
    shares.yaxis.set_minor_locator(NullLocator())
    shares.set_yticks(
        [share for share in (0.1, 1, 10, 100) if ax.get_ylim()[0] < peak * share / 100]
    )
    names = list(dict.fromkeys(p[0] for p in points))
    about = f"{names[0]} to {names[-1]} along each line; right axis: per cent of the peak"
    heading(ax, theme, f"Measured speed below the roofline of {machine.name}", about)
    beside_axes(ax, bbox_to_anchor=(1.16, 1.08), fontsize=10.5)
