"""`lab`: one self-contained HTML page that counts any problem as its controls move.

The page needs neither server nor network. Its numbers come from `export`, its arithmetic from the
package's Python (`javascript`), and `model.js` evaluates both. A content security policy that names
the program by its hash lets nothing else run and nothing leave the page.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from flashsim.errors import own_errors
from flashsim.problem import checks
from flashsim.schedule import closed_sums
from flashsim.schedule.split import fa3, fill_once
from flashsim.viz.laboratory import rows
from flashsim.viz.laboratory.export import payload
from flashsim.viz.laboratory.javascript import PRELUDE, translated
from flashsim.viz.palette import THEMES
from flashsim.viz.player.page import Page, assembled

_SCRIPTS = ("model.js", "sentence.js", "figures.js", "lab.js")


@own_errors
def lab(path: str | Path | None = None, *, theme: str = "auto") -> Page:
    """Build the tile lab: sliders for shape, mask, algorithm, tile and device; results at once.

    A link holds the page's state after a ``#``, so a slide can open the lab at a question.

    Parameters
    ----------
    path : path-like, optional
        The file to write.
    theme : {"auto", "light", "dark"}
        "auto" follows the reader's system; the page has a switch.

    Returns
    -------
    Page

    Raises
    ------
    OptionError
        For an unknown theme.
    """
    checks.one_of("theme", theme, ("auto", *THEMES))
    data = {**payload(), "theme": theme, "themes": _themes()}
    result = Page(
        assembled(
            "flashsim.viz.laboratory", "lab", _SCRIPTS, data, "Tile lab", translated_python()
        ),
        height=1000,
    )
    if path is not None:
        result.save(path)
    return result


@cache
def translated_python() -> str:
    """The package's arithmetic as JavaScript."""
    parts = closed_sums.Strip, closed_sums._floors, fill_once, fa3, rows.Prefix, rows.Cells
    return PRELUDE + translated(*parts)


def _themes() -> dict[str, Any]:
    names = ("name", "background", "panel", "text", "muted", "grid", "accent", "cycle")
    return {
        name: {**{key: getattr(theme, key) for key in names}, "tensors": dict(theme.tensors)}
        for name, theme in THEMES.items()
    }
