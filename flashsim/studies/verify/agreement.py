"""Summarises the errors of predictions, from a table that `benchmarks/verify.py` wrote.

The module needs neither a GPU nor the L2 model.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

from flashsim.errors import TraceError, own_errors
from flashsim.report import Cell, Table

#: The largest relative differences that are accepted: of requested bytes, of DRAM reads if the
#: tensors exceed L2, and of DRAM reads if they fit.
REQUESTED, DRAM, DRAM_WITHIN = 0.001, 0.05, 0.10

#: Kernels that stream rows once, without tiles or matrix products.
ROW_BY_ROW = ("delta", "convert")

_COLUMNS = ("shape", "kernels", "pass", "kernel", "quantity", "predicted", "measured")
_READS, _WRITES, _SECTORS = "requested read", "requested write", "sectors written"


class Difference(NamedTuple):
    """The predicted (or None) and the measured value of one quantity (such as DRAM reads).

    The quantity is that of one kernel, `where` = (kernels, pass, kernel), on one shape. The field
    `fits` is true if all tensors of the shape stay in L2.
    """

    shape: str
    where: tuple[str, str, str]
    quantity: str
    predicted: float | None
    measured: float
    fits: bool = False

    @property
    def relative(self) -> float | None:
        """The relative error (measured - predicted) / predicted, or None if predicted is zero."""
        return self.measured / self.predicted - 1 if self.predicted else None


def read(text: str) -> list[Difference]:
    """Return the rows of a table; raise a `TraceError` if a column is missing."""
    rows = csv.DictReader(text.splitlines())
    missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise TraceError(
            "the file is not a table that benchmarks/verify.py wrote: it has no column "
            f"{missing[0]!r}; to read Nsight Compute's output, use --from instead of --summary"
        )
    found = []
    for row in rows:
        shape, *where, quantity, predicted, measured = (row[column] for column in _COLUMNS)
        value = float(predicted) if predicted else None
        fits = row.get("in L2") == "yes"  # a column that tables of large shapes may lack
        kernel: Any = tuple(where)
        found.append(Difference(shape, kernel, quantity, value, float(measured), fits))
    return found


@own_errors
def summary(text: str) -> list[Table]:
    """Return four tables: requested bytes, DRAM reads, bank conflicts, and errors above targets."""
    everything = read(text)
    rows = [row for row in everything if row.predicted is not None]
    kernels: dict[tuple[str, str, str], dict[str, list[Difference]]] = {}
    for row in rows:
        kernels.setdefault(row.where, {}).setdefault(row.quantity, []).append(row)
    wavefronts = {
        (row.shape, row.where): row.measured
        for row in everything
        if row.quantity == "shared-memory wavefronts"
    }
    return [_requested(kernels), _dram(kernels), _conflicts(kernels, wavefronts), _missed(rows)]


_Kernels = Mapping[tuple[str, str, str], Mapping[str, list[Difference]]]


def _requested(kernels: _Kernels) -> Table:
    table = Table(
        "Requested bytes and tensor FLOPs: largest difference, measured / predicted - 1, %",
        ("kernels", "pass", "kernel", "shapes", "read", "write", "sectors", "reduce", "FLOPs"),
        note="exact: no difference on any shape; empty: nothing predicted; write: compared with "
        "the bytes stored; sectors: compared with the sectors that store instructions touch, which "
        "is the most that can be written",
    )
    for key, of in kernels.items():
        cells: list[Cell] = [*key, len(of[_READS])]
        for quantity in (_READS, _WRITES, _SECTORS, "requested reduce", "tensor FLOPs"):
            cells.append(_worst(of.get(quantity, ())))
        table.rows.append(cells)
    return table


def _dram(kernels: _Kernels) -> Table:
    table = Table(
        "DRAM reads: difference, measured / predicted - 1, %",
        ("kernels", "pass", "kernel", "shapes", "median", "largest", "within 5 %", "within 10 %"),
        note="median of the absolute differences; rows count shapes",
    )
    everything: list[float] = []
    for key, of in kernels.items():
        known = _known(of.get("DRAM read", ()))
        if key[2] in ROW_BY_ROW or not known:
            continue
        everything += known
        table.add(*key, len(known), *_spread(known))
    table.add("all", "", "", len(everything), *_spread(everything))
    return table


def _spread(known: list[float]) -> tuple[Cell, ...]:
    sizes = [abs(x) for x in known]
    inside = [sum(x <= limit for x in sizes) for limit in (DRAM, DRAM_WITHIN)]
    return f"{median(sizes):.1%}"[:-1], _signed(max(known, key=abs), 1), *inside


def _conflicts(kernels: _Kernels, wavefronts: Mapping[Any, float]) -> Table:
    table = Table(
        "Shared-memory bank conflicts: measured, % of wavefronts; predicted: none",
        ("kernels", "pass", "kernel", "shapes", "median", "largest", "on"),
    )
    for key, of in kernels.items():
        rows = of.get("shared bank conflicts", ())
        if key[2] in ROW_BY_ROW or not rows:
            continue
        shares = [(100 * x.measured / wavefronts[x.shape, key], x.shape) for x in rows]
        largest, shape = max(shares)
        middle = median(share for share, _ in shares)
        table.add(*key, len(rows), f"{middle:.2f}", f"{largest:.2f}", _short(shape))
    return table


def _missed(rows: list[Difference]) -> Table:
    table = Table(
        f"Errors above {REQUESTED:.1%} (requested bytes, FLOPs), {DRAM:.0%} (DRAM reads) or "
        f"{DRAM_WITHIN:.0%} (DRAM reads of tensors that fit in L2)",
        ("kernels", "pass", "kernel", "quantity", "shape", "difference, %"),
        note="writes are listed if they are less than the bytes stored, or more than the sectors "
        "touched",
    )
    most = {(x.shape, x.where): x.predicted for x in rows if x.quantity == _SECTORS}
    for row in rows:
        known, touched = row.relative, most.get((row.shape, row.where))
        if row.quantity == _WRITES and touched and row.measured > (row.predicted or 0):
            known = max(0.0, row.measured / touched - 1)
        if known is not None and abs(known) > _limit(row):
            table.add(*row.where, row.quantity, _short(row.shape), _signed(known, 2))
    return table


def _limit(row: Difference) -> float:
    if row.quantity == "DRAM read":
        return DRAM_WITHIN if row.fits else DRAM
    aimed = (_READS, _WRITES, "requested reduce", "tensor FLOPs")
    return REQUESTED if row.quantity in aimed else float("inf")


def _known(rows: Iterable[Difference]) -> list[float]:
    return [x for row in rows if (x := row.relative) is not None]


def _worst(rows: Iterable[Difference]) -> Cell:
    known = _known(rows)
    if not known:
        return None
    worst = max(known, key=abs)
    return "exact" if worst == 0 else _signed(worst, 3)


def _signed(share: float, digits: int) -> str:
    return f"{100 * share:+.{digits}f}"


def _short(shape: str) -> str:
    return shape.replace(", bfloat16", "").split(" on ")[0]
