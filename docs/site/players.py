"""A Sphinx extension: players play in the page, and links to folders lead to their list.

A page says ``[causal](../gallery/causal-2048.html)``, which on a code host is a link to a file. On
the site the file lies beside the page, and below the paragraph stands a frame that plays it; a link
to a step or a state, ``...html#step=14``, is only a link. Players that a lesson makes are its
cells' outputs.
"""

from __future__ import annotations

import html
import posixpath
import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

#: Stands before a player's address between the reading of a page and `play`: MyST lets it be.
SCHEME = "player:"
#: CSS pixels: a player's controls, the memories, and its tile map.
HEIGHT = 760


def lead(app: Sphinx, name: str, source: list[str]) -> None:
    """Mark links to players, and turn links to a folder into links to its list."""
    here = Path(app.srcdir, name).parent

    def led(match: re.Match[str]) -> str:
        path, rest = match.groups()
        if path.endswith(".html") and (here / path).is_file():
            return f"]({SCHEME}{path}{rest or ''})"
        return f"]({path}/index.md)" if (here / path / "index.md").is_file() else match[0]

    source[0] = re.sub(r"\]\(([\w./-]+)(#[\w=&.-]+)?\)", led, source[0])


def play(app: Sphinx, tree: nodes.document) -> None:
    """A frame below each paragraph for every player that it links to."""
    here = posixpath.dirname(app.env.docname)
    for paragraph in list(tree.findall(nodes.paragraph)):
        frames: list[nodes.Node] = []
        for link in paragraph.findall(nodes.reference):
            if not link.get("refuri", "").startswith(SCHEME):
                continue
            uri = link["refuri"] = link["refuri"].removeprefix(SCHEME)
            link["classes"] = []
            name = posixpath.normpath(posixpath.join(here, uri.partition("#")[0]))
            app.env.metadata[app.env.docname].setdefault("players", []).append(name)
            if "#" not in uri:
                frames.append(nodes.raw("", frame(uri, link.astext()), format="html"))
        block: nodes.Element = paragraph
        while isinstance(block.parent, (nodes.list_item, nodes.bullet_list)):
            block = block.parent
        at = block.parent.index(block) + 1
        block.parent.insert(at, frames)


def frame(uri: str, title: str) -> str:
    """A player in a page, which loads it when it is scrolled to."""
    title = html.escape(" ".join(title.split()))
    return (
        f'<figure class="player"><iframe src="{uri}" title="{title}" loading="lazy" '
        f'height="{HEIGHT}"></iframe><figcaption>{title}: <a href="{uri}">on a page of its own</a>'
        "</figcaption></figure>"
    )


def copy(app: Sphinx, error: Exception | None) -> None:
    """The players' files, beside the pages."""
    names = {name for found in app.env.metadata.values() for name in found.get("players", ())}
    for name in () if error else names:
        to = Path(app.outdir, name)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path(app.srcdir, name), to)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", lead)
    app.connect("doctree-read", play)
    app.connect("build-finished", copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
