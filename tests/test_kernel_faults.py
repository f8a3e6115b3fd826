"""Each bug seeded into a kernel must make the GPU tests fail, and must still be a kernel."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import kernel_faults
import pytest
from test_hopper_kernels import PROBLEMS, compile_log, kernels

from flashsim.backends import compiler

TESTS = Path(__file__).parent
FAULTS = kernel_faults.FAULTS


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAULTS)
def test_the_gpu_tests_notice(name):
    options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--kernel-fault", name)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_hopper.py", "-k", FAULTS[name].caught_by],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # 1: some test failed. Anything else (0: passed; 2, 4, 5: could not run) proves nothing.
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "NVRTCError" not in done.stdout, "it does not compile"


@pytest.mark.parametrize("name", FAULTS)
def test_is_still_a_kernel(name, monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setattr(compiler, "source", compiler.source)  # to be put back
    try:
        kernel_faults.install(name)
        wide = FAULTS[name].file == kernel_faults.WIDE
        for kernel in kernels(PROBLEMS["192" if wide else "128"]):
            if FAULTS[name].file in (kernel.file, kernel_faults.SHARED) and "back" in kernel.file:
                assert "failed" not in compile_log(kernel)
    finally:
        monkeypatch.undo()
        compiler.source.cache_clear()


def test_a_fragment_that_is_gone_is_an_error():
    gone = dataclasses.replace(FAULTS["mask-skipped"], old="no such line")
    with pytest.raises(kernel_faults.KernelFaultError, match="'no such line' 0 times"):
        kernel_faults.seeded(gone, compiler.source(gone.file))


def test_an_unknown_fault_is_an_error():
    with pytest.raises(kernel_faults.KernelFaultError, match="did you mean 'mask-skipped'"):
        kernel_faults.install("mask-skiped")
