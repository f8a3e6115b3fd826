"""Commands for those who learn: walkthroughs with values, memory on the chip, tiles."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from flashsim import report
from flashsim.api.cost import fits
from flashsim.cli import options as opt
from flashsim.cli import pictures, values
from flashsim.cli.output import show_tables, working
from flashsim.errors import MemoryModelError, OptionError, choices


def walkthrough(
    form: opt.Format,
    name: Annotated[str | None, typer.Argument(help="Leave out to list names.")] = None,
    logits: Annotated[
        str | None, typer.Option(help="softmax: your own, with commas; 70,80,90.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(help="softmax: online, so many at a time; 1.")
    ] = None,
    subnormals: Annotated[
        bool, typer.Option("--subnormals", help="softmax: keep them, as NumPy does.")
    ] = False,
    n: Annotated[
        int | None, typer.Option("--n", "-n", help="All but softmax: queries and keys.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", "-d", help="All but softmax: width.")
    ] = None,
    tiling: Annotated[
        str | None, typer.Option("--tiling", "-t", help="tiles, corrections: QUERIESxKEYS.")
    ] = None,
    row: Annotated[int | None, typer.Option(help="tiles: which query; the last.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="tiles: causal mask.")] = False,
    dtype: Annotated[str | None, typer.Option(help="reread: element type of P; float32.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="tiles, delta: of the random tensors; 0.")
    ] = None,
    *,
    typed: typer.Context,
) -> None:
    """Follow small numbers through softmax and FlashAttention, step by step."""
    from flashsim.studies import walkthrough as walks

    if name is None:
        opt.refuse_unused(typed, "the list of walkthroughs", only=())
        table = report.Table("Walkthroughs", ("name", "what"), [*walks.NAMES.items()])
        show_tables([table], [table], form)
        return
    if name not in walks.NAMES:
        raise OptionError(f"no walkthrough {name!r}; {choices(name, walks.NAMES)}")
    walk: Callable[..., report.Table] = getattr(walks, name)
    takes = inspect.signature(walk).parameters
    opt.refuse_unused(typed, f"the walkthrough {name}", only=takes)
    given: dict[str, Any] = {
        "logits": values.parse_list("logits", "70,80,90" if logits is None else logits, float),
        "tiling": None if tiling is None else values.tiling(tiling, head_dim or 64, causal),
        **{"n": n, "head_dim": head_dim, "chunk": chunk, "subnormals": subnormals, "row": row},
        **{"causal": causal, "dtype": dtype, "seed": seed},
    }
    table = walk(**{key: x for key, x in given.items() if key in takes and x is not None})
    show_tables([table], [table], form)


def banks(
    form: opt.Format,
    pattern: Annotated[
        str | None, typer.Argument(help="Default: all. --plot draws one; column.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32; of ldmatrix bfloat16.")] = None,
    columns: Annotated[
        int | None, typer.Option(help="Elements of a row; as many as make 128 bytes.")
    ] = None,
    pad: Annotated[
        int | None, typer.Option(help="Elements that padding adds to a row; 1, or 16 bytes.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the layouts in this file.")] = None,
    theme: Annotated[str | None, typer.Option(help="--plot: light or dark; light.")] = None,
) -> None:
    """Bank conflicts and sectors: what a warp's request costs in each layout of a tile."""
    from flashsim.studies import banks as on_chip

    if plot is not None:
        pictures.ready_to_draw(plot)
    elif theme is not None:
        raise OptionError("--theme is of the picture; give --plot as well")
    sizes: dict[str, Any] = {"dtype": dtype, "columns": columns, "pad": pad}
    table = on_chip.table(pattern=pattern, **sizes)
    show_tables([table], [table], form)
    if plot is not None:
        name = pattern or "column"
        layouts = [str(row["layout"]) for row in table.records() if row["pattern"] == name]
        requests = [on_chip.access(name, layout, **sizes) for layout in layouts]
        pictures.draw("banks", requests, plot, {"theme": "light" if theme is None else theme})


def blocks(
    mask: opt.Mask,
    form: opt.Format,
    sizes: opt.Sizes = opt.BATCH,
    sides: Annotated[str, typer.Option(help="Rows and columns of tiles; all pairs.")] = "32,64,128",
    algorithm: opt.Algorithm = "flash2",
    backward: Annotated[bool, typer.Option("--backward", help="The backward pass.")] = False,
    stages: Annotated[
        str | None,
        typer.Option(help="Backward, a tile for each stage: dkdv=64x128,dq=128x64."),
    ] = None,
    device: Annotated[str, typer.Option(help="See `flashsim devices`.")] = "H200",
    plot: Annotated[Path | None, typer.Option(help="Draw one stage in this file.")] = None,
    stage: Annotated[str | None, typer.Option(help="--plot: which; the first.")] = None,
    *,
    typed: typer.Context,
) -> None:
    """Tile sizes: iterations, blocks an SM, bytes and predicted time of each stage."""
    from flashsim.studies import blocks as tiles

    if plot is not None:
        pictures.ready_to_draw(plot)
    elif stage is not None:
        raise OptionError("--stage says what to draw; give --plot as well")
    problem = values.problem(sizes, mask)
    if stages is not None:
        opt.refuse_unused(typed, "--stages, which has its own tiles", never=["sides"])
        given = {}
        for name, _, text in (part.partition("=") for part in stages.split(",")):
            tile = values.tiling(text or "fit", problem.head_dim, problem.causal)
            if tile is None:
                raise OptionError(f"--stages takes STAGE=QUERIESxKEYS, got {stages!r}")
            given[name] = tile
        found = tiles.mixed(problem, given, algorithm=algorithm, device=device)
    else:
        found = tiles.sizes(
            problem,
            values.parse_list("sides", sides, int),
            algorithm=algorithm,
            direction="backward" if backward else "forward",
            device=device,
        )
    table = found.table()
    show_tables([table], [table], form)
    if plot is not None:
        pictures.draw("block-sizes", found, plot, {"stage": stage})


def when(
    mask: opt.Mask,
    form: opt.Format,
    sizes: opt.Sizes = opt.BATCH,
    lengths: Annotated[
        str, typer.Option(help="N, with commas.")
    ] = "128,256,512,1024,2048,4096,8192,16384",
    backward: Annotated[bool, typer.Option("--backward", help="The backward pass.")] = False,
    device: Annotated[str, typer.Option(help="See `flashsim devices`.")] = "H200",
    *,
    typed: typer.Context,
) -> None:
    """When does FlashAttention win? Predicted times of standard attention and it, over N."""
    from flashsim.studies import predict

    opt.refuse_unused(typed, "this: its lengths are --lengths", never=("n_q", "n_kv"))
    table = predict.when(
        values.problem(sizes, mask),
        values.parse_list("lengths", lengths, int),
        direction="backward" if backward else "forward",
        device=device,
    )
    show_tables([table], [table], form)


def versions(
    mask: opt.Mask,
    form: opt.Format,
    sizes: opt.Sizes = opt.BATCH,
    device: Annotated[str, typer.Option(help="See `flashsim devices`.")] = "H200",
) -> None:
    """FlashAttention-1, -2 and -3 beside standard attention: bytes, memory, times, OOM."""
    from flashsim.studies import predict

    table = predict.versions(values.problem(sizes, mask), device=device)
    show_tables([table], [table], form)


def softmax_matmul(
    form: opt.Format,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Matrices.")] = 16,
    d1: Annotated[int, typer.Option(help="Rows of X.")] = 2048,
    d2: Annotated[int, typer.Option(help="Columns of X, along which softmax runs.")] = 1024,
    d3: Annotated[int, typer.Option(help="Columns of V, up to 512.")] = 512,
    block: Annotated[int, typer.Option(help="Rows of X in a block.")] = 64,
    block_2: Annotated[int | None, typer.Option(help="Columns of X in a block; as rows.")] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Simulate it on random matrices, beside the closed form.")
    ] = False,
) -> None:
    """softmax(X) V, fused into one kernel and in two: what each moves."""
    from flashsim.studies import softmax_matmul as operation

    shape, blocks_of = (batch, d1, d2, d3), dict[str, Any](block=block, block_2=block_2)
    found = [operation.count(*shape, **blocks_of, fused=fused) for fused in (True, False)]
    if run:
        size = 4 * batch * (d1 * d2 + d2 * d3 + d1 * d3)
        fits(size, "without --run it is counted without arrays")
        rng = np.random.default_rng(0)
        x, v = (rng.standard_normal(s, np.float32) for s in ((batch, d1, d2), (batch, d2, d3)))
        with working("simulating"):
            executed = operation.run(x, v, **blocks_of)
        if executed.moved != found[0].moved:
            raise MemoryModelError("the simulator moved other bytes than the closed form says")
        found[0] = executed
    tables = [one.table() for one in found]
    every = report.Table("", ("kernels", *tables[0].columns))
    for one, table in zip(found, tables, strict=True):
        every.rows += [("fused" if one.fused else "two", *row) for row in table.rows]
    show_tables(tables, [every], form)


def precision(
    form: opt.Format,
    n: Annotated[str, typer.Option("--n", "-n", help="Lengths, e.g. 256,1024.")] = "256,1024",
    head_dim: Annotated[int, typer.Option("--head-dim", "-d", help="Width of rows.")] = 64,
    dtype: Annotated[str, typer.Option(help="What points are lowered to.")] = "bfloat16",
    kinds: Annotated[str | None, typer.Option(help="Of inputs, with commas; all.")] = None,
    points: Annotated[str | None, typer.Option(help="Of rounding, with commas; all.")] = None,
    algorithm: opt.Algorithm = "flash2",
    causal: Annotated[bool, typer.Option("--causal", help="Causal mask.")] = False,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="What published kernels round, instead.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the first kind in this file.")] = None,
    *,
    typed: typer.Context,
) -> None:
    """What each rounding costs: every point lowered alone, against float64."""
    from flashsim.studies import precision as lab

    if plot is not None:
        pictures.ready_to_draw(plot)
    lengths = values.parse_list("n", n, int)
    if kernels:
        never = ("kinds", "points", "algorithm", "causal", "plot")
        opt.refuse_unused(typed, "--kernels, which lowers no points alone", never=never)
        with working("rounding"):
            tables = [
                lab.presets(each, dtype=dtype, head_dim=head_dim, seed=seed) for each in lengths
            ]
        show_tables(tables, tables, form)
        return
    with working("rounding"):
        found = lab.laboratory(
            lengths,
            dtype=dtype,
            kinds=None if kinds is None else values.parse_list("kinds", kinds, str),
            points=None if points is None else values.parse_list("points", points, str),
            algorithm=algorithm,
            head_dim=head_dim,
            causal=causal,
            seed=seed,
        )
    show_tables(found.tables(), [found.table()], form)
    if plot is not None:
        pictures.draw("precision", found, plot, {})


COMMANDS = (walkthrough, precision, banks, blocks, when, versions, softmax_matmul)
