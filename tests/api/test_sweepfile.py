"""One file of rows, several processes that write to it."""

import csv
import os
import subprocess
import sys
import time

import pytest

import flashsim
from flashsim import Tiling
from flashsim.api import sweepfile

pytestmark = pytest.mark.promise("failures end in words")

#: A sweep of its own lengths into a file that another sweep writes, too.
SWEEP = """
import os, sys, time
import flashsim
from flashsim import Tiling
first, path, go = int(sys.argv[1]), sys.argv[2], sys.argv[3]
print("ready", flush=True)
while not os.path.exists(go):
    time.sleep(0.001)
flashsim.sweep(range(first, first + 150), tiling=Tiling(64, 64), path=path)
"""


def test_two_sweeps_at_once_keep_each_others_rows(tmp_path):
    path, go = tmp_path / "rows.csv", tmp_path / "go"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SWEEP, first, str(path), str(go)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in ("64", "364")
    ]
    for one in both:
        assert one.stdout.readline() == "ready\n"
    go.touch()
    for one in both:
        one.communicate(timeout=60)
        assert one.returncode == 0
    with path.open(newline="") as file:
        found = [int(row["n_q"]) for row in csv.DictReader(file)]
    assert sorted(found) == [*range(64, 214), *range(364, 514)]
    assert len(flashsim.sweep([64, 513], tiling=Tiling(64, 64), path=path)) == 2


def columns_of(path):
    return sweepfile.SweepFile(path, ("a", "b"), dict)


def test_the_rows_of_two_writers_in_turn_are_all_there(tmp_path):
    path = tmp_path / "rows.csv"
    with columns_of(path) as one, columns_of(path) as two:
        one.append({"a": 1, "b": "x"})
        two.append({"a": 2, "b": "y"})
        one.append({"a": 3, "b": "z"})
    assert path.read_text() == "a,b\n1,x\n2,y\n3,z\n"


def test_a_line_that_a_killed_writer_left_half_is_dropped_by_the_next(tmp_path):
    path = tmp_path / "rows.csv"
    with columns_of(path) as file:
        file.append({"a": 1, "b": "x"})
        with path.open("a") as killed:
            killed.write("2,half")
        file.append({"a": 3, "b": "z"})
    assert path.read_text() == "a,b\n1,x\n3,z\n"


def test_a_writer_waits_for_the_one_that_holds_the_file(tmp_path):
    path = tmp_path / "rows.csv"
    code = (
        "import sys, time; from flashsim.api.sweepfile import SweepFile\n"
        "file = SweepFile(sys.argv[1], ('a', 'b'), dict)\n"
        "with file._locked():\n"
        "    print('held', flush=True); time.sleep(0.5)\n"
        "    file._write('1,x\\n')\n"
    )
    with columns_of(path) as file:
        other = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert other.stdout.readline() == "held\n"
        start = time.monotonic()
        file.append({"a": 2, "b": "y"})
        assert time.monotonic() - start > 0.2
        other.communicate(timeout=30)
    assert path.read_text() == "a,b\n1,x\n2,y\n"


def test_a_full_disk_is_said_and_leaves_whole_rows(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    with columns_of(path) as file:
        file.append({"a": 1, "b": "x"})

        def full(line):
            os.write(file._stream.fileno(), b"2,")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(file, "_write", full)
        with pytest.raises(flashsim.OptionError, match=r"cannot write .*rows\.csv: No space left"):
            file.append({"a": 2, "b": "y"})
    with columns_of(path) as file:
        assert file.rows == [{"a": "1", "b": "x"}]
    assert path.read_text() == "a,b\n1,x\n"
