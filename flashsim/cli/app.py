"""The `flashsim` command. Tables for people, ``--json`` and ``--csv`` for programs."""

from __future__ import annotations

import errno
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from flashsim.cli import (
    counters,
    course,
    exercises,
    measure,
    models,
    pictures,
    ranks,
    saved,
    truth,
)
from flashsim.cli.options import spread
from flashsim.errors import FlashSimError
from flashsim.version import __version__


class _Flags:
    """A flag takes no value, so help shows none."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for option in found:
            if getattr(option, "is_flag", False):
                option.metavar = ""
        return found


class _Command(_Flags, TyperCommand):
    """A command."""


class _Group(_Flags, TyperGroup):
    """Turns our errors, and the system's about files, into one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlashSimError as error:
            typer.echo(f"flashsim: {error}", err=True)
        except OSError as error:
            if error.errno == errno.EPIPE:  # `flashsim ... | head`: click ends quietly
                raise
            typer.echo(f"flashsim: {error}", err=True)
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Watch FlashAttention move its tiles, and count every byte.",
)
_trace = typer.Typer(cls=_Group, no_args_is_help=True, help="Look into saved traces.")
app.add_typer(_trace, name="trace")
for _command in (
    *measure.COMMANDS,
    ranks.ring,
    models.watch,
    saved.devices,
    *truth.COMMANDS,
    *counters.COMMANDS,
    *course.COMMANDS,
    *pictures.COMMANDS,
    exercises.grade,
):
    app.command(cls=_Command)(spread(_command))
for _look in (saved.show, saved.perfetto):
    _trace.command(cls=_Command)(spread(_look))


_exercise = typer.Typer(
    cls=_Group, no_args_is_help=True, help="A course: exercises graded by bytes."
)
app.add_typer(_exercise, name="exercise")
for _name, _lesson in exercises.COMMANDS.items():
    _exercise.command(_name, cls=_Command)(spread(_lesson))


def main() -> None:
    """Entry point of the `flashsim` command."""
    app()


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"flashsim {__version__}")
        raise typer.Exit
