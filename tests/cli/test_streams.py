"""The command where streams are closed or narrow, and where it is stopped."""

import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time

import numba
import numpy as np
import pytest
from commands import not_right, ok, refused

import flashsim
from flashsim import cli, report
from flashsim.exercises import submissions

pytestmark = pytest.mark.promise("failures end in words")

ASCII = {"PYTHONIOENCODING": "ascii"}
COMMAND = [sys.executable, "-m", "flashsim"]
POSIX = pytest.mark.skipif(os.name != "posix", reason="the shell of this test")


def shell(line, **environment):
    """Run a line of the shell in which `flashsim` is the command."""
    quoted = line.replace("flashsim", f"'{sys.executable}' -m flashsim")
    how = {"env": {**os.environ, **environment}, "encoding": "utf-8", "timeout": 60}
    return subprocess.run(["sh", "-c", quoted], capture_output=True, text=True, **how)


@pytest.fixture
def main(monkeypatch):
    """The command in this process, by its words; its exit status."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["flashsim", *words])
        try:
            cli.main()
        except SystemExit as end:
            return end.code
        return 0

    yield run
    signal.signal(signal.SIGTERM, before)


def test_the_entry_point(main, capsys):
    assert main("--version") == 0
    assert capsys.readouterr().out == f"flashsim {flashsim.__version__}\n"
    assert main("count", "-n", "128") == 0
    assert "compulsory 131,584 B" in capsys.readouterr().out
    assert main("count", "-n", "-1") == 2
    assert capsys.readouterr().err == "flashsim: n_q must be at least 1, got -1\n"
    with pytest.raises(SystemExit) as end:
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_package_is_the_command(main, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flashsim", "--version"])
    runpy.run_module("flashsim", run_name="__main__")
    assert capsys.readouterr().out == f"flashsim {flashsim.__version__}\n"
    bad = subprocess.run([*COMMAND, "trafic"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "no command 'trafic'" in bad.stderr


def test_the_entry_point_is_interrupted(main, monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_ready_streams", interrupt)
    assert main("--version") == 130
    assert capsys.readouterr().err == "Aborted!\n"


def test_streams_that_are_closed_or_narrow(main, monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", narrow)
    monkeypatch.setattr(sys, "stderr", None)
    assert main("count", "-n", "128") == 0
    assert b"compulsory 131,584 B" in narrow.buffer.getvalue()
    assert sys.stderr.name == os.devnull
    sys.stderr.close()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "stdout", None)
    assert main("count", "-n", "128") == 2
    assert sys.stderr.getvalue().startswith("flashsim: stdout is closed")


@POSIX
def test_a_closed_stdout_is_refused_before_the_work():
    done = shell("flashsim count -n 128 >&-")
    assert done.returncode == 2
    assert done.stderr.startswith("flashsim: stdout is closed")
    assert done.stderr.count("\n") == 1


@POSIX
@pytest.mark.parametrize(("closed", "environment"), [("2>&-", {}), ("", ASCII)])
def test_a_closed_stderr_or_an_ascii_stdout_does_not_matter(closed, environment):
    done = shell(f"flashsim count -n 128 {closed}", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "compulsory 131,584 B" in done.stdout
    assert not environment or done.stdout.isascii()


@POSIX
@pytest.mark.parametrize("stdin", ["<&-", "</dev/null"])
def test_a_question_that_nobody_answers_names_the_option(stdin):
    done = shell(f"flashsim exercise predict count-a-product {stdin}")
    assert done.returncode == 2
    assert "stdin is closed; pass it by --loaded" in done.stderr


@POSIX
def test_gradescopes_results_go_through_a_pipe(tmp_path):
    done = shell(
        f"cd {tmp_path} && flashsim exercise start count-a-product >/dev/null && "
        "flashsim exercise grade count_a_product.py --gradescope /dev/stdout | cat"
    )
    assert '"score"' in done.stdout
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@POSIX
@pytest.mark.parametrize(("path", "more"), [("/dev/null", "--out a.csv"), ("/dev/stdout", "")])
def test_a_trace_goes_to_a_device_or_a_pipe(path, more, tmp_path):
    run = f"flashsim run -n 64 -d 8 -t 32x32 --save {path} {more}"
    done = shell(f"cd {tmp_path} && {run} | cat >/dev/null")
    assert f"trace in {path}" in done.stderr


#: Begins to write a file, says so, and waits.
WRITES = """
import sys, time
from pathlib import Path
from flashsim import cli, report
import flashsim.cli.app
def app():
    with report.beside(Path(sys.argv[1])) as part:
        part.write_text("half")
        print("writing", flush=True)
        time.sleep(60)
flashsim.cli.app.app = app
cli.main()
"""


@POSIX
def test_a_terminated_command_leaves_no_temporary_file(tmp_path):
    done = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(tmp_path / "out.csv")], stdout=subprocess.PIPE, text=True
    )
    assert done.stdout.readline() == "writing\n"
    assert len(os.listdir(tmp_path)) == 1
    done.send_signal(signal.SIGTERM)
    done.communicate(timeout=30)
    assert done.returncode == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == []


@POSIX
def test_an_interrupt_while_importing_is_one_word(tmp_path):
    """A module that the command imports, and that takes its time.

    A shell's background jobs ignore SIGINT, and so does what they start: here it is the default's.
    """
    (tmp_path / "typer").mkdir()
    (tmp_path / "typer" / "__init__.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    )
    done = subprocess.Popen(
        [*COMMAND, "count", "-n", "64"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.stdout.readline() == "importing\n"
    done.send_signal(signal.SIGINT)
    _, said = done.communicate(timeout=30)
    assert said == "Aborted!\n"
    assert done.returncode == 130


@POSIX
def test_the_version_takes_no_time():
    """A tenth of the 0.9 s of CPU that Typer and its modules take, with room for a slow machine."""
    before = os.times()
    start = time.monotonic()
    subprocess.run([*COMMAND, "--version"], check=True, capture_output=True)
    after = os.times()
    used = after.children_user - before.children_user + after.children_system
    assert used - before.children_system < 0.3 or time.monotonic() - start > 5


@pytest.mark.parametrize(
    "arguments",
    [("run", "-n", "64", "--backend", "numba"), ("study", "dram", "-n", "64"), ("study", "warm")],
)
def test_numba_without_its_compiler_is_said(arguments, monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert "NUMBA_DISABLE_JIT=1 switches off: unset that variable" in refused(*arguments)


# -- text from elsewhere on a terminal ------------------------------------------------------------

ESCAPES = "a\x1b]0;title\x07b\x1b[2Jc\u202ed\x9b31m"


def test_tables_show_escapes_and_do_not_send_them():
    table = report.Table(ESCAPES, (ESCAPES, "n"), [(ESCAPES, 1), ("x", 2)], note=ESCAPES)
    for text in (str(table), report.format_cell(ESCAPES)):
        assert not set(text) & set("\x1b\x07\u202e\x9b")
        assert r"a\x1b]0;title\x07b" in text


def test_errors_show_escapes_and_do_not_send_them():
    assert "\x1b" not in refused("count", "--device", "x", "--window", "1:\x1b[2J")


def test_what_a_student_prints_is_shown_and_not_obeyed(tmp_path, monkeypatch):
    file = tmp_path / "one.py"
    ok("exercise start", "naive-softmax", "-o", file)
    grade = submissions.grade_file

    def escaping(*given, **more):
        marks, trace = grade(*given, **more)
        monkeypatch.setattr(type(marks), "text", lambda _: ESCAPES)
        return marks, trace

    monkeypatch.setattr(submissions, "grade_file", escaping)
    said = not_right("exercise grade", file)
    assert r"a\x1b]0;title\x07b" in said
    assert "\x1b" not in said


@pytest.mark.parametrize("where", ["algorithm", "provenance", "device"])
def test_a_trace_with_escapes_is_refused(where, tmp_path):
    trace = flashsim.run(*np.zeros((3, 16, 4), np.float32), trace=True).trace
    path = tmp_path / "run.npz"
    trace.save(path)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    header = json.loads(arrays["header"].tobytes())
    if where == "algorithm":
        header[where] = "x" * 3000
    else:
        header[where][{"provenance": "numpy", "device": "name"}[where]] = ESCAPES
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(path, **arrays)
    with pytest.raises(flashsim.TraceError, match="must have at most 2,000 characters") as caught:
        flashsim.Trace.load(path)
    assert "\x1b" not in str(caught.value)
