"""Every command's table on narrow terminals: nothing is cut."""

import pytest
from commands import ok

import flashsim
from flashsim.cli import attention, output, pictures, predictions, studies
from flashsim.report import Table, format_cell
from flashsim.studies import demo

pytestmark = pytest.mark.promise("command line equals library")

BIG = ("-n", 65536, "-d", 128, "--heads", 16, "--batch", 4, "--dtype", "bfloat16")
SMALL = ("-n", 256, "-d", 32, "--heads", 2, "-t", "64x64")
COMMANDS = {
    "run": ("run", *SMALL, "--backward"),
    "count": ("count", *BIG, "--causal", "--window", "4096:0", "--backward"),
    "compare": ("compare", *SMALL, "--backward", "-a", "standard,flash1,flash2,flash2-fused"),
    "sweep": ("sweep", "-n", "1024,65536,1048576", "-d", "64,128", "-a", "standard,flash1,flash2"),
    "sweep that fails": ("sweep", "-n", "64,128", "-t", "16x16,4000x4000"),
    "devices": ("study devices",),
    "events": ("trace", "show", "h200-forward", "--events", "--limit", "4"),
    "trace": ("trace", "show", "h200-backward"),
    "dram": ("study dram", *SMALL, "--direction", "backward", "--kv-heads", "1"),
    "dram over sizes": ("study dram", *SMALL, "--l2-sizes", "0.01,1,50"),
    "roofline": ("roofline", *SMALL, "-a", "flash2", "--seconds", "0.001"),
    "ladder": ("study ladder", "-n", "64"),
    "predict": ("predict", *BIG, "--direction", "backward"),
    "reproduce": ("study reproduce",),
    "tiles": ("study reproduce", "tiles"),
    "ring": ("study reproduce", "ring"),
    "many GPUs": ("study ring", "--causal", "-n", 8192, "--ranks", 4, "--scheme", "ring"),
    "a rank": ("study ring", "-n", 8192, "--ranks", 4, "--scheme", "usp", "--rank", 1),
    "summary": ("verify", "--summary", "docs/data/verify-h200.csv"),
    "demo": ("study demo",),
}


def printed(command, width, monkeypatch, tmp_path):
    """What a command prints on a terminal of `width` columns, and the tables it shows."""
    tables, show = [], output.show

    def seen(found, form=None):
        people = found[0] if isinstance(found, tuple) else found
        tables.extend([people] if isinstance(people, Table) else people)
        show(found, form)

    for module in (attention, output, predictions, studies):
        monkeypatch.setattr(module, "show", seen)
    monkeypatch.setattr(pictures, "demo_figures", lambda *_: ["a", "b", "c"])
    monkeypatch.setattr(demo, "SAMPLES", ("layer0",))  # tables of one layer are like the other's
    monkeypatch.setattr(output, "WIDTH", width)
    more = ("--out", tmp_path) if command == ("study demo",) else ()
    return ok(*command, *more), tables


def tokens(text):
    return {word.strip(",;:") for word in text.split()}


def words_of(cell):
    """How a cell may read: as it is, or in a larger unit."""
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return {format_cell(cell), *(format_cell(cell / 1000**k) for k in range(1, 7))}
    return {format_cell(cell)}


#: Runs of the bundled layers take a second each: on the narrowest terminal.
WIDE_DEMO = [pytest.param("demo", n, marks=pytest.mark.thorough) for n in (100, 140)]


@pytest.mark.parametrize(
    ("command", "width"),
    [(c, n) for c in COMMANDS for n in (80, 100, 140) if c != "demo" or n == 80] + WIDE_DEMO,
)
def test_nothing_is_cut(command, width, monkeypatch, tmp_path):
    text, tables = printed(COMMANDS[command], width, monkeypatch, tmp_path)

    assert tables
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    words = tokens(text)
    for cell in (cell for table in tables for row in table.rows for cell in row):
        assert any(tokens(word) <= words for word in words_of(cell)), cell


@pytest.mark.parametrize("width", [80, 140])
def test_the_check_above_sees_a_cut_number(width, monkeypatch, tmp_path):
    monkeypatch.setattr("flashsim.report.format_cell", lambda x: format_cell(x)[:7] if x else "")
    with pytest.raises(AssertionError):
        test_nothing_is_cut("compare", width, monkeypatch, tmp_path)


def test_what_is_constant_goes_into_the_title_and_units_shorten():
    table = Table("T", ("name", "tile", "moved B"), [("a", "8 x 8", 10**12), ("b", "8 x 8", 10)])

    assert "8 x 8" in table.text(40).splitlines()[-1]
    narrow = table.text(24).splitlines()
    assert narrow[0] == "T, tile 8 x 8"
    assert "1,000,000,000,000" in "".join(narrow)
    short = table.text(16)
    assert "TB" in short
    assert "1e-11" in short


def test_a_table_turns_on_its_side_in_pieces():
    rows = [(f"row {n}", 10**9 + n, "words enough", 1.5 * n + 0.1) for n in range(4)]
    table = Table("", ("name", *"abc"), [*rows, ("row 4", 2**70, "w", True)])

    text = table.text(36)

    assert text.count("name") == 3
    assert [line[0] for line in text.splitlines() if line[:1] in {*"abc"}] == [*"abcabcabc"]
    assert "1,000,000,003" in text
    assert f"{2**70:,}" in text


def test_grouped_heads_are_said_and_change_what_is_compulsory():
    sizes = {"n_q": 64, "head_dim": 16, "heads": 16}
    tables = {kv: flashsim.count(flashsim.Problem(**sizes, kv_heads=kv)).table() for kv in (16, 4)}
    assert "1 x 16 heads" in tables[16].title
    assert "1 x 16 / 4 heads" in tables[4].title
    assert tables[16].note != tables[4].note
    titles = [
        ok(command, "-n", 256, "-d", 16, "--heads", 16, "--kv-heads", 4)
        for command in ("compare", "study dram", "predict", "roofline")
    ]
    assert all("16 / 4 heads" in " ".join(text.split()) for text in titles)
