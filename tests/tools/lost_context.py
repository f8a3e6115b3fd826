"""End a process after a kernel's fault, since all its later CUDA calls would fail.

These pytest hooks are loaded by tests/conftest.py. pytest-xdist starts another process for the
remaining tests, and reports a crash besides the failure. Without xdist the run ends there.
"""

import os
import time
import traceback

import pytest

#: Error texts after which CUDA fails every call until the process ends.
STICKY = (
    *("illegal memory access", "ILLEGAL_ADDRESS", "unspecified launch failure", "LAUNCH_FAILED"),
    *("illegal instruction", "ILLEGAL_INSTRUCTION", "misaligned address", "MISALIGNED_ADDRESS"),
)
_lost: list[str] = []


def pytest_runtest_makereport(item, call):
    if item.get_closest_marker("gpu") and call.excinfo:
        chain = "".join(traceback.format_exception(call.excinfo.value))
        if any(word in chain for word in STICKY):
            _lost.append(item.nodeid)


@pytest.hookimpl(trylast=True)  # the report has been sent to the controlling process by then
def pytest_runtest_logfinish(nodeid):
    if nodeid not in _lost:
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        time.sleep(0.5)
        os._exit(1)
    why = f"{nodeid} left the GPU unusable for this process; the tests after it did not run"
    pytest.exit(why, pytest.ExitCode.TESTS_FAILED)
