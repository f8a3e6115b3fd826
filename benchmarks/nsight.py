"""Nsight Compute around a benchmark of this folder, which it calls again with ``--launch``."""

from __future__ import annotations

import shutil
import subprocess
import sys

from flashsim.errors import TraceError
from flashsim.studies.verify import ncu


def tool() -> str:
    """Where ``ncu`` is; without it, the program ends."""
    found = shutil.which("ncu")
    if found is None:
        sys.exit(f"{sys.argv[0]}: needs NVIDIA's Nsight Compute, and there is no `ncu`")
    return found


def profile(*options: str, launch: str | None = None) -> str:
    """What ``ncu`` prints of the kernels that this program, with ``--launch``, starts.

    The program's own words are first, so that nothing stands behind the table's rows. `launch`
    stands behind the flag, if it takes a value.
    """
    command = [tool(), "--csv", "--clock-control", "none", "--print-units", "base", *options]
    command += [sys.executable, *sys.argv, "--launch", *([] if launch is None else [launch])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr + done.stdout


def rows(text: str) -> list[dict[str, str]]:
    """Of the table in it; without one, the program ends with what there is instead."""
    try:
        return ncu.table(text)[1]
    except TraceError as error:
        sys.exit(f"{sys.argv[0]}: {error}\n{text[-2000:]}")
