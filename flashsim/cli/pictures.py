"""``flashsim plot``, ``animate`` and ``page``: from saved traces, or straight from sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from flashsim.api import counting, execution
from flashsim.api.compare import Comparison
from flashsim.api.samples import TRACES, load_sample
from flashsim.api.sweep import sweep
from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.output import ready, say, working
from flashsim.errors import FlashSimError, OptionError, choices
from flashsim.problem.hardware import Device
from flashsim.report import beside
from flashsim.schedule.tiling import Tiling
from flashsim.trace.trace import Trace

#: What each kind of plot is drawn from.
FROM_TRACES = ("traffic", "tile-map", "cumulative", "sram-timeline", "diff", "gpu-timeline")
FROM_SIZES = ("io-curve", "roofline", "memory-footprint")
_DPI = 150  # of pixel formats: 1440 x 810
KINDS = (*FROM_TRACES, *FROM_SIZES)
_OVER = {
    "n_q": (512, 1024, 2048, 4096, 8192, 16384),
    "head_dim": (16, 32, 64, 128, 256),
    "block_q": (16, 32, 64, 128, 256),
    "sram_bytes": (24576, 49152, 98304, 166912, 232448),
}

_THREE = opt.Source(algorithms="standard,flash1,flash2", how=opt.One())


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
    over: Annotated[str, typer.Option(help=f"io-curve: one of {', '.join(_OVER)}.")] = "n_q",
    color: Annotated[
        str | None,
        typer.Option(help="tile-map: order, bytes or flops; gpu-timeline: phase or block."),
    ] = None,
    sms: Annotated[str | None, typer.Option(help="gpu-timeline: FIRST:LAST SM shown.")] = None,
    times: Annotated[str | None, typer.Option(help="gpu-timeline: FIRST:LAST µs shown.")] = None,
    theme: opt.Theme = "light",
) -> None:
    """Draw one figure: .png, .svg, .pdf or what else Matplotlib writes.

    From one trace, or one algorithm, come tile-map, sram-timeline and gpu-timeline; diff needs two.
    """
    if kind not in KINDS:
        raise OptionError(f"unknown kind of plot {kind!r}; {choices(kind, KINDS)}")
    ready(out, _formats())
    if kind in FROM_SIZES:
        if source.trace:
            raise OptionError(f"{kind} is drawn from sizes, not from a trace; leave out --trace")
        data = _counted(kind, source, over)
        options: dict[str, Any] = {"x": over} if kind == "io-curve" else {}
    else:
        if kind in ("tile-map", "sram-timeline"):
            source = replace(source, algorithms=source.algorithms.split(",")[-1])
        for name, value in {"sms": sms, "times": times}.items():
            if value is not None and kind != "gpu-timeline":
                raise OptionError(f"--{name} is for gpu-timeline, not for {kind}")
        if kind == "gpu-timeline" and not source.trace:
            raise OptionError(
                "gpu-timeline is drawn from what a GPU recorded; give --trace FILE, or a bundled "
                f"one: {', '.join(TRACES)}"
            )
        data = _recorded(source).traces
        options = {"color": color or "order"} if kind == "tile-map" else {}
        if kind == "gpu-timeline":
            options = {
                "color": color,
                "sms": values.parse_range("sms", sms) if sms else None,
                "times": values.parse_times(times) if times else None,
            }
    _draw(kind, data, out, theme, options)
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
    found = _recorded(source)
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
    found = _recorded(source)
    _viz().page(found.traces, out, theme=theme, statistics=found.statistics(row))
    say(f"page in {out}")


def demo_figures(name: str, comparison: Comparison, out: Path) -> list[Path]:
    """One plot, one animation and one page of a bundled layer; returns where they are."""
    viz = _viz()
    sample = load_sample(name)
    # Small tiles, so that there is something to watch: 16 x 16 of them.
    result = execution.run(sample.q, sample.k, sample.v, tiling=Tiling(32, 32), trace=True)
    rows = viz.row_statistics(result.trace, sample.q, sample.k)
    paths = [out / f"{name}-{what}" for what in ("traffic.png", "flash2.gif", "flash2.html")]
    _draw("traffic", comparison.traces[: len(comparison.results)], paths[0], "light", {})
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


def _recorded(source: opt.Source) -> Recorded:
    """Saved traces, or those of running the simulator now."""
    mask, how = source.mask, source.how
    if source.trace:
        given = [*source.sizes.given()]
        given += [name for name in ("input", "demo_data") if getattr(source.tensors, name)]
        given += [name for name in ("causal", "window") if getattr(mask, name)]
        given += ["backward"] * how.backward
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
            )
            if not how.backward:
                traces.append(forward.trace)
                continue
            dout = arrays.gradient(source.tensors.seed + 1)
            traces.append(forward.backward(dout, tiling=tile, trace=True).trace)
    return Recorded([t for t in traces if t is not None], arrays.q, arrays.k)


def _counted(kind: str, source: opt.Source, over: str) -> Any:
    """A problem, counts or a sweep, in closed form."""
    how, mask = source.how, source.mask
    names = values.parse_list("algorithms", source.algorithms, str)
    given = source.sizes.given()
    if kind == "io-curve":
        if over not in _OVER:
            raise OptionError(f"unknown axis {over!r}; {choices(over, _OVER)}")
        shape = {"n": given.pop("n_q", 4096), **given}
        tile: Any = values.parse_tiling(how.tiling)
        if over == "block_q":
            columns = tile.block_k if isinstance(tile, Tiling) else 64
            tile = [Tiling(side, columns) for side in _OVER[over]]
        else:
            shape[{"n_q": "n"}.get(over, over)] = _OVER[over]
        return sweep(
            **shape,
            causal=mask.causal,
            window=values.window(mask),
            algorithm=names,
            direction=how.direction,
            tiling=tile,
            device=how.device,
        )
    problem = values.problem(replace(source.sizes, **{"n_q": 4096, "head_dim": 64, **given}), mask)
    if kind == "memory-footprint":
        return problem
    tile = values.tiling(how.tiling, problem.head_dim, mask.causal)
    return [
        counting.count(
            problem, algorithm=name, direction=how.direction, tiling=tile, device=how.device
        )
        for name in names
    ]


def _draw(kind: str, data: Any, out: Path, theme: str, options: dict[str, Any]) -> None:
    import matplotlib as mpl

    viz = _viz()
    mpl.use("Agg")  # a command shows no window
    if kind in ("tile-map", "sram-timeline", "gpu-timeline"):
        if len(data) != 1:
            raise OptionError(f"{kind} shows one trace, got {len(data)}")
        data = data[0]
    if kind == "diff":
        if len(data) != 2:
            raise OptionError(f"diff takes two traces or algorithms, got {len(data)}")
        axes = viz.diff(*data, theme=theme)
    else:
        axes = getattr(viz, kind.replace("-", "_"))(data, theme=theme, **options)
    with beside(out) as part:
        axes.figure.savefig(part, dpi=_DPI)
