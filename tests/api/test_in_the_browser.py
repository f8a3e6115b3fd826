"""A browser's session, docs/guides/in_the_browser.md: no Numba, no threads, no processes."""

import ast
import subprocess
import sys
from pathlib import Path

import browser_session
import lessons
import lite
import pytest

import flashsim

pytestmark = pytest.mark.promise("failures end in words")

SESSION = Path(browser_session.__file__)
IN_A_SESSION = f"""
import os, sys
from IPython.display import display
sys.path.insert(0, {str(SESSION.parent)!r})
import browser_session
browser_session.shut()
os.chdir({str(lessons.HERE)!r})
exec(compile(sys.stdin.read(), "lesson", "exec"), {{"display": display}})
"""


def session(*arguments, source=None):
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        input=source,
        capture_output=True,
        text=True,
        timeout=300,
        env={"MPLBACKEND": "agg"},
    )


def test_a_session(tmp_path):
    done = session(str(SESSION), str(tmp_path))
    assert done.stdout.endswith("a browser's session: ok\n"), done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        *("trace.npz", "tiles.svg", "traffic.svg", "page.html")
    }


@pytest.mark.parametrize("package", ["numba", "scipy", "typer", "llvmlite.binding"])
def test_the_session_refuses(package):
    with pytest.raises(ImportError, match="not there in a browser"):
        browser_session.Blocked().find_spec(package)
    assert browser_session.Blocked().find_spec("numpy") is None


@pytest.mark.thorough
@pytest.mark.parametrize("path", lessons.LESSONS, ids=lambda path: path.stem)
def test_lessons(path):
    cells = [cell.source for cell in lessons.read(path).cells if cell.cell_type == "code"]
    done = session("-c", IN_A_SESSION, source="\n".join(cells))
    if path.stem.startswith("1_"):  # as the guide says
        assert "the model of the L2 cache needs Numba" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_notebooks_begin_with_the_guides_cell():
    made = lite.notebook(lessons.LESSONS[0])
    title, install = made.cells[:2]
    assert title.source.startswith("# 1")
    assert 'piplite.install("flashsim-attention", deps=False)' in install.source
    compile(install.source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    wheel = f"flashsim_attention-{flashsim.__version__}-py3-none-any.whl"
    assert wheel in lite.GUIDE.read_text(encoding="utf-8")
