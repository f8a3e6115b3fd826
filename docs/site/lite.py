"""What JupyterLite is built of: the lessons as notebooks that install flashsim in the browser.

    python docs/site/lite.py FOLDER

Writes FOLDER/contents; the wheel belongs into FOLDER/pypi, where JupyterLite's build finds it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs/lessons"))

import lessons  # noqa: E402

GUIDE = ROOT / "docs/guides/in_the_browser.md"


def cell() -> str:
    """The cell that installs flashsim: the guide's first."""
    found = re.search(r"^```py\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
    assert found is not None, GUIDE
    return found[1].rstrip()


def notebook(path: Path) -> nbformat.NotebookNode:
    """A lesson for the browser."""
    made = lessons.read(path)
    made.metadata["kernelspec"] = {"name": "python", "display_name": "Python (Pyodide)"}
    made.cells.insert(1, nbformat.v4.new_code_cell(cell()))
    return made


if __name__ == "__main__":
    folder = Path(sys.argv[1], "contents")
    folder.mkdir(parents=True, exist_ok=True)
    for lesson in lessons.LESSONS:
        nbformat.write(notebook(lesson), folder / f"{lesson.stem}.ipynb")
