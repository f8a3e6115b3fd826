"""Imports a user's Python file in the way in which Python runs a script."""

import ast
import importlib.util
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

from flashsim.errors import FlashSimError, TraceError

#: An error of a reader's file is quoted up to so many characters: torch's can fill pages.
_WORDS = 500


def imports(text: str) -> set[str]:
    """Return the full names of the modules that a file imports, as in "jax.experimental.pallas"."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return set()  # Python reports the error better when it runs the file
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@contextmanager
def readers_errors(path: Path, hint: str = "") -> Iterator[None]:
    """Turn an exception in a user's file into a `TraceError` with the line and a `hint`."""
    try:
        yield
    except FlashSimError:
        raise
    except (Exception, SystemExit) as error:
        raise TraceError(f"{_told(path, error)}{hint}") from error


def run_program(path: Path) -> None:
    """Run a file as ``python FILE`` would; a program may end with ``sys.exit(0)``."""
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def _told(path: Path, error: BaseException) -> str:
    """Return an error's file name, line number, line of source and message, as text."""
    words = " ".join(str(error).split())[:_WORDS]
    said = f"{type(error).__name__}: {words}" if words else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    if not inside:
        return f"{path}: {said}"
    return f"{path}, line {inside[-1].lineno}, `{inside[-1].line}`: {said}"


@contextmanager
def beside(path: Path, *more: str) -> Iterator[None]:
    """In the ``with`` block, let a file import modules of its own folder and folders `more`."""
    places = [str(path.resolve().parent), *more, *sys.path]
    argv = mock.patch.object(sys, "argv", [str(path)])
    with mock.patch.object(sys, "path", places), argv:
        yield


def imported(path: Path) -> ModuleType:
    """Import a file and return its module; `sys.modules` does not keep the module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = made
    try:
        spec.loader.exec_module(made)
    finally:  # modules that the file imports stay in sys.modules: JAX cannot be imported twice
        del sys.modules[path.stem]
        if before is not None:
            sys.modules[path.stem] = before
    return made
