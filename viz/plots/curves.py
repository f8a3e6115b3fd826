"""Plots of bytes against a length, a tile size, the SRAM size M or the size of L2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from flashsim.counts import bounds, traffic
from flashsim.errors import OptionError
from flashsim.l2.curve import Curve
from flashsim.problem import checks
from flashsim.problem.hardware import MIB, Device
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.viz import style
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme

#: Possible x axes of an IO curve: the column of a sweep, and the axis label.
AXES = {
    "n_q": "sequence length N",
    "head_dim": "head dimension d",
    "block_q": "query rows per tile",
    "block_k": "key columns per tile",
    "sram_bytes": "SRAM per block, M",
}


@style.themed
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
        If `x` is unknown, nothing varies, or several points of a line have one value of `x`.
    """
    rows = sources.rows(data)
    x = checks.one_of("x", _varying(rows) if x is None else x, AXES)
    series = _series(rows, x)
    positions = sources.places(points[0]["algorithm"] for points in series.values())
    for n, (label, points) in sorted(zip(positions, series.items(), strict=True)):
        at, moved = [p[x] for p in points], [p["requested_bytes"] for p in points]
        ax.plot(at, moved, label=label, zorder=3, **style.series_style(theme, n))
    reference = next(
        (points for points in series.values() if points[0]["algorithm"] != "standard"),
        next(iter(series.values())),
    )
    _bounds(reference, x, len(series) > 1, ax, theme)
    sizes = style.binary_axis if x == "sram_bytes" else style.count_axis
    _scales(ax, sizes, AXES[x], "requested HBM bytes", {row[x] for row in rows})
    style.heading(ax, theme, f"HBM traffic against {AXES[x]}", sources.fixed(rows, x))
    style.beside_axes(ax)


def _scales(
    ax: Axes, sizes: Callable[[Any], None], x: str, y: str, ticks: Iterable[int] = ()
) -> None:
    """Set up and label logarithmic axes: `sizes` formats the x axis, and y is in bytes."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    if ticks:
        ax.set_xticks(sorted(ticks))
    sizes(ax.xaxis)
    ax.minorticks_off()
    style.unit_axis(ax.yaxis)
    low, high = ax.get_ylim()
    if high < 30 * low:  # powers of ten alone would leave one label or none
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.grid()
    ax.set(xlabel=x, ylabel=y)


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
    if x.startswith("block"):
        follows.add("tiling")
    names = ("direction", "dtype", "causal", "window", "kv_heads", "device", *AXES, "tiling")
    telling = [k for k in names if k not in follows and len({row.get(k) for row in rows}) > 1]
    series: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row[x]):
        window = row["window"]
        words = {
            "causal": "causal" if row["causal"] else "not causal",
            "window": f"window {window.replace(',', ':')}" if window else "no window",
            "kv_heads": sources.heads(row["heads"], row["kv_heads"]),
            "tiling": f"tiles {row.get('tiling')}",
        }
        label = [sources.title(row["algorithm"])]
        label += [words.get(k) or (f"{k} = {row[k]}" if k in AXES else row[k]) for k in telling]
        series.setdefault(", ".join(label), []).append(row)
    for name, points in series.items():
        _one_per_place([point[x] for point in points], x, name)
    return series


def _one_per_place(places: list[Any], x: str, label: str) -> None:
    """Raise `OptionError` if two points of a line have the same value of `x`."""
    if twice := [place for place in places if places.count(place) > 1]:
        raise OptionError(
            f"the line of {label!r} would have {places.count(twice[0])} points at "
            f"{x}={twice[0]}; pass rows that differ only in {x} and the algorithm"
        )


@style.themed
def memory_footprint(
    data: Any,
    *,
    n: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    algorithms: Sequence[str] = ("standard", "flash1", "flash2"),
    device: str | Device | None = None,
    ax: Axes,
    theme: Theme,
) -> None:
    """Draw the bytes in HBM that the forward pass saves for the backward pass, by length N.

    Parameters
    ----------
    data : Problem or Sweep (or rows)
        For a problem, lengths `n` replace its own, and `algorithms` are drawn.
    n : sequence of int
    algorithms : sequence of str
    device : str or Device, optional
        A device whose HBM capacity is marked.
    """
    if isinstance(data, Problem):
        rows: list[dict[str, Any]] = [
            {
                "algorithm": name, "n_q": size, "saved_bytes": traffic.saved(problem, name),
                "batch": data.batch, "heads": data.heads, "kv_heads": data.kv_heads,
                "head_dim": data.head_dim, "dtype": data.dtype, "causal": data.causal,
            }
            for name in algorithms
            for size in n
            for problem in [replace(data, n_q=size, n_kv=size)]
        ]  # fmt: skip
    else:
        rows = sources.rows(data)
    if not rows:
        raise OptionError("nothing to draw: pass at least one length and one algorithm")
    drawn = {row["algorithm"] for row in rows}
    ends: list[tuple[int, int]] = []
    for number, name in enumerate(sources.NAMES):
        if name not in drawn:
            continue
        own = [r for r in rows if r["algorithm"] == name]
        points = {r["n_q"]: r["saved_bytes"] for r in own}
        _one_per_place([n for n, _ in {(r["n_q"], r["saved_bytes"]) for r in own}], "n_q", name)
        sizes = sorted(points)
        saved = [points[size] for size in sizes]
        ax.plot(sizes, saved, label=sources.title(name), **style.series_style(theme, number))
        ends.append((sizes[-1], points[sizes[-1]]))
    machine = None if device is None else Device.get(device)
    for close in _close(ends):
        texts = dict.fromkeys(style.human(saved) for _, saved in close)
        share = close[-1][1] / machine.hbm_bytes if machine is not None else 0.0
        place: Any = ((8, -6), "top") if 0.77 < share < 1.3 else ((8, 0), "center")  # off its line
        style.note(ax, "\n".join(reversed(texts)), close[-1], place[0], va=place[1])
    if machine is not None:
        ax.axhline(machine.hbm_bytes, color=theme.text, ls=(0, (5, 3)), lw=1.6)
        text, level = f"{machine.name}: {style.human(machine.hbm_bytes)}", (0, machine.hbm_bytes)
        style.note(ax, text, level, (6, 5), ("axes fraction", "data"))
    ticks = {row["n_q"] for row in rows}
    _scales(ax, style.count_axis, AXES["n_q"], "bytes saved for backward", ticks)
    ax.margins(x=0.12)
    title = "Saved for backward: Q, K, V, O and statistics, or Q, K, V and P"
    style.heading(ax, theme, title, sources.fixed(rows, "n_q"))
    ax.legend(loc="lower right")


def _close(ends: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Group the end points (x, y) of lines whose labels would overlap."""
    groups: list[list[tuple[int, int]]] = []
    for x, y in sorted(ends):
        if groups and groups[-1][-1][0] == x and y < 1.3 * groups[-1][-1][1]:
            groups[-1].append((x, y))
        else:
            groups.append([(x, y)])
    return groups


POINTS = 600


@style.themed
def l2_curve(
    curves: Mapping[str, Curve], *, devices: tuple[str | Device, ...] = (), ax: Axes, theme: Theme
) -> None:
    """Draw the bytes read from DRAM against the size of L2.

    The DRAM bytes fall in steps as L2 grows. Each step marks the smallest L2 size at which one more
    reuse of a tensor hits L2. Before the first step, all requested bytes come from DRAM. After the
    last step, only the first read of each byte comes from DRAM.

    Parameters
    ----------
    curves : mapping of str to flashsim.l2.Curve
        The result of `flashsim.l2.curves` (by stage), or curves with your own labels.
    devices : tuple of str or Device
        Devices whose L2 sizes are marked.

    Raises
    ------
    OptionError
        If there is no curve.
    """
    if not curves:
        raise OptionError(
            "nothing to draw: pass one or more results of flashsim.l2.curves, got none"
        )
    curves = {sources.writable("label", label): curve for label, curve in curves.items()}
    machines = [Device.get(device) for device in devices]
    ends = [c.enough() for c in curves.values()] + [m.l2_bytes for m in machines]
    largest = 2 * max(*ends, MIB)
    # The axis starts where the first curve begins to fall, and covers at least eight octaves.
    first = [int(c.steps[0]) for c in curves.values() if len(c.steps)]
    smallest = min([largest >> 8, *(max(size // 2, 1) for size in first)])
    sizes = np.unique(np.geomspace(smallest, largest, POINTS).astype(np.int64))
    for n, (label, curve) in enumerate(curves.items()):
        look = {**style.series_style(theme, n), "marker": ""}
        ax.plot(sizes, curve.reads(sizes), drawstyle="steps-post", label=label, **look)
    for height in sorted({c.cold for c in curves.values()}):
        ax.axhline(height, color=theme.muted, lw=1.2, zorder=1)
    for n, machine in enumerate(sorted(machines, key=lambda m: m.l2_bytes)):
        ax.axvline(machine.l2_bytes, color=theme.muted, lw=1.2, ls=(0, (3, 3)), zorder=1)
        # Sides alternate, so that names of neighbouring lines do not overlap.
        right, ha = (4, "left") if n % 2 else (-4, "right")
        style.note(
            ax, machine.name, (machine.l2_bytes, 1), (right, -6), ("data", "axes fraction"),
            rotation=90, ha=ha, va="top", color=theme.muted,
        )  # fmt: skip
    _scales(ax, style.binary_axis, "size of L2", "DRAM bytes read")
    ax.set_xlim(sizes[0], sizes[-1])
    about = "horizontal line: each input is read once"
    style.heading(ax, theme, "DRAM reads against the size of L2", about)
    style.beside_axes(ax)
