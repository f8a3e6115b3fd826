"""Commands that hold flashsim against caches, papers and counters: dram, roofline, ..."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flashsim.api import counting
from flashsim.cli import options as opt
from flashsim.cli.output import show_tables, working
from flashsim.errors import OptionError
from flashsim.l2 import L2Model
from flashsim.problem.problem import Problem
from flashsim.report import Table


def register(app: typer.Typer) -> None:
    """Add these commands to the `flashsim` command."""
    for command in (dram, roofline, ladder, predict, reproduce, verify):
        app.command()(command)


def dram(
    n_q: opt.Nq = 4096,
    n_kv: opt.Nkv = None,
    head_dim: opt.HeadDim = 128,
    batch: opt.Batch = 1,
    heads: opt.Heads = 16,
    kv_heads: opt.KvHeads = None,
    dtype: opt.Dtype = "bfloat16",
    causal: opt.Causal = False,
    algorithm: opt.Algorithm = "flash2",
    backward: opt.BackwardInstead = False,
    tiling: opt.Tile = "fit",
    device: opt.DeviceName = "H100",
    launch: opt.Launch = "head-first",
    walk: opt.Walk = "straight",
    blocks_per_sm: opt.BlocksPerSm = None,
    partitions: opt.Partitions = None,
    jitter: opt.Jitter = L2Model.jitter * 1e6,
    warm: opt.Warm = False,
    l2_sizes: opt.L2Sizes = None,
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """Predict DRAM bytes: replay a run's tile requests through a model of the L2 cache."""
    from flashsim import l2

    problem = Problem(n_q, n_kv, head_dim, head_dim, batch, heads, kv_heads, dtype, causal)
    model = L2Model(launch, walk, blocks_per_sm, partitions, jitter=jitter * 1e-6, flush=not warm)
    requested = _count(problem, algorithm, backward, tiling, device)
    with working("replaying"):
        if l2_sizes is None:
            table = l2.dram(requested, model).table()
        else:
            sizes = opt.parse_list("l2-sizes", l2_sizes, float)
            table = _at_sizes(l2.curves(requested, model), sizes)
    show_tables([table], [table], json, csv)


def roofline(
    n_q: opt.Nq = 4096,
    n_kv: opt.Nkv = None,
    head_dim: opt.HeadDim = 128,
    batch: opt.Batch = 1,
    heads: opt.Heads = 16,
    kv_heads: opt.KvHeads = None,
    dtype: opt.Dtype = "bfloat16",
    causal: opt.Causal = False,
    algorithms: Annotated[str, typer.Option("--algorithms", "-a")] = "standard,flash2",
    backward: opt.BackwardInstead = False,
    tiling: opt.Tile = "fit",
    device: opt.DeviceName = "H100",
    seconds: Annotated[float | None, typer.Option(help="Measured time of the kernels.")] = None,
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """Set intensity against ridge points, for each way of counting bytes."""
    from flashsim.studies import roofline as rooflines

    problem = Problem(n_q, n_kv, head_dim, head_dim, batch, heads, kv_heads, dtype, causal)
    tables = []
    with working("replaying"):
        for algorithm in opt.parse_list("algorithms", algorithms, str):
            counted = _count(problem, algorithm, backward, tiling, device)
            tables.append(rooflines.roofline(counted, seconds=seconds).table())
    show_tables(tables, tables, json, csv)


def ladder(
    n_q: opt.Nq = 512,
    n_kv: opt.Nkv = None,
    head_dim: opt.HeadDim = 64,
    dtype: opt.Dtype = "float32",
    tiling: opt.Tile = "32x64",
    device: opt.DeviceName = "H100",
    rungs: Annotated[str | None, typer.Option(help="Names with commas; default: all.")] = None,
    magnify: Annotated[float, typer.Option(help="Multiplies Q: large scores.")] = 1.0,
    seed: opt.Seed = 0,
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """Climb from a naive softmax to FlashAttention: each rung executed, counted, predicted."""
    from flashsim.studies import ladder as rungs_of

    assert n_q is not None
    assert head_dim is not None
    assert dtype is not None
    climb = rungs_of.climb(
        n_q,
        n_kv or n_q,
        head_dim,
        dtype=dtype,
        tiling=opt.choose_tiling(tiling, head_dim, False),
        device=device,
        rungs=None if rungs is None else opt.parse_list("rungs", rungs, str),
        magnify=magnify,
        seed=seed,
    )
    table = climb.table()
    show_tables([table], [table], json, csv)


def predict(
    n_q: opt.Nq = 4096,
    n_kv: opt.Nkv = None,
    head_dim: opt.HeadDim = 128,
    batch: opt.Batch = 4,
    heads: opt.Heads = 16,
    kv_heads: opt.KvHeads = None,
    dtype: opt.Dtype = "bfloat16",
    causal: opt.Causal = False,
    window: opt.Window = None,
    algorithm: opt.KernelAlgorithm = "flash2",
    backward: opt.BackwardInstead = False,
    tiling: opt.KernelTile = "fit",
    device: opt.DeviceName = "H200",
    kernel: opt.Family = "hopper",
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """Predict how long the kernels of backend cupy take: units, overlap, waves and tails.

    Needs no GPU. Calibrated on one H200; docs/truth.md says how far it is off.
    """
    from flashsim.studies import predict as model

    seen = opt.parse_window(window) if window else None
    problem = Problem(n_q, n_kv, head_dim, head_dim, batch, heads, kv_heads, dtype, causal, seen)
    table = model.predict(
        problem,
        direction="backward" if backward else "forward",
        algorithm=algorithm,
        kernels=kernel,
        tiling=opt.choose_tiling(tiling, head_dim or 0, causal),
        device=device,
    ).table()
    show_tables([table], [table], json, csv)


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Leave out to list names; or `all`.")] = None,
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """Recompute published numbers: paper, ours, and why they differ."""
    from flashsim.studies import reproduce as pages

    if name is None:
        tables = pages.listing()
        show_tables(tables, tables[:1], json, csv)
        return
    for each in pages.NAMES if name == "all" else (name,):
        with working(f"recomputing {each}"):
            tables = pages.tables(each)
        show_tables(tables, tables, json, csv)


def verify(
    file: Annotated[Path | None, typer.Option("--from", help="A saved Nsight Compute CSV.")] = None,
    summary: Annotated[
        Path | None,
        typer.Option(help="Only sum up a table of benchmarks/verify.py: docs/verify-h200.csv."),
    ] = None,
    n_q: opt.Nq = 4096,
    n_kv: opt.Nkv = None,
    head_dim: opt.HeadDim = 128,
    batch: opt.Batch = 4,
    heads: opt.Heads = 16,
    kv_heads: opt.KvHeads = None,
    dtype: opt.Dtype = "bfloat16",
    causal: opt.Causal = False,
    window: opt.Window = None,
    algorithm: opt.Algorithm = "flash2",
    backward: opt.Backward = False,
    tiling: opt.Tile = "fit",
    backward_tiling: opt.BackwardTile = "fit",
    device: opt.DeviceName = "H200",
    backend: opt.Backend = "cupy",
    kernel: Annotated[
        str | None,
        typer.Option(
            help="cupy: hopper or portable; numba_cuda: hopper, tensor or teaching. "
            "Default: the best that runs."
        ),
    ] = None,
    launch: opt.Launch = "grouped",
    blocks_per_sm: opt.BlocksPerSm = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Keep Nsight Compute's CSV here, with what the kernels counted beside."),
    ] = None,
    json: opt.Json = False,
    csv: opt.Csv = False,
) -> None:
    """Compare predictions with hardware counters, kernel by kernel.

    Runs the kernels under Nsight Compute, or with --from reads what it printed elsewhere. What
    --save kept says itself what ran; for other tables the options must. A table of many shapes is
    summed up by --summary.
    """
    from flashsim.studies import verify as verification

    if summary is not None:
        tables = verification.summary(opt.read_text(summary))
        show_tables(tables, tables[-1:], json, csv)
        return
    model = L2Model(launch, blocks_per_sm=blocks_per_sm)
    if file is not None and file.exists() and verification.counts_beside(file).exists():
        kept = verification.Record.load(file)
        found = [
            verification.verify(each, str(one), l2=model).table()
            for one, each in zip(kept.cases, verification.passes_of(kept), strict=True)
        ]
        show_tables(found, found, json, csv)
        return
    seen = opt.parse_window(window) if window else None
    problem = Problem(n_q, n_kv, head_dim, head_dim, batch, heads, kv_heads, dtype, causal, seen)
    tiles = [opt.choose_tiling(t, problem.head_dim, causal) for t in (tiling, backward_tiling)]
    case = verification.Case(
        *(problem, algorithm, backend, device, kernel, (tiles[0], tiles[1])),
        backward=(None,) if backward else (),
    )
    if file is not None:
        directions = ("forward", "backward") if backward else ("forward",)
        if None in tiles[: len(directions)]:
            raise OptionError(
                "--from needs the tiles that ran: give --tiling and --backward-tiling (a table of "
                "benchmarks/verify.py is read by --summary)"
            )
        launches = verification.parse(opt.read_text(file))
        predictions = [
            verification.predict(problem, algorithm, d, t, device)
            for d, t in zip(directions, tiles, strict=False)
        ]
        passes = verification.assign(predictions, launches)
    else:
        with working("measuring"):
            kept = verification.record([case])
        if save is not None:
            kept.save(save)
        (passes,) = verification.passes_of(kept)
    table = verification.verify(passes, str(case), l2=model).table()
    show_tables([table], [table], json, csv)


def _count(problem: Problem, algorithm: str, backward: bool, tiling: str, device: str) -> Any:
    return counting.count(
        problem,
        algorithm=algorithm,
        direction="backward" if backward else "forward",
        tiling=opt.choose_tiling(tiling, problem.head_dim, problem.causal),
        device=device,
    )


def _at_sizes(curves: dict[str, Any], sizes: list[float]) -> Table:
    table = Table(
        "DRAM bytes over the size of L2 (textbook cache: fully associative, LRU)",
        ("stage", "L2 MiB", "DRAM read B", "DRAM write B"),
        note="; ".join(
            f"{name}: {curve.enough():,} B of L2 leave first reads only"
            for name, curve in curves.items()
        ),
    )
    for name, curve in curves.items():
        for size in sizes:
            nbytes = int(size * 2**20)
            table.rows.append((name, size, curve.reads(nbytes), curve.writes(nbytes)))
    return table
