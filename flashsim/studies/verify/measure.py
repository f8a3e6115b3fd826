"""Measures cases on this machine, with kernels that count their bytes and with Nsight Compute."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flashsim.counts.traffic import Traffic
from flashsim.errors import TraceError, own_errors
from flashsim.report import beside
from flashsim.studies.verify.cases import Case, Counted, MeasuredPass
from flashsim.studies.verify.ncu import MeasuredLaunch, command, output_of, parse, stage_of


@own_errors
@dataclass(frozen=True)
class Record:
    """The measurements of some cases; any machine can compare them with predictions.

    `text` is the CSV that Nsight Compute printed. `counted` has the kernel-reported transfers of
    each pass of each case.
    """

    cases: tuple[Case, ...]
    text: str
    counted: tuple[tuple[Counted, ...], ...]

    def save(self, path: Path) -> None:
        """Write Nsight Compute's CSV to `path`, and the cases and counts as JSON beside it."""
        with beside(path) as part:
            part.write_text(self.text)
        cases = [case.to_dict() for case in self.cases]
        counted = [[each.to_dict() for each in one] for one in self.counted]
        with beside(counts_beside(path)) as part:
            part.write_text(json.dumps({"cases": cases, "counted": counted}))

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record that `save` wrote.

        Raises
        ------
        TraceError
            If the JSON file beside `path` has a different format.
        OSError
            If a file is missing.
        """
        beside = counts_beside(path)
        try:
            values = json.loads(beside.read_text())
            cases = tuple(Case.from_dict(one) for one in values["cases"])
            return cls(cases, path.read_text(), _counted(values["counted"]))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"the file {beside} was not written by `flashsim verify --save` "
                f"({type(error).__name__}: {error}); remove {beside.name}, so that only "
                f"{path.name} is read"
            ) from error


@own_errors
def counts_beside(path: Path) -> Path:
    """Return the path of the JSON file, with cases and counts, that belongs to a CSV file."""
    return path.with_suffix(".counts.json")


@own_errors
def record(cases: Sequence[Case]) -> Record:
    """Measure all cases on this machine's GPU, and return the measurements.

    One process runs kernels that count their bytes, and another process runs under Nsight Compute.
    For cases that name no device, predictions are for this machine's GPU.

    Raises
    ------
    BackendUnavailable
        If ``ncu`` is missing, or a run fails; the message ends with the run's last output.
    OptionError
        If a case has no device, and no preset matches this GPU.
    """
    command([sys.executable])  # raises at once if ncu is missing
    cases = [case.placed() for case in cases]
    wanted = json.dumps([case.to_dict() for case in cases])
    program = [sys.executable, "-m", "flashsim.studies.verify.workload", wanted]
    profiled = command(program)
    with TemporaryDirectory() as folder:
        kept = Path(folder) / "counted.json"
        output_of([*program, str(kept)])
        counted = _counted(json.loads(kept.read_text()))
    return Record(tuple(cases), output_of(profiled), counted)


def _counted(values: Any) -> tuple[tuple[Counted, ...], ...]:
    return tuple(tuple(Counted.from_dict(each) for each in one) for one in values)


@own_errors
def passes_of(measured: Record) -> list[list[MeasuredPass]]:
    """Return the measured passes of each case in a record.

    The record's launches must follow the order of the cases, and within a case the order of its
    stages.

    Raises
    ------
    TraceError
        If the launches in the record are not those of the cases' kernels.
    """
    launches = iter(_whole(x for x in parse(measured.text) if stage_of(x.kernel) is not None))
    found = []
    for case, one in zip(measured.cases, measured.counted, strict=True):
        forms = (None, *case.backward)  # the forward pass, then each backward one's
        found.append(
            [
                _pass(x.predicted(case), launches, x.transfers, case, form)
                for x, form in zip(one, forms, strict=True)
            ]
        )
    left = next(launches, None)
    if left is not None:
        raise TraceError(
            f"the table has more kernel launches than flashsim predicts; launch {left.number} "
            f"({left.kernel}) is the first additional one; pass the options of the measured run"
        )
    return found


@own_errors
def assign(traffics: Iterable[Traffic], launches: Sequence[MeasuredLaunch]) -> list[MeasuredPass]:
    """Assign measured launches to stages by kernel name. All launches must have one problem shape.

    Raises
    ------
    TraceError
        If no launch is a kernel of a predicted stage.
    """
    traffics = list(traffics)
    known = {stage.name for traffic in traffics for stage in traffic.stages}
    by_stage: dict[str, list[MeasuredLaunch]] = {}
    for launch in _whole(launches):
        stage = stage_of(launch.kernel)
        if stage == "dkdv" and "fused" in known:
            stage = "fused"
        if stage in known:
            by_stage.setdefault(stage, []).append(launch)
    if not by_stage:
        raise TraceError(
            f"none of the measured kernels ({', '.join({x.kernel for x in launches})}) belongs "
            f"to a predicted stage ({', '.join(sorted(known))}); pass the same options as for "
            "the run that was measured"
        )
    return [MeasuredPass(traffic, by_stage) for traffic in traffics]


def _whole(launches: Iterable[MeasuredLaunch]) -> list[MeasuredLaunch]:
    """Combine successive launches of Hopper's KV-outer kernel into one, with summed counters.

    Launches without another kernel between them belong to one pass (`KernelPass.before`).
    """
    found: list[MeasuredLaunch] = []
    for one in launches:
        known = one.kernel.startswith("hopper_backward")
        if not known or not found or found[-1].kernel != one.kernel:
            found.append(one)
            continue
        both = {
            name: max(n, one.counters[name]) if "an SM" in name else n + one.counters[name]
            for name, n in found[-1].counters.items()
            if name in one.counters
        }
        found[-1] = replace(one, counters=both)
    return found


def _pass(
    traffic: Traffic,
    launches: Iterator[MeasuredLaunch],
    counted: Mapping[tuple[str, str, str], int],
    case: Case,
    deterministic: bool | None,
) -> MeasuredPass:
    taken = {}
    for stage in traffic.stages:
        launch = next(launches, None)
        wanted = "dkdv" if stage.name == "fused" else stage.name
        if launch is None or stage_of(launch.kernel) != wanted:
            raise TraceError(
                f"the next kernel in the table must belong to stage {stage.name!r} of {case}, got "
                f"{('no kernel' if launch is None else launch.kernel)}; pass the table that was "
                "measured with the same cases"
            )
        taken[stage.name] = [launch]
    return MeasuredPass(
        traffic, taken, counted, in_turns=deterministic is True, python=case.backend == "numba_cuda"
    )
