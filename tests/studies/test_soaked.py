"""What was kept of the soaks on an H200, judged again; docs/notebooks/counters.md prints it."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "notebooks" / "counters.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tables():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module("doc_tables")


def test_every_pass_that_was_soaked_agreed(tables):
    table = tables.soaked_counts()
    assert table.markdown() in PAGE
    *rows, whole = table.records()
    assert sum(whole[name] for name in list(whole)[2:6]) == 3345
    assert (whole["refused"], whole["failed"]) == (0, 0)
    assert all(row["forward"] for row in rows)


@pytest.mark.thorough  # replays every case
def test_random_shapes_under_the_counters(tables):
    """Counts and FLOPs equal, DRAM within 5 %, and eight of the reads beyond 0.1 %."""
    worst, inside = tables.soaked()
    assert worst.markdown() in PAGE
    assert inside.markdown() in PAGE
    missed = {row["quantity"]: row["of"] - row["within its target"] for row in inside.records()}
    assert missed.pop("requested read") == 8
    assert set(missed.values()) == {0}
    assert sum(row["of"] for row in inside.records()) > 800
