"""Figures as files, in any format that Matplotlib writes; never an incomplete file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from flashsim.errors import BackendUnavailable, DTypeError, OptionError, choices, own_errors, shown
from flashsim.problem import checks
from flashsim.report import whole

#: Text of SVG and PDF stays text: it can be searched, selected and edited, and prints as type.
_AS_TEXT = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.hashsalt": "flashsim",
}
#: Of a picture: pixels an inch at least, and pixels in all at most.
LEAST_DPI, MOST_PIXELS = 10, 100_000_000
#: Of a figure for slides, in inches: smaller than a plot's, so that its type is larger.
_SLIDE = (8.0, 4.5)
#: Left out, so that the same figure is the same bytes.
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
    """Write a figure to a file; an old file is replaced only by a complete one.

    Parameters
    ----------
    figure : Axes or Figure
        The return value of a plot of `flashsim.viz`.
    path : path-like
        Its suffix chooses the format: .png, .svg, .pdf, or another format of Matplotlib.
    dpi : float
        Pixels per inch, for pixel formats: a slide of 9.6 x 5.4 inches has 1440 x 810.
    size : (float, float), optional
        Width and height in inches; default: as it was drawn.
    slides : bool
        For slides: 16:9, with larger type, 1920 x 1080 pixels as .png, and beside it as .svg,
        whatever the suffix, `dpi` and `size` say.

    Returns
    -------
    Path

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
        raise OptionError(f"cannot write {path.name!r}; {choices(path.suffix, sorted(formats))}")
    if not dpi > 0 or (size is not None and not (len(size) == 2 and min(size) > 0)):
        raise OptionError(f"dpi and size must be positive, got {dpi!r} and {shown(size)}")
    width, height = (dpi * side for side in size or figure.get_size_inches())
    if not dpi >= LEAST_DPI or not width * height <= MOST_PIXELS:
        raise OptionError(
            f"{width:.3g} x {height:.3g} pixels at {dpi:g} dpi; a picture needs at least "
            f"{LEAST_DPI} dpi for its text, and at most {MOST_PIXELS:,} pixels in all"
        )
    if size is not None:
        figure.set_size_inches(size)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="constrained_layout not applied")
        try:
            with mpl.rc_context(_AS_TEXT), whole(path) as part:  # type: ignore[arg-type]
                figure.savefig(part, format=ending, dpi=dpi, metadata=_UNDATED.get(ending))
        except UserWarning:
            raise OptionError(
                f"{figure.get_figwidth():g} x {figure.get_figheight():g} inches leave no room for "
                "this figure between its labels; make it larger"
            ) from None
        except RuntimeError as error:  # .pgf is typeset by a LaTeX that may not be here
            raise BackendUnavailable(f"cannot write {path.name!r} here: {error}") from None
    return path
