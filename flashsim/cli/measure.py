"""Commands that execute or count attention: run, compare, count, sweep, demo, warm."""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from flashsim import report
from flashsim.api import counting, execution
from flashsim.api.compare import compare as run_comparison
from flashsim.api.sweep import sweep as run_sweep
from flashsim.api.warm import ALGORITHMS, DIRECTIONS
from flashsim.api.warm import warm as compile_ahead
from flashsim.cli import options as opt
from flashsim.cli import pictures, values
from flashsim.cli.output import add, figures, ready, say, show_tables, working
from flashsim.errors import OptionError
from flashsim.report import beside
from flashsim.studies.demo import LIMIT
from flashsim.studies.demo import demo as run_demo
from flashsim.trace.trace import Trace

_Scale = Annotated[
    float | None,
    typer.Option(help="On Q K^T; 1 / sqrt(head_dim).", rich_help_panel="Mask and scores"),
]


def run(
    sizes: opt.Sizes,
    tensors: opt.Tensors,
    scores: opt.Scores,
    how: opt.Simulated,
    form: opt.Format,
    decoding: opt.Decoding,
    scaling: opt.Scaling,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate", help="FP8: a Hadamard rotation before scaling.", rich_help_panel="Sizes"
        ),
    ] = False,
    scale: _Scale = None,
    algorithm: opt.Algorithm = "flash2",
    backend: opt.Backend = "numpy",
    save: Annotated[
        Path | None,
        typer.Option(
            help="Write the trace to this .npz file (a backward trace to NAME-backward.npz).",
            rich_help_panel="Output",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write out and lse (and dq, dk, dv) to this .npz file.", rich_help_panel="Output"
        ),
    ] = None,
) -> None:
    """Execute attention tile by tile and show what it moved."""
    _ready_apart(save, output, how.backward)
    wide = {} if scaling.scales is None else {"dtype": "float32"}
    arrays = values.arrays(sizes, tensors, decoding.shared_prefix, **wide)
    arrays, scales = values.quantized(arrays, scaling, rotate, sizes.dtype)
    tile, backward_tile = values.tilings(how, arrays.q.shape[-1], scores.causal)
    tiles = {"forward": tile, **({"backward": backward_tile} if how.backward else {})}
    cost = values.foresee(arrays, scores, [algorithm], tiles, values.device(how), backend)
    with working("simulating", cost):
        q, k, v, cache = values.cache(arrays, decoding)
        result = execution.run(
            q,
            k,
            v,
            algorithm=algorithm,
            causal=scores.causal,
            window=values.window(scores),
            softcap=scores.softcap,
            scale=scale,
            tiling=tile,
            device=values.device(how),
            backend=backend,
            key_order=how.key_order,
            trace=True,
            **decoding.options(),
            **cache,
            **scales,
        )
        grads = None
        if how.backward:
            grads = result.backward(arrays.gradient(tensors.seed + 1), tiling=backward_tile)
    traces = [one.trace for one in (result, grads) if one is not None]
    tables, every = [trace.table() for trace in traces], [figures(trace) for trace in traces]
    if arrays.out is not None:
        difference = float(np.abs(result.out.astype(np.float64) - arrays.out).max())
        add(every[0], traces[0], "difference from the model", "largest of out", difference)
        tables[0].note += f" · largest difference from the model's output {difference:.2e}"
    show_tables(tables, every, form)
    if save is not None:
        for trace in traces:
            _save(trace, save if trace.direction == "forward" else _backward_name(save))
    if output is not None:
        found = {"out": result.out, "lse": result.lse}
        if grads is not None:
            found |= {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
        with beside(output) as part, part.open("wb") as stream:  # given a name, savez appends .npz
            np.savez(stream, allow_pickle=False, **found)
        say(f"results in {output}")


def compare(
    sizes: opt.Sizes,
    tensors: opt.Tensors,
    scores: opt.Scores,
    how: opt.Simulated,
    form: opt.Format,
    decoding: opt.Decoding,
    scale: _Scale = None,
    algorithms: opt.Algorithms = "standard,flash1,flash2",
) -> None:
    """Execute several algorithms on the same tensors, side by side."""
    arrays = values.arrays(sizes, tensors, decoding.shared_prefix)
    tile, backward_tile = values.tilings(how, arrays.q.shape[-1], scores.causal)
    names = values.parse_list("algorithms", algorithms, str)
    tiles = {"forward": tile, **({"backward": backward_tile} if how.backward else {})}
    cost = values.foresee(arrays, scores, names, tiles, values.device(how))
    with working("simulating", cost):
        q, k, v, cache = values.cache(arrays, decoding)
        comparison = run_comparison(
            q,
            k,
            v,
            algorithms=names,
            dout=arrays.gradient(tensors.seed + 1) if how.backward else None,
            causal=scores.causal,
            window=values.window(scores),
            softcap=scores.softcap,
            scale=scale,
            tiling=tile,
            backward_tiling=backward_tile,
            device=values.device(how),
            key_order=how.key_order,
            **decoding.options(),
            **cache,
            **values.unscaled(arrays),
        )
    show_tables([comparison.table()], [comparison.table()], form)


def count(
    scores: opt.Scores,
    how: opt.Simulated,
    form: opt.Format,
    decoding: opt.Decoding,
    scaling: opt.Scaling,
    sizes: opt.Sizes = opt.HEAD,
    algorithm: opt.Algorithm = "flash2",
) -> None:
    """Count what a run would move, in closed form: no data, any size."""
    problem = replace(decoding.posed(values.problem(sizes, scores)), scales=scaling.kind())
    tiles = values.tilings(how, problem.head_dim, scores.causal)
    wanted = list(zip(("forward", "backward"), tiles, strict=True))[: 1 + how.backward]
    counts = [
        counting.count(
            problem,
            algorithm=algorithm,
            direction=direction,
            tiling=tile,
            device=values.device(how),
            key_order=how.key_order,
            **decoding.options(),
        )
        for direction, tile in wanted
    ]
    show_tables([c.table() for c in counts], [figures(c) for c in counts], form)


def sweep(
    form: opt.Format,
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
    workers: Annotated[
        int, typer.Option(min=0, max=256, help="Processes, at most a point's each; 0 runs it here.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="CSV file that rows go to as they come; an interrupted sweep resumes."),
    ] = None,
) -> None:
    """Count (or simulate) every combination of comma-separated values."""
    axes: dict[str, Any] = {
        "n": values.parse_list("n", n, int),
        "head_dim": values.parse_list("head-dim", head_dim, int),
        "batch": values.parse_list("batch", batch, int),
        "heads": values.parse_list("heads", heads, int),
        "kv_heads": None if kv_heads is None else values.parse_list("kv-heads", kv_heads, int),
        "dtype": values.parse_list("dtype", dtype, str),
        "causal": values.parse_list("causal", causal, values.parse_yes),
        "window": values.parse_list("window", window, values.parse_window),
        "algorithm": values.parse_list("algorithm", algorithm, str),
        "direction": values.parse_list(
            "direction", "forward,backward" if direction == "both" else direction, str
        ),
        "tiling": values.parse_list("tiling", tiling, values.parse_tiling),
        "device": values.parse_list("device", device, str),
        "sram_bytes": None if sram is None else values.parse_list("sram", sram, int),
    }
    # Fresh processes: forking one that has threads (the progress bar's) is unsafe.
    context = multiprocessing.get_context("spawn")
    workers = min(workers, math.prod(len(axis) for axis in axes.values() if axis))
    pool = ProcessPoolExecutor(workers, mp_context=context) if workers else nullcontext()
    with pool as executor:
        try:
            result = run_sweep(**axes, method=method, executor=executor, path=out)
        except KeyboardInterrupt:  # leaving the pool would wait for the points that have begun
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
    show_tables([result.table()], [result.full_table()], form)
    if out is not None:
        say(f"rows in {out}")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the traces.")] = Path("out"),
) -> None:
    """Run a real model's tensors, check the output against the model's, compare algorithms."""
    with working("simulating a real model's attention"):
        layers = run_demo(out)
    for layer in layers:
        show_tables([layer.comparison.table(), layer.agreement()], [])
        for path in layer.files:
            say(f"trace in {path}")
    with working("drawing"):
        paths = pictures.demo_figures(layers[0].name, layers[0].comparison, out)
        for kind, path in zip(("plot", "animation", "page"), paths, strict=True):
            say(f"{kind} in {path}")
    if not all(layer.passed for layer in layers):
        say(f"the output differs from the model's by {LIMIT:g} or more")
        raise typer.Exit(1)


def warm(
    form: opt.Format,
    dtype: Annotated[str, typer.Option(help="Of q, k and v.")] = "float32",
    head_dim: Annotated[int, typer.Option("--head-dim", "-d", help="Of the pass run.")] = 64,
    direction: Annotated[str, typer.Option(help=f"{', '.join(DIRECTIONS)}.")] = "all",
    algorithm: Annotated[
        str, typer.Option("--algorithm", "-a", help=f"{', '.join(ALGORITHMS)}.")
    ] = "flash2-fused",
) -> None:
    """Compile the CPU engine (backend numba) ahead of time, and say where the code is kept."""
    with working("compiling the CPU engine"):
        done = compile_ahead(dtype, head_dim, direction, algorithm)
    table = report.Table(
        "CPU engine",
        ("dtype", "algorithm", "direction", "kernel", "compiled", "s", "CPU s", "folder"),
        [
            (
                *(done.dtype, done.algorithm, done.direction, done.kernel),
                ", ".join(done.compiled) or "nothing",
                *(round(done.seconds, 2), round(done.cpu_seconds, 2), str(done.folder)),
            )
        ],
        note="compiled: kernels; nothing where all lay on disk",
    )
    show_tables([table], [table], form)


COMMANDS = (run, compare, count, sweep, demo, warm)


def _save(trace: Trace, path: Path) -> None:
    trace.save(path)
    say(f"trace in {path}")


def _ready_apart(save: Path | None, output: Path | None, backward: bool) -> None:
    """See that the files can be written, and are not one."""
    ready(save)
    ready(output)
    traces = [] if save is None else [save, *([_backward_name(save)] if backward else [])]
    if output is not None and output.resolve() in [path.resolve() for path in traces]:
        raise OptionError(f"--save and --output would both write {str(output)!r}; name two files")


def _backward_name(path: Path) -> Path:
    return path.with_name(f"{path.stem}-backward{path.suffix}")
