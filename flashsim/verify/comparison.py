"""One table: predicted, counted by the kernels, measured by the hardware, and their ratio."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from flashsim.errors import TraceError
from flashsim.l2 import Dram, L2Model, dram
from flashsim.report import Cell, Table
from flashsim.trace import Trace
from flashsim.traffic import Traffic
from flashsim.verify.ncu import KERNELS, METRICS, Launch

_OPS = {"requested read": "load", "requested write": "store", "requested reduce": "reduce"}
_DRAM = {"DRAM read": "read", "DRAM write": "write"}


@dataclass(frozen=True)
class Row:
    """One counter of one stage's kernel, bytes or counts. None: not predicted, not counted."""

    kernel: str
    quantity: str
    predicted: int | None
    counted: int | None
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else None


@dataclass(frozen=True)
class Verification:
    """All rows of a run; prints as a table."""

    title: str
    rows: tuple[Row, ...]
    launches: int

    def worst(self, quantity: str) -> float:
        """Largest relative difference of a quantity between measured and predicted.

        Raises
        ------
        TraceError
            If no kernel has both.
        """
        ratios = [row.ratio for row in self.rows if row.quantity == quantity]
        known = [abs(ratio - 1) for ratio in ratios if ratio is not None]
        if not known:
            raise TraceError(f"no kernel has a predicted and a measured {quantity!r}")
        return max(known)

    def table(self) -> Table:
        """One row a kernel and counter."""
        table = Table(
            self.title,
            ("kernel", "quantity", "predicted", "counted", "measured", "measured / predicted"),
            note=f"means of {self.launches} launches; bytes, or counts where nothing is predicted; "
            "DRAM write: predicted are the evictions while the kernel runs, what is still dirty in "
            "L2 comes on top; the L2 model is not yet calibrated (docs/truth.md)",
        )
        for row in self.rows:
            measured: Cell = int(row.measured) if row.measured.is_integer() else row.measured
            cells = (row.kernel, row.quantity, row.predicted, row.counted, measured, row.ratio)
            table.rows.append(cells)
        return table


def verify(
    predictions: Sequence[Traffic],
    launches: Sequence[Launch],
    *,
    traces: Sequence[Trace] = (),
    l2: L2Model | None = None,
) -> Verification:
    """Set launches against predictions.

    A launch belongs to the stage that its kernel's name ends in (``flash_dq``: "dq").

    Parameters
    ----------
    predictions : sequence of Traffic
        The passes that ran, forward and backward.
    launches : sequence of Launch
        From `ncu.parse`.
    traces : sequence of Trace, optional
        What the kernels themselves counted, for the same passes.
    l2 : L2Model, optional

    Raises
    ------
    TraceError
        If no launch is a kernel of a predicted stage.
    """
    measured: dict[str, list[Launch]] = {}
    known = {stage.name for traffic in predictions for stage in traffic.stages}
    for launch in launches:
        stage = _stage(launch.kernel, known)
        if stage is not None:
            measured.setdefault(stage, []).append(launch)
    if not measured:
        raise TraceError(
            f"none of the kernels measured ({', '.join({x.kernel for x in launches})}) belongs to "
            f"a stage that was predicted ({', '.join(sorted(known))}); do the options say what ran?"
        )
    rows: list[Row] = []
    for traffic in predictions:
        left = dram(traffic, l2)
        trace = next((t for t in traces if t.direction == traffic.direction), None)
        for stage in (s.name for s in traffic.stages):
            rows += _rows(stage, measured.get(stage, []), traffic, left, trace)
    first = predictions[0]
    p = first.problem
    title = (
        f"{p.batch} x {p.heads} heads{f' ({p.kv_heads} key heads)' if p.group > 1 else ''}, "
        f"{p.n_q:,} x {p.n_kv:,}, d={p.head_dim}, {p.dtype}{', causal' if p.causal else ''}"
        f"{f', window {p.window}' if p.window else ''} on {first.device.name}"
    )
    return Verification(title, tuple(rows), sum(len(x) for x in measured.values()))


def _stage(kernel: str, known: set[str]) -> str | None:
    """The stage a kernel is, by its name; None for a kernel that is not ours.

    The pass with keys outside is one kernel, called ``dkdv`` or ``backward``, whether it also
    reduces dQ (stage "fused") or not (stage "dkdv").
    """
    found = re.search(KERNELS + r"([a-z]+)", kernel)
    if found is None:
        return None
    stage = found[1]
    if stage in ("dkdv", "backward"):
        stage = "fused" if "fused" in known else "dkdv"
    return stage if stage in known else None


def _rows(
    stage: str, launches: list[Launch], traffic: Traffic, left: Dram, trace: Trace | None
) -> list[Row]:
    rows = []
    for quantity in METRICS:
        values = [x.counters[quantity] for x in launches if quantity in x.counters]
        if not values:
            continue
        predicted, counted = None, None
        if quantity in _OPS:
            predicted = _of(traffic, stage, _OPS[quantity])
            counted = None if trace is None else _of(trace, stage, _OPS[quantity])
        elif quantity in _DRAM:
            predicted = left.bytes(_DRAM[quantity], stage=stage)
        rows.append(Row(stage, quantity, predicted, counted, fmean(values)))
    return rows


def _of(source: Traffic | Trace, stage: str, op: str) -> int:
    return sum(n for (s, o, _), n in source.transfers.items() if (s, o) == (stage, op))
