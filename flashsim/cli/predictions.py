"""Commands that predict (roofline, predict, dram, ring) and measure (verify, calibrate)."""

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from flashsim.api.cost import replay_cost
from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.declare import OUTPUT, Format, in_bundle, option, refuse_unused
from flashsim.cli.output import Tables, ready, say, show, viz, working
from flashsim.distributed.group import SCHEMES
from flashsim.errors import OptionError, TraceError
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.links import LINKS
from flashsim.report import Table

#: Equal to `verification.HERE`, whose module is imported only when needed.
_HERE = "this GPU"
_LONG = opt.Sizes(n_q=65536, head_dim=128, batch=1, heads=32, kv_heads=8, dtype="bfloat16")
#: The model is compiled once, before the first table.
_REPLAYING = "replaying (the first time compiles the model, for some seconds)"


def roofline(
    mask: opt.Mask,
    decoding: opt.Decoding,
    how: opt.One = opt.One(tiling="same"),
    sizes: opt.Sizes = opt.LAYER,
    algorithm: list[str] = opt.algorithms("standard,flash2"),
    seconds: float | None = option(
        None, "Measured time of one algorithm, in seconds.", panel="How"
    ),
) -> Tables:
    """Show whether memory or arithmetic limits attention: one row per way of counting bytes."""
    from flashsim.studies import roofline as rooflines

    if seconds is not None and len(algorithm) != 1:
        raise OptionError(
            f"--seconds is the time of one algorithm, but {len(algorithm)} are shown; pass one "
            "--algorithm"
        )
    each = values.decoding_of(algorithm, decoding)
    counted = [values.counted(sizes, mask, name, how, its, algorithm) for name, its in each]
    with working(_REPLAYING, replay_cost(counted), "tile requests"):
        return [rooflines.roofline(traffic, seconds=seconds).table() for traffic in counted]


def predict(
    mask: opt.Mask,
    how: opt.One = opt.One(device="H200"),
    sizes: opt.Sizes = opt.BATCH,
    algorithm: str = option(
        "flash2",
        "Algorithm: flash2; flash2-fused, flash2-fused-first or flash2-once (one-pass backward); "
        "flash-decode; or standard (a library's kernels).",
        "-a",
    ),
    parts: opt.Parts = opt.Parts(splits="auto"),
    kernel: str | None = option(
        None,
        "Kernels of backend cupy: hopper or portable. Default: the kernels that backend cupy "
        "chooses for the device.",
    ),
    deterministic: bool | None = option(
        None,
        "Backward: choose the kernels as backward(deterministic=...) does. Default: those of "
        "--algorithm.",
        "--deterministic/--no-deterministic",
    ),
) -> Tables:
    """Predict the time of flashsim's GPU kernels (backend cupy): units, overlap, waves and tails.

    This command needs no GPU. With --tiling fit, the kernels themselves choose their tile sizes.
    The time model is calibrated on one H100 (Hopper's kernels) and one H200 (the others);
    docs/reference/predictions.md compares it with measurements.
    """
    from flashsim.studies import predict as model

    problem = replace(values.problem(sizes, mask), page_size=parts.page_size)
    return model.predict(
        problem,
        direction=how.direction,
        algorithm=algorithm,
        kernels=kernel,
        tiling=values.tiling(how.tiling, problem.head_dim, mask.causal),
        device=how.device,
        deterministic=deterministic,
        **parts.options(),
    ).table()


def dram(
    mask: opt.Mask,
    how: opt.One,
    cache: opt.L2,
    decoding: opt.Decoding,
    sizes: opt.Sizes = opt.LAYER,
    algorithm: opt.Algorithm = "flash2",
    l2_sizes: list[float] | None = option(
        None, "Also show DRAM bytes for these L2 sizes in MiB, e.g. 10,20,50.", panel="L2 cache"
    ),
) -> Tables:
    """Predict DRAM bytes: replay a run's tile requests through a model of the L2 cache."""
    from flashsim import l2

    requested = values.counted(sizes, mask, algorithm, how, decoding)
    takes = replay_cost([requested], at_every_size=l2_sizes is not None)
    with working(_REPLAYING, takes, "tile requests"):
        if l2_sizes is None:
            return l2.dram(requested, cache.model()).table()
        return _at_sizes(l2.curves(requested, cache.model()), l2_sizes)


def verify(
    typed: typer.Context,
    mask: opt.Mask,
    form: Format,
    from_: Path | None = option(None, "Read this saved Nsight Compute CSV instead of measuring."),
    summary: Path | None = option(
        None,
        "Only summarize a table written by benchmarks/verify.py, such as "
        "docs/data/verify-h200.csv.",
    ),
    sizes: opt.Sizes = opt.BATCH,
    algorithm: opt.Algorithm = "flash2",
    how: opt.Passes = opt.Passes(device=_HERE),
    cache: opt.L2 = opt.L2(launch="grouped"),
    backend: opt.Backend = "cupy",
    kernel: str | None = option(
        None,
        "Kernels of the backend. cupy: hopper or portable; numba_cuda: hopper, tensor or "
        "teaching. Default: the fastest kernels that run on this GPU.",
    ),
    save: Path | None = option(
        None, "Save Nsight Compute's CSV and, next to it, the bytes that the kernels reported."
    ),
    soak: int | None = option(
        None,
        "Run this many random shapes and show the largest errors; exit with status 1 if any "
        "exceeds its target.",
    ),
    seed: int = option(0, "Seed for drawing the shapes of --soak."),
) -> None:
    """Compare predicted bytes with hardware counters, kernel by kernel.

    The command runs flashsim's kernels under Nsight Compute, and predicts for this machine's GPU
    unless --device names another. With --from, the command reads the output of an earlier Nsight
    Compute run instead. A file that --save wrote also records which runs were measured; for other
    files, pass the run's options again.
    """
    from flashsim.studies import verify as verification

    if summary is not None:
        refuse_unused(typed, "--summary", only=["summary"])
        tables = verification.summary(values.read_text(summary))
        show((tables, tables[-1:]), form)
        return
    if soak is not None:
        drawn = ["seed", "device", "kernel", "save"] if from_ is None else ["from_"]
        refuse_unused(typed, "--soak", only=["soak", *drawn])
        kernels = ("hopper", "portable") if kernel is None else (kernel,)
        cases = verification.draw(soak, seed=seed, device=how.device, kernels=kernels)
        kept = _measured(cases, save) if from_ is None else verification.Record.load(from_)
        compared = verification.compare(kept.cases, verification.passes_of(kept))
        show(verification.table(compared), form)
        if any(entry.misses for entry in compared):
            raise typer.Exit(1)
        return
    model = cache.model()
    if from_ is not None and from_.is_file() and verification.counts_beside(from_).exists():
        refuse_unused(typed, "a table that records what ran", only=["from_", *vars(cache)])
        kept = verification.Record.load(from_)
        verified = [
            verification.verify(each, str(entry), l2=model).table()
            for entry, each in zip(kept.cases, verification.passes_of(kept), strict=True)
        ]
        show(verified, form)
        return
    if from_ is not None:
        refuse_unused(typed, "--from, which measures nothing", never=["save"])
    refuse_unused(typed, "a run without --soak", never=["seed"])
    problem = values.problem(sizes, mask)
    tiles = values.tilings(how, problem, [algorithm])
    case = verification.Case(
        *(problem, algorithm, backend, how.device, kernel),
        (tiles["forward"], tiles.get("backward")),
        backward=(None,) if how.backward else (),
    )
    if from_ is not None:
        if None in tiles.values():
            raise OptionError(
                "--from needs the tile sizes of the measured run: pass --tiling and "
                "--backward-tiling (or, for a table of benchmarks/verify.py, --summary instead "
                "of --from)"
            )
        launches = verification.parse(values.read_text(from_))
        if how.device == _HERE:
            raise OptionError(
                "--from needs --device, because this table does not record the GPU on which it "
                "was measured, as files written by --save do; pass the GPU's name as --device"
            )
        predictions = [
            verification.predict(problem, algorithm, d, t, how.device) for d, t in tiles.items()
        ]
        passes = verification.assign(predictions, launches)
    else:
        kept = _measured([case], save)
        (case,), (passes,) = kept.cases, verification.passes_of(kept)
    show(verification.verify(passes, str(case), l2=model).table(), form)


def _measured(cases: Any, save: Path | None) -> Any:
    """Run and measure these cases, save the record if requested, and return it."""
    from flashsim.studies import verify as verification

    with working("measuring"):
        kept = verification.record(cases)
    if save is not None:
        kept.save(save)
    return kept


def calibrate(
    units: Path | None = option(None, "Read an earlier output of --csv, instead of measuring."),
    device: str | None = option(
        None, "With --units: the GPU on which the units were measured. Default: H200."
    ),
) -> Tables:
    """Measure the speed of each unit of this GPU, for `flashsim predict`; this takes seconds.

    The last table shows the speeds as fields of a `flashsim.Device`. In Python,
    `flashsim.studies.predict.chip.calibrated` returns a device with the measured speeds.
    """
    from flashsim.studies.predict import chip

    if units is None and device is not None:
        raise OptionError(
            "--device names the GPU on which the table --units was measured, so it needs "
            "--units FILE; leave out --device to measure this machine's GPU"
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
                f"{str(units)!r} is not a table of units (lines of name, value and unit); write "
                "it with `flashsim study calibrate --csv`"
            ) from None
    table = Table("Units, each measured alone", ("unit", "value", "in"))
    table.rows += measured
    calibrated = chip.calibrated(base, {name: value for name, value, _ in measured})
    figures = Table(
        f"{calibrated.name}: figures for predictions", table.columns, note=calibrated.source
    )
    figures.rows += [
        ("Device.tensor_flops, bfloat16", calibrated.peak("bfloat16"), "FLOP/s"),
        ("Device.cuda_flops, float32", calibrated.peak("float32", tensor_cores=False), "FLOP/s"),
        ("Device.hbm_bandwidth", calibrated.hbm_bandwidth, "B/s"),
        ("Device.l2_bandwidth", calibrated.l2_bandwidth, "B/s"),
    ]
    return [table, figures]


def _at_sizes(curves: dict[str, Any], sizes: list[float]) -> Table:
    table = Table(
        "DRAM bytes against the size of L2 (textbook cache: fully associative, LRU)",
        ("stage", "L2 MiB", "DRAM read B", "DRAM write B"),
        note="; ".join(
            f"{name}: with {curve.enough():,} B of L2, DRAM serves only first reads"
            for name, curve in curves.items()
        ),
    )
    for name, curve in curves.items():
        for size in sizes:
            nbytes = checks.number("--l2-sizes", size, low=0.0) * 2**20
            table.add(name, size, curve.reads(nbytes), curve.writes(nbytes))
    return table


@dataclass(frozen=True)
class Distributed:
    """Options for the GPUs of a group and their links: arguments of `studies.predict.spread`."""

    panel = "How"
    ranks: int = in_bundle(8, "Number of GPUs (ranks).", "-r")
    scheme: str = in_bundle("zigzag", f"How the work is distributed: {', '.join(SCHEMES)}.")
    ulysses: int | None = in_bundle(
        None, "usp only: number of GPUs that exchange heads with each other."
    )
    direction: str = in_bundle("forward", opt.PASS)
    algorithm: str = in_bundle("flash2-fused", opt.ALGORITHM, "-a")
    device: str = in_bundle("H200", opt.GPU)
    link: str | None = in_bundle(
        None, f"Link inside a host: {', '.join(LINKS)}. Default: the device's."
    )
    network: str = in_bundle("InfiniBand NDR", "Link between hosts; the names are those of --link.")
    host: int = in_bundle(8, "Number of GPUs per host.")

    def __post_init__(self) -> None:
        opt.one_pass(self.direction)


def ring(
    sizes: opt.Sizes = _LONG,
    causal: opt.Causal = False,
    group: Distributed = Distributed(),
    rank: int | None = option(None, "Show the steps of this rank (GPU).", panel=OUTPUT),
    out: Path | None = option(None, "Animation to write: .gif, .mp4 or .html.", "-o", panel=OUTPUT),
) -> Tables:
    """Count what each of several GPUs holds, sends and computes for attention; predict the time."""
    from flashsim.studies.predict import spread

    ready(out, (".gif", ".mp4", ".html"))
    problem = values.problem(sizes, opt.Scores(causal=causal))
    prediction = spread(problem, **vars(group))
    account = prediction.account
    tables = [account.table() if rank is None else account.rank_table(rank), prediction.table()]
    if out is not None:
        with working("drawing frames"):
            viz().animate_ranks(account, out)
        say(f"animation in {out}")
    return tables, tables[:1]  # --json and --csv print only the counts
