"""Compiles the CPU engine's walks, once a machine, and runs them on several threads."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, typeof

from flashsim.engines import walks, walks_backward

#: Seconds of compiling after which a person at a terminal is told why nothing happens.
PATIENCE = 1.0


def _entries(sources: str) -> dict[str, Any]:
    """The walks as compiled functions with an on-disk cache.

    Numba notices an edit of the file that holds a cached function, not of those it calls. So the
    functions here have the text of all of them, `sources`, as a free variable: it is then part of
    the cache's key.
    """

    @njit(nogil=True, cache=True)
    def forward(cpu, q, k, v, out, lse, shape, tiles, rules, notes, counter):
        sources  # noqa: B018
        walks.forward(cpu, q, k, v, out, lse, shape, tiles, rules, notes, counter)

    @njit(nogil=True, cache=True)
    def delta(cpu, out, dout, delta, shape, tiles, notes, counter):
        sources  # noqa: B018
        walks_backward.delta_rows(cpu, out, dout, delta, shape, tiles, notes, counter)

    @njit(nogil=True, cache=True)
    def grad_keys(cpu, inputs, grads, shape, tiles, rules, notes, counter, fused, turns):
        sources  # noqa: B018
        walks_backward.grad_keys(
            cpu, inputs, grads, shape, tiles, rules, notes, counter, fused, turns
        )

    @njit(nogil=True, cache=True)
    def grad_queries(cpu, inputs, grads, shape, tiles, rules, notes, counter):
        sources  # noqa: B018
        walks_backward.grad_queries(cpu, inputs, grads, shape, tiles, rules, notes, counter)

    return {f.__name__: f for f in (forward, delta, grad_keys, grad_queries)}


def _digest() -> str:
    """Of every source that a walk is compiled from."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()


_WALKS = _entries(_digest())


def available() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(name: str, threads: int, *args: Any) -> None:
    """Run one walk on `threads` threads, this one among them; compile it first if need be."""
    walk = _WALKS[name]
    with _notice():
        walk.compile(tuple(typeof(a) for a in args))
    with ThreadPoolExecutor(max(threads - 1, 1)) as pool:
        others = [pool.submit(walk, *args) for _ in range(threads - 1)]
        walk(*args)
        for other in others:
            other.result()


def frozen(array: np.ndarray) -> np.ndarray:
    """A flat read-only view: one type, so one compilation, wherever an array came from."""
    view = np.require(array, requirements=["C", "A"]).reshape(-1)
    view = view.view()
    view.setflags(write=False)
    return view


@contextmanager
def _notice() -> Iterator[None]:
    """Say on a terminal that code is being compiled, if that takes longer than `PATIENCE`."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(PATIENCE, _say_compiling)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_compiling() -> None:
    print(
        "flashsim: compiling the CPU kernels; the result is cached on disk for the next time",
        file=sys.stderr,
    )
