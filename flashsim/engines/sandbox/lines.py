"""Find the line of the user's algorithm that is running, for error messages."""

from __future__ import annotations

import contextlib
import linecache
import sys
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np

#: Code that an algorithm calls; its own lines are everywhere else.
_ROOM = str(Path(__file__).parent)
_OTHERS = (_ROOM, str(Path(np.__file__).parent), contextlib.__file__)


def at_work() -> str:
    """Return the innermost calling line outside the machine and NumPy, as "line 7".

    The line may be in another file than the algorithm.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    return "?" if frame is None else f"line {frame.f_lineno}"


def deepest(trace: TracebackType | None) -> tuple[str, int, str] | None:
    """Return file, line and text of the deepest traceback line that belongs to the algorithm."""
    found = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_OTHERS):
            text = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            found = code.co_filename, trace.tb_lineno, text
        trace = trace.tb_next
    return found
