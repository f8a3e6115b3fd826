"""The promises of the test suite, and the tests that hold each of them.

    python tests/tools/promises.py

writes docs/reference/promises.md from the tests' marks, ``pytest.mark.promise(NAME, ...)``, of a
module (`pytestmark`) or of a function. Marks are read from the sources, so the page lists tests
that need a GPU or another library, too. `python -m pytest --promise NAME` runs what holds one.
"""

import ast
import difflib
import textwrap
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/promises.md"

PROMISES = {
    "three counts equal": "The bytes of the simulator, of the closed form and of a kernel's own "
    "report are equal as integers. The same holds for FLOPs and for the order of events.",
    "no byte is free": "Only what was loaded can be used on chip. Every move between memories is "
    "counted, and what does not fit is refused.",
    "right tiles": "A schedule visits every tile that holds a kept score once, in a fixed order, "
    "and masks the tiles that need it.",
    "twice plain attention's error": "A result errs at most twice as much as plain attention in "
    "the same type, plus one rounding. The judge computes in float64 and shares no code.",
    "gradients equal differences": "Gradients agree with finite differences.",
    "deterministic": "The same call gives the same bits: with any number of threads, and in every "
    "run on a GPU.",
    "layout changes nothing": "Results do not depend on how arrays lie in memory, or on values "
    "that no row may read.",
    "empty inputs": "A problem without a batch, a query or a key gives zeros, and -inf as LSE.",
    "refuses bad input": "An error says what was wrong, what was given and what to do. The caller "
    "never sees an error of Python's own.",
    "failures end in words": "A missing GPU, a full disk, too little memory, a closed stream or a "
    "crash ends at once with a message, and loses no finished work.",
    "traces round-trip": "A saved trace loads as an equal one, also one of an earlier version.",
    "hostile files refused": "A damaged or crafted file raises a `FlashSimError`, takes bounded "
    "memory and runs no code.",
    "grading cannot be cheated": "A wrong or hostile solution gets no points for what it does not "
    "compute. Reference solutions get all.",
    "imports point one way": "A module imports only layers below its own, and no two import each "
    "other in a circle.",
    "import is light": "`import flashsim` and a count load NumPy and nothing heavier.",
    "seeded faults are caught": "A bug seeded into the code fails the tests named beside it.",
    "every barrier is needed": "Kernels run on a CPU with warps as far out of step as barriers "
    "allow. Without any one barrier a result is wrong or a role waits forever.",
    "kernels compile": "Every kernel compiles for every architecture without a GPU, and keeps its "
    "values in registers.",
    "bridges equal their library": "PyTorch, JAX, transformers, Triton and Pallas programs get the "
    "results that they get without flashsim, and every call is counted once.",
    "command line equals library": "A command prints the figures that the library returns, as a "
    "table, as JSON and as CSV.",
    "pictures show the counts": "Plots, animations and players are read back, and show exactly the "
    "numbers behind them.",
    "doc examples run": "Code blocks, commands, lessons and examples run as they are printed, and "
    "what they name exists.",
    "doc figures are measured": "Tables in the pages are what a command computes from kept "
    "measurements.",
    "predictions are judged": "Predicted bytes, times and joules follow by hand where they can. "
    "Their distance from measurements is printed.",
}


def keep(items: list[pytest.Item], wanted: str | None) -> list[pytest.Item]:
    """Take the tests out of `items` that do not hold the promise `wanted`, if any, and return them.

    Raises
    ------
    pytest.UsageError
        If `wanted` or a mark is none of `PROMISES`.
    """
    held = [{n for mark in item.iter_markers("promise") for n in mark.args} for item in items]
    for name in sorted(set().union(*held, [wanted] if wanted else []) - set(PROMISES)):
        close = difflib.get_close_matches(name, PROMISES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise pytest.UsageError(f"no promise {name!r}{hint}; there are: {', '.join(PROMISES)}")
    if not wanted:
        return []
    left_out = [item for item, names in zip(items, held, strict=True) if wanted not in names]
    items[:] = [item for item, names in zip(items, held, strict=True) if wanted in names]
    return left_out


@cache
def marks() -> dict[str, dict[str, list[str] | None]]:
    """Return, by promise, each file that names it, with its marked tests (None: the whole file)."""
    held: dict[str, dict[str, list[str] | None]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = str(path.relative_to(ROOT))
        for test, name in _marked(ast.parse(path.read_text(encoding="utf-8"))):
            tests = held.setdefault(name, {}).setdefault(file, [] if test else None)
            if test and tests is not None and test not in tests:
                tests.append(test)
    return held


def _marked(tree: ast.Module):
    """Yield pairs of a test's name, or None for the module, and a promise."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield from ((None, name) for name in _names(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                yield from ((node.name, name) for name in _names(decorator))


def _names(expression: ast.expr):
    for call in ast.walk(expression):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.promise":
            yield from (ast.literal_eval(argument) for argument in call.args)


def page() -> str:
    """Return the text of docs/reference/promises.md for the current marks."""
    held = marks()
    lines = [
        "# Promises of the tests",
        "",
        "Each promise lists the tests that hold it. `python tests/tools/promises.py` writes this",
        "page, and a test keeps it fresh. This runs what holds one promise:",
        "",
        "```sh",
        "python -m pytest --promise 'three counts equal'",
        "```",
        "",
        "Add `-m gpu` for its tests on a GPU. A test names its promise with",
        "`@pytest.mark.promise(NAME)`, and a whole file with `pytestmark`. The names are in",
        "`tests/tools/promises.py`. An unknown name ends the run.",
    ]
    for name, text in PROMISES.items():
        lines += ["", f"## {name[0].upper()}{name[1:]}", "", *textwrap.wrap(text, 100), ""]
        for file, tests in held.get(name, {}).items():
            only = "" if tests is None else ": " + ", ".join(f"`{test}`" for test in tests)
            lines.append(f"- `{file}`{only}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
