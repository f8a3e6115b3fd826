"""Write the sources of the site: copies of the repository's pages, and generated pages.

    python docs/site/stage.py FOLDER

Copied pages keep their paths, such as docs/guides/gallery.md, so that links between pages work. The
script generates the landing page (with the lists of docs/README.md), a page for each exercise, a
page for each module of the API, and the lists of examples and of measured data.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import re
import shutil
import sys
import textwrap
from pathlib import Path

import flashsim
from flashsim import exercises

ROOT = Path(__file__).resolve().parents[2]
#: Modules of the API, with the titles of their pages.
MODULES = {
    "flashsim": "Run, count, compare",
    "flashsim.viz": "Pictures",
    "flashsim.distributed": "Many GPUs",
    "flashsim.l2": "The L2 cache",
    "flashsim.exercises": "Exercises",
    "flashsim.torch": "PyTorch",
    "flashsim.jax": "JAX",
}
#: Pages in the root of the repository.
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")

#: The folder of example scripts, which one page of the site shows.
EXAMPLES = "examples"

#: The picture of README.md and of the landing page. The site has a light and a dark version of it.
PICTURE = re.compile(r"!\[([^\]]*)\]\(docs/gallery/traversal\.gif\)")
LANDING = """\
# flashsim

**flashsim runs FlashAttention tile by tile and counts every byte that moves between memory and
chip.**

Tiles move between a simulated memory and a simulated chip, which computes only with loaded tiles.
The simulator counts bytes, closed forms predict them, and GPU kernels report them. The three counts
are equal as integers.

New to all this? **[Start here](docs/lessons/start_here.md)**: from a clone to a graded exercise, in
an hour, without a GPU.

![FlashAttention-2 under a causal mask, tile by tile](docs/gallery/traversal.gif)

- **Learn**: [nine lessons](docs/lessons/README.md), shown here with their results, and [exercises
  graded by bytes](exercises/index.md).
- **Look**: the [gallery](docs/guides/gallery.md) has every picture, the code that draws it, and
  players.
- **Experiment**: the [tile lab](docs/guides/lab.md) counts the bytes of any attention shape as you
  move its sliders.
- **Overview**: [flashsim in a minute](README.md), a [glossary](docs/guides/glossary.md), and [all
  pages and features](docs/README.md).
- **Reference**: [what every count means](docs/reference/model.md), [what runs on which
  kernel](docs/reference/features.md), and [the API](api/index.md).
- **Measurements**: [byte counts compared with a GPU's counters](docs/guides/truth.md),
  [speed](docs/guides/performance.md), and [the data](data.md).

"""


def stage(to: Path) -> None:
    """Write all sources into the folder `to`, and delete older files that are no longer written."""
    before = {path for path in to.rglob("*") if path.is_file()} if to.is_dir() else set()
    made = {
        "index.md": landing(),
        "data.md": data(),
        f"{EXAMPLES}/index.md": examples(),
        **{f"exercises/{name}": text for name, text in course().items()},
        **{f"api/{name}": text for name, text in api().items()},
    }
    kept = {to / name for name in made}
    for name, text in made.items():
        put(to / name, text)
    folders = [ROOT / "docs" / name for name in ("data", "gallery", "guides", "lessons")]
    folders += [ROOT / "docs/notebooks", ROOT / "docs/reference", ROOT / "examples"]
    files = [ROOT / name for name in (*PAGES, "docs/README.md")]
    for path in [*files, *(path for folder in folders for path in sorted(folder.rglob("*")))]:
        if path.is_file() and "__pycache__" not in path.parts:
            target = to / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path == ROOT / "README.md":
                put(target, both_themes(path.read_text(encoding="utf-8")))
            else:
                shutil.copy2(path, target)
            kept.add(target)
    for path in before - kept:
        path.unlink()


def put(path: Path, text: str) -> None:
    """Write a file if its text changed: Sphinx reads changed files again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def both_themes(text: str) -> str:
    """Return the page with two versions of its picture: for the light and for the dark theme."""
    picture = "```{{image}} docs/gallery/traversal{}.gif\n:class: only-{}\n:alt: {}\n```\n"
    both = (("", "light"), ("-dark", "dark"))
    return PICTURE.sub(
        lambda found: "\n".join(picture.format(*one, found[1]) for one in both), text
    )


def contents(caption: str, names: list[str]) -> str:
    """Return a table of contents that only the sidebar shows."""
    lines = "\n".join(names)
    return f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n\n"


def landing() -> str:
    """Return the landing page, whose tables of contents set the order of all pages."""
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    parts = re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    lists = {
        caption: [
            f"docs/{name}" for name in re.findall(r"^- \[[^\]]*\]\(([\w/]+\.md)\)", body, re.M)
        ]
        for caption, body in parts
    }
    start = "docs/lessons/start_here.md"
    lists["Lessons"].remove(start)
    first = contents("Begin", [f"Start here <{start}>", "flashsim in a minute <README.md>"])
    learn = contents("Lessons", [*lists.pop("Lessons"), "exercises/index.md"])
    lists["Reference"] += ["api/index.md"]
    rest = "".join(contents(caption, names) for caption, names in lists.items() if names)
    scripts = [f"{EXAMPLES}/{name}" for name in ("README.md", "index.md", "homework/README.md")]
    more = ["data.md", *scripts, "docs/README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    return both_themes(LANDING) + first + learn + rest + contents("More", more)


def course() -> dict[str, str]:
    """Return a page for each exercise, and a page that lists them."""
    made = {}
    rows = ["| exercise | lesson | difficulty | about |\n|---|---|---|---|\n"]
    told = effort()
    for number, name in enumerate(exercises.names(), 1):
        one = exercises.get(name)
        title, _, said = one.statement.strip().partition("\n")
        said = textwrap.dedent(said).strip()
        hints = "".join(
            f"<details><summary>Hint {n}</summary>\n\n{hint}\n\n</details>\n\n"
            for n, hint in enumerate(one.hints, 1)
        )
        machine = (
            "You answer with numbers, and no code runs."
            if one.questions
            else f"The on-chip memory has {one.task.sram_bytes:,} B. A solution that moves at most "
            f"{one.full_marks_bytes:,} B earns full marks."
        )
        made[f"{name}.md"] = (
            f"# {number} · {title.rstrip('.')}\n\n{said}\n\n{one.sizes}. {machine}\n\n"
            f"## The file\n\n`flashsim exercise start {name}` writes this file, with the "
            f"statement above it:\n\n"
            f"```python\n{one.skeleton.strip()}\n```\n\n"
            f"`flashsim exercise grade FILE` grades your file. In a notebook, call "
            f'`exercises.grade(solution, exercises.get("{name}"))`. One table lists [all '
            f"operations of the machine]"
            f"(../docs/guides/your_own_algorithm.md#what-the-machine-has).\n\n"
            f"## Hints\n\n{hints}"
            f"`flashsim exercise reveal {name}` shows a reference solution.\n"
        )
        more = " | ".join(told[name]).replace("](../", "](../docs/")
        rows.append(f"| {number} · [{title.rstrip('.')}]({name}.md) | {more} |\n")
    text = (
        "# Exercises\n\nEach solution is graded on its results, its on-chip memory and the bytes "
        "that it moves. [The course](../docs/guides/course.md) explains how to take or teach the "
        "exercises.\n\n" + "".join(rows) + "\n"
    )
    made["index.md"] = text + contents("Exercises", list(made))
    return made


def effort() -> dict[str, list[str]]:
    """Return the lesson, difficulty and minutes of each exercise, from docs/guides/course.md."""
    text = (ROOT / "docs/guides/course.md").read_text(encoding="utf-8")
    return {
        name: [cell.strip() for cell in cells.split("|")]
        for name, cells in re.findall(r"^\| `([\w-]+)` \| (.*) \|$", text, re.M)
    }


def api() -> dict[str, str]:
    """Return a page for each module, from its docstrings, and a page that lists them."""
    made = {}
    for module, title in MODULES.items():
        names = sorted(public(module), key=lambda name: kind(module, name) == "exception")
        summary = "\n".join(f"   {name}" for name in names)
        head = f"{title}\n{'=' * len(title)}\n\n.. automodule:: {module}\n   :no-members:\n\n"
        head += f".. currentmodule:: {module}\n\n"
        body = "\n".join(f".. auto{kind(module, name)}:: {module}.{name}" for name in names)
        body = body.replace(".. autoclass", "\n.. autoclass")
        body = re.sub(r"(\.\. autoclass:: \S+)", r"\1\n   :members:\n", body)
        shared = r"(\.(?:Trace|Traffic)\n   :members:\n)"  # most of their methods are inherited
        body = re.sub(shared, r"\1   :inherited-members:\n", body)
        made[f"{module}.rst"] = (
            f"{head}.. autosummary::\n   :nosignatures:\n\n{summary}\n\n{body}\n"
        )
    listed = "".join(f"- [{title}]({name}.rst): `{name}`\n" for name, title in MODULES.items())
    text = (
        "# API\n\nThese pages show the docstrings of all public names, with shapes, units, errors "
        "and sources. Another page lists the names [by purpose](../docs/reference/api.md).\n\n"
        f"{listed}\n"
    )
    return {**made, "index.md": text + contents("API", list(made))}


def public(module: str) -> list[str]:
    """Return the names in a module's ``__all__``, without importing it: it may need torch."""
    parts = module.split(".")[1:]
    package = {"viz": ROOT / "viz"}.get(
        parts[-1] if parts else "", ROOT.joinpath(*["flashsim", *parts])
    )
    found = re.search(r"^__all__ = (\[.*?\])", (package / "__init__.py").read_text(), re.M | re.S)
    names = re.findall(r'"(\w+)"', found[1]) if found else importlib.import_module(module).__all__
    return sorted(name for name in names if not name.startswith("__"))


def kind(module: str, name: str) -> str:
    """Return what autodoc calls a name of a module: class, exception, function or data."""
    if module in ("flashsim.torch", "flashsim.jax"):  # may not be installed
        return "class" if name[0].isupper() else "function"
    thing = getattr(sys.modules.get(module) or getattr(flashsim, module.split(".")[1]), name)
    if inspect.isclass(thing):
        return "exception" if issubclass(thing, Exception) else "class"
    return "function" if callable(thing) else "data"


def examples() -> str:
    """Return the page that shows the example scripts."""
    text = "# The example scripts\n\nTo run a script, type `python examples/NAME`. The test "
    text += "suite runs all of them.\n\n"
    for path in sorted((ROOT / "examples").glob("*.py")):
        text += f"## {path.stem[3:].replace('_', ' ')}\n\n```{{literalinclude}} {path.name}\n"
        text += f":language: python\n:caption: examples/{path.name}\n```\n\n"
    return text


def data() -> str:
    """Return the page that lists the measured tables, with their columns."""
    text = (
        "# Measured data\n\nBenchmarks wrote these files, and the pages' tables come from them. "
        "Files with `-h200` or `-h100` in their names were measured on an NVIDIA H200 or H100. The "
        "pages that show a `cpu-` file name its CPU.\n\n"
        "| file | rows | columns |\n|---|---:|---|\n"
    )
    for path in sorted((ROOT / "docs/data").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as stream:
            head, *rows = csv.reader(stream)
        columns = ", ".join(head)
        text += f"| [{path.name}](docs/data/{path.name}) | {len(rows)} | {columns} |\n"
    return text


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
