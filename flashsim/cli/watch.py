"""The `flashsim watch` command: run a PyTorch program, and count its attention calls."""

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from flashsim.cli import options as opt
from flashsim.cli.declare import Format, of_program, option
from flashsim.cli.output import show
from flashsim.problem.hardware import Device


def watch(
    typed: typer.Context,
    form: Format,
    script: Annotated[
        Path, typer.Argument(help="The Python program to run.", exists=True, dir_okay=False)
    ],
    arguments: list[str] | None = typer.Argument(
        None, help="The program's own arguments: all words after the program."
    ),
    device: opt.Device = "H100",
    measure: bool = option(False, "Also measure the calls' times with torch's profiler."),
) -> None:
    """Run a program that uses PyTorch, and count every attention call that it makes.

    With --csv or --json, the program's own output goes to stderr. If the program fails or Ctrl-C
    stops it, the command prints the calls made until then. The command's exit code is that of the
    program.
    """
    from flashsim.torch import program
    from flashsim.torch import watch as watching

    where, words = Device.get(device), of_program(typed, arguments)
    aside = redirect_stdout(sys.stderr) if form.json or form.csv else nullcontext()
    with aside, watching(measure=measure) as seen:
        code = program.run(script, words)
    seen.model = script.name
    show(([seen.table(device=where)], [seen.full_table(device=where)]), form)
    if code:
        raise typer.Exit(code)
