"""`flashsim`'s commands, called in this process."""

import json

from typer.testing import CliRunner

from flashsim.cli.app import app


def invoke(*arguments):
    """What became of a command, its words given as anything that has a string."""
    return CliRunner().invoke(app, [str(x) for x in arguments])


def ok(*arguments):
    """What a command prints; it must succeed."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(*arguments):
    """The rows a command prints, from its JSON."""
    return json.loads(ok(*arguments, "--json"))
