"""The `flashsim` command."""

from flashsim.cli.app import main

__all__ = ["main"]
