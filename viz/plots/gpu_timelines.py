"""A plot of a GPU's timeline: time in x, SMs in y, with a bar per phase or per thread block."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from flashsim.errors import OptionError, TraceError
from flashsim.problem import checks
from flashsim.trace import timeline
from flashsim.trace.events import PHASES, Structured
from flashsim.trace.timeline import Rows
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme
from flashsim.viz.palette import color as tensor_color
from flashsim.viz.style import beside_axes, heading, ink_on, ramp, themed

#: The tensor whose colour represents a phase: the tensor that the phase loads or computes.
_PHASE_TENSOR = {"load": "K", "scores": "S", "softmax": "P", "output": "O", "store": "L"}
COLORS = ("phase", "block")
_ROWS = 64  # more rows would be too thin to distinguish phases
_RASTER_FROM = 20_000  # spans beyond which a vector file would be too large to open
_SLIDE_INCHES = 8.0  # about the width of the axes on a slide


@themed
def gpu_timeline(
    data: Any,
    *,
    color: str | None = None,
    stage: str | None = None,
    sms: tuple[int, int] | None = None,
    times: tuple[float, float] | None = None,
    ax: Axes,
    theme: Theme,
) -> None:
    """Draw when each SM of a GPU was busy, and with which score tiles.

    Parameters
    ----------
    data : Trace, Result or Gradients
        The result of a run on a GPU with ``trace="timeline"``.
    color : {"phase", "block"}, optional
        "phase": each phase of a visit (one tile pair) has the colour of the tensor that it loads or
        computes. A pale bar behind the phases marks the visit, with the tile's number j (in a
        KV-outer loop: i) if there is space. Blocks that share an SM, the roles of a block and
        overlapping visits have separate rows. "block": one bar per thread block, shaded by its row
        (KV-outer: column) of tiles. Default: "phase" for up to 64 rows.
    stage : str, optional
        Default: the stage with the most visits.
    sms : (int, int), optional
        First and last SM shown; default: all.
    times : (float, float), optional
        Microseconds since the stage's first span; default: all.

    Raises
    ------
    TraceError
        If the trace has no timeline.
    OptionError
        For an unknown colour, or if nothing is shown.
    """
    if color is not None:
        checks.one_of("color", color, COLORS)
    trace = sources.one_trace(data)
    if trace.timeline is None:
        raise TraceError(
            'this trace has no timeline; run on a GPU backend with trace="timeline", or use '
            "viz.sram_timeline, which needs only a trace"
        )
    part = trace.main_stage if stage is None else trace.stage(stage)
    number = [s.name for s in trace.stages].index(part.name)
    spans = trace.timeline[trace.timeline["stage"] == number]
    if not len(spans):
        raise OptionError(
            f"the timeline has no span of stage {part.name!r}; pass another stage as stage="
        )
    placed = timeline.rows(trace, spans)
    start, end = ((spans[f] - spans["start_ns"].min()) / 1000 for f in ("start_ns", "end_ns"))
    shown = np.ones(len(spans), bool)
    first, last = sms or (spans["sm"].min(), spans["sm"].max())
    shown &= (spans["sm"] >= first) & (spans["sm"] <= last)
    low, high = times or (0.0, float(end[shown].max(initial=0)))
    shown &= (start < high) & (end > low)
    if not shown.any() or not low < high:
        raise OptionError(
            f"the timeline has no span of stage {part.name!r} on SMs {first} to {last} from "
            f"{low:g} to {high:g} µs; it covers SMs {spans['sm'].min()} to {spans['sm'].max()} and "
            f"0 to {end.max():.1f} µs"
        )
    placed = Rows(placed.block[shown], placed.slot[shown], placed.row[shown], placed.names)
    spans, bars = spans[shown], np.stack([start[shown], end[shown]], axis=1)
    busy = np.unique(spans["sm"])
    if color is None:
        color = "phase" if len(busy) * len(placed.names) <= _ROWS else "block"
    ax.set_xlim(low, high)
    ax.set_ylim(busy[-1] + 0.55, busy[0] - 0.55)
    outer = "j" if part.stage.outer == "keys" else "i"
    (_phases if color == "phase" else _blocks)(ax, theme, spans, bars, placed, outer)
    ax.set(xlabel="time, µs", ylabel="SM")
    _ticks(ax, busy, placed, color)
    many = "one SM" if len(busy) == 1 else f"{len(busy)} SMs"
    where = " on ".join(trace.provenance[x] for x in ("kernel", "gpu") if trace.provenance.get(x))
    title = f"{sources.title(trace.algorithm)}, stage {part.name}: {many}"
    heading(ax, theme, title, f"{sources.common([trace])}; {where}")


def _ticks(ax: Axes, busy: np.ndarray, placed: Rows, color: str) -> None:
    if len(busy) > 12:
        return
    rows = len(placed.names)
    if color == "block" or rows == 1 or len(busy) * rows > 20:
        ax.set_yticks(busy)
        return
    where = [sm - 0.45 + 0.9 * (n + 0.5) / rows for sm in busy for n in range(rows)]
    names = ["" if name == "visits" else name for name in placed.names]
    texts = [
        f"SM {sm}  {name}".rstrip() if n == 0 else name
        for sm in busy
        for n, name in enumerate(names)
    ]
    ax.set_yticks(where, texts, fontsize=10.5)
    ax.set_ylabel("")


def _phases(
    ax: Axes, theme: Theme, spans: Structured, bars: np.ndarray, placed: Rows, outer: str
) -> None:
    height = 0.9 / len(placed.names)
    top = spans["sm"] - 0.45 + placed.row * height
    handles = []
    for code, phase in enumerate(PHASES):
        chosen = spans["phase"] == code
        if not chosen.any():
            continue
        edge = (0.04 if phase == "visit" else 0.16) * height
        shade = theme.grid if phase == "visit" else tensor_color(_PHASE_TENSOR[phase], theme.name)
        drawn = _bars(bars[chosen], top[chosen] + edge, height - 2 * edge)
        collection = PolyCollection(list(drawn), facecolor=shade, edgecolor="none", label=phase)
        collection.set(zorder=1 + code, rasterized=len(spans) > _RASTER_FROM)
        ax.add_collection(collection)
        handles.append(Patch(facecolor=shade, label=phase))
    beside_axes(ax, handles=handles, title="phase")
    _number(ax, theme, spans, bars, top + height / 2, "i" if outer == "j" else "j")


def _number(
    ax: Axes, theme: Theme, spans: Structured, bars: np.ndarray, middle: np.ndarray, inner: str
) -> None:
    """Write the inner tile's number on the longest phase of each visit (tile pair), if it fits."""
    low, high = ax.get_xlim()
    room = 0.3 * (high - low) / _SLIDE_INCHES  # of two digits
    outputs = spans["phase"] == PHASES.index("output")
    if not outputs.any() or np.median(np.diff(bars[outputs])) < room:
        return
    ink = ink_on(tensor_color("O", theme.name))
    for (x0, x1), y, n in zip(bars[outputs], middle[outputs], spans[inner][outputs], strict=True):
        if x0 > low and x1 < high and x1 - x0 > room:
            look: dict[str, Any] = {"ha": "center", "va": "center", "color": ink, "zorder": 9}
            ax.text((x0 + x1) / 2, y, f"{inner} {n}", fontsize=10, **look)


def _blocks(
    ax: Axes, theme: Theme, spans: Structured, bars: np.ndarray, placed: Rows, outer: str
) -> None:
    """Draw one bar per thread block, from the time stamps of its last role (warpgroup).

    In a block with a producer warpgroup (which runs ahead), the last role is a consumer.
    """
    last = spans["role"] == spans["role"].max()
    spans, bars = spans[last], bars[last]
    placed = Rows(placed.block[last], placed.slot[last], placed.row[last], placed.names)
    order = np.argsort(placed.block, kind="stable")
    _, first = np.unique(placed.block[order], return_index=True)
    life = np.stack(
        [np.minimum.reduceat(bars[order, 0], first), np.maximum.reduceat(bars[order, 1], first)], 1
    )
    places = int(placed.slot.max()) + 1
    block = order[first]
    height = 0.9 / places
    top = spans["sm"][block] - 0.45 + placed.slot[block] * height
    collection = PolyCollection(list(_bars(life, top, height)), cmap=ramp(theme), label="blocks")
    collection.set_array(spans[outer][block])
    collection.set(edgecolor=theme.background, linewidth=0.4)
    ax.add_collection(collection)
    side = "query tile i" if outer == "i" else "key tile j"
    bar = ax.figure.colorbar(collection, ax=ax, label=f"{side} of the block", pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.invert_yaxis()


def _bars(x: np.ndarray, top: np.ndarray, height: float) -> np.ndarray:
    """Return the four corners (x, y) of each of n bars, an array of shape (n, 4, 2)."""
    x0, x1, y1 = x[:, 0], x[:, 1], top + height
    return np.stack([np.stack(c, -1) for c in ((x0, top), (x1, top), (x1, y1), (x0, y1))], 1)
