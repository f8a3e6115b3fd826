"""The tests of a suite: each is a grid of points, of which some are run."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Point = Mapping[str, Any]


class NotApplicable(Exception):
    """Raised with the reason if flashsim does not support what a test checks."""


@dataclass
class Test:
    """One test of another project.

    Attributes
    ----------
    name : str
        The test's name in the other project.
    run : function of a point
        Raises AssertionError if the test fails, `NotApplicable` if it does not apply.
    points : sequence of Point
        All points that the other project runs.
    unfit : function of a point, optional
        Returns why a point is not applicable; "" if it is.
    chosen : function of the fitting points, optional
        Returns the points that are run; the others are left out.
    """

    __test__ = False  # tells pytest that this is no test class

    name: str
    run: Callable[..., None]
    points: Sequence[Point]
    unfit: Callable[[Point], str] = lambda point: ""
    chosen: Callable[[Sequence[Point]], Sequence[Point]] = lambda points: points


@dataclass
class Tested:
    """How many points of a test passed, failed, were not applicable (and why) or were left out."""

    suite: str
    name: str
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    unfit: Counter[str] = field(default_factory=Counter)
    left_out: int = 0

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Count the outcomes of points."""
        for unfit, failure in outcomes:
            if unfit:
                self.unfit[unfit] += 1
            elif failure:
                self.failures.append(failure)
            else:
                self.passed += 1


class Outcome(NamedTuple):
    """The outcome of one point: why it is not applicable, why it failed, or neither."""

    unfit: str = ""
    failure: str = ""


def outcome(run: Callable[..., None], point: Point) -> Outcome:
    """Run one point of a test, and return its outcome."""
    try:
        run(**point)
    except NotApplicable as reason:
        return Outcome(unfit=str(reason))
    except Exception as error:
        return Outcome(failure=f"{words(point)}: {type(error).__name__}: {error}")
    return Outcome()


def chosen(suite: str, test: Test) -> tuple[Tested, Sequence[Point]]:
    """Return a test's counts before it runs, and the points to run."""
    result, fit = Tested(suite, test.name), []
    for point in test.points:
        if reason := test.unfit(point):
            result.unfit[reason] += 1
        else:
            fit.append(point)
    points = test.chosen(fit)
    result.left_out = len(fit) - len(points)
    return result, points


def tried(suite: str, test: Test) -> Tested:
    """Run a test's points, and return the counts."""
    result, points = chosen(suite, test)
    result.add(outcome(test.run, point) for point in points)
    return result


def words(point: Point) -> str:
    """Return a point as a line of text."""
    return ", ".join(f"{name} {value}" for name, value in point.items()) or "once"


def product(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return every point of a grid."""
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def one_of_each(*names: str) -> Callable[[Sequence[Point]], list[Point]]:
    """Return a function that picks one point per combination of values of `names`."""

    def choose(points: Sequence[Point]) -> list[Point]:
        groups: dict[Any, list[Point]] = {}
        for point in points:
            groups.setdefault(tuple(point[name] for name in names), []).append(point)
        draw = random.Random("-".join(names))
        return [draw.choice(group) for group in groups.values()]

    return choose
