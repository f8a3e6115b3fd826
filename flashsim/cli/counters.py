"""Commands that measure a GPU, or read what was measured of one: calibrate, verify."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import typer

from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.output import show_tables, working
from flashsim.errors import OptionError, TraceError
from flashsim.problem.hardware import Device
from flashsim.report import Table

_H200 = opt.Passes(device="H200")
_GROUPED = opt.L2(launch="grouped")


def calibrate(
    form: opt.Format,
    units: Annotated[
        Path | None, typer.Option(help="Read what benchmarks/units.py wrote, instead of measuring.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With --units: whose SMs and capacities; H200.")
    ] = None,
) -> None:
    """Measure what each unit of this GPU does: the chip's part of `flashsim predict`, in seconds.

    The last table has what a `flashsim.Device` of it says of speeds, for `predict` (in Python,
    `flashsim.studies.predict.chip.calibrated` makes it).
    """
    from flashsim.studies.predict import chip

    if units is None and device is not None:
        raise OptionError(
            "--device says whose figures --units holds; without it, this machine's GPU is measured"
        )
    base = Device.get("H200" if device is None else device)
    if units is None:
        from flashsim.backends.cupy_gpu import units as bench

        with working("measuring"):
            measured = [(x.name, x.value, x.unit) for x in bench.measure()]
            base = bench.described(base)
    else:
        lines = csv.reader(values.read_text(units).splitlines()[1:])
        try:
            measured = [(name, float(value), unit) for name, value, unit in lines]
        except (ValueError, csv.Error):
            raise TraceError(
                f"{str(units)!r} is no table of units: lines of name, value and unit, as "
                "benchmarks/units.py and `flashsim calibrate --csv` write them"
            ) from None
    table = Table("Units, each measured alone", ("unit", "value", "in"))
    table.rows += measured
    made = chip.calibrated(base, {name: value for name, value, _ in measured})
    figures = Table(f"{made.name}: figures to predict with", table.columns, note=made.source)
    figures.rows += [
        ("Device.tensor_flops, bfloat16", made.peak("bfloat16"), "FLOP/s"),
        ("Device.cuda_flops, float32", made.peak("float32", tensor_cores=False), "FLOP/s"),
        ("Device.hbm_bandwidth", made.hbm_bandwidth, "B/s"),
        ("Device.l2_bandwidth", made.l2_bandwidth, "B/s"),
    ]
    show_tables([table, figures], [table, figures], form)


def verify(
    mask: opt.Mask,
    form: opt.Format,
    file: Annotated[Path | None, typer.Option("--from", help="A saved Nsight Compute CSV.")] = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            help="Only sum up a table like docs/data/verify-h200.csv (benchmarks/verify.py)."
        ),
    ] = None,
    sizes: opt.Sizes = opt.BATCH,
    algorithm: opt.Algorithm = "flash2",
    how: opt.Passes = _H200,
    cache: opt.L2 = _GROUPED,
    backend: opt.Backend = "cupy",
    kernel: Annotated[
        str | None,
        typer.Option(
            help="cupy: hopper or portable; numba_cuda: hopper, tensor or teaching. "
            "Default: the best that runs."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Keep Nsight Compute's CSV here, with what the kernels counted beside."),
    ] = None,
    soak: Annotated[
        int | None,
        typer.Option(help="So many random shapes instead: the worst, exit status 1 past targets."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of --soak's shapes.")] = 0,
    *,
    typed: typer.Context,
) -> None:
    """Compare predictions with hardware counters, kernel by kernel.

    Runs the kernels under Nsight Compute, or with --from reads what it printed elsewhere. What
    --save kept says itself what ran; for other tables the options must. A table of many shapes is
    summed up by --summary.
    """
    from flashsim.studies import verify as verification

    if summary is not None:
        opt.refuse_unused(typed, "--summary", only=["summary"])
        tables = verification.summary(values.read_text(summary))
        show_tables(tables, tables[-1:], form)
        return
    if soak is not None:
        drawn = ["seed", "device", "kernel", "save"] if file is None else ["file"]
        opt.refuse_unused(typed, "--soak", only=["soak", *drawn])
        _soak(soak, seed, how.device, kernel, file, save, form)
        return
    model = cache.model()
    if file is not None and file.is_file() and verification.counts_beside(file).exists():
        opt.refuse_unused(typed, "a table that says itself what ran", only=["file", *vars(cache)])
        kept = verification.Record.load(file)
        found = [
            verification.verify(each, str(one), l2=model).table()
            for one, each in zip(kept.cases, verification.passes_of(kept), strict=True)
        ]
        show_tables(found, found, form)
        return
    if file is not None:
        opt.refuse_unused(typed, "--from, which measures nothing", never=["save"])
    opt.refuse_unused(typed, "this: it is of --soak", never=["seed"])
    problem = values.problem(sizes, mask)
    tiles = values.tilings(how, problem.head_dim, mask.causal)
    case = verification.Case(
        *(problem, algorithm, backend, how.device, kernel, tiles),
        backward=(None,) if how.backward else (),
    )
    if file is not None:
        directions = ("forward", "backward") if how.backward else ("forward",)
        if None in tiles[: len(directions)]:
            raise OptionError(
                "--from needs the tiles that ran: give --tiling and --backward-tiling (a table of "
                "benchmarks/verify.py is read by --summary)"
            )
        launches = verification.parse(values.read_text(file))
        predictions = [
            verification.predict(problem, algorithm, d, t, how.device)
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
    show_tables([table], [table], form)


def _soak(
    count: int,
    seed: int,
    device: str,
    kernel: str | None,
    file: Path | None,
    save: Path | None,
    form: opt.Format,
) -> None:
    """Measure random shapes, or read what was measured of them, and say which are worst."""
    from flashsim.studies import verify as verification

    if file is not None:
        kept = verification.Record.load(file)
    else:
        kernels = ("hopper", "portable") if kernel is None else (kernel,)
        cases = verification.draw(count, seed=seed, device=device, kernels=kernels)
        with working("measuring"):
            kept = verification.record(cases)
        if save is not None:
            kept.save(save)
    found = verification.compare(kept.cases, verification.passes_of(kept))
    table = verification.table(found)
    show_tables([table], [table], form)
    if any(one.misses for one in found):
        raise typer.Exit(1)


COMMANDS = (calibrate, verify)
