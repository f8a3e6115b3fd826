"""`animate`: a walk, or two in step, as GIF, MP4 or a self-contained HTML file.

Everything that does not move is drawn once; for each frame the artists that do are moved and drawn
over a copy of it.
"""

from __future__ import annotations

import base64
import html
import io
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from flashsim.errors import BackendUnavailable, OptionError, choices
from flashsim.viz import palette, sources
from flashsim.viz.palette import Theme
from flashsim.viz.scene import Counters, Scene, StatisticsPanel
from flashsim.viz.statistics import RowStatistics
from flashsim.viz.style import rc
from flashsim.viz.walk import Walk

FORMATS = (".gif", ".mp4", ".html")
CLOCKS = ("steps", "bytes")
_SIZE = (960, 540)  # pixels
_HOLD_MS = 2500  # how long the last frame stays


def animate(
    data: Any,
    path: str | Path,
    *,
    statistics: RowStatistics | Mapping[str, RowStatistics] | None = None,
    fps: float = 15,
    max_frames: int = 320,
    clock: str = "steps",
    theme: str = "light",
) -> Path:
    """Write an animation of one trace, or of two side by side.

    It shows Q, K, V and O in HBM with the tiles in flight, the score grid filling in, what SRAM
    holds, and running counters; with `statistics`, m and l of a query row.

    Parameters
    ----------
    data : Trace, Result, Gradients, Comparison, or a list or dict (by label) of one or two
    path : path-like
        Its ending chooses the format: .gif, .mp4 (needs ffmpeg) or .html.
    statistics : RowStatistics, or a dict of them by label, optional
        From `row_statistics`.
    fps : float
        Frames a second.
    max_frames : int
        A longer walk skips steps, evenly.
    clock : {"steps", "bytes"}
        What two traces share: the number of steps made, or the number of bytes moved, which is how
        they would run if HBM alone set the pace.
    theme : {"light", "dark"}

    Returns
    -------
    Path

    Raises
    ------
    OptionError
        For a format, clock or theme that does not exist, or more than two traces.
    BackendUnavailable
        For .mp4 without ffmpeg.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise OptionError(f"cannot write {path.name!r}: an animation ends in {', '.join(FORMATS)}")
    if path.suffix == ".mp4" and shutil.which("ffmpeg") is None:
        raise BackendUnavailable(
            f"writing {path.name!r} needs ffmpeg, which is not installed; "
            "install it, or write a .gif or .html, which need nothing"
        )
    if not fps > 0 or max_frames < 1:
        raise OptionError(f"fps and max_frames must be positive, got {fps!r} and {max_frames!r}")
    film = Film(data, statistics=statistics, clock=clock, theme=theme, max_frames=max_frames)
    write = {".gif": _write_gif, ".mp4": _write_mp4, ".html": _write_html}[path.suffix]
    try:
        write(film, path, fps)
    finally:
        film.close()
    return path


class Film:
    """The figure of an animation, and its frames.

    Attributes
    ----------
    figure : Figure
    scenes : list of Scene
    schedule : ndarray of int, (n_frames, n_traces)
        The step each trace shows in each frame.
    """

    def __init__(
        self,
        data: Any,
        *,
        statistics: RowStatistics | Mapping[str, RowStatistics] | None = None,
        clock: str = "steps",
        theme: str = "light",
        max_frames: int = 320,
    ) -> None:
        chosen = sources.labelled(data)
        if len(chosen) > 2:
            raise OptionError(
                f"an animation shows at most two traces, got {len(chosen)}: {', '.join(chosen)}"
            )
        if clock not in CLOCKS:
            raise OptionError(f"unknown clock {clock!r}; {choices(clock, CLOCKS)}")
        if isinstance(statistics, RowStatistics):
            statistics = dict.fromkeys(list(chosen)[:1], statistics)
        walks = {label: Walk(sources.one_trace(source)) for label, source in chosen.items()}
        self.schedule = frame_steps(list(walks.values()), clock, max_frames)
        look = self.theme = palette.theme(theme)
        with plt.rc_context(rc(look)):
            self.figure = Figure(figsize=(_SIZE[0] / 100, _SIZE[1] / 100), dpi=100)
            self.canvas = FigureCanvasAgg(self.figure)
            self.panels: list[list[Any]] = []
            self.scenes: list[Scene] = []
            for n, (label, walk) in enumerate(walks.items()):
                self._build(n, len(walks), label, walk, look, (statistics or {}).get(label))
        for panels in self.panels:
            for panel in panels:
                for artist in panel.artists:
                    artist.set_animated(True)
        self.canvas.draw()
        self.background = self.canvas.copy_from_bbox(self.figure.bbox)

    def _build(
        self, n: int, total: int, label: str, walk: Walk, look: Theme, row: RowStatistics | None
    ) -> None:
        left, width = 0.02 + n / total, 1 / total - 0.04
        if total == 1:  # the diagram at the left, facts at the right
            diagram = (0.02, 0.03, 0.6, 0.94)
            facts, sram = (0.67, 0.6, 0.31, 0.37), (0.67, 0.45, 0.31, 0.075)
        else:
            diagram = (left, 0.32, width, 0.66)
            facts, sram = (left, 0.12, width, 0.19), (left, 0.02, width, 0.055)
        at = self.figure.add_axes
        aspect = diagram[2] * _SIZE[0] / (diagram[3] * _SIZE[1])
        scene = Scene(at(diagram), at(sram), walk, look, aspect)
        self.scenes.append(scene)
        panels: list[Any] = [scene, Counters(at(facts), walk, look, label, 2 if total == 1 else 4)]
        if row is not None and total == 1:
            panels.append(
                StatisticsPanel(
                    at((0.71, 0.22, 0.27, 0.13)), at((0.71, 0.05, 0.27, 0.13)), row, look
                )
            )
        self.panels.append(panels)

    def __len__(self) -> int:
        return len(self.schedule)

    def frame(self, number: int) -> np.ndarray:
        """RGB pixels of one frame, uint8 (height, width, 3)."""
        self.canvas.restore_region(self.background)
        for panels, step in zip(self.panels, self.schedule[number].tolist(), strict=True):
            for panel in panels:
                panel.update(step)
        pixels = np.asarray(self.canvas.buffer_rgba())
        for panels in self.panels:
            for mosaic in panels[0].mosaics:
                mosaic.draw(pixels)
            for panel in panels:
                for artist in sorted(panel.artists, key=lambda a: a.get_zorder()):
                    self.figure.draw_artist(artist)
        return pixels[..., :3].copy()

    def frames(self) -> Iterator[np.ndarray]:
        """All frames, in order."""
        return (self.frame(number) for number in range(len(self)))

    def close(self) -> None:
        """Forget the figure."""
        self.figure.clear()


def frame_steps(walks: list[Walk], clock: str, max_frames: int) -> np.ndarray:
    """int (n_frames, n_walks): the step that each walk shows in each frame."""
    longest = max(len(walk) for walk in walks)
    n = min(longest, max_frames)
    times = np.unique(np.linspace(0, longest - 1, n).round().astype(np.int64))
    if clock == "steps":
        return np.stack([np.minimum(times, len(walk) - 1) for walk in walks], axis=1)
    totals = [walk.hbm_bytes.sum(axis=1) for walk in walks]
    moved = (times + 1) / longest * max(total[-1] for total in totals)
    return np.stack(
        [(np.searchsorted(total, moved, side="right") - 1).clip(0) for total in totals], axis=1
    )


# -- formats --------------------------------------------------------------------------------------


def _shared_palette(film: Film) -> Image.Image:
    """The colours that are drawn, and shades between those that meet at edges of text.

    Worked out rather than guessed from a few frames: a tensor that moves once would lose its own.
    """
    look = film.theme
    colors = [look.background, look.panel, look.grid, look.accent, look.muted, look.text]
    solid = [np.array(to_rgb(c)) for c in (*colors, *look.tensors.values())]
    pale = np.concatenate([scene.shades() for scene in film.scenes]) / 255
    ink = [np.array(to_rgb(c)) for c in (look.text, look.muted, look.accent, "black", "white")]
    page = solid[0]
    edges = [page + (c - page) * t for c in ink for t in (0.15, 0.3, 0.5, 0.7, 0.85)]
    table = np.unique((np.array([*solid, *pale, *edges]) * 255).round().astype(np.uint8), axis=0)
    image = Image.new("P", (1, 1))
    image.putpalette(table[:256].tobytes())
    return image


def _indexed(film: Film) -> Iterator[Image.Image]:
    shared = _shared_palette(film)
    for pixels in film.frames():
        yield Image.fromarray(pixels).quantize(palette=shared, dither=Image.Dither.NONE)


def _write_gif(film: Film, path: Path, fps: float) -> None:
    frames = _indexed(film)
    first = next(frames)
    delay = max(20, round(1000 / fps))  # viewers slow down what is faster than 20 ms
    durations = [delay] * (len(film) - 1) + [_HOLD_MS]
    first.save(
        path, save_all=True, append_images=frames, duration=durations, loop=0, optimize=False
    )


def _write_mp4(film: Film, path: Path, fps: float) -> None:
    command = [
        *("ffmpeg", "-y", "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"),
        *("-s", f"{_SIZE[0]}x{_SIZE[1]}", "-r", str(fps), "-i", "-"),
        *("-pix_fmt", "yuv420p", "-movflags", "+faststart", str(path)),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        with suppress(BrokenPipeError):  # ffmpeg has given up; its message says why
            for pixels in film.frames():
                process.stdin.write(pixels.tobytes())
            process.stdin.close()
        message = process.stderr.read().decode(errors="replace")
    if process.returncode:
        raise BackendUnavailable(f"ffmpeg could not write {path.name!r}: {message.strip()}")


def _write_html(film: Film, path: Path, fps: float) -> None:
    encoded = []
    for image in _indexed(film):
        buffer = io.BytesIO()
        image.save(buffer, "PNG", optimize=True)
        encoded.append(base64.b64encode(buffer.getvalue()).decode("ascii"))
    template = files("flashsim.viz").joinpath("film.html").read_text(encoding="utf-8")
    labels = " and ".join(scene.walk.trace.algorithm for scene in film.scenes)
    parts = {
        "TITLE": html.escape(f"flashsim: {labels}"),
        "DELAY": str(round(1000 / fps)),
        "FRAMES": ",".join(f'"{frame}"' for frame in encoded),
    }
    pieces = template.split("@@")
    text = "".join(parts[piece] if n % 2 else piece for n, piece in enumerate(pieces))
    path.write_text(text, encoding="utf-8")
