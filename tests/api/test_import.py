"""What `import flashsim` loads, and which way imports point inside the package."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import flashsim
import flashsim.backends
import flashsim.viz

HEAVY = (
    *("scipy", "numba", "matplotlib", "ml_dtypes", "rich", "typer", "pandas", "dask", "PIL"),
    *("cupy", "torch", "jax", "cuda", "llvmlite"),
)


def loaded_by(statement):
    """Top-level packages that `statement` loads in a fresh interpreter.

    What the environment itself loads as Python starts does not count (cuda-bindings has a .pth
    file that puts an empty `cuda` there).
    """
    code = (
        f"import sys\nbefore = set(sys.modules)\n{statement}\n"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    # -I: no PYTHONPATH and no working directory on sys.path, as for an installed package.
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


@pytest.mark.promise("import is light")
def test_importing_loads_nothing_else():
    assert not loaded_by("import flashsim") & {"numpy", *HEAVY}


@pytest.mark.promise("import is light")
def test_public_names_load_numpy_and_nothing_heavier():
    loaded = loaded_by("from flashsim import *; run")

    assert {"flashsim", "numpy"} <= loaded
    assert not loaded & set(HEAVY)


def test_names_are_those_of_the_api():
    names = {name for name in flashsim.__all__ if name != "__version__"}
    held = vars(importlib.import_module("flashsim.api")).items()
    assert names == {name for name, x in held if name[0] != "_" and not inspect.ismodule(x)}
    assert names <= {*dir(flashsim)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        flashsim.nothing  # noqa: B018


@pytest.mark.parametrize("heavy", ["numba", "rich", "ml_dtypes"])
@pytest.mark.promise("import is light")
def test_the_test_above_can_fail(heavy):
    assert heavy in loaded_by(f"import flashsim, {heavy}") & set(HEAVY)


@pytest.mark.promise("import is light")
def test_counting_loads_nothing_heavier_either():
    use = "import flashsim; flashsim.count(flashsim.Problem(64, dtype='float16'), device='A100')"

    assert not loaded_by(use) & set(HEAVY)


# -- direction ----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def layers(page):
    """The table of docs/reference/design.md: for each layer its parts, from the ground up."""
    _, _, table = page.partition("| layer |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return [re.findall(r"`(\w+)`", row.split("|")[1]) for row in rows]


DESIGN = (ROOT / "docs/reference/design.md").read_text(encoding="utf-8")
LAYERS = layers(DESIGN)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def sources():
    """Every module of the three packages: its name to its text."""
    found = {}
    for package in (flashsim, flashsim.backends, flashsim.viz):
        root = Path(package.__file__).parent
        for path in sorted(root.rglob("*.py")):
            parts = [*package.__name__.split("."), *path.relative_to(root).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


SOURCES = sources()


@cache
def statements(source):
    """Its imports and classes, anywhere in it."""
    kinds = ast.Import, ast.ImportFrom, ast.ClassDef
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def imports_of(source, known=SOURCES):
    """Modules of flashsim that a source imports, anywhere in it."""
    found = set()
    for node in statements(source):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full"
            if node.module and node.module.split(".")[0] == "flashsim":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            assert not {name.split(".")[0] for name in names} & {"backends", "viz"}
            found |= {name for name in names if name.split(".")[0] == "flashsim"}
    return found


def climbs(sources, rank):
    """(module, what it imports from a layer that does not lie below its own)."""
    found = []
    for me, text in sources.items():
        if me == "flashsim":
            continue
        mine = me.split(".")[1]
        for other in imports_of(text, sources):
            its = other.split(".")[1] if "." in other else "flashsim"
            if its != mine and rank.get(its, len(rank)) >= rank[mine]:
                found.append((me, other))
    return found


def circles(graph):
    """Modules that reach themselves: left over when those that import none left are taken out."""
    graph = {me: others & graph.keys() - {me} for me, others in graph.items()}
    while free := {me for me, others in graph.items() if not others}:
        graph = {me: others - free for me, others in graph.items() if me not in free}
    imported = set().union(*graph.values())
    while loose := graph.keys() - imported:
        graph = {me: others for me, others in graph.items() if me not in loose}
        imported = set().union(*graph.values())
    return sorted(graph)


@pytest.mark.promise("imports point one way")
def test_every_part_has_its_layer():
    parts = {name.split(".")[1] for name in SOURCES if "." in name}
    assert parts == set(RANK)


@pytest.mark.promise("imports point one way")
def test_every_module_of_a_layer_is_listed():
    listed = re.findall(r"^\| `(\w+)` \| (`.*?) \|", DESIGN.partition("| layer |")[2], re.M)
    assert len(listed) > 10
    for layer, modules_ in listed:
        modules = {name.split(".")[2] for name in SOURCES if name.startswith(f"flashsim.{layer}.")}
        assert set(re.findall(r"`(\w+)`", modules_)) == modules, layer


@pytest.mark.promise("imports point one way")
def test_no_import_climbs():
    assert climbs(SOURCES, RANK) == []


@pytest.mark.promise("imports point one way")
def test_no_imports_go_round():
    assert circles({me: imports_of(text) for me, text in SOURCES.items()}) == []


@pytest.mark.promise("imports point one way")
def test_a_climb_and_a_circle_would_show():
    known = {"flashsim.problem.a": "from flashsim.api.b import c", "flashsim.api.b": ""}
    assert climbs(known, RANK) == [("flashsim.problem.a", "flashsim.api.b")]
    known["flashsim.api.b"] = "def f():\n    import flashsim.problem.a"
    graph = {me: imports_of(text, known) for me, text in known.items()}
    assert circles(graph | {"flashsim.cli": {"flashsim.api.b"}}) == [*reversed(known)]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from flashsim.api.execution import run", {"flashsim.api.execution"}),
        ("import flashsim.viz.style", {"flashsim.viz.style"}),
        ("from flashsim.l2 import model, nothing", {"flashsim.l2.model", "flashsim.l2"}),
        ("def f():\n    import flashsim.cli.app", {"flashsim.cli.app"}),
        ("import numpy", set()),
    ],
)
def test_the_parser_sees_every_kind_of_import(source, found):
    assert imports_of(source) == found


# flashsim: the layers, and four packages on top of api (torch, jax, distributed, exercises).
@pytest.mark.parametrize(
    ("folder", "most"), [("flashsim", 23), ("backends", 12), ("viz", 12), ("tests", 16)]
)
def test_a_floor_plan_can_be_taken_in_at_a_glance(folder, most):
    every = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
    names = {p.name for p in (ROOT / folder).iterdir()} - every
    assert len(names) <= most, sorted(names)


def test_every_error_is_public():
    kinds = {x for x in vars(flashsim.errors).values() if isinstance(x, type)}
    errors = {x.__name__ for x in kinds if issubclass(x, flashsim.FlashSimError)}
    assert errors <= set(flashsim.__all__)


def test_public_names_exist_and_are_sorted():
    assert flashsim.__all__ == sorted(flashsim.__all__)
    for name in flashsim.__all__:
        assert getattr(flashsim, name) is not None


#: Each module is the first that its process names: as an attribute, or in an import statement.
FIRST_NAMED = """
import importlib, os, sys, flashsim, numpy, matplotlib.pyplot

def as_attribute(name):
    assert eval(f"flashsim.{name}").__name__.split(".")[-1] == name
    exec(f"from flashsim import {name}")

def in_a_statement(name):
    scope = {}
    exec(f"import flashsim.{name} as module", scope)
    module = scope["module"]
    assert module is getattr(flashsim, name)
    assert module is importlib.import_module(f"{flashsim._LATE[name]}.{name}")
    assert module.__spec__.name == module.__name__
    for public in getattr(module, "__all__", [])[:1]:
        exec(f"from flashsim.{name} import {public}")

for name in sys.argv[1:]:
    for way in (as_attribute, in_a_statement):
        if not os.fork():
            way(name)
            os._exit(0)
        assert os.wait()[1] == 0, name
"""


def test_every_room_is_there_when_first_named():
    rooms = [name for name in flashsim._LATE if name not in ("torch", "jax")]
    assert {*rooms} > {"predict", "oracle", "viz"}
    command = [sys.executable, "-c", FIRST_NAMED, *rooms]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_statements_make_no_copies_of_modules_inside():
    import flashsim.predict.model
    from flashsim.studies.predict import model

    assert flashsim.predict.model is model
    assert model.__spec__.name == model.__name__ == "flashsim.studies.predict.model"
    with pytest.raises(ModuleNotFoundError, match=r"flashsim\.studies\.predict\.nothing"):
        import flashsim.predict.nothing


def test_what_is_no_room_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'cellar'"):
        flashsim.cellar  # noqa: B018


# -- names ----------------------------------------------------------------------------------------


def namesakes(sources):
    """Names that more than one class of these modules has, inner classes included."""
    names = [
        node.name
        for text in sources.values()
        for node in statements(text)
        if isinstance(node, ast.ClassDef)
    ]
    return {name for name in names if names.count(name) > 1}


def test_no_two_classes_share_a_name():
    assert namesakes(SOURCES) == set()


def test_namesakes_would_show():
    known = {"a": "class Tile: ...", "b": "def f():\n    class Tile: ...", "c": "class Tiles: ..."}
    assert namesakes(known) == {"Tile"}
