"""Plots, animations and pages of traces. Matplotlib is imported here and nowhere else.

Names are loaded when first used, so that `page` starts without Matplotlib.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashsim.viz.animation import animate
    from flashsim.viz.palette import color
    from flashsim.viz.player import Page, page
    from flashsim.viz.plot_bytes import cumulative, diff, sram_timeline, traffic
    from flashsim.viz.plot_cache import l2_curve
    from flashsim.viz.plot_models import io_curve, memory_footprint, roofline
    from flashsim.viz.plot_tiles import tile_map
    from flashsim.viz.plot_timeline import gpu_timeline
    from flashsim.viz.statistics import row_statistics

_ROOMS = {
    "animation": ("animate",),
    "player": ("Page", "page"),
    "palette": ("color",),
    "plot_bytes": ("cumulative", "diff", "sram_timeline", "traffic"),
    "plot_cache": ("l2_curve",),
    "plot_models": ("io_curve", "memory_footprint", "roofline"),
    "plot_tiles": ("tile_map",),
    "plot_timeline": ("gpu_timeline",),
    "statistics": ("row_statistics",),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Page",
    "animate",
    "color",
    "cumulative",
    "diff",
    "gpu_timeline",
    "io_curve",
    "l2_curve",
    "memory_footprint",
    "page",
    "roofline",
    "row_statistics",
    "sram_timeline",
    "tile_map",
    "traffic",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
