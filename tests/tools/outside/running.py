"""Run the points of suites, in one process or several."""

import importlib
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

from outside.cases import Outcome, Point, Test, Tested, chosen, outcome


def run(names: Sequence[str], device: str, whole: bool, jobs: int = 1) -> list[Tested]:
    """Run every test of the named suites, in `jobs` processes."""
    found, given = [], []
    for name in names:
        suite = importlib.import_module(f"outside.{name}")
        for at, test in enumerate(suite.tests(device, whole)):
            tested, points = chosen(suite.TITLE, test)
            given += [(len(found), (name, device, whole, at), point) for point in points]
            found.append(tested)
    with ExitStack() as stack:
        each: Any = map
        if jobs > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(jobs, mp_context=context))
            each = partial(pool.map, chunksize=4)
        places, which, points = zip(*given, strict=True)
        for n, (place, came) in enumerate(zip(places, each(one, which, points), strict=True)):
            found[place].add([came])
            if came.failure:
                print(f"FAILED {found[place].name}: {came.failure}", file=sys.stderr)
            _progress(f"{n + 1} of {len(given)}: {found[place].suite}: {found[place].name}")
    return found


def one(which: tuple[str, str, bool, int], point: Point) -> Outcome:
    """Run one point of a test, which is given by suite, device, whole, and its index."""
    *suite, at = which
    return outcome(_tests(*suite)[at].run, point)


@cache
def _tests(name: str, device: str, whole: bool) -> list[Test]:
    return importlib.import_module(f"outside.{name}").tests(device, whole)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{line[:100]:<100}", end="", file=sys.stderr)
