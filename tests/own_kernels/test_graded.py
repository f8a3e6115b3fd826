"""Exercises for kernels: references get every point, and wrong solutions the words they deserve."""

import csv
import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import hand_written
import numpy as np
import pytest
from commands import invoke, not_right, ok, refused
from wrong_kernels import WRONG

from flashsim import OptionError
from flashsim.errors import TraceError
from flashsim.exercises import checking, get, homework, kernel_names, kernel_runner, shelf
from flashsim.exercises.kernel_grading import Handover, grade_kernels
from flashsim.own_kernels.record_file import Recorded, packed, unpacked

pytestmark = pytest.mark.promise("grading cannot be cheated")

ROOT = Path(__file__).parents[2]
FORWARD = shelf.find("kernel-forward")


def recorded(traced):
    names = {t.name: x for t, x in zip(traced.record.tensors, traced.tensors, strict=True)}
    return Recorded(traced.record, names, traced.values)


def by_hand(change=lambda runs: None, **how):
    """A runner that notes attention by hand, of the inputs that the order has."""

    def run(order):
        runs = []
        for given, causal in order.calls:
            heads, n, d = given[0].shape
            sizes = {"n": n, "d": d, "heads": heads, "causal": causal, "given": given}
            runs.append(recorded(hand_written.attention(**{"block_q": 32, **sizes, **how})))
        change(runs)
        return Handover(data=packed(runs))

    return run


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "solution.py"
    file.write_text("import triton\n")
    return file


def lost(marks):
    return [(mark.kind, mark.words) for mark in marks.marks if mark.kind]


def test_a_kernel_like_the_reference_gets_every_point(path):
    marks, trace = grade_kernels(path, FORWARD, runner=by_hand())

    assert (marks.points, marks.most) == (100, 100), marks.text()
    assert marks.figures["bytes"] == marks.figures["budget"] == FORWARD.full_marks_bytes
    assert all(mine == full for *_, mine, full in marks.moved)
    assert trace.bytes() < marks.figures["bytes"]  # one case of three
    assert json.loads(marks.gradescope())["score"] == 100


def test_bytes_that_are_not_needed_cost_points_with_their_line(path):
    marks, _ = grade_kernels(path, FORWARD, runner=by_hand(twice=True))

    ((kind, words),) = lost(marks)
    assert kind == "bytes"
    assert "each K tile is loaded twice by every program, line 21 (first in line 20)" in words
    k = FORWARD.full_marks["load", "K"]
    total = FORWARD.full_marks_bytes
    assert marks.marks[-1].points == 40 * total // (total + k)


def test_numbers_are_judged_with_the_inputs_that_were_drawn(path):
    """A file that hands over other inputs and fitting results gains nothing by it."""

    def other_inputs(runs):
        for run in runs:
            q, _, v, out, lse = run.values[:5]
            q[:], out[:], lse[:] = 0, v.mean(1)[:, None], 5

    marks, _ = grade_kernels(path, FORWARD, runner=by_hand(other_inputs))

    assert [mark.points for mark in marks.marks[:3]] == [0, 0, 0]
    assert "bytes get points only if all results are right" in marks.marks[-1].words


@pytest.mark.parametrize(
    ("renamed", "words"),
    [({"lse_ptr": "mine"}, "no kernel stores L"), ({"k_ptr": "copy"}, "no kernel loads K itself")],
)
def test_tensors_that_no_kernel_uses(path, renamed, words):
    def change(runs):
        runs[:] = [replace(run, names=run.names | renamed) for run in runs]

    marks, _ = grade_kernels(path, FORWARD, runner=by_hand(change))

    kind, said = lost(marks)[0]
    assert kind == "result"
    assert words in said


def test_tiles_that_are_too_large(path):
    marks, _ = grade_kernels(path, replace(FORWARD, tasks=tuple(
        replace(task, sram_bytes=1000) for task in FORWARD.tasks)), runner=by_hand())  # fmt: skip

    assert lost(marks)[0][0] == "overflow"
    assert "use smaller tiles" in lost(marks)[0][1]


@pytest.mark.parametrize(
    ("handover", "kind", "words"),
    [
        (Handover("error", "ValueError: no (line 3)"), "error", "ValueError: no (line 3)"),
        (Handover(data=b"no archive"), "record", "cannot read these bytes as a kernel's record"),
        (Handover(data=packed([])), "record", "submission 3 times"),
    ],
)
def test_failures_in_words(path, handover, kind, words):
    path.write_text(FORWARD.file_text)
    marks, trace = grade_kernels(path, FORWARD, runner=lambda order: handover)

    assert trace is None
    assert marks.points == 0
    assert lost(marks)[0][0] == kind
    assert words in lost(marks)[0][1]
    assert "still has its TODO" in lost(marks)[0][1]


def test_a_record_is_packed_and_unpacked():
    one = recorded(hand_written.gradients())
    (back,) = unpacked(packed([one]))

    for name in ("source", "tensors", "launches", "lines", "clashes", "notes"):
        assert getattr(back.record, name) == getattr(one.record, name) or name == "launches"
    assert [vars(x) for x in back.record.launches] == [vars(x) for x in one.record.launches]
    np.testing.assert_array_equal(back.record.accesses, one.record.accesses)
    np.testing.assert_array_equal(back.record.work, one.record.work)
    assert back.record.stored.keys() == one.record.stored.keys()
    assert back.names == one.names
    for mine, theirs in zip(back.values, one.values, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_record_with_impossible_numbers_is_refused():
    one = recorded(hand_written.attention(n=64))
    for column in ("launch", "tensor", "line"):
        wrong = one.record.accesses.copy()
        wrong[column] = 99
        with pytest.raises(TraceError, match=f"a {column} that does not exist"):
            unpacked(packed([replace(one, record=replace(one.record, accesses=wrong))]))
    with pytest.raises(TraceError, match="has the wrong columns"):
        unpacked(packed([replace(one, record=replace(one.record, accesses=one.record.work))]))
    short = (*one.values[:-1], one.values[-1][:1])
    with pytest.raises(TraceError, match="but its values have shape"):
        unpacked(packed([replace(one, values=short)]))
    with pytest.raises(TraceError, match="at most 1,000 bytes"):
        unpacked(packed([one]), 1000)


def test_where_exercises_for_kernels_are_found():
    assert kernel_names()[0] == "kernel-softmax-matmul"
    assert len(kernel_names()) == 4
    with pytest.raises(OptionError, match="is an exercise for Triton or Pallas kernels"):
        get("kernel-forward")
    with pytest.raises(OptionError, match="needs at least one task"):
        replace(FORWARD, tasks=())
    with pytest.raises(OptionError, match="has no statement"):
        replace(FORWARD, statement=" ")


@pytest.mark.parametrize("name", kernel_names())
def test_what_a_student_starts_from(name):
    one = shelf.find(name)
    text = one.file_text
    compile(text, name, "exec")
    assert text.startswith(f"# flashsim exercise: {name}\n")
    assert f"{one.full_marks_bytes:,} B" in text
    assert "TODO" in text
    assert "# END" not in text
    assert "TODO" not in one.solution_source
    assert len(one.hints) >= 3
    assert one.hints[0] in " ".join(ok("exercise hint", name).split())


def test_a_homework_folder_is_found(tmp_path):
    assert homework.homework_in(tmp_path) == []
    for student in ("a", "b"):
        file = tmp_path / student / "softmax_matmul/softmax_matmul.py"
        file.parent.mkdir(parents=True)
        file.write_text("x = 1\n")
    (tmp_path / "a/tests").mkdir()

    assert homework.homework_in(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert homework.homework_in(tmp_path / "a") == [tmp_path / "a"]
    exercises = homework.exercises_of([tmp_path / "b"])
    ((_, ((where, marks),)),) = homework.grade_homework([tmp_path / "b"], exercises)
    assert where.name == "softmax_matmul.py"
    assert "imports neither triton nor jax" in marks.marks[0].words
    out = tmp_path / "results.json"
    ok("exercise grade", tmp_path / "b", "--gradescope", out)
    whole = json.loads(out.read_text())
    assert whole["tests"][0]["name"] == "kernel-softmax-matmul: runs"
    refused("exercise grade", tmp_path, "--gradescope", out)
    assert "imports neither triton nor jax" in not_right("exercise grade", tmp_path / "b", "--csv")
    ok("exercise grade", tmp_path)


def a_class(folder, **files):
    """Write a folder per student, with one file each; None: an empty folder."""
    for student, name in files.items():
        (folder / student).mkdir()
        if name:
            file = folder / student / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("import triton\n")


@pytest.fixture
def full_marks(monkeypatch):
    """Grading by hand-written kernels; returns how many files were graded at once, at most."""
    running, most, lock = set(), [0], threading.Lock()

    def graded(path, one, **_):
        with lock:
            running.add((path, one.name))
            most[0] = max(most[0], len(running))
        time.sleep(0.05)
        marks, trace = grade_kernels(path, FORWARD, runner=by_hand())
        with lock:
            running.remove((path, one.name))
        return replace(marks, exercise=one.name), trace

    monkeypatch.setattr(homework, "grade_kernels", graded)
    return most


FLASH = "flash_attention/flash_attention.py"


def graded_folder(folder, *words):
    """Grade a folder; return the command's result and its rows."""
    done = invoke("exercise grade", folder, *words, "--csv")
    assert done.exit_code == 0, done.output
    return done, list(csv.DictReader(done.stdout.splitlines()))


def test_no_student_of_a_class_vanishes(tmp_path, full_marks):
    a_class(tmp_path, ann=FLASH, bob="flash_attn.py", cy=None, __MACOSX=None)
    (tmp_path / "dan.zip").write_text("")
    done, rows = graded_folder(tmp_path, "--exercise", "kernel-forward")
    totals = {row["file"]: row["points"] for row in rows if row["exercise"] == "total"}
    assert totals == {"ann": "100", "bob": "0", "cy": "0"}
    why = {row["file"]: row["why"] for row in rows}
    assert f"{FLASH} is missing; found flash_attn.py" in why[f"bob/{FLASH}"]
    assert f"{FLASH} is missing; the folder is empty" in why[f"cy/{FLASH}"]
    assert "dan.zip" in done.stderr


def test_the_marks_of_a_class_add_up(tmp_path, full_marks):
    a_class(tmp_path, ann=FLASH, bob=FLASH)
    done, rows = graded_folder(tmp_path, "--jobs", 1)
    assert full_marks == [1]
    assert len(rows) == 2 * (3 + 1)
    for row in rows:
        parts = ("results", "safe", "on chip", "bytes")
        assert int(row["points"]) == sum(int(row[part]) for part in parts)
    assert [row["points"] for row in rows if row["exercise"] == "total"] == ["300", "300"]
    assert "graded for kernel-forward, kernel-causal, kernel-backward, because" in done.stderr


def test_exercises_are_chosen_and_files_graded_at_once(tmp_path, full_marks, monkeypatch):
    about = {"tests": [["t", "passed", ""]]}
    monkeypatch.setattr(homework, "handed", lambda order: ("", "", b"", about))
    a_class(tmp_path, ann=FLASH, bob=FLASH)
    (tmp_path / "ann/tests").mkdir()
    both = ("--exercise", "kernel-forward", "--exercise", "kernel-causal")
    done, rows = graded_folder(tmp_path, *both, "--jobs", 4)
    assert full_marks[0] > 1
    chosen = ["kernel-forward", "kernel-causal"]
    assert [row["exercise"] for row in rows] == [*chosen, homework.TESTS, "total", *chosen, "total"]
    assert "graded for kernel-forward, kernel-causal, as --exercise says" in done.stderr


def test_a_misplaced_file_on_gradescope(tmp_path):
    """It gets no points for an exercise that is named, and is an error without a name."""
    (tmp_path / "flash.py").write_text("")
    out = tmp_path / "results.json"
    words = ("exercise grade", tmp_path, "--gradescope", out)
    said = " ".join(refused(*words).split())
    assert "contains a file of an exercise; flashsim looked for" in said
    assert all(one.path in said for one in homework.exercises_of([]))
    assert not out.exists()
    ok(*words, "--exercise", "kernel-forward")
    told = json.loads(out.read_text())
    assert told["score"] == 0
    assert f"{FLASH} is missing; found flash.py" in told["tests"][0]["output"]


def test_rounded_exponents_are_no_mistake():
    """Inputs drawn once, of which a right kernel's dQ had 1.4 times the error then allowed."""
    task = shelf.find("kernel-backward").tasks[1]
    arrays = task.arrays("normal", 97142405)
    q, k, v, o, lse, do = (arrays[name][0] for name in ("Q", "K", "V", "O", "L", "dO"))
    keep, scale = np.tril(np.ones((72, 72), bool)), np.float32(32**-0.5)
    delta = (o * do).sum(-1)
    p = np.exp(np.where(keep, q @ k.mT * scale, -np.inf) - lse[..., None])
    ds = p * (do @ v.mT - delta[..., None])
    values = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, "delta": delta}
    values |= {"dq": ds @ k * scale, "dk": ds.mT @ q * scale, "dv": p.mT @ do}

    assert {x.dtype.name for x in values.values()} == {"float32"}
    verdict = hand_written.gradients(n=72, d=32, wrong=values).check()
    assert verdict.right, verdict
    dq = values["dq"] * np.float32(1 + 1e-5)
    assert not hand_written.gradients(n=72, d=32, wrong=values | {"dq": dq}).check().right


# -- with Triton ----------------------------------------------------------------------------------


def here(order):
    """Carry out an order in this process."""
    about, data = kernel_runner.done(order)
    return Handover(about["kind"], about["words"], data, about)


def graded(folder, exercise, text):
    pytest.importorskip("triton")
    file = folder / "handed_in.py"
    file.write_text(text, encoding="utf-8")
    return grade_kernels(file, exercise, runner=here)[0]


@pytest.mark.parametrize("name", kernel_names())
def test_a_reference_gets_every_point(name, tmp_path):
    one = shelf.find(name)
    marks = graded(tmp_path, one, one.solution_source)

    assert lost(marks) == []
    assert marks.points == 100
    assert marks.figures["bytes"] == one.full_marks_bytes


@pytest.mark.parametrize("name", kernel_names())
def test_a_skeleton_gets_no_point_and_names_its_first_todo(name, tmp_path):
    one = shelf.find(name)
    marks = graded(tmp_path, one, one.file_text)

    line = next(n for n, x in enumerate(one.file_text.splitlines(), 1) if "# TODO" in x)
    assert marks.points <= 10  # a kernel that does nothing wrong
    assert f"line {line} still has its TODO" in lost(marks)[0][1]


@pytest.mark.parametrize(("name", "find", "put", "kind", "words"), WRONG)
def test_a_wrong_solution_fails_for_the_right_reason(name, find, put, kind, words, tmp_path):
    one = shelf.find(name)
    assert one.solution_source.count(find) >= 1
    marks = graded(tmp_path, one, one.solution_source.replace(find, put, 1))

    assert marks.points < 100
    assert lost(marks)[0][0] == kind, lost(marks)
    assert words in "\n".join(said for _, said in lost(marks))


def test_the_guide_says_what_comes_out(tmp_path):
    page = (ROOT / "docs/guides/graded_kernels.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```text\n(.*?)^```", page, re.S | re.M)
    one = shelf.find("kernel-causal")
    find, put, _ = one.wrong[0]
    assert block in graded(tmp_path, one, one.solution_source.replace(find, put, 1)).text()


FILES = {
    "no function": (
        "def forward",
        "def another",
        "function",
        "defines no function forward or FlashAtt",
    ),
    "no kernel": (
        "return o, lse",
        "return o * 1, lse",
        "result",
        "returns a tensor that no kernel stored",
    ),
    "no launch": (
        "flash_forward[grid](q, k, v, o, lse, n, d**-0.5, causal, block_q, block_k, d)",
        *("o[:], lse[:] = 0, 0", "function", "launches no Triton kernel"),
    ),
    "an error": ("    heads, n, d = q.shape", "    heads = q.shapes", "error", "(line 37)"),
    "no syntax": ("        m = m_new", "        m = (m_new", "syntax", "(line "),
    "tl.loaded": ("k = tl.load", "k = tl.loaded", "machine", "`k = tl.loaded("),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_does_not_run(name, tmp_path):
    find, put, kind, words = FILES[name]
    marks = graded(tmp_path, FORWARD, FORWARD.solution_source.replace(find, put, 1))

    assert marks.points == 0
    assert lost(marks)[0][0] == kind
    assert words in lost(marks)[0][1]


def test_a_process_of_its_own(tmp_path):
    """A file that never ends, one that prints marks of its own, and a right one."""
    pytest.importorskip("triton")
    source = FORWARD.solution_source
    attacks = {
        "endless": ("\nwhile True:\n    pass\n", "time", 5),
        "printed": ('\nprint(\'{"kind": ""}\')\nimport os\nos._exit(0)\n', "process", 20),
        "right": ("\nprint('hello')\n", "", 120),
    }
    for name, (more, kind, limit) in attacks.items():
        file = tmp_path / f"{name}.py"
        file.write_text(f"# flashsim exercise: kernel-forward\n{source}{more}")
        out = tmp_path / f"{name}.json"
        text = ok("exercise grade", file, "--json", "--timeout", limit, "--gradescope", out)
        scored = json.loads(out.read_text())
        first = json.loads(text[: text.rindex("}") + 1])["marks"][0]
        assert (scored["score"] == 100) == (not kind)
        assert first["kind"] == kind


def test_an_exercise_is_checked(tmp_path):
    pytest.importorskip("triton")
    one = replace(shelf.find("kernel-causal"), wrong=shelf.find("kernel-causal").wrong[:1])
    table = checking.check(one)

    assert [row[1] for row in table.rows] == [True] * 3, table
