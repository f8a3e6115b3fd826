"""Each bug seeded into a kernel must make the GPU tests fail, and must still be a kernel."""

import contextlib
import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy")

import afresh
import emulator
import faults
import faults_numba
import kernel_faults
import test_emulated_hopper
from compiled import compiled, errors
from gpus import passes_of
from test_emulated import compare
from test_hopper_kernels import PROBLEMS, kernels

from flashsim import Problem
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch_policy import quantize
from flashsim.backends.launch_policy.hopper_fp8 import HOPPER_FP8
from flashsim.backends.launch_policy.portable import PORTABLE
from flashsim.errors import TraceError

pytestmark = pytest.mark.promise("seeded faults are caught")

TESTS = Path(__file__).parents[1]
FAULTS = kernel_faults.FAULTS
EVERY = FAULTS | faults_numba.FAULTS


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAULTS)
def test_the_gpu_tests_notice(name):
    options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--fault", name)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *FAULTS[name].caught_by],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # 1: some test failed. Anything else (0: passed; 2, 4, 5: could not run) proves nothing.
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "NVRTCError" not in done.stdout, "it does not compile"
    assert "OutOfMemory" not in done.stdout, "the GPU is full"


def affected(fault):
    """Kernels with the fault in them, one of each source."""
    every = kernels(
        PROBLEMS["192" if fault.source in (kernel_faults.WIDE, kernel_faults.ROLES) else "128"]
    )
    for dtype in ("bfloat16", "float32"):
        p = Problem(113, 203, 64, dtype=dtype, causal=True)
        every += [x.kernel for name in ("", "flash2") for x in passes_of(PORTABLE, p, name)]
    fp8 = Problem(512, 512, 128, dtype="float8_e4m3fn", scales=(64, 128))
    every += [x.kernel for x in passes_of(HOPPER_FP8, fp8)]
    every += quantize.kernels(128, "bfloat16", "block", (64, 128), rotate=True)
    shared = {kernel_faults.SHARED: "hopper/back", kernel_faults.WORK: "hopper/"}
    files = {k.file: k for k in every}
    return [k for f, k in files.items() if f.startswith(shared.get(fault.source, fault.source))]


@contextlib.contextmanager
def seeded(name, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "source", nvrtc.source)  # to be put back
        try:
            faults.install(name)
            yield
        finally:
            patch.undo()
            nvrtc.source.cache_clear()


def options(kernel):
    return (*kernel.options, *(() if kernel.boxes else ("-arch=sm_90",)))


@pytest.mark.parametrize("name", FAULTS)
def test_is_still_a_kernel(name, monkeypatch):
    with seeded(name, monkeypatch):
        every = affected(FAULTS[name])
        assert every
        for kernel in every:
            assert not errors(kernel, options(kernel))


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_still_assembles(name, monkeypatch):
    with seeded(name, monkeypatch):
        for kernel in affected(FAULTS[name]):
            log, cubin = compiled(kernel, options(kernel))
            assert cubin, log


def test_what_is_no_kernel_is_found(monkeypatch):
    fault = dataclasses.replace(FAULTS["k-not-awaited"], new="if (unknown > 0) {")
    monkeypatch.setitem(FAULTS, "k-not-awaited", fault)
    with seeded("k-not-awaited", monkeypatch):
        (kernel,) = affected(fault)
        assert "unknown" in errors(kernel, options(kernel))


@pytest.fixture(scope="module")
def listed():
    """The names of each file's tests, for which no GPU is needed."""
    files = sorted({fault.caught_by[0].partition("::")[0] for fault in EVERY.values()})
    with afresh.processes() as pool:
        done = pool.submit(afresh.suite, ("--collect-only", "-q", *files)).result(timeout=300)
    assert done.returncode == 0, done.said
    found = {file: [] for file in files}
    for line in done.said.splitlines():
        file, _, test = line.removeprefix("tests/").partition("::")
        if test:
            found[file].append(test)
    return found


@pytest.mark.parametrize("name", EVERY)
def test_the_tests_that_should_notice_exist(name, listed):
    fault = EVERY[name]
    (file, _, test), words = fault.caught_by[0].partition("::"), " ".join(fault.caught_by[2:])
    words = re.sub(
        r"[^\s()]+",
        lambda m: m[0] if m[0] in ("and", "or", "not") else f"({m[0]!r} in test)",
        words,
    )
    if not listed[file] and importlib.util.find_spec("torch") is None:
        pytest.skip(f"tests/{file} needs PyTorch")
    found = [x for x in listed[file] if x.startswith(test) and eval(words or "1", {"test": x})]
    assert 0 < len(found) < 40, (file, test, words)


@pytest.mark.parametrize("name", [name for name in FAULTS if name.startswith("portable")])
def test_a_portable_one_shows_on_a_cpu(name, monkeypatch):
    dtype = "float32" if "f32" in FAULTS[name].source else "bfloat16"
    p = Problem(70, 90, 40, heads=4, kv_heads=2, dtype=dtype, causal=True)
    algorithm = "flash2-fused" if FAULTS[name].source == kernel_faults.ROWS else "flash2"
    with seeded(name, monkeypatch), pytest.raises((AssertionError, TraceError)):
        compare(emulator.Emulator(900), PORTABLE, p, algorithm)


@pytest.mark.parametrize("name", [name for name in FAULTS if name.startswith("roles")])
def test_one_of_the_backward_by_roles_shows_on_a_cpu(name, monkeypatch):
    with seeded(name, monkeypatch), pytest.raises((AssertionError, TraceError)):
        test_emulated_hopper.compare(test_emulated_hopper.PROBLEMS["groups"])


def test_one_of_hoppers_forward_shows_on_a_cpu(monkeypatch):
    with seeded("hopper-largest-as-integers", monkeypatch), pytest.raises(AssertionError):
        test_emulated_hopper.compare_forward(test_emulated_hopper.FORWARD["64"], "below")


@pytest.mark.parametrize("name", [name for name in FAULTS if name.startswith("once")])
def test_one_of_the_backward_in_one_visit_shows_on_a_cpu(name, monkeypatch):
    with seeded(name, monkeypatch), pytest.raises((AssertionError, TraceError)):
        test_emulated_hopper.compare_once("varlen")


@pytest.mark.parametrize("name", [name for name in FAULTS if name.startswith("first")])
def test_one_of_the_first_visit_shows_on_a_cpu(name, monkeypatch):
    tiling, problem = test_emulated_hopper.ALIKE["rows without keys"]
    with seeded(name, monkeypatch), pytest.raises((AssertionError, TraceError)):
        test_emulated_hopper.compare(problem, tiling, "flash2-fused-first")


def test_a_fragment_that_is_gone_is_an_error():
    gone = dataclasses.replace(FAULTS["mask-skipped"], old="no such line")
    with pytest.raises(faults.FaultError, match="'no such line' 0 times"):
        gone.seeded(nvrtc.source(gone.source))
