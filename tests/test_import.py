"""What `import flashsim` loads, and which way imports point inside the package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flashsim
import flashsim.backends
import flashsim.viz

HEAVY = (
    *("scipy", "numba", "matplotlib", "ml_dtypes", "rich", "typer", "pandas", "dask", "PIL"),
    *("cupy", "torch", "cuda", "llvmlite"),
)

#: DESIGN: modules may import from lower layers; `backends` and `viz` only from those listed.
LAYERS = (
    ("errors", "version"),
    ("hardware", "report", "bounds", "checks"),
    ("problem",),
    ("plans",),
    ("tiling",),
    ("savedmask", "inputs", "oracle", "work"),
    ("schedule",),
    ("forms", "events"),
    ("traffic",),
    ("l2",),
    ("frames",),
    ("trace", "roofline"),
    ("tracefile", "timeline"),
    ("perfetto",),
    ("memory", "engine"),
    ("algorithms",),
    ("engines",),
    ("backends",),
    ("api", "ladder"),
    ("compare", "samples", "sweepfile"),
    ("point", "demo", "predict", "reproduce", "verify"),
    ("sweep",),
    ("cli_options", "cli_output"),
    ("cli_truth", "cli_viz"),
    ("cli",),
)
FROM_BACKENDS = {
    *("errors", "hardware", "problem", "tiling", "plans", "schedule", "events", "trace", "engine"),
}
FROM_VIZ = {
    *("errors", "hardware", "problem", "tiling", "schedule", "events", "trace", "traffic"),
    *("report", "bounds", "work", "timeline"),
}


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


def test_importing_loads_numpy_and_nothing_heavier():
    loaded = loaded_by("import flashsim")

    assert {"flashsim", "numpy"} <= loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("heavy", ["numba", "rich", "ml_dtypes"])
def test_the_test_above_can_fail(heavy):
    assert heavy in loaded_by(f"import flashsim, {heavy}") & set(HEAVY)


def test_counting_loads_nothing_heavier_either():
    use = "import flashsim; flashsim.count(flashsim.Problem(64, dtype='float16'), device='A100')"

    assert not loaded_by(use) & set(HEAVY)


# -- direction ----------------------------------------------------------------------------------


def imports_of(source, package, *, late=True):
    """Parts of flashsim that a source file imports: `flashsim.api` or a name in it -> "api".

    `late`: also inside functions and under ``if TYPE_CHECKING``.
    """
    found = set()
    tree = ast.parse(source)
    for node in ast.walk(tree) if late else tree.body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{package}: write imports in full"
            if node.module == "flashsim":
                found |= {alias.name for alias in node.names}
            elif node.module and node.module.startswith("flashsim."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] for parts in names if parts[0] == "flashsim" and len(parts) > 1}
            assert not {parts[0] for parts in names} & {"backends", "viz"}
    return found


def sources(package):
    root = Path(package.__file__).parent
    return {path.relative_to(root).parts: path.read_text() for path in sorted(root.rglob("*.py"))}


def part_of(parts):
    """("api.py",) -> "api"; ("algorithms", "flash1.py") -> "algorithms"."""
    return parts[0].removesuffix(".py")


CORE = {parts: text for parts, text in sources(flashsim).items() if parts != ("__init__.py",)}
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
#: (module, what it imports) against the direction, inside a function or for type checkers only.
LATE = {("trace", "tracefile"), ("trace", "perfetto"), ("traffic", "trace")}


@pytest.mark.parametrize("parts", CORE, ids="/".join)
def test_imports_point_to_lower_layers(parts):
    me = part_of(parts)
    if me == "data":
        return

    assert me in RANK, f"{me} is new: give it its place in LAYERS"
    for other in imports_of(CORE[parts], me):
        assert other in RANK, f"{me} imports {other}"
        allowed = RANK[other] < RANK[me] or other == me or (me, other) in LATE
        assert allowed, f"{me} imports {other}, which does not lie below it"


@pytest.mark.parametrize(("me", "other"), sorted(LATE))
def test_exceptions_are_needed_and_late(me, other):
    assert other in imports_of(CORE[f"{me}.py",], me)
    assert other not in imports_of(CORE[f"{me}.py",], me, late=False)


@pytest.mark.parametrize(
    ("package", "allowed"), [(flashsim.backends, FROM_BACKENDS), (flashsim.viz, FROM_VIZ)]
)
def test_backends_and_viz_import_only_what_they_may(package, allowed):
    mine = package.__name__.split(".")[1]
    for parts, text in sources(package).items():
        strangers = imports_of(text, mine) - allowed - {mine}
        assert not strangers, f"{mine}/{'/'.join(parts)} imports {strangers}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from flashsim.api import run", {"api"}),
        ("import flashsim.viz.plots", {"viz"}),
        ("from flashsim import plans, report", {"plans", "report"}),
        ("def f():\n    import flashsim.cli", {"cli"}),
        ("import numpy", set()),
    ],
)
def test_the_parser_sees_every_kind_of_import(source, found):
    assert imports_of(source, "x") == found


def test_public_names_exist_and_are_sorted():
    assert flashsim.__all__ == sorted(flashsim.__all__)
    for name in flashsim.__all__:
        assert getattr(flashsim, name) is not None
