"""`page` writes a trace as one self-contained HTML file that plays it, without server or network.

The trace is stored as columns of integers (about 8 bytes per event, base64) in a JSON block. A
content security policy allows only the page's scripts (`decode.js`, `diagram.js` and `player.js`),
by their hash, so that no other script can run and no data can leave the page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from flashsim.errors import OptionError, own_errors
from flashsim.problem import checks
from flashsim.report import whole
from flashsim.schedule.names import OPS
from flashsim.trace.steps import Steps
from flashsim.trace.trace import Trace
from flashsim.viz.data import diagram, sources
from flashsim.viz.data.statistics import RowStatistics
from flashsim.viz.palette import THEMES, tint

#: Approximate bytes per event in a player's columns.
_EVENT_BYTES = 9
_SCRIPTS = ("decode.js", "diagram.js", "player.js")


@own_errors
@dataclass(frozen=True)
class Page:
    """An HTML page such as the player; Jupyter displays it as a cell's result.

    Attributes
    ----------
    html : str
        The whole file.
    height : int
        Height of the frame in a notebook, in pixels.
    """

    html: str
    height: int = 760

    def __repr__(self) -> str:
        title = self.html.partition("<title>")[2].partition("</title>")[0]
        return f"<Page {html.unescape(title)}: {len(self.html):,} characters>"

    def save(self, path: str | Path) -> Path:
        """Write the page to a file and return its path; a failed write leaves no partial file."""
        path = Path(checks.path("path", path))
        with whole(path) as part:
            part.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        return embedded(self.html, self.height, "flashsim player")


def embedded(document: str, height: int, title: str) -> str:
    """Return an iframe that shows an HTML document, whose scripts cannot access the outer page."""
    return (
        f'<iframe srcdoc="{html.escape(document)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{height}px;border:0" title="{html.escape(title)}"></iframe>'
    )


@own_errors
def page(
    data: Any,
    path: str | Path | None = None,
    *,
    title: str | None = None,
    theme: str = "auto",
    statistics: RowStatistics | Mapping[str, RowStatistics] | None = None,
    max_mb: float = 32,
) -> Page:
    """Build an HTML player of one trace, or of two side by side.

    A link to the file that ends in ``#step=14`` opens the player at step 14.

    Parameters
    ----------
    data : Trace, Result, Gradients, Comparison, or a list or dict (by label) of one or two
    path : path-like, optional
        The file to write.
    title : str, optional
        Default: a description of the run.
    theme : {"auto", "light", "dark"}
        "auto" follows the reader's system; the player has a switch.
    statistics : RowStatistics, or a dict of them by label, optional
        The result of `row_statistics`: the player shows m and l of a query row of the current row
        tile, or of a row tile that the reader clicks.
    max_mb : float
        The largest file to write, in MB (10^6 bytes); browsers take long to open larger files.

    Raises
    ------
    OptionError
        If there are more than two traces, the theme is unknown, the title cannot be written to a
        file, or the player would be larger than `max_mb`.
    """
    chosen = sources.panes("a page", data, statistics)
    checks.one_of("theme", theme, ("auto", *THEMES))
    checks.number("max_mb", max_mb, low=0.0)
    traces = [trace for trace, _ in chosen.values()]
    _check_size(traces, max_mb)
    names = list(dict.fromkeys(name for trace in traces for name in trace.tensors))
    payload = {
        "title": sources.writable("title", title or " and ".join(chosen)),
        "theme": theme,
        "themes": {name: _theme(name, names) for name in THEMES},
        "keySide": sorted(set().union(*map(diagram.key_side, traces))),
        "matrices": sorted(set().union(*map(diagram.matrices, traces))),
        "symbols": diagram.SYMBOLS,
        "ops": OPS,
        "tensors": names,
        "panes": [_pane(label, *pane, names) for label, pane in chosen.items()],
    }
    document = assembled("flashsim.viz.player", "player", _SCRIPTS, payload, str(payload["title"]))
    result = Page(document)
    if path is not None:
        result.save(path)
    return result


def _check_size(traces: Sequence[Trace], max_mb: float) -> None:
    """Raise `OptionError` if the player's file would have more than `max_mb` MB."""
    tiles = events = 0
    for trace in traces:
        t_r, t_c = diagram.one_grid(trace)
        tiles += t_r * t_c * len(trace.stages)
        events += sum(len(stage.events) for stage in trace.stages)
    megabytes = (tiles + _EVENT_BYTES * events) * 4 / 3 / 1e6  # base64
    if megabytes > max_mb:
        raise OptionError(
            f"this player would have about {megabytes:,.0f} MB ({tiles:,} tiles and {events:,} "
            f"events), over {max_mb:g} MB: use larger tiles, or allow it "
            f"with max_mb={megabytes + 1:.0f} (--max-mb)"
        )


def _theme(name: str, tensors: Sequence[str]) -> dict[str, Any]:
    t = THEMES[name]
    own = {key: tint(key, name, tensors[1:]) for key in tensors[1:] if not key.endswith("_acc")}
    names = ("background", "panel", "text", "muted", "grid", "accent")
    return {**{key: getattr(t, key) for key in names}, "tensors": {**t.tensors, **own}}


def _pane(
    label: str, trace: Trace, statistics: RowStatistics | None, names: Sequence[str]
) -> dict[str, Any]:
    walk, gpu = Steps(trace), trace.provenance.get("gpu", "")
    t_r, t_c = diagram.one_grid(trace)
    e = walk.events
    tensor = np.array([names.index(name) for name in trace.tensors])[e["tensor"]]
    sizes, size = np.unique(e["bytes"], return_inverse=True)
    work, price = np.unique(walk.step_flops, return_inverse=True)
    notes, note = np.unique(walk.notes, return_inverse=True)
    return {
        "label": label,
        "about": (
            f"{sources.title(trace.algorithm)} {sources.direction(trace)}: "
            f"{', '.join(sources.about_shown(trace))}; SRAM of {trace.device.name}"
            f"{f'; recorded on {gpu}' if gpu else ''}"
        ),
        "provenance": {str(k): str(v) for k, v in trace.provenance.items()},
        "rows": t_r,
        "cols": t_c,
        "limit": trace.device.sram_bytes,
        "full": walk.sram_scale,
        "device": trace.device.name,
        "sides": diagram.sides(trace),
        "stages": [
            {
                "name": stage.name,
                "kinds": _column(diagram.tile_kinds(stage.schedule, most=None).ravel()),
            }
            for stage in trace.stages
        ],
        "events": {
            **{name: _column(e[name]) for name in ("stage", "op", "i", "j")},
            "tensor": _column(tensor),
            "visited": _column(e["visit"] >= 0),
            "size": _column(size),
        },
        "sizes": sizes.tolist(),
        "price": _column(price),
        "flops": work.tolist(),
        "note": _column(note),
        "notes": notes.tolist(),
        "parts": diagram.part_edges(trace.schedule),
        "pages": diagram.page_edges(trace.schedule),
        "statistics": None if statistics is None else _statistics(statistics),
    }


def _statistics(s: RowStatistics) -> dict[str, Any]:
    """Return a dict: "rows" has the statistics of each row tile, "tile" is the tile shown first."""
    return {"tile": s.tile, "rows": {tile: _row(followed) for tile, followed in s.by_tile.items()}}


def _row(s: RowStatistics) -> dict[str, Any]:
    columns = {name: getattr(s, name).tolist() for name in ("steps", "j", "m", "alpha", "l")}
    columns["m"] = [m if np.isfinite(m) else None for m in columns["m"]]  # JSON has no infinity
    return {"row": s.row, **columns}


def _column(values: np.ndarray) -> dict[str, str]:
    """Encode integers in the narrowest type that holds them, little-endian, as base64."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    kinds = ("u1", "u2", "u4") if low >= 0 else ("i1", "i2", "i4")
    kind = next(k for k in kinds if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    data = np.ascontiguousarray(values, dtype=f"<{kind}").tobytes()
    return {"type": kind, "data": base64.b64encode(data).decode("ascii")}


def embedded_json(value: Any) -> str:
    """Encode a value as JSON that is safe inside an HTML script: it has no "<", ">" or "&"."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def assembled(
    package: str, name: str, scripts: Sequence[str], data: Mapping[str, Any], title: str
) -> str:
    """Return the text of one HTML file that holds a page's template, style, scripts and data."""
    read = lambda file, room=package: files(room).joinpath(file).read_text("utf-8")  # noqa: E731
    script = "\n".join([read("common.js", __package__), *map(read, scripts)])
    style = read(f"{name}.css")
    parts = {
        "POLICY": policy(script, style),
        "TITLE": html.escape(title),
        "STYLE": style,
        "BODY": read(f"{name}.html"),
        "SCRIPT": script,
        "DATA": embedded_json(data),
    }
    pieces = read("frame.html", __package__).split("@@")  # text, name, text, name, ...
    return "".join(parts[piece] if n % 2 else piece for n, piece in enumerate(pieces))


def policy(script: str, style: str) -> str:
    """Return a content security policy that allows only this script and this style."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
