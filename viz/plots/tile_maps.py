"""The map of score tiles: which are visited, in which order, and what each one costs."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from flashsim.errors import OptionError, choices
from flashsim.schedule.schedule import Schedule
from flashsim.viz.data import sources
from flashsim.viz.data.diagram import CUT, corners, tile_kinds
from flashsim.viz.data.steps import Steps
from flashsim.viz.palette import Theme
from flashsim.viz.style import HATCH, heading, human, ink_on, ramp, themed, unit_axis

QUANTITIES = ("order", "bytes", "flops")
_UNITS = {"order": "visit number", "bytes": "requested HBM bytes", "flops": "FLOPs"}
_LABELS_UP_TO = 17  # tiles a side, beyond which numbers in the cells no longer read


@themed
def tile_map(
    data: Any, *, color: str = "order", stage: str | None = None, ax: Axes, theme: Theme
) -> None:
    """The grid of score tiles of one head.

    Tiles that the mask cuts are marked in the corner that it takes (upper right: keys still to
    come; lower left: keys that a window has left behind), tiles that are skipped are hatched, full
    ones are plain. ``ax.images[0]`` holds the values, (T_r, T_c), NaN where a tile is skipped.

    Parameters
    ----------
    data : Trace, Result or Gradients
    color : {"order", "bytes", "flops"}
        Visit number; bytes that the visits of a tile moved (transfers of a whole row or column
        belong to no tile); FLOPs.
    stage : str, optional
        Default: the one with the most visits.
    ax, theme
        See `themed`.
    """
    if color not in QUANTITIES:
        raise OptionError(f"unknown color {color!r}; {choices(color, QUANTITIES)}")
    trace = sources.one_trace(data)
    part = trace.main_stage if stage is None else trace.stage(stage)
    walk, schedule = Steps(trace), part.schedule
    number = [s.name for s in trace.stages].index(part.name)
    grid = tile_values(walk, schedule, number, color)
    ax.set_facecolor(theme.panel)
    t_r, t_c = grid.shape
    skipped: dict[str, Any] = {
        "facecolor": theme.panel, "edgecolor": theme.grid, "hatch": HATCH, "lw": 0,
    }  # fmt: skip
    ax.add_patch(Rectangle((-0.5, -0.5), t_c, t_r, zorder=1, **skipped))  # what no tile covers
    low = 0.0 if color != "order" else None
    image = ax.imshow(
        grid, cmap=ramp(theme), vmin=low, interpolation="nearest", aspect="auto", zorder=2
    )
    kinds = tile_kinds(schedule)
    # As wide as high on a slide, where the grid is about twice as wide as high.
    high = 0.5 if max(t_r, t_c) > _LABELS_UP_TO else 0.42
    wide = min(0.95, high * t_c / t_r / 1.8)
    triangles = []
    for i, j, upper in corners(kinds):
        sign = 1 if upper else -1  # the tip is upper right, or lower left
        x, y = j + 0.5 * sign, i - 0.5 * sign
        triangles.append([(x - wide * sign, y), (x, y), (x, y + high * sign)])
    masked = PolyCollection(triangles, facecolor=theme.accent, zorder=3, label="masked")
    masked.set(edgecolor=theme.background, linewidth=min(0.8, 20 / max(t_r, t_c)))
    ax.add_collection(masked)  # a corner, so that the number in the tile stays legible
    if max(t_r, t_c) <= _LABELS_UP_TO:
        _write_values(ax, grid, color)
    seen, cut = int(np.isfinite(grid).sum()), int((kinds >= CUT).sum())
    handles = [Patch(facecolor=ramp(theme)(0.5), label=f"full: {seen - cut:,}")]
    if cut:
        handles.append(Patch(facecolor=theme.accent, label=f"masked (corner): {cut:,}"))
    if seen < grid.size:
        handles.append(Patch(label=f"skipped: {grid.size - seen:,}", **skipped))
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(handles))
    bar = ax.figure.colorbar(image, ax=ax, label=_UNITS[color], pad=0.02)
    bar.outline.set_visible(False)
    if color != "order":
        unit_axis(bar.ax.yaxis, "B" if color == "bytes" else "FLOP")
    ax.set(
        xlabel=f"key tile j ({schedule.tiling.block_k} keys each)",
        ylabel=f"query tile i ({schedule.tiling.block_q} queries each)",
    )
    title = f"{sources.NAMES[trace.algorithm]} {trace.direction}: {schedule.outer} outside"
    heading(ax, theme, title, sources.common([trace]))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)


def tile_values(walk: Steps, schedule: Schedule, stage: int, quantity: str) -> np.ndarray:
    """float (T_r, T_c): the quantity of each tile of a stage, NaN where it is not visited."""
    chosen = (walk.stage == stage) & (walk.visit >= 0)
    i, j = walk.i[chosen], walk.j[chosen]
    grid = np.full((schedule.t_r, schedule.t_c), np.nan)
    if quantity == "order":
        # A group's heads visit a tile one after another; its first visit counts.
        grid[i[::-1], j[::-1]] = walk.order[chosen][::-1]
        return grid
    grid[i, j] = 0
    if quantity == "flops":
        np.add.at(grid, (i, j), walk.step_flops[chosen])
        return grid
    events = walk.events[walk.events["stage"] == stage]
    moved = events[(events["level"] == 0) & (events["i"] >= 0) & (events["j"] >= 0)]
    np.add.at(grid, (moved["i"], moved["j"]), moved["bytes"])
    return grid


def _write_values(ax: Axes, grid: np.ndarray, quantity: str) -> None:
    image = ax.images[0]
    # A value is wider than a visit's number, and must not reach the marked corner.
    size = min(13, (150 if quantity == "order" else 110) / max(grid.shape))
    for i, j in np.argwhere(np.isfinite(grid)):
        text = f"{grid[i, j]:.0f}" if quantity == "order" else human(grid[i, j], "")
        ax.text(
            j, i, text, ha="center", va="center", fontsize=size, zorder=4,
            color=ink_on(image.cmap(image.norm(grid[i, j]))),
        )  # fmt: skip
