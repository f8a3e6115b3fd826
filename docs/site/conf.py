"""Sphinx's settings for `make site`, which stages the pages first: docs/site/stage.py."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from flashsim.version import __version__  # noqa: E402

project = "flashsim"
author = "the flashsim authors"
copyright = "the flashsim authors, Apache-2.0"
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "myst_nb",  # runs the lessons, and parses every other page as MyST-Parser does
    "players",
]
exclude_patterns = ["jupyter_execute"]
suppress_warnings = [
    "misc.highlighting_failure",  # a cell to fill in: `...` where syntax wants a name
    "ref.python",  # a docstring's `problem`, which is a parameter, is an attribute of two classes
]
nitpicky = True
# Types in docstrings are words ("array", "path-like", "(h, n, d)"), and names in single quotes are
# as often a parameter or a private helper: public names become links, others stay words.
nitpick_ignore_regex = [("py:.*", ".*")]
default_role = "py:obj"

# The API: without a GPU, and without what only the extras bring.
autodoc_mock_imports = ["cupy", "jax", "torch", "transformers"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autosummary_generate = False
napoleon_google_docstring = False
python_maximum_signature_line_length = 88
add_module_names = False

# Pages, which are plain Markdown on a code host, too.
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto", "player"]

# Lessons: run once for each text of theirs, and read from the cache after that.
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE.parents[1] / "build" / "site" / "lessons")
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_kernel_rgx_aliases = {".*": "python3"}

html_theme = "furo"
html_title = "flashsim"
html_static_path = [str(HERE / "site.css")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db4f0", "color-brand-content": "#7db4f0"},
}
pygments_style = "xcode"  # its palest token has a contrast of 4.8; tests/api/test_site.py
pygments_dark_style = "github-dark"


def each_attribute(app, what, name, thing, options, lines):
    """Three attributes that share a line, ``dq, dk, dv : array``, have an entry each."""
    before, head, after = "\n".join([*lines, ""]).partition("Attributes\n----------\n")
    after = re.sub(
        r"^(\w+(?:, \w+)+) (:.*\n(?:    .*\n|\n(?=    ))*)",
        lambda found: "".join(f"{one} {found[2]}" for one in found[1].split(", ")),
        after,
        flags=re.M,
    )
    lines[:] = (before + head + after).splitlines()


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", each_attribute, priority=400)  # before napoleon
