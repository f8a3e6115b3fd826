"""The output of the commands: tables for people, JSON or CSV for programs."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from flashsim import report
from flashsim.api.cost import Estimate
from flashsim.cli.declare import Format
from flashsim.counts import questions, traffic
from flashsim.counts.traffic import Traffic
from flashsim.counts.work import KINDS
from flashsim.errors import OptionError, choices, printable
from flashsim.schedule.names import CODES, LEVELS, OPS
from flashsim.schedule.tensors import title
from flashsim.trace.trace import Trace

#: Width in characters of tables that are not printed on a terminal.
WIDTH = 200

_FIGURES = ("algorithm", "direction", "tile", "quantity", "of", "value", "unit")


def figures(source: Trace | Traffic) -> report.Table:
    """Return a table with one row per figure (such as the FLOPs) of a run or a count."""
    table = report.Table(f"{source.algorithm} {source.direction}", _FIGURES)
    tensors = source.by_tensor()
    for tensor in sorted(tensors, key=lambda name: CODES.get(name, len(CODES))):
        name = title(source.problem, tensor, source.direction)
        for op, nbytes in tensors[tensor].items():
            if nbytes:
                add(table, source, op, name, nbytes, "B")
    for op in questions.OPS:
        add(table, source, op, "all tensors", source.bytes(op), "B")
    add(table, source, "requested", "all tensors", source.bytes(), "B")
    add(table, source, "compulsory", "all tensors", source.compulsory(), "B")
    for kind in KINDS:
        add(table, source, "flops", kind, source.flops(kind), "FLOP")
    add(table, source, "flops", "all kinds", source.flops(), "FLOP")
    add(table, source, "intensity", None, source.intensity(), "FLOP/B")
    for op in ("read", "write"):
        add(table, source, "on chip", op, source.on_chip(op), "B")
    add(table, source, "peak SRAM", "one block", source.peak_sram(), "B")
    problem, algorithm, own = source.problem, source.algorithm, getattr(source, "own", None)
    if own is not None:
        add(table, source, "workspace", None, own.workspace, "B")
        return table
    add(table, source, "saved for backward", None, traffic.saved(problem, algorithm), "B")
    workspace = traffic.workspace(problem, algorithm, source.direction)
    add(table, source, "workspace", None, workspace, "B")
    return table


def add(table: report.Table, source: Trace | Traffic, *figure: Any) -> None:
    """Add a row to a table: a figure's quantity, what it is of, its value and its unit."""
    table.add(source.algorithm, source.direction, str(source.tiling), *figure)


def event_table(trace: Trace, limit: int) -> report.Table:
    """Return a table of a trace's first events, with tensors' names instead of codes."""
    columns = ("stage", "op", "tensor", "level", "head", "i", "j", "visit", "bytes")
    shown = "all" if trace.n_events <= limit else f"the first {limit:,}"
    table = report.Table(f"{trace.n_events:,} events, {shown}", columns)
    for e in trace.events[:limit]:
        name, op, tensor = trace.stages[e["stage"]].name, OPS[e["op"]], trace.tensors[e["tensor"]]
        numbers = (int(e[field]) for field in columns[4:])
        table.add(name, op, tensor, LEVELS[e["level"]], *numbers)
    return table


#: A command's result: tables for people and tables for programs, or the same for both.
Tables = report.Table | list[report.Table] | tuple[list[report.Table], list[report.Table]]


def show(result: Tables, form: Format | None = None) -> None:
    """Print a command's results: tables for people, or one JSON array or one CSV for programs."""
    people, full = result if isinstance(result, tuple) else (result, result)
    if form is None or not (form.json or form.csv):
        to = console()
        for n, table in enumerate([people] if isinstance(people, report.Table) else people):
            to.print(*[""] * (n > 0), table.rich(to.width), sep="\n")
        return
    tables = [full] if isinstance(full, report.Table) else full
    table = report.Table("", tables[0].columns, [row for each in tables for row in each.rows])
    typer.echo(table.json() if form.json else table.csv(), nl=form.json)


def console() -> Console:
    """Return the console that prints tables for people."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


@contextmanager
def working(
    text: str,
    cost: Estimate | None = None,
    by: str = "tiles; `flashsim count` counts the same bytes at once",
) -> Iterator[None]:
    """Announce work that takes minutes; on a terminal, also show a spinner."""
    if cost is not None and cost.seconds > 60:
        text += f", {cost}"
        say(f"{text}, estimated from the number of {by}")
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(text):
        yield


def viz() -> Any:
    """Import and return `flashsim.viz`, with a Matplotlib backend that opens no window."""
    import matplotlib as mpl

    from flashsim import viz as drawing

    mpl.use("Agg")
    return drawing


def draw(
    kind: str, data: Any, out: Path, options: dict[str, Any], note: str = "", **how: Any
) -> None:
    """Draw one plot and save it; print the file's path, followed by `note`."""
    plot = getattr(viz(), kind.replace("-", "_"))
    axes = plot(*data, **options) if kind == "diff" else plot(data, **options)
    viz().save_figure(axes, out, **how)
    say(f"plot in {out}{note}")


def ready_to_draw(path: Path | None) -> None:
    """Check that a plot can be written, before the work begins."""
    if path is not None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        types = FigureCanvasAgg.get_supported_filetypes()
        ready(path, sorted("." + ending for ending in types))


def ready(path: Path | None, endings: Sequence[str] = ()) -> None:
    """Check that a file can be written, before the work begins, and make its folder.

    An ending that is not in `endings`, a folder as `path`, or a lack of permission raises an
    `OptionError`.
    """
    if path is None:
        return
    if path.is_dir():
        raise OptionError(f"cannot write {str(path)!r}: it is a folder; name a file")
    if endings and path.suffix not in endings:
        raise OptionError(
            f"cannot write {path.name!r}, because flashsim knows no format with this ending; "
            f"choose from {choices(path.suffix, endings)}"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise OptionError(
            f"cannot write {str(path)!r}: {str(path.parent)!r} is a file, not a folder"
        ) from None
    except OSError as error:
        raise OptionError(f"cannot write {str(path)!r}: {error.strerror}") from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(f"cannot write {str(path)!r}: permission denied; choose another folder")


def say(text: str) -> None:
    """Print a message on stderr, because stdout is only for results."""
    typer.echo(printable(text), err=True)
