"""Seconds to grade the course's reference solutions one by one, and a class of them at once.

python benchmarks/grading.py --files 40
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from flashsim.exercises import get, names, submissions


def main() -> None:
    """Print both times, and what the class's files got."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=40, help="files of the class")
    files = parser.parse_args().files
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{at:03}.py") for at in range(max(files, len(names())))]
        for at, path in enumerate(paths):
            one = get(names()[at % len(names())])
            path.write_text(f"# flashsim exercise: {one.name}\n{one.solution_source}", "utf-8")
        began = time.perf_counter()
        for path in paths[: len(names())]:
            assert submissions.grade_file(path)[0].points == 100, path
        print(f"{len(names())} references one by one: {time.perf_counter() - began:.2f} s")
        for path in paths[files:]:
            path.unlink()
        began = time.perf_counter()
        points = [marks.points for _, marks in submissions.grade_folder(Path(folder))]
        print(f"{len(points)} files at once: {time.perf_counter() - began:.2f} s, points {points}")


if __name__ == "__main__":
    main()
