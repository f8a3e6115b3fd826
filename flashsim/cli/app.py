"""The `flashsim` command. Tables for people, ``--json`` and ``--csv`` for programs."""

from __future__ import annotations

import errno
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer.core import TyperGroup

from flashsim import report
from flashsim.api import counting, execution
from flashsim.api.compare import compare as run_comparison
from flashsim.api.sweep import sweep as run_sweep
from flashsim.cli import options as opt
from flashsim.cli import pictures as cli_viz
from flashsim.cli import truth
from flashsim.cli.output import add, event_table, figures, say, show_tables, working
from flashsim.errors import FlashSimError
from flashsim.problem.hardware import PRESETS
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.studies.demo import LIMIT
from flashsim.studies.demo import demo as run_demo
from flashsim.trace.trace import Trace
from flashsim.version import __version__


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
truth.register(app)
cli_viz.register(app)


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
    backward_tiling: opt.BackwardTile = "fit",
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
    d = arrays.q.shape[-1]
    tile, backward_tile = (opt.choose_tiling(t, d, causal) for t in (tiling, backward_tiling))
    with working("simulating"):
        result = execution.run(
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
        grads = None
        if backward:
            grads = result.backward(arrays.gradient(seed + 1), tiling=backward_tile)
    passes = (result.trace, grads.trace if grads is not None else None)
    traces = [trace for trace in passes if trace is not None]
    tables, every = [trace.table() for trace in traces], [figures(trace) for trace in traces]
    if arrays.out is not None:
        difference = float(np.abs(result.out.astype(np.float64) - arrays.out).max())
        add(every[0], traces[0], "difference from the model", "largest of out", difference)
        tables[0].note += f" · largest difference from the model's output {difference:.2e}"
    show_tables(tables, every, json, csv)
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
        say(f"results in {output}")


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
    backward_tiling: opt.BackwardTile = "fit",
    device: opt.DeviceName = "H100",
    sram: opt.Sram = None,
    key_order: opt.KeyOrder = "ascending",
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """Execute several algorithms on the same tensors, side by side."""
    sizes = _sizes(n_q, n_kv, head_dim, head_dim_v, batch, heads, kv_heads, dtype)
    arrays = opt.read_arrays(sizes, seed, input, demo_data)
    with working("simulating"):
        comparison = run_comparison(
            *arrays[:3],
            algorithms=opt.parse_list("algorithms", algorithms, str),
            dout=arrays.gradient(seed + 1) if backward else None,
            causal=causal,
            window=opt.parse_window(window) if window else None,
            softcap=softcap,
            scale=scale,
            tiling=opt.choose_tiling(tiling, arrays.q.shape[-1], causal),
            backward_tiling=opt.choose_tiling(backward_tiling, arrays.q.shape[-1], causal),
            device=opt.choose_device(device, sram),
            key_order=key_order,
        )
    show_tables([comparison.table()], [comparison.table()], json, csv)


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
    backward_tiling: opt.BackwardTile = "fit",
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
    wanted = [("forward", tiling), *([("backward", backward_tiling)] if backward else [])]
    counts = [
        counting.count(
            problem,
            algorithm=algorithm,
            direction=direction,
            tiling=opt.choose_tiling(tile, problem.head_dim, causal),
            device=opt.choose_device(device, sram),
            key_order=key_order,
        )
        for direction, tile in wanted
    ]
    show_tables([c.table() for c in counts], [figures(c) for c in counts], json, csv)


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
    values: dict[str, Any] = {
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
    show_tables([result.table()], [result.full_table()], json, csv)
    if out is not None:
        say(f"rows in {out}")


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
    show_tables([table], [table], json, csv)


@trace_app.command()
def show(
    file: Path,
    events: Annotated[bool, typer.Option(help="List the events instead of totals.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many events.")] = 100,
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """Show what a saved trace holds."""
    trace = opt.load_trace(file)
    table = event_table(trace, limit) if events else figures(trace)
    show_tables([table if events else trace.table()], [table], json, csv)


@trace_app.command()
def perfetto(
    file: Path,
    out: Annotated[Path, typer.Option("--out", "-o", help="A .json or .json.gz file.")],
    heads: Annotated[int, typer.Option(min=1, help="Of a simulated trace: how many.")] = 1,
) -> None:
    """Write a saved trace as Chrome trace events, for https://ui.perfetto.dev."""
    out.parent.mkdir(parents=True, exist_ok=True)
    say(f"events in {opt.load_trace(file).to_perfetto(out, heads=heads)}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the traces.")] = Path("out"),
) -> None:
    """Run a real model's tensors, check the output against the model's, compare algorithms."""
    with working("simulating a real model's attention"):
        layers = run_demo(out)
    for layer in layers:
        show_tables([layer.comparison.table(), layer.agreement()], [], False, False)
        for path in layer.files:
            say(f"trace in {path}")
    with working("drawing"):
        pictures = cli_viz.demo_figures(layers[0].name, layers[0].comparison, out)
        for kind, path in zip(("plot", "animation", "page"), pictures, strict=True):
            say(f"{kind} in {path}")
    if not all(layer.passed for layer in layers):
        say(f"the output differs from the model's by {LIMIT:g} or more")
        raise typer.Exit(1)


# -- what commands share --------------------------------------------------------------------------


def _sizes(*values: Any) -> dict[str, Any]:
    names = ("n_q", "n_kv", "head_dim", "head_dim_v", "batch", "heads", "kv_heads", "dtype")
    return dict(zip(names, values, strict=True))


def _save(trace: Trace, path: Path) -> None:
    _folder(path)
    trace.save(path)
    say(f"trace in {path}")


def _backward_name(path: Path) -> Path:
    return path.with_name(f"{path.stem}-backward{path.suffix}")


def _folder(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
