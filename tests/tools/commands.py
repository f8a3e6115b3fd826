"""Call `flashsim` commands in this process."""

import io
import json
from contextlib import redirect_stderr

import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from flashsim.cli.app import app


def invoke(*arguments, **how):
    """Return the result of a command; its words may be any objects with a str.

    The first may be a command inside a group: ``invoke("study dram", "-n", 64)``; ``how`` is what
    typer's runner takes, such as ``input=``.
    """
    command, *words = (str(x) for x in arguments)
    return CliRunner().invoke(app, [*command.split(), *words], **how)


def found(words):
    """Return the command that the first words name, and its arguments."""
    command = typer.main.get_command(app)
    while isinstance(command, TyperGroup):
        command, words = command.get_command(None, words[0]), words[1:]
    return command, words


def parsed(words):
    """Parse the words of a command without running it.

    Raises for a command or option that does not exist or has been renamed.
    """
    command, words = found(words)
    assert command is not None, "no such command"
    with redirect_stderr(io.StringIO()) as said:
        command.make_context(command.name, words)
    assert "is now" not in said.getvalue(), said.getvalue()


def ok(*arguments, **how):
    """Return the output of a command, which must succeed."""
    result = invoke(*arguments, **how)
    assert result.exit_code == 0, result.output
    return result.stdout


def not_right(*arguments):
    """Return the output of a command that checks a user's work, and ends as for wrong work."""
    result = invoke(*arguments)
    assert result.exit_code == 1, result.output
    return result.stdout


def checked(*words):
    """Return what `flashsim kernel` prints; the exit code must say whether a result is wrong."""
    result = invoke("kernel", *words)
    assert result.exit_code == (" WRONG " in result.stdout), result.output
    return result.stdout


def refused(*arguments):
    """Return what a command says as it ends as wrong input does."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


def rows(*arguments):
    """Return the rows that a command prints as JSON."""
    return json.loads(ok(*arguments, "--json"))
