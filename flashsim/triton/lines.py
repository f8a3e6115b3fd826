"""Finds the running line of the user's kernel, and names the line in errors."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from flashsim.errors import DTypeError, FlashSimError, MemoryModelError, UnsupportedError

_OURS = str(Path(__file__).parent)
_OTHERS = (_OURS, str(Path(np.__file__).parent), "<frozen", "<__array_function__")


def reader_frame(folder: str) -> FrameType | None:
    """Return the innermost frame whose code is neither Triton's (in `folder`) nor flashsim's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((folder, *_OTHERS)):
        frame = frame.f_back
    return frame


def in_library(folder: str) -> bool:
    """Return True if a function of Triton's own library is running, such as `tl.sigmoid`."""
    library = str(Path(folder) / "language" / "standard.py")
    frame, stop = sys._getframe(1), reader_frame(folder)
    while frame is not stop and frame.f_code.co_filename != library:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not stop


def deepest(error: BaseException, folder: str) -> tuple[str, int, str] | None:
    """Return the innermost line of user code in a traceback: the file, the number and the text."""
    found = None
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        trace: TracebackType | None = link.__traceback__
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            if not file.startswith((folder, *_OTHERS)):
                text = linecache.getline(file, trace.tb_lineno).strip()
                found = file, trace.tb_lineno, text
            trace = trace.tb_next
        link = link.__cause__ or link.__context__
    return found


def tiles(frame: FrameType | None, folder: str, stop: Any) -> dict[str, Any]:
    """Return, by name, the local variables of a kernel and its helpers that hold tensors."""
    found: dict[str, Any] = {}
    while frame is not None and frame.f_code is not stop:
        if not frame.f_code.co_filename.startswith((folder, *_OTHERS)):
            for name, value in frame.f_locals.items():
                data = getattr(getattr(value, "handle", None), "data", None)
                if isinstance(data, np.ndarray):
                    found.setdefault(name, value)
        frame = frame.f_back
    return found


def failure(kernel: str, place: tuple[int, ...], error: Exception, folder: str) -> FlashSimError:
    """Return flashsim's error for a kernel's error, with the user's line and the program."""
    found = deepest(error, folder)
    root: BaseException = error
    while type(root).__name__ == "InterpreterError" and root.__cause__ is not None:
        root = root.__cause__
    where = f"{kernel}, program {place}"
    if found is not None:
        where += f", line {found[1]}, `{found[2]}`"
    if isinstance(root, FlashSimError):
        told = type(root)(f"{where}: {root}")
        vars(told).update(vars(root))
        return told
    text = f"{type(root).__name__}: {root}" if str(root) else type(root).__name__
    compiled_only = "Did you forget to add @triton" in text
    if compiled_only:
        text = "Gluon and tl.extra.cuda, except libdevice, exist only in compiled kernels"
    if compiled_only or isinstance(root, (NotImplementedError, AttributeError)):
        return UnsupportedError(
            f"{where}: Triton's interpreter cannot run this ({text}); write it with tl.load, "
            "tl.store, tl.dot and the operations of tl, or trace the kernel without that line"
        )
    if isinstance(root, AssertionError):
        return MemoryModelError(
            f"{where}: an assertion of the kernel or of the interpreter failed ({text})"
        )
    return DTypeError(f"{where}: {text}")
