"""Series of timed kernels on a device's roof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from flashsim.errors import OptionError
from flashsim.problem.hardware import Device
from flashsim.viz.palette import Theme
from flashsim.viz.style import DASHES, MARKERS, heading, human, themed, unit_axis


@themed
def roofline_series(
    data: Mapping[str, Sequence[tuple[str, float, float]]],
    *,
    device: str | Device,
    dtype: str = "bfloat16",
    ax: Axes,
    theme: Theme,
) -> None:
    """Kernels at several sizes, each where its intensity and its measured speed put it.

    Parameters
    ----------
    data : mapping of str to sequence of (str, float, float)
        By series: what a point is called, FLOPs for each byte, and FLOP/s achieved.
    device : str or Device
        Whose roof: HBM bandwidth, and the peak for `dtype`; the axis at the right has per cent of
        that peak.
    dtype : str
    ax, theme
        See `themed`.

    Raises
    ------
    OptionError
        If there is no point, or one is not positive.
    """
    machine = Device.get(device)
    points = [p for series in data.values() for p in series]
    if not points or min(min(p[1:]) for p in points) <= 0:
        raise OptionError("a roofline takes points (name, FLOP/B, FLOP/s), both positive")
    peak, ridge = machine.peak(dtype), machine.ridge(dtype)
    low = min(ridge / 4, *(p[1] for p in points)) / 2
    high = max(ridge * 4, *(p[1] for p in points)) * 2
    reach = np.geomspace(low, high, 200)
    ax.plot(reach, np.minimum(reach * machine.hbm_bandwidth, peak), color=theme.text, lw=2.4)
    roofs = f"{human(peak, 'FLOP/s')} in {dtype}, HBM {human(machine.hbm_bandwidth, 'B/s')}"
    ax.annotate(
        roofs, (high, peak), (-4, 8),
        textcoords="offset points", color=theme.muted, ha="right", fontsize=11,
    )  # fmt: skip
    for n, (label, series) in enumerate(data.items()):
        at, achieved = [p[1] for p in series], [p[2] for p in series]
        shade = theme.cycle[n % len(theme.cycle)]
        name, _, last = series[-1]
        text = f"{label}\n{name}: {100 * last / peak:.3g} % of peak"
        ax.plot(
            at, achieved, label=text, color=shade, marker=MARKERS[n % len(MARKERS)],
            ls=DASHES[n % len(DASHES)], lw=1.8, zorder=3,
        )  # fmt: skip
    ax.set(
        xscale="log", yscale="log", xlim=(low, high), xlabel="FLOP per byte of HBM",
        ylabel="FLOP/s",
    )  # fmt: skip
    ax.set_ylim(top=peak * 2)
    unit_axis(ax.yaxis, "FLOP/s")
    ax.yaxis.set_minor_locator(NullLocator())
    to_share: Any = (lambda y: 100 * y / peak, lambda share: share * peak / 100)
    shares = ax.secondary_yaxis("right", functions=to_share)
    unit_axis(shares.yaxis, "%")
    shares.yaxis.set_minor_locator(NullLocator())
    ax.grid()
    names = list(dict.fromkeys(p[0] for p in points))
    about = f"{names[0]} to {names[-1]} along each line; right, per cent of the peak"
    heading(ax, theme, f"Measured, on the roof of {machine.name}", about)
    ax.legend(loc="upper left", bbox_to_anchor=(1.16, 1.08), fontsize=10.5)
