"""Writes the tables of docs/ that come from kept measurements anew: python benchmarks/doc_tables.py

Errors of predicted times into docs/guides/truth.md (from docs/data/times-h200.csv), counters into
docs/notebooks/counters.md (from docs/data/verify-h200.csv), and the residuals' picture. A table is
known by its first line. Needs no GPU, but numba-cuda, whose kernels' times are predicted too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import predict

from flashsim import viz
from flashsim.studies import verify

DOCS = Path(__file__).parent.parent / "docs"


def rewrite(text: str, table: str) -> str:
    """The page with a Markdown table in the place of the one that has the same head.

    Raises
    ------
    ValueError
        If the page has no such table.
    """
    head = table.splitlines()[0]
    lines = text.splitlines(keepends=True)
    if f"{head}\n" not in lines:
        raise ValueError(f"no table begins with {head}")
    start = lines.index(f"{head}\n")
    stop = next((n for n in range(start, len(lines)) if lines[n][0] != "|"), len(lines))
    return "".join([*lines[:start], table, *lines[stop:]])


def main() -> None:
    found = predict.errors(predict.measured())
    summary = verify.summary((DOCS / "data" / "verify-h200.csv").read_text())
    tables = {
        "guides/truth.md": [predict.errors_table(found)],
        "notebooks/counters.md": summary[:3],
    }
    for page, those in tables.items():
        path = DOCS / page
        text = before = path.read_text("utf-8")
        for table in those:
            text = rewrite(text, table.markdown())
        path.write_text(text, "utf-8")
        print(f"{path}: {'as it was' if text == before else 'written'}")
    picture = DOCS / "gallery" / "predicted-times.png"
    viz.predicted_against_measured(predict.pairs(found), unit="ms").figure.savefig(picture)
    print(picture)


if __name__ == "__main__":
    sys.exit(main())
