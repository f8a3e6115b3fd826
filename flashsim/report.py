"""Tables: the same rows, as text for people (by Rich), or as JSON, CSV, Markdown or HTML.

This module also writes files of any kind, either completely or not at all (`beside`).
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from flashsim.errors import BackendUnavailable, OptionError, printable

Cell = str | int | float | bool | None


@dataclass
class Table:
    """A table: rows of values under named columns.

    `rows` contains plain Python values. `text` and `html` format the values (thousands separators,
    units in the column's name); `json` and `csv` keep the exact values.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    note: str = ""

    def add(self, *row: Cell) -> None:
        """Add a row with these cells."""
        self.rows.append(row)

    def records(self) -> list[dict[str, Cell]]:
        """Return one dict per row, with the columns as keys."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def text(self, width: int | None = None) -> str:
        """Return the table as plain text of at most `width` columns (default: the terminal's)."""
        from rich.console import Console

        width = width or shutil.get_terminal_size((100, 24)).columns
        buffer = io.StringIO()
        # In a notebook, Rich would display the table itself and leave the buffer empty.
        console = Console(file=buffer, width=width, color_system=None, force_jupyter=False)
        console.print(self.rich(width))
        return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip("\n").split("\n"))

    def rich(self, width: int) -> Any:
        """Return the table as Rich prints it in a terminal of `width` columns, with no cell cut.

        If a table does not fit, its constant columns move into the title. If the table still does
        not fit, bytes and FLOPs get larger units. A table that is too wide even then is transposed,
        with one column per row, in as many pieces as necessary.
        """
        from rich.console import Group
        from rich.text import Text

        told = self._told()
        for table in (self, told, told._shortened()):
            numeric = [any(isinstance(x, (int, float)) for x in c) for c in table._values()]
            grids = _grids(table.columns, _texts(table), numeric, width, pieces=False)
            if grids:
                break
        else:
            table, (first, *names) = told, told.columns
            texts = _texts(told)
            sideways = [
                [name, *column]
                for name, *column in zip(names, *(t[1:] for t in texts), strict=True)
            ]
            head, right = [first, *(t[0] for t in texts)], [False, *[True] * len(texts)]
            grids = _grids(head, sideways, right, width, pieces=True)
        above, below = printable(table.title), printable(table.note)
        title: list[Any] = [Text(above, style="italic"), ""] if above else []
        note: list[Any] = ["", Text(below, style="dim")] if below else []
        return Group(*title, *grids, *note)

    def _values(self) -> list[Sequence[Cell]]:
        """Return the values of the cells, column by column."""
        return [[row[n] for row in self.rows] for n in range(len(self.columns))]

    def _told(self) -> Table:
        """Return the table with its constant columns, except the first, moved into the title."""
        if len(self.rows) < 2:
            return self
        values = self._values()
        same = {n for n, column in enumerate(values) if n and all(x == column[0] for x in column)}
        words = [_phrase(self.columns[n], values[n][0]) for n in same if values[n][0] is not None]
        keep = lambda row: [x for n, x in enumerate(row) if n not in same]  # noqa: E731
        title = ", ".join(filter(None, (self.title, *words)))
        return Table(title, keep(self.columns), [keep(row) for row in self.rows], self.note)

    def _shortened(self) -> Table:
        """Return the table with bytes and FLOPs in units that suit each column's largest value."""
        columns = list(self.columns)
        values: list[Any] = [list(row) for row in self.rows]
        for n, name in enumerate(columns):
            numbers = [row[n] for row in values if isinstance(row[n], (int, float))]
            digits = len(f"{max((abs(x) for x in numbers), default=0):.0f}")
            thousands = min((digits - 1) // 3, 6)
            prefix = ("", "k", "M", "G", "T", "P", "E")[thousands]
            named = re.sub(r"(?<![^ ])(B|FLOP)(?=s?$|/)", prefix + r"\1", name)
            if not prefix or named == name:
                continue
            columns[n] = named
            for row in values:
                if isinstance(row[n], (int, float)):
                    row[n] = row[n] / 1000**thousands
        return Table(self.title, columns, values, self.note)

    def markdown(self) -> str:
        """Return the table in GitHub's Markdown, without title and note."""
        rows = [list(self.columns), ["---"] * len(self.columns)]
        rows += [[format_cell(cell) for cell in row] for row in self.rows]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def json(self) -> str:
        """Return the rows as a JSON array of objects."""
        return json.dumps(self.records(), indent=2)

    def csv(self) -> str:
        """Return the rows as CSV with a header line."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return buffer.getvalue()

    def html(self) -> str:
        """Return the table and its note as HTML, with every string escaped."""

        # Notebooks align every cell at the right, which suits only numbers. Texts are aligned at
        # the left. Numbers are never wrapped.
        left, whole = (f' style="{rule}"' for rule in ("text-align:left", "white-space:nowrap"))
        words = [
            not any(isinstance(row[n], (int, float)) for row in self.rows)
            for n in range(len(self.columns))
        ]

        def line(tag: str, cells: Sequence[Cell]) -> str:
            texts = [html.escape(format_cell(value)) for value in cells]
            sides = [left if word else whole for word in words]
            return "".join(f"<{tag}{s}>{t}</{tag}>" for s, t in zip(sides, texts, strict=True))

        caption = f"<caption>{html.escape(self.title)}</caption>"
        body = "".join(f"<tr>{line('td', row)}</tr>" for row in self.rows)
        note = f'<tr><td colspan="{len(self.columns)}"{left}>{html.escape(self.note)}</td></tr>'
        return (
            f"<table>{caption}<thead><tr>{line('th', self.columns)}</tr></thead>"
            f"<tbody>{body}</tbody>{f'<tfoot>{note}</tfoot>' if self.note else ''}</table>"
        )

    _repr_html_ = html

    def __repr__(self) -> str:
        return f"<Table {self.title!r}: {len(self.rows):,} rows>"

    def __str__(self) -> str:
        return self.text()


def format_cell(cell: Cell) -> str:
    """Return a cell's value formatted for people."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return printable(cell)


def dataframe(rows: Sequence[Mapping[str, Cell]], columns: Sequence[str]) -> Any:
    """Return the rows as a `pandas.DataFrame`; raise `BackendUnavailable` without pandas."""
    try:
        import pandas
    except ImportError:
        raise BackendUnavailable(
            "a DataFrame needs pandas, which is not installed: "
            "pip install 'flashsim-attention[pandas]'; rows, csv() and json() work without pandas"
        ) from None
    return pandas.DataFrame(rows, columns=columns)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; at the end, rename that file to `path`.

    After an error or an interrupt, the temporary file is removed, and the old content of `path` is
    unchanged. If `path` is no regular file, such as /dev/stdout, the path itself is yielded.
    """
    if path.exists() and not path.is_file():  # resolving the path of a pipe would fail
        yield path
        return
    path = path.resolve()
    part = path.with_name(f".{secrets.token_hex(4)}-{path.name}")
    try:
        part.touch(exist_ok=False)  # fails early if the folder cannot be written
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path like `beside`; raise `OptionError` if the file cannot be written."""
    try:
        with beside(path) as part:
            yield part
    except OSError as error:
        raise OptionError(
            f"cannot write {str(path)!r}: {error.strerror or error}; the folder must exist and be "
            "writable, and the disk must have free space"
        ) from error


# -- widths of columns ----------------------------------------------------------------------------

_GAP = 2  # between columns
_WHOLE = 20  # text up to this length is not broken over lines


def _texts(table: Table) -> list[list[str]]:
    return [[format_cell(cell) for cell in row] for row in table.rows]


def _phrase(name: str, value: Cell) -> str:
    """Return a column's constant value in words: ("store B", 5) gives "store 5 B"."""
    what, _, unit = name.rpartition(" ")
    text = format_cell(value)
    return f"{what} {text} B" if unit == "B" and what else f"{name} {text}"


def _least(text: str) -> int:
    """Return a cell's least width: only texts longer than `_WHOLE` may break, at spaces."""
    if len(text) <= _WHOLE:
        return len(text)
    return max(len(word) if word[:1].isdigit() else min(len(word), _WHOLE) for word in text.split())


def _grids(
    head: Sequence[str], rows: list[list[str]], right: Sequence[bool], width: int, pieces: bool
) -> list[Any]:
    """Return the cells as Rich tables, or an empty list if they do not fit the width.

    If `pieces` is true, the cells may be split into several tables, each with the first column and
    as many of the next columns as fit.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    columns = [[name, *(row[n] for row in rows)] for n, name in enumerate(head)]
    heads = [max(map(len, name.split()), default=0) for name in head]
    least = [max(h, *map(_least, c[1:]), 0) for h, c in zip(heads, columns, strict=True)]
    wanted = [max(map(len, column)) for column in columns]
    grids: list[Any] = []
    start = 1
    while not grids or start < len(columns):
        stop = len(columns)
        used = lambda stop: [0, *range(start, stop)]  # noqa: B023, E731
        needs = lambda stop: sum(least[n] + _GAP for n in used(stop)) - _GAP  # noqa: B023, E731
        if needs(stop) > width and not pieces:
            return []
        while needs(stop) > width and stop > start + 1:
            stop -= 1
        room = width - _GAP * (len(used(stop)) - 1)
        widths = _shared([least[n] for n in used(stop)], [wanted[n] for n in used(stop)], room)
        grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for n, wide in zip(used(stop), widths, strict=True):
            justify: Any = "right" if right[n] else "left"
            grid.add_column(Text(printable(head[n])), justify=justify, width=wide, overflow="fold")
        for row in rows:
            grid.add_row(*(Text(row[n]) for n in used(stop)))
        grids += ["", grid] if grids else [grid]
        start = stop
    return grids


def _shared(least: Sequence[int], wanted: Sequence[int], room: int) -> list[int]:
    """Return the widths of columns: the `wanted` widths, cut to a common maximum that fits."""
    upto = lambda cap: [max(x, min(y, cap)) for x, y in zip(least, wanted, strict=True)]  # noqa: E731
    cap = max((c for c in range(max(wanted) + 1) if sum(upto(c)) <= room), default=0)
    widths, wider = upto(cap), upto(cap + 1)
    for n, (width, more) in enumerate(zip(widths, wider, strict=True)):
        if sum(widths) < room:  # the columns that are left over
            widths[n] = max(width, more)
    return widths


# -- values in a notebook --------------------------------------------------------------------------
# A class uses these functions as its methods: `__str__ = report.text`, `__repr__ = report.short`.


def titled(value: Any) -> str:
    """Return one line that shows an object's class and the title of the object's `table()`."""
    return f"<{type(value).__name__} {value.table().title}>"


def text(value: Any) -> str:
    """Return an object's `table()` as text."""
    return value.table().text()


def tabled(value: Any) -> str:
    """Return an object's `table()` as HTML."""
    return value.table().html()


class Tabled:
    """Base of classes with a `table()`: prints the table, and shows it in a notebook."""

    __str__, __repr__, _repr_html_ = text, titled, tabled


def short(value: Any) -> str:
    """Return a dataclass's or named tuple's fields in one line; arrays show only type and shape."""
    facts = ", ".join(f"{name} {text}" for name, text in _facts(value))
    return f"<{type(value).__name__} {facts}>"


def card(value: Any) -> str:
    """Return a dataclass's or named tuple's fields as HTML; arrays show only type and shape."""
    return Table(type(value).__name__, ("field", "value"), [*_facts(value)]).html()


_Kind = TypeVar("_Kind")


def shows_fields(kind: type[_Kind]) -> type[_Kind]:
    """Decorator for a named tuple, which then prints as `short`, and shows as `card`."""
    kind.__repr__, kind._repr_html_ = short, card  # type: ignore[method-assign, attr-defined]
    return kind


def _facts(value: Any) -> list[tuple[str, str]]:
    names = getattr(value, "_fields", None) or [f.name for f in fields(value) if f.repr]
    return [(name, _brief(held)) for name in names for held in [getattr(value, name)]]


def _brief(value: Any) -> str:
    if getattr(value, "shape", None) and hasattr(value, "dtype"):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_brief(item)}" for key, item in value.items())
    return format_cell(value) if isinstance(value, (int, float)) else repr(value)
