"""The `flashsim watch` command, which runs other people's programs."""

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
from flashsim.cli.output import say, show
from flashsim.problem.hardware import Device


def watch(
    form: opt.Format,
    script: Annotated[Path, typer.Argument(help="A Python program.", exists=True, dir_okay=False)],
    arguments: list[str] | None = typer.Argument(None, help="The program's own, after --."),
    device: opt.Device = "H100",
    measure: bool = opt.option(False, "Also time the calls, with torch's profiler."),
) -> None:
    """Run a program that uses PyTorch, and count every attention call that it makes.

    With --csv or --json, the program's own output goes to stderr. If the program fails, or is
    stopped by Ctrl-C, the calls seen so far are printed. The exit code is the program's.
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
    show(([seen.table(device=where)], [seen.full_table(device=where)]), form)
    if code:
        raise typer.Exit(code)
