"""The code blocks of README and docs run, and the numbers beside them are what comes out."""

import re
from pathlib import Path

import pytest

import flashsim

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=lambda p: p.name)
def test_blocks_run(page, capsys):
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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
