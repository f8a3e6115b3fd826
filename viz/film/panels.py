"""The panels beside an animation's diagram: byte totals, transfers of a step, and m and l."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from flashsim.schedule.names import LOAD, OPS
from flashsim.trace.steps import Steps
from flashsim.viz.data import sources
from flashsim.viz.data.diagram import SYMBOLS
from flashsim.viz.data.statistics import RowStatistics
from flashsim.viz.palette import Theme, tint
from flashsim.viz.style import human


class StatisticsPanel:
    """Curves of a query row's m, alpha and l; each key tile adds a point to the curves."""

    def __init__(
        self, panels: Sequence[Axes], s: RowStatistics, walk: Steps, theme: Theme, left: float
    ) -> None:
        self.by_tile, self.lines = s.by_tile, list[Line2D]()
        self.at = self._rows_at(walk, s)
        longest = max(self.by_tile.values(), key=lambda statistics: len(statistics.j))
        series = (("m", "m", "m"), ("α", "alpha", "P"), ("l", "l", "l"))
        for ax, (name, field, shade) in zip(panels, series, strict=True):
            values = np.concatenate(
                [getattr(statistics, field) for statistics in self.by_tile.values()]
            )
            finite, count = values[np.isfinite(values)], len(longest.j)
            span = (finite.min(), finite.max()) if len(finite) else (0, 1)
            pad = 0.15 * (span[1] - span[0]) or 1.0
            ax.set(
                xlim=(-0.5, max(count - 0.5, 0.5)), ylim=(span[0] - pad, span[1] + pad), ylabel=name
            )
            ax.yaxis.label.set(rotation=0, fontweight="bold", fontsize=13, ha="right", va="center")
            ax.yaxis.set_major_locator(MaxNLocator(3))
            ax.tick_params(labelsize=9, labelbottom=ax is panels[-1])
            every = -(-count // 12)  # so that numbers do not touch
            alike = all(
                (statistics.j == longest.j[: len(statistics.j)]).all()
                for statistics in self.by_tile.values()
            )
            labels = longest.j if alike else np.arange(1, count + 1)
            ax.set_xticks(range(0, count, every), labels[::every].tolist())
            (line,) = ax.plot(
                [], [], color=theme.text, lw=1.8, drawstyle="steps-post", marker="o", ms=5,
                mfc=tint(shade, theme.name), mec=theme.text, mew=1,
            )  # fmt: skip
            self.lines.append(line)
        panels[-1].set_xlabel(
            "key tile j" if alike else "visit of the row", fontsize=10, labelpad=1
        )
        self.text = panels[0].figure.text(
            left, panels[0].get_position().y1 + 0.015, "", fontsize=11, color=theme.muted
        )
        self.artists: list[Artist] = [*self.lines, self.text]

    def _rows_at(self, walk: Steps, s: RowStatistics) -> list[int]:
        """Return the row tile to show at each step: the step's, or one shown before."""
        rows, tile = [], s.tile if not s.others else next(iter(self.by_tile))
        for i in walk.i.tolist():
            tile = i if i in self.by_tile and s.others else tile
            rows.append(tile)
        return rows

    def update(self, step: int) -> None:
        """Draw the statistics from the first step up to `step`."""
        s = self.by_tile[self.at[step]]
        n = int(np.searchsorted(s.steps, step, side="right"))
        for line, values in zip(self.lines, (s.m, s.alpha, s.l), strict=True):
            line.set_data(np.arange(n), values[:n])
        if not n:
            self.text.set_text(f"row {s.row}, in row tile {s.tile}: not reached yet")
            return
        m, alpha, l = s.m[n - 1], s.alpha[n - 1], s.l[n - 1]
        top = "−∞" if np.isneginf(m) else f"{m:.2f}"
        self.text.set_text(f"row {s.row}: m = {top}, α = {alpha:.2g}, l = {l:.3g}")


class Counters:
    """Running totals of a trace, such as bytes and FLOPs, as text in `columns` columns."""

    def __init__(self, ax: Axes, walk: Steps, theme: Theme, label: str, columns: int) -> None:
        self.walk = walk
        ax.axis("off")
        _fit(ax.text(0, 1, label, va="top", fontsize=15, fontweight="bold", parse_math=False), ax)
        words = sources.about_shown(walk.trace)
        about, long = ", ".join(words), len(words[0]) > 30
        if columns == 2:
            lines = [words[:1], words[1:4], words[4:]] if long else [words[:3], words[3:]]
            about = ",\n".join(map(", ".join, lines))
        level, size = (0.78 if columns > 2 else 0.89 if long else 0.87), (8.5 if long else 10)
        self.about = ax.text(0, level, about, va="top", fontsize=size, color=theme.muted)
        _fit(self.about, ax)
        facts = {"loaded": 0, "stored": 1}
        if walk.hbm_bytes[-1, 2]:
            facts["reduced"] = 2
        self.ops = list(facts.values())
        names = [*facts, "computed", "FLOP per byte"]
        columns = max(columns, len(names) if columns > 2 else columns)
        top = 0.62 if columns == 2 else 0.55
        height = top / -(-len(names) // columns)
        self.values = []
        for n, name in enumerate(names):
            x, y = n % columns / columns, top - n // columns * height
            size = {2: 13, 4: 11}.get(columns, 8.8)
            value = ax.text(x, y, "", fontsize=size, fontweight="bold", va="top")
            ax.text(x, y - 0.45 * height, name, fontsize=min(size, 10), color=theme.muted, va="top")
            self.values.append(value)
        self.artists: list[Artist] = list(self.values)

    def update(self, step: int) -> None:
        """Write the totals from the first step up to `step`."""
        moved, flops = self.walk.hbm_bytes[step], int(self.walk.flops[step])
        texts = [human(int(moved[op])) for op in self.ops]
        total = int(moved.sum())
        texts += [human(flops, "FLOP"), f"{flops / total:.1f}" if total and flops else "–"]
        for value, text in zip(self.values, texts, strict=True):
            value.set_text(text)


def _fit(text: Text, ax: Axes) -> None:
    """Make a text smaller until it fits the width of its Axes."""
    room = ax.get_window_extent().width
    while (wide := text.get_window_extent().width) > room:  # letters do not shrink in proportion
        text.set_fontsize(float(text.get_fontsize()) * 0.99 * room / wide)


class Moves:
    """A list of a step's transfers, one per line; a dashed mark means a transfer to HBM."""

    ROWS = 8

    def __init__(self, ax: Axes, walk: Steps, theme: Theme) -> None:
        self.walk, self.theme = walk, theme
        ax.set(xlim=(0, 1), ylim=(self.ROWS + 1, 0))
        ax.axis("off")
        ax.text(0, 0.5, "moved in this step", va="center", fontsize=11.5, color=theme.muted)
        self.rows = [self._row(ax, n + 1.5) for n in range(self.ROWS)]
        self.artists: list[Artist] = [artist for row in self.rows for artist in row]

    def _row(self, ax: Axes, y: float) -> tuple[Line2D, Text, Text]:
        (line,) = ax.plot([0.01, 0.14], [y, y], lw=4, solid_capstyle="butt", dash_capstyle="butt")
        name = ax.text(0.18, y, "", va="center", fontsize=11.5)
        size = ax.text(1, y, "", va="center", ha="right", fontsize=11.5)
        return line, name, size

    def update(self, step: int) -> None:
        """List the transfers of a step; the last line counts the transfers that do not fit."""
        moves = self.walk.moves(step)
        for n, (line, name, size) in enumerate(self.rows):
            shown = n < len(moves)
            for artist in (line, name, size):
                artist.set_visible(shown)
            if not shown:
                continue
            if n == self.ROWS - 1 and len(moves) > self.ROWS:
                line.set_visible(False)
                name.set_text(f"and {len(moves) - n} more")
                size.set_text(human(int(moves["bytes"][n:].sum())))
                continue
            e = moves[n]
            tensor = self.walk.trace.tensors[e["tensor"]].removesuffix("_acc")
            line.set(
                color=tint(tensor, self.theme.name, self.walk.trace.tensors),
                linestyle="-" if e["op"] == LOAD else (0, (1.6, 0.8)),
            )
            name.set_text(f"{OPS[e['op']]} {SYMBOLS.get(tensor, tensor)}")
            size.set_text(human(int(e["bytes"])))
