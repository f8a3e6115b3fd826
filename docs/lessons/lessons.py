"""Run the lessons: notebooks with their outputs, or slides, light and dark.

    python docs/lessons/lessons.py notebooks [NAME ...]   # out/lessons/NAME.ipynb
    python docs/lessons/lessons.py slides [NAME ...]      # out/slides/NAME-light.html, -dark.html

NAME is a lesson's file name without `.md`; the default is all lessons. Needs the extra `lessons`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import deck
import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LESSONS = sorted(HERE.glob("[0-9]_*.md"))
#: The line that every lesson has in its first code cell.
THEME = 'theme = "light"'
#: Slides show figures larger than a notebook does: 1440 pixels per figure.
SHARP = 'import matplotlib\nmatplotlib.rcParams["savefig.dpi"] = 150\n'


def read(path: Path) -> nbformat.NotebookNode:
    """A lesson as a notebook."""
    return jupytext.read(path, fmt="md:myst")


def tagged(cell: nbformat.NotebookNode, tag: str) -> bool:
    """Whether a cell has a tag."""
    return tag in cell.metadata.get("tags", [])


def references(notebook: nbformat.NotebookNode) -> dict[int, str]:
    """For the index of each cell to fill in: the code of its folded answer, two cells below."""
    cells = notebook.cells
    found = {}
    for at, cell in enumerate(cells):
        if tagged(cell, "answer"):
            folded = re.match(r"<details>.*?^```py\n(.*?)^```", cells[at + 2].source, re.S | re.M)
            if not tagged(cells[at + 1], "check") or folded is None:
                raise ValueError(
                    "an answer cell must be followed by its check cell and a folded answer "
                    f"(<details> with a py block); this cell is not: {cell.source!r}"
                )
            found[at] = folded[1]
    return found


def dressed(path: Path, theme: str) -> nbformat.NotebookNode:
    """A lesson for slides: its figures use the theme and a higher resolution."""
    notebook = read(path)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source = SHARP + first.source.replace(THEME, f'theme = "{theme}"')
    return notebook


def execute(notebook: nbformat.NotebookNode, seconds: float = 120) -> nbformat.NotebookNode:
    """Run all cells in the folder of the lessons, and return the notebook with its outputs.

    An exception in a cell is raised again.
    """
    return NotebookClient(
        notebook,
        timeout=seconds,
        resources={"metadata": {"path": str(HERE)}},
        extra_arguments=["--log-level=ERROR"],  # a local kernel would warn about its transport
    ).execute()


def notebooks(names: list[str]) -> None:
    """Run each lesson and write it as a notebook."""
    for path in _chosen(names):
        began = time.perf_counter()
        file = _out("lessons") / f"{path.stem}.ipynb"
        nbformat.write(execute(read(path)), file)
        print(f"{file.relative_to(ROOT)}: {time.perf_counter() - began:.1f} s")


def slides(names: list[str]) -> None:
    """Run each lesson and write it as two files of slides, light and dark."""
    for path in _chosen(names):
        for theme in ("light", "dark"):
            notebook = dressed(path, theme)
            file = _out("slides") / f"{path.stem}-{theme}.html"
            file.write_text(deck.write(execute(notebook), theme), encoding="utf-8")
            print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1e6:.1f} MB")


def _chosen(names: list[str]) -> list[Path]:
    found = [path for path in LESSONS if not names or path.stem in names]
    if len(found) < len(names):
        sys.exit(f"lessons are {', '.join(path.stem for path in LESSONS)}; got {', '.join(names)}")
    return found


def _out(name: str) -> Path:
    folder = ROOT / "out" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("notebooks", "slides"))
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    {"notebooks": notebooks, "slides": slides}[given.what](given.names)
