"""Import a user's Python file in the way in which Python runs a script."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock


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
def beside(path: Path, *more: str) -> Iterator[None]:
    """In the ``with`` block, let a file import modules from its own folder and those in `more`."""
    places = [str(path.resolve().parent), *more, *sys.path]
    argv = mock.patch.object(sys, "argv", [str(path)])
    with mock.patch.object(sys, "path", places), argv:
        yield


def imported(path: Path) -> ModuleType:
    """Import a file and return its module, which is not left in `sys.modules`."""
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


__all__ = ["beside", "imported", "imports"]
