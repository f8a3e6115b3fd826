"""What Windows lacks is not needed: POSIX's modules, and UTF-8 as the encoding of files.

It shows no more than that. Nobody has run this on Windows.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.promise("failures end in words")

#: Runs commands in a Python without what Windows lacks; a file opened without its encoding is an
#: error. The lock of a sweep's file is Windows' own, of which a stand-in notes the calls.
CODE = """
import os, sys, types, warnings
import matplotlib, multiprocessing, numba, rich.console, typer  # with what they need of POSIX
from flashsim.api import sweepfile
from typer.testing import CliRunner
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("getuid", "geteuid", "sched_getaffinity", "chown", "fork"):
    delattr(os, name)
locked = []
lock = lambda file, mode, size: locked.append(mode)
sweepfile.sys = types.SimpleNamespace(platform="win32")
sweepfile.msvcrt = types.SimpleNamespace(LK_LOCK="lock", LK_UNLCK="unlock", locking=lock)
warnings.filterwarnings("error", category=EncodingWarning, module="flashsim")
from flashsim.cli.app import app
os.chdir(sys.argv[1])
for line in sys.argv[2:]:
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, (line, done.output, done.exception)
print(*locked)
"""
COMMANDS = [
    "run -n 64 -d 16 --save run.npz",
    "trace show run.npz",
    "trace perfetto run.npz -o run.json",
    "compare -n 64",
    "sweep -n 64,128 -o rows.csv",
    "page -n 64 -d 16 -o page.html",
    "exercise start naive-softmax",
]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows itself is better")
def test_commands_need_nothing_that_windows_lacks(tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-c", CODE, str(tmp_path), *COMMANDS],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["lock", "unlock"] * 3  # to open, and for each row
