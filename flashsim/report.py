"""Tables: the same rows as text for people (Rich), as JSON, CSV or HTML for programs and pages."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Cell = str | int | float | bool | None


@dataclass
class Table:
    """Rows under named columns.

    `rows` hold plain values; `text` and `html` format them (thousands separators, units in the
    column's name), `json` and `csv` keep them exact.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    note: str = ""

    def records(self) -> list[dict[str, Cell]]:
        """One dict a row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def text(self, width: int = 100) -> str:
        """The table as plain text, drawn by Rich."""
        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=width, color_system=None).print(self.rich())
        return buffer.getvalue().rstrip("\n")

    def rich(self) -> Any:
        """A `rich.table.Table`, for a terminal."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=Text(self.title), box=box.SIMPLE_HEAD, caption=self.note or None)
        for n, name in enumerate(self.columns):
            numeric = any(isinstance(row[n], (int, float)) for row in self.rows)
            table.add_column(Text(name), justify="right" if numeric else "left")
        for row in self.rows:
            table.add_row(*(Text(format_cell(cell)) for cell in row))
        return table

    def markdown(self) -> str:
        """The table as GitHub's Markdown has it, without title and note."""
        rows = [list(self.columns), ["---"] * len(self.columns)]
        rows += [[format_cell(cell) for cell in row] for row in self.rows]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def json(self) -> str:
        """The rows as a JSON array of objects."""
        return json.dumps(self.records(), indent=2)

    def csv(self) -> str:
        """The rows as CSV with a header line."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return buffer.getvalue()

    def html(self) -> str:
        """An HTML table; every string is escaped."""
        cell = lambda tag, text: f"<{tag}>{html.escape(text)}</{tag}>"  # noqa: E731
        head = "".join(cell("th", name) for name in self.columns)
        body = "".join(
            "<tr>" + "".join(cell("td", format_cell(x)) for x in row) + "</tr>" for row in self.rows
        )
        caption = cell("caption", self.title)
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def __str__(self) -> str:
        return self.text()


def format_cell(cell: Cell) -> str:
    """One value as people read it."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return cell


def human_bytes(count: float) -> str:
    """Bytes with a decimal unit: 4,456,448 -> '4.46 MB'."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
