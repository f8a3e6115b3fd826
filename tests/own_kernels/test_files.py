"""A reader's files: what they import, how they are run, and a homework folder's own tests."""

import json
import sys
from pathlib import Path

import pytest

from flashsim.exercises import homework
from flashsim.own_kernels.files import beside, imported, imports

pytestmark = pytest.mark.promise("grading cannot be cheated")


def test_names_of_imports():
    text = (
        "import triton.language as tl, numpy\nfrom jax.experimental import pallas\nfrom . import x"
    )
    assert imports(text) == {"triton.language", "numpy", "jax.experimental.pallas"}
    assert imports("def f(:") == set()  # Python names the mistake when it runs the file


def test_a_file_sees_its_neighbours_and_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "helper_of_mine.py").write_text("n = 3\n")
    (tmp_path / "json.py").write_text("from helper_of_mine import n\nimport sys\nargs = sys.argv\n")
    argv = sys.argv
    with beside(tmp_path / "json.py"):
        module = imported(tmp_path / "json.py")
    assert module.n == 3
    assert module.args == [str(tmp_path / "json.py")]
    assert sys.modules["json"] is json
    assert sys.argv is argv
    assert str(tmp_path) not in sys.path
    del sys.modules["helper_of_mine"]


def test_a_file_that_fails_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "broken_of_mine.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        imported(tmp_path / "broken_of_mine.py")
    assert "broken_of_mine" not in sys.modules


def test_a_folders_own_tests_give_no_points(tmp_path: Path, monkeypatch):
    """A student writes them. pytest's reports are made up here, since torch may be missing."""
    (tmp_path / "tests").mkdir()
    reported = [[f"test_{n}", "passed", ""] for n in range(100)] + [["wrong", "failed", "3 != 4"]]
    monkeypatch.setattr(homework, "handed", lambda order: ("", "", b"", {"tests": reported}))
    assert homework.homework_in(tmp_path) == []  # no file of an exercise is in it
    ((_, ((path, marks),)),) = homework.grade_homework([tmp_path], [])
    assert path == tmp_path / "tests"
    assert (marks.points, marks.most) == (0, 0)
    shown = [(mark.name, mark.kind, mark.words) for mark in marks.marks]
    assert shown[0] == ("all", "", "100 of 101 tests pass")
    assert shown[-2:] == [("test_99", "", ""), ("wrong", "test", "failed: 3 != 4")]
    whole = homework.together([(path, marks)])
    assert [mark.name for mark in whole.marks[1:]] == [
        f"{homework.TESTS}: {x[0]}" for x in reported
    ]
    told = json.loads(whole.gradescope())
    assert told["score"] == sum(test["max_score"] for test in told["tests"]) == 0
    assert [test["status"] for test in told["tests"][-2:]] == ["passed", "failed"]
    lines = whole.text().splitlines()
    assert next(line for line in lines if ": wrong" in line).startswith("  ✗")


def test_a_folder_whose_tests_cannot_run_gets_nothing(tmp_path: Path, monkeypatch):
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(homework, "handed", lambda order: ("", "", b"", {}))
    ((_, ((_, marks),)),) = homework.grade_homework([tmp_path], [])
    said = [(mark.points, mark.most, mark.words) for mark in marks.marks]
    assert said == [(0, 0, "pytest found no test")]
