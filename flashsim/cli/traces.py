"""Commands that read saved traces: show, perfetto."""

from __future__ import annotations

from pathlib import Path

import typer

from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.output import Tables, add, event_table, figures, ready, say


def show(
    file: Path,
    events: bool = opt.option(False, "List the events instead of totals."),
    limit: int = opt.option(100, "The most events to list.", min=1),
    *,
    typed: typer.Context,
) -> Tables:
    """Show the contents of a saved trace."""
    if not events:
        opt.refuse_unused(typed, "totals (pass --events too)", never=["limit"])
    trace = values.load_trace(file)
    table = event_table(trace, limit) if events else figures(trace)
    people = table if events else trace.table()
    took = values.duration(trace)
    if took is not None and not events:
        rate = trace.flops("matmul") / took / 1e12
        people.note += f" · from first to last span {took * 1e6:.4g} µs, {rate:.4g} TFLOP/s"
        add(table, trace, "duration", "first to last span", took, "s")
        add(table, trace, "matmul rate", "all stages", rate, "TFLOP/s")
    return [people], [table]


def perfetto(
    file: Path,
    out: Path = opt.option(opt.REQUIRED, "File to write: .json or .json.gz.", "-o"),
    heads: int = opt.option(1, "For a simulated trace: number of heads to write.", min=1),
) -> None:
    """Write a saved trace as Chrome trace events, for https://ui.perfetto.dev."""
    ready(out, (".json", ".gz"))
    say(f"events in {values.load_trace(file).to_perfetto(out, heads=heads)}")
