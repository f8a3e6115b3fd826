"""Commands of a course: list, start, hint, predict, reveal, grade."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flashsim import report
from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.output import Tables, ready, say, show, viz
from flashsim.counts.questions import in_words
from flashsim.counts.traffic import Traffic
from flashsim.errors import OptionError, printable
from flashsim.exercises import shelf, subprocess_grader
from flashsim.exercises.exercise import Exercise
from flashsim.exercises.picture import draw
from flashsim.report import beside
from flashsim.schedule.dataflow import ALGORITHMS
from flashsim.trace.trace import Trace

_QUIZ = opt.One(tiling="same")
_Name = Annotated[str, typer.Argument(help="Of `flashsim exercise list`, or a .py file.")]


def listed() -> Tables:
    """List the exercises, in the order of the course."""
    table = report.Table(
        "Exercises",
        ("name", "what", "full marks B", "SRAM B", "hints"),
        note="flashsim exercise start NAME writes a file to fill in; flashsim exercise grade FILE "
        "grades it",
    )
    for name in shelf.names():
        one = shelf.get(name)
        sram = None if one.questions else one.task.sram_bytes
        full = None if one.questions else one.full_marks_bytes
        table.rows.append((name, one.title, full, sram, len(one.hints)))
    return table


def start(
    name: _Name,
    out: Path | None = opt.option(None, "File to write. Default: NAME.py, here.", "-o"),
    force: bool = opt.option(False, "Overwrite a file that is there."),
) -> None:
    """Write the file to fill in: the statement, and a skeleton."""
    one = shelf.get(name)
    path = out or Path(f"{one.name.replace('-', '_')}.py")
    if path.exists() and not force:
        raise OptionError(f"{str(path)!r} is there already; --force overwrites it")
    ready(path, (".py",))
    with beside(path) as part:
        part.write_text(one.file_text, encoding="utf-8")
    grading = f"flashsim exercise grade {path}" + (
        f" --exercise {name}" if name.endswith(".py") else ""
    )
    typer.echo(f"{path}: fill it in, then `{grading}`; `flashsim exercise hint {name}` helps")


def hint(
    name: _Name,
    number: int = opt.option(1, "Which one.", min=1),
) -> None:
    """Show a hint: 1 is a nudge, the last nearly everything."""
    hints = shelf.get(name).hints
    if number > len(hints):
        raise OptionError(f"{name} has {len(hints)} hints, got --number {number}")
    typer.echo(f"{number} of {len(hints)}: {hints[number - 1]}")


def reveal(name: _Name) -> None:
    """Print a reference solution, which gets every point; if you save it, it can be graded."""
    one = shelf.get(name)
    typer.echo(f"# flashsim exercise: {one.name}\n\n{one.solution_source}", nl=False)


def _number(name: str, text: str) -> int:
    """A number of bytes; a comma, an underscore or a space may stand between thousands."""
    digits = re.sub(r"[,_ \u2009\u202f]", "", text)
    if not digits.isdecimal() or len(digits) > 30:
        raise OptionError(f"{name} takes a number of bytes in digits, e.g. 30,000; got {text!r}")
    return int(digits)


def _asked(what: str, option: str) -> int:
    """A number that is typed at the terminal; asked again until it is one."""
    while True:
        typer.echo(f"{what}, in digits: ", nl=False)
        line = "" if sys.stdin is None else sys.stdin.readline()
        if not line:
            typer.echo()
            raise OptionError(f"nobody answers here: stdin is closed; give {option}")
        try:
            return _number("the answer", line.strip())
        except OptionError as error:
            typer.echo(error)


def predict(
    sizes: opt.Sizes,
    mask: opt.Mask,
    how: opt.One = _QUIZ,
    name: str | None = typer.Argument(
        None, help="Of `flashsim exercise list`, or a .py file. Without it: a shape of your own."
    ),
    algorithm: str = opt.option("flash2", "Without a name: what is counted.", "-a"),
    loaded: int | None = opt.option(None, "Your bytes. Default: you are asked.", read=_number),
    stored: int | None = opt.option(None, "Your bytes. Default: you are asked.", read=_number),
    plot: opt.Plot = None,
    *,
    typed: typer.Context,
) -> None:
    """Guess how many bytes move, then see the answer. For the lecture hall.

    The question is an exercise's, or (without a name) a shape that you give with -n, -d, --heads.
    """
    ready(plot)
    if name is None:
        _predict_shape(sizes, mask, how, algorithm, (loaded, stored), plot)
        return
    opt.refuse_unused(
        typed, "an exercise, which has its shape", only=("name", "loaded", "stored", "plot")
    )
    one = shelf.get(name)
    typer.echo(f"{textwrap.dedent(one.statement).strip()}\n\n{one.sizes}\n")
    trace = one.executed.trace
    _judge(name, (loaded, stored), trace)
    if plot is not None:
        _draw({"the reference": trace}, one, plot)


def _predict_shape(
    sizes: opt.Sizes,
    mask: opt.Mask,
    how: opt.One,
    algorithm: str,
    said: tuple[int | None, int | None],
    plot: Path | None,
) -> None:
    """The question for a shape of your own; the answer is counted."""
    whole = replace(sizes, **{"n_q": 1024, **sizes.given()})
    counted = values.counted(whole, mask, algorithm, how)
    typer.echo(
        f"How many bytes does {ALGORITHMS[algorithm].title} {how.direction} load from HBM, and how "
        f"many does it store?\n{in_words(counted.problem)}, tiles of {counted.tiling}\n"
    )
    _judge("your shape", said, counted)
    if plot is not None:
        viz().save_figure(viz().traffic(counted), plot)
        say(f"plot in {plot}")


def _judge(name: str, given: tuple[int | None, int | None], counted: Trace | Traffic) -> None:
    """Ask for what was not said, and show it beside what was measured or counted."""
    options = ("loaded", "--loaded"), ("stored", "--stored")
    guesses = [
        _asked(f"bytes {what}", option) if guess is None else guess
        for guess, (what, option) in zip(given, options, strict=True)
    ]
    table = report.Table(
        f"{name}: said and measured", ("bytes", "said B", "measured B", "said / measured")
    )
    # What is added to HBM in place counts as stored.
    right = counted.bytes("load"), counted.bytes("store") + counted.bytes("reduce")
    for what, measured, guess in zip(("loaded", "stored"), right, guesses, strict=True):
        table.rows.append((what, guess, measured, guess / measured))
    exact = tuple(guesses) == right
    table.note = "to the byte!" if exact else "where they are, tensor by tensor, is below"
    show([table, counted.table()])


def grade(
    file: Annotated[Path, typer.Argument(help="What `flashsim exercise start` wrote, filled in.")],
    exercise: str | None = opt.option(None, "A name or a .py file. Default: what the file says."),
    json: bool = opt.option(False, "Print JSON instead of tables."),
    gradescope: Path | None = opt.option(None, "Also write a results.json as Gradescope reads it."),
    plot: opt.Plot = None,
    save: Path | None = opt.option(None, "Save the trace (.npz)."),
    timeout: float = opt.option(subprocess_grader.LIMIT, "Seconds that it may take.", min=0.1),
    memory: int | None = opt.option(
        None, f"MiB that it may take (Linux). Default: {subprocess_grader.MEMORY:,}.", min=1
    ),
) -> None:
    """Grade a solution by results, on-chip memory and bytes; in words, and in points of 100."""
    for path in (gradescope, plot, save):
        ready(path)
    if gradescope is not None and exercise is not None and not file.is_file():
        marks, trace = (
            subprocess_grader.missing(file, exercise),
            None,
        )  # a student's fault: points, no error
    else:
        marks, trace = subprocess_grader.grade_file(file, exercise, limit=timeout, memory=memory)
    typer.echo(marks.json() if json else printable(marks.text()))
    if gradescope is not None:
        with beside(gradescope) as part:
            part.write_text(marks.gradescope(), encoding="utf-8")
        say(f"Gradescope's results in {gradescope}")
    if trace is None:
        return
    if save is not None:
        trace.save(save)
        say(f"trace in {save}")
    if plot is not None:
        one = shelf.get(
            exercise or subprocess_grader.exercise_of(subprocess_grader.text_of(file)) or ""
        )
        _draw({"yours": trace, "full marks": one.executed.trace}, one, plot)


def _draw(traces: dict[str, Trace], one: Exercise, path: Path) -> None:
    """Draw the bytes by tensor, and print the picture's path."""
    viz().save_figure(draw(traces, one), path)
    say(f"plot in {path}")
