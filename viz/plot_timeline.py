"""Bars of a GPU timeline: SM by time, one colour for each phase of a visit."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from flashsim.errors import OptionError, TraceError
from flashsim.events import PHASES
from flashsim.perfetto import lanes
from flashsim.viz import sources
from flashsim.viz.palette import Theme, color
from flashsim.viz.style import themed

#: What stands for a phase: the tensor it brings or makes.
_PHASE_TENSOR = {
    "visit": "m",
    "load": "K",
    "scores": "S",
    "softmax": "P",
    "output": "O",
    "store": "L",
}


_RASTER_FROM = 20_000  # spans beyond which a vector file would be too large to open


@themed
def gpu_timeline(
    data: Any,
    *,
    stage: str | None = None,
    sms: tuple[int, int] | None = None,
    ax: Axes,
    theme: Theme,
) -> None:
    """Where and when each part of each visit ran on a GPU: SM by time.

    Parameters
    ----------
    data : Trace, Result or Gradients
        Run on a GPU with ``trace="timeline"``.
    stage : str, optional
        Default: the one with the most visits.
    sms : (int, int), optional
        First and last SM shown; default: all.
    ax, theme
        See `themed`. Blocks that share an SM share its row, one lane each.

    Raises
    ------
    TraceError
        If the trace has no timeline.
    OptionError
        If nothing of it is shown.
    """
    trace = sources.one_trace(data)
    if trace.timeline is None:
        raise TraceError(
            'this trace has no timeline; run on a GPU backend with trace="timeline", or plot '
            "viz.sram_timeline, which needs none"
        )
    part = trace.main_stage if stage is None else trace.stage(stage)
    number = [s.name for s in trace.stages].index(part.name)
    spans = trace.timeline[trace.timeline["stage"] == number]
    if sms is not None:
        spans = spans[(spans["sm"] >= sms[0]) & (spans["sm"] <= sms[1])]
    if not len(spans):
        raise OptionError(f"the timeline holds no span of stage {part.name!r} on SMs {sms}")
    origin = int(spans["start_ns"].min())
    lane, count = lanes(spans)
    height = 0.9 / count.clip(1)
    handles = []
    for code, phase in enumerate(PHASES):
        chosen = spans["phase"] == code
        if not chosen.any():
            continue
        x0, x1 = ((spans[f][chosen] - origin) / 1000 for f in ("start_ns", "end_ns"))
        y0 = spans["sm"][chosen] - 0.45 + lane[chosen] * height[chosen]
        y1 = y0 + height[chosen]
        inset = 0.0 if phase == "visit" else 0.15
        y0, y1 = y0 + inset * (y1 - y0), y1 - inset * (y1 - y0)
        corners = np.stack([np.stack(c, -1) for c in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))], 1)
        shade = theme.grid if phase == "visit" else color(_PHASE_TENSOR[phase], theme.name)
        bars = PolyCollection(list(corners), facecolor=shade, edgecolor="none", label=phase)
        bars.set(zorder=1 + code, rasterized=len(spans) > _RASTER_FROM)
        ax.add_collection(bars)
        handles.append(Patch(facecolor=shade, label=phase))
    ax.set_xlim(0, (spans["end_ns"].max() - origin) / 1000)
    ax.set_ylim(spans["sm"].max() + 0.7, spans["sm"].min() - 0.7)
    busy = len(np.unique(spans["sm"]))
    ax.set(
        xlabel="time, µs", ylabel="SM",
        title=f"{trace.algorithm} {trace.direction}, stage {part.name}: {busy} SMs at work",
    )  # fmt: skip
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), title="phase")
