"""The command about other people's programs: watch."""

from __future__ import annotations

import runpy
import sys
import traceback
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated
from unittest import mock

import typer

from flashsim.cli import options as opt
from flashsim.cli.output import say, show_tables
from flashsim.problem.hardware import Device


def watch(
    form: opt.Format,
    script: Annotated[Path, typer.Argument(help="A Python program.", exists=True, dir_okay=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The program's own, after --.")
    ] = None,
    device: Annotated[str, typer.Option(help="See `flashsim devices`.")] = "H100",
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the calls, too, with torch's profiler.")
    ] = False,
) -> None:
    """Run a program that uses PyTorch, and count every attention call that it makes.

    What the program prints goes to the error stream if --csv or --json is asked for. After an
    error of the program's, or Ctrl-C, what was seen until then is printed, and the exit code is the
    program's.
    """
    from flashsim.torch import watch as watching

    where, code = Device.get(device), 0
    words = [str(script), *(arguments or ())]
    aside = redirect_stdout(sys.stderr) if form.json or form.csv else nullcontext()
    path = [str(script.resolve().parent), *sys.path[1:]]  # as Python itself begins a program
    argv, paths = mock.patch.object(sys, "argv", words), mock.patch.object(sys, "path", path)
    with argv, paths, aside, watching(measure=measure) as seen:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                say(end.code)
        except KeyboardInterrupt:
            code = 130
        except Exception:
            traceback.print_exc()
            code = 1
    seen.model = script.name
    show_tables([seen.table(device=where)], [seen.full_table(device=where)], form)
    if code:
        raise typer.Exit(code)
