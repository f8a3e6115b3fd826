"""The commands that draw: ``flashsim plot``, ``animate``, ``page`` and ``lab``."""

import csv
import io
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from flashsim import l2
from flashsim.api import execution
from flashsim.api.compare import Comparison
from flashsim.api.cost import fits
from flashsim.api.samples import TRACES, load_sample, random_inputs
from flashsim.api.sweep import Sweep, sweep
from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.declare import OUTPUT, option, pair, written
from flashsim.cli.output import draw, ready, ready_to_draw, say, viz, working
from flashsim.counts.traffic import Traffic
from flashsim.errors import FlashSimError, OptionError
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.tiling import Tiling
from flashsim.trace.counted import counted
from flashsim.trace.trace import Trace

#: Quantities on the x axis of an IO curve, and their values.
_OVER = {
    "n_q": (512, 1024, 2048, 4096, 8192, 16384),
    "head_dim": (16, 32, 64, 128, 256),
    "block_q": (16, 32, 64, 128, 256),
    "block_k": (16, 32, 64, 128, 256),
    "sram_bytes": (24576, 49152, 98304, 166912, 232448),
}
_SIZES = {"n_q", "n_kv", "head_dim", "head_dim_v", "batch", "heads", "kv_heads", "dtype"}
_COUNTED = _SIZES | {"causal", "window", "algorithm", "direction", "tiling", "device"}
_RUN = _COUNTED | {"seed", "input", "demo_data", "trace", "execute"}
#: The kinds of plots, and the options that each can use; other options are errors.
_USES = {
    **dict.fromkeys(("traffic", "cumulative", "sram-timeline", "diff"), _RUN),
    "tile-map": _RUN | {"color"},
    "gpu-timeline": {"trace", "color", "sms", "times"},
    "io-curve": _COUNTED | {"over"},
    "roofline": _COUNTED | {"trace", "seconds", "measured"},
    "heads": (_COUNTED - {"kv_heads"}),
    "memory-footprint": (_SIZES - {"n_q", "n_kv"}) | {"algorithm", "device"},
    "l2-curve": _COUNTED,
    "mask": {"n_q", "n_kv", "causal", "window", "tiling"},
}
KINDS = tuple(_USES)
#: The largest inputs, in bytes, that are drawn only to follow one row of scores.
_SMALL = 1 << 26
_ALWAYS = {"out", "theme", "dpi", "size", "slides"}
_ROW = option(None, "Query row whose running maximum m and sum l are shown.")


@dataclass(frozen=True)
class Recordings:
    """The traces or counts to draw, and the tensors Q and K of the first one if they are known."""

    traces: list[Trace | Traffic]
    q: np.ndarray | None = None
    k: np.ndarray | None = None
    seed: int = 0

    @property
    def how(self) -> str:
        """A note for pictures that show a count instead of a run; "" for other pictures."""
        counts = any(isinstance(trace, Traffic) for trace in self.traces)
        return " (counted by formula; --execute simulates it on tensors)" if counts else ""

    def statistics(self, row: int | None) -> Any:
        """Return m and l of one row of scores after each tile, or None if they are not known.

        For a count, m and l are computed from random tensors.
        """
        first = self.traces[0]
        if isinstance(first, Traffic) and (row is not None or first.compulsory() < _SMALL):
            fits(first.compulsory(), "leave --row out")
            q, k, *_ = random_inputs(first.problem, self.seed)
            return replace(self, traces=[counted(first)], q=q, k=k).statistics(row)
        if self.q is None or self.k is None:
            if row is not None:
                raise OptionError(
                    "--row needs tensors, which a saved trace does not contain; pass sizes, "
                    "--input or --demo-data instead of --trace"
                )
            return None
        try:
            return viz().row_statistics(first, self.q, self.k, row=row)
        except FlashSimError:
            if row is None:  # the row was not requested
                return None
            raise


def plot(
    typed: typer.Context,
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    out: opt.Out,
    source: opt.Source = opt.Source(algorithm="standard,flash1,flash2"),
    over: str | None = option(
        None, f"io-curve: quantity on the x axis, one of {', '.join(_OVER)}. Default: n_q."
    ),
    seconds: float | None = option(
        None, "roofline: measured time of one algorithm in seconds; a GPU's trace contains its own."
    ),
    color: str | None = option(
        None,
        "Quantity shown by color. tile-map: order, bytes, flops or block; gpu-timeline: phase or "
        "block.",
    ),
    sms: tuple[int, int] | None = option(
        None, "gpu-timeline: show SMs FIRST:LAST.", read=pair(":", int, "FIRST:LAST, e.g. 0:3")
    ),
    times: tuple[float, float] | None = option(
        None,
        "gpu-timeline: show FIRST:LAST µs.",
        read=pair(":", float, "FIRST:LAST in µs, e.g. 0:40"),
    ),
    measured: Path | None = option(
        None, "roofline: your measured times, a CSV file with columns algorithm and seconds."
    ),
    theme: opt.Theme = "light",
    slides: bool = option(
        False, "Format for slides: 16:9 with large text, written as .png and .svg.", panel=OUTPUT
    ),
    dpi: float = option(150, "Pixels per inch, for pixel formats.", panel=OUTPUT, min=1),
    size: tuple[float, float] = option(
        "9.6x5.4", "Size of the plot, WIDTHxHEIGHT in inches.", read=values.parse_size, panel=OUTPUT
    ),
) -> None:
    """Draw one plot, as .png, .svg, .pdf or another format of Matplotlib's.

    The plots tile-map, sram-timeline, l2-curve and gpu-timeline show one trace or algorithm; diff
    shows two.
    """
    checks.one_of("kind of plot", kind, KINDS)
    if kind == "gpu-timeline" and not source.trace:
        raise OptionError(
            "gpu-timeline needs a trace that was recorded on a GPU; pass --trace FILE, or "
            f"--trace with the name of an included trace: {', '.join(TRACES)}"
        )
    typed_names = [name for name in written(typed) if name not in _ALWAYS]
    axis = "n_q" if over is None else over
    _refuse_unused(kind, typed_names, axis)
    ready_to_draw(out)
    how = ""
    if kind == "io-curve":
        data: Any = _io_sweep(source, axis)
        options: dict[str, Any] = {"x": axis}
    elif kind == "roofline":
        data, options = _roofline(source, _times(seconds, measured), typed_names)
    elif kind == "heads":
        data, options = _by_heads(source, typed_names), {}
    elif kind == "memory-footprint":
        shape = {"n_q": 4096, "head_dim": 64, **source.sizes.given()}
        data = Problem(**shape)
        options = {"algorithms": source.names()}
        options["device"] = source.how.device if "device" in typed_names else None
    elif kind == "mask":
        data = values.problem(
            replace(opt.HEAD, **{"n_q": 512, **source.sizes.given()}), source.mask
        )
        text = source.how.tiling  # by default the plot's own
        tiling = None if text == "same" else values.tiling(text, data.head_dim, data.causal)
        options = {"tiling": tiling}
    elif kind == "l2-curve":
        (counted,) = _counts(source.last(), opt.HEAD)
        with working("replaying (the first time compiles the model)"):
            data, options = l2.curves(counted), {"devices": (source.how.device,)}
    else:
        single = kind in ("tile-map", "sram-timeline") and not source.trace
        totals = kind in ("traffic", "diff")
        recorded = _recorded(source.last() if single else source, typed_names, events=not totals)
        data, how = recorded.traces, recorded.how
        options = {"color": "order" if color is None else color} if kind == "tile-map" else {}
        if kind == "gpu-timeline":
            options = {"color": color, "sms": sms, "times": times}
    needed = {"diff": 2, "tile-map": 1, "sram-timeline": 1, "gpu-timeline": 1}.get(kind)
    if needed and len(data) != needed:
        takes = "two traces or algorithms" if kind == "diff" else "one trace"
        raise OptionError(f"the plot {kind} shows {takes}, got {len(data)} of them")
    if needed == 1:
        data = data[0]
    kind = "traffic" if kind == "heads" else kind
    if slides and (clash := {"dpi", "size"} & set(written(typed))):
        raise OptionError(
            "--slides chooses the size and resolution itself; leave out "
            f"{values.flags(sorted(clash))}, or leave out --slides"
        )
    form: dict[str, Any] = {"slides": True} if slides else {"dpi": dpi, "size": size}
    draw(kind, data, out, {"theme": theme, **options}, note=how, **form)


def animate(
    typed: typer.Context,
    out: opt.Out,
    source: opt.Source,
    row: int | None = _ROW,
    fps: float = option(15, "Frames per second.", panel=OUTPUT),
    max_frames: int = option(320, "The most frames; a longer trace skips steps.", panel=OUTPUT),
    clock: str = option(
        "steps", "How two traces advance together: by steps or by bytes.", panel=OUTPUT
    ),
    theme: opt.Theme = "light",
) -> None:
    """Animate one trace, or two side by side; write a .gif, .mp4 or .html file."""
    ready(out, (".gif", ".mp4", ".html"))
    recorded = _recorded(source, written(typed))
    if row is not None and len(recorded.traces) != 1:
        raise OptionError(
            f"--row shows m and l of one trace, got {len(recorded.traces)} traces; pass one "
            "algorithm, or leave out --row"
        )
    with working("drawing frames"):
        rows = recorded.statistics(row) if len(recorded.traces) == 1 else None
        how: dict[str, Any] = {"fps": fps, "max_frames": max_frames, "clock": clock, "theme": theme}
        viz().animate(recorded.traces, out, statistics=rows, **how)
    say(f"animation in {out}{recorded.how}")


def page(
    typed: typer.Context,
    out: opt.Out,
    source: opt.Source,
    row: int | None = _ROW,
    theme: str = option("auto", "Colors: auto, light or dark.", panel=OUTPUT),
    max_mb: float = option(32, "Largest file to write, in MB.", panel=OUTPUT, min=0),
) -> None:
    """Write an HTML page that plays one trace, or two side by side, without a network."""
    ready(out, (".html", ".htm"))
    recorded = _recorded(source, written(typed))
    viz().page(
        recorded.traces, out, theme=theme, statistics=recorded.statistics(row), max_mb=max_mb
    )
    say(f"page in {out}{recorded.how}")


def lab(
    out: opt.Out, theme: str = option("auto", "Colors: auto, light or dark.", panel=OUTPUT)
) -> None:
    """Write the tile lab: an HTML page with sliders that counts any shape, mask and tile."""
    ready(out, (".html", ".htm"))
    viz().lab(out, theme=theme)
    say(f"tile lab in {out}")


def demo_figures(name: str, comparison: Comparison, out: Path) -> list[Path]:
    """Draw a plot, an animation and a page for a layer of the demo data; return their paths."""
    drawing = viz()
    sample = load_sample(name)
    # Small tiles, so that the animation has 16 x 16 tiles.
    result = execution.run(sample.q, sample.k, sample.v, tiling=Tiling(32, 32), trace=True)
    rows = drawing.row_statistics(result.trace, sample.q, sample.k)
    paths = [out / f"{name}-{what}" for what in ("traffic.png", "flash2.gif", "flash2.html")]
    drawing.save_figure(drawing.traffic(comparison.traces[: len(comparison.results)]), paths[0])
    drawing.animate(result, paths[1], statistics=rows, max_frames=136)
    drawing.page(result, paths[2], statistics=rows)
    return paths


# -- where the data come from ---------------------------------------------------------------------


def _refuse_unused(kind: str, typed: list[str], over: str) -> None:
    unused = [name for name in typed if name not in _USES[kind]]
    if unused:
        fitting = [other for other, uses in _USES.items() if set(unused) <= uses]
        hint = f", or plot {', '.join(fitting)} instead" if fitting else ""
        raise OptionError(
            f"the plot {kind} cannot use {values.flags(unused)}; leave out "
            f"{values.flags(unused) + hint}"
        )
    held = {"n_q": ("n_q",), "head_dim": ("head_dim",), "sram_bytes": ()}.get(over, ())
    clash = [name for name in typed if kind == "io-curve" and name in held]
    if clash:
        raise OptionError(
            f"this IO curve varies {clash[0]} along its x axis; leave out {values.flags(clash)}, "
            "or pass another --over"
        )


def _recorded(source: opt.Source, typed: list[str], *, events: bool = True) -> Recordings:
    """Return saved traces, traces of runs (--execute, or the user's tensors), or else counts.

    If `events` is true, algorithms that split keys are simulated, because their closed form gives
    only totals.
    """
    mask, how = source.mask, source.how
    if source.trace:
        if clash := [name for name in typed if name in _RUN - {"trace"}]:
            raise OptionError(
                f"a saved trace already determines its problem; leave out {values.flags(clash)}"
            )
        return Recordings([values.load_trace(file) for file in source.trace])
    names = source.names()
    for name in names:
        plans.check_algorithm(name)
    tensors, backward = source.tensors, how.direction == "backward"
    device = Device.get(how.device)
    parts = [name for name in names if events and plans.splits_keys(name)]
    if not (source.execute or parts or tensors.input is not None or tensors.demo_data is not None):
        sizes = replace(source.sizes, n_q=512 if source.sizes.n_q is None else source.sizes.n_q)
        counts = [values.counted(sizes, mask, name, how, among=names) for name in names]
        return Recordings([*counts], seed=tensors.seed)
    values.check_seed(tensors, typed, backward)
    arrays = values.arrays(source.sizes, tensors)
    whole = values.problem_of(arrays, mask)
    tile = values.one_tiling(how.tiling, whole, names, [how.direction], device)
    tiles = {"forward": None, how.direction: tile}
    cost = values.foresee(arrays, mask, names, tiles, device)
    asked: dict[str, Any] = {
        "causal": mask.causal,
        "window": values.window(mask),
        "device": how.device,
    }
    asked |= {"tiling": None if backward else tile, **values.unscaled(arrays)}
    traces: list[Any] = []
    with working("simulating", cost):
        for name in names:
            ran: Any = execution.run(*arrays[:3], algorithm=name, trace=not backward, **asked)
            if backward:
                ran = ran.backward(arrays.gradient(tensors.seed + 1), tiling=tile, trace=True)
            traces.append(ran.trace)
    return Recordings(traces, arrays.q, arrays.k)


def _io_sweep(source: opt.Source, over: str) -> Sweep:
    """Count bytes in closed form for several values of one size."""
    how, mask = source.how, source.mask
    checks.one_of("--over", over, _OVER)
    sizes = source.sizes.given()
    shape = {"n": sizes.pop("n_q", 4096), **sizes}
    tile: Any = None if how.tiling == "same" else values.parse_tiling(how.tiling)
    if tile is None and over != "sram_bytes":  # whose point is that tiles grow
        largest = Problem(64, head_dim=max(_OVER[over]) if over == "head_dim" else 64)
        largest = replace(largest, **{n: x for n, x in sizes.items() if n in ("head_dim", "dtype")})
        tile = Tiling.common(largest, how.device, source.names(), [how.direction])
    if over.startswith("block"):
        held = tile if isinstance(tile, Tiling) else Tiling(64, 64)
        tile = [replace(held, **{over: side}) for side in _OVER[over]]
    else:
        shape[{"n_q": "n"}.get(over, over)] = _OVER[over]
    return sweep(
        **shape,
        causal=mask.causal,
        window=values.window(mask),
        algorithm=source.names(),
        direction=how.direction,
        tiling=tile,
        device=how.device,
    )


def _counts(source: opt.Source, defaults: opt.Sizes) -> list[Traffic]:
    """Return closed-form counts for the user's sizes; `defaults` has the remaining sizes."""
    sizes = replace(defaults, **source.sizes.given())
    names = source.names()
    return [values.counted(sizes, source.mask, name, source.how, among=names) for name in names]


def _by_heads(source: opt.Source, typed: list[str]) -> dict[str, Traffic]:
    """Return counts for MHA, for GQA (four query heads per KV head), and for MQA (one KV head)."""
    sizes = replace(opt.LAYER, **{"heads": 32, **source.sizes.given()})
    heads = sizes.heads or 1
    few = sizes.n_q is not None and sizes.n_q <= 16  # decoding
    name = source.last().algorithm if "algorithm" in typed else "flash-decode" if few else "flash2"
    shares = {"MHA": heads, "GQA": max(heads // 4, 1), "MQA": 1}
    if heads % 4 or heads < 8:
        raise OptionError(
            "the plot `heads` compares MHA, GQA with four query heads per KV head, and MQA, so "
            f"--heads must be a multiple of 4 and at least 8, got {heads}"
        )
    counts = {}
    for kind, n in shares.items():
        shared = replace(sizes, kv_heads=n)
        counts[f"{kind}, {n} KV head{'s' * (n > 1)}"] = values.counted(
            shared, source.mask, name, source.how
        )
    return counts


def _times(seconds: float | None, file: Path | None) -> float | dict[str, float] | None:
    """Return measured seconds: one number, or a dict by algorithm from a CSV file."""
    if file is None:
        return seconds
    if seconds is not None:
        raise OptionError(
            "--seconds and --measured both give measured times; pass only one of them"
        )
    reader = csv.DictReader(io.StringIO(values.read_text(file)))
    if not {"algorithm", "seconds"} <= set(reader.fieldnames or ()):
        raise OptionError(
            f"{file} must have the columns algorithm and seconds, with rows such as "
            f"flash2,0.0012, got the columns {', '.join(reader.fieldnames or ()) or 'none'}"
        )
    times: dict[str, float] = {}
    for row in reader:
        name = plans.check_algorithm((row["algorithm"] or "").strip())
        try:
            took = float(row["seconds"])
        except (TypeError, ValueError):
            took = math.nan
        if not 0 < took < math.inf:
            raise OptionError(
                f"in {file}, line {reader.line_num}, seconds must be a positive number, got "
                f"{row['seconds']!r}"
            )
        if name in times:
            raise OptionError(
                f"in {file}, line {reader.line_num}, algorithm {name} appears for the second "
                "time; keep one of the two rows"
            )
        times[name] = took
    if not times:
        raise OptionError(f"{file} has no rows; add a row per measured algorithm")
    return times


def _roofline(
    source: opt.Source, seconds: float | dict[str, float] | None, typed: list[str]
) -> tuple[Any, dict[str, Any]]:
    """Return counts or saved traces, and options for drawing a roofline, such as measured times."""
    if source.trace:
        traces = _recorded(source, typed).traces
        took = {
            t.algorithm: took
            for t in traces
            if isinstance(t, Trace) and (took := values.duration(t)) is not None
        }
    else:
        if isinstance(seconds, dict) and "algorithm" not in typed:
            source = replace(source, algorithm=",".join(seconds))
        elif "algorithm" not in typed:
            source = replace(source, algorithm="standard,flash2")
        traces, took = _counts(source, opt.LAYER), {}  # type: ignore[assignment]
    if isinstance(seconds, dict):
        if missing := set(seconds) - {t.algorithm for t in traces}:
            raise OptionError(
                f"the file passed as --measured has times of {', '.join(sorted(missing))}, which "
                "the plot does not show; add these to --algorithm, or remove their rows"
            )
        took |= seconds
    elif seconds is not None:
        if len(traces) != 1:
            raise OptionError(
                f"--seconds is the time of one algorithm, but the plot shows {len(traces)}; pass "
                "one --algorithm"
            )
        took = {traces[0].algorithm: seconds}
    with working("replaying (the first time compiles the model)"):
        built_in = [t for t in traces if getattr(t, "own", None) is None]
        counts = [t.predicted() if isinstance(t, Trace) else t for t in built_in]
        left = {c.algorithm: l2.dram(c).bytes() for c in counts}
    return traces, {"seconds": took, "dram_bytes": left}
