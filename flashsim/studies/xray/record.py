"""Measures a program's attention kernels under Nsight Compute, and stores the measurements."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flashsim.errors import OptionError, TraceError, own_errors
from flashsim.problem.hardware import Device, reported
from flashsim.problem.problem import Problem
from flashsim.report import beside
from flashsim.studies.verify.cases import here
from flashsim.studies.verify.ncu import METRICS, MeasuredLaunch, command, output_of, parse
from flashsim.studies.xray.infer import LaunchCounters

#: The counters that an X-ray measures, by flashsim's names.
ASKED = (
    *("bytes into SMs", "writes at L2", "reductions at L2", "DRAM read", "DRAM write"),
    *("tensor FLOPs, bf16", "tensor FLOPs, fp16", "seconds"),
)
#: How the range of a launch is named in Nsight Compute's table (flashsim.torch.timing.RANGE).
_RANGE = re.compile(r"flashsim\.watch \d+( backward)?")


@dataclass(frozen=True)
class ProfiledLaunch:
    """One kernel launch that belongs to an attention call.

    `call` is the index of the call in `Profile.calls`. `counters` has bytes, FLOPs and seconds by
    the names in `flashsim.studies.verify.METRICS`.
    """

    kernel: str
    call: int
    direction: str
    blocks: int
    counters: Mapping[str, float]

    @classmethod
    def of(cls, launch: MeasuredLaunch, call: int, direction: str) -> ProfiledLaunch:
        """Return a measured kernel launch as a part of attention call number `call`."""
        return cls(launch.kernel, call, direction, launch.blocks, launch.counters)

    @property
    def seen(self) -> LaunchCounters:
        """The launch's counters, from which tiles are inferred."""
        c = self.counters
        tensor = [n for name, n in c.items() if name.startswith("tensor FLOPs")]
        written, reduced = c.get("writes at L2", 0.0), c.get("reductions at L2", 0.0)
        flops = sum(tensor) if tensor else None
        return LaunchCounters(c["bytes into SMs"], written, reduced, self.blocks, flops)


@own_errors
@dataclass(frozen=True)
class Profile:
    """The measurements of one program. Any machine can evaluate these measurements.

    Attributes
    ----------
    device : str
        The preset that matches the GPU, or the name that its driver reports.
    calls : tuple of dict
        Each call's "name", "api", "note" and "problem" (the fields of a `Problem`, or None).
    launches : tuple of ProfiledLaunch
        The launches in the order in which they ran.
    """

    program: str
    device: str
    calls: tuple[Mapping[str, Any], ...]
    launches: tuple[ProfiledLaunch, ...]

    def problem(self, call: int) -> Problem | None:
        """Return a call's shape and mask, or None if a `Problem` cannot describe them."""
        values = self.calls[call]["problem"]
        if values is None:
            return None
        # JSON has lists instead of tuples.
        sizes: Any = {k: tuple(x) if isinstance(x, list) else x for k, x in values.items()}
        return Problem(**sizes)

    def save(self, path: Path) -> None:
        """Write the record to `path` as JSON."""
        with beside(path) as part:
            part.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a record that `save` wrote; raise a `TraceError` for any other file."""
        try:
            values = json.loads(path.read_text())
            launches = tuple(ProfiledLaunch(**one) for one in values.pop("launches"))
            read = cls(launches=launches, calls=tuple(values.pop("calls")), **values)
            for one in launches:
                read.problem(one.call)
                one.seen  # noqa: B018
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"{str(path)!r} is not a file that `flashsim xray --save` wrote "
                f"({type(error).__name__}: {error}); measure the program again"
            ) from error
        return read


@own_errors
def measure(
    program: Path, arguments: Sequence[str] = (), *, device: str | None = None, launches: int = 200
) -> Profile:
    """Run a PyTorch program under Nsight Compute, and record the kernels of its attention calls.

    The attention calls are those that `flashsim.torch.watch` records. By default, `device` is the
    preset that matches the GPU. At most `launches` kernels are measured. Each kernel is repeated,
    once for each group of counters.

    Raises
    ------
    BackendUnavailable
        If ``ncu`` is missing, or the program fails; the message ends with its last output.
    TraceError
        If no attention kernel ran.
    """
    with TemporaryDirectory() as folder:
        out = Path(folder) / "calls.json"
        words = [sys.executable, "-m", "flashsim.torch.xray", str(out), str(program), *arguments]
        text = profile(words, launches=launches, ranges=True)
        told = json.loads(out.read_text())
    found = []
    for launch, label in launches_of(text):
        if label in told["ranges"]:
            found.append(ProfiledLaunch.of(launch, *told["ranges"][label]))
    if not found:
        raise TraceError(
            f"{program.name} ran no kernel in an attention call that flashsim can watch "
            "(docs/guides/watch.md lists these calls); for any other kernel, pass its name as "
            "--kernel, and its shape as -n, -d, --heads, ..."
        )
    gpu = told["gpu"]
    try:
        name = device or reported(*gpu).name
    except OptionError:
        name = gpu[0]
    return Profile(program.name, name, tuple(told["calls"]), tuple(found))


@own_errors
def measure_kernels(
    program: Path,
    arguments: Sequence[str],
    problem: Problem,
    direction: str,
    *,
    kernel: str,
    device: str | None = None,
    launches: int = 20,
) -> Profile:
    """Run any Python program, and record the kernels whose names match a regular expression.

    Use this function for kernels that `watch` does not record, such as your own. `problem` is the
    shape and the mask of the program's attention. `kernel` is a regular expression of Nsight
    Compute's ``--kernel-name``. Each launch of the kernel that runs first begins a new call of the
    same shape. All other arguments, and the errors, are those of `measure`.
    """
    words = [sys.executable, str(program), *arguments]
    taken = launches_of(profile(words, launches=launches, kernel=kernel))
    values = {f.name: getattr(problem, f.name) for f in fields(Problem)}
    about = {"name": "", "api": kernel, "note": "", "problem": values}
    found, call = [], -1
    for launch, _ in taken:
        call += launch.kernel == taken[0][0].kernel
        found.append(ProfiledLaunch.of(launch, call, direction))
    if not found:
        raise TraceError(
            f"{program.name} ran no kernel whose name matches {kernel!r}; pass another regular "
            "expression as --kernel"
        )
    return Profile(program.name, device or here(), (about,) * (call + 1), tuple(found))


@own_errors
def profile(words: Sequence[str], *, launches: int, ranges: bool = False, kernel: str = "") -> str:
    """Run a program under Nsight Compute, and return the table that ``ncu`` prints.

    At most `launches` kernels are measured. If `ranges` is true, only kernels in NVTX ranges whose
    names begin with "flashsim.watch" are measured. If `kernel` is set, only kernels whose names
    match this regular expression are measured. A missing ``ncu`` or a failed program raises
    `BackendUnavailable`; the message ends with the last output.
    """
    chosen = ["--launch-count", str(launches)]
    chosen += ["--nvtx", "--nvtx-include", "regex:flashsim.watch.*/"] if ranges else []
    asked = command([*chosen, *words], metrics=[METRICS[x] for x in ASKED], kernels=kernel or None)
    return output_of(asked)


@own_errors
def launches_of(text: str) -> list[tuple[MeasuredLaunch, str]]:
    """Return the launches in Nsight Compute's table, each with the name of its NVTX range or "".

    A text without a table, or a launch without the counter of bytes read, raises a `TraceError`.
    """
    found = []
    for launch in parse(text):
        if "bytes into SMs" not in launch.counters:
            raise TraceError(
                f"launch {launch.number} ({launch.kernel}) lacks the counter "
                f"{METRICS['bytes into SMs']}, from which tile sizes are inferred; pass this "
                "counter to ncu by --metrics"
            )
        range_ = _RANGE.search(launch.ranges)
        found.append((launch, range_[0] if range_ else ""))
    return found


def machine(record: Profile) -> Device | None:
    """Return the device preset of the record's GPU, or None if no preset matches."""
    try:
        return Device.get(record.device)
    except OptionError:
        return None
