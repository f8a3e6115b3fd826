"""An executed lesson as slides: one HTML file that needs no network.

A heading begins a slide, and so does a cell whose output would not fit on the current slide. Cells
to fill in, their checks and the last section, the points, are left out: the lecturer asks the
question, and unfolds its answer.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

import nbformat
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from flashsim.viz.palette import THEMES

TEMPLATE = Path(__file__).with_name("deck.html")
#: Heights in pixels: of a slide below its heading, of a line of text, of a line of code, and the
#: least of a picture. The page enlarges pictures into free space and shrinks what does not fit.
ROOM, LINE, CODE_LINE, PICTURE = 590, 36, 22, 360
CODE = {"light": "xcode", "dark": "monokai"}


def write(notebook: nbformat.NotebookNode, theme: str) -> str:
    """Return the slides of an executed lesson as the text of one HTML file."""
    made = _slides(notebook, theme)
    look = THEMES[theme]
    colors = "".join(
        f"--{name}:{getattr(look, name)};"
        for name in ("background", "panel", "text", "muted", "grid", "accent")
    )
    title = re.sub(r"<.*?>", "", made[0][0])
    sections = "\n".join(f"<section>{''.join(parts)}</section>" for parts in made)
    parts = {
        "TITLE": title,
        "THEME": theme,
        "COLORS": colors,
        "CODE": HtmlFormatter(style=CODE[theme]).get_style_defs(".highlight"),
        "SLIDES": sections,
    }
    return re.sub(r"@@(\w+)@@", lambda name: parts[name[1]], TEMPLATE.read_text(encoding="utf-8"))


def _slides(notebook: nbformat.NotebookNode, theme: str) -> list[list[str]]:
    """For each slide, a list of HTML fragments; the first is its heading."""
    made: list[list[str]] = []
    used = 0

    def add(part: str, height: int) -> None:
        nonlocal used
        if used and used + height > ROOM:
            made.append([made[-1][0]])  # the same heading
            used = 0
        made[-1].append(part)
        used += height

    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            for heading, text in _sections(cell.source):
                if heading == "<h2>Points</h2>":
                    return made
                if heading:
                    made.append([heading])
                    used = 0
                if text:
                    add(_markdown(text, theme), _height(text))
                if "<details>" in text:
                    used = ROOM  # the next cell may give the answer away: begin a slide
        elif {"answer", "check", "parameters"}.isdisjoint(tags) and cell.outputs:
            parts = [(_code(cell.source, theme), 28 + CODE_LINE * len(cell.source.splitlines()))]
            parts += [_output(output) for output in cell.outputs]
            whole = sum(height for _, height in parts)
            if whole <= ROOM:  # the code and its output fit on one slide
                parts = [("".join(part for part, _ in parts), whole)]
            for part, height in parts:
                add(part, height)
    return made


def _sections(text: str) -> list[tuple[str, str]]:
    """(heading as HTML, text below it) of a Markdown cell."""
    pieces = re.split(r"^(#{1,2} .*)$", text, flags=re.M)
    found = [("", pieces[0].strip())] if pieces[0].strip() else []
    for heading, below in zip(pieces[1::2], pieces[2::2], strict=True):
        level = heading.index(" ")
        words = MarkdownIt().renderInline(heading[level + 1 :])
        found.append((f"<h{level}>{words}</h{level}>", below.strip()))
    return found


def _height(text: str) -> int:
    """The approximate height in pixels of a Markdown text; a folded answer counts as one line."""
    text = re.sub(r"<details>.*?</details>", "answer\n", text, flags=re.S)
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\n|\n(?=- )", text.strip())]
    return sum(14 + LINE * -(-len(part) // 84) for part in paragraphs)


def _markdown(text: str, theme: str) -> str:
    reader = MarkdownIt(
        "commonmark",
        {"html": True, "highlight": lambda code, name, _: _code(code, theme)},
    ).enable("table")
    made = reader.render(text)
    # A relative link would break when the slides are moved: keep only the link's text.
    return re.sub(r'<a href="(?!https?:|#)[^"]*">(.*?)</a>', r"<em>\1</em>", made, flags=re.S)


def _code(source: str, theme: str) -> str:
    lines = highlight(source, PythonLexer(), HtmlFormatter(style=CODE[theme], nowrap=True))
    return f'<pre class="highlight">{lines.rstrip()}</pre>'


def _output(output: nbformat.NotebookNode) -> tuple[str, int]:
    """A cell's output as HTML, and its approximate height in pixels."""
    if output.output_type == "stream":
        return _text(output.text)
    data = output.get("data", {})
    if "image/png" in data:
        image = data["image/png"].replace("\n", "")
        alt = html.escape(data["text/plain"])
        return f'<img src="data:image/png;base64,{image}" alt="{alt}">', PICTURE
    if "text/html" in data:
        rows = data["text/html"].count("<tr")
        return f'<div class="html">{data["text/html"]}</div>', 30 * rows or PICTURE + 160
    return _text(data.get("text/plain", ""))


def _text(text: str) -> tuple[str, int]:
    lines = sum(1 + len(line) // 112 for line in text.rstrip().splitlines())
    return f"<pre>{html.escape(text.rstrip())}</pre>", 12 + CODE_LINE * lines
