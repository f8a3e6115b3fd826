"""Points with explanations, as text, as JSON or in Gradescope's format."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flashsim.report import Table


@dataclass(frozen=True)
class Mark:
    """The points for one graded item, such as the bytes moved.

    `kind` names the mistake in one word, for programs; "" means that there is no mistake. `words`
    explains the mistake to people. If `most` is 0, the item is shown but gives no points.
    """

    name: str
    points: int
    most: int
    kind: str = ""
    words: str = ""

    @property
    def full(self) -> bool:
        """Whether the item gets all its points or, if it gives no points, has no mistake."""
        return self.points == self.most if self.most else not self.kind


def room_mark(most: int, *, all_wrong: bool, overflow: str) -> Mark:
    """Return the mark for on-chip memory; `overflow` says why the data does not fit on chip."""
    if all_wrong:
        overflow = "on-chip memory gets points only if some of the results are right"
    kind = "result" if all_wrong else "overflow" if overflow else ""
    return Mark("on-chip memory", 0 if kind else most, most, kind, overflow)


def bytes_mark(most: int, moved: int, budget: int, *, right: bool, more: Iterable[str]) -> Mark:
    """Return the mark for the bytes moved; `more` explains transfers that exceed the budget."""
    if not right:
        return Mark("bytes", 0, most, "result", "bytes get points only if all results are right")
    if moved > budget:
        lines = f"{moved:,} B moved, but full marks need at most {budget:,} B:", *more
        return Mark("bytes", min(most * budget // moved, most - 1), most, "bytes", "\n".join(lines))
    fewer = f"{budget - moved:,} B fewer than full marks need" if moved < budget else ""
    return Mark("bytes", most, most, words=fewer)


def beside(
    mine: Mapping[tuple[str, str], int], theirs: Mapping[tuple[str, str], int]
) -> tuple[tuple[str, str, int, int], ...]:
    """Return (op, tensor, bytes, the reference's bytes) for all transfers of a solution."""
    keys = dict.fromkeys([*theirs, *mine])
    return tuple((*key, mine.get(key, 0), theirs.get(key, 0)) for key in keys)


class Refused(Exception):
    """Error for a file that cannot be graded; its `kind` becomes the `Mark.kind`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, repr=False)
class Marks:
    """All marks of a graded file or of a lesson.

    Attributes
    ----------
    figures : dict
        Bytes moved ("bytes"), the most bytes that get full marks ("budget"), peak bytes on chip
        ("peak"), on-chip capacity ("sram"), and a lower bound on the bytes ("bound").
    moved : tuple of (op, tensor, bytes, the reference's bytes)
    hint : str
        The command that shows a hint; "" if there is none.
    """

    exercise: str
    marks: tuple[Mark, ...]
    figures: dict[str, int]
    moved: tuple[tuple[str, str, int, int], ...] = ()
    seconds: float = 0.0
    hint: str = ""

    @classmethod
    def none(cls, exercise: str, kind: str, text: str) -> Marks:
        """Return marks of 0 points for a file that could not be graded."""
        return cls(exercise, (Mark("the file", 0, 100, kind, text),), {})

    @property
    def points(self) -> int:
        """The sum of the points of all marks."""
        return sum(mark.points for mark in self.marks)

    @property
    def most(self) -> int:
        """The largest possible number of points: 100 for an exercise."""
        return sum(mark.most for mark in self.marks)

    def __repr__(self) -> str:
        return f"<Marks {self.exercise}: {self.points} of {self.most} points>"

    def _repr_html_(self) -> str:
        table = Table(repr(self)[1:-1], ("mark", "points", "most", "words"))
        table.rows += [(mark.name, mark.points, mark.most, mark.words) for mark in self.marks]
        return table.html()

    def text(self) -> str:
        """Return the marks as text for a terminal."""
        lines = [f"{self.exercise}: {self.points} of {self.most} points", ""]
        for mark in self.marks:
            sign = "✓" if mark.full else "✗" if not mark.points else "~"
            lines.append(f"  {sign} {mark.name:<24}{mark.points:>4} / {mark.most}")
            for part in mark.words.splitlines():
                indent = " " * (6 + len(part) - len(part.lstrip()))
                lines += textwrap.wrap(
                    part.strip(), 96, initial_indent=indent, subsequent_indent=indent
                )
        if self.moved:
            lines += ["", f"  {'':<16}{'yours':>14}{'full marks':>14}"]
            for op, tensor, mine, theirs in self.moved:
                lines.append(f"  {op + ' ' + tensor:<16}{mine:>12,} B{theirs:>12,} B")
        if "bytes" in self.figures:
            f = self.figures
            lines.append(f"  {'all':<16}{f['bytes']:>12,} B{f['budget']:>12,} B")
            lines.append(f"  {'peak on chip':<16}{f['peak']:>12,} B{f['sram']:>12,} B (capacity)")
        if "bound" in self.figures:
            lines.append(f"  {'lower bound':<16}{'':>14}{self.figures['bound']:>12,} B")
        if self.hint and self.points < self.most:
            lines += ["", f"  `{self.hint}` shows a hint."]
        return "\n".join(lines)

    def json(self) -> str:
        """Return all fields of the marks as JSON, for programs."""
        return json.dumps({**asdict(self), "points": self.points, "most": self.most}, indent=2)

    def gradescope(self) -> str:
        """Return the marks as Gradescope's ``results.json``, with one test per graded item.

        The leaderboard sorts right solutions by bytes moved, the fewest first.
        https://gradescope-autograders.readthedocs.io/en/latest/specs/ describes the format.
        """
        tests: list[dict[str, Any]] = [
            {
                "name": mark.name,
                "score": mark.points,
                "max_score": mark.most,
                "status": "passed" if mark.full else "failed",
                "output": mark.words,
            }
            for mark in self.marks
        ]
        whole: dict[str, Any] = {
            "score": self.points,
            "execution_time": round(self.seconds, 3),
            "output": self.text(),
            "output_format": "text",
            "visibility": "visible",
            "stdout_visibility": "hidden",
            "tests": tests,
        }
        results = [mark for mark in self.marks if mark.name.startswith("results")]
        if results and all(mark.points == mark.most for mark in results):
            best = {"name": "bytes moved", "value": self.figures["bytes"], "order": "asc"}
            whole["leaderboard"] = [best]
        return json.dumps(whole, indent=2)
