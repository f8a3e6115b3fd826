"""After a kernel's fault every later call of its process fails: the process ends, its tests go on.

Hooks of pytest, taken up by tests/conftest.py. pytest-xdist starts another process for the tests
that are left, and reports a crash beside the failure; without it the run ends there.
"""

from __future__ import annotations

import os
import time
import traceback

import pytest

#: What an error says after which CUDA refuses everything until the process ends.
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


@pytest.hookimpl(trylast=True)  # what was reported has gone to the controlling process by then
def pytest_runtest_logfinish(nodeid):
    if nodeid not in _lost:
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        time.sleep(0.5)
        os._exit(1)
    why = f"{nodeid} left the GPU unusable for this process; the tests after it did not run"
    pytest.exit(why, pytest.ExitCode.TESTS_FAILED)
