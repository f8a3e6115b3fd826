"""Run everything that needs a GPU: `make gpu`, or

    python tests/tools/gpu_check.py [STAGE ...] [--out FOLDER] [--jobs N]

The stages run in this order; all of them if none is named:

    tests      the suite's GPU tests
    sanitize   compute-sanitizer's four tools on each family of kernels
    faults     bugs seeded into the kernels, which the GPU tests must notice
    bench      benchmarks/gpu.py: forward and backward times as a table, gpu.csv

The output of a command goes to FOLDER, and one line about it to the terminal. Each command has a
time limit. The exit status says whether all finished in time and succeeded.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import sanitize
from no_gpu import why_no_gpu

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
#: racecheck does not track the order that mbarriers and `bar.arrive` establish on Hopper. initcheck
#: regards memory that TMA stores as unwritten: dQ of "flash2-once" (docs/reference/hopper.md).
UNFIT = {(f, "racecheck") for f in ("hopper", "hopper-once", "python-hopper", "latent")}
UNFIT |= {("hopper-once", "initcheck")}
#: Numba's launcher makes cuda-python look up every driver function that it knows. An older driver
#: rejects some (cuGetProcAddress: invalid argument), which is handled. What the tool reports inside
#: kernels stays an error, and a failing call of flashsim raises.
MORE_OPTIONS = {("teaching", "memcheck"): ("--report-api-errors", "no")}


@dataclass(frozen=True)
class Command:
    """One process, killed after `limit_s` seconds; its name is also that of the output file."""

    name: str
    words: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Stage:
    """Commands that may run at the same time, after those of `before`, which prepare them."""

    commands: tuple[Command, ...]
    before: tuple[Command, ...] = ()


def stage_of_tests(out: Path, jobs: int) -> Stage:
    """Return the GPU tests without seeded bugs and products of cases (`-m "gpu and thorough"`)."""
    # A module that needs a package of the test extra shows as an error; the others still run.
    words = (*_pytest(jobs), "-m", "gpu", "--continue-on-collection-errors")
    words += ("tests/gpu",)
    return Stage((Command("tests", words, 1200),))


def stage_of_sanitize(out: Path, jobs: int) -> Stage:
    """Return a process per family and tool; kernels are compiled before, without the tool."""
    script = (sys.executable, "tests/tools/sanitize.py")
    watched = [
        Command(f"{tool}-{family}", (*_sanitizer(family, tool), *script, family), 120)
        for family in sanitize.FAMILIES
        for tool in TOOLS
        if (family, tool) not in UNFIT
    ]
    compiling = [Command(f"compile-{f}", (*script, f), 180) for f in sanitize.FAMILIES]
    return Stage(tuple(watched), tuple(compiling))


def stage_of_faults(out: Path, jobs: int) -> Stage:
    """Return one command per catalogue of bugs, to run in sequence."""
    words = (*_pytest(jobs), "-m", "gpu", "tests/faults/test_kernel_faults.py")
    first = Command("faults-hopper", words, 900)
    second = Command("faults-python", (sys.executable, "tests/faults/faults_numba.py"), 900)
    return Stage((second,), (first,))


def stage_of_bench(out: Path, jobs: int) -> Stage:
    """Return the benchmark, which runs alone on the GPU."""
    words = (sys.executable, "benchmarks/gpu.py", "--csv", str(out / "gpu.csv"))
    return Stage((Command("bench", words, 1200),))


STAGES: dict[str, Callable[[Path, int], Stage]] = {
    "tests": stage_of_tests,
    "sanitize": stage_of_sanitize,
    "faults": stage_of_faults,
    "bench": stage_of_bench,
}


def _sanitizer(family: str, tool: str) -> tuple[str, ...]:
    words = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1")
    return (*words, *MORE_OPTIONS.get((family, tool), ()))


def _pytest(jobs: int) -> tuple[str, ...]:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):
        words += ["-n", str(jobs)]
    return tuple(words)


def execute(command: Command, out: Path) -> int:
    """Run a command and return its exit status; 124 at its time limit, 127 if it does not exist."""
    log = out / f"{command.name}.txt"
    start = time.monotonic()
    with log.open("w") as file:
        limited = ("timeout", "--kill-after=1", str(command.limit_s), *command.words)
        status = subprocess.run(limited, cwd=ROOT, stdout=file, stderr=file, check=False).returncode
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    took = time.monotonic() - start
    print(f"{command.name:24}{status:4}{took:7.0f} s  {last.strip('= ')[:100]}", flush=True)
    return status


def run(stage: Stage, out: Path, jobs: int) -> int:
    """Return how many commands of a stage failed."""
    with ThreadPoolExecutor(jobs) as pool:
        statuses = [*pool.map(execute, stage.before, repeat(out))]
        statuses += pool.map(execute, stage.commands, repeat(out))
    return sum(status != 0 for status in statuses)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 if something failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="tests, sanitize, faults, bench")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="default: out/gpu")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    unknown = set(options.stages) - set(STAGES)
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are: {', '.join(STAGES)}")
    reason = why_no_gpu()
    if reason:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    print(f"{'command':24}{'rc':>4}{'time':>9}  last line; all of it in {out}")
    for name in options.stages or STAGES:
        count = run(STAGES[name](out, options.jobs), out, options.jobs)
        print(f"{name}: {f'{count} failed' if count else 'ok'}", flush=True)
        failed += count
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
