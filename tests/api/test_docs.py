"""Pages: their code blocks run, their numbers are what comes out, what they name exists."""

import csv
import fnmatch
import pkgutil
import re
import shlex
from configparser import ConfigParser
from pathlib import Path

import pytest
import typer

import flashsim
from flashsim.cli import app
from flashsim.errors import BackendUnavailable

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


def run_blocks(page):
    """Run a page's blocks in one namespace; a line `expression  # 1_234` must give that number."""
    scope, checked = {}, 0
    for block in python_blocks(page):
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
    "watch.md": ("torch", "transformers"),
}


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=short)
def test_blocks_run(page, capsys):
    for package in NEEDS.get(page.name, ()):
        pytest.importorskip(package)
    checked = run_blocks(page)
    if page.name == "README.md":
        assert checked >= 4


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


@pytest.mark.parametrize(("pages", "least"), [("guides/glossary.md", 20), ("lessons/*.md", 12)])
def test_the_commands_of_a_page_are_commands(pages, least):
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob(pages))
    told = {command.replace("\n", " ") for command in re.findall(r"`flashsim\s([^`]+)`", text)}
    assert len(told) > least
    commands = typer.main.get_command(app.app).commands
    for name, *words in map(shlex.split, sorted(told)):
        commands[name].make_context(name, words)  # raises for an option that there is none of


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
    with (ROOT / "docs/data/decode-h200.csv").open(newline="") as stream:
        sweep = {
            int(row["implementation"].partition("splits=")[2]): float(row["us"])
            for row in csv.DictReader(stream)
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


def test_the_table_of_decoding_is_the_measurement():
    page = " ".join((ROOT / "docs/guides/performance.md").read_text(encoding="utf-8").split())
    shapes = {}
    with (ROOT / "docs/data/decode-h200.csv").open(newline="") as stream:
        for row in csv.DictReader(stream):
            shape = row["head_dim"], row["batch"], row["keys"], row["n_q"]
            shapes.setdefault(shape, {})[row["implementation"]] = row
    ratios = {"1": [], "4": []}
    for (d, batch, keys, n_q), found in shapes.items():
        us = {name: float(row["us"]) for name, row in found.items()}
        ours = us["flashsim"]
        ratios[n_q].append(min(us["cuDNN"], us["FlashAttention-2"]) / ours)
        if n_q == "1":
            times = (us[name] for name in ("flashsim", "cuDNN", "FlashAttention-2"))
            cells = [
                *(f"{batch} x {int(keys):,}, {d}", found["flashsim"]["splits"]),
                *(f"{x:.1f}" if x < 1000 else f"{x:,.0f}" for x in times),
                f"{ratios[n_q][-1]:.3f}",
                *(f"{us[f'flashsim, pages of {size}'] / ours:.2f}" for size in (64, 16, 1)),
                f"{float(found['flashsim']['of_copy']):.2f}",
            ]
            assert f"| {' | '.join(cells)} |" in page
    ahead = {n_q: sum(x >= 1 for x in of) for n_q, of in ratios.items()}
    assert f"Of {len(ratios['1'])} shapes with one query {ahead['1']} are at least as fast" in page
    least, most = min(ratios["4"]), max(ratios["4"])
    assert f"four queries all {ahead['4']} are ahead, by {least:.1f} to {most:.1f} times" in page


def measured(table):
    """Rows of a table of benchmarks/gpu.py by implementation, head_dim, causal, length."""
    with (ROOT / "docs/data" / table).open(newline="") as stream:
        return {
            (row["implementation"], row["head_dim"], row["causal"], row["seq_len"]): row
            for row in csv.DictReader(stream)
        }


def test_the_table_of_fp8_is_the_measurement():
    runs, quantisers = {}, {}
    page = (ROOT / "docs/guides/performance.md").read_text(encoding="utf-8")
    with (ROOT / "docs/data/fp8-h200.csv").open(newline="") as stream:
        for row in csv.DictReader(stream):
            if row["what"] == "forward":
                shape = runs.setdefault((row["head_dim"], row["causal"], row["n"]), {})
                shape[row["way"]] = float(row["tflops"]), float(row["over bfloat16"])
            elif row["way"] in ("plain", "rotated"):
                quantisers.setdefault(row["head_dim"], []).append(row["of a copy"])
            elif row["rmse"]:
                assert row["rmse"] in page or row["way"] == "a scale each tensor, rotated"
    assert len(runs) == 12
    assert len(quantisers) == 3
    for d, (rotated, plain, head_rotated, head) in quantisers.items():
        cells = [f"{float(x):.2f}" for x in (plain, rotated, head, head_rotated)]
        assert f"| {d} | {' | '.join(cells)} |" in page
    for (d, causal, n), ways in runs.items():
        row = [d, "yes" if causal == "True" else "no", n, f"{ways['bfloat16'][0]:.0f}"]
        for way in ("fp8", "fp8, v transposed", "quantised"):
            row += [f"{ways[way][0]:.0f}", f"{ways[way][1]:.2f}"]
        row.append(f"{ways['cuDNN FP8'][0]:.0f}")
        assert f"| {' | '.join(row)} |" in page


def test_the_table_of_kernels_in_python_is_the_measurement():
    kept = measured("gpu-python-h200.csv")
    page = (ROOT / "docs/guides/performance.md").read_text(encoding="utf-8")
    ways = {"fused": "", "in order": " deterministic", "three passes": " three passes"}
    ratios = {name: [] for name in ("forward", *ways)}
    for d, causal, n in sorted({key[1:] for key in kept}):
        row = [d, "yes" if causal == "True" else "no", n]
        for name, suffix in {"forward": "", **ways}.items():
            direction = "backward" if name in ways else "forward"
            pair = [
                float(kept[f"flashsim {backend}{suffix}", d, causal, n][f"{direction}_tflops"])
                for backend in ("cupy", "numba_cuda")
            ]
            row += [f"{speed:.0f}" for speed in pair]
            ratios[name].append(pair[1] / pair[0])
        row.append(f"{float(kept['torch cudnn', d, causal, n]['backward_tflops']):.0f}")
        assert f"| {' | '.join(row)} |" in page
    assert len(ratios["fused"]) == 12
    said = {name: f"{min(x):.2f} to {max(x):.2f}" for name, x in ratios.items()}
    words = " ".join(page.split())
    assert f"{said['fused']} of C++'s fused, {said['in order']} in order and" in words
    assert f"{said['three passes']} in three passes" in words
    assert f'Hopper GPU {said["forward"]} × `"cupy"` forward' in words


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_table_of_forms_is_the_measurement(direction):
    columns = {
        "forward": ("cupy", "numba_cuda", "cupy portable", "numba_cuda tensor"),
        "backward": (
            *("cupy", "cupy deterministic", "cupy three passes", "cupy portable"),
            *("cupy portable deterministic", "numba_cuda"),
        ),
    }[direction]
    names = [*(f"flashsim {name}" for name in columns), "torch flash2", "torch cudnn"]
    kept = measured("gpu-h200.csv")
    page = (ROOT / "docs/guides/performance.md").read_text(encoding="utf-8")
    for d, causal, n in sorted({key[1:] for key in kept}):
        cells = [f"{float(kept[x, d, causal, n][f'{direction}_tflops']):.0f}" for x in names]
        row = [d, "yes" if causal == "True" else "no", n, *cells]
        assert f"| {' | '.join(row)} |" in page
