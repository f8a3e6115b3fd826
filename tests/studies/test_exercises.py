"""Exercises: references get every point, wrong solutions the words that they deserve."""

import csv
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
from commands import invoke, not_right, ok, refused
from wrong_solutions import WRONG, seeded

import flashsim
from flashsim import OptionError
from flashsim.engines.sandbox.recorder import kind_of
from flashsim.exercises import checking, get, grade, kernel_names, names, submissions, words
from flashsim.exercises.exercise import KINDS

pytestmark = pytest.mark.promise("grading cannot be cheated")

mpl.use("Agg")
FLASH2 = get("flash2-forward")
GUIDES = Path(__file__).parents[2] / "docs/guides"
PAGE = (GUIDES / "course.md").read_text(encoding="utf-8")
OWN = (GUIDES / "your_own_exercise.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", names())
def test_a_skeleton_is_the_reference_with_marked_lines_left_out(name):
    one = get(name)
    compile(one.skeleton, name, "exec")  # also where a block's only line is a TODO
    assert not re.search("# (END|LEFT OUT)", one.skeleton)
    assert not re.search("# (TODO|END|LEFT OUT)", one.solution_source)
    assert one.questions or "TODO" in one.skeleton


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
    assert max(map(len, text.splitlines())) <= 100
    marks, _ = grade(text, one)
    first = next(mark for mark in marks.marks if mark.kind)
    assert (marks.points, first.kind) == (0, "todo")
    assert first.words == "the file is still the skeleton: replace its TODO with your code"
    assert f"`flashsim exercise hint {name}` shows a hint" in marks.text()
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
    assert marks.points == 0
    assert [mark.words for mark in marks.marks[-2:]] == [
        "on-chip memory gets points only if some of the results are right",
        "bytes get points only if all results are right",
    ]


def test_fewer_bytes_than_full_marks():
    """One step for all rows: K and V once."""
    text = FLASH2.solution_source.replace(
        "machine.row_tiles()", "[slice(0, machine.problem.n_q)]"
    ).replace('stage("forward")', 'stage("forward", tiling=type(machine.tiling)(32, 8))')
    text = text.replace("machine.key_tiles()", "[slice(j, j + 8) for j in range(0, 48, 8)]")
    marks, trace = grade(text, FLASH2)
    assert marks.marks[-1].points == 40
    less = FLASH2.full_marks_bytes - trace.bytes()
    assert marks.marks[-1].words == f"{less:,} B fewer than full marks need"


def test_few_bytes_in_another_order_than_was_asked_for():
    """FlashAttention-2 moves no more bytes here, but K was to be loaded once."""
    store = "sram.store(hbm.L, rows, m + np.log(l))"
    assert store in FLASH2.solution_source
    both = f"sram.store(hbm.l, rows, l){chr(10)}{' ' * 16}sram.store(hbm.m, rows, m)"
    one = get("flash1-forward")
    marks, trace = grade(FLASH2.solution_source.replace(store, both), one)
    assert trace.bytes() <= one.full_marks_bytes
    assert marks.marks[-1].kind == "order"
    assert "K was loaded 4 times; once is enough\nV was loaded" in marks.marks[-1].words


# -- files ------------------------------------------------------------------------------------


def test_answers_that_are_none():
    one = get("count-a-product")
    assert grade("ANSWERS = 3\n", one)[0].marks[0].kind == "function"


def test_what_was_not_loaded_is_no_fault_of_a_reference():
    assert all(words.unread(get(name).executed.trace) == [] for name in names())


# -- a lecturer's own -------------------------------------------------------------------------


def lecturers_file():
    return OWN.split("```py\n")[1].split("```")[0]


def test_a_lecturers_exercise_is_one_file(tmp_path):
    path = tmp_path / "row_norms.py"
    path.write_text(lecturers_file())
    one = get(str(path))
    marks, _ = grade(one.solution_source, one)
    assert marks.points == 100
    wrong = seeded(one.solution_source, "Q *= Q", "Q = Q * Q")
    assert grade(wrong, one)[0].marks[4].kind == "overflow"
    checked = json.loads(ok("exercise check", path, "--json"))
    assert [row["right"] for row in checked] == [True] * 5
    started = ok("exercise start", path, "-o", tmp_path / "mine.py")
    assert f"mine.py --exercise {path}`" in started
    assert (tmp_path / "mine.py").read_text() == one.file_text
    marks, _ = submissions.grade_file(tmp_path / "mine.py", str(path))
    assert marks.points == 0
    assert f"`flashsim exercise hint {path}` shows a hint" in marks.text()


def changed(tmp_path, find, put):
    """The lecturer's file with a fault."""
    path = tmp_path / "row_norms.py"
    text = lecturers_file()
    assert find in text
    path.write_text(text.replace(find, put, 1))
    return path


@pytest.mark.parametrize(
    ("find", "put", "row", "said"),
    [
        ("np.sqrt(Q.sum(axis=1))", "Q.sum(axis=1)", 0, "the root is missing"),
        ("sram_bytes=384", "sram_bytes=256", 0, "holds 288 B on chip"),
        ("skeleton=SKELETON", "skeleton=SOLUTION", 1, ""),
        ('"the root is missing"),', '"the root is there"),', 2, "the root is missing"),
        ("** 2).sum(axis=-1)", "** 2).sum(axis=-1) ** 0.5", 4, "its result is graded as right"),
    ],
)
def test_an_exercise_with_a_fault_does_not_pass_the_check(tmp_path, find, put, row, said):
    path = changed(tmp_path, find, put)
    (tmp_path / "right.py").write_text(lecturers_file())
    if "SOLUTION" in put:
        text = path.read_text()
        solution = get(str(path.with_name("right.py"))).solution_source
        path.write_text(text.replace("EXERCISE =", f"SOLUTION = {solution!r}\nEXERCISE ="))
    assert invoke("exercise check", path, "--json").exit_code == 1
    rows = checking.check(get(str(path))).records()
    assert not rows[row]["right"]
    assert said in rows[row]["words"]


def test_an_exercise_that_cannot_be_solved_is_not_started(tmp_path):
    path = changed(tmp_path, "np.sqrt(Q.sum(axis=1))", "Q.sum(axis=1)")
    said = "its reference solution gets only 0 points (L, normal inputs: the root is missing"
    assert said in refused("exercise start", path, "-o", tmp_path / "mine.py")
    assert not (tmp_path / "mine.py").exists()


def test_a_solution_that_is_kept(tmp_path):
    path = changed(tmp_path, "    task=Task", "    revealed=False,\n    task=Task")
    assert "the solution of row-norms is not published" in refused("exercise reveal", path)


def test_a_revealed_solution_has_its_imports(tmp_path):
    path = changed(tmp_path, "np.sqrt(Q.sum(axis=1))", "np.sqrt(Q.sum(axis=1)) * math.cos(0)")
    text = path.read_text().replace("import numpy", "import math\nimport os\nimport numpy")
    path.write_text(text)
    out = tmp_path / "mine.py"
    ok("exercise reveal", path, "-o", out)
    head = "# flashsim exercise: row-norms\n\nimport numpy as np\nimport math\n\n\ndef"
    assert out.read_text().startswith(head)
    assert "already exists; pass --force" in refused("exercise reveal", path, "-o", out)
    text = ok("exercise grade", out, "--exercise", path)
    assert text.startswith("row-norms: 100 of 100 points")


def test_a_todo_that_is_left_is_named():
    line = next(at for at, x in enumerate(FLASH2.skeleton.splitlines(), 1) if "# TODO" in x)
    marks, _ = grade(FLASH2.skeleton.replace("O = sram", "O_ = sram"), FLASH2)
    assert f"line {line} still has its TODO" in marks.marks[0].words


def test_a_folder_is_graded_as_a_table(tmp_path):
    (tmp_path / "a.py").write_text(f"# flashsim exercise: dq\n{get('dq').solution_source}")
    (tmp_path / "b.py").write_text("x = 1")
    (tmp_path / "c").mkdir()
    text = ok("exercise grade", tmp_path, "--jobs", 1)
    assert "3 files" in text
    assert "1 of 3 get all points" in text
    text = ok("exercise grade", tmp_path, "--exercise", "dq", "--csv")
    rows = list(csv.DictReader(text.splitlines()))
    graded = [(row["file"], row["points"], row["results"]) for row in rows]
    assert graded == [("a.py", "100", "40"), ("b.py", "0", "0"), ("c", "0", "0")]
    assert "the folder contains no .py file" in rows[2]["why"]
    assert rows[1]["why"] == "the file defines no function solution(machine)"
    (row,) = csv.DictReader(ok("exercise grade", tmp_path / "a.py", "--csv").splitlines())
    assert (row["file"], row["points"]) == ("a.py", "100")
    said = refused("exercise grade", tmp_path, "--save", "x.npz")
    assert "need a single file, but a folder was passed" in said


@pytest.mark.parametrize("statement", [None, " "])
def test_an_exercise_without_a_statement(statement):
    said = r"has no statement\. The docstring of its file is its statement.*-OO"
    with pytest.raises(OptionError, match=said):
        replace(FLASH2, statement=statement)


def test_files_that_are_no_exercise(tmp_path):
    (tmp_path / "x.py").write_text("EXERCISE = 3\n")
    with pytest.raises(OptionError, match="defines no exercise; it must contain EXERCISE"):
        get(str(tmp_path / "x.py"))


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
    assert words.excess(trace, FLASH2.executed.trace) == ["note was stored, 128 B; 0 B is enough"]


def test_kinds_of_errors():
    assert kind_of(flashsim.MemoryModelError("x", "freed")) == "freed"
    kept = pickle.loads(pickle.dumps(flashsim.MemoryModelError("x", "freed")))
    assert (str(kept), kept.kind) == ("x", "freed")
    assert kind_of(ValueError("x")) == "error"
    assert kind_of(flashsim.OptionError("x")) == "machine"


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


def test_list():
    rows = json.loads(ok("exercise list", "--json"))
    assert [row["name"] for row in rows] == [*names(), *kernel_names()]
    (flash2,) = (row for row in rows if row["name"] == "flash2-forward")
    assert flash2["full marks B"] == FLASH2.full_marks_bytes


def test_start_hint_reveal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "flashsim exercise grade flash2_forward.py" in ok("exercise start", "flash2-forward")
    assert Path("flash2_forward.py").read_text() == FLASH2.file_text
    assert "already exists; pass --force" in refused("exercise start", "flash2-forward")
    ok("exercise start", "flash2-forward", "--force")
    assert ok("exercise hint", "dq").startswith("1 of 3: Each iteration needs K twice")
    assert "has 3 hints, got --number 4" in refused("exercise hint", "dq", "-n", 4)
    shown = ok("exercise reveal", "dq")
    assert shown.endswith(get("dq").solution_source)
    Path("shown.py").write_text(shown)
    assert "dq: 100 of 100 points" in ok("exercise grade", "shown.py")


def test_predict(tmp_path):
    text = ok("exercise predict", "naive-softmax", input="6144\n0\n")
    assert "32 queries, 48 keys" in text
    asked, answered = text.index("bytes loaded"), text.index("your guess and the answer")
    assert asked < answered < text.index("compulsory")
    right = ("--loaded", 6144, "--stored", 6144, "--plot", tmp_path / "p.svg")
    assert "to the byte!" in ok("exercise predict", "naive-softmax", *right)
    assert "compulsory 12.3 kB" in (tmp_path / "p.svg").read_text()


def test_grade_writes_what_is_asked_for(tmp_path, monkeypatch):
    once = functools.cache(submissions.grade_file)  # it is graded twice
    monkeypatch.setattr(submissions, "grade_file", once)
    one = get("fewest-bytes")
    path = tmp_path / "fewest.py"
    source = seeded(one.solution_source, "*16", "12")
    path.write_text(f"# flashsim exercise: fewest-bytes\n{source}")
    scope, picture, trace = (tmp_path / name for name in ("results.json", "p.svg", "t.npz"))
    text = ok("exercise grade", path, "--gradescope", scope, "--plot", picture, "--save", trace)
    marks = json.loads(not_right("exercise grade", path, "--json"))
    assert text.startswith(f"fewest-bytes: {marks['points']} of 100 points\n")
    assert "K was loaded 16 times; 12 times is enough" in text
    assert "lower bound" in text
    again = flashsim.Trace.load(trace)
    assert marks["figures"]["bytes"] == again.bytes()
    assert again.device == one.task.device
    assert "solution forward (simulator)" in ok("trace", "show", trace)
    assert f"{one.bound(one.task):,} B" in picture.read_text()
    results = json.loads(scope.read_text())
    assert results["score"] == marks["points"] == sum(t["score"] for t in results["tests"])
    assert sum(t["max_score"] for t in results["tests"]) == 100
    assert {t["status"] for t in results["tests"]} == {"passed", "failed"}
    moved = {"name": "bytes moved", "value": marks["figures"]["bytes"], "order": "asc"}
    assert results["leaderboard"] == [moved]


def test_the_guides_autograder(tmp_path):
    """run_autograder as the page has it, in a folder that looks like Gradescope's."""
    (script,) = (x for x in re.findall(r"```sh\n(.*?)```", PAGE, re.S) if "name=dq" in x)
    for name in ("submission", "results", "venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "venv/bin/flashsim").symlink_to(Path(sys.executable).with_name("flashsim"))
    (tmp_path / "run_autograder").write_text(script.replace("/autograder", str(tmp_path)))
    for name, score, said in (
        ("d.py", 0, "the file dq.py is missing; found d.py: hand in"),
        ("dq.py", 100, ""),
    ):
        (tmp_path / "submission" / name).write_text(get("dq").solution_source)
        subprocess.run(["bash", tmp_path / "run_autograder"], check=True, capture_output=True)
        results = json.loads((tmp_path / "results/results.json").read_text())
        assert results["score"] == score
        assert said in results["tests"][0]["output"]


def test_grade_without_a_trace(tmp_path):
    (tmp_path / "x.py").write_text("# flashsim exercise: dq\nx = (\n")
    text = not_right("exercise grade", tmp_path / "x.py", "--plot", tmp_path / "p.png")
    assert "Python cannot read the file" in text
    assert not (tmp_path / "p.png").exists()


def test_importing_flashsim_loads_no_exercise():
    code = "import sys, flashsim; print('flashsim.exercises' in sys.modules); flashsim.exercises"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
