"""Commands of `flashsim study`: each runs one study of `flashsim.studies` and prints its table."""

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import typer

from flashsim import report
from flashsim.api import counting
from flashsim.api.cost import cost, fits
from flashsim.api.kv_cache import live_problem
from flashsim.api.warm import ALGORITHMS, DIRECTIONS
from flashsim.api.warm import warm as compile_ahead
from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.declare import Format, each, option, refuse_unused, written
from flashsim.cli.output import Tables, draw, ready_to_draw, say, show, working
from flashsim.counts import questions
from flashsim.errors import MemoryModelError, OptionError
from flashsim.problem import checks
from flashsim.problem.hardware import PRESETS
from flashsim.problem.links import Link
from flashsim.problem.problem import Problem
from flashsim.schedule.split_kv import fill


def demo(out: Path = option(Path("out"), "Folder for the files.", "-o")) -> None:
    """Run attention on a real model's tensors, check the output, and compare algorithms."""
    from flashsim.cli.pictures import demo_figures
    from flashsim.studies.demo import LIMIT, in_a_sentence
    from flashsim.studies.demo import demo as run_demo

    with working("simulating a real model's attention"):
        layers = run_demo(out)
    with working("drawing"):
        paths = demo_figures(layers[0].name, layers[0].comparison, out)
    for path in [*(path for layer in layers for path in layer.files), *paths]:
        say(f"wrote {path}")
    show(layers[0].bytes_moved())
    wrong = [layer.name for layer in layers if not layer.passed]
    if wrong:
        show([layer.agreement() for layer in layers])
        say(f"{', '.join(wrong)}: the output differs from the model's by {LIMIT:g} or more")
        raise typer.Exit(1)
    typer.echo("\n" + textwrap.fill(in_a_sentence(layers), 79))


def walkthrough(
    typed: typer.Context,
    name: str | None = typer.Argument(
        None, help="Name of the walkthrough. Leave it out to list the names."
    ),
    logits: list[float] | None = option(
        None, "softmax: the logits, separated by commas. Default: 70,80,90."
    ),
    chunk: int | None = option(None, "softmax: logits per step of the online softmax. Default: 1."),
    subnormals: bool = option(False, "softmax: keep subnormal numbers, as NumPy does."),
    n_q: int | None = option(
        None, "All walkthroughs except softmax: number of queries and keys.", "-n"
    ),
    head_dim: int | None = option(None, "All walkthroughs except softmax: width of a row.", "-d"),
    tiling: str | None = option(None, "tiles, corrections: tile size, QUERIESxKEYS.", "-t"),
    row: int | None = option(None, "tiles: which query row to follow. Default: the last."),
    causal: bool = option(False, "tiles: use a causal mask."),
    dtype: str | None = option(None, "reread: element type of P. Default: float32."),
    seed: int | None = option(None, "tiles, delta: seed for drawing random tensors. Default: 0."),
) -> Tables:
    """Show each step of softmax and FlashAttention on a few small numbers."""
    from flashsim.studies import walkthrough as walks

    if name is None:
        refuse_unused(typed, "the list of walkthroughs", only=())
        return report.Table("Walkthroughs", ("name", "what"), [*walks.NAMES.items()])
    walk: Callable[..., report.Table] = getattr(
        walks, checks.one_of("walkthrough", name, walks.NAMES)
    )
    takes = inspect.signature(walk).parameters
    refuse_unused(typed, f"the walkthrough {name}", only={"n_q" if x == "n" else x for x in takes})
    arguments: dict[str, Any] = {
        "logits": [70.0, 80.0, 90.0] if logits is None else logits,
        "tiling": None if tiling is None else values.tiling(tiling, head_dim or 64, causal),
        **{"n": n_q, "head_dim": head_dim, "chunk": chunk, "subnormals": subnormals, "row": row},
        **{"causal": causal, "dtype": dtype, "seed": seed},
    }
    return walk(**{key: x for key, x in arguments.items() if key in takes and x is not None})


def ladder(
    sizes: opt.Lengths = opt.Lengths(n_q=512, head_dim=64, dtype="float32"),
    tiling: str = option("32x64", "Tile size, QUERIESxKEYS.", "-t"),
    device: opt.Device = "H100",
    rungs: list[str] | None = option(
        None, "Names of the rungs to show, separated by commas. Default: all."
    ),
    magnify: float = option(1.0, "Factor that multiplies Q, to make scores large."),
    seed: int = option(0, "Seed for drawing random tensors."),
) -> Tables:
    """Go from a naive softmax to FlashAttention; each step is run, counted and predicted."""
    from flashsim.studies import ladder as rungs_of

    asked = sizes.given()
    names = [*rungs_of.RUNGS] if rungs is None else rungs
    how: dict[str, Any] = {"device": device, "rungs": names, "magnify": magnify, "seed": seed}
    counted = counting.count(Problem(**asked), device=device)
    with working("climbing", cost([counted] * len(names))):
        climb = rungs_of.climb(
            **{"n_kv": asked["n_q"], **asked, **how},
            tiling=values.tiling(tiling, asked["head_dim"], False),
        )
    return climb.table()


def softmax_matmul(
    batch: int = option(16, "Number of matrices.", "-b"),
    d1: int = option(2048, "Rows of X."),
    d2: int = option(1024, "Columns of X, along which softmax runs."),
    d3: int = option(512, "Columns of V, up to 512."),
    block: int = option(64, "Rows of X per tile."),
    block_2: int | None = option(None, "Columns of X per tile. Default: as many as rows."),
    run: bool = option(
        False, "Also simulate on random matrices, and show the results beside the formula's."
    ),
) -> Tables:
    """Count the bytes of softmax(X) V, as one fused kernel and as two kernels."""
    from flashsim.studies import softmax_matmul as operation

    shape, blocks_of = (batch, d1, d2, d3), dict[str, Any](block=block, block_2=block_2)
    results = [operation.count(*shape, **blocks_of, fused=fused) for fused in (True, False)]
    if run:
        size = 4 * batch * (d1 * d2 + d2 * d3 + d1 * d3)
        fits(size, "leave out --run to count without arrays")
        rng = np.random.default_rng(0)
        x, v = (rng.standard_normal(s, np.float32) for s in ((batch, d1, d2), (batch, d2, d3)))
        with working("simulating"):
            executed = operation.run(x, v, **blocks_of)
        if executed.moved != results[0].moved:
            raise MemoryModelError(
                "the simulator and the closed form disagree about the bytes moved; please report "
                "this bug"
            )
        results[0] = executed
    tables = [result.table() for result in results]
    every = report.Table("", ("kernels", *tables[0].columns))
    for result, table in zip(results, tables, strict=True):
        every.rows += [("fused" if result.fused else "two", *row) for row in table.rows]
    return tables, [every]


def precision(
    typed: typer.Context,
    n_q: list[int] = option("256,1024", "Number of queries and keys.", "-n"),
    head_dim: int = option(64, "Width of a row of Q and K.", "-d"),
    dtype: str = option("bfloat16", "The lower-precision type to which values are rounded."),
    kinds: list[str] | None = option(None, "Kinds of inputs, separated by commas. Default: all."),
    points: list[str] | None = option(None, "Rounding points, separated by commas. Default: all."),
    algorithm: opt.Algorithm = "flash2",
    causal: opt.Causal = False,
    seed: int = option(0, "Seed for drawing random tensors."),
    published: bool = option(
        False, "Instead, round all the values together that published kernels round."
    ),
    plot: opt.Plot = None,
) -> Tables:
    """Measure each rounding's error: round one value at a time, and compare with float64."""
    from flashsim.studies import precision as lab

    ready_to_draw(plot)
    how: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim, "seed": seed}
    if published:
        never = ("kinds", "points", "algorithm", "causal", "plot")
        refuse_unused(typed, "--published, which rounds fixed sets of values", never=never)
        with working("rounding"):
            return [lab.presets(n, **how) for n in n_q]
    how |= {"kinds": kinds, "points": points, "algorithm": algorithm, "causal": causal}
    with working("rounding"):
        measured = lab.laboratory(n_q, **how)
    if plot is not None:
        draw("precision", measured, plot, {})
    return measured.tables(), [measured.table()]


def banks(
    pattern: str | None = typer.Argument(
        None, help="Access pattern. Default: all; with --plot: column."
    ),
    dtype: str | None = option(None, "Element type. Default: float32, and bfloat16 for ldmatrix."),
    columns: int | None = option(None, "Elements per row. Default: 128 bytes of elements."),
    pad: int | None = option(
        None, "Elements of padding per row. Default: 1, or 16 bytes for ldmatrix."
    ),
    plot: opt.Plot = None,
    theme: str | None = option(None, "Colors of --plot: light or dark. Default: light."),
) -> Tables:
    """Count bank conflicts and memory sectors of a warp's request, for each layout of a tile."""
    from flashsim.studies import banks as on_chip

    ready_to_draw(plot)
    if plot is None and theme is not None:
        raise OptionError("--theme sets the plot's colors, so it needs --plot FILE")
    sizes: dict[str, Any] = {"dtype": dtype, "columns": columns, "pad": pad}
    table = on_chip.table(pattern=pattern, **sizes)
    if plot is not None:
        name = pattern or "column"
        layouts = [str(row["layout"]) for row in table.records() if row["pattern"] == name]
        requests = [on_chip.access(name, layout, **sizes) for layout in layouts]
        draw("banks", requests, plot, {"theme": "light" if theme is None else theme})
    return table


def blocks(
    typed: typer.Context,
    mask: opt.Mask,
    sizes: opt.Sizes = opt.BATCH,
    sides: list[int] = option(
        "32,64,128", "Tile sides to try, separated by commas; every pair of sides is a tile."
    ),
    algorithm: opt.Algorithm = "flash2",
    direction: opt.Direction = "forward",
    stages: str | None = option(
        None, "Backward only: one tile size per kernel, e.g. dkdv=64x128,dq=128x64."
    ),
    device: opt.Device = "H200",
    plot: opt.Plot = None,
    stage: str | None = option(None, "Kernel (stage) that --plot shows. Default: the first."),
) -> Tables:
    """Compare tile sizes: iterations, blocks per SM, bytes and predicted time of each kernel."""
    from flashsim.studies import blocks as tiles

    ready_to_draw(plot)
    if plot is None and stage is not None:
        raise OptionError("--stage chooses the kernel to plot, so it needs --plot FILE")
    problem = values.problem(sizes, mask)
    if stages is not None:
        refuse_unused(typed, "--stages, which names the tiles", never=["sides"])
        if direction == "forward" and "direction" in written(typed):
            raise OptionError("--stages is for a backward pass; leave out --direction forward")
        tilings = {}
        for name, _, text in (part.partition("=") for part in stages.split(",")):
            tile = values.tiling(text or "fit", problem.head_dim, problem.causal)
            if tile is None:
                raise OptionError(f"--stages must have the form STAGE=QUERIESxKEYS, got {stages!r}")
            tilings[name] = tile
        compared = tiles.mixed(problem, tilings, algorithm=algorithm, device=device)
    else:
        compared = tiles.sizes(
            problem, sides, algorithm=algorithm, direction=opt.one_pass(direction), device=device
        )
    if plot is not None:
        draw("block-sizes", compared, plot, {"stage": stage})
    return compared.table()


def when(
    typed: typer.Context,
    mask: opt.Mask,
    sizes: opt.Sizes = opt.BATCH,
    n_q: list[int] = option(
        *("128,256,512,1024,2048,4096,8192,16384", "Number of queries and keys.", "-n"),
        *(each(int), "Sizes"),
    ),
    direction: opt.Direction = "forward",
    device: opt.Device = "H200",
) -> Tables:
    """Predict from which sequence length on FlashAttention is faster than standard attention."""
    from flashsim.studies import predict

    refuse_unused(typed, "`study when`, which has as many keys as queries", never=["n_kv"])
    problem, direction = values.problem(sizes, mask), opt.one_pass(direction)
    return predict.when(problem, n_q, direction=direction, device=device)


def versions(mask: opt.Mask, sizes: opt.Sizes = opt.BATCH, device: opt.Device = "H200") -> Tables:
    """Compare FlashAttention-1, -2, -3 and standard attention: bytes, memory, predicted times."""
    from flashsim.studies import predict

    return predict.versions(values.problem(sizes, mask), device=device)


def devices(sizes: opt.Sizes, decoding: opt.Decoding, *, typed: typer.Context) -> Tables:
    """List the GPUs that can be simulated, and where each of their figures comes from.

    If you pass sizes, the command shows how many thread blocks fill each GPU (SMs x blocks per SM),
    and how many blocks and splits of the keys flash-decode uses.
    """
    if sizes.given():
        return _filled(sizes, decoding)
    refuse_unused(typed, "a list without sizes (pass sizes too)", only=())
    table = report.Table(
        "Devices",
        (
            *("name", "SRAM B/block", "SRAM B/SM", "registers B/SM", "SMs", "L2 B", "HBM B"),
            *("HBM GB/s", "L2 GB/s", "float16 TFLOP/s", "float32 TFLOP/s"),
            *("link", "link GB/s", "source"),
        ),
        note="float16: dense, on tensor cores; float32: CUDA cores; L2 GB/s is empty if not "
        "published; link GB/s: per direction",
    )
    for d in PRESETS.values():
        table.add(
            *(d.name, d.sram_bytes, d.sram_per_sm, d.registers_per_sm, d.sm_count),
            *(d.l2_bytes, d.hbm_bytes, d.hbm_bandwidth / 1e9, d.l2_bandwidth / 1e9 or None),
            *(d.peak("float16") / 1e12, d.cuda_flops["float32"] / 1e12),
            *(d.link, Link.get(d.link).bandwidth / 1e9, d.source),
        )
    return table


def reproduce(
    form: Format,
    name: str | None = typer.Argument(
        None, help="Name of the text, or `all`. Leave it out to list the names."
    ),
    plot: Path | None = option(None, "pallas: also write its roofline plot to this file."),
) -> None:
    """Recompute published numbers: show the paper's, flashsim's, and why they differ."""
    from flashsim.studies import reproduce as pages

    if plot is not None:
        if name != "pallas":
            raise OptionError(
                "--plot draws only the numbers of `pallas`; run `flashsim study reproduce "
                "pallas --plot FILE`, or leave out --plot"
            )
        ready_to_draw(plot)

    if name is None:
        tables = pages.listing()
        show((tables, tables[:1]), form)
        return
    collected: list[report.Table] = []
    for page in pages.NAMES if name == "all" else (name,):
        with working(f"recomputing {page}"):
            tables = pages.tables(page)
        if form.json or form.csv:  # one JSON array, or one CSV header
            collected += tables
        else:
            show(tables)
    if collected:
        show(collected, form)
    if plot is not None:
        pallas = pages.pallas
        options = {"device": pallas.DEVICE, "dtype": pallas.DTYPE}
        draw("roofline-series", pallas.series(), plot, options)


def claims(
    names: list[str] | None = typer.Argument(None, help="Names of the statements. Default: all."),
) -> Tables:
    """Recompute statements from well-known texts, and say whether each is right, and why."""
    from flashsim.studies import claims as all_claims

    table = all_claims.table(*(names or ()))
    return [table if names else all_claims.overview(table)], [table]


def warm(
    dtype: str = option("float32", "Element type of Q, K and V."),
    head_dim: int = option(64, "Width of a row of Q and K.", "-d"),
    direction: str = option("all", f"Kernels to compile: {', '.join(DIRECTIONS)}."),
    algorithm: str = option("flash2-fused", f"{', '.join(ALGORITHMS)}.", "-a"),
) -> Tables:
    """Compile the CPU engine (backend numba) ahead of time; print the compiled code's folder."""
    with working("compiling the CPU engine"):
        done = compile_ahead(dtype, head_dim, direction, algorithm)
    return report.Table(
        "CPU engine",
        ("dtype", "algorithm", "direction", "kernel", "compiled", "s", "CPU s", "folder"),
        [
            (
                *(done.dtype, done.algorithm, done.direction, done.kernel),
                ", ".join(done.compiled) or "nothing",
                *(round(done.seconds, 2), round(done.cpu_seconds, 2), str(done.folder)),
            )
        ],
        note='compiled: the kernels compiled now; "nothing" if all were already on disk',
    )


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
        note="row tiles: the number of blocks without splits; --splits auto aims at one block per "
        "SM",
    )
    for d in PRESETS.values():
        f = fill(problem, d, **how)
        splits = f.split.splits
        table.add(d.name, d.sm_count, str(f.tiling), f.per_sm, f.needed, f.whole, splits, f.blocks)
    return table
