"""Commands that run or count attention (run, compare, count, sweep), and show saved traces."""

import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from flashsim.api import counting, execution
from flashsim.api.compare import compare as run_comparison
from flashsim.api.compare import side_by_side
from flashsim.api.sweep import sweep as run_sweep
from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.declare import OUTPUT, Format, each, option, refuse_unused, written
from flashsim.cli.output import Tables, add, event_table, figures, ready, say, show, working
from flashsim.counts.traffic import Traffic
from flashsim.errors import OptionError
from flashsim.problem.checks import DTYPES
from flashsim.problem.problem import Problem
from flashsim.report import beside
from flashsim.schedule import plans

_SCALE = option(
    None, "Factor that multiplies Q K^T. Default: 1 / sqrt(head_dim).", panel="Mask and scores"
)


def run(
    typed: typer.Context,
    sizes: opt.Sizes,
    tensors: opt.Tensors,
    scores: opt.Scores,
    how: opt.Simulated,
    form: Format,
    decoding: opt.Decoding,
    scaling: opt.Scaling,
    rotate: bool = option(
        False, "FP8 only: rotate Q and K (Hadamard) before scaling.", panel="Sizes"
    ),
    scale: float | None = _SCALE,
    algorithm: opt.Algorithm = "flash2",
    backend: opt.Backend = "simulator",
    save: Path | None = option(
        None,
        "Save the trace in this .npz file, and a backward trace in NAME-backward.npz.",
        panel=OUTPUT,
    ),
    out: Path | None = option(
        None, "Write out and lse (and dq, dk, dv) to this .npz file.", "-o", panel=OUTPUT
    ),
) -> None:
    """Run attention tile by tile, and show the bytes that it moved."""
    _ready_apart(save, out, how.backward)
    values.check_seed(tensors, written(typed), how.backward)
    wide = {} if scaling.scales is None else {"dtype": "float32"}
    arrays = values.arrays(sizes, tensors, decoding.shared_prefix, **wide)
    arrays, scales = values.quantized(arrays, scaling, rotate, sizes.dtype)
    tiles = values.tilings(how, values.problem_of(arrays, scores), [algorithm])
    cost = values.foresee(arrays, scores, [algorithm], tiles, values.device(how), backend)
    with working("simulating", cost):
        q, k, v, cache = values.cache(arrays, decoding)
        asked = _asked(scores, how, decoding) | cache | scales
        asked |= {"scale": scale, "tiling": tiles["forward"]}
        result = execution.run(q, k, v, algorithm=algorithm, backend=backend, trace=True, **asked)
        grads = None
        if how.backward:
            grads = result.backward(arrays.gradient(tensors.seed + 1), tiling=tiles["backward"])
    traces = [ran.trace for ran in (result, grads) if ran is not None]
    tables, every = [trace.table() for trace in traces], [figures(trace) for trace in traces]
    if arrays.out is not None:
        difference = float(np.abs(result.out.astype(np.float64) - arrays.out).max())
        add(every[0], traces[0], "difference from the model", "largest of out", difference, None)
        tables[0].note += f" · largest difference from the model's output {difference:.2e}"
    show((tables, every), form)
    if save is not None:
        for trace in traces:
            path = save if trace.direction == "forward" else _backward_name(save)
            trace.save(path)
            say(f"trace in {path}")
    if out is not None:
        results = {"out": result.out, "lse": result.lse}
        if grads is not None:
            results |= {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
        with beside(out) as part, part.open("wb") as stream:  # savez appends .npz to a path
            np.savez(stream, allow_pickle=False, **results)
        say(f"results in {out}")


def compare(
    typed: typer.Context,
    sizes: opt.Sizes,
    tensors: opt.Tensors,
    scores: opt.Scores,
    decoding: opt.Decoding,
    how: opt.Simulated = opt.Simulated(tiling="same", backward_tiling="same"),
    scale: float | None = _SCALE,
    algorithm: list[str] = opt.algorithms("standard,flash1,flash2"),
    execute: bool = option(
        False,
        "Simulate on random tensors (or --input, --demo-data), and also compare the results.",
        panel="How",
    ),
) -> Tables:
    """Compare algorithms side by side, by formula or (--execute) on tensors.

    All algorithms use the same tile size: 64x64 or, if this does not fit on chip for all of them,
    the largest of 64x32, 32x32, ... that fits. With --tiling fit, each algorithm has its own tile
    size.
    """
    for name in algorithm:
        plans.check_algorithm(name)
    if not (execute or tensors.input is not None or tensors.demo_data is not None):
        refuse_unused(
            typed,
            "counting by formula, which needs no tensors (--execute does)",
            never=["seed", "scale"],
        )
        whole = values.problem(replace(sizes, n_q=512 if sizes.n_q is None else sizes.n_q), scores)
        table = side_by_side(_passes(whole, how, values.decoding_of(algorithm, decoding)))
        by_formula = "counted by formula; --execute simulates on tensors and compares results"
        table.note = f"{by_formula} · {table.note}"
        return table
    values.check_seed(tensors, written(typed), how.backward)
    arrays = values.arrays(sizes, tensors, decoding.shared_prefix)
    tiles = values.tilings(how, values.problem_of(arrays, scores), algorithm)
    with working(
        "simulating", values.foresee(arrays, scores, algorithm, tiles, values.device(how))
    ):
        q, k, v, cache = values.cache(arrays, decoding)
        asked = _asked(scores, how, decoding) | cache | values.unscaled(arrays)
        asked |= {"scale": scale, "tiling": tiles["forward"] or "fit"}
        if how.backward:
            asked["dout"] = arrays.gradient(tensors.seed + 1)
            asked["backward_tiling"] = tiles["backward"] or "fit"
        return run_comparison(q, k, v, algorithms=algorithm, **asked).table()


def _passes(
    whole: Problem, how: opt.Simulated, algorithms: Sequence[tuple[str, opt.Decoding]]
) -> list[Traffic]:
    """Count each algorithm's forward pass and, if requested, backward pass, by formula."""
    tiles = values.tilings(how, whole, [name for name, _ in algorithms])
    return [
        counting.count(
            its.posed(whole),
            algorithm=name,
            direction=direction,
            tiling=tile,
            device=values.device(how),
            key_order=how.key_order,
            **(its.options() if direction == "forward" else {}),  # a backward packs no heads
        )
        for direction, tile in tiles.items()
        for name, its in algorithms
    ]


def count(
    scores: opt.Scores,
    how: opt.Simulated,
    decoding: opt.Decoding,
    scaling: opt.Scaling,
    sizes: opt.Sizes = opt.HEAD,
    algorithm: opt.Algorithm = "flash2",
) -> Tables:
    """Count the bytes and FLOPs of attention by formula, without tensors, at any size."""
    problem = replace(decoding.posed(values.problem(sizes, scores)), scales=scaling.kind())
    counts = _passes(problem, how, [(algorithm, decoding)])
    people = [c.table() for c in counts]
    if "fit" in (how.tiling, how.backward_tiling if how.backward else how.tiling):
        fit = "the tile fits on chip and moves the fewest bytes without a mask; -t 64x64 sets it"
        people[0].note += f" · {fit}"
    return people, [figures(c) for c in counts]


def sweep(
    typed: typer.Context,
    n_q: list[int] = option(..., "Numbers of queries and keys, e.g. 1024,2048,4096.", "-n"),
    head_dim: list[int] = option("64", "Widths of a row of Q and K, e.g. 64,128.", "-d"),
    batch: list[int] = option("1", "Batch sizes.", "-b"),
    heads: list[int] = option("1", "Numbers of query heads.", "-h"),
    kv_heads: list[int] | None = option(None, "Numbers of KV heads. Default: that of query heads."),
    dtype: list[str] = option(
        "float32", f"Element types, separated by commas: {', '.join(DTYPES)}."
    ),
    causal: bool = option(False, "Causal mask; short for --mask causal."),
    mask: list[bool] = option(
        "full", "Masks: full, causal, or both as full,causal.", read=each(values.parse_mask)
    ),
    window: list[tuple[int, int] | None] = option(
        "none",
        "Sliding windows, LEFT:RIGHT: the keys that each query sees before and after its own; or "
        "none.",
        read=each(values.parse_window),
    ),
    algorithm: list[str] = opt.algorithms("flash2"),
    direction: list[str] = option("forward", "Pass: forward, backward or both."),
    tiling: list[Any] = option(
        "fit", "Tile sizes, e.g. 64x64,128x64,fit,fa2-forward.", "-t", each(values.parse_tiling)
    ),
    device: list[str] = option("H100", "GPUs to simulate; `flashsim study devices` lists them."),
    sram: list[int] | None = option(
        None, "On-chip memory per thread block in bytes. Default: that of --device."
    ),
    method: str = option(
        "count", "How each point is counted: count (by formula) or run (simulated)."
    ),
    workers: int = option(
        0, "Number of worker processes; 0 runs everything in this process.", min=0, max=256
    ),
    out: Path | None = option(
        None,
        "CSV file to which each row is written when it is ready; a stopped sweep continues from "
        "this file.",
        "-o",
    ),
) -> Tables:
    """Count or simulate every combination of values; most options accept lists with commas."""
    if causal and "mask" in written(typed):
        raise OptionError("--causal is short for --mask causal; pass only one of them")
    axes: dict[str, Any] = {
        **{"n": n_q, "head_dim": head_dim, "batch": batch, "heads": heads, "kv_heads": kv_heads},
        **{"dtype": dtype, "causal": [True] if causal else mask, "window": window},
        **{"algorithm": algorithm, "tiling": tiling, "device": device, "sram_bytes": sram},
        "direction": ["forward", "backward"] if direction == ["both"] else direction,
    }
    # "spawn", because forking a process with threads (the progress bar's) is unsafe.
    context = multiprocessing.get_context("spawn")
    workers = min(workers, math.prod(len(axis) for axis in axes.values() if axis))
    pool = ProcessPoolExecutor(workers, mp_context=context) if workers else nullcontext()
    with pool as executor:
        try:
            result = run_sweep(**axes, method=method, executor=executor, path=out)
        except (KeyboardInterrupt, SystemExit):
            # Leaving the pool would wait for points that are being computed.
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
    if out is not None:
        say(f"rows in {out}")
    return [result.table()], [result.full_table()]


def _asked(scores: opt.Scores, how: opt.Simulated, decoding: opt.Decoding) -> dict[str, Any]:
    """Return the options of a run as keyword arguments of `flashsim.run`."""
    return {
        **{"causal": scores.causal, "window": values.window(scores), "softcap": scores.softcap},
        **{"device": values.device(how), "key_order": how.key_order},
        **decoding.options(),
    }


def _ready_apart(save: Path | None, out: Path | None, backward: bool) -> None:
    """Check that both output files can be written, and that their paths differ."""
    ready(save)
    ready(out)
    traces = [] if save is None else [save, *([_backward_name(save)] if backward else [])]
    if out is not None and out.resolve() in [path.resolve() for path in traces]:
        raise OptionError(
            f"--save and --out name the same file, {str(out)!r}; name two different files"
        )


def _backward_name(path: Path) -> Path:
    return path.with_name(f"{path.stem}-backward{path.suffix}")


def trace_show(
    typed: typer.Context,
    file: Path,
    events: bool = option(False, "List the events instead of totals."),
    limit: int = option(100, "The most events to list.", min=1),
) -> Tables:
    """Show the contents of a saved trace."""
    if not events:
        refuse_unused(typed, "totals (pass --events too)", never=["limit"])
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


def trace_perfetto(
    file: Path,
    out: Path = option(..., "File to write: .json or .json.gz.", "-o"),
    heads: int = option(1, "For a simulated trace: number of heads to write.", min=1),
) -> None:
    """Write a saved trace as Chrome trace events, for https://ui.perfetto.dev."""
    ready(out, (".json", ".gz"))
    say(f"events in {values.load_trace(file).to_perfetto(out, heads=heads)}")
