"""Measure here: the workload once under Nsight Compute, once with its kernels counting."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flashsim.errors import BackendUnavailable
from flashsim.trace import Trace
from flashsim.verify.ncu import Launch, command, parse


def measure(wanted: dict[str, Any]) -> tuple[list[Launch], list[Trace], str]:
    """Launches with their counters, what the kernels counted, and the CSV to keep.

    Parameters
    ----------
    wanted : dict
        See `workload.main`.

    Raises
    ------
    BackendUnavailable
        If there is no ``ncu``, or a run fails; the message ends with what it printed last.
    """
    program = [sys.executable, "-m", "flashsim.verify.workload", json.dumps(wanted)]
    profiled = command(program)  # first, so that a missing ncu is said at once
    with TemporaryDirectory() as folder:
        _run([*program, folder])
        traces = [Trace.load(path) for path in sorted(Path(folder).glob("*.npz"), reverse=True)]
    text = _run(profiled)
    return parse(text), traces, text


def _run(arguments: Sequence[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise BackendUnavailable(
            f"{Path(arguments[0]).name} ended with exit code {done.returncode}: {last}"
        )
    return done.stdout
