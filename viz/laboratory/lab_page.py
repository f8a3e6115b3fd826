"""`lab` writes the tile lab: one HTML page that counts bytes while the reader moves sliders.

The page needs neither server nor network. The formulas come from `export`; `model.js` evaluates
them. A content security policy allows only the script with the page's own hash, so that no other
script can run and no data can leave the page.
"""

from __future__ import annotations

from pathlib import Path

from flashsim.errors import own_errors
from flashsim.problem import checks
from flashsim.viz.laboratory.export import payload
from flashsim.viz.palette import THEMES
from flashsim.viz.player.page import Page, assembled

_SCRIPTS = [
    f"{name}.js" for name in ("tiles", "model", "sentence", "figures", "map", "controls", "lab")
]


@own_errors
def lab(path: str | Path | None = None, *, theme: str = "auto") -> Page:
    """Build the tile lab: a page with sliders for shape, mask, algorithm, tile and device.

    The page's address contains the values of all sliders after a ``#``, so a presentation can link
    to one problem.

    Parameters
    ----------
    path : path-like, optional
        The file to write.
    theme : {"auto", "light", "dark"}
        "auto" follows the reader's system; the page has a switch.

    Raises
    ------
    OptionError
        If the theme is unknown.
    """
    checks.one_of("theme", theme, ("auto", *THEMES))
    names = ("name", "background", "panel", "text", "muted", "grid", "accent", "cycle")
    themes = {
        name: {**{key: getattr(look, key) for key in names}, "tensors": dict(look.tensors)}
        for name, look in THEMES.items()
    }
    data = {**payload(), "theme": theme, "themes": themes}
    document = assembled("flashsim.viz.laboratory", "lab", _SCRIPTS, data, "Tile lab")
    result = Page(document, height=1000)
    if path is not None:
        result.save(path)
    return result
