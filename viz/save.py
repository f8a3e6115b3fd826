"""Save figures in any format of Matplotlib; a failed write leaves no partial file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from flashsim.errors import BackendUnavailable, DTypeError, OptionError, choices, own_errors, shown
from flashsim.problem import checks
from flashsim.report import whole

#: Keep text in SVG and PDF as text, so that it can be searched, selected and edited.
_AS_TEXT = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.hashsalt": "flashsim",
}
#: Limits of a picture: the fewest pixels per inch, and the most pixels in total.
LEAST_DPI, MOST_PIXELS = 10, 100_000_000
#: The size of a figure for slides, in inches. It is smaller than a plot's, so text is larger.
_SLIDE = (8.0, 4.5)
#: Metadata that is left out, so that the same figure always gives the same bytes.
_UNDATED = {
    "png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None},
}  # fmt: skip


@own_errors
def save_figure(
    figure: Any,
    path: str | Path,
    *,
    dpi: float = 150,
    size: tuple[float, float] | None = None,
    slides: bool = False,
) -> Path:
    """Write a figure to a file and return the path; an old file is replaced only on success.

    Parameters
    ----------
    figure : Axes or Figure
        The return value of a plot of `flashsim.viz`.
    path : path-like
        Its suffix chooses the format: .png, .svg, .pdf, or another format of Matplotlib.
    dpi : float
        Pixels per inch, for pixel formats.
    size : (float, float), optional
        Width and height in inches. Default: the size with which the figure was drawn.
    slides : bool
        Write the figure for slides: 16:9 with larger text, as a .png of 1920 x 1080 pixels and as
        an .svg. The suffix, `dpi` and `size` are ignored.

    Raises
    ------
    OptionError
        For an unknown suffix, a resolution or size that is not positive, a size that is too small
        for the labels, too many pixels, or a folder that cannot be written to.
    BackendUnavailable
        For .pgf without LaTeX.
    """
    import matplotlib as mpl

    path = Path(checks.path("path", path))
    if slides:
        save_figure(figure, path.with_suffix(".svg"), size=_SLIDE)
        return save_figure(figure, path.with_suffix(".png"), dpi=1920 / _SLIDE[0], size=_SLIDE)
    if not hasattr(figure, "figure"):
        raise DTypeError(f"figure must be an Axes or a Figure, got {shown(figure)}")
    figure = figure.figure.canvas.figure  # of an Axes or a subfigure the whole
    formats = figure.canvas.get_supported_filetypes()
    ending = path.suffix.lower().lstrip(".")
    if ending not in formats:
        raise OptionError(
            f"cannot write {path.name!r}, because flashsim knows no format with this ending; "
            f"choose from {choices(path.suffix, sorted(formats))}"
        )
    if not dpi > 0 or (size is not None and not (len(size) == 2 and min(size) > 0)):
        raise OptionError(
            f"dpi= and size= must be positive, got dpi={dpi!r} and size={shown(size)}"
        )
    width, height = (dpi * side for side in size or figure.get_size_inches())
    if not dpi >= LEAST_DPI or not width * height <= MOST_PIXELS:
        raise OptionError(
            f"the picture would have {width:.3g} x {height:.3g} pixels at {dpi:g} dpi; a picture "
            f"needs at least {LEAST_DPI} dpi, and may have at most {MOST_PIXELS:,} pixels"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="constrained_layout not applied")
        try:
            if size is not None:
                figure.set_size_inches(size)
                _fit_texts(figure, dpi)
            with mpl.rc_context(_AS_TEXT), whole(path) as part:  # type: ignore[arg-type]
                figure.savefig(part, format=ending, dpi=dpi, metadata=_UNDATED.get(ending))
        except UserWarning:
            raise OptionError(
                f"a size of {figure.get_figwidth():g} x {figure.get_figheight():g} inches leaves "
                "no room for the plot between its labels; pass a larger size"
            ) from None
        except RuntimeError as error:  # .pgf needs LaTeX, which may not be installed
            raise BackendUnavailable(f"cannot write {path.name!r} here: {error}") from None
    return path


def _fit_texts(figure: Any, dpi: float) -> None:
    """Make titles and lines below them smaller that the right edge of the figure would cut."""
    from matplotlib.text import Text

    before = figure.dpi
    figure.set_dpi(dpi)  # a text's width is not quite in proportion to it
    figure.draw_without_rendering()
    for text in (child for ax in figure.axes for child in ax.get_children()):
        if not isinstance(text, Text) or not text.get_text():
            continue
        box, right = text.get_window_extent(), 0.98 * figure.bbox.x1
        if box.width > right / 2 and box.x1 > right:
            text.set_fontsize(text.get_fontsize() * (right - box.x0) / box.width)
    figure.set_dpi(before)
