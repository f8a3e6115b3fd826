"""Long commands: said before they begin, refused beyond the machine's memory, ended at once."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import invoke, refused

import flashsim
from flashsim import l2
from flashsim.api import cost, sweep_point
from flashsim.cli import attention, options, values
from flashsim.errors import OptionError
from flashsim.report import beside
from flashsim.studies import roofline

pytestmark = pytest.mark.promise("failures end in words")


@pytest.fixture
def began(monkeypatch):
    """Work that would begin stops with "work began"."""

    def stop(*_, **__):
        raise OptionError("work began")

    monkeypatch.setattr(attention.execution, "run", stop)
    monkeypatch.setattr(attention, "run_comparison", stop)


@pytest.mark.parametrize("command", ["run", "compare", "page"])
def test_minutes_are_said_before_the_work(command, began, tmp_path):
    more = {
        "page": ("-o", tmp_path / "x.html", "--execute"),
        "compare": ("-a", "flash1,flash2", "--execute"),
    }
    more = more.get(command, ())
    long = invoke(command, "-n", 32768, "-t", "16x16", *more, "-d", 8)
    short = invoke(command, "-n", 64, "-t", "16x16", *more)

    assert re.search(r"simulating, about \d+ min, estimated from the number of tiles", long.stderr)
    assert "flashsim count" in long.stderr
    assert short.stderr == "flashsim: work began\n"


@pytest.mark.parametrize("command", ["study dram", "roofline"])
def test_minutes_of_replaying_are_said_before_they_pass(command, monkeypatch):
    def stop(*_, **__):
        raise OptionError("work began")

    monkeypatch.setattr(l2, "dram", stop)
    monkeypatch.setattr(roofline, "dram", stop)
    monkeypatch.setattr(cost, "REQUEST", 1e-3)
    words = (command, "-n", 4096, "-t", "16x16", "-h", 8, "--kv-heads", 8)
    long, short = invoke(*words), invoke(command, "-n", 64)
    requests = 8 * 256 * (2 + 2 * 256)  # Q, O and, a visit, K and V; LSE of each row tile
    minutes = (requests + 8 * 256) * 1e-3 / 60
    if command == "study dram":
        assert f"about {minutes:.0f} min, estimated from the number of tile requests" in long.stderr
    assert re.search(r"about \d+ min, estimated from the number of tile requests", long.stderr)
    assert short.stderr == "flashsim: work began\n"
    monkeypatch.setattr(cost, "memory", lambda: 1_000_000)
    assert "GB of memory, but this machine has 0.001 GB; larger tiles" in refused(*words)


def test_a_sweep_that_simulates_for_minutes_says_so(monkeypatch):
    module = sys.modules["flashsim.api.sweep"]  # the package has the function under this name
    row = lambda point: {**point.parameters(), "status": "not run"}  # noqa: E731
    monkeypatch.setattr(module, "measure", row)
    words = ("sweep", "-d", 8, "-t", "16x16", "--direction", "both", "--method")
    assert invoke(*words, "run", "-n", "8,64").stderr == ""
    assert invoke(*words, "count", "-n", "32768").stderr == ""
    long = invoke(*words, "run", "-n", "8192,16384")
    assert re.search(r"sweeping [\d,]+ points, about \d+ min of one core", long.stderr)


def test_a_point_of_a_sweep_beyond_the_machines_memory_is_not_begun(monkeypatch):
    monkeypatch.setattr(cost, "memory", lambda: 50_000_000)
    monkeypatch.setattr(sweep_point.execution, "run", None)
    given = flashsim.sweep([4096], head_dim=8, tiling=flashsim.Tiling(16, 16), method="run")
    assert "GB of memory, but this machine has 0.05 GB" in given.rows[0]["status"]


def test_the_estimate_grows_with_visits_and_products():
    fine, coarse, wide = (
        attention.counting.count(
            values.problem(options.Sizes(n_q=4096, head_dim=d), options.Mask()),
            tiling=values.tiling(t, d, False),
        )
        for t, d in (("16x16", 8), ("64x64", 8), ("64x64", 128))
    )
    seconds = [cost.cost([one]).seconds for one in (coarse, fine, wide)]
    assert seconds[1] > 10 * seconds[0]
    assert seconds[2] > seconds[0]
    assert cost.cost([fine, fine]).seconds == 2 * seconds[1]
    assert str(cost.Estimate(3600.0, 0)) == "about 60 min"
    assert str(cost.Estimate(7200.0, 0)) == "about 2 h"


@pytest.mark.parametrize(
    "words",
    [
        ("run", "-n", 4096, "-a", "standard"),
        ("run", "-n", 100_000),
        ("compare", "-n", 4096, "--execute"),
        ("plot", "traffic", "-n", 4096, "-o", "x.png", "--execute"),
        ("study ladder", "-n", 4096, "--rungs", "naive"),
    ],
)
def test_what_memory_does_not_hold_is_refused(words, monkeypatch, began):
    monkeypatch.setattr(cost, "memory", lambda: 50_000_000)
    assert "GB of memory, but this machine has 0.05 GB" in refused(*words)


def test_a_rung_refuses_before_it_builds_what_judges_it():
    said = refused("study ladder", "-n", 100_000, "--rungs", "whole-row-attention")  # S: 74.5 GiB
    assert "(with block_q=1, 53,888)" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "--out", "{}"), "is a folder"),
        (("plot", "traffic", "-o", "{}"), "is a folder"),
        (("run", "--save", "{}/file/x.npz"), "file' is a file, not a folder"),
        (("page", "-o", "{}/x.txt"), "with this ending; choose from .html"),
        (("animate", "-o", "{}/x.png"), "with this ending; choose from .gif, .mp4, .html"),
        (("plot", "traffic", "-o", "{}/x.xyz"), "with this ending; choose from "),
    ],
)
def test_a_file_that_cannot_be_written_is_found_before_the_work(words, message, tmp_path, began):
    (tmp_path / "file").write_text("")
    said = refused(*(word.format(tmp_path) for word in words))
    assert message in said
    assert "work began" not in said


def test_an_interrupt_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("old")

    def interrupted():
        with beside(path) as part:
            part.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.name for p in tmp_path.iterdir()] == ["x.csv"]
    assert path.read_text() == "old"
    with beside(path) as part:
        part.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["x.csv"]
    assert path.read_text() == "new"


@pytest.mark.parametrize("command", ["plot", "perfetto", "run"])
def test_commands_write_beside(command, tmp_path, monkeypatch):
    """Whatever fails while writing, what was there is still there."""
    from matplotlib.figure import Figure

    def tear(self, name, *_, **__):
        Path(name if command != "run" else name.name).write_bytes(b"torn")
        raise KeyboardInterrupt

    out = tmp_path / {"plot": "x.png", "perfetto": "x.json", "run": "x.npz"}[command]
    out.write_text("old")
    words = {
        "plot": ("plot", "traffic", "-n", 64, "-o", out),
        "perfetto": ("trace", "perfetto", "h200-forward", "-o", out),
        "run": ("run", "-n", 64, "--out", out),
    }[command]
    monkeypatch.setattr(Figure, "savefig", tear)
    if command == "perfetto":
        monkeypatch.setattr(Path, "write_bytes", _torn)
    if command == "run":
        monkeypatch.setattr(attention.np, "savez", lambda stream, **_: tear(None, stream))
    invoke(*words)
    assert out.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == [out.name]


def _torn(self, _):
    self.write_text("torn")
    raise KeyboardInterrupt


@pytest.fixture
def start():
    """Starts Python with some code, as a group of processes that ends with the test.

    A shell's background jobs ignore SIGINT, and so does what they start: here it is the default's.
    """
    started = []
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"

    def run(body):
        command = [sys.executable, "-c", f"if __name__ == '__main__':\n {code} {body}"]
        started.append(subprocess.Popen(command, start_new_session=True))
        return started[-1]

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):  # all of them ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_an_interrupted_sweep_ends_its_workers(start):
    words = ("sweep", "-n", "32768,32769", "-t", "16x16", "--method", "run", "--workers", "2")
    sweep = start(f"from flashsim.cli import main; sys.argv[1:] = {[*words]!r}; main()")
    children = Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children")
    until = time.monotonic() + 60
    while len(children.read_text().split()) < 3:  # two workers, and what tracks their resources
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(3)

    os.kill(sweep.pid, signal.SIGINT)

    assert sweep.wait(timeout=30) != 0  # a point takes minutes
