"""Finds the line of the user's algorithm that is running, for error messages."""

import sys
import sysconfig
from contextvars import ContextVar
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np

#: The folders of code that an algorithm calls; the algorithm's own lines are elsewhere.
_ROOM = str(Path(__file__).parent)
_OTHERS = (_ROOM, str(Path(np.__file__).parent))
_PYTHONS = sysconfig.get_path("stdlib")


def _is_users(file: str) -> bool:
    return not file.startswith(_OTHERS) and (
        not file.startswith(_PYTHONS) or "-packages" in file  # installed below Python's library
    )


#: The line of the recorded program that is being replayed; 0 if an algorithm runs directly.
REPLAYED: ContextVar[int] = ContextVar("replayed", default=0)


def line_at_work() -> int:
    """Return the number of the user's line that is running, or 0 if there is none."""
    if line := REPLAYED.get():
        return line
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return 0 if frame is None else frame.f_lineno


def at_work() -> str:
    """Return a text such as "line 7": the line of the user's code that is running."""
    return f"line {line_at_work() or '?'}"


def deepest(trace: TracebackType | None) -> tuple[str, int] | None:
    """Return the file and line of the innermost call of the user's code in a traceback."""
    users_frame = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_users(code.co_filename):
            users_frame = code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return users_frame
