"""Graded files that use torch or JAX, and a homework folder as it is handed out."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")
pytest.importorskip("jax")

from commands import ok
from test_graded import graded, here, lost
from wrong_kernels import WRONG_PALLAS, pallas_source

from flashsim.exercises import shelf
from flashsim.exercises.kernel_grading import grade_kernels

pytestmark = pytest.mark.promise("grading cannot be cheated")

HOMEWORK = Path(__file__).parents[2] / "examples/homework"


@pytest.mark.parametrize("name", ["kernel-forward", "kernel-causal"])
def test_pallas_gets_every_point(name, tmp_path):
    one = shelf.find(name)
    marks = graded(tmp_path, one, pallas_source())

    assert marks.points == 100, marks.text()
    assert marks.figures["bytes"] == one.full_marks_bytes


@pytest.mark.parametrize(("name", "find", "put", "kind", "words"), WRONG_PALLAS)
def test_a_wrong_pallas_kernel_fails_for_the_right_reason(name, find, put, kind, words, tmp_path):
    text = pallas_source()
    assert find in text
    marks = graded(tmp_path, shelf.find(name), text.replace(find, put, 1))

    assert lost(marks)[0][0] == kind, lost(marks)
    assert words in "\n".join(said for _, said in lost(marks))


def test_a_homework_folder_runs_unchanged(tmp_path):
    """The files and their own tests, which would skip without a GPU."""
    out = tmp_path / "results.json"
    ok("exercise grade", HOMEWORK, "--json", "--gradescope", out)
    whole = json.loads(out.read_text())
    assert [test["name"] for test in whole["tests"] if test["status"] != "passed"] == []
    shown = [test for test in whole["tests"] if test["name"].startswith("its own tests")]
    assert shown[0]["output"] == "9 of 9 tests pass"
    assert len(shown) == 1 + 9
    assert whole["score"] == 4 * 100  # a student's own tests give no points


BROKEN = [
    ("kernel-forward", "O_i = alpha[:, None] * O_i\n", "pass\n", "result",
     "O is not multiplied by exp(m_old - m_new)"),
    ("kernel-causal", "last = tl.minimum((query_tile + 1) * Q_TILE_SIZE, N_KEYS)", "pass", "bytes",
     "K tiles whose scores are all masked are loaded"),
    ("kernel-forward", "save_for_backward(q, k, v, o, lse)\n        ctx.is_causal = is_causal\n"
     "        return o\n\n    @staticmethod\n    def backward(ctx, do):\n"
     '        """Return dQ, dK, dV, and None for the argument `is_causal`."""\n'
     '        q, k, v, o, lse = ctx.sav'
     "ed_tensors\n        do = do",
     "save_for_backward(q, k, v, o)\n        return o\n\n    @staticmethod\n"
     "    def backward(ctx, do):\n        do = do", "result", "saves no L"),
    ("kernel-backward", "        flash_bwd_delta_kernel[grid](o, do, delta, n, d, TILE)\n",
     "        delta.copy_((o * do).sum(-1))\n", "outside", "torch computes outside of the kernels"),
    ("kernel-backward", "* scale\n        dQ +=", "\n        dQ +=", "result",
     "dQ is not multiplied by the scale"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "find", "put", "kind", "words"), BROKEN)
def test_a_broken_homework_file(name, find, put, kind, words, tmp_path):
    folder = tmp_path / "homework"
    shutil.copytree(HOMEWORK, folder)
    file = folder / "flash_attention/flash_attention.py"
    text = file.read_text(encoding="utf-8")
    assert find in text
    file.write_text(text.replace(find, put, 1), encoding="utf-8")

    marks, _ = grade_kernels(file, shelf.find(name), root=folder, runner=here)

    assert lost(marks)[0][0] == kind, lost(marks)
    assert words in "\n".join(said for _, said in lost(marks))
