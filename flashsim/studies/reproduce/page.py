"""The layout of every table of published numbers: quantity, paper, ours, and why they differ."""

from __future__ import annotations

from flashsim.report import Cell, Table

COLUMNS = ("quantity", "paper", "ours", "ours / paper", "why they differ")


def page(title: str, source: str) -> Table:
    """Return an empty table for published numbers, whose note names their source."""
    return Table(title, COLUMNS, note=source)


def line(quantity: str, paper: float | str | None, ours: Cell, why: str = "") -> tuple[Cell, ...]:
    """Return a row of published and recomputed values, with their ratio if both are numbers."""
    ratio: Cell = None
    if isinstance(paper, (int, float)) and isinstance(ours, (int, float)) and paper:
        ratio = ours / paper
    return quantity, paper, ours, ratio, why
