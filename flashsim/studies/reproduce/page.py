"""The shape of every page: quantity, paper, ours, why they differ."""

from __future__ import annotations

from flashsim.report import Cell, Table

COLUMNS = ("quantity", "paper", "ours", "ours / paper", "why they differ")


def page(title: str, source: str) -> Table:
    """An empty page with its source below."""
    return Table(title, COLUMNS, note=source)


def line(quantity: str, paper: float | str | None, ours: Cell, why: str = "") -> tuple[Cell, ...]:
    """One row; the ratio where both are numbers. A paper without a number says so in words."""
    ratio: Cell = None
    if isinstance(paper, (int, float)) and isinstance(ours, (int, float)) and paper:
        ratio = ours / paper
    return quantity, paper, ours, ratio, why
