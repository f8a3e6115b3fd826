"""`animate` writes an animation of one run, or of two side by side, as GIF, MP4 or one HTML file.

The static parts of the picture are drawn once. For each frame, the moving Matplotlib artists are
drawn over a copy of these static parts.
"""

from __future__ import annotations

import base64
import html
import io
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from flashsim.errors import BackendUnavailable, OptionError, own_errors, shown
from flashsim.problem import checks
from flashsim.report import whole
from flashsim.trace.steps import Steps
from flashsim.viz import palette
from flashsim.viz.data import sources
from flashsim.viz.data.statistics import RowStatistics
from flashsim.viz.film.panels import Counters, Moves, StatisticsPanel
from flashsim.viz.film.scene import Scene
from flashsim.viz.player.page import assembled, embedded
from flashsim.viz.style import rc

FORMATS = (".gif", ".mp4", ".html")
#: The least and the greatest number of frames per second.
SLOWEST, FASTEST = 0.01, 1000
CLOCKS = ("steps", "bytes")
_SIZE = (960, 540)  # pixels
_HOLD_MS = 2500  # how long the last frame is shown


@own_errors
def animate(
    data: Any,
    path: str | Path,
    *,
    statistics: RowStatistics | Mapping[str, RowStatistics] | None = None,
    fps: float = 15,
    max_frames: int = 320,
    clock: str = "steps",
    theme: str = "light",
) -> Animation:
    """Write an animation of one trace, or of two side by side.

    The animation shows Q, K, V and O in HBM with the tiles in flight, the score grid as it fills,
    the contents of SRAM, and running counters. If `statistics` is passed, the animation also shows
    the softmax's maximum m and sum l of a query row.

    Parameters
    ----------
    data : Trace, Result, Gradients, Comparison, or a list or dict (by label) of one or two
    path : path-like
        Its suffix chooses the format: .gif, .mp4 (needs ffmpeg) or .html.
    statistics : RowStatistics, or a dict of them by label, optional
        From `row_statistics`.
    fps : float
        Frames per second.
    max_frames : int
        The most frames; a trace with more steps is sampled evenly.
    clock : {"steps", "bytes"}
        How two traces are synchronised: by the number of steps done, or by the bytes moved, as if
        HBM bandwidth were the only limit.
    theme : {"light", "dark"}

    Returns
    -------
    Animation
        The path of the written file; a notebook displays the animation.

    Raises
    ------
    OptionError
        If the format, clock, theme or folder does not exist, or there are more than two traces.
    BackendUnavailable
        If the format is .mp4 and ffmpeg is not installed.
    """
    path = check_format(path)
    if max_frames < 1:
        raise OptionError(f"max_frames= must be positive, got {max_frames!r}")
    check_fps(fps)
    film = Film(data, statistics=statistics, clock=clock, theme=theme, max_frames=max_frames)
    return written(film, path, fps)


def check_format(path: str | Path) -> Path:
    """Return `path`; raise if its format is unknown, or needs ffmpeg and ffmpeg is missing."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise OptionError(
            f"cannot write {path.name!r}: an animation's file name must end in {', '.join(FORMATS)}"
        )
    if path.suffix == ".mp4" and shutil.which("ffmpeg") is None:
        raise BackendUnavailable(
            f"writing {path.name!r} needs ffmpeg, which is not installed; install it, or write a "
            ".gif or .html, which needs no other program"
        )
    return path


def check_fps(fps: float) -> None:
    """Raise `OptionError` for a frame rate that files cannot store (GIF: over 655 s per frame)."""
    if not SLOWEST <= fps <= FASTEST:
        raise OptionError(f"fps= must be from {SLOWEST} to {FASTEST:,}, got {shown(fps)}")


class Frames:
    """Base of films: a Matplotlib figure, whose frames are drawn one after another.

    Each subclass also defines `len`, the method `shades`, and the attributes `theme` and `title`.
    """

    figure: Figure

    def frame(self, number: int) -> np.ndarray:
        """Return one frame's RGB pixels, a uint8 array of shape (height, width, 3)."""
        raise NotImplementedError

    def frames(self) -> Iterator[np.ndarray]:
        """Yield all frames in order."""
        return (self.frame(number) for number in range(len(self)))  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the film's Matplotlib figure."""
        self.figure.clear()


def written(film: Any, path: Path, fps: float) -> Animation:
    """Write all frames of a film (see `Frames`) to a file, then close the film's figure."""
    write = {".gif": _write_gif, ".mp4": _write_mp4, ".html": _write_html}[path.suffix]
    try:
        with whole(path) as part:
            write(film, part, fps)
    finally:
        film.close()
    return Animation(path)


class Animation(type(Path())):  # type: ignore[misc]
    """The path of an animation file; a notebook displays the animation."""

    def _repr_html_(self) -> str:
        name = html.escape(self.name)
        if self.suffix == ".html":
            return embedded(self.read_text(encoding="utf-8"), _SIZE[1] + 80, name)
        data = base64.b64encode(self.read_bytes()).decode("ascii")
        if self.suffix == ".gif":
            return f'<img src="data:image/gif;base64,{data}" alt="{name}">'
        return f'<video src="data:video/mp4;base64,{data}" title="{name}" controls loop></video>'


class Film(Frames):
    """The Matplotlib figure of an animation, and the frames drawn from it."""

    def __init__(
        self,
        data: Any,
        *,
        statistics: RowStatistics | Mapping[str, RowStatistics] | None = None,
        clock: str = "steps",
        theme: str = "light",
        max_frames: int = 320,
    ) -> None:
        chosen = sources.panes("an animation", data, statistics)
        checks.one_of("clock", clock, CLOCKS)
        walks = [Steps(trace) for trace, _ in chosen.values()]
        self.schedule = frame_steps(walks, clock, max_frames)
        look = self.theme = palette.theme(theme)
        with plt.rc_context({**rc(look), "text.parse_math": False}):  # names may hold a $
            self.figure = Figure(figsize=(_SIZE[0] / 100, _SIZE[1] / 100), dpi=100)
            self.canvas = FigureCanvasAgg(self.figure)
            self.panels: list[list[Any]] = []
            self.scenes: list[Scene] = []
            full = max(walk.sram_scale for walk in walks)  # the same scale for both
            for n, (label, (_, row)) in enumerate(chosen.items()):
                self._build(n, len(walks), label, walks[n], full, row)
        for panels in self.panels:
            for panel in panels:
                for artist in panel.artists:
                    artist.set_animated(True)
        self.canvas.draw()
        self.background = self.canvas.copy_from_bbox(self.figure.bbox)

    def _build(
        self, n: int, total: int, label: str, walk: Steps, full: int, row: RowStatistics | None
    ) -> None:
        look = self.theme
        left, width = 0.02 + n / total, 1 / total - 0.04
        if total == 1:  # the diagram at the left, facts at the right
            diagram = (0.02, 0.03, 0.6, 0.94)
            facts, sram = (0.67, 0.6, 0.31, 0.37), (0.67, 0.475, 0.31, 0.055)
        else:
            diagram = (left, 0.32, width, 0.66)
            facts, sram = (left, 0.14, width, 0.17), (left, 0.068, width, 0.037)
        at = self.figure.add_axes
        aspect = diagram[2] * _SIZE[0] / (diagram[3] * _SIZE[1])
        scene = Scene(at(diagram), at(sram), walk, look, aspect, full)
        self.scenes.append(scene)
        panels: list[Any] = [scene, Counters(at(facts), walk, look, label, 2 if total == 1 else 4)]
        if total == 1 and row is None:
            panels.append(Moves(at((0.67, 0.03, 0.31, 0.37)), walk, look))
        elif row is not None and total == 1:
            charts = [at((0.735, y, 0.245, 0.07)) for y in (0.275, 0.18, 0.085)]
            panels.append(StatisticsPanel(charts, row, walk, look, facts[0]))
        self.panels.append(panels)

    def __len__(self) -> int:
        return len(self.schedule)

    def frame(self, number: int) -> np.ndarray:
        """Return one frame's RGB pixels, a uint8 array of shape (height, width, 3)."""
        self.canvas.restore_region(self.background)
        for panels, step in zip(self.panels, self.schedule[number].tolist(), strict=True):
            for panel in panels:
                panel.update(step)
                for artist in sorted(panel.artists, key=lambda a: a.get_zorder()):
                    self.figure.draw_artist(artist)
        return np.asarray(self.canvas.buffer_rgba())[..., :3].copy()

    @property
    def title(self) -> str:
        """The title of the film's HTML player."""
        return " and ".join(scene.walk.trace.algorithm for scene in self.scenes)

    def shades(self) -> np.ndarray:
        """Return the film's colours that the theme lacks, a uint8 array of shape (n, 3)."""
        return np.concatenate([scene.shades() for scene in self.scenes])


def frame_steps(walks: list[Steps], clock: str, max_frames: int) -> np.ndarray:
    """Return the step of each trace in each frame, an array of shape (n_frames, n_traces)."""
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


def _colors(film: Film) -> np.ndarray:
    """Return a film's palette, with shades for the edges of text, a uint8 array of shape (n, 3).

    The palette is not made from sample frames: they would miss a tensor that moves only once. The
    palette has at most 255 colours: a GIF has 256, and one of these means "unchanged".
    """
    look = film.theme
    solid = [look.background, look.panel, look.grid, look.accent, look.muted, look.text]
    inks = (look.text, look.muted, look.accent)
    edges = [palette.mix(look.background, c, t) for c in inks for t in (0.15, 0.3, 0.5, 0.7, 0.85)]
    table = np.array([*map(palette.rgb, solid), *edges, *film.shades()]).round().astype(np.uint8)
    return np.unique(table, axis=0)[:255]


def _indexed(film: Film, colors: np.ndarray) -> Iterator[np.ndarray]:
    """Yield each frame as indices into `colors`, a uint8 array of shape (height, width)."""
    shared = Image.new("P", (1, 1))
    shared.putpalette(colors.tobytes())
    for pixels in film.frames():
        picture = Image.fromarray(pixels).quantize(palette=shared, dither=Image.Dither.NONE)
        yield np.asarray(picture)


def _picture(indices: np.ndarray, colors: np.ndarray) -> Image.Image:
    image = Image.fromarray(indices)
    image.putpalette(colors.tobytes())
    return image


def _changes(frames: Iterator[np.ndarray], same: int) -> Iterator[np.ndarray]:
    """Yield each frame with unchanged pixels set to `same`, so that the GIF shrinks to a third."""
    before = next(frames)
    yield before
    for frame in frames:
        yield np.where(frame == before, np.uint8(same), frame)
        before = frame


def _write_gif(film: Film, path: Path, fps: float) -> None:
    colors = _colors(film)
    same = len(colors)
    unused = next(c for c in np.eye(3, dtype=np.uint8) if not (colors == c).all(axis=1).any())
    colors = np.concatenate([colors, [unused]])
    frames = (_picture(f, colors) for f in _changes(_indexed(film, colors[:same]), same))
    first = next(frames)
    delay = max(20, round(1000 / fps))  # viewers slow down delays below 20 ms
    durations = [delay] * (len(film) - 1) + [_HOLD_MS]
    with path.open("wb") as file:
        first.save(
            file, "GIF", save_all=True, append_images=frames, duration=durations, loop=0,
            optimize=False, transparency=same, disposal=1, palette=colors.tobytes(),
        )  # fmt: skip


def _write_mp4(film: Film, path: Path, fps: float) -> None:
    command = [
        *("ffmpeg", "-y", "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"),
        *("-s", f"{_SIZE[0]}x{_SIZE[1]}", "-r", str(fps), "-i", "-"),
        *("-pix_fmt", "yuv420p", "-movflags", "+faststart", str(path)),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        with suppress(BrokenPipeError):  # ffmpeg ended with an error; its message says why
            for pixels in film.frames():
                process.stdin.write(pixels.tobytes())
            process.stdin.close()
        message = process.stderr.read().decode(errors="replace")
    if process.returncode:
        raise BackendUnavailable(f"ffmpeg could not write the video: {message.strip()}")


def _write_html(film: Film, path: Path, fps: float) -> None:
    encoded, colors = [], _colors(film)
    for indices in _indexed(film, colors):
        buffer = io.BytesIO()
        _picture(indices, colors).save(buffer, "PNG", optimize=True)
        encoded.append(base64.b64encode(buffer.getvalue()).decode("ascii"))
    data = {
        **{"frames": encoded, "delay": round(1000 / fps)},
        **{"background": film.theme.background, "scheme": film.theme.name},
    }
    text = assembled("flashsim.viz.film", "film", ("film.js",), data, f"flashsim: {film.title}")
    path.write_text(text, encoding="utf-8")
