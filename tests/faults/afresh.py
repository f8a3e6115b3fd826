"""pytest in a process of its own, which imports flashsim for the first time.

What else the tests import is imported once: processes are forked from one that has it already, but
nothing of flashsim, so that a bug can still be seeded.
"""

import contextlib
import io
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
IMPORTED = [
    *("pytest", "_pytest.main", "xdist.plugin", "slipcover.pytest_plugin", "hypothesis.strategies"),
    *("numpy.testing", "numpy.random", "numpy.ma", "ml_dtypes", "cupy", "typer.testing", "numba"),
    *("xml.etree.ElementTree", "pdb", "execnet", "_hypothesis_pytestplugin", "platformdirs"),
]
_WITHOUT = ("cacheprovider", "xdist")


class Done(NamedTuple):
    """An exit status, and what was printed."""

    returncode: int
    said: str


def processes() -> ProcessPoolExecutor:
    """Where `suite` runs: one process a call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)  # what cannot be imported is left out
    return ProcessPoolExecutor(1, context, max_tasks_per_child=1)


def suite(arguments: tuple[str, ...]) -> Done:
    """Run pytest in tests/, stopping at the first failure."""
    import pytest

    os.chdir(TESTS)
    # Plain asserts: what is imported already could not be rewritten, and pytest would warn.
    options = [
        "--assert=plain",
        "--tb=line",
        *(word for name in _WITHOUT for word in ("-p", f"no:{name}")),
    ]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = pytest.main(["-x", *options, *arguments])
    return Done(int(status), said.getvalue())
