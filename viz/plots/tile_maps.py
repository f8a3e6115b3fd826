"""Plots of the score matrix: what the mask keeps, and the order and cost of computed tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from flashsim.errors import DTypeError, OptionError, shown
from flashsim.problem import checks
from flashsim.problem.problem import Problem
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling
from flashsim.trace.steps import Steps
from flashsim.viz.data import sources
from flashsim.viz.data.diagram import CUT, corners, page_edges, part_edges, part_numbers, tile_kinds
from flashsim.viz.palette import Theme
from flashsim.viz.style import HATCH, heading, human, ink_on, ramp, themed, unit_axis

QUANTITIES = ("order", "bytes", "flops", "block")
_UNITS = {"order": "visit number", "bytes": "requested HBM bytes", "flops": "FLOPs"}
_UNITS["block"] = "thread block"
_LABELS_UP_TO = 17  # tiles per side; with more, numbers in the cells are not readable
_SKIPPED, _WASTED, _KEPT = range(3)
_MOST_SCORES = 1 << 22


@themed
def tile_map(
    data: Any, *, color: str = "order", stage: str | None = None, ax: Axes, theme: Theme
) -> None:
    """Draw the grid of score tiles of one head.

    A partly masked tile has a mark in the corner that the mask removes: the upper right under a
    causal mask, the lower left under a sliding window. Skipped tiles are hatched. A line separates
    splits of the keys, and a tick at the upper edge marks the start of a KV-cache page.
    ``ax.images[0]`` holds the tiles' values, an array of shape (T_r, T_c), with NaN for skipped
    tiles.

    Parameters
    ----------
    data : Trace, Result or Gradients
    color : {"order", "bytes", "flops", "block"}
        "order": the number of the visit. "bytes": bytes moved while the tile is visited (transfers
        of a whole row or column belong to no tile). "flops": FLOPs. "block": the thread block that
        works on the tile.
    stage : str, optional
        Default: the stage with the most visits.
    """
    checks.one_of("color", color, QUANTITIES)
    trace = sources.one_trace(data)
    part = trace.main_stage if stage is None else trace.stage(stage)
    walk, schedule = Steps(trace), part.schedule
    number = [s.name for s in trace.stages].index(part.name)
    kinds = tile_kinds(schedule)  # first, because it raises an error if the grid is too fine
    if color == "block":
        blocks = part_numbers(schedule)
        grid = np.where(blocks < 0, np.nan, blocks)
    else:
        grid = tile_values(walk, schedule, number, color)
    ax.set_facecolor(theme.panel)
    t_r, t_c = grid.shape
    skipped = _skipped(theme)
    ax.add_patch(Rectangle((-0.5, -0.5), t_c, t_r, zorder=1, **skipped))  # behind all tiles
    low = 0.0 if color != "order" else None
    image = ax.imshow(
        grid, cmap=ramp(theme), vmin=low, interpolation="nearest", aspect="auto", zorder=2
    )
    first, last = image.get_clim()
    if first == last:  # else the colour bar widens the range, after the number's ink is chosen
        image.set_clim(first - 0.5, last + 0.5)
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
    parts = [[(j - 0.5, i - 0.5), (j - 0.5, i + 0.5)] for i, j in part_edges(schedule)]
    ax.add_collection(LineCollection(parts, colors=theme.text, lw=3.5, zorder=5, label="parts"))
    pages = [[(x - 0.5, 0.96), (x - 0.5, 1.0)] for x in page_edges(schedule)]
    ticks = LineCollection(pages, colors=theme.text, lw=2, zorder=6, label="pages")
    ticks.set_transform(ax.get_xaxis_transform())  # y: of the Axes' height
    ticks.set_path_effects([Stroke(linewidth=5, foreground=theme.background), Normal()])
    ax.add_collection(ticks, autolim=False)
    seen, cut = int(np.isfinite(grid).sum()), int((kinds >= CUT).sum())
    handles: list[Any] = [Patch(facecolor=ramp(theme)(0.5), label=f"full: {seen - cut:,}")]
    if cut:
        handles.append(Patch(facecolor=theme.accent, label=f"masked (corner): {cut:,}"))
    if seen < grid.size:
        handles.append(Patch(label=f"skipped: {grid.size - seen:,}", **skipped))
    if parts:
        blocks_of_it = f"{int(schedule.part_counts.sum()):,} blocks, one per split"
        handles.append(Line2D([], [], color=theme.text, lw=3.5, label=blocks_of_it))
    if pages:
        page_of = f"start of a page of {trace.problem.page_size} keys"
        handles.append(Line2D([], [], color=theme.text, lw=1.5, label=page_of))
    columns = len(handles) if len(handles) < 5 else 3  # as wide as the grid
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=columns)
    bar = ax.figure.colorbar(image, ax=ax, label=_UNITS[color], pad=0.02)
    bar.outline.set_visible(False)
    if color in ("bytes", "flops"):
        unit_axis(bar.ax.yaxis, "B" if color == "bytes" else "FLOP")
    else:
        bar.locator = MaxNLocator(steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1)
        bar.formatter = ScalarFormatter(useOffset=False)
    ax.set(
        xlabel=f"key tile j ({_some(schedule.tiling.block_k, 'key')} each)",
        ylabel=f"query tile i ({_some(schedule.tiling.block_q, 'query', 'queries')} each)",
    )
    outer = {"queries": "Q-outer", "keys": "KV-outer"}[schedule.outer]
    title = f"{sources.title(trace.algorithm)} {trace.direction}, {outer} loops"
    heading(ax, theme, title, sources.common([trace]))
    _bare(ax)


@themed
def mask(
    problem: Problem, tiling: Tiling | None = None, *, bias: Any = None, ax: Axes, theme: Theme
) -> None:
    """Draw the scores that a mask keeps, and the tiles that kernels compute.

    Kernels skip tiles in which the mask keeps no score. In partly masked tiles, kernels compute
    every score, and then remove the masked scores. ``ax.images[0]`` holds the picture's pixels, an
    array of shape (n_q, n_kv, 4).

    Parameters
    ----------
    problem : Problem
        Its lengths and its mask are drawn, for one head.
    tiling : Tiling, optional
        Default: 32 x 32.
    bias : array_like of float, shape (n_q, n_kv), optional
        The bias added to each score; kept scores with a larger bias have a stronger shade.

    Raises
    ------
    OptionError
        If there are more than four million scores, or the bias has another shape.
    DTypeError
        If `problem` is not a Problem.
    """
    shape = (problem.n_q, problem.n_kv)
    if shape[0] * shape[1] > _MOST_SCORES:
        raise OptionError(
            f"a mask plot shows at most {_MOST_SCORES:,} single scores; got {shape[0]:,} x "
            f"{shape[1]:,}; draw a smaller problem with the same mask"
        )
    schedule = Schedule(problem, Tiling(32, 32) if tiling is None else tiling)
    scores = np.full(shape, _SKIPPED, np.uint8)
    ptr, columns, _ = schedule.row_csr
    for i, j in zip(np.repeat(range(schedule.t_r), np.diff(ptr)), columns, strict=True):
        keep = schedule.keep(i, j)
        scores[schedule.row_slice(i), schedule.col_slice(j)] = (
            _KEPT if keep is None else np.where(keep, _KEPT, _WASTED)
        )
    kept, wasted = int((scores == _KEPT).sum()), int((scores == _WASTED).sum())
    shades = np.full(shape, 0.5)
    if bias is not None:
        added = checks.as_array("bias", bias)
        if added.dtype.kind not in "bfiuV":  # V: bfloat16
            raise DTypeError(f"bias must be an array of numbers, got {shown(bias)}")
        added = added.astype(np.float64)
        if added.shape != shape:
            raise OptionError(f"bias must have one value per score, {shape}, got {added.shape}")
        seen = added[scores == _KEPT] if kept else added
        shades = (added - seen.min()) / (np.ptp(seen) or 1)
    faint = to_rgba(theme.accent, 0.55)
    picture = ramp(theme)(shades)
    picture[scores == _WASTED] = faint
    picture[scores == _SKIPPED] = 0
    skipped = _skipped(theme)
    box = (-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5)
    ax.add_patch(Rectangle((-0.5, -0.5), shape[1], shape[0], zorder=1, **skipped))
    ax.imshow(picture, interpolation="nearest", extent=box, zorder=2)
    lines: dict[str, Any] = {"color": theme.background, "lw": 0.8, "zorder": 3}
    ax.vlines(schedule.cols[:, 0] - 0.5, -0.5, shape[0] - 0.5, **lines)
    ax.hlines(schedule.rows[:, 0] - 0.5, -0.5, shape[1] - 0.5, **lines)
    tiles = schedule.t_r * schedule.t_c
    handles = [Patch(facecolor=ramp(theme)(0.5), label=f"kept: {_some(kept, 'score')}")]
    if wasted:
        handles.append(Patch(facecolor=faint, label=f"computed and masked: {wasted:,}"))
    if schedule.n_visits < tiles:
        left_out = f"skipped: {tiles - schedule.n_visits:,} of {tiles:,} tiles"
        handles.append(Patch(label=left_out, **skipped))
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1))
    ax.set(xlabel="key", ylabel="query")
    share = f"{kept / scores.size:.0%}"
    if 0 < kept < scores.size:  # neither none nor all of them
        share = {"0%": "under 1%", "100%": "over 99%"}.get(share, share)
    title = f"{_mask_name(problem)}: {share} of the scores are kept"
    about = f"tiles of {schedule.tiling.block_q} x {schedule.tiling.block_k}"
    heading(ax, theme, title, about)
    _bare(ax)


def _skipped(theme: Theme) -> dict[str, Any]:
    """Return the colours and hatching of tiles that are not computed."""
    return {"facecolor": theme.panel, "edgecolor": theme.grid, "hatch": HATCH, "lw": 0}


def _bare(ax: Axes) -> None:
    """Label the axes of tiles or scores with integers, and hide the axis lines."""
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    ax.spines[["left", "bottom"]].set_visible(False)


def _some(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun: "1 key", "64 keys"."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def _mask_name(p: Problem) -> str:
    """Return the name of a problem's mask, such as "causal", for the title."""
    words = []
    if p.block_mask is not None:
        words.append("block-sparse")
    names = [] if p.mask is None else [getattr(p.mask, "__name__", type(p.mask).__name__)]
    names += [] if p.mask_graph is None else [p.mask_graph.name]
    words += ["own mask" if name == "<lambda>" else name.replace("_", " ") for name in names]
    if p.window is not None:
        words.append(sources.window(p.window))
    if p.cu_seqlens_q is not None:
        words.append(f"{len(p.sequences)} packed sequences")
    if p.causal:
        words.append("causal")
    if p.bias:
        words.append("with a bias")
    name = ", ".join(words) or "no mask"
    return name[0].upper() + name[1:]


def tile_values(walk: Steps, schedule: Schedule, stage: int, quantity: str) -> np.ndarray:
    """Return a figure (such as bytes) per score tile, of shape (T_r, T_c); NaN if skipped."""
    chosen = (walk.stage == stage) & (walk.visit >= 0)
    i, j = walk.i[chosen], walk.j[chosen]
    grid = np.full((schedule.t_r, schedule.t_c), np.nan)
    if quantity == "order":
        # The heads of a group visit a tile one after another; the first visit is numbered.
        np.fmin.at(grid, (i, j), walk.order[chosen])
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
    counted = quantity in ("order", "block")
    size = min(13, (150 if counted else 110) / max(grid.shape))
    for i, j in np.argwhere(np.isfinite(grid)):
        text = f"{grid[i, j]:.0f}" if counted else human(grid[i, j], "")
        ax.text(
            j, i, text, ha="center", va="center", fontsize=size, zorder=4,
            color=ink_on(image.cmap(image.norm(grid[i, j]))),
        )  # fmt: skip
