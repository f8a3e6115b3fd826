"""Pages: their code blocks run, their numbers are what comes out, what they name exists."""

import fnmatch
import pkgutil
import re
import shlex
from configparser import ConfigParser
from pathlib import Path

import pytest
from commands import parsed
from repository import recorded

import flashsim
from flashsim.cli.app import MOVED
from flashsim.errors import BackendUnavailable

pytestmark = pytest.mark.promise("doc examples run")

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    # JupyterLab leaves copies of the lessons that it has opened.
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if ".ipynb_checkpoints" not in p.parts),
]
FOLDERS = ("flashsim", "backends", "viz", "tests", "docs", "benchmarks", "examples")
SOURCES = {".py", ".cu", ".cuh", ".h", ".js", ".css", ".html"}
FILES = {  # and folders, each with a slash in front
    *(f"/{path.name}" for path in ROOT.iterdir()),
    *(f"/{p.relative_to(ROOT).as_posix()}" for name in FOLDERS for p in (ROOT / name).rglob("*")),
}


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


#: Pages of which only the blocks that import torch need torch.
PARTLY_TORCH = ("decoding.md",)


def run_blocks(page, blocks=None):
    """Run a page's blocks in one namespace; a line `expression  # 1_234` must give that number."""
    scope, checked = {}, 0
    for block in python_blocks(page) if blocks is None else blocks:
        exec(compile(block, str(page), "exec"), scope)
        for expression, number in re.findall(r"^(\S.*?)\s+# ([\d_]+)$", block, re.M):
            assert eval(expression, scope) == int(number), expression
            checked += 1
    return checked


def short(page):
    """A page's name in the list of tests."""
    return str(page.relative_to(ROOT))


#: What the blocks of a page need beside flashsim; without it, the page is skipped.
NEEDS = {
    "in_your_model.md": ("torch", "transformers", "jax"),
    "pallas.md": ("jax",),
    "watch.md": ("torch", "transformers"),
    "triton.md": ("triton",),
}


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=short)
def test_blocks_run(page, capsys):
    for package in NEEDS.get(page.name, ()):
        pytest.importorskip(package)
    blocks = python_blocks(page)
    if page.name in PARTLY_TORCH:
        blocks = [block for block in blocks if "import torch" not in block]
    checked = run_blocks(page, blocks)
    if page == ROOT / "README.md":
        assert checked >= 4


@pytest.mark.parametrize("name", PARTLY_TORCH)
def test_blocks_that_import_torch_run(name):
    pytest.importorskip("torch")
    page = ROOT / "docs/guides" / name
    blocks = [block for block in python_blocks(page) if "import torch" in block]
    assert blocks
    run_blocks(page, blocks)


def test_a_wrong_number_is_caught(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\n1 + 1  # 3\n```\n")
    with pytest.raises(AssertionError, match=r"1 \+ 1"):
        run_blocks(page)


def test_readme_table():
    rows = re.findall(
        r"^\| (\S+) ?attention \| ([\d,]+) B \| ([\d,]+) B \| ([\d.]+) \|$"
        r"|^\| (FlashAttention-\d) \| ([\d,]+) B \| ([\d,]+) B \| ([\d.]+) \|$",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.M,
    )
    names = {"standard": "standard", "FlashAttention-1": "flash1", "FlashAttention-2": "flash2"}
    assert len(rows) == 3
    for row in rows:
        name, loaded, stored, ratio = (cell for cell in row if cell)
        traffic = flashsim.count(
            flashsim.Problem(1024, head_dim=64),
            algorithm=names[name],
            tiling=flashsim.Tiling(128, 64),
        )
        assert traffic.bytes("load") == int(loaded.replace(",", ""))
        assert traffic.bytes("store") == int(stored.replace(",", ""))
        assert f"{traffic.bytes() / traffic.compulsory():.1f}" == ratio


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_page_is_in_the_list_of_pages():
    listed = re.findall(
        r"\]\(([^)#]+\.md)\)", (ROOT / "docs/README.md").read_text(encoding="utf-8")
    )
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").glob("*/*.md")}
    assert {Path(name) for name in listed if not name.startswith("..")} == pages


def test_the_reference_lists_what_is_public():
    table = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8").partition("|---|---|")[2]
    public = {name for name in flashsim.__all__ if not name.startswith("__")}
    assert set(re.findall(r"`(\w+)`", table)) == public | set(flashsim._LATE)


# -- names of files and modules -------------------------------------------------------------------


def missing(text):
    """What a text names and the tree does not have: files and folders, names that begin flashsim.

    A file may be named by the end of its path, ``hopper/forward.cu``. Names of other kinds of file
    without a folder are what a command writes.
    """
    text = re.sub(r"https?://\S+|\]\([^)]*\)", "", text)  # links are tried above
    lost = set()
    for word in set(re.findall(r"(?<![\w./*<-])[\w*][\w./*-]*", text)):
        name = word.rstrip("./")
        kept = name.endswith((".md", ".csv", ".png", ".npz")) or name.split("/")[0] in FOLDERS
        named = name.endswith((".py", ".cu", ".cuh")) or ("/" in word and kept)
        if named and not fnmatch.filter(FILES, f"*/{name}"):
            lost.add(name)
    for name in set(re.findall(r"(?<![\w./-])flashsim(?:\.[A-Za-z_]\w*)+", text)):
        try:
            pkgutil.resolve_name(name)
        except BackendUnavailable:
            pass  # an extra that is not installed here
        except (ImportError, AttributeError):
            lost.add(name)
    return lost


def test_what_one_is_told_to_install_exists():
    """In pages and errors: the distribution by its name, which no index takes for another's."""
    config = ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    name, extras = config["metadata"]["name"], set(config["options.extras_require"])
    assert name.replace("-", "") != "flashsim"  # as an index compares: `flash-sim` is another
    sources = [p for f in FOLDERS for p in (ROOT / f).rglob("*") if p.suffix in SOURCES]
    told = [
        (source, *words)
        for source in (*PAGES, *sources, ROOT / "Makefile")
        for words in re.findall(
            r"(flashsim[\w-]*|(?<=-e )\.)\[([a-z][\w,]*)\]", source.read_text(encoding="utf-8")
        )
    ]
    assert len(told) > 8
    for source, what, wanted in told:
        assert what in (name, "."), source
        assert set(wanted.split(",")) <= extras, source


#: What stands in a command for something of the reader's, and what serves here.
PLACEHOLDERS = {"COMMAND": "run", "PROGRAM": str(Path(__file__))}


def commands(page):
    """Commands that a page tells: between backticks, or as a line of a block."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    told = re.findall(r"`flashsim\s([^`]+)`", text)
    blocks = r"^```([^\n]*)\n(.*?)^```|((?:^    [^\n]*\n)+)"
    for kind, *block in re.findall(blocks, text, re.S | re.M):
        if kind in ("", "sh", "shell", "bash"):
            told += re.findall(r"^\s*flashsim (.+)$", "".join(block), re.M)
    for line in told:
        words = shlex.split(re.sub(r"[|>].*|\.\.\.", "", line), comments=True)
        if words[0] in ("plot", "animate", "page") and "-o" not in words:  # named, not called
            words += ["-o", "x"]
        yield [PLACEHOLDERS.get(word, word) for word in words if word != "--help"]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=short)
def test_the_commands_of_a_page_are_commands(page):
    """By their names of today, with options that they have."""
    for words in commands(page):
        parsed(words)


def test_commands_of_pages_are_found():
    assert sum(len([*commands(page)]) for page in PAGES) > 100


def test_sources_call_commands_by_their_names_of_today():
    moved = re.compile(rf"flashsim\s+(?:{'|'.join(MOVED)})\b(?![\w(])")
    sources = [p for name in FOLDERS for p in (ROOT / name).rglob("*.py")]
    assert len(sources) > 200
    for source in {*sources, ROOT / "Makefile"} - {Path(__file__)}:
        assert not moved.search(source.read_text(encoding="utf-8")), source


@pytest.mark.parametrize("line", ["ladder -n 64", "study ladders", "predict --backward"])
def test_a_wrong_command_is_caught(line):
    with pytest.raises(AssertionError):
        parsed(line.split())


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_what_a_page_names_exists(page):
    assert not missing(page.read_text(encoding="utf-8"))


def test_what_comments_and_docstrings_name_exists():
    """Whole paths only: a source has many words with a dot."""
    sources = [p for name in FOLDERS for p in (ROOT / name).rglob("*") if p.suffix in SOURCES]
    assert len(sources) > 200
    whole = re.compile(
        rf"(?<![\w./*<-])(?:{'|'.join(FOLDERS)})/[\w./*-]+\.(?:py|cuh?|md|csv|png)\b"
    )
    sources += [ROOT / "Makefile", ROOT / "setup.cfg", ROOT / "pyproject.toml"]
    for source in set(sources) - {Path(__file__)}:  # which names some that do not exist
        named = set(whole.findall(source.read_text(encoding="utf-8")))
        assert not missing(" ".join(named)), source


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("its stages are in `flashsim/plans.py`.", {"flashsim/plans.py"}),
        ("see `kernels/hopper_forward.cu`, `hopper/forward.cu`", {"kernels/hopper_forward.cu"}),
        ("`plot_cache.py`, `forward.cu` and `tensor/backward_*.py`", {"plot_cache.py"}),
        ("`flashsim.traffic`, `flashsim.verify`, `flashsim.run(q)`", {"flashsim.traffic"}),
        ("in `backends/kernels/` and `backends/arrays/`; writes out.csv", {"backends/arrays"}),
        ("docs/truth.md, docs/guides/truth.md, https://x.org/docs/a.md", {"docs/truth.md"}),
    ],
)
def test_a_wrong_name_is_caught(text, lost):
    assert missing(text) == lost


# -- tables ---------------------------------------------------------------------------------------


def test_the_sweep_over_splits_is_the_measurement_and_the_prediction():
    sweep = {
        int(row["implementation"].partition("splits=")[2]): float(row["us"])
        for row in recorded("decode-h200.csv")
        if row["implementation"].startswith("flashsim, splits=")
        and not row["implementation"].endswith("auto")
        and (row["head_dim"], row["batch"], row["keys"]) == ("128", "1", "131072")
    }
    page = (ROOT / "docs/guides/decoding.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \|$", page, re.M)
    assert len(rows) == 7
    problem = flashsim.Problem(1, 131_072, 128, heads=32, kv_heads=8, dtype="bfloat16")
    for splits, predicted, measured in rows:
        how = {"algorithm": "flash-decode", "splits": int(splits)}
        seconds = flashsim.predict.predict(problem, **how).seconds
        assert f"{seconds * 1e6:.0f}" == predicted
        assert f"{sweep[int(splits)]:.0f}" == measured
