"""`animate_ranks` writes an animation of ranks that pass K and V around a ring (GIF, MP4, HTML)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle

from flashsim.counts.questions import in_words
from flashsim.errors import OptionError, own_errors, shown
from flashsim.problem import checks
from flashsim.viz import palette
from flashsim.viz.data import sources
from flashsim.viz.film.animation import Animation, Frames, check_format, check_fps, written
from flashsim.viz.style import human, ink_on, ramp, rc

_SIZE = (9.6, 5.4)  # inches, at 100 pixels per inch
_MOST = 16  # members of a ring whose colours can be distinguished
_MOST_DRAWN = 64  # the most cells along a block, and frames per step


@own_errors
def animate_ranks(
    account: Any,
    path: str | Path,
    *,
    cells: int = 4,
    frames_a_step: int = 8,
    fps: float = 8,
    theme: str = "light",
) -> Animation:
    """Write an animation, or an HTML player, of ranks that compute attention together.

    The ring of ranks is drawn at the left, with the K and V that each rank holds. Each K and V has
    the colour of the rank that owns it, and moves from rank to rank. The scores are drawn at the
    right, with a band of rows per rank and a band of columns for each rank's keys. A tile lights up
    when its rank computes it, and ranks that wait are labelled.

    Parameters
    ----------
    account : Account
        The result of `flashsim.distributed.count` or `simulate`.
    path : path-like
        Its suffix chooses the format: .gif, .mp4 (needs ffmpeg) or .html, a player with a slider.
    cells : int
        Tiles along each side of a member's block, as drawn.
    frames_a_step : int
        Frames per step.
    fps : float
        Frames per second.
    theme : {"light", "dark"}

    Raises
    ------
    OptionError
        If the format, theme or group cannot be shown.
    BackendUnavailable
        If the format is .mp4 and ffmpeg is not installed.
    """
    path = check_format(path)
    sources.made_by("flashsim.distributed.count", account, "idle_share")
    check_fps(fps)
    for name, value in (("cells", cells), ("frames_a_step", frames_a_step)):
        if checks.positive_int(name, value) > _MOST_DRAWN:
            raise OptionError(f"{name} must be at most {_MOST_DRAWN}, got {shown(value)}")
    return written(RanksFilm(account, cells, frames_a_step, theme), path, fps)


def lit(group: Any, block: Any, cells: int) -> np.ndarray:
    """Return a boolean array: which tiles of a block of scores a rank computes at a ring step.

    The block has the rank's query rows, and the keys that the rank holds at this step. The block is
    cut into `cells` x `cells` tiles.
    """
    if block is None:
        return np.zeros((cells, cells), bool)
    edges = np.linspace(0, group.rows_a_member, cells + 1)
    rectangles = []
    for part in (block.q, block.k):
        low, high = edges[:-1].clip(part.start, part.stop), edges[1:].clip(part.start, part.stop)
        rectangles.append((low - part.start, high - part.start))
    (q_low, q_high), (k_low, k_high) = rectangles
    there = (q_high > q_low)[:, None] & (k_high > k_low)[None, :]
    if block.problem.causal:
        there &= q_high[:, None] > k_low[None, :]
    return there


class RanksFilm(Frames):
    """The Matplotlib figure of an animation of ranks, and the frames drawn from it."""

    def __init__(self, account: Any, cells: int, frames_a_step: int, theme: str) -> None:
        group = account.group
        if group.ring > _MOST or group.ring < 2:
            raise OptionError(
                f"an animation shows rings of 2 to {_MOST} members, got {group.ring} "
                f"({group.scheme!r} over {group.ranks} ranks)"
            )
        self.account, self.group, self.cells, self.each = account, group, cells, frames_a_step
        self.theme = palette.theme(theme)
        self.first = int(group.ulysses > 1)
        backward = account.direction == "backward"
        block = group.gradient_block if backward else group.block
        self.steps = group.ring + backward
        ranks, steps = range(0, group.ranks, group.ulysses), range(self.steps)
        self.lit = np.array([[lit(group, block(r, s), cells) for s in steps] for r in ranks])
        self.title = self._message()
        shades = ramp(self.theme)(np.linspace(0.2, 0.85, group.ring))[:, :3]
        self.shade = [tuple(color) for color in shades]
        self._build()

    def _message(self) -> str:
        """Return the title, with the share of time in which ranks wait for the busiest rank."""
        work = self.lit.sum(axis=(2, 3))  # by member and step
        waits = 1 - work.sum() / (work.max(axis=0).sum() * self.group.ring)
        share = f"wait {waits:.0%} of the time" if waits > 0.005 else "never wait for each other"
        return f"{self.group.scheme.capitalize()}: {self.group.ranks} GPUs {share}"

    def _build(self) -> None:
        look, ring = self.theme, self.group.ring
        with plt.rc_context(rc(look)):
            self.figure = Figure(figsize=_SIZE, dpi=100)
            self.canvas = FigureCanvasAgg(self.figure)
            at = self.figure.add_axes
            left, grid = at((0.01, 0.1, 0.41, 0.74)), at((0.5, 0.1, 0.405, 0.72))
        self.figure.text(0.02, 0.93, self.title, fontsize=17, fontweight="bold", color=look.text)
        about = f"{self.account.direction}, {in_words(self.group.problem)}; framed: computing now"
        self.figure.text(0.02, 0.885, about, fontsize=11, color=look.muted)
        left.set(xlim=(-1.4, 1.4), ylim=(-1.35, 1.35), aspect="equal")
        left.axis("off")
        angle = np.pi / 2 - 2 * np.pi * np.arange(ring) / ring
        self.place = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        left.add_patch(Circle((0, 0), 1, fill=False, ec=look.grid, lw=3, zorder=1))
        size = min(0.3, 1.3 / ring + 0.1)
        middle: dict[str, Any] = {"ha": "center", "va": "center"}
        self.says = []
        for member, (x, y) in enumerate(self.place):
            left.add_patch(
                Circle((x, y), size, fc=look.background, ec=self.shade[member], lw=4, zorder=2)
            )
            name: dict[str, Any] = {"zorder": 4, "fontsize": 12, "color": look.text}
            left.text(x, y + size * 0.38, str(member), **middle, **name)
            out = 1 + size + 0.1
            says: dict[str, Any] = {"fontsize": 9, "color": look.accent}
            self.says.append(left.text(x * out, y * out, "", **middle, **says))
        self.chips, width = [], size * 1.15
        for member in range(ring):
            chip = FancyBboxPatch(
                (0, 0), width, width * 0.42, boxstyle="round,pad=0.01", fc=self.shade[member],
                ec=look.text, lw=0.8, zorder=6,
            )  # fmt: skip
            label: dict[str, Any] = {"zorder": 7, "fontsize": 8 if ring > 8 else 9.5}
            text = left.text(
                0, 0, f"KV {member}", color=ink_on(self.shade[member]), **middle, **label
            )
            left.add_patch(chip)
            self.chips.append((chip, text, width))
        n = ring * self.cells
        grid.set(xlim=(0, n), ylim=(n, 0), aspect="equal")
        middles = (np.arange(ring) + 0.5) * self.cells
        grid.set_xticks(middles, [str(m) for m in range(ring)])
        grid.set_yticks(middles, [str(m) for m in range(ring)])
        grid.tick_params(length=0)
        grid.set(xlabel="owner of the keys", ylabel="owner of the queries (they do not move)")
        background = np.array(palette.rgb(look.panel)) / 255
        self.pixels = np.broadcast_to(background, (n, n, 3)).copy()
        self.image = grid.imshow(self.pixels, extent=(0, n, n, 0), interpolation="nearest")
        for edge in range(ring + 1):
            grid.axhline(edge * self.cells, color=look.muted, lw=0.8)
            grid.axvline(edge * self.cells, color=look.muted, lw=0.8)
        self.frames_of_work = [
            Rectangle((0, 0), self.cells, self.cells, fill=False, ec=look.accent, lw=2.2)
            for _ in range(ring)
        ]
        for frame in self.frames_of_work:
            grid.add_patch(frame)
        self.told = self.figure.text(0.5, 0.83, "", fontsize=12, color=look.text)
        self.bytes = self.figure.text(0.02, 0.03, "", fontsize=11, color=look.muted)

    def __len__(self) -> int:
        return self.steps * self.each

    def frame(self, number: int) -> np.ndarray:
        """Return one frame's RGB pixels, a uint8 array of shape (height, width, 3)."""
        step, within = divmod(number, self.each)
        share = (within + 1) / self.each
        self._light(step, share)
        self._move(step, within / self.each)
        group, sent = self.group, self.account.out_bytes[:, : self.first + step].sum()
        here = self.account.out_bytes[:, self.first + step].sum()
        name = self.account.steps[self.first + step]
        self.told.set_text(f"step {step + 1} of {self.steps} ({name})")
        busiest = self.lit.sum(axis=(2, 3)).max(axis=0)
        done = sum(self._done(m, s, 1.0) for m in range(group.ring) for s in range(step))
        done += sum(self._done(m, step, share) for m in range(group.ring))
        room = (busiest[:step].sum() + share * busiest[step]) * group.ring
        idle = 0.0 if not room else max(0.0, 1 - done / room)
        self.bytes.set_text(
            f"sent by all GPUs: {human(float(sent + share * here))}    "
            f"idle so far: {100 * idle:.0f} % of GPU time"
        )
        self.canvas.draw()
        return np.asarray(self.canvas.buffer_rgba())[..., :3].copy()

    def _done(self, member: int, step: int, share: float) -> int:
        """Return the number of tiles that a rank has computed after a fraction of a step."""
        tiles = self.lit[member, step].sum()
        return int(min(tiles, np.ceil(share * self.lit[:, step].sum(axis=(1, 2)).max())))

    def _light(self, step: int, share: float) -> None:
        ring, cells = self.group.ring, self.cells
        if step == 0:
            self.pixels[:] = np.array(palette.rgb(self.theme.panel)) / 255
        for member in range(ring):
            source = self.group.source(member * self.group.ulysses, step) // self.group.ulysses
            tiles = np.argwhere(self.lit[member, step])[: self._done(member, step, share)]
            rows, columns = tiles[:, 0] + member * cells, tiles[:, 1] + source * cells
            self.pixels[rows, columns] = self.shade[source]
            self.frames_of_work[member].set_xy((source * cells, member * cells))
            idle = self._done(member, step, share) == self.lit[member, step].sum()
            self.says[member].set_text("waits" if idle and share < 1 else "")
        self.image.set_data(self.pixels)

    def _move(self, step: int, share: float) -> None:
        """Draw each rank's K and V, which move to the next rank in the second half of a step."""
        ring = self.group.ring
        going = step < ring - 1
        turn = max(0.0, 2 * share - 1) if going else 0.0
        for member, (chip, text, width) in enumerate(self.chips):
            angle = np.pi / 2 - 2 * np.pi * (member + min(step, ring - 1) + turn) / ring
            x, y = np.cos(angle), np.sin(angle) - 0.09
            chip.set_x(x - width / 2)
            chip.set_y(y - width * 0.21)
            text.set_position((x, y))

    def shades(self) -> np.ndarray:
        """Return the film's colours that the theme lacks, a uint8 array of shape (n, 3)."""
        colors = 255 * np.array(self.shade)
        ground = palette.rgb(self.theme.background)
        return np.concatenate([colors, (colors + ground) / 2])
