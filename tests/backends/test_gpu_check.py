"""tests/tools/gpu_check.py without a GPU: what it runs, and that it says what went wrong."""

import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import gpu_check
import pytest
import sanitize
from decode_cases import planned
from gpu_check import Command, Stage
from test_cuda_kernels import H200

from flashsim.backends.launch_policy.cost_model import HOPPER_FORWARD, HOPPER_FORWARD_WIDE
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.backends.launch_policy.portable import PORTABLE, TF32

pytestmark = pytest.mark.promise("failures end in words")


def entries():
    """(file, function) of each CUDA C++ kernel."""
    for file in Path(str(resources.files("flashsim.backends") / "kernels")).rglob("*.cu"):
        text = file.read_text("utf-8")
        for name in re.findall(r"__global__[^;{]*?(\w+)\(const __grid_constant__", text):
            yield f"{file.parent.name}/{file.name}", name


def watched(name, family):
    """The passes that tests/tools/sanitize.py runs of a family."""
    for p, forms, tiling in sanitize.problems(name):
        yield from family.forward_passes(p, tiling, H200, "ascending", "")
        given = (p, sanitize.WAYS[name].both.get("tiling"), H200, "ascending", "")
        for form in forms:
            # As the api picks them: Hopper's dQ comes from the fused kernel where that is faster.
            ordered = form is True and family.orders_dq(p)
            algorithm = "flash2-fused" if ordered or form is False else "flash2"
            algorithm = form if isinstance(form, str) else algorithm
            extra = {"ordered": True} if ordered else {}
            yield from family.backward_passes(*given, algorithm, **extra)


def test_the_sanitizer_sees_every_kernel():
    families = (("portable", PORTABLE), ("tf32", TF32), ("hopper", HOPPER), ("hopper-once", HOPPER))
    seen = {(p.kernel.file, p.kernel.name) for name, f in families for p in watched(name, f)}
    for case in sanitize.DECODED:
        made = planned(case, H200)
        seen |= {(k.file, k.name) for k in (made.kernel, made.merge) if k}
    if "softmax-matmul" in sanitize.FAMILIES:
        seen.add(("portable/softmax_matmul.cu", "softmax_matmul"))
    if "fp8" in sanitize.FAMILIES:
        seen |= {("hopper/quantize.cu", name) for name in ("quantize", "transpose")}
        seen.add(("hopper/forward_fp8.cu", "hopper_forward_fp8"))
    assert len(seen) > 8
    assert seen == set(entries())


def test_the_sanitizer_sees_every_form_of_hoppers_kernels():
    """Every tile that the forward chooses from, and all that the backward's constants make."""
    seen = set()
    for one in (*watched("hopper", HOPPER), *watched("hopper-once", HOPPER)):
        values, tiling = dict(one.kernel.constants), one.tables.schedule.tiling
        form = values.get("FS_FUSED", 0), values.get("FS_ORDERED", 0) + 2 * values.get("FS_ONCE", 0)
        seen.add((one.kernel.name, str(tiling), values["FS_D"], *form))
    sides = {(name, tiling) for name, tiling, *_ in seen}
    known = (*HOPPER_FORWARD.values(), *HOPPER_FORWARD_WIDE.values())
    chosen = {str(t) for times in known for t in times}
    assert {t for name, t in sides if name == "hopper_forward"} == chosen
    for d, tiling in ((64, "128 x 128"), (128, "64 x 128")):
        in_order = "80 x 128" if d == 128 else tiling
        assert {s for s in seen if s[0] == "hopper_backward" and s[2] == d} == {
            ("hopper_backward", tiling, d, 0, 0),
            ("hopper_backward", tiling, d, 1, 0),
            ("hopper_backward", tiling, d, 1, 2),  # one visit
            ("hopper_backward", in_order, d, 1, 1),
        }
    assert ("hopper_backward_roles", "64 x 96", 192, 1, 0) in seen
    for d in (192, 256):
        for fused in (0, 1):
            assert ("hopper_backward_wide", "64 x 64", d, fused, 0) in seen
    assert {d for name, _, d, *_ in seen if name == "hopper_dq"} == {64, 128, 192, 256}


def test_the_sanitizers_problems_are_ones_that_the_teaching_kernels_run():
    teaching_run = pytest.importorskip("flashsim.backends.numba_gpu.teaching.run")
    tiling = sanitize.WAYS["teaching"].both["tiling"]
    for p, _, _ in sanitize.problems("teaching"):
        for direction in ("forward", "backward"):
            assert teaching_run.choose(p, tiling, direction) == tiling


def test_every_family_meets_every_tool_that_fits(tmp_path):
    stage = gpu_check.stage_of_sanitize(tmp_path, 2)
    pairs = {(c.words[-1], c.words[2]) for c in stage.commands}
    every = {(f, t) for f in sanitize.FAMILIES for t in gpu_check.TOOLS}
    assert pairs == every - gpu_check.UNFIT
    assert len(gpu_check.TOOLS) == 4
    assert {tool for family, tool in pairs if family == "portable"} == set(gpu_check.TOOLS)
    assert all(c.limit_s <= 120 for c in stage.commands)
    silent = [c.name for c in stage.commands if "--report-api-errors" in c.words]
    assert silent == ["memcheck-teaching"]


def test_scripts_that_stages_run_exist(tmp_path):
    for make in gpu_check.STAGES.values():
        stage = make(tmp_path, 2)
        for command in (*stage.before, *stage.commands):
            paths = [word for word in command.words if word.startswith(("tests/", "benchmarks/"))]
            assert paths or command.words[-1] == "tests"
            assert all((gpu_check.ROOT / path).exists() for path in paths)


def test_pytest_benchmark_is_left_out_of_every_run(request):
    """It warns beside pytest-xdist, which stops the suite: an internal error."""
    assert request.config.pluginmanager.is_blocked("benchmark")


def python(name, code, limit_s=60.0):
    return Command(name, (sys.executable, "-c", code), limit_s)


def test_a_line_for_each_command_and_the_number_that_failed(tmp_path, capsys):
    stage = Stage(
        (
            python("fine", "print('x\\n3 passed')"),
            python("broken", "import sys; print('1 failed'); sys.exit(5)"),
            Command("absent", ("no-such-program",), 60.0),
            python("slow", "import time; print('2 passed', flush=True); time.sleep(60)", 0.5),
        ),
        (python("first", "print('ready')"),),
    )
    assert gpu_check.run(stage, tmp_path, 2) == 3
    first, *rest = capsys.readouterr().out.splitlines()
    assert re.match(r"first +0 +\d+ s  ready$", first)
    lines = dict(line.split(maxsplit=1) for line in rest)
    assert re.match(r"0 +\d+ s  3 passed$", lines["fine"])
    assert re.match(r"5 +\d+ s  1 failed$", lines["broken"])
    assert re.match(r"127 +\d+ s  .*no-such-program", lines["absent"])
    assert re.match(r"124 +\d s  2 passed$", lines["slow"])
    assert (tmp_path / "fine.txt").read_text() == "x\n3 passed\n"


def test_the_sanitizer_is_called_for_each_family(tmp_path, monkeypatch, capsys):
    """With a stand-in for compute-sanitizer that finds something in one family."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *hopper) exit 1;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu_check, "why_no_gpu", lambda: None)
    monkeypatch.setattr(sanitize, "FAMILIES", ("portable", "hopper"))
    only = gpu_check.stage_of_sanitize(tmp_path, 2).commands  # what comes before wants a GPU
    monkeypatch.setitem(gpu_check.STAGES, "sanitize", lambda out, jobs: Stage(only))
    assert gpu_check.main(["sanitize", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^memcheck-portable +0 .*--tool memcheck --error-exitcode 1", said, re.M)
    assert re.search(r"^memcheck-hopper +1 ", said, re.M)
    assert "sanitize: 3 failed" in said  # racecheck does not fit Hopper


def test_without_a_gpu_nothing_runs_and_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_check, "why_no_gpu", lambda: "needs an NVIDIA GPU: none")
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    assert "gpu_check: needs an NVIDIA GPU: none" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["sanitise"])
    assert "no stage sanitise; there are: tests, sanitize, faults, bench" in capsys.readouterr().err


FAULTY = """
import pytest
from lost_context import pytest_runtest_logfinish, pytest_runtest_makereport

@pytest.mark.gpu
def test_fault():
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")

def test_after():
    pass
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "after"), [((), ""), (("-n", "1"), "1 passed")])
def test_no_test_runs_in_a_process_that_lost_its_gpu(options, after, tmp_path):
    (tmp_path / "conftest.py").write_text(FAULTY)
    (tmp_path / "test_faulty.py").write_text("from conftest import test_fault, test_after\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(gpu_check.__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert ("passed" in done.stdout) == bool(after)
    assert after in done.stdout
