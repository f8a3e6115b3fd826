"""Each seeded fault must make the suite fail: these tests pass only if others do not."""

import dataclasses
import sys

import afresh
import faults
import faults_numba
import kernel_faults
import pytest

pytestmark = pytest.mark.promise("seeded faults are caught")


@pytest.fixture(scope="module")
def suite():
    with afresh.processes() as pool:
        yield lambda *arguments: pool.submit(afresh.suite, arguments).result(timeout=300)


@pytest.mark.parametrize("name", faults.FAULTS)
def test_the_suite_notices(suite, name):
    done = suite("--fault", name, *faults.FAULTS[name].caught_by)
    # 1: some test failed. Anything else (0: passed; 2, 4: could not run) proves nothing.
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.said
    assert f"seeded fault: {name}" in done.said


PYTHON = {name: one for name, one in faults.catalogue().items() if not one.in_kernels}


@pytest.mark.parametrize("name", PYTHON)
def test_fits_the_source_and_compiles(name):
    compile(faults.faulty_source(PYTHON[name]), name, "exec")


def test_every_fault_has_a_name_of_its_own():
    tables = faults.FAULTS, faults_numba.FAULTS, kernel_faults.FAULTS
    assert len(faults.catalogue()) == sum(map(len, tables))


@pytest.mark.parametrize(
    ("returncode", "said", "shows"),
    [
        (1, "E   AssertionError: out", True),
        (1, "E   hopper_roles.Stuck: [('consumer', 0, 0), ('producer', 0, 0)]", True),
        (1, "E   CUDARuntimeError: cudaErrorLaunchFailure: unspecified launch failure", True),
        (1, "E   AcceleratorError: CUDA error: an illegal memory access was encountered", True),
        (1, "E   BackendUnavailable: a kernel does not compile: ptxas error : ...", False),
        (1, "E   CUDADriverError: CUDA_ERROR_INVALID_PTX: a PTX JIT compilation failed", False),
        (1, "E   numba.core.errors.TypingError: Failed in cuda mode pipeline", False),
        (0, "1 passed", False),
        (4, "E   AssertionError: while collecting", False),
    ],
)
def test_what_fails_a_test_shows_but_not_what_does_not_compile(returncode, said, shows):
    assert faults_numba.shows(returncode, said) == shows


def test_a_fragment_that_is_gone_is_an_error():
    gone = dataclasses.replace(faults.FAULTS["mask-ignored"], old="no such line")
    with pytest.raises(faults.FaultError, match="holds the fragment 'no such line' 0 times"):
        faults.faulty_source(gone)


def test_an_unknown_fault_stops_the_suite(suite):
    done = suite("--fault", "mask-ignord", "problem/test_oracle.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no fault 'mask-ignord'; did you mean 'mask-ignored'?" in done.said


def test_an_unknown_promise_stops_the_suite(suite):
    done = suite("--promise", "three count equal", "problem/test_oracle.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no promise 'three count equal'; did you mean 'three counts equal'?" in done.said


def test_a_fault_comes_before_the_import():
    import flashsim

    assert "flashsim" in sys.modules, flashsim
    with pytest.raises(faults.FaultError, match="already imported"):
        faults.install("mask-ignored")


def test_there_are_at_least_fifteen():
    assert len(faults.FAULTS) >= 15
