"""What the grader promises: attacks gain nothing, end in time and in words, and grading goes on."""

import os
import subprocess
import sys
import time
from pathlib import Path

import attacks
import numpy as np
import pytest

from flashsim import OptionError
from flashsim.engines.sandbox import recorder, walls
from flashsim.engines.sandbox.program import record, replay
from flashsim.engines.sandbox.recorder import Handed
from flashsim.exercises import get, grade, grading, names, submissions
from flashsim.exercises.exercise import KINDS
from flashsim.exercises.runner import plain, run

pytestmark = pytest.mark.promise("grading cannot be cheated")

LINUX = sys.platform == "linux"
FLASH2 = get("flash2-forward")
HEADER = "# flashsim exercise: flash2-forward\n"
#: The walls that this system has, as a process behind them says.
WALLS = {walls.FILES, walls.PROCESSES, walls.NETWORK} - {*submissions.missing_walls()}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """The marks of every attack, graded in one go together with two files of diligent students."""
    folder = tmp_path_factory.mktemp("class")
    secret, marker = folder / "secret.txt", folder / "marker"
    secret.write_text("TheReference")
    for at, (text, *_) in enumerate(attacks.FILES.values()):
        text = text.replace("MARKER", str(marker)).replace("SECRET", str(secret))
        (folder / f"a{at:03}.py").write_text(text)
    (folder / "b_empty.py").write_text("")
    (folder / "c_link.py").symlink_to(secret)
    (folder / "d_folder.py").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "e_fifo.py")
    (folder / "e_zero.py").symlink_to("/dev/zero")
    (folder / "z_first.py").write_text(FLASH2.solution_source)
    (folder / "z_second.py").write_text(FLASH2.solution_source)
    began = time.monotonic()
    graded = submissions.grade_folder(folder, "flash2-forward", limit=30)
    return {path.name: one for path, one in graded}, marker, time.monotonic() - began


@pytest.mark.parametrize("at", range(len(attacks.FILES)), ids=attacks.FILES)
def test_an_attack_gains_nothing(attacked, at):
    if not WALLS and list(attacks.FILES)[at] in ("a file is read", "a socket", "forked sleepers"):
        pytest.skip("this system has no walls")
    _, kind, said = [*attacks.FILES.values()][at]
    marks = attacked[0][f"a{at:03}.py"]
    assert marks.points == 0
    first = next(mark for mark in marks.marks if mark.kind)
    assert first.kind in ((kind,) if isinstance(kind, str) else kind)
    assert said in first.words
    assert 0 < len(first.words) < 5000
    assert "TheReference" not in marks.text()
    assert marks.text().replace("\n", "").isprintable()


def test_a_class_is_graded_whatever_is_in_the_folder(attacked):
    marks, marker, seconds = attacked
    assert [marks[f"z_{name}.py"].points for name in ("first", "second")] == [100, 100]
    for name in ("c_link.py", "e_zero.py", *(["e_fifo.py"] if hasattr(os, "mkfifo") else [])):
        assert (marks[name].points, marks[name].marks[0].kind) == (0, "file")
        assert "is a link, a folder or a device" in marks[name].marks[0].words
    assert marks["b_empty.py"].marks[0].kind == "function"
    assert seconds < 90
    if WALLS:
        assert not marker.exists()


@pytest.mark.skipif(not LINUX, reason="the walls are Linux's")
def test_the_walls_are_up():
    if walls.platform.machine() in walls._ARCHITECTURES:
        assert {walls.PROCESSES, walls.NETWORK} <= WALLS


@pytest.mark.skipif(not LINUX, reason="their numbers are Linux's")
def test_the_numbers_of_system_calls():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.is_file():
        pytest.skip(f"there is no {header}")
    lines = [line.split() for line in header.read_text().splitlines() if "define __NR_" in line]
    numbers = {name.removeprefix("__NR_"): int(number) for _, name, number in lines}
    calls = {**walls._PROCESS_CALLS, **walls._NETWORK_CALLS, **walls._FILE_CALLS}
    assert {name: numbers[name] for name in calls if name in numbers} == {
        name: call[0] for name, call in calls.items() if name in numbers
    }


#: Forged programs that a check has to stop before this computer runs out of memory.
KINDS_OF = {
    **dict.fromkeys(("a huge tile", "a huge product", "a huge sum"), "overflow"),
    **dict.fromkeys(("a huge workspace", "many workspaces"), "machine"),
    "a long line": "program",
}


@pytest.mark.parametrize("name", attacks.PROGRAMS)
def test_a_forged_program_is_no_solution(name):
    began = time.monotonic()
    handed = Handed(program=attacks.PROGRAMS[name])
    marks, trace = grading.judge(handed, FLASH2, "", time.perf_counter(), 30)
    assert (marks.points, trace) == (0, None)
    assert marks.marks[0].words
    assert time.monotonic() - began < 10
    assert name not in KINDS_OF or marks.marks[0].kind == KINDS_OF[name]


def test_a_program_that_takes_too_long():
    handed = Handed(program=attacks.program(*[[1, "strip", [{"sram": 0}], {}]] * 10**5))
    marks, _ = grading.judge(handed, FLASH2, "", time.perf_counter(), 0.05)
    assert marks.marks[0].words == (
        "the recorded program takes too long to replay; load and store fewer, larger tiles"
    )


def test_a_loop_that_does_not_end(tmp_path):
    (tmp_path / "x.py").write_text(HEADER + "while True: pass")
    began = time.monotonic()
    marks, trace = submissions.grade_file(tmp_path / "x.py", limit=1)
    assert (marks.points, trace, marks.marks[0].kind) == (0, None, "time")
    assert "it was stopped after 1 s; check for a loop that does not end" in marks.marks[0].words
    assert time.monotonic() - began < 10


def test_a_process_and_all_that_it_started_are_ended(tmp_path):
    """Without walls: a group of its own ends together."""
    code = f"import os, subprocess, sys, time\nos.chdir({str(tmp_path)!r})\n"
    code += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
    code += "open('pid', 'w').write(str(child.pid))"
    ended = run([sys.executable, "-c", code], b"", 30)
    assert (ended.status, ended.why) == (0, "")
    pid = int((tmp_path / "pid").read_text())
    time.sleep(0.1)
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_process_gets_no_secrets(monkeypatch):
    monkeypatch.setenv("TOKEN", "x")
    code = "import os; print(os.environ.get('TOKEN'), os.environ['OMP_NUM_THREADS'], flush=True)"
    assert run([sys.executable, "-c", code], b"", 30).result == b"None 1\n"


def test_text_that_can_be_shown():
    assert plain("é\n\x1b[0m\t") == "é\n\\x1b[0m\\t"
    assert plain("x" * 9, 4) == "xxxx..."


def test_a_header_names_exercises_of_the_course_alone(tmp_path):
    """A student's header could otherwise have a file of theirs run by the grader itself."""
    (tmp_path / "z.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    (tmp_path / "x.py").write_text(f"# flashsim exercise: {tmp_path / 'z.py'}\n")
    words = r"the course has no exercise.*own exercise, pass --exercise FILE"
    with pytest.raises(OptionError, match=words):
        submissions.grade_file(tmp_path / "x.py")
    assert not (tmp_path / "marker").exists()


def test_a_table_of_numbers_does_not_know_the_inputs():
    """The right answer for inputs that are known before, stored without one load."""
    arrays = FLASH2.task.arrays("normal", 0)
    right = FLASH2.truth(arrays, FLASH2.task.problem, "float64")
    table = {name: right[name][0, 0].tolist() for name in ("O", "L")}
    text = (
        f"TABLE = {table}\n"
        + """
def solution(machine):
    with machine.stage("s") as sram, sram.step(0):
        for row in range(32):
            sram.store(machine.hbm.L, slice(row, row + 1), TABLE["L"][row])
            for at, number in enumerate(TABLE["O"][row]):
                sram.store(machine.hbm.O, slice(row, row + 1), number, slice(at, at + 1))
"""
    )
    marks, trace = grade(text, FLASH2)
    assert (marks.points, marks.marks[0].kind) == (0, "result")
    assert trace.bytes("load") == 0


def test_inputs_are_drawn_when_a_solution_is_graded(monkeypatch):
    seeds = []
    draw = type(FLASH2.task).arrays
    seen = lambda *given: seeds.append(given[1:]) or draw(*given)  # noqa: E731
    monkeypatch.setattr(type(FLASH2.task), "arrays", seen)
    for _ in range(2):
        grade(FLASH2.solution_source, FLASH2)
    drawn = [one for one in seeds if one]
    assert len(drawn) == len({*drawn}) == 2 * grading.DRAWS * len(KINDS)


@pytest.mark.parametrize("name", [name for name in names() if not get(name).questions])
def test_a_replayed_program_does_what_the_function_does(name):
    """Every event with its bytes, every FLOP, and every result to the last bit."""
    one = get(name)
    arrays = one.task.arrays("heavy", 3)
    direct = one.task.run(one.reference, arrays)
    program = record(one.reference, "reference", one.task.setting)
    machine = one.task.setting.machine(arrays)
    replay(program, machine, "reference")
    for stage, right in zip(machine.stages, direct.trace.stages, strict=True):
        np.testing.assert_array_equal(stage.events, right.events)
        np.testing.assert_array_equal(stage.costs, right.costs)
    for output in one.task.outputs:
        got, right = machine.hbm._array(output), direct.tensors[output]
        np.testing.assert_array_equal(got.reshape(right.shape), right)


def test_several_draws_at_once_give_what_each_gives():
    one = get("grouped-queries")
    program = record(one.reference, "reference", one.task.setting)
    draws = [one.task.arrays("normal", seed) for seed in range(3)]
    both = {name: np.concatenate([draw[name] for draw in draws]) for name in "QKV"}
    machine = one.task.setting.machine(both, samples=3)
    replay(program, machine, "reference")
    for at, draw in enumerate(draws):
        alone = one.task.run(one.reference, draw)
        np.testing.assert_array_equal(machine.hbm._array("O")[at], alone.out[0])
        for stage, right in zip(machine.stages, alone.trace.stages, strict=True):
            np.testing.assert_array_equal(stage.events, right.events)


# -- files ------------------------------------------------------------------------------------


@pytest.fixture
def solved(tmp_path):
    path = tmp_path / "flash2_forward.py"
    path.write_text(HEADER + FLASH2.solution_source)
    return path


def test_a_process_of_its_own(solved):
    solved.write_text(solved.read_text() + "print('a' * 100_000)\n")
    marks, trace = submissions.grade_file(solved)
    assert marks.points == 100
    assert trace.bytes() == FLASH2.full_marks_bytes
    assert trace.algorithm == "solution"


def test_what_the_process_does_can_run_here(solved):
    handed = recorder.from_text(solved.read_text(), "x.py", FLASH2.task.setting)
    assert grading.judge(handed, FLASH2, "", time.perf_counter())[0].points == 100


@pytest.mark.skipif(not LINUX, reason="only Linux limits a process's memory")
def test_memory_that_grows(solved):
    """Less than this machine has: the limit alone ends it, and lets through what is within."""
    grow = "def solution(machine):\n    kept = [bytes(10**6)]\n    while len(kept) < {}:\n"
    grow += "        kept.append(bytes(10**6))\n    raise ValueError('all there')\n"
    for pieces, memory, kind in ((500, 100, "memory"), (500, None, "error"), (50, 100, "error")):
        solved.write_text(grow.format(pieces))
        marks, _ = submissions.grade_file(solved, "flash2-forward", memory=memory)
        assert marks.marks[0].kind == kind
    assert marks.marks[0].words.startswith("ValueError: all there")


def test_a_memory_where_none_can_be_limited(solved, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    said = "memory=100 was passed, but memory can be limited only on Linux"
    with pytest.raises(OptionError, match=said):
        submissions.grade_file(solved, memory=100)
    assert submissions.grade_file(solved)[0].points == 100


def test_files_that_cannot_be_graded(tmp_path):
    with pytest.raises(OptionError, match="cannot read"):
        submissions.grade_file(tmp_path / "none.py")
    (tmp_path / "x.py").write_text("def solution(machine): pass\n")
    with pytest.raises(OptionError, match=r"x\.py does not name its exercise"):
        submissions.grade_file(tmp_path / "x.py")
    with pytest.raises(OptionError, match=r"no exercise 'flash2-backward'.*did you mean"):
        submissions.grade_file(tmp_path / "x.py", "flash2-backward")
    (tmp_path / "none").mkdir()
    with pytest.raises(OptionError, match=r"contains no \.py file"):
        list(submissions.grade_folder(tmp_path / "none"))


def test_a_class_whose_files_name_their_exercises(tmp_path):
    (tmp_path / "alice").mkdir()
    (tmp_path / "alice" / "a.py").write_text(HEADER + FLASH2.solution_source)
    (tmp_path / "b.py").write_text(FLASH2.solution_source)
    solution = get("count-a-product").solution_source
    (tmp_path / "c.py").write_text(f"# flashsim exercise: count-a-product\n{solution}")
    marks = {path.name: one for path, one in submissions.grade_folder(tmp_path)}
    points = {name: one.points for name, one in marks.items()}
    assert points == {"a.py": 100, "b.py": 0, "c.py": 100}
    assert "does not name its exercise" in marks["b.py"].marks[0].words


def test_files_as_windows_writes_them(solved, tmp_path):
    """A mark at the beginning, another encoding that the file says, and one that it does not."""
    text = solved.read_text(encoding="utf-8")
    written = tmp_path / "x.py"
    for encoded, read in (
        (text.encode("utf-8-sig"), text),
        (text.replace("\n", "\r\n").encode(), text),
        (f"# -*- coding: latin-1 -*-\n# gr\u00fcn\n{text}".encode("latin-1"), "# gr\u00fcn"),
    ):
        written.write_bytes(encoded)
        assert read in submissions._text_of(written)
    assert submissions.grade_file(written)[0].points == 100
    for encoded in (f"{text}# gr\u00fcn".encode("latin-1"), text.encode("utf-16")):
        written.write_bytes(encoded)
        marks, trace = submissions.grade_file(written, "flash2-forward")
        assert (marks.points, marks.marks[0].kind, trace) == (0, "syntax", None)
        assert "Python cannot read the file: " in marks.text()


def test_the_process_imports_no_exercise():
    code = f"import sys, {recorder.__name__}; print([x for x in sys.modules if 'exercises' in x])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
