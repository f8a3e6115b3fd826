"""``flashsim plot``, ``animate`` and ``page``: from saved traces, or straight from sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from flashsim import l2
from flashsim.api import counting, execution
from flashsim.api.compare import Comparison
from flashsim.api.samples import TRACES, load_sample
from flashsim.api.sweep import Sweep, sweep
from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.output import ready, say, working
from flashsim.counts.traffic import Traffic
from flashsim.errors import FlashSimError, OptionError, choices
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling
from flashsim.trace.trace import Trace

#: What an IO curve runs over.
_OVER = {
    "n_q": (512, 1024, 2048, 4096, 8192, 16384),
    "head_dim": (16, 32, 64, 128, 256),
    "block_q": (16, 32, 64, 128, 256),
    "block_k": (16, 32, 64, 128, 256),
    "sram_bytes": (24576, 49152, 98304, 166912, 232448),
}
_SIZES = {"n_q", "n_kv", "head_dim", "head_dim_v", "batch", "heads", "kv_heads", "dtype"}
_COUNTED = _SIZES | {"causal", "window", "algorithms", "backward", "tiling", "device"}
_RUN = _COUNTED | {"seed", "input", "demo_data", "trace"}
#: The kinds of plots, and the options that each can use; any other one is an error.
_USES = {
    **dict.fromkeys(("traffic", "cumulative", "sram-timeline", "diff"), _RUN),
    "tile-map": _RUN | {"color"},
    "gpu-timeline": {"trace", "color", "sms", "times"},
    "io-curve": _COUNTED | {"over"},
    "roofline": _COUNTED | {"trace", "seconds"},
    "memory-footprint": (_SIZES - {"n_q", "n_kv"}) | {"algorithms", "device"},
    "l2-curve": _COUNTED,
    "mask": {"n_q", "n_kv", "causal", "window", "tiling"},
}
KINDS = tuple(_USES)
_THREE = opt.Source(algorithms="standard,flash1,flash2", how=opt.One())
_WATCHED = opt.Source()


@dataclass(frozen=True)
class Recorded:
    """Traces to draw, and the queries and keys of the first, where they are known."""

    traces: list[Trace]
    q: np.ndarray | None = None
    k: np.ndarray | None = None

    def statistics(self, row: int | None) -> Any:
        """m and l of a row; None where the trace or the tensors do not give them."""
        if self.q is None or self.k is None:
            if row is not None:
                raise OptionError(
                    "--row needs the tensors, which a saved trace does not hold; give sizes, "
                    "--input or --demo-data instead of --trace"
                )
            return None
        try:
            return _viz().row_statistics(self.traces[0], self.q, self.k, row=row)
        except FlashSimError:
            if row is None:  # nobody asked for it
                return None
            raise


def plot(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    out: opt.Out,
    source: opt.Source = _THREE,
    over: Annotated[
        str | None, typer.Option(help=f"io-curve: one of {', '.join(_OVER)}; n_q.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="roofline: measured time of one algorithm; of a GPU's trace its own."),
    ] = None,
    color: Annotated[
        str | None,
        typer.Option(help="tile-map: order, bytes, flops or block; gpu-timeline: phase or block."),
    ] = None,
    sms: Annotated[str | None, typer.Option(help="gpu-timeline: FIRST:LAST SM shown.")] = None,
    times: Annotated[str | None, typer.Option(help="gpu-timeline: FIRST:LAST µs shown.")] = None,
    theme: opt.Theme = "light",
    dpi: Annotated[float, typer.Option(min=1, help="Pixels an inch, of pixel formats.")] = 150,
    size: Annotated[str, typer.Option(help="WIDTHxHEIGHT in inches.")] = "9.6x5.4",
) -> None:
    """Draw one figure: .png, .svg, .pdf or what else Matplotlib writes.

    From one trace, or one algorithm, come tile-map, sram-timeline, l2-curve and gpu-timeline; diff
    needs two.
    """
    if kind not in KINDS:
        raise OptionError(f"unknown kind of plot {kind!r}; {choices(kind, KINDS)}")
    if kind == "gpu-timeline" and not source.trace:
        raise OptionError(
            "gpu-timeline is drawn from what a GPU recorded; give --trace FILE, or a bundled "
            f"one: {', '.join(TRACES)}"
        )
    own = {"over": over, "seconds": seconds, "color": color, "sms": sms, "times": times}
    given = opt.changed(source, _THREE) + [name for name, x in own.items() if x is not None]
    axis = "n_q" if over is None else over
    _refuse_unused(kind, given, axis)
    ready(out, _formats())
    inches = values.parse_size(size)
    if kind == "io-curve":
        data: Any = _io_sweep(source, axis)
        options: dict[str, Any] = {"x": axis}
    elif kind == "roofline":
        data, options = _roofline(source, seconds)
    elif kind == "memory-footprint":
        shape = {"n_q": 4096, "head_dim": 64, **source.sizes.given()}
        data = Problem(**shape)
        options = {"algorithms": values.parse_list("algorithms", source.algorithms, str)}
        options["device"] = source.how.device if "device" in given else None
    elif kind == "mask":
        data = values.problem(
            replace(opt.HEAD, **{"n_q": 512, **source.sizes.given()}), source.mask
        )
        tiling = values.tiling(source.how.tiling, data.head_dim, source.mask.causal)
        options = {"tiling": tiling}
    elif kind == "l2-curve":
        (counted,) = _counts(_last(source), opt.HEAD)
        with working("replaying (the first time compiles the model)"):
            data, options = l2.curves(counted), {"devices": (source.how.device,)}
    else:
        one = kind in ("tile-map", "sram-timeline") and not source.trace
        data = _recorded(_last(source) if one else source, _THREE).traces
        options = {"color": "order" if color is None else color} if kind == "tile-map" else {}
        if kind == "gpu-timeline":
            options = {
                "color": color,
                "sms": None if sms is None else values.parse_range("sms", sms),
                "times": None if times is None else values.parse_times(times),
            }
    _draw(kind, data, out, {"theme": theme, **options}, dpi, inches)
    say(f"plot in {out}")


def animate(
    out: opt.Out,
    source: opt.Source,
    row: opt.Row = None,
    fps: Annotated[float, typer.Option(help="Frames a second.")] = 15,
    max_frames: Annotated[int, typer.Option(help="A longer walk skips steps.")] = 320,
    clock: Annotated[str, typer.Option(help="What two traces share: steps or bytes.")] = "steps",
    theme: opt.Theme = "light",
) -> None:
    """Animate one trace, or two side by side, as .gif, .mp4 or .html."""
    ready(out, (".gif", ".mp4", ".html"))
    found = _recorded(source, _WATCHED)
    if row is not None and len(found.traces) != 1:
        raise OptionError(f"--row follows m and l of one trace, got {len(found.traces)}")
    with working("drawing frames"):
        _viz().animate(
            found.traces,
            out,
            statistics=found.statistics(row) if len(found.traces) == 1 else None,
            fps=fps,
            max_frames=max_frames,
            clock=clock,
            theme=theme,
        )
    say(f"animation in {out}")


def page(
    out: opt.Out,
    source: opt.Source,
    row: opt.Row = None,
    theme: Annotated[str, typer.Option(help="auto, light or dark.")] = "auto",
) -> None:
    """Write a page that plays one trace, or two side by side: one file, no network."""
    ready(out, (".html", ".htm"))
    found = _recorded(source, _WATCHED)
    _viz().page(found.traces, out, theme=theme, statistics=found.statistics(row))
    say(f"page in {out}")


def ready_to_draw(out: Path) -> None:
    """See before the work that a figure can be written."""
    ready(out, _formats())


def draw(kind: str, data: Any, out: Path, options: dict[str, Any] | None = None) -> None:
    """Draw one figure of another command's, and say where."""
    _draw(kind, data, out, options)
    say(f"plot in {out}")


def demo_figures(name: str, comparison: Comparison, out: Path) -> list[Path]:
    """One plot, one animation and one page of a bundled layer; returns where they are."""
    viz = _viz()
    sample = load_sample(name)
    # Small tiles, so that there is something to watch: 16 x 16 of them.
    result = execution.run(sample.q, sample.k, sample.v, tiling=Tiling(32, 32), trace=True)
    rows = viz.row_statistics(result.trace, sample.q, sample.k)
    paths = [out / f"{name}-{what}" for what in ("traffic.png", "flash2.gif", "flash2.html")]
    _draw("traffic", comparison.traces[: len(comparison.results)], paths[0])
    viz.animate(result, paths[1], statistics=rows, max_frames=136)
    viz.page(result, paths[2], statistics=rows)
    return paths


COMMANDS = (plot, animate, page)


def _formats() -> list[str]:
    """Endings that Matplotlib writes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return sorted("." + ending for ending in FigureCanvasAgg.get_supported_filetypes())


def _viz() -> Any:
    """`flashsim.viz`, which other commands never load."""
    from flashsim import viz

    return viz


# -- where the data come from ---------------------------------------------------------------------


def _last(source: opt.Source) -> opt.Source:
    """Its last algorithm alone, for what shows one."""
    return replace(source, algorithms=source.algorithms.split(",")[-1])


def _refuse_unused(kind: str, given: list[str], over: str) -> None:
    unused = [name for name in given if name not in _USES[kind]]
    if unused:
        fitting = [other for other, uses in _USES.items() if set(unused) <= uses]
        hint = f", but for {', '.join(fitting)}" if fitting else "; leave them out"
        raise OptionError(f"{values.flags(unused)}: not for {kind}{hint}")
    held = {"n_q": ("n_q",), "head_dim": ("head_dim",), "sram_bytes": ()}.get(over, ())
    clash = [name for name in given if kind == "io-curve" and name in held]
    if clash:
        raise OptionError(
            f"this io-curve runs over {clash[0]}: leave out {values.flags(clash)}, or give another "
            "--over"
        )


def _recorded(source: opt.Source, defaults: opt.Source) -> Recorded:
    """Saved traces, or those of running the simulator now."""
    mask, how = source.mask, source.how
    if source.trace:
        given = [name for name in opt.changed(source, defaults) if name != "trace"]
        if given:
            raise OptionError(
                f"a saved trace has its own sizes and tensors; leave out {values.flags(given)}"
            )
        return Recorded([values.load_trace(file) for file in source.trace])
    arrays = values.arrays(source.sizes, source.tensors)
    tile = values.tiling(how.tiling, arrays.q.shape[-1], mask.causal)
    names = values.parse_list("algorithms", source.algorithms, str)
    tiles = {how.direction: tile, **({"forward": None} if how.backward else {})}
    cost = values.foresee(arrays, mask, names, tiles, Device.get(how.device))
    traces = []
    with working("simulating", cost):
        for name in names:
            forward = execution.run(
                *arrays[:3],
                algorithm=name,
                causal=mask.causal,
                window=values.window(mask),
                tiling=None if how.backward else tile,
                device=how.device,
                trace=not how.backward,
                **values.unscaled(arrays),
            )
            if not how.backward:
                traces.append(forward.trace)
                continue
            dout = arrays.gradient(source.tensors.seed + 1)
            traces.append(forward.backward(dout, tiling=tile, trace=True).trace)
    return Recorded([t for t in traces if t is not None], arrays.q, arrays.k)


def _io_sweep(source: opt.Source, over: str) -> Sweep:
    """Closed forms along one axis."""
    how, mask = source.how, source.mask
    if over not in _OVER:
        raise OptionError(f"unknown axis {over!r}; {choices(over, _OVER)}")
    given = source.sizes.given()
    shape = {"n": given.pop("n_q", 4096), **given}
    tile: Any = values.parse_tiling(how.tiling)
    if over.startswith("block"):
        held = tile if isinstance(tile, Tiling) else Tiling(64, 64)
        tile = [replace(held, **{over: side}) for side in _OVER[over]]
    else:
        shape[{"n_q": "n"}.get(over, over)] = _OVER[over]
    return sweep(
        **shape,
        causal=mask.causal,
        window=values.window(mask),
        algorithm=values.parse_list("algorithms", source.algorithms, str),
        direction=how.direction,
        tiling=tile,
        device=how.device,
    )


def _counts(source: opt.Source, defaults: opt.Sizes) -> list[Traffic]:
    """Closed forms of the algorithms, of these sizes where none are given."""
    how, mask = source.how, source.mask
    problem = values.problem(replace(defaults, **source.sizes.given()), mask)
    return [
        counting.count(
            problem,
            algorithm=name,
            direction=how.direction,
            tiling=values.tiling(how.tiling, problem.head_dim, mask.causal),
            device=how.device,
        )
        for name in values.parse_list("algorithms", source.algorithms, str)
    ]


def _roofline(source: opt.Source, seconds: float | None) -> tuple[Any, dict[str, Any]]:
    """What `flashsim roofline` tabulates, or saved traces at the time that a GPU took."""
    if source.trace:
        traces = _recorded(source, _THREE).traces
        took = {t.algorithm: s for t in traces if (s := values.duration(t)) is not None}
    else:
        if source.algorithms == _THREE.algorithms:
            source = replace(source, algorithms="standard,flash2")
        traces, took = _counts(source, opt.LAYER), {}  # type: ignore[assignment]
    if seconds is not None:
        if len(traces) != 1:
            raise OptionError(
                f"--seconds is the time of one algorithm, got {len(traces)}; give one --algorithms"
            )
        took = {traces[0].algorithm: seconds}
    with working("replaying (the first time compiles the model)"):
        built_in = [t for t in traces if getattr(t, "own", None) is None]
        counts = [t.predicted() if isinstance(t, Trace) else t for t in built_in]
        left = {c.algorithm: l2.dram(c).bytes() for c in counts}
    return traces, {"seconds": took, "dram_bytes": left}


def _draw(
    kind: str,
    data: Any,
    out: Path,
    options: dict[str, Any] | None = None,
    dpi: float = 150,
    inches: tuple[float, float] | None = None,
) -> None:
    import matplotlib as mpl

    viz, options = _viz(), options or {}
    mpl.use("Agg")  # a command shows no window
    if kind in ("tile-map", "sram-timeline", "gpu-timeline"):
        if len(data) != 1:
            raise OptionError(f"{kind} shows one trace, got {len(data)}")
        data = data[0]
    if kind == "diff":
        if len(data) != 2:
            raise OptionError(f"diff takes two traces or algorithms, got {len(data)}")
        axes = viz.diff(*data, **options)
    else:
        axes = getattr(viz, kind.replace("-", "_"))(data, **options)
    viz.save_figure(axes, out, dpi=dpi, size=inches)
