"""Stage the site's sources: the repository's pages as they are, and those made from the package.

    python docs/site/stage.py FOLDER

Pages keep their places (docs/guides/gallery.md stays that), so that their links hold. Made here are
the landing page, which lists what docs/README.md lists, a page for each exercise and for each
module of the API, and lists of the examples and of the measured data.
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
#: Modules of the API, with what their pages are called.
MODULES = {
    "flashsim": "Run, count, compare",
    "flashsim.viz": "Pictures",
    "flashsim.distributed": "Many GPUs",
    "flashsim.l2": "The L2 cache",
    "flashsim.exercises": "Exercises",
    "flashsim.torch": "PyTorch",
    "flashsim.jax": "JAX",
}
#: Of the repository's root.
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")

#: The folder of scripts, of which the site makes a page.
EXAMPLES = "examples"

#: The picture of README.md and of the first page: on the site its background is the page's.
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
- **Look**: [every picture](docs/guides/gallery.md), with the line that draws it, and players.
- **Turn a knob**: [the tile lab](docs/guides/lab.md) counts any shape as you move its sliders.
- **Ask**: [flashsim in a minute](README.md), [a glossary](docs/guides/glossary.md), [all
  pages, and what you can ask](docs/README.md).
- **Look up**: [what every count means](docs/reference/model.md), and [the API](api/index.md).
- **Measured**: [beside a GPU's counters](docs/guides/truth.md), [how
  fast](docs/guides/performance.md), and [the data](data.md).

"""


def stage(to: Path) -> None:
    """Write all sources below the folder `to`; what is no longer written is deleted there."""
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
    """Write a file, unless it says that already: Sphinx reads again what is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def both_themes(text: str) -> str:
    """The page with its picture twice: for light pages, and for dark ones."""
    picture = "```{{image}} docs/gallery/traversal{}.gif\n:class: only-{}\n:alt: {}\n```\n"
    both = (("", "light"), ("-dark", "dark"))
    return PICTURE.sub(
        lambda found: "\n".join(picture.format(*one, found[1]) for one in both), text
    )


def contents(caption: str, names: list[str]) -> str:
    """A table of contents that only the sidebar shows."""
    lines = "\n".join(names)
    return f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n\n"


def landing() -> str:
    """The first page, and with it the order of all others."""
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
    """A page for each exercise, and their list."""
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
            "Nothing runs: the numbers are yours to find."
            if one.questions
            else f"On chip: {one.task.sram_bytes:,} B. Full marks: {one.full_marks_bytes:,} B."
        )
        made[f"{name}.md"] = (
            f"# {number} · {title.rstrip('.')}\n\n{said}\n\n{one.sizes}. {machine}\n\n"
            f"## The file\n\n`flashsim exercise start {name}` writes it, below the statement:\n\n"
            f"```python\n{one.skeleton.strip()}\n```\n\n"
            f"`flashsim exercise grade FILE` judges what was made of it; in a notebook, "
            f'`exercises.grade(solution, exercises.get("{name}"))` does. [What the machine\nhas]'
            f"(../docs/guides/your_own_algorithm.md#what-the-machine-has) is one table.\n\n"
            f"## Hints\n\n{hints}"
            f"`flashsim exercise reveal {name}` shows a reference solution.\n"
        )
        more = " | ".join(told[name]).replace("](../", "](../docs/")
        rows.append(f"| {number} · [{title.rstrip('.')}]({name}.md) | {more} |\n")
    text = (
        "# Exercises\n\nEach is judged by its results, by the room it takes on chip, and by the "
        "bytes it moves: [how a course uses them](../docs/guides/course.md).\n\n"
        + "".join(rows)
        + "\n"
    )
    made["index.md"] = text + contents("Exercises", list(made))
    return made


def effort() -> dict[str, list[str]]:
    """Lesson, difficulty and minutes of each exercise, as docs/guides/course.md has them."""
    text = (ROOT / "docs/guides/course.md").read_text(encoding="utf-8")
    return {
        name: [cell.strip() for cell in cells.split("|")]
        for name, cells in re.findall(r"^\| `([\w-]+)` \| (.*) \|$", text, re.M)
    }


def api() -> dict[str, str]:
    """A page for each module, from its docstrings, and their list."""
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
        "# API\n\nEvery public name with its shapes, units, errors and sources, from the "
        f"docstrings. [By purpose](../docs/reference/api.md).\n\n{listed}\n"
    )
    return {**made, "index.md": text + contents("API", list(made))}


def public(module: str) -> list[str]:
    """The names in a module's ``__all__``, read without importing what may not be installed."""
    parts = module.split(".")[1:]
    package = {"viz": ROOT / "viz"}.get(
        parts[-1] if parts else "", ROOT.joinpath(*["flashsim", *parts])
    )
    found = re.search(r"^__all__ = (\[.*?\])", (package / "__init__.py").read_text(), re.M | re.S)
    names = re.findall(r'"(\w+)"', found[1]) if found else importlib.import_module(module).__all__
    return sorted(name for name in names if not name.startswith("__"))


def kind(module: str, name: str) -> str:
    """What autodoc calls a name of a module: class, function or data."""
    if module in ("flashsim.torch", "flashsim.jax"):  # may not be installed
        return "class" if name[0].isupper() else "function"
    thing = getattr(sys.modules.get(module) or getattr(flashsim, module.split(".")[1]), name)
    if inspect.isclass(thing):
        return "exception" if issubclass(thing, Exception) else "class"
    return "function" if callable(thing) else "data"


def examples() -> str:
    """The short scripts, whole."""
    text = "# Examples, whole\n\nEach is run by the test suite: `python examples/NAME`.\n\n"
    for path in sorted((ROOT / "examples").glob("*.py")):
        text += f"## {path.stem[3:].replace('_', ' ')}\n\n```{{literalinclude}} {path.name}\n"
        text += f":language: python\n:caption: examples/{path.name}\n```\n\n"
    return text


def data() -> str:
    """The measured tables: what is in each, and the file."""
    text = (
        "# Measured data\n\nWhat benchmarks wrote and pages read; `-h200` was measured on "
        "an NVIDIA H200, `cpu-` on the CPU that the page says.\n\n"
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
