"""Measure here: the cases once with their kernels counting, once under Nsight Compute."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from flashsim.errors import BackendUnavailable, TraceError
from flashsim.traffic import Traffic
from flashsim.verify.cases import Case, Counted, Pass
from flashsim.verify.ncu import Launch, command, parse, stage_of


def measure(cases: Sequence[Case]) -> tuple[list[list[Pass]], str, str]:
    """Passes of each case; Nsight Compute's CSV and the counts (JSON), to keep.

    Two processes, whatever the number of cases.

    Raises
    ------
    BackendUnavailable
        If there is no ``ncu``, or a run fails; the message ends with what it printed last.
    TraceError
        If the kernels that ran are not those of the cases.
    """
    wanted = json.dumps([case.to_dict() for case in cases])
    program = [sys.executable, "-m", "flashsim.verify.workload", wanted]
    profiled = command(program)  # first, so that a missing ncu is said at once
    with TemporaryDirectory() as folder:
        kept = Path(folder) / "counted.json"
        _run([*program, str(kept)])
        counted = kept.read_text()
    text = _run(profiled)
    return passes_of(cases, text, counted), text, counted


def passes_of(cases: Sequence[Case], text: str, counted: str) -> list[list[Pass]]:
    """Put together what `measure` keeps: launches come in the order of the cases' stages."""
    launches = iter([x for x in parse(text) if stage_of(x.kernel) is not None])
    found = []
    for case, one in zip(cases, json.loads(counted), strict=True):
        each = [Counted.from_dict(values) for values in one]
        found.append([_pass(x.predicted(case), launches, x.transfers, case) for x in each])
    left = next(launches, None)
    if left is not None:
        raise TraceError(f"launch {left.number} ({left.kernel}) is one too many for these cases")
    return found


def assign(traffics: Iterable[Traffic], launches: Sequence[Launch]) -> list[Pass]:
    """Give launches to stages by their kernels' names: one shape, run any number of times.

    Raises
    ------
    TraceError
        If no launch is a kernel of a predicted stage.
    """
    traffics = list(traffics)
    known = {stage.name for traffic in traffics for stage in traffic.stages}
    by_stage: dict[str, list[Launch]] = {}
    for launch in launches:
        stage = stage_of(launch.kernel)
        if stage == "dkdv" and "fused" in known:
            stage = "fused"
        if stage in known:
            by_stage.setdefault(stage, []).append(launch)
    if not by_stage:
        raise TraceError(
            f"none of the kernels measured ({', '.join({x.kernel for x in launches})}) belongs to "
            f"a stage that was predicted ({', '.join(sorted(known))}); do the options say what ran?"
        )
    return [Pass(traffic, by_stage) for traffic in traffics]


def _pass(
    traffic: Traffic,
    launches: Iterator[Launch],
    counted: Mapping[tuple[str, str, str], int],
    case: Case,
) -> Pass:
    taken = {}
    for stage in traffic.stages:
        launch = next(launches, None)
        wanted = "dkdv" if stage.name == "fused" else stage.name
        if launch is None or stage_of(launch.kernel) != wanted:
            raise TraceError(
                f"the table has {'no launch' if launch is None else launch.kernel} where stage "
                f"{stage.name!r} of {case} should stand; is it of another run?"
            )
        taken[stage.name] = [launch]
    return Pass(traffic, taken, counted)


def _run(arguments: Sequence[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise BackendUnavailable(
            f"{Path(arguments[0]).name} ended with exit code {done.returncode}: {last}"
        )
    return done.stdout
