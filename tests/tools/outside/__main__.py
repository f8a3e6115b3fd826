"""Run other projects' tests of attention: `make outside`, or

    PYTHONPATH=tests/tools python -m outside [SUITE ...] [--gpu] [--whole] [--jobs N] [--page FILE]

Prints a table of the points that passed, failed, were not applicable (and why) and were left out.
If every suite ran, the table replaces the device's last one in docs/notebooks/outside.md. The exit
status is 1 if a test failed.
"""

import argparse
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from flashsim.report import Table
from outside.cases import Tested
from outside.running import run

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/notebooks/outside.md"
SUITES = (
    *("cs336", "flash_attention_files", "flash_attention_functions"),
    *("torch_sdpa", "torch_flex", "jax_nn"),
)


def table(found: Sequence[Tested]) -> Table:
    """Return a table with a row per test."""
    made = Table("", ("suite", "test", "passed", "failed", "not applicable", "left out"))
    for one in found:
        counts = one.passed, len(one.failures), one.unfit.total(), one.left_out
        made.rows.append((one.suite, one.name, *counts))
    sums = (sum(row[n] for row in made.rows) for n in range(2, 6))
    made.rows.append(("total", "", *sums))
    return made


def reasons(found: Sequence[Tested]) -> list[tuple[str, str, int]]:
    """Return why points were not applicable: suite, reason, number."""
    counts: Counter[tuple[str, str]] = Counter()
    for one in found:
        counts.update({(one.suite, reason): number for reason, number in one.unfit.items()})
    return [(*key, number) for key, number in counts.items()]


def section(found: Sequence[Tested], command: str, device: str, seconds: float) -> str:
    """Return the page's section for a device's run."""
    lines = [f"`{command}`: {seconds / 60:.1f} minutes, {versions(device)}.", ""]
    header, *rows = [table(found).columns, *table(found).rows]
    lines += [_row(header), _row(["---", "---", *["---:"] * 4]), *map(_row, rows)]
    lines += ["", "Not applicable:", ""]
    lines += [f"- {suite}: {number:,} because {reason}" for suite, reason, number in reasons(found)]
    return "\n".join(lines)


def _row(cells: Sequence[object]) -> str:
    shown = (f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells)
    return f"| {' | '.join(shown)} |"


def versions(device: str) -> str:
    """Return the versions of the tested packages, and the device."""
    packages = ["torch", "jax", "numpy", "numba"]
    place = [f"Python {platform.python_version()}"]
    if device == "cuda":
        import cupy
        import torch

        place = [torch.cuda.get_device_name(), *place, f"cupy {cupy.__version__}"]
        packages.remove("numba")
    return ", ".join([*place, *(f"{name} {metadata.version(name)}" for name in packages)])


def rewritten(page: str, device: str, text: str) -> str:
    """Return a page with the section of a device replaced."""
    start, end = f"<!-- {device}: written by make outside -->", f"<!-- end of {device} -->"
    pattern = re.compile(f"{re.escape(start)}\n.*?{re.escape(end)}", re.S)
    if not pattern.search(page):
        raise SystemExit(f"the page has no lines {start!r} and {end!r} to write between")
    return pattern.sub(lambda _: f"{start}\n{text}\n{end}", page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="outside", description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--gpu", action="store_true", help="on CUDA, with the large sizes")
    parser.add_argument("--whole", action="store_true", help="every point that applies: hours")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes, default 1")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table is written")
    options = parser.parse_args(arguments)
    if unknown := set(options.suites) - {*SUITES}:
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    device, start = "cuda" if options.gpu else "cpu", time.perf_counter()
    page = options.page.read_text(encoding="utf-8")
    rewritten(page, device, "")  # fails early, before hours of tests, if the page cannot be written
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy needs memory too
    found = run(options.suites or SUITES, device, options.whole, options.jobs)
    print(table(found).text(width=120))
    for suite, reason, number in reasons(found):
        print(f"not applicable: {suite}: {number:,}: {reason}")
    if not options.suites:
        words = ["--gpu"] * options.gpu + ["--whole"] * options.whole
        words += [f"--jobs {options.jobs}"] * (options.jobs > 1)
        asked = f' OUTSIDE="{" ".join(words)}"' if words else ""
        text = section(found, f"make outside{asked}", device, time.perf_counter() - start)
        options.page.write_text(rewritten(page, device, text), encoding="utf-8")
    return int(any(one.failures for one in found))


if __name__ == "__main__":
    sys.exit(main())
