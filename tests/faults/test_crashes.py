"""A crash of a test process ends the run as a failure that names the test, and never hangs it."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise("failures end in words")

TESTS = Path(__file__).parents[1]
#: Seconds from a crash to the end of the run.
A_MINUTE = 60

FINE = """
def test_one(): pass
def test_two(): pass
"""
CRASHES = """
import os, pathlib
def test_before(): pass
def test_crashes():
    pathlib.Path("crashed").touch()
    os.abort()
def test_behind(): pass
"""
#: Keeps its process busy for longer than the run may take. With three tests it takes no other file.
BUSY = """
import time
def test_sleeps(): time.sleep(600)
def test_behind(): pass
def test_last(): pass
"""
WHILE_IT_COLLECTS = """
import os
if "PYTEST_XDIST_WORKER" in os.environ: os.abort()
def test_one(): pass
"""
AT_THE_END = """
import os
import pytest
class End:
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self): os.abort()
def test_one(request):
    request.config.pluginmanager.register(End())
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that runs test files with this suite's conftest.py, in other processes."""

    def running(files, *options, processes=2):
        shutil.copy(TESTS / "conftest.py", tmp_path)
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        words = [sys.executable, "-m", "pytest", "-c", str(TESTS.parent / "setup.cfg")]
        words += [f"--rootdir={tmp_path}", "-p", "no:cacheprovider", "--no-loadscope-reorder"]
        words += ["-n", str(processes), *options, str(tmp_path)]
        # These tests compile nothing: Numba need not be imported to be changed.
        left_out = "PYTEST_", "FLASHSIM_UNOPTIMISED"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        if (tmp_path / "crashed").exists():
            assert time.time() - (tmp_path / "crashed").stat().st_mtime < A_MINUTE
        return done.returncode, done.stdout + done.stderr

    return running


def test_a_crash_after_other_files_ends_the_run_and_is_named(run):
    files = {"test_a.py": FINE, "test_b.py": FINE, "test_c.py": CRASHES, "test_d.py": FINE}
    status, said = run(files, processes=1)
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert "FAILED test_c.py::test_crashes - worker 'gw0' crashed while running" in said
    assert " crashed in test_c.py::test_crashes: " in said
    assert "1 failed, 5 passed" in said


def test_a_crash_does_not_wait_for_the_other_process(run):
    status, said = run({"test_a.py": BUSY, "test_b.py": FINE, "test_c.py": CRASHES})
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert re.search(r"^FAILED test_c.py::test_crashes - worker 'gw[01]' crashed", said, re.M)
    assert "1 failed, 3 passed" in said


def test_a_crash_of_all_processes_is_named_also_where_coverage_is_asked_for(run):
    status, said = run({"test_a.py": CRASHES, "test_b.py": CRASHES}, "--covered", "98")
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert re.search(r"^FAILED test_[ab].py::test_crashes - worker 'gw[01]' crashed", said, re.M)
    assert "INTERNALERROR" not in said


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "when"),
    [(WHILE_IT_COLLECTS, "before its first test"), (AT_THE_END, "after test_a.py::test_one")],
    ids=["while it collects", "at the end"],
)
def test_a_crash_outside_of_tests_ends_the_run_too(run, text, when):
    status, said = run({"test_a.py": text}, processes=1)
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert f" crashed {when}: " in said


@pytest.mark.thorough
def test_on_a_gpu_the_other_tests_go_on(run):
    """There each process takes tests one by one, and a faulty kernel ends its process."""
    files = {"test_a.py": CRASHES, "test_b.py": FINE, "test_c.py": CRASHES}
    status, said = run(files, "-m", "gpu or not gpu")
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert "2 failed, 6 passed" in said, said
    for name in ("test_a.py", "test_c.py"):
        assert f"FAILED {name}::test_crashes - worker 'gw" in said
