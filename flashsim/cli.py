"""The `flashsim` command. Tables for people, ``--json`` and ``--csv`` for programs."""

from __future__ import annotations

import errno
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from typer.core import TyperGroup

from flashsim import api, plans, report, traffic
from flashsim import cli_options as opt
from flashsim.compare import compare as run_comparison
from flashsim.demo import LIMIT
from flashsim.demo import demo as run_demo
from flashsim.errors import FlashSimError, OptionError
from flashsim.hardware import PRESETS
from flashsim.problem import Problem
from flashsim.sweep import sweep as run_sweep
from flashsim.trace import LEVELS, OPS, TENSORS, Trace
from flashsim.traffic import Traffic
from flashsim.version import __version__
from flashsim.work import KINDS

#: Columns for tables that do not go to a terminal.
WIDTH = 200


class _Group(TyperGroup):
    """Turns our errors, and the system's about files, into one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlashSimError as error:
            typer.echo(f"flashsim: {error}", err=True)
        except OSError as error:
            if error.errno == errno.EPIPE:  # `flashsim ... | head`: click ends quietly
                raise
            typer.echo(f"flashsim: {error}", err=True)
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Watch FlashAttention move its tiles, and count every byte.",
)
trace_app = typer.Typer(no_args_is_help=True, help="Look into saved traces.")
app.add_typer(trace_app, name="trace")


def main() -> None:
    """Entry point of the `flashsim` command."""
    app()


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"flashsim {__version__}")
        raise typer.Exit


@app.command()
def run(
    n_q: opt.Nq = None,
    n_kv: opt.Nkv = None,
    head_dim: opt.HeadDim = None,
    head_dim_v: opt.HeadDimV = None,
    batch: opt.Batch = None,
    heads: opt.Heads = None,
    kv_heads: opt.KvHeads = None,
    dtype: opt.Dtype = None,
    seed: opt.Seed = 0,
    input: opt.Input = None,
    demo_data: opt.DemoData = None,
    causal: opt.Causal = False,
    window: opt.Window = None,
    softcap: opt.Softcap = 0.0,
    scale: opt.Scale = None,
    algorithm: opt.Algorithm = "flash2",
    backward: opt.Backward = False,
    tiling: opt.Tile = "fit",
    device: opt.DeviceName = "H100",
    sram: opt.Sram = None,
    key_order: opt.KeyOrder = "ascending",
    backend: opt.Backend = "numpy",
    json: opt.Json = False,
    csv: opt.Csv = False,
    save: opt.Save = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write out and lse (and dq, dk, dv) to this .npz file."),
    ] = None,
) -> None:
    """Execute attention tile by tile and show what it moved."""
    sizes = _sizes(n_q, n_kv, head_dim, head_dim_v, batch, heads, kv_heads, dtype)
    arrays = opt.read_arrays(sizes, seed, input, demo_data)
    tile = opt.choose_tiling(tiling, arrays.q.shape[-1], causal)
    with _working("simulating"):
        result = api.run(
            *arrays[:3],
            algorithm=algorithm,
            causal=causal,
            window=opt.parse_window(window) if window else None,
            softcap=softcap,
            scale=scale,
            tiling=tile,
            device=opt.choose_device(device, sram),
            backend=backend,
            key_order=key_order,
            trace=True,
        )
        grads = result.backward(arrays.gradient(seed + 1), tiling=tile) if backward else None
    passes = [result, *([grads] if grads else [])]
    traces = [part.trace for part in passes if part.trace is not None]
    tables = [_figures(trace) for trace in traces]
    if arrays.out is not None:
        difference = float(np.abs(result.out.astype(np.float64) - arrays.out).max())
        _add(tables[0], traces[0], "largest difference from the model's output", None, difference)
    _show([table for t in traces for table in (t.table(),)], tables, json, csv)
    if save is not None:
        for trace in traces:
            _save(trace, save if trace.direction == "forward" else _backward_name(save))
    if output is not None:
        found = {"out": result.out, "lse": result.lse}
        if grads is not None:
            found |= {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
        _folder(output)
        with output.open("wb") as stream:  # given a name, savez would append .npz to it
            np.savez(stream, allow_pickle=False, **found)
        _say(f"results in {output}")


@app.command()
def compare(
    n_q: opt.Nq = None,
    n_kv: opt.Nkv = None,
    head_dim: opt.HeadDim = None,
    head_dim_v: opt.HeadDimV = None,
    batch: opt.Batch = None,
    heads: opt.Heads = None,
    kv_heads: opt.KvHeads = None,
    dtype: opt.Dtype = None,
    seed: opt.Seed = 0,
    input: opt.Input = None,
    demo_data: opt.DemoData = None,
    causal: opt.Causal = False,
    window: opt.Window = None,
    softcap: opt.Softcap = 0.0,
    scale: opt.Scale = None,
    algorithms: Annotated[
        str, typer.Option("--algorithms", "-a", help=f"Of {', '.join(plans.ALGORITHMS)}.")
    ] = "standard,flash1,flash2",
    backward: opt.Backward = False,
    tiling: opt.Tile = "fit",
    device: opt.DeviceName = "H100",
    sram: opt.Sram = None,
    key_order: opt.KeyOrder = "ascending",
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """Execute several algorithms on the same tensors, side by side."""
    sizes = _sizes(n_q, n_kv, head_dim, head_dim_v, batch, heads, kv_heads, dtype)
    arrays = opt.read_arrays(sizes, seed, input, demo_data)
    with _working("simulating"):
        comparison = run_comparison(
            *arrays[:3],
            algorithms=opt.parse_list("algorithms", algorithms, str),
            dout=arrays.gradient(seed + 1) if backward else None,
            causal=causal,
            window=opt.parse_window(window) if window else None,
            softcap=softcap,
            scale=scale,
            tiling=opt.choose_tiling(tiling, arrays.q.shape[-1], causal),
            device=opt.choose_device(device, sram),
            key_order=key_order,
        )
    _show([comparison.table()], [comparison.table()], json, csv)


@app.command()
def count(
    n_q: opt.Nq = 4096,
    n_kv: opt.Nkv = None,
    head_dim: opt.HeadDim = 64,
    head_dim_v: opt.HeadDimV = None,
    batch: opt.Batch = 1,
    heads: opt.Heads = 1,
    kv_heads: opt.KvHeads = None,
    dtype: opt.Dtype = "float32",
    causal: opt.Causal = False,
    window: opt.Window = None,
    softcap: opt.Softcap = 0.0,
    algorithm: opt.Algorithm = "flash2",
    backward: opt.Backward = False,
    tiling: opt.Tile = "fit",
    device: opt.DeviceName = "H100",
    sram: opt.Sram = None,
    key_order: opt.KeyOrder = "ascending",
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """Count what a run would move, in closed form: no data, any size."""
    sizes = _sizes(n_q, n_kv, head_dim, head_dim_v, batch, heads, kv_heads, dtype)
    seen = opt.parse_window(window) if window else None
    problem = Problem(**sizes, causal=causal, window=seen, softcap=softcap)
    counts = [
        api.count(
            problem,
            algorithm=algorithm,
            direction=direction,
            tiling=opt.choose_tiling(tiling, problem.head_dim, causal),
            device=opt.choose_device(device, sram),
            key_order=key_order,
        )
        for direction in plans.DIRECTIONS[: 1 + backward]
    ]
    _show([c.table() for c in counts], [_figures(c) for c in counts], json, csv)


@app.command()
def sweep(
    n: Annotated[str, typer.Option("--n", "-n", help="Lengths, e.g. 1024,2048,4096.")],
    head_dim: Annotated[str, typer.Option("--head-dim", "-d")] = "64",
    batch: Annotated[str, typer.Option("--batch", "-b")] = "1",
    heads: Annotated[str, typer.Option("--heads", "-h")] = "1",
    kv_heads: Annotated[str | None, typer.Option(help="As query heads.")] = None,
    dtype: str = "float32",
    causal: Annotated[str, typer.Option(help="no, yes or no,yes.")] = "no",
    window: Annotated[str, typer.Option(help="LEFT:RIGHT or none.")] = "none",
    algorithm: Annotated[str, typer.Option("--algorithm", "-a")] = "flash2",
    direction: Annotated[str, typer.Option(help="forward, backward or both.")] = "forward",
    tiling: Annotated[
        str, typer.Option("--tiling", "-t", help="E.g. 64x64,128x64,fit,fa2-forward.")
    ] = "fit",
    device: str = "H100",
    sram: Annotated[str | None, typer.Option(help="Bytes on chip.")] = None,
    method: Annotated[str, typer.Option(help="count (closed form) or run (simulate).")] = "count",
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 runs it here.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="CSV file that rows go to as they come; an interrupted sweep resumes."),
    ] = None,
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """Count (or simulate) every combination of comma-separated values."""
    values = {
        "n": opt.parse_list("n", n, int),
        "head_dim": opt.parse_list("head-dim", head_dim, int),
        "batch": opt.parse_list("batch", batch, int),
        "heads": opt.parse_list("heads", heads, int),
        "kv_heads": opt.parse_list("kv-heads", kv_heads, int) if kv_heads else None,
        "dtype": opt.parse_list("dtype", dtype, str),
        "causal": opt.parse_list("causal", causal, opt.parse_yes),
        "window": opt.parse_list("window", window, opt.parse_window),
        "algorithm": opt.parse_list("algorithm", algorithm, str),
        "direction": opt.parse_list("direction", direction, str),
        "tiling": opt.parse_list("tiling", tiling, opt.parse_tiling),
        "device": opt.parse_list("device", device, str),
        "sram_bytes": opt.parse_list("sram", sram, int) if sram else None,
    }
    # Fresh processes: forking one that has threads (the progress bar's) is unsafe.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context) if workers else nullcontext()
    with pool as executor:
        result = run_sweep(**values, method=method, executor=executor, path=out)
    _show([result.table()], [result.full_table()], json, csv)
    if out is not None:
        _say(f"rows in {out}")


@app.command()
def devices(json: opt.Json = False, csv: opt.Csv = False) -> None:
    """List the GPUs that can be simulated, with the source of each figure."""
    table = report.Table(
        "Devices",
        (
            *("name", "SRAM B/block", "SRAM B/SM", "registers B/SM", "SMs", "L2 B", "HBM B"),
            *("HBM GB/s", "L2 GB/s", "float16 TFLOP/s", "float32 TFLOP/s", "source"),
        ),
        note="float16: dense, on tensor cores; float32: CUDA cores; L2 empty: not published",
    )
    for d in PRESETS.values():
        table.rows.append(
            (
                *(d.name, d.sram_bytes, d.sram_per_sm, d.registers_per_sm, d.sm_count),
                *(d.l2_bytes, d.hbm_bytes, d.hbm_bandwidth / 1e9, d.l2_bandwidth / 1e9 or None),
                *(d.peak("float16") / 1e12, d.cuda_flops["float32"] / 1e12, d.source),
            )
        )
    _show([table], [table], json, csv)


@trace_app.command()
def show(
    file: Path,
    events: Annotated[bool, typer.Option(help="List the events instead of totals.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many events.")] = 100,
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """Show what a saved trace holds."""
    trace = Trace.load(file)
    table = _events(trace, limit) if events else _figures(trace)
    _show([table if events else trace.table()], [table], json, csv)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the traces.")] = Path("out"),
) -> None:
    """Run a real model's tensors, check the output against the model's, compare algorithms."""
    with _working("simulating a real model's attention"):
        layers = run_demo(out)
    console = _console()
    for layer in layers:
        console.print(layer.comparison.table().rich())
        console.print(
            f"{layer.name}: largest difference from the model's own output "
            f"{layer.difference:.2e}, limit {LIMIT:g}: {'ok' if layer.passed else 'TOO LARGE'}",
            highlight=False,
        )
        for path in layer.files:
            console.print(f"trace in {path}", highlight=False, soft_wrap=True)
    if not all(layer.passed for layer in layers):
        raise typer.Exit(1)


# -- what commands share --------------------------------------------------------------------------


def _sizes(*values: Any) -> dict[str, Any]:
    names = ("n_q", "n_kv", "head_dim", "head_dim_v", "batch", "heads", "kv_heads", "dtype")
    return dict(zip(names, values, strict=True))


_FIGURES = ("algorithm", "direction", "tile", "quantity", "of", "value", "unit")


def _figures(source: Trace | Traffic) -> report.Table:
    """Every figure of a run or count, one a row."""
    table = report.Table(f"{source.algorithm} {source.direction}", _FIGURES)
    for tensor, row in source.by_tensor().items():
        for op, nbytes in row.items():
            if nbytes:
                _add(table, source, op, tensor, nbytes, "B")
    for op in traffic.OPS:
        _add(table, source, op, "all tensors", source.bytes(op), "B")
    _add(table, source, "requested", "all tensors", source.bytes(), "B")
    _add(table, source, "compulsory", "all tensors", source.compulsory(), "B")
    for kind in KINDS:
        _add(table, source, "flops", kind, source.flops(kind), "FLOP")
    _add(table, source, "flops", "all kinds", source.flops(), "FLOP")
    _add(table, source, "intensity", None, source.intensity(), "FLOP/B")
    for op in ("read", "write"):
        _add(table, source, "on chip", op, source.on_chip(op), "B")
    _add(table, source, "peak SRAM", "one block", source.peak_sram(), "B")
    problem, algorithm = source.problem, source.algorithm
    _add(table, source, "saved for backward", None, traffic.saved(problem, algorithm), "B")
    workspace = traffic.workspace(problem, algorithm, source.direction)
    _add(table, source, "workspace", None, workspace, "B")
    return table


def _add(
    table: report.Table,
    source: Trace | Traffic,
    quantity: str,
    of: str | None,
    value: float,
    unit: str | None = None,
) -> None:
    what = (source.algorithm, source.direction, str(source.tiling))
    table.rows.append((*what, quantity, of, value, unit))


def _events(trace: Trace, limit: int) -> report.Table:
    columns = ("stage", "op", "tensor", "level", "head", "i", "j", "visit", "bytes")
    table = report.Table(f"{trace.n_events:,} events, the first {limit:,}", columns)
    for e in trace.events[:limit]:
        name, op, tensor = trace.stages[e["stage"]].name, OPS[e["op"]], TENSORS[e["tensor"]]
        numbers = (int(e[field]) for field in columns[4:])
        table.rows.append((name, op, tensor, LEVELS[e["level"]], *numbers))
    return table


def _show(people: list[report.Table], full: list[report.Table], json: bool, csv: bool) -> None:
    """Print tables for people, or everything there is as one JSON array or one CSV."""
    if json and csv:
        raise OptionError("--json and --csv are two formats; give one of them")
    if not json and not csv:
        for table in people:
            _console().print(table.rich())
        return
    rows = [row for table in full for row in table.rows]
    table = report.Table("", full[0].columns, rows)
    typer.echo(table.json() if json else table.csv(), nl=json)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH)


@contextmanager
def _working(text: str) -> Iterator[None]:
    """A spinner while something takes long; only on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(text):
        yield


def _say(text: str) -> None:
    """News about files go to stderr: stdout holds the figures alone."""
    typer.echo(text, err=True)


def _save(trace: Trace, path: Path) -> None:
    _folder(path)
    trace.save(path)
    _say(f"trace in {path}")


def _backward_name(path: Path) -> Path:
    return path.with_name(f"{path.stem}-backward{path.suffix}")


def _folder(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
