"""Run a benchmark of this folder under Nsight Compute, by calling it again with ``--launch``."""

from __future__ import annotations

import shutil
import subprocess
import sys

from flashsim.errors import TraceError
from flashsim.studies.verify import ncu


def tool() -> str:
    """Return the path of ``ncu``; exit if it is not installed."""
    found = shutil.which("ncu")
    if found is None:
        sys.exit(
            f"{sys.argv[0]}: needs NVIDIA's Nsight Compute, whose `ncu` was not found; install it"
        )
    return found


def profile(*options: str, launch: str | None = None) -> str:
    """Return the output of ``ncu`` for the kernels that this program starts with ``--launch``.

    The program's own output comes first, so that nothing follows the table's rows. `launch` is the
    value of the flag, if it has one.
    """
    command = [tool(), "--csv", "--clock-control", "none", "--print-units", "base", *options]
    command += [sys.executable, *sys.argv, "--launch", *([] if launch is None else [launch])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr + done.stdout


def rows(text: str) -> list[dict[str, str]]:
    """Return the rows of the table in a text; exit with the text if there is none."""
    try:
        return ncu.table(text)[1]
    except TraceError as error:
        sys.exit(f"{sys.argv[0]}: {error}\n{text[-2000:]}")
