"""Run another Python program in this process, as ``python PROGRAM`` would."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from unittest import mock


def run(script: Path, arguments: Sequence[str] = ()) -> int:
    """Run a Python program to the end, print any error, and return the exit code."""
    path = [str(script.resolve().parent), *sys.path[1:]]
    words = [str(script), *arguments]
    with mock.patch.object(sys, "argv", words), mock.patch.object(sys, "path", path):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except KeyboardInterrupt:
            return 130
        except Exception:
            traceback.print_exc()
            return 1
    return 0
