"""Exercises: references get every point, wrong solutions the words that they deserve."""

import functools
import json
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from typer.testing import CliRunner
from wrong_solutions import WRONG, seeded

import flashsim
from flashsim import OptionError
from flashsim.cli.app import app
from flashsim.exercises import Marks, get, grade, names, subprocess_grader, words
from flashsim.exercises.exercise import KINDS
from flashsim.exercises.source import Refused, checked

mpl.use("Agg")
FLASH2 = get("flash2-forward")
PAGE = (Path(__file__).parents[2] / "docs/guides/course.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", names())
def test_a_skeleton_is_the_reference_with_marked_lines_left_out(name):
    one = get(name)
    compile(one.skeleton, name, "exec")  # also where a block's only line is a TODO
    assert not re.search("# (END|LEFT OUT)", one.skeleton)
    assert not re.search("# (TODO|END|LEFT OUT)", one.solution_source)
    assert one.questions or "TODO" in one.skeleton
    assert grade(one.skeleton, one)[0].points < 100


def test_lines_are_left_out_block_by_block():
    def reference(machine):
        """Not shown."""
        for n in range(2):
            # TODO: add
            machine += n
            # END
        # LEFT OUT
        machine += 1
        # END
        return machine

    one = replace(FLASH2, reference=reference, skeleton="")
    assert one.skeleton == (
        "import numpy as np\n\n\ndef solution(machine):\n    for n in range(2):\n"
        "        pass  # TODO: add\n    return machine\n"
    )


def test_there_is_a_course():
    assert len(names()) >= 12
    assert names()[0] == "count-a-product"
    assert names()[-1] == "fewest-bytes"


@pytest.mark.parametrize("name", names())
def test_a_reference_gets_every_point(name):
    one = get(name)
    marks, _ = grade(one.solution_source, one)
    assert [mark for mark in marks.marks if mark.points < mark.most] == []
    assert (marks.points, marks.most) == (100, 100)


@pytest.mark.parametrize("name", names())
def test_what_a_student_starts_from(name):
    """It can be read, says what is asked, holds no solution, and is judged in words."""
    one = get(name)
    text = one.file_text
    assert text.startswith(f"# flashsim exercise: {name}\n")
    assert one.title in text
    assert "TODO" in text or one.questions
    assert max(map(len, text.splitlines())) <= 100
    marks, _ = grade(text, one)
    assert marks.points < 100
    first = next(mark for mark in marks.marks if mark.kind)
    assert first.kind in ("unstored", "result", "answer", "machine", "error", "bytes")
    assert first.words
    assert 3 <= len(one.hints) <= 5


@pytest.mark.parametrize("name", [n for n in names() if get(n).budget])
def test_full_marks_are_a_closed_form(name):
    """Derived by hand, or FlashAttention's own; and what the reference moves, as integers."""
    one = get(name)
    assert one.budget(one.task) == one.executed.trace.bytes()


def test_the_bound_is_below_what_anyone_moves():
    """Here the room decides; a chip that holds everything leaves what is compulsory."""
    one = get("fewest-bytes")
    compulsory = one.executed.trace.compulsory()
    assert compulsory < one.bound(one.task) < one.full_marks_bytes
    assert f"less than {one.bound(one.task):,} B" in " ".join(one.statement.split())
    assert one.bound(replace(one.task, sram_bytes=2**20)) == compulsory


@pytest.mark.parametrize(
    ("name", "kind", "said", "find", "put"),
    WRONG,
    ids=[f"{at}-{name}-{kind}" for at, (name, kind, *_) in enumerate(WRONG)],
)
def test_a_wrong_solution_fails_for_the_right_reason(name, kind, said, find, put):
    one = get(name)
    marks, _ = grade(seeded(one.solution_source, find, put), one)
    wrong = [mark for mark in marks.marks if mark.points < mark.most]
    assert wrong[0].kind == kind
    assert said in " ".join(mark.words for mark in wrong)


def test_enough_is_wrong():
    assert len(WRONG) >= 40
    assert {name for name, *_ in WRONG} == set(names())


def test_the_guide_shows_what_is_printed():
    wrong = next(w for w in WRONG if w[:2] == ("flash2-forward", "bytes"))
    marks, _ = grade(seeded(FLASH2.solution_source, *wrong[3:]), FLASH2)
    assert f"```\n{marks.text()}\n```" in PAGE


def test_bytes_count_only_with_right_results():
    nothing = "def solution(machine):\n    with machine.stage('s') as sram, sram.step(0):\n"
    for name in ("O", "L"):
        nothing += f"        sram.store(machine.hbm.{name}, slice(0, 32), 0.0)\n"
    marks, trace = grade(nothing, FLASH2)
    assert trace.bytes() < FLASH2.full_marks_bytes
    assert marks.points == 20  # room on chip alone
    assert marks.marks[-1].words == "bytes count when the results are right"


def test_fewer_bytes_than_full_marks():
    """One step for all rows: K and V once."""
    text = FLASH2.solution_source.replace(
        "machine.row_tiles()", "[slice(0, machine.problem.n_q)]"
    ).replace('stage("forward")', 'stage("forward", tiling=type(machine.tiling)(32, 8))')
    text = text.replace("machine.key_tiles()", "[slice(j, j + 8) for j in range(0, 48, 8)]")
    marks, trace = grade(text, FLASH2)
    assert marks.marks[-1].points == 40
    less = FLASH2.full_marks_bytes - trace.bytes()
    assert marks.marks[-1].words == f"{less:,} B fewer than full marks ask for"


def test_few_bytes_in_another_order_than_was_asked_for():
    """FlashAttention-2 moves no more bytes here, but K was to be loaded once."""
    store = "sram.store(hbm.L, rows, m + np.log(l))"
    assert store in FLASH2.solution_source
    both = f"sram.store(hbm.l, rows, l){chr(10)}{' ' * 16}sram.store(hbm.m, rows, m)"
    one = get("flash1-forward")
    marks, trace = grade(FLASH2.solution_source.replace(store, both), one)
    assert trace.bytes() <= one.full_marks_bytes
    assert marks.marks[-1].kind == "order"
    assert "K was loaded 4 times; 1 would do\nV was loaded" in marks.marks[-1].words


# -- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("def solution(machine:\n", "syntax", "line 1: '(' was never closed"),
        ("x = 1\n", "function", "defines no function solution(machine)"),
        ("solution = 3\n", "function", "defines no function"),
        ("1 / 0\n", "error", "the file ends with ZeroDivisionError"),
        ("raise SystemExit\n", "error", "the file ends with SystemExit"),
        ("def solution(): pass\n", "machine", "called with one argument, the machine"),
        ("def solution(machine): raise SystemExit(3)\n", "error", "SystemExit: 3"),
        ("def solution(machine):\n    machine.hbm.W\n", "machine", "no tensor 'W'"),
        ("import os\n", "source", "line 1: imports os"),
        ("from numpy import ctypeslib\n", "source", "imports numpy"),
        ("import flashsim.exercises\n", "source", "imports flashsim.exercises"),
        ("from flashsim import engines\n", "source", "imports flashsim"),
        ("import numpy as np\nnp.load('q.npy')\n", "source", "line 2: uses .load"),
        ("import numpy as np\nnp.random.rand(3)\n", "source", "uses .random"),
        ("open('x')\n", "source", "uses open"),
        ("getattr(1, 'x')\n", "source", "uses getattr"),
        ("__builtins__\n", "source", "uses __builtins__"),
        ("'{0._view}'.format(1)\n", "source", "uses .format"),
        ("import dataclasses\ndataclasses.sys.modules\n", "source", "uses ."),
        ("from typing import sys\n", "source", "imports typing"),
        ("match 1:\n    case object(_view=x): pass\n", "source", "name with an underscore"),
        ("(1).__class__\n", "source", "looks at .__class__"),
        ("\0", "syntax", "Python cannot read the file"),
    ],
)
def test_bad_files(text, kind, said):
    marks, trace = grade(text, FLASH2)
    assert (marks.points, trace) == (0, None)
    (mark,) = marks.marks
    assert mark.kind == kind
    assert said in mark.words


def test_the_machines_verbs_pass():
    checked(FLASH2.solution_source, "x.py")
    with pytest.raises(Refused):
        checked("import subprocess", "x.py")


def test_answers_that_are_none():
    one = get("count-a-product")
    marks, _ = grade("ANSWERS = 3\n", one)
    assert marks.marks[0].kind == "function"


@pytest.fixture
def solved(tmp_path):
    path = tmp_path / "flash2_forward.py"
    path.write_text(f"# flashsim exercise: flash2-forward\n{FLASH2.solution_source}")
    return path


def test_a_process_of_its_own(solved):
    solved.write_text(solved.read_text() + "print('a' * 100_000)\n")
    marks, trace = subprocess_grader.grade_file(solved)
    assert marks.points == 100
    assert trace.bytes() == FLASH2.full_marks_bytes
    assert trace.algorithm == "solution"


@pytest.mark.parametrize(
    ("text", "limit", "kind", "said"),
    [
        ("while True: pass", 1, "time", "not done after 1 s: a loop that does not end?"),
        ("import numpy\nx = numpy.ones(10**11)", 60, "memory", "MemoryError: Unable to allocate"),
        ("raise KeyboardInterrupt", 60, "process", "ended its process before it was judged"),
    ],
)
def test_a_process_that_does_not_come_back(solved, text, limit, kind, said):
    solved.write_text(text)
    marks, trace = subprocess_grader.grade_file(solved, "flash2-forward", limit=limit)
    assert (marks.points, trace, marks.marks[0].kind) == (0, None, kind)
    assert said in marks.marks[0].words


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")
def test_memory_that_grows(solved):
    """Less than this machine has: the limit alone ends it, and lets through what is within."""
    grow = "def solution(machine):\n    kept = [bytes(10**6)]\n    while len(kept) < {}:\n"
    grow += "        kept.append(bytes(10**6))\n    raise ValueError('all there')\n"
    for pieces, memory, kind in ((500, 100, "memory"), (500, None, "error"), (50, 100, "error")):
        solved.write_text(grow.format(pieces))
        marks, _ = subprocess_grader.grade_file(solved, "flash2-forward", memory=memory)
        assert marks.marks[0].kind == kind
    assert marks.marks[0].words.startswith("ValueError: all there")


def test_a_memory_where_none_can_be_limited(solved, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OptionError, match="memory=100: only Linux can limit it"):
        subprocess_grader.grade_file(solved, memory=100)
    assert subprocess_grader.grade_file(solved)[0].points == 100


def test_what_the_child_does(solved, tmp_path):
    subprocess_grader.main("flash2-forward", str(solved), str(tmp_path))
    assert Marks.from_json((tmp_path / "marks.json").read_text()).points == 100
    assert flashsim.Trace.load(tmp_path / "trace.npz").bytes() == FLASH2.full_marks_bytes


def test_files_that_cannot_be_graded(tmp_path):
    with pytest.raises(OptionError, match="cannot read"):
        subprocess_grader.grade_file(tmp_path / "none.py")
    (tmp_path / "x.py").write_text("def solution(machine): pass\n")
    with pytest.raises(OptionError, match=r"x\.py does not say which exercise"):
        subprocess_grader.grade_file(tmp_path / "x.py")
    with pytest.raises(OptionError, match=r"no exercise 'flash2-backward'.*did you mean"):
        subprocess_grader.grade_file(tmp_path / "x.py", "flash2-backward")


def test_files_as_windows_writes_them(solved, tmp_path):
    """A mark at the beginning, another encoding that the file says, and one that it does not."""
    text = solved.read_text(encoding="utf-8")
    written = tmp_path / "x.py"
    for encoded in (
        text.encode("utf-8-sig"),
        text.replace("\n", "\r\n").encode(),
        f"# -*- coding: latin-1 -*-\n# gr\u00fcn\n{text}".encode("latin-1"),
    ):
        written.write_bytes(encoded)
        assert subprocess_grader.grade_file(written)[0].points == 100
    for encoded in (f"{text}# gr\u00fcn".encode("latin-1"), text.encode("utf-16")):
        written.write_bytes(encoded)
        marks, trace = subprocess_grader.grade_file(written, "flash2-forward")
        assert (marks.points, marks.marks[0].kind, trace) == (0, "syntax", None)
        assert "Python cannot read the file: " in marks.text()


def test_what_was_not_loaded_is_no_fault_of_a_reference():
    assert all(words.unread(get(name).executed.trace) == [] for name in names())


# -- a lecturer's own -------------------------------------------------------------------------


def lecturers_file():
    return PAGE.split("```py\n")[1].split("```")[0]


def test_a_lecturers_exercise_is_one_file(tmp_path):
    path = tmp_path / "row_norms.py"
    path.write_text(lecturers_file())
    one = get(str(path))
    marks, _ = grade(one.solution_source, one)
    assert marks.points == 100
    wrong = seeded(one.solution_source, "Q *= Q", "Q = Q * Q")
    assert grade(wrong, one)[0].marks[4].kind == "overflow"
    started = ok("exercise", "start", path, "-o", tmp_path / "mine.py")
    assert f"mine.py --exercise {path}`" in started
    assert (tmp_path / "mine.py").read_text() == one.file_text
    marks, _ = subprocess_grader.grade_file(tmp_path / "mine.py", str(path))
    assert marks.points < 100


@pytest.mark.parametrize("statement", [None, " "])
def test_an_exercise_without_a_statement(statement):
    with pytest.raises(OptionError, match=r"has no statement, which is its file's docstring.*-OO"):
        replace(FLASH2, statement=statement)


def test_files_that_are_no_exercise(tmp_path):
    (tmp_path / "x.py").write_text("EXERCISE = 3\n")
    with pytest.raises(OptionError, match="defines no EXERCISE"):
        get(str(tmp_path / "x.py"))
    with pytest.raises(OptionError, match="there is no such file"):
        get(str(tmp_path / "y.py"))


# -- words ------------------------------------------------------------------------------------


def test_numbers_of_times():
    assert [words.times(x) for x in (1, 64, 4.5)] == ["once", "64 times", "4.5 times"]


def test_a_workspace_in_words():
    """What the reference does not move at all, and a tensor that only the student has."""

    def spills(machine):
        note = machine.hbm.new("note", 32)
        with machine.stage("forward") as sram, sram.step(0):
            sram.store(note, slice(0, 32), 1.0)
            for name in ("O", "L"):
                sram.store(getattr(machine.hbm, name), slice(0, 32), 0.0)

    trace = FLASH2.task.run(spills, FLASH2.task.arrays()).trace
    assert words.excess(trace, FLASH2.executed.trace) == ["note was stored, 128 B; 0 B would do"]


def test_kinds_of_errors():
    assert words.kind_of(flashsim.MemoryModelError("x", "freed")) == "freed"
    kept = pickle.loads(pickle.dumps(flashsim.MemoryModelError("x", "freed")))
    assert (str(kept), kept.kind) == ("x", "freed")
    assert words.kind_of(ValueError("x")) == "error"
    assert words.kind_of(flashsim.OptionError("x")) == "machine"


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_come_in_four_kinds(kind):
    arrays = FLASH2.task.arrays(kind)
    scores = arrays["S"][0, 0]
    if kind in ("rising", "falling"):
        ends = scores[:, -1] - scores[:, 0]
        assert (ends > 50).all() if kind == "rising" else (ends < -50).all()
    else:
        assert abs(np.diff(scores).mean()) < 1


# -- the command ------------------------------------------------------------------------------


def ok(*arguments, **how):
    result = CliRunner().invoke(app, [str(x) for x in arguments], **how)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*arguments):
    result = CliRunner().invoke(app, [str(x) for x in arguments])
    assert result.exit_code == 2
    return result.stderr


def test_list():
    rows = json.loads(ok("exercise", "list", "--json"))
    assert [row["name"] for row in rows] == names()
    assert rows[7]["full marks B"] == FLASH2.full_marks_bytes


def test_start_hint_reveal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "flashsim exercise grade flash2_forward.py" in ok("exercise", "start", "flash2-forward")
    assert Path("flash2_forward.py").read_text() == FLASH2.file_text
    assert "is there already; --force" in fails("exercise", "start", "flash2-forward")
    ok("exercise", "start", "flash2-forward", "--force")
    assert ok("exercise", "hint", "dq").startswith("1 of 3: K is needed twice")
    assert "has 3 hints, got --number 4" in fails("exercise", "hint", "dq", "-n", 4)
    shown = ok("exercise", "reveal", "dq")
    assert shown.endswith(get("dq").solution_source)
    Path("shown.py").write_text(shown)
    assert "dq: 100 of 100 points" in ok("exercise", "grade", "shown.py")


def test_predict(tmp_path):
    text = ok("exercise", "predict", "naive-softmax", input="6144\n0\n")
    assert "32 queries, 48 keys" in text
    assert text.index("bytes loaded") < text.index("said and measured") < text.index("compulsory")
    right = ("--loaded", 6144, "--stored", 6144, "--plot", tmp_path / "p.svg")
    assert "to the byte!" in ok("exercise", "predict", "naive-softmax", *right)
    assert "compulsory 12.3 kB" in (tmp_path / "p.svg").read_text()


def test_grade_writes_what_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(
        subprocess_grader, "grade_file", functools.cache(subprocess_grader.grade_file)
    )  # twice the same
    one = get("fewest-bytes")
    path = tmp_path / "fewest.py"
    source = seeded(one.solution_source, "*16", "12")
    path.write_text(f"# flashsim exercise: fewest-bytes\n{source}")
    scope, picture, trace = (tmp_path / name for name in ("results.json", "p.svg", "t.npz"))
    text = ok("exercise", "grade", path, "--gradescope", scope, "--plot", picture, "--save", trace)
    marks = Marks.from_json(ok("exercise", "grade", path, "--json"))
    assert text.startswith(f"fewest-bytes: {marks.points} of 100 points\n")
    assert "K was loaded 16 times; 12 would do" in text
    assert "lower bound" in text
    again = flashsim.Trace.load(trace)
    assert marks.figures["bytes"] == again.bytes()
    assert again.device == one.task.device
    assert "solution forward (simulator)" in ok("trace", "show", trace)
    assert f"below {one.bound(one.task):,} B" in picture.read_text()
    results = json.loads(scope.read_text())
    assert results["score"] == marks.points == sum(t["score"] for t in results["tests"])
    assert sum(t["max_score"] for t in results["tests"]) == 100
    assert {t["status"] for t in results["tests"]} == {"passed", "failed"}
    moved = {"name": "bytes moved", "value": marks.figures["bytes"], "order": "asc"}
    assert results["leaderboard"] == [moved]


def test_the_guides_autograder(tmp_path):
    """run_autograder as the page has it, in a folder that looks like Gradescope's."""
    (script,) = (
        block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) if "name=dq" in block
    )
    for name in ("submission", "results", "venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "venv/bin/flashsim").symlink_to(Path(sys.executable).with_name("flashsim"))
    (tmp_path / "run_autograder").write_text(script.replace("/autograder", str(tmp_path)))
    for name, score, said in (
        ("d.py", 0, "there is no dq.py, but d.py: hand in"),
        ("dq.py", 100, ""),
    ):
        (tmp_path / "submission" / name).write_text(get("dq").solution_source)
        subprocess.run(["bash", tmp_path / "run_autograder"], check=True, capture_output=True)
        results = json.loads((tmp_path / "results/results.json").read_text())
        assert results["score"] == score
        assert said in results["tests"][0]["output"]


def test_grade_without_a_trace(tmp_path):
    (tmp_path / "x.py").write_text("# flashsim exercise: dq\nx = (\n")
    text = ok("exercise", "grade", tmp_path / "x.py", "--plot", tmp_path / "p.png")
    assert "Python cannot read the file" in text
    assert not (tmp_path / "p.png").exists()


def test_importing_flashsim_loads_no_exercise():
    code = "import sys, flashsim; print('flashsim.exercises' in sys.modules); flashsim.exercises"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
