"""The `flashsim` command."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

__all__ = ["main"]


def main() -> None:
    """Entry point of the `flashsim` command."""
    try:
        _ready_streams()
        signal.signal(signal.SIGTERM, _stop)
        if sys.argv[1:] == ["--version"]:  # without Typer, which takes most of a second
            from flashsim.version import __version__

            print(f"flashsim {__version__}")
            return
        from flashsim.cli.app import app

        app()
    except KeyboardInterrupt:  # while modules were imported; later Typer handles it
        print("Aborted!", file=sys.stderr)
        sys.exit(130)


def _stop(number: int, _: Any) -> NoReturn:
    """End as after an error, which removes temporary files; a second signal ends at once."""
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


def _ready_streams() -> None:
    """Let stdout and stderr take every character, and refuse a stdout that is closed.

    Python has None for a stream that was closed before it began.
    """
    if sys.stderr is None:  # nobody can be told
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        print(
            "flashsim: stdout is closed, so figures would go nowhere; send them to a file or to "
            f"{os.devnull}",
            file=sys.stderr,
        )
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and "utf" not in (stream.encoding or "").lower():
            reconfigure(errors="replace")  # "?" for what the terminal's alphabet lacks
