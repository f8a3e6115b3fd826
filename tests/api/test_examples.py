"""Every example runs, from an empty folder, without a warning, and stays short."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise("doc examples run")

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def test_examples_are_numbered_without_gaps():
    assert [int(path.name[:2]) for path in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))
    assert len(EXAMPLES) >= 9


#: Chooses Numba's simulator before Numba is imported.
OWN_PROCESS = {"12_numba_cuda"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path, monkeypatch, capfd):
    assert len(path.read_text().splitlines()) < 60
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    if path.stem in OWN_PROCESS:
        subprocess.run([sys.executable, "-W", "error", path], timeout=120, check=True)
    else:
        runpy.run_path(str(path), run_name="__main__")  # warnings are errors: setup.cfg
    said = capfd.readouterr()
    assert said.err == ""
    assert said.out.strip()
