"""The layout of every table of published numbers: quantity, paper, ours, and why they differ."""

from flashsim.report import Cell, Table


class Published(Table):
    """A table of published numbers; its note names their source."""

    def line(self, quantity: str, paper: float | str | None, ours: Cell, why: str = "") -> None:
        """Add a row: a published and a recomputed value, and their ratio if both are numbers."""
        numbers = isinstance(paper, (int, float)) and isinstance(ours, (int, float))
        self.add(quantity, paper, ours, ours / paper if numbers and paper else None, why)  # type: ignore[operator]


def published(title: str, source: str) -> Published:
    """Return an empty table of numbers that a source published."""
    columns = ("quantity", "paper", "ours", "ours / paper", "why they differ")
    return Published(title, columns, note=source)
