"""Commands that hold flashsim against caches and papers: dram, roofline, ladder, ..."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flashsim.api import counting
from flashsim.api.cost import cost, replay_cost
from flashsim.cli import options as opt
from flashsim.cli import pictures, values
from flashsim.cli.output import show_tables, working
from flashsim.counts.traffic import Traffic
from flashsim.errors import OptionError
from flashsim.problem import checks
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule import plans

_ONE_HEAD = opt.Lengths(n_q=512, head_dim=64, dtype="float32")
_KERNELS = opt.One(device="H200")
#: The seconds that compiling takes come once, before any table.
_REPLAYING = "replaying (the first time compiles the model, for some seconds)"
_L2Sizes = Annotated[
    str | None,
    typer.Option(help="MiB, e.g. 10,20,50: DRAM bytes at each size.", rich_help_panel="L2 cache"),
]


def dram(
    mask: opt.Mask,
    how: opt.One,
    cache: opt.L2,
    form: opt.Format,
    decoding: opt.Decoding,
    sizes: opt.Sizes = opt.LAYER,
    algorithm: opt.Algorithm = "flash2",
    l2_sizes: _L2Sizes = None,
) -> None:
    """Predict DRAM bytes: replay a run's tile requests through a model of the L2 cache."""
    from flashsim import l2

    requested = _count(values.problem(sizes, mask), algorithm, how, decoding)
    takes = replay_cost([requested], at_every_size=l2_sizes is not None)
    with working(_REPLAYING, takes, "tile requests"):
        if l2_sizes is None:
            table = l2.dram(requested, cache.model()).table()
        else:
            given = values.parse_list("l2-sizes", l2_sizes, float)
            table = _at_sizes(l2.curves(requested, cache.model()), given)
    show_tables([table], [table], form)


def roofline(
    mask: opt.Mask,
    how: opt.One,
    form: opt.Format,
    decoding: opt.Decoding,
    sizes: opt.Sizes = opt.LAYER,
    algorithms: opt.Algorithms = "standard,flash2",
    seconds: Annotated[float | None, typer.Option(help="Measured time of the kernels.")] = None,
) -> None:
    """Set intensity against ridge points, for each way of counting bytes."""
    from flashsim.studies import roofline as rooflines

    problem = values.problem(sizes, mask)
    names = values.parse_list("algorithms", algorithms, str)
    splitting = [name for name in names if plans.splits_keys(plans.check_algorithm(name))]
    counted = [  # options of decoding go to those that divide the keys, or to all
        _count(
            problem,
            name,
            how,
            opt.Decoding() if splitting and name not in splitting else decoding,
        )
        for name in names
    ]
    with working(_REPLAYING, replay_cost(counted), "tile requests"):
        tables = [rooflines.roofline(one, seconds=seconds).table() for one in counted]
    show_tables(tables, tables, form)


def ladder(
    form: opt.Format,
    sizes: opt.Lengths = _ONE_HEAD,
    tiling: Annotated[str, typer.Option("--tiling", "-t", help="QUERIESxKEYS.")] = "32x64",
    device: Annotated[str, typer.Option(help="See `flashsim devices`.")] = "H100",
    rungs: Annotated[str | None, typer.Option(help="Names with commas; default: all.")] = None,
    magnify: Annotated[float, typer.Option(help="Multiplies Q: large scores.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random tensors.")] = 0,
) -> None:
    """Climb from a naive softmax to FlashAttention: each rung executed, counted, predicted."""
    from flashsim.studies import ladder as rungs_of

    asked = sizes.given()
    names = [*rungs_of.RUNGS] if rungs is None else values.parse_list("rungs", rungs, str)
    one = counting.count(Problem(**asked), device=device)
    with working("climbing", cost([one] * len(names))):
        climb = rungs_of.climb(
            **{"n_kv": asked["n_q"], **asked},
            tiling=values.tiling(tiling, asked["head_dim"], False),
            device=device,
            rungs=names,
            magnify=magnify,
            seed=seed,
        )
    table = climb.table()
    show_tables([table], [table], form)


def predict(
    mask: opt.Mask,
    form: opt.Format,
    how: opt.One = _KERNELS,
    sizes: opt.Sizes = opt.BATCH,
    algorithm: Annotated[
        str,
        typer.Option(
            *("--algorithm", "-a"),
            help="flash2; flash2-fused, flash2-once: backward in one pass; flash-decode; standard: "
            "a library's.",
        ),
    ] = "flash2",
    splits: Annotated[
        str, typer.Option(help="flash-decode: parts of the keys; a number, or auto.")
    ] = "auto",
    page_size: Annotated[int | None, typer.Option(help="flash-decode: keys a page.")] = None,
    kernel: Annotated[
        str | None,
        typer.Option(help="Kernels of backend cupy: hopper or portable; what suits the device."),
    ] = None,
) -> None:
    """Predict how long the kernels of backend cupy take: units, overlap, waves and tails.

    --tiling fit is the one that the kernels choose. Needs no GPU. Calibrated on one H200;
    docs/guides/truth.md says how far it is off.
    """
    from flashsim.studies import predict as model

    problem = replace(values.problem(sizes, mask), page_size=page_size)
    table = model.predict(
        problem,
        direction=how.direction,
        algorithm=algorithm,
        kernels=kernel,
        tiling=values.tiling(how.tiling, problem.head_dim, mask.causal),
        device=how.device,
        splits=int(splits) if splits.isdecimal() else splits,
    ).table()
    show_tables([table], [table], form)


def reproduce(
    form: opt.Format,
    name: Annotated[str | None, typer.Argument(help="Leave out to list names; or `all`.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="pallas: draw its series on the roofline, in this file.")
    ] = None,
) -> None:
    """Recompute published numbers: paper, ours, and why they differ."""
    from flashsim.studies import reproduce as pages

    if plot is not None:
        if name != "pallas":
            raise OptionError("--plot draws the series of one page: flashsim reproduce pallas")
        pictures.ready_to_draw(plot)

    if name is None:
        tables = pages.listing()
        show_tables(tables, tables[:1], form)
        return
    found: list[Table] = []
    for each in pages.NAMES if name == "all" else (name,):
        with working(f"recomputing {each}"):
            tables = pages.tables(each)
        if form.json or form.csv:  # programs get one array, or one header
            found += tables
        else:
            show_tables(tables, [])
    if found:
        show_tables([], found, form)
    if plot is not None:
        pallas = pages.pallas
        options = {"device": pallas.DEVICE, "dtype": pallas.DTYPE}
        pictures.draw("roofline-series", pallas.series(), plot, options)


def claims(
    form: opt.Format,
    names: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None,
) -> None:
    """Recompute statements of well-known write-ups: right or wrong, and why."""
    from flashsim.studies import claims as all_claims

    table = all_claims.table(*(names or ()))
    show_tables([table if names else all_claims.overview(table)], [table], form)


COMMANDS = (dram, roofline, ladder, predict, reproduce, claims)


def _count(problem: Problem, algorithm: str, how: opt.One, decoding: opt.Decoding) -> Traffic:
    return counting.count(
        decoding.posed(problem),
        algorithm=algorithm,
        direction=how.direction,
        tiling=values.tiling(how.tiling, problem.head_dim, problem.causal),
        device=how.device,
        **decoding.options(),
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
            nbytes = checks.number("--l2-sizes", size, low=0.0) * 2**20
            table.rows.append((name, size, curve.reads(nbytes), curve.writes(nbytes)))
    return table
