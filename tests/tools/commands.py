"""`flashsim`'s commands, called in this process."""

import io
import json
from contextlib import redirect_stderr

import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from flashsim.cli.app import app


def invoke(*arguments):
    """What became of a command, its words given as anything that has a string.

    The first may be a command inside a group: ``invoke("study dram", "-n", 64)``.
    """
    command, *words = (str(x) for x in arguments)
    return CliRunner().invoke(app, [*command.split(), *words])


def found(words):
    """The command that the first of some words name, and the others, which are its own."""
    command = typer.main.get_command(app)
    while isinstance(command, TyperGroup):
        command, words = command.get_command(None, words[0]), words[1:]
    return command, words


def parsed(words):
    """Read the words of a command without running it.

    Raises for a command or an option that there is none of, or that has another name by now.
    """
    command, words = found(words)
    assert command is not None, "no such command"
    with redirect_stderr(io.StringIO()) as said:
        command.make_context(command.name, words)
    assert "is now" not in said.getvalue(), said.getvalue()


def ok(*arguments):
    """What a command prints; it must succeed."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(*arguments):
    """The rows a command prints, from its JSON."""
    return json.loads(ok(*arguments, "--json"))
