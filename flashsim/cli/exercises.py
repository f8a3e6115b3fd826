"""The `flashsim exercise` commands: list, start, hint, predict, reveal, grade, check."""

import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flashsim import report
from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.declare import Format, option, refuse_unused
from flashsim.cli.output import Tables, ready, say, show, viz
from flashsim.counts.questions import in_words
from flashsim.counts.traffic import Traffic
from flashsim.errors import OptionError, printable
from flashsim.exercises import checking, shelf, submissions
from flashsim.exercises.exercise import Exercise
from flashsim.exercises.homework import exercises_of, grade_homework, homework_in, together
from flashsim.exercises.kernel_exercise import KernelExercise
from flashsim.exercises.kernel_grading import LIMIT, MEMORY
from flashsim.exercises.marks import Marks
from flashsim.exercises.picture import draw
from flashsim.exercises.runner import plain
from flashsim.report import Table, beside
from flashsim.schedule.dataflow import ALGORITHMS
from flashsim.trace.trace import Trace

_COLUMNS = (
    *("file", "exercise", "points", "of", "results", "safe", "on chip", "bytes", "moved B", "why"),
)
_Name = Annotated[str, typer.Argument(help="A name from `flashsim exercise list`, or a .py file.")]


def listed() -> Tables:
    """List the exercises, in the order of the course."""
    table = report.Table(
        "Exercises",
        ("name", "what", "full marks B", "SRAM B", "hints"),
        note="flashsim exercise start NAME writes a file to complete; flashsim exercise grade FILE "
        "grades it; kernel-... exercises are solved in Triton or Pallas",
    )
    for name in (*shelf.names(), *shelf.kernel_names()):
        exercise, full, sram = shelf.find(name), None, None
        if isinstance(exercise, KernelExercise) or not exercise.questions:
            task = exercise.tasks[0] if isinstance(exercise, KernelExercise) else exercise.task
            full, sram = exercise.full_marks_bytes, task.sram_bytes
        table.add(name, exercise.title, full, sram, len(exercise.hints))
    return table


def start(
    name: _Name,
    out: Path | None = option(None, "File to write. Default: NAME.py in this folder.", "-o"),
    force: bool = option(False, "Overwrite an existing file."),
) -> None:
    """Write the file that a student completes: the task and a skeleton."""
    exercise = shelf.find(name)
    # References for kernels are not checked, because a student may not have Triton yet.
    points, said = checking.reference(exercise) if isinstance(exercise, Exercise) else (100, "")
    if said:
        raise OptionError(
            f"the exercise {name} is broken: its reference solution gets only {points or 0} "
            f"points ({said}); correct the exercise"
        )
    path = out or Path(f"{exercise.name.replace('-', '_')}.py")
    _write(exercise.file_text, path, force=force)
    typer.echo(
        f"wrote {path}: complete it, then run `{_grading(exercise, path)}`; `{_hint(exercise)}` "
        "shows a hint"
    )


def hint(
    name: _Name, number: int = option(1, "Which hint to show, counted from 1.", min=1)
) -> None:
    """Show one hint; later hints tell more, and the last hint tells nearly everything."""
    hints = shelf.find(name).hints
    if number > len(hints):
        raise OptionError(
            f"the exercise {name} has {len(hints)} hints, got --number {number}; pass a number up "
            f"to {len(hints)}"
        )
    typer.echo(f"{number} of {len(hints)}: {hints[number - 1]}")


def reveal(
    name: _Name,
    out: Path | None = option(None, "File to write. Default: the solution is printed.", "-o"),
    force: bool = option(False, "Overwrite an existing file."),
) -> None:
    """Print or write a reference solution, which gets every point."""
    exercise = shelf.find(name)
    if not exercise.revealed:
        raise OptionError(
            f"the solution of {exercise.name} is not published; run `{_hint(exercise)}` to see a "
            "hint"
        )
    text = f"# flashsim exercise: {exercise.name}\n\n{exercise.solution_source}"
    if out is None:
        typer.echo(text, nl=False)
        return
    _write(text, out, force=force)
    typer.echo(f"{out}: `{_grading(exercise, out)}` grades it")


def check(name: _Name) -> Tables:
    """Check your own exercise: grade its reference, skeleton, mistakes and wrong solutions."""
    table = checking.check(shelf.find(name))
    if not all(row[1] for row in table.rows):
        show(table)
        raise typer.Exit(1)
    return table


def _number(name: str, text: str) -> int:
    """Parse a number of bytes; commas, underscores or spaces may separate thousands."""
    digits = re.sub(r"[,_ \u2009\u202f]", "", text)
    if not digits.isdecimal() or len(digits) > 30:
        raise OptionError(f"{name} must be a number of bytes in digits, e.g. 30,000; got {text!r}")
    return int(digits)


def _asked(what: str, option: str) -> int:
    """Ask for a number at the terminal until the user types one; return it."""
    while True:
        typer.echo(f"{what}, in digits: ", nl=False)
        line = "" if sys.stdin is None else sys.stdin.readline()
        if not line:
            typer.echo()
            raise OptionError(
                f"the answer cannot be typed, because stdin is closed; pass it by {option}"
            )
        try:
            return _number("the answer", line.strip())
        except OptionError as error:
            typer.echo(error)


def predict(
    typed: typer.Context,
    sizes: opt.Sizes,
    mask: opt.Mask,
    how: opt.One = opt.One(tiling="same"),
    name: str | None = typer.Argument(
        None,
        help="A name from `flashsim exercise list`, or a .py file. Without a name, the question is "
        "about your own shape.",
    ),
    algorithm: str = option("flash2", "Without a name: the algorithm that is counted.", "-a"),
    loaded: int | None = option(
        None, "Your guess of the bytes loaded. Default: the command asks you.", read=_number
    ),
    stored: int | None = option(
        None, "Your guess of the bytes stored. Default: the command asks you.", read=_number
    ),
    plot: opt.Plot = None,
) -> None:
    """Guess how many bytes attention moves, then see the right answer; made for lectures.

    The question is about an exercise or, without a name, about a shape that you set with -n, -d and
    --heads.
    """
    ready(plot)
    if name is None:
        _predict_shape(sizes, mask, how, algorithm, (loaded, stored), plot)
        return
    refuse_unused(
        typed, "an exercise, which sets the shape", only=("name", "loaded", "stored", "plot")
    )
    exercise = shelf.get(name)
    typer.echo(f"{textwrap.dedent(exercise.statement).strip()}\n\n{exercise.sizes}\n")
    trace = exercise.executed.trace
    _judge(name, (loaded, stored), trace)
    if plot is not None:
        _draw({"the reference": trace}, exercise, plot)


def _predict_shape(
    sizes: opt.Sizes,
    mask: opt.Mask,
    how: opt.One,
    algorithm: str,
    said: tuple[int | None, int | None],
    plot: Path | None,
) -> None:
    """Ask how many bytes attention of the user's shape moves, and show the counted answer."""
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


def _judge(name: str, said: tuple[int | None, int | None], counted: Trace | Traffic) -> None:
    """Ask for the guesses that no option gave, and show all guesses beside the right answers."""
    options = ("loaded", "--loaded"), ("stored", "--stored")
    guesses = [
        _asked(f"bytes {what}", option) if guess is None else guess
        for guess, (what, option) in zip(said, options, strict=True)
    ]
    table = report.Table(
        f"{name}: your guess and the answer", ("bytes", "guess B", "answer B", "guess / answer")
    )
    # Bytes added to HBM in place count as stored.
    right = counted.bytes("load"), counted.bytes("store") + counted.bytes("reduce")
    for what, measured, guess in zip(("loaded", "stored"), right, guesses, strict=True):
        table.add(what, guess, measured, guess / measured)
    exact = tuple(guesses) == right
    table.note = "exact to the byte!" if exact else "the table below has the bytes of each tensor"
    show([table, counted.table()])


def grade(
    file: Annotated[
        Path,
        typer.Argument(
            help="The completed file that `flashsim exercise start` wrote, or a folder of such "
            "files."
        ),
    ],
    exercise: Annotated[
        list[str] | None,
        typer.Option(
            help="The exercise: a name or a .py file. Default: the one that the file names. Repeat "
            "the option to grade a homework folder for several exercises."
        ),
    ] = None,
    form: Format = Format(),
    gradescope: Path | None = option(
        None, "Also write the marks to this file in Gradescope's format (results.json)."
    ),
    plot: opt.Plot = None,
    save: Path | None = option(None, "Save the trace of the solution's transfers (.npz)."),
    timeout: float | None = option(
        None,
        f"Time limit per file in seconds. Default: {submissions.LIMIT:g}; kernels: {LIMIT:g}.",
        min=0.1,
    ),
    memory: int | None = option(
        None,
        f"Memory limit per file in MiB (Linux only). Default: {submissions.MEMORY:,}; "
        f"kernels: {MEMORY:,}.",
        min=1,
    ),
    jobs: int | None = option(
        None, "Number of files to grade at the same time. Default: one per CPU.", min=1
    ),
) -> None:
    """Grade a solution by results, on-chip memory and bytes, or every .py file in a folder.

    For a single file, or the folder of a single homework, the exit code is 1 if it does not get all
    points. With --gradescope, or for the folder of a class, the exit code is 0 for any points.
    """
    limits: dict[str, Any] = {"limit": timeout, "memory": memory}
    chosen = [shelf.find(name) for name in dict.fromkeys(exercise or ())]
    kernels = [one for one in chosen if isinstance(one, KernelExercise) and one.path]
    if file.is_dir() and len(kernels) == len(chosen):
        roots = homework_in(file, kernels, single=gradescope is not None)
        if gradescope is not None and not roots:
            if not kernels:
                looked = ", ".join(dict.fromkeys(one.path for one in exercises_of([])))
                raise OptionError(
                    f"neither {str(file)!r} nor a folder in it contains a file of an exercise; "
                    f"flashsim looked for {looked}. To give 0 points for missing files, name the "
                    "exercises with --exercise"
                )
            roots = [file]  # the student's mistake: 0 points, no error
        if roots:
            work = kernels or exercises_of(roots)
            if any((plot, save)) or (gradescope and len(roots) > 1):
                raise OptionError(
                    "--plot and --save need a single file, and --gradescope needs the folder of "
                    "a single homework, but a folder of submissions was passed; leave out these "
                    "options"
                )
            _say_graded(work, chosen=bool(kernels))
            if roots != [file] and (loose := [x.name for x in file.iterdir() if x.is_file()]):
                say(f"not graded, because they are not in a student's folder: {', '.join(loose)}")
            ready(gradescope)
            done = list(grade_homework(roots, work, **limits, jobs=jobs))
            show(_tables(file, done, "homework folders"), form)
            if gradescope is not None:
                _for_gradescope(together(done[0][1]), gradescope)
            elif roots == [file]:
                _exit_by_points([marks for _, marks in done[0][1]])
            return
    if len(chosen) > 1:
        raise OptionError(
            f"--exercise was passed {len(chosen)} times, which needs a homework folder with files "
            f"of these exercises, got {str(file)!r}; pass --exercise once"
        )
    name = exercise[0] if exercise else None
    _grade_files(file, name, form, (gradescope, plot, save), limits, jobs)


def _grade_files(
    file: Path,
    exercise: str | None,
    form: Format,
    outputs: tuple[Path | None, Path | None, Path | None],
    limits: dict[str, Any],
    jobs: int | None,
) -> None:
    """Grade one file, or every .py file in a folder."""
    gradescope, plot, save = outputs
    if file.is_dir():
        if any(outputs):
            raise OptionError(
                "--gradescope, --plot and --save need a single file, but a folder was passed; "
                "pass a file, or leave out these options"
            )
        if missing := submissions.missing_walls():
            say(f"this system does not prevent a graded file from {', '.join(missing)}")
        graded = submissions.grade_folder(file, exercise, **limits, jobs=jobs)
        show(_tables(file, [(path, [(path, marks)]) for path, marks in graded]), form)
        return
    for path in outputs:
        ready(path)
    trace: Trace | None = None
    if gradescope is not None and exercise is not None and not file.is_file():
        marks = submissions.missing(file, exercise)  # the student's mistake: 0 points, no error
    else:
        marks, trace = submissions.grade_file(file, exercise, **limits)
    if form.csv:
        show(_tables(file.parent, [(file, [(file, marks)])]), form)
    else:
        typer.echo(marks.json() if form.json else printable(marks.text()))
    _for_gradescope(marks, gradescope)
    if trace is not None and save is not None:
        trace.save(save)
        say(f"trace in {save}")
    if trace is not None and plot is not None:
        one, traces = shelf.find(exercise or marks.exercise), {"your solution": trace}
        if isinstance(one, Exercise):
            traces["reference"] = one.executed.trace
        _draw(traces, one, plot)
    if gradescope is None:
        _exit_by_points([marks])


def _exit_by_points(every: list[Marks]) -> None:
    """End the command with exit code 1 if any marks are not full marks."""
    if any(marks.points != marks.most for marks in every):
        raise typer.Exit(1)


def _say_graded(exercises: list[KernelExercise], *, chosen: bool) -> None:
    """Print which exercises are graded, and why."""
    names = ", ".join(one.name for one in exercises)
    paths = ", ".join(dict.fromkeys(one.path for one in exercises))
    why = f"because these exercises are solved in {paths}; to choose, pass --exercise NAME once or "
    why = "as --exercise says" if chosen else f"{why}several times"
    say(f"graded for {names}, {why}")


def _for_gradescope(marks: Marks, path: Path | None) -> None:
    """If `path` is not None, write the marks there in Gradescope's format."""
    if path is not None:
        with beside(path) as part:
            part.write_text(marks.gradescope(), encoding="utf-8")
        say(f"Gradescope's results in {path}")


def _tables(
    folder: Path, graded: list[tuple[Path, list[tuple[Path, Marks]]]], what: str = "files"
) -> Tables:
    """Return tables for people (one reason per row), and tables for programs (all reasons).

    Every student's folder or file has one row per graded file; homework folders also have a total.
    """
    short, full = Table("", _COLUMNS), Table("", (*_COLUMNS, "seconds"))
    for root, found in graded:
        rows = [(str(path.relative_to(folder)), one.exercise, [one]) for path, one in found]
        if what == "homework folders":
            rows.append((root.name, "total", [one for _, one in found]))
        for file, exercise, every in rows:
            parts = dict.fromkeys(("results", "safe", "on-chip", "bytes"), 0)
            for mark in (mark for marks in every for mark in marks.marks):
                part = mark.name.split(" ")[0].rstrip(",")
                if part in parts:
                    parts[part] += mark.points
            why, moved = [], None
            if exercise != "total":
                (marks,) = every
                why = [x.words for x in marks.marks if x.words and (x.kind or not x.most)]
                moved = marks.figures.get("bytes")
            points, most = (sum(getattr(x, name) for x in every) for name in ("points", "most"))
            row = (plain(file, 200), exercise, points, most, *parts.values(), moved)
            short.add(*row, textwrap.shorten(why[0] if why else "", 60))
            full.add(*row, " | ".join(why), round(sum(marks.seconds for marks in every), 3))
    whole = sum(all(one.points == one.most for _, one in found) for _, found in graded)
    short.title = f"{len(graded)} {what}"
    short.note = f"{whole} of {len(graded)} get all points; --csv has every reason in full"
    return [short], [full]


def _write(text: str, path: Path, *, force: bool) -> None:
    if path.exists() and not force:
        raise OptionError(f"{str(path)!r} already exists; pass --force to overwrite it")
    ready(path, (".py",))
    with beside(path) as part:
        part.write_text(text, encoding="utf-8")


def _grading(exercise: shelf.AnyExercise, path: Path) -> str:
    return f"flashsim exercise grade {path}" + (
        f" --exercise {exercise.file}" if exercise.file else ""
    )


def _hint(exercise: shelf.AnyExercise) -> str:
    return f"flashsim exercise hint {exercise.file or exercise.name}"


def _draw(traces: dict[str, Trace], exercise: shelf.AnyExercise, path: Path) -> None:
    """Draw a solution's bytes by tensor, and print the picture's path."""
    viz().save_figure(draw(traces, exercise), path)
    say(f"plot in {path}")
