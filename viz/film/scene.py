"""`Scene` draws one trace with Matplotlib; its artists are built once, then updated per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from flashsim.schedule.names import LOAD, TRANSFERS
from flashsim.trace.steps import Steps
from flashsim.viz.data import diagram
from flashsim.viz.palette import Theme, mix, rgb, tint
from flashsim.viz.style import note, tensor_style

_STRIP, _GAP = 0.045, 0.018  # of the diagram's height
_HIDDEN = (-9.0, -9.0)
_GAP_FROM = 6  # the fewest pixels per tile for which lines between tiles are drawn
Box = tuple[float, float, float, float]  # x, y, width, height; y runs down


@dataclass(frozen=True)
class _Strip:
    """A strip beside the score grid; the strip stands for a tensor in HBM."""

    box: Box
    image: AxesImage
    first: np.ndarray  # the step at which each of its tiles first moves
    along: float  # where on a tile its line begins, so that lines of one side do not overlap


class Scene:
    """The diagram of one trace: the score grid, and around it the tensors in HBM."""

    def __init__(
        self, ax: Axes, sram: Axes, walk: Steps, theme: Theme, aspect: float, full: int
    ) -> None:
        self.ax, self.walk, self.theme, self.full = ax, walk, theme, full
        self.kinds = [diagram.tile_kinds(stage.schedule) for stage in walk.trace.stages]
        self.visits = np.bincount(
            walk.stage[walk.visit >= 0], minlength=len(walk.trace.stages)
        ).clip(2)
        self.artists: list[Artist] = []
        self.key_side = diagram.key_side(walk.trace)
        ax.set(xlim=(0, aspect), ylim=(1, 0))
        ax.axis("off")
        self._place(aspect)
        self.stage_text = ax.text(0, 0, "", va="top", fontsize=12, color=theme.muted)
        self.artists.append(self.stage_text)
        self.corners = PolyCollection([], facecolor=theme.accent, edgecolor="none", zorder=4)
        ax.add_collection(self.corners)
        self.artists.append(self.corners)
        self._build_edges()
        moving = np.isin(walk.events["op"], TRANSFERS)
        most = int(np.add.reduceat(moving, walk.starts).max())
        look: dict[str, Any] = {"lw": 2.4, "zorder": 5, "solid_capstyle": "butt"}
        self.lines = [ax.plot([], [], **look)[0] for _ in range(most)]
        self.artists += self.lines
        self.tiles = [self._rectangle(6, 1.2) for _ in range(most)]
        self.current = self._rectangle(7, 2.6)
        self.current.set(fill=False, edgecolor=theme.accent)
        self._build_sram(sram)
        self._stage = -1

    # -- building -------------------------------------------------------------------------------

    def _place(self, aspect: float) -> None:
        """Place the grid, and the strips with their names around it."""
        around, out = diagram.sides(self.walk.trace), _STRIP + _GAP
        x, y = 0.07 + len(around["left"]) * out, 0.075 + len(around["top"]) * out
        w = aspect - x - len(around["right"]) * out - 0.03
        h = 1 - y - len(around["bottom"]) * out - 0.07
        t_r, t_c = diagram.one_grid(self.walk.trace)
        self.box, self.in_grid = (x, y, w, h), around.pop("grid")
        self.grid = self._image(self.box, t_r, t_c)
        touched = diagram.first_touch(self.walk)
        self.strips: dict[str, _Strip] = {}
        pitch = float(np.diff(self.ax.transData.transform([(0, 0), (out, 0)])[:, 0])[0])
        size = min(12.5, 0.44 * pitch)  # so that names below neighbouring strips do not touch
        for side, names in around.items():
            for n, name in enumerate(names):
                before, after, half = (n + 1) * out, _GAP + n * out, _STRIP / 2
                box, (tx, ty, ha, va) = {  # its box, and where and how its name stands
                    "left": ((x - before, y, _STRIP, h), (half, h + 0.012, "center", "top")),
                    "right": ((x + w + after, y, _STRIP, h), (half, -0.012, "center", "bottom")),
                    "top": ((x, y - before, w, _STRIP), (-0.012, half, "right", "center")),
                    "bottom": ((x, y + h + after, w, _STRIP), (w + 0.012, half, "left", "center")),
                }[side]
                word = diagram.SYMBOLS.get(name, name)
                upright = len(word) > 3 and name not in self.key_side  # wider than its strip
                self.ax.text(
                    box[0] + tx, box[1] + ty, word, ha=ha, va=va, rotation=90 if upright else 0,
                    fontsize=min(10, size) if upright else size, fontweight="bold",
                )  # fmt: skip
                image = self._image(box, *((1, t_c) if name in self.key_side else (t_r, 1)))
                along = (n + 1) / (len(names) + 1)
                self.strips[name] = _Strip(box, image, touched[name], along)

    def _image(self, box: Box, rows: int, cols: int) -> AxesImage:
        """Add a grid of coloured tiles to the Axes; lines separate tiles that are large enough."""
        x, y, w, h = box
        edges = (x, x + w, y + h, y)
        image = AxesImage(self.ax, extent=edges, interpolation="nearest", zorder=0)
        self.ax.add_image(image)
        pixels = self.ax.transData.transform([(0, 0), (w / cols, h / rows)])
        wide, high = np.abs(np.diff(pixels, axis=0)[0])
        down = [x + n * w / cols for n in range(1, cols)] if wide >= _GAP_FROM else []
        across = [y + n * h / rows for n in range(1, rows)] if high >= _GAP_FROM else []
        lines = [[(at, y), (at, y + h)] for at in down] + [[(x, at), (x + w, at)] for at in across]
        gaps = LineCollection(lines, colors=self.theme.background, linewidths=0.72, zorder=1)
        self.ax.add_collection(gaps, autolim=False)
        self.artists += [image, gaps]
        return image

    def _rectangle(self, zorder: int, width: float) -> Rectangle:
        patch = Rectangle(_HIDDEN, 0, 0, lw=width, edgecolor=self.theme.text, zorder=zorder)
        self.ax.add_patch(patch)
        self.artists.append(patch)
        return patch

    def _build_edges(self) -> None:
        """Draw lines between splits of the keys, and lines on K and V between KV-cache pages."""
        x, y, w, h = self.box
        t_r, t_c = self.kinds[0].shape
        schedule, dx, dy = self.walk.trace.schedule, w / t_c, h / t_r
        parts = [
            [(x + j * dx, y + i * dy), (x + j * dx, y + (i + 1) * dy)]
            for i, j in diagram.part_edges(schedule)
        ]
        boxes = [s.box for name, s in self.strips.items() if name in self.key_side]
        pages = [
            [(x + at * dx, top), (x + at * dx, top + high)]
            for at in diagram.page_edges(schedule)
            for _, top, _, high in boxes
        ]
        for lines, width in ((parts, 3.0), (pages, 1.2)):
            edges = LineCollection(lines, colors=self.theme.text, linewidths=width, zorder=4)
            self.ax.add_collection(edges, autolim=False)
            self.artists.append(edges)

    def _build_sram(self, ax: Axes) -> None:
        """Draw a bar for the contents of SRAM, `full` bytes long, and the buffers' names below."""
        walk, limit = self.walk, self.walk.trace.device.sram_bytes
        ax.set(xlim=(0, self.full), ylim=(0, 1), xticks=[], yticks=[], facecolor=self.theme.panel)
        for spine in ax.spines.values():
            spine.set(visible=True, color=self.theme.grid)
        longest = max((len(diagram.SYMBOLS.get(name, name)) for name in walk.buffers), default=0)
        across = int(ax.get_window_extent().width // max(42, 12 + 6 * longest))  # names in a row
        self.bars = []
        for n, name in enumerate(walk.buffers):
            look = tensor_style(name, self.theme, walk.trace.tensors)
            bar = Rectangle((0, 0), 0, 1, lw=0.8, **look)
            ax.add_patch(bar)
            self.bars.append(bar)
            self.artists.append(bar)
            square, word = (
                ("■", 0, bar.get_facecolor()),
                (diagram.SYMBOLS.get(name, name), 12, None),
            )
            for text, right, ink in (square, word):
                at, offset = (n % across / across, 0), (right, -4 - 11 * (n // across))
                note(ax, text, at, offset, "axes fraction", va="top", fontsize=9.5, color=ink)
        if self.full > limit:  # the other trace holds more, or a GPU block also uses registers
            mark = ax.axvline(limit, color=self.theme.text, ls=(0, (2, 1)), lw=2, zorder=5)
            self.artists.append(mark)
        self.sram_text = ax.text(
            0, 1.12, "", transform=ax.transAxes, fontsize=11.5, color=self.theme.muted
        )
        self.artists.append(self.sram_text)

    # -- one step -------------------------------------------------------------------------------

    def update(self, step: int) -> None:
        """Update every Matplotlib artist so that the scene shows the state at this step."""
        walk = self.walk
        stage, i, j = int(walk.stage[step]), int(walk.i[step]), int(walk.j[step])
        self.grid.set_data(self._grid_colors(step, stage))
        for name, strip in self.strips.items():
            strip.image.set_data(self._strip_colors(name, step))
        if stage != self._stage:
            self.corners.set_verts(self._corner_polygons(stage))
            self._stage = stage
        self._flights(step, i, j)
        held = ", ".join(["the strips", *self.in_grid])
        note = f", {walk.notes[step]}" if walk.notes[step] else ""
        self.stage_text.set_text(f"stage {walk.trace.stages[stage].name}{note} · HBM: {held}")
        self._update_sram(step)

    def _tint(self, tensor: str) -> str:
        return tint(tensor, self.theme.name, self.walk.trace.tensors)

    def _grid_colors(self, step: int, stage: int) -> np.ndarray:
        theme, walk = self.theme, self.walk
        low = mix(theme.panel, tint("S", theme.name), 0.3)
        high = mix(theme.panel, tint("S", theme.name), 0.75)
        skipped = mix(theme.background, theme.grid, 0.45)
        image = np.where(self.kinds[stage][..., None] > 0, rgb(theme.panel), skipped)
        first = int(np.searchsorted(walk.stage, stage))
        part = slice(first, step + 1)
        seen = walk.visit[part] >= 0
        share = walk.order[part][seen] / (self.visits[stage] - 1)
        shades = low + (high - low) * share[:, None]
        image[walk.i[part][seen], walk.j[part][seen]] = shades
        return image.astype(np.uint8)

    def _strip_colors(self, name: str, step: int) -> np.ndarray:
        theme, own = self.theme, self._tint(name)
        idle, seen = mix(theme.background, own, 0.22), mix(theme.background, own, 0.55)
        moved = self.strips[name].first <= step
        colors = np.where(moved[:, None], seen, idle).astype(np.uint8)
        return colors[None] if name in self.key_side else colors[:, None]

    def shades(self) -> np.ndarray:
        """Return the scene's colours and its ramp's samples, a uint8 array of shape (n, 3)."""
        theme = self.theme
        own = [self._tint(name) for name in (*self.strips, *self.in_grid)]
        held = [self._tint(name) for name in self.walk.buffers]
        s = tint("S", theme.name)
        ramp = [mix(theme.panel, s, share) for share in np.linspace(0.3, 0.75, 40)]
        strips = [mix(theme.background, c, share) for c in own for share in (0.22, 0.55, 1)]
        skipped = mix(theme.background, theme.grid, 0.45)
        return np.array([*ramp, *strips, *map(rgb, held), skipped]).astype(np.uint8)

    def _corner_polygons(self, stage: int) -> list[Any]:
        x, y, w, h = self.box
        t_r, t_c = self.kinds[stage].shape
        dx, dy = w / t_c, h / t_r
        if max(t_r, t_c) > 64:  # too small to see
            return []
        polygons = []
        for i, j, upper in diagram.corners(self.kinds[stage]):
            side = 0.35 * min(dx, dy) * (1 if upper else -1)
            tip_x, tip_y = x + (j + upper) * dx, y + (i + (not upper)) * dy
            polygons.append([(tip_x - side, tip_y), (tip_x, tip_y), (tip_x, tip_y + side)])
        return polygons

    def cell(self, i: int, j: int) -> Box:
        """Return the box of score tile (i, j), of column j if i = -1, or of row i if j = -1."""
        x, y, w, h = self.box
        t_r, t_c = self.kinds[0].shape
        if i >= 0:
            y, h = y + i * h / t_r, h / t_r
        if j >= 0:
            x, w = x + j * w / t_c, w / t_c
        return x, y, w, h

    def _flights(self, step: int, i: int, j: int) -> None:
        """Draw a step's transfers as lines to score tile (i, j); writes to HBM are dashed."""
        target = self.cell(i, j)
        self.current.set_bounds(*target)
        moves = self.walk.moves(step)
        for n, (line, tile) in enumerate(zip(self.lines, self.tiles, strict=True)):
            if n >= len(moves):
                tile.set_bounds(*_HIDDEN, 0, 0)
                line.set_data([], [])
                continue
            e = moves[n]
            name = self.walk.trace.tensors[e["tensor"]].removesuffix("_acc")
            shade = self._tint(name)
            tile.set_facecolor(shade)
            if name not in self.strips:
                tile.set_bounds(*self.cell(int(e["i"]), int(e["j"])))
                line.set_data([], [])
                continue
            strip = self.strips[name]
            x, y, w, h = strip.box
            if name in self.key_side:
                w /= len(strip.first)
                x += int(e["j"]) * w
                at = x + strip.along * w
                line.set_data([at, at], [y + h / 2, np.clip(y, target[1], target[1] + target[3])])
            else:
                h /= len(strip.first)
                y += int(e["i"]) * h
                at = y + strip.along * h
                line.set_data([x + w / 2, np.clip(x, target[0], target[0] + target[2])], [at, at])
            tile.set_bounds(x, y, w, h)
            line.set(color=shade, linestyle="-" if e["op"] == LOAD else (0, (2, 1)))

    def _update_sram(self, step: int) -> None:
        left = 0
        for size, bar in zip(self.walk.on_chip[step].tolist(), self.bars, strict=True):
            bar.set(x=left, width=size)
            left += size
        device = self.walk.trace.device
        words = f"SRAM of {device.name}: {left:,} B, {left / device.sram_bytes:.0%}"
        if left > device.sram_bytes:
            words = f"SRAM {device.sram_bytes:,} B + registers {left - device.sram_bytes:,} B"
        self.sram_text.set(text=words, fontsize=11.5 * min(1, 34 / len(words)))
