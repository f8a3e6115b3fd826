"""Which line of an algorithm is at work: what errors name."""

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
    """The line that called, as "line 7"; of another file than the algorithm's, no less."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    return "?" if frame is None else f"line {frame.f_lineno}"


def deepest(trace: TracebackType | None) -> tuple[str, int, str] | None:
    """File, line and text of the deepest line of a traceback that is the algorithm's own."""
    found = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_OTHERS):
            text = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            found = code.co_filename, trace.tb_lineno, text
        trace = trace.tb_next
    return found
