"""Plots, animations and HTML pages of traces and counts.

The module `data` turns a trace into drawable data; `plots` and `film` draw this data with
Matplotlib. `player` and `laboratory` write HTML pages without Matplotlib. Matplotlib is loaded only
when a plot is first used.
"""
# ruff: noqa: F401 - `__all__` lists the names

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashsim.viz.data.statistics import row_statistics
    from flashsim.viz.film.animation import animate
    from flashsim.viz.film.rank_film import animate_ranks
    from flashsim.viz.laboratory.lab_page import lab
    from flashsim.viz.palette import color
    from flashsim.viz.player.page import Page, page
    from flashsim.viz.plots.curves import io_curve, l2_curve, memory_footprint
    from flashsim.viz.plots.gpu_timelines import gpu_timeline
    from flashsim.viz.plots.ranks import rank_timeline, scaling
    from flashsim.viz.plots.rooflines import roofline, roofline_series
    from flashsim.viz.plots.studies import (
        banks,
        block_sizes,
        precision,
        predicted_against_measured,
        tile_evidence,
    )
    from flashsim.viz.plots.tile_maps import mask, tile_map
    from flashsim.viz.plots.traffic_bars import cumulative, diff, sram_timeline, traffic
    from flashsim.viz.save import save_figure

_ROOMS = {
    "film.animation": ("animate",),
    "film.rank_film": ("animate_ranks",),
    "laboratory.lab_page": ("lab",),
    "player.page": ("Page", "page"),
    "palette": ("color",),
    "plots.traffic_bars": ("cumulative", "diff", "sram_timeline", "traffic"),
    "plots.curves": ("io_curve", "l2_curve", "memory_footprint"),
    "plots.studies": (
        *("banks", "block_sizes", "precision", "predicted_against_measured", "tile_evidence"),
    ),
    "plots.rooflines": ("roofline", "roofline_series"),
    "plots.ranks": ("rank_timeline", "scaling"),
    "plots.tile_maps": ("mask", "tile_map"),
    "plots.gpu_timelines": ("gpu_timeline",),
    "data.statistics": ("row_statistics",),
    "save": ("save_figure",),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
