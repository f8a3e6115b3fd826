"""The look of Matplotlib figures, and the format of numbers on them."""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.mathtext import MathTextParser
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FuncFormatter

from flashsim.errors import own_errors
from flashsim.viz import palette
from flashsim.viz.palette import Theme

#: Line styles, which distinguish lines in print without colour.
DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)), (0, (1, 1)), (0, (10, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P")
HATCH = "////"  # the hatch of gradients
#: A 16:9 slide, in inches; text of the sizes below can be read from the last row of a lecture hall.
SLIDE = (9.6, 5.4)


def rc(theme: Theme) -> Any:
    """Return a theme's Matplotlib settings (rcParams), with large text and thin frames."""
    return {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme.background),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), theme.muted),
        **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color"), theme.text),
        **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), theme.text),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "font.size"), 12.5),
        "axes.titlelocation": "left",
        "axes.titlesize": 15,
        "axes.titleweight": "bold",
        "axes.labelsize": 14,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=list(theme.cycle)),
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "legend.fontsize": 12,
        "lines.linewidth": 2.4,
        "lines.markersize": 7,
        "hatch.linewidth": 1.2,
        "figure.figsize": SLIDE,
        "figure.dpi": 100,
    }


def theme_of(ax: Axes) -> Theme:
    """Return the theme for an Axes: "dark" if its background is dark, else "light"."""
    return palette.theme("light" if _is_light(ax.get_facecolor()) else "dark")


def themed(draw: Callable[..., None]) -> Callable[..., Axes]:
    """Give a drawing function the optional arguments `ax` and `theme`, and let it return `ax`.

    The drawing function's docstring must have a section Parameters, to which `ax` and `theme` are
    added.
    """

    @functools.wraps(draw)
    def plot(*data: Any, ax: Axes | None = None, theme: str | None = None, **options: Any) -> Axes:
        signature.bind(*data, ax=ax, theme=theme, **options)  # fails before a figure is made
        chosen = (
            theme_of(ax) if ax is not None and theme is None else palette.theme(theme or "light")
        )
        with plt.rc_context(rc(chosen)):
            figure = None
            if ax is None:
                figure, ax = plt.subplots(layout="constrained")
            try:
                draw(*data, ax=ax, theme=chosen, **options)
            except BaseException:
                if figure is not None:  # a notebook would show the empty figure
                    plt.close(figure)
                raise
            for text in ax.figure.findobj(Text):
                text.set_parse_math(_is_math(text.get_text()))
        ax._repr_png_ = functools.partial(_cell, ax)  # type: ignore[attr-defined]
        return ax

    signature = inspect.signature(draw)
    extra = {"ax": "Axes | None", "theme": "str | None"}
    shown = [
        p.replace(default=None, annotation=extra[p.name]) if p.name in extra else p
        for p in signature.parameters.values()
    ]
    plot.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=shown, return_annotation="Axes"
    )
    if draw.__doc__:  # there is none under python -OO
        plot.__doc__ = _described(draw.__doc__)
    plot.__annotations__ = {**draw.__annotations__, **extra, "return": "Axes"}
    return own_errors(plot)


_AX_AND_THEME = """
ax : Axes, optional
    The Axes to draw into, which keep their background. Default: a new figure in a slide's shape.
theme : {"light", "dark"}, optional
    Default: the theme that fits the background of `ax`; "light" for a new figure.
"""


def _described(doc: str) -> str:
    """Return a docstring with `ax` and `theme` at the end of its section Parameters."""
    parameters, raises, rest = inspect.cleandoc(doc).partition("\n\nRaises\n")
    return parameters + _AX_AND_THEME + raises.removeprefix("\n") + rest


@functools.cache
def _is_math(text: str) -> bool:
    """Return whether Matplotlib can parse a text as math; if not, "$" is drawn as it is."""
    if "$" not in text:
        return True
    try:
        MathTextParser("path").parse(text)
    except ValueError:
        return False
    return True


def _cell(ax: Axes) -> bytes:
    """Return the figure of an Axes as PNG, for a notebook to show instead of ``<Axes: ...>``."""
    buffer = io.BytesIO()
    figure = ax.figure.canvas.figure  # the whole figure, also for an Axes of a subfigure
    figure.savefig(buffer, format="png")
    if "inline" in plt.get_backend():  # the inline backend would show the figure a second time
        plt.close(figure)
    return buffer.getvalue()


def note(
    ax: Axes, text: str, at: Any, offset: Any = (0, 0), within: Any = "data", **look: Any
) -> Annotation:
    """Write a text `offset` points beside a point; `within` is Matplotlib's `xycoords`."""
    return ax.annotate(text, at, offset, xycoords=within, textcoords="offset points", **look)


def tensor_style(tensor: str, theme: Theme, among: Sequence[str] = ()) -> dict[str, Any]:
    """Return the look of a bar for a tensor `among` others: its colour, hatched for a gradient."""
    hatch = HATCH if palette.is_gradient(tensor.removesuffix("_acc")) else None
    color = palette.tint(tensor, theme.name, among)
    return {"facecolor": color, "edgecolor": theme.background, "hatch": hatch}


def beside_axes(ax: Axes, **legend: Any) -> None:
    """Write the legend at the right of the axes."""
    ax.legend(loc="upper left", **{"bbox_to_anchor": (1, 1), **legend})


def heading(ax: Axes, theme: Theme, title: str, about: str = "") -> None:
    """Write a title and, in smaller print below it, what data is shown."""
    ax.set_title(title, pad=24 if about else 8, fontsize=15 * min(1, 62 / max(len(title), 1)))
    if about:
        small = 11 * min(1, 105 / len(about))
        note(ax, about, (0, 1), (0, 9), "axes fraction", fontsize=small, color=theme.muted)


#: Positions of a name beside a mark, in order of preference: offset in points, and alignment.
_BESIDE = (
    *((10, 0, "left", "center"), (8, 8, "left", "bottom"), (8, -8, "left", "top")),
    *((-8, 8, "right", "bottom"), (-8, -8, "right", "top"), (0, 12, "center", "bottom")),
    *((0, -12, "center", "top"), (16, 30, "left", "bottom"), (16, -30, "left", "top")),
    *((-16, 30, "right", "bottom"), (40, 0, "left", "center"), (60, -50, "left", "top")),
)


def name_marks(ax: Axes, marks: Sequence[tuple[float, float, str, str]], size: float = 11) -> None:
    """Write a name beside each mark, at a position where it covers no line and no other name.

    Call the function after the limits and scales of the axes are final.
    """
    ax.figure.canvas.figure.draw_without_rendering()  # runs the layout, which places the axes
    lines = [line for line in ax.lines if line.get_linestyle() != "None"]
    paths = [line.get_transform().transform_path(line.get_path()) for line in lines]
    taken: list[Any] = []
    for x, y, text, color in marks:
        name = note(
            ax, text, (x, y), fontsize=size, fontweight="bold", zorder=5, annotation_clip=False,
            color=palette.ink(color, theme_of(ax)),
        )  # fmt: skip
        for right, up, ha, va in _BESIDE:
            name.set(position=(right, up), ha=ha, va=va)
            box = name.get_window_extent().padded(2)
            inside = ax.bbox.x0 <= box.x0 and ax.bbox.y0 <= box.y0 and box.y1 <= ax.bbox.y1
            if (
                inside
                and not box.count_overlaps(taken)
                and not any(path.intersects_bbox(box, filled=False) for path in paths)
            ):
                break
        taken.append(name.get_window_extent())


def series_style(theme: Theme, n: int) -> dict[str, Any]:
    """Return the colour, dash and marker of line `n` of a plot, for ``Axes.plot``."""
    looks = {"color": theme.cycle, "ls": DASHES, "marker": MARKERS}
    return {name: each[n % len(each)] for name, each in looks.items()}


def ramp(theme: Theme) -> LinearSegmentedColormap:
    """Return a colour ramp of one hue that is readable in print and with colour blindness."""
    light = ("#d5e3fb", "#0953dc", "#06204f")
    dark = ("#1c3357", "#659eff", "#e4eeff")
    return LinearSegmentedColormap.from_list(
        f"tiles-{theme.name}", light if theme.name == "light" else dark
    )


def ink_on(shade: Any) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    return "#000000" if _is_light(shade) else "#ffffff"


def _is_light(shade: Any) -> bool:
    r, g, b = to_rgb(shade)
    return 0.299 * r + 0.587 * g + 0.114 * b > 0.5


def human(value: float, unit: str = "B") -> str:
    """Format a quantity to 3 digits with a decimal prefix: ``human(4_456_448) == "4.46 MB"``."""
    if value < 0:
        return "−" + human(-value, unit)
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:  # 999,999 B is 1.00 MB, not 1000 kB
            scaled = max(value / size, 1)
            return (
                f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {prefix}{unit}"
            )
    return f"{value:.4g} {unit}"


def unit_axis(axis: Any, unit: str = "B") -> None:
    """Format tick labels with decimal prefixes (kB is 1000 B) and without trailing zeros."""

    def text(value: float, _: Any) -> str:
        number, suffix = human(value, unit).split(" ", 1)
        return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {suffix}"

    axis.set_major_formatter(FuncFormatter(text))


def binary_axis(axis: Any) -> None:
    """Format tick labels of on-chip sizes as powers of two: KiB is 1024 B, MiB 1024 KiB."""

    def text(value: float, _: Any) -> str:
        if value >= 1 << 20:
            return f"{value / (1 << 20):.4g} MiB"
        return f"{value / 1024:.4g} KiB" if value >= 1024 else f"{value:.4g} B"

    axis.set_major_formatter(FuncFormatter(text))


def count_axis(axis: Any) -> None:
    """Format tick labels of lengths in full ("4,096", not "4 Ki")."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
