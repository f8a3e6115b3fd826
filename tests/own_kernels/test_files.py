"""A reader's files: what they import, how they are run, and a homework folder's own tests."""

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
    import json

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


def test_a_folders_own_tests_are_marked_one_by_one(tmp_path: Path, monkeypatch):
    """What pytest reported in the child process is handed over here, since torch may be missing."""
    (tmp_path / "tests").mkdir()
    reported = [["sums::right", "passed", ""], ["sums::wrong", "failed", "3 != 4"]]
    monkeypatch.setattr(homework, "handed", lambda order: ("", "", b"", reported))
    assert homework.homework_in(tmp_path) == []  # no file of an exercise is in it
    ((path, marks),) = homework.grade_homework(tmp_path)
    assert path == tmp_path / "tests"
    assert [(mark.name, mark.points, mark.words) for mark in marks.marks] == [
        ("sums::right", 1, ""),
        ("sums::wrong", 0, "failed: 3 != 4"),
    ]
    whole = homework.together([(path, marks)])
    assert [mark.name for mark in whole.marks] == [f"{homework.TESTS}: {x[0]}" for x in reported]
    assert sum(mark.points for mark in whole.marks) == 1


def test_a_folder_whose_tests_cannot_run_gets_nothing(tmp_path: Path, monkeypatch):
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(homework, "handed", lambda order: ("", "", b"", []))
    ((_, marks),) = homework.grade_homework(tmp_path)
    assert [(mark.points, mark.words) for mark in marks.marks] == [(0, "pytest found no test")]
