"""The `flashsim` command."""

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
    except KeyboardInterrupt:  # during imports; Typer handles later interrupts
        print("Aborted!", file=sys.stderr)
        sys.exit(130)


def _stop(number: int, _: Any) -> NoReturn:
    """Exit on a signal, but remove temporary files first; a second signal kills the process."""
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


def _ready_streams() -> None:
    """Let stdout and stderr accept every character; exit with an error if stdout is closed."""
    if sys.stderr is None:  # errors cannot be shown
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        print(
            "flashsim: stdout is closed, so results cannot be printed; redirect stdout to a file "
            f"or to {os.devnull}",
            file=sys.stderr,
        )
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and "utf" not in (stream.encoding or "").lower():
            reconfigure(errors="replace")  # prints "?" for characters that the encoding lacks
