"""Commands that show what is there: devices, and saved traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashsim import report
from flashsim.api.caches import live_problem
from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.output import add, event_table, figures, ready, say, show_tables
from flashsim.counts import questions
from flashsim.problem.hardware import PRESETS
from flashsim.problem.links import Link
from flashsim.problem.problem import Problem
from flashsim.schedule.splitting import fill


def devices(
    form: opt.Format, sizes: opt.Sizes, decoding: opt.Decoding, typed: typer.Context
) -> None:
    """List the GPUs that can be simulated, with the source of each figure.

    Given sizes: how many thread blocks fill each (SMs x blocks an SM), how many flash-decode has,
    and into how many parts the keys go.
    """
    if sizes.given():
        table = _filled(sizes, decoding)
        show_tables([table], [table], form)
        return
    opt.refuse_unused(typed, "the list alone: give sizes as well", only=())
    table = report.Table(
        "Devices",
        (
            *("name", "SRAM B/block", "SRAM B/SM", "registers B/SM", "SMs", "L2 B", "HBM B"),
            *("HBM GB/s", "L2 GB/s", "float16 TFLOP/s", "float32 TFLOP/s"),
            *("link", "link GB/s", "source"),
        ),
        note="float16: dense, on tensor cores; float32: CUDA cores; L2 empty: not published; "
        "link: a direction",
    )
    for d in PRESETS.values():
        table.rows.append(
            (
                *(d.name, d.sram_bytes, d.sram_per_sm, d.registers_per_sm, d.sm_count),
                *(d.l2_bytes, d.hbm_bytes, d.hbm_bandwidth / 1e9, d.l2_bandwidth / 1e9 or None),
                *(d.peak("float16") / 1e12, d.cuda_flops["float32"] / 1e12),
                *(d.link, Link.get(d.link).bandwidth / 1e9, d.source),
            )
        )
    show_tables([table], [table], form)


def _filled(sizes: opt.Sizes, decoding: opt.Decoding) -> report.Table:
    problem = decoding.posed(Problem(**{"n_q": 1, **sizes.given()}))
    how = decoding.options()
    if (prefix := how.pop("shared_prefix", None)) is not None:
        problem, _ = live_problem(problem, {"shared_prefix": prefix})
    table = report.Table(
        f"flash-decode, {questions.in_words(problem)}: blocks that fill a device",
        (
            *("name", "SMs", "tile", "blocks/SM", "blocks to fill it", "row tiles"),
            *("splits", "blocks"),
        ),
        note="row tiles: blocks, were no keys divided; a block an SM is enough for the splits auto",
    )
    for d in PRESETS.values():
        f = fill(problem, d, **how)
        splits = f.split.splits
        table.rows.append(
            (d.name, d.sm_count, str(f.tiling), f.per_sm, f.needed, f.whole, splits, f.blocks)
        )
    return table


def show(
    file: Path,
    form: opt.Format,
    events: Annotated[bool, typer.Option(help="List the events instead of totals.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many events.")] = 100,
    *,
    typed: typer.Context,
) -> None:
    """Show what a saved trace holds."""
    if not events:
        opt.refuse_unused(typed, "totals: give --events as well", never=["limit"])
    trace = values.load_trace(file)
    table = event_table(trace, limit) if events else figures(trace)
    people = table if events else trace.table()
    took = values.duration(trace)
    if took is not None and not events:
        rate = trace.flops("matmul") / took / 1e12
        people.note += f" · from first to last span {took * 1e6:.4g} µs, {rate:.4g} TFLOP/s"
        add(table, trace, "duration", "first to last span", took, "s")
        add(table, trace, "matmul rate", "all stages", rate, "TFLOP/s")
    show_tables([people], [table], form)


def perfetto(
    file: Path,
    out: Annotated[Path, typer.Option("--out", "-o", help="A .json or .json.gz file.")],
    heads: Annotated[int, typer.Option(min=1, help="Of a simulated trace: how many.")] = 1,
) -> None:
    """Write a saved trace as Chrome trace events, for https://ui.perfetto.dev."""
    ready(out, (".json", ".gz"))
    say(f"events in {values.load_trace(file).to_perfetto(out, heads=heads)}")
