"""A plot of DRAM bytes against the size of the L2 cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from flashsim.errors import OptionError
from flashsim.l2.curve import Curve
from flashsim.problem.hardware import MIB, Device
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme
from flashsim.viz.style import DASHES, binary_axis, heading, themed, unit_axis

POINTS = 600


@themed
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
        ax.plot(
            sizes, curve.reads(sizes), drawstyle="steps-post", label=label,
            color=theme.cycle[n % len(theme.cycle)], ls=DASHES[n % len(DASHES)],
        )  # fmt: skip
    for height in sorted({c.cold for c in curves.values()}):
        ax.axhline(height, color=theme.muted, lw=1.2, zorder=1)
    for n, machine in enumerate(sorted(machines, key=lambda m: m.l2_bytes)):
        side = ("right", "left")[n % 2]  # so that names of neighbouring lines do not overlap
        ax.axvline(machine.l2_bytes, color=theme.muted, lw=1.2, ls=(0, (3, 3)), zorder=1)
        ax.annotate(
            machine.name, (machine.l2_bytes, 1), xycoords=("data", "axes fraction"),
            xytext=(4 if n % 2 else -4, -6), textcoords="offset points", rotation=90, ha=side,
            va="top",
            color=theme.muted,
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(sizes[0], sizes[-1])
    binary_axis(ax.xaxis)
    ax.minorticks_off()
    unit_axis(ax.yaxis)
    ax.grid()
    ax.set(xlabel="size of L2", ylabel="DRAM bytes read")
    heading(
        ax, theme, "DRAM reads against the size of L2", "horizontal line: each input is read once"
    )
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
