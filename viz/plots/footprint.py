"""A plot of the bytes in HBM that a forward pass saves for the backward pass, by length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes

from flashsim.counts import traffic
from flashsim.errors import OptionError
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme
from flashsim.viz.style import count_axis, heading, human, series_style, themed, unit_axis


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
        points = {r["n_q"]: r["saved_bytes"] for r in rows if r["algorithm"] == name}
        sizes = sorted(points)
        ax.plot(
            sizes, [points[size] for size in sizes], label=sources.title(name),
            **series_style(theme, number),
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
        ax,
        theme,
        "Saved for backward: Q, K, V, O and statistics, or Q, K, V and P",
        sources.fixed(rows, "n_q"),
    )
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
