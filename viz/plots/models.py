"""Plots against models: IO curves with the papers' bounds, the roofline, what training saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from matplotlib.transforms import blended_transform_factory

from flashsim.counts import bounds, traffic
from flashsim.errors import OptionError, choices
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme
from flashsim.viz.style import (
    DASHES,
    MARKERS,
    binary_axis,
    count_axis,
    heading,
    human,
    themed,
    unit_axis,
)

#: What an IO curve can run over: columns of a sweep, and what to call them.
AXES = {
    "n_q": "sequence length N",
    "head_dim": "head dimension d",
    "block_q": "query rows in a tile",
    "block_k": "key columns in a tile",
    "sram_bytes": "SRAM of a block, M",
}
_BAR = 0.07  # of a roofline's height, for each bar without one


@themed
def io_curve(data: Any, *, x: str | None = None, ax: Axes, theme: Theme) -> None:
    """Requested HBM bytes against N, d, a tile's side or M, with the papers' bounds.

    Drawn beside the counts, for the first FlashAttention series: the theorem's
    N² d² / M with one constant fitted to all points, the compulsory bytes (exact),
    and the lower bound of Saha and Ye with constant 1, which gives a slope and no level. Where
    bounds depend on more than `x`, each point uses its own values. Under a sliding window, work
    grows with N and neither of the two holds: the compulsory bytes stand alone.

    Parameters
    ----------
    data : Sweep, DataFrame, list of rows, or a list of Traffic or Trace
    x : str, optional
        One of `AXES`; default: the first of them that varies.
    ax, theme
        See `themed`.

    Raises
    ------
    OptionError
        If `x` is unknown, or nothing varies.
    """
    rows = sources.rows(data)
    x = _varying(rows) if x is None else x
    if x not in AXES:
        raise OptionError(f"unknown x {x!r}; {choices(x, AXES)}")
    series = _series(rows, x)
    place = sources.places(points[0]["algorithm"] for points in series.values())
    for n, (label, points) in sorted(zip(place, series.items(), strict=True)):
        ax.plot(
            [p[x] for p in points], [p["requested_bytes"] for p in points], label=label,
            color=theme.cycle[n % len(theme.cycle)], marker=MARKERS[n % len(MARKERS)],
            ls=DASHES[n % len(DASHES)], zorder=3,
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
    heading(ax, theme, f"HBM traffic against {AXES[x]}", _fixed(rows, x))
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _bounds(points: list[dict[str, Any]], x: str, among: bool, ax: Axes, theme: Theme) -> None:
    """Draw the bounds of a series; `among` several, the fit says of which."""
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


def _fixed(rows: Sequence[dict[str, Any]], x: str) -> str:
    """What is the same at every point, in words."""
    words = {
        "batch": "batch {}", "heads": "{}", "n_q": "N = {:,}", "head_dim": "d = {}",
        "dtype": "{}", "causal": "causal", "window": "window {}", "direction": "{}", "device": "{}",
    }  # fmt: skip
    if x.startswith("block"):
        other = {"block_q": "block_k", "block_k": "block_q"}[x]
        words[other] = f"{other} = {{}}"
    # These go without saying.
    one = {"batch": 1, "heads": "1 head", "causal": False, "window": None, "direction": "forward"}
    found = {key: {row[key] for row in rows} for key in words if key in rows[0] and key != x}
    found["heads"] = {_heads(row) for row in rows}
    return ", ".join(
        words[key].format(value.replace(",", ":") if key == "window" else value)
        for key, values in found.items()
        if len(values) == 1
        for value in values
        if value != one.get(key)
    )


def _heads(row: dict[str, Any]) -> str:
    return sources.heads(row["heads"], row["kv_heads"])


def _varying(rows: Sequence[dict[str, Any]]) -> str:
    for name in AXES:
        if len({row[name] for row in rows}) > 1:
            return name
    raise OptionError(
        f"an IO curve needs points that differ in one of {', '.join(AXES)}; all are equal here"
    )


def _series(rows: Iterable[dict[str, Any]], x: str) -> dict[str, list[dict[str, Any]]]:
    """Rows by what else differs between them, each series in order of x."""
    rows = list(rows)
    # A tile that was fitted, or a machine's M, follows x; it makes no series of its own.
    follows = {"block_q", "block_k", "n_kv", "sram_bytes", "head_dim_v", x}
    if x.startswith("block"):
        follows -= {"block_q", "block_k"} - {x}
    if x == "sram_bytes":  # a device with another M has another name
        follows.add("device")
    names = ("direction", "dtype", "causal", "window", "kv_heads", "device", *AXES)
    telling = [k for k in names if k not in follows and len({row[k] for row in rows}) > 1]
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row[x]):
        window = row["window"]
        words = {
            "causal": "causal" if row["causal"] else "not causal",
            "window": f"window {window.replace(',', ':')}" if window else "no window",
            "kv_heads": _heads(row),
        }
        label = [sources.title(row["algorithm"])]
        label += [words.get(k) or (f"{k} = {row[k]}" if k in AXES else row[k]) for k in telling]
        found.setdefault(", ".join(label), []).append(row)
    return found


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
    """Algorithms on a device's roofs.

    Each algorithm is a bar between two intensities, matrix FLOPs over bytes: hollow, if every
    requested byte came from HBM; filled, if the L2 cache were perfect within each kernel, so that
    a kernel read and wrote each of its tensors once (`counts.traffic.once`). Standard attention's
    N x N matrices cross HBM between its kernels even then. The truth lies between; `dram_bytes`
    says where, and a diamond marks it. `seconds` says what was measured, and that is the bar's
    height. Without it a bar has none: it lies in a strip below the axis' figures, and its ends
    stand on the roof.

    Parameters
    ----------
    data : Trace, Traffic, Result, Comparison, Sweep, or a list or dict of them
    device : str or Device, optional
        Default: the first source's.
    seconds : dict, optional
        Measured time by label (of `data`'s dict, or an algorithm's name).
    dram_bytes : dict, optional
        DRAM bytes by label or algorithm: measured, or what `flashsim.l2` predicts.
    ax, theme
        See `themed`.
    """
    rows = sources.rows(data)
    machine = Device.get(device or rows[0]["device"])
    dtype = rows[0]["dtype"]
    labels = _labels(rows) if hasattr(data, "rows") else list(sources.labelled(data))
    peak, cuda = machine.peak(dtype), machine.peak(dtype, tensor_cores=False)
    spots = [
        (
            row["matmul_flops"] / row["requested_bytes"],
            row["matmul_flops"] / (row.get("once_bytes") or _once(row)),
        )
        for row in rows
    ]
    # Two decades of roof at least, so that slopes show and ticks are powers of ten.
    low = min(min(min(s) for s in spots) / 4, machine.ridge(dtype) / 200)
    high = max(max(max(s) for s in spots), machine.ridge(dtype)) * 4
    reach = np.geomspace(low, high, 200)
    roof = np.minimum(reach * machine.hbm_bandwidth, peak)
    ax.plot(
        reach, roof, color=theme.text, lw=2.4, label=f"HBM {human(machine.hbm_bandwidth, 'B/s')}"
    )
    ax.annotate(
        f"peak {human(peak, 'FLOP/s')}, {dtype}", (high, peak), (-4, 12),
        textcoords="offset points", color=theme.muted, ha="right",
    )  # fmt: skip
    if cuda < peak:
        ax.axhline(cuda, color=theme.muted, ls=(0, (1, 1.2)), lw=1.4)
        ax.annotate(
            f"without tensor cores {human(cuda, 'FLOP/s')}", (high, cuda), (-4, -6),
            textcoords="offset points", color=theme.muted, ha="right", va="top",
        )  # fmt: skip
    if machine.l2_bandwidth:
        below = reach[reach * machine.l2_bandwidth < peak]  # beyond, it is the roof itself
        ax.plot(
            below, below * machine.l2_bandwidth, color=theme.muted, lw=1.4, ls=(0, (6, 3)),
            label=f"L2 {human(machine.l2_bandwidth, 'B/s')}",
        )  # fmt: skip
    places = sources.places(row["algorithm"] for row in rows)
    times = [
        (seconds or {}).get(l, (seconds or {}).get(r["algorithm"]))
        for l, r in zip(labels, rows, strict=True)
    ]
    left = [
        (dram_bytes or {}).get(l, (dram_bytes or {}).get(r["algorithm"]))
        for l, r in zip(labels, rows, strict=True)
    ]
    unmeasured = bars = times.count(None)
    for n, (row, spot, place) in enumerate(zip(rows, spots, places, strict=True)):
        label, took = labels[n], times[n]
        height = [min(intensity * machine.hbm_bandwidth, peak) for intensity in spot]
        if took is not None:
            height = [row["matmul_flops"] / took] * 2
        style: dict[str, Any] = {
            "color": theme.cycle[place % len(theme.cycle)], "marker": MARKERS[place % len(MARKERS)],
            "ls": "none", "zorder": 4,
        }  # fmt: skip
        hollow = {**style, "mfc": theme.background, "mew": 2, "ms": 10}
        ax.plot(spot[:1], height[:1], **hollow)
        # Perfect caches often give all algorithms one point: marks shrink, so each is seen.
        text = label + (" (measured)" if took is not None else "")
        ax.plot(spot[1:], height[1:], **style, ms=max(15 - 4 * n, 5))
        where: dict[str, Any] = {"transform": blended_transform_factory(ax.transData, ax.transAxes)}
        level = [_BAR * (unmeasured - 0.5)] * 2
        if took is not None:
            where, level = {}, height
        else:
            unmeasured -= 1
        ax.plot(spot, level, color=style["color"], lw=5, alpha=0.35, zorder=3, **where)
        nbytes = left[n]
        if nbytes is not None:
            x = row["matmul_flops"] / nbytes
            y = min(x * machine.hbm_bandwidth, peak) if took is None else height[0]
            diamond: dict[str, Any] = {
                "marker": "D", "ls": "none", "ms": 8, "mec": theme.background, "zorder": 5,
            }  # fmt: skip
            ax.plot([x], [y], color=theme.text, **diamond)
            ax.plot([x], level[:1], color=theme.text, **diamond, **where)
        ax.plot(spot[:1], level[:1], **hollow, **where)
        ax.plot(spot[1:], level[1:], **style, ms=10, label=text, **where)
    ax.set(
        xscale="log", yscale="log", xlim=(low, high), xlabel="matrix FLOP per byte of HBM",
        ylabel="FLOP/s",
    )  # fmt: skip
    ax.set_ylim(top=peak * 2.2)
    ax.yaxis.set_minor_locator(NullLocator())
    if bars:
        _strip(ax, theme, bars * _BAR)
    heading(ax, theme, f"Roofline of {machine.name}", _fixed(rows, "device"))
    unit_axis(ax.yaxis, "FLOP/s")
    ax.grid()
    ax.legend(
        loc="upper left",
        bbox_to_anchor=(1, 1),
        title="hollow: all bytes from HBM\nfilled: L2 perfect in each kernel"
        + ("\ndiamond: DRAM bytes" if dram_bytes else ""),
    )


def _once(row: dict[str, Any]) -> int:
    """`counts.traffic.once` of a sweep's row."""
    names = ("n_q", "n_kv", "head_dim", "head_dim_v", "batch", "heads", "kv_heads", "dtype")
    problem = Problem(**{name: row[name] for name in names})
    return traffic.once(problem, row["algorithm"], row["direction"])


def _labels(rows: list[dict[str, Any]]) -> list[str]:
    """Of each point of a sweep: its algorithm, and what else differs between them."""
    words = {"direction": "{}", "n_q": "N = {:,}", "head_dim": "d = {}", "causal": "causal: {}"}
    words["kv_heads"] = "{} key heads"
    telling = [name for name in words if len({row[name] for row in rows}) > 1]
    return [
        ", ".join([sources.title(row["algorithm"]), *(words[t].format(row[t]) for t in telling)])
        for row in rows
    ]


def _strip(ax: Axes, theme: Theme, share: float) -> None:
    """Room for bars without a height, `share` of the axes: below all roofs, without ticks."""
    floor, top = ax.get_ylim()
    ticks = [tick for tick in ax.get_yticks() if floor <= tick <= top]
    bottom = top * (floor / top) ** (1 / (1 - share))
    ax.axhspan(bottom, floor, facecolor=theme.panel, zorder=0)
    ax.set_ylim(bottom, top)
    ax.set_yticks(ticks)
    ax.annotate(
        "intensity only", (0, share), (6, -4), xycoords="axes fraction",
        textcoords="offset points", color=theme.muted, va="top", fontsize=11,
    )  # fmt: skip


@themed
def memory_footprint(
    data: Any,
    *,
    n: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    algorithms: Sequence[str] = ("standard", "flash1", "flash2"),
    device: str | Device | None = None,
    ax: Axes,
    theme: Theme,
) -> None:
    """What a training step keeps in HBM from the forward to the backward pass, against N.

    Parameters
    ----------
    data : Problem or Sweep (or rows)
        Of a problem, everything but its lengths is used, with `n` and `algorithms`.
    n : sequence of int
    algorithms : sequence of str
    device : str or Device, optional
        Draw its HBM capacity.
    ax, theme
        See `themed`.
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
    drawn = {row["algorithm"] for row in rows}
    ends: list[tuple[int, int]] = []
    for number, name in enumerate(sources.NAMES):
        if name not in drawn:
            continue
        points = {r["n_q"]: r["saved_bytes"] for r in rows if r["algorithm"] == name}
        sizes = sorted(points)
        ax.plot(
            sizes, [points[size] for size in sizes], marker=MARKERS[number],
            ls=DASHES[number], color=theme.cycle[number], label=sources.title(name),
        )  # fmt: skip
        ends.append((sizes[-1], points[sizes[-1]]))
    for close in _close(ends):
        texts = dict.fromkeys(human(saved) for _, saved in close)
        ax.annotate(
            "\n".join(reversed(texts)), close[-1], (8, 0), textcoords="offset points", va="center",
        )  # fmt: skip
    if device is not None:
        machine = Device.get(device)
        ax.axhline(machine.hbm_bytes, color=theme.text, ls=(0, (5, 3)), lw=1.6)
        ax.annotate(
            f"{machine.name}: {human(machine.hbm_bytes)}", (0, machine.hbm_bytes), (6, 5),
            xycoords=("axes fraction", "data"), textcoords="offset points",
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sorted({row["n_q"] for row in rows}))
    ax.minorticks_off()
    ax.margins(x=0.12)
    count_axis(ax.xaxis)
    unit_axis(ax.yaxis)
    ax.grid()
    ax.set(xlabel="sequence length N", ylabel="bytes saved for backward")
    heading(
        ax, theme, "What training keeps: inputs, output and statistics, or P", _fixed(rows, "n_q")
    )
    ax.legend(loc="lower right")


def _close(ends: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Ends of lines, (x, y), in groups whose y would be written over each other."""
    groups: list[list[tuple[int, int]]] = []
    for x, y in sorted(ends):
        if groups and groups[-1][-1][0] == x and y < 1.3 * groups[-1][-1][1]:
            groups[-1].append((x, y))
        else:
            groups.append([(x, y)])
    return groups
