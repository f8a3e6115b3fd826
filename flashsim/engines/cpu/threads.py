"""Compile the CPU engine's kernels, once per machine, and run them on several threads."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numba.core.event import Event, Listener, register

from flashsim.engines.cpu import kernels_backward, kernels_decode, kernels_forward, thread_pool
from flashsim.engines.cpu.primitives.borrowed_args import call_with_lent
from flashsim.engines.cpu.primitives.inline_jit import Whole
from flashsim.engines.cpu.tables import STOP
from flashsim.l2.compiled import keep, kept

#: Seconds of compiling after which a person at a terminal is told why nothing happens.
PATIENCE = 1.0
#: Multiply-adds of a walk beyond which it can be interrupted: a tenth of a second or less.
LONG = 1 << 30
#: Multiply-adds of a pass up to which one thread runs it: to wake another takes as long.
SHORT = 1 << 19

#: Threads that can be asked for on any machine: more than CPUs gain nothing, but show that nothing
#: changes.
ALWAYS = 64

#: No wrapper for callers in C, of whom there are none.
_LESS: Any = {"no_cfunc_wrapper": True, "pipeline_class": Whole}

#: What a walk is called by, and what it is.
_ALL: dict[str, Callable] = {
    "forward": kernels_forward.forward,
    "decode": kernels_decode.decode,
    "delta": kernels_backward.delta_rows,
    "grad_keys": kernels_backward.grad_keys,
    "grad_queries": kernels_backward.grad_queries,
}


def _entry(name: str, walk: Callable, sources: str) -> Any:
    """Return a kernel (`walk`) as a compiled function with an on-disk cache.

    Numba notices edits of the file that holds a cached function, but not of files that it calls.
    So the function here has the free variable `sources`, which stands for the text of all of them
    and thereby becomes part of the cache's key. `name` becomes the name of the cache files.
    """

    def entry(cpu, *args):
        sources  # noqa: B018
        call_with_lent(walk, cpu, args)

    entry.__name__ = entry.__qualname__ = name
    return keep(njit(nogil=True, error_model="numpy", **_LESS)(entry))


def _digest() -> str:
    """Return a digest of every source file that a kernel is compiled from."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()


_SOURCES = _digest()
_WALKS = {name: _entry(name, walk, _SOURCES) for name, walk in _ALL.items()}


def folder() -> Path | None:
    """Return the folder that keeps compiled kernels; None if no folder can."""
    walk = _WALKS["forward"]
    return Path(walk._cache.cache_path) if kept(walk) else None


def compiled() -> dict[str, int]:
    """Count how often this process compiled each kernel because the disk cache had none."""
    return {name: sum(walk.stats.cache_misses.values()) for name, walk in _WALKS.items()}


def available() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def most() -> int:
    """Return the largest number of threads that a caller can request."""
    return max(available(), ALWAYS)


def run(name: str, threads: int, *args: Any, counter: np.ndarray, long: bool = False) -> None:
    """Run one kernel on `threads` threads; compile it first if need be.

    Python handles an interrupt (Ctrl-C) only between its own instructions. So the calling thread
    takes part only in short kernels. In a `long` kernel it waits; if it is interrupted, it tells
    the other threads to stop (`kernels_forward.stopped`) by the kernel's argument `counter`.
    A thread that has not begun when no work tiles are left is not waited for.
    """
    call = partial(_call, _WALKS[name])
    if threads == 1 and not long:
        call(*args)
        return
    kind = name, _kind(args)
    if kind not in _COMPILED:  # by this thread alone, where an interrupt is heard
        before = counter.copy()
        counter[STOP] = 1
        call(*args)
        counter[:] = before
        _COMPILED.add(kind)
    try:
        thread_pool.pool().run(threads, call, args, wait=long)
    except BaseException:
        counter[STOP] = 1
        raise


def _call(kernel: Any, *args: Any) -> None:
    try:
        kernel(*args)
    except MemoryError:  # Numba says "Allocation failed"
        raise MemoryError(
            "there is not enough memory for the tiles of a thread; use fewer threads or smaller "
            "tiles"
        ) from None


#: Kernels, and types of their arguments, that are compiled.
_COMPILED: set[tuple] = set()


def _kind(x: Any) -> Any:
    """Return the part of an argument's type that a compilation depends on."""
    if isinstance(x, np.ndarray):
        return x.dtype
    return (type(x), *map(_kind, x)) if isinstance(x, tuple) else type(x)


def frozen(array: np.ndarray) -> np.ndarray:
    """Return a flat read-only view, so that all arrays have one type and need one compilation."""
    view = np.ascontiguousarray(array).reshape(-1)[:]  # of a column, flat alone has its steps
    floats = view[: view.size // 2 * 2].view(np.float32) if view.itemsize == 2 else view
    if not floats.flags.aligned:
        view = view.copy()  # halves are taken as floats
    view.setflags(write=False)
    return view


class _Notice(threading.local, Listener):
    """Prints on a terminal that a kernel is being compiled, if that takes longer than `PATIENCE`.

    It also pauses garbage collection. Numba's objects live until compiling ends, so a collection
    would free nothing, and would take a tenth of the time.
    """

    def on_start(self, event: Event) -> None:
        """Handle the event that Numba starts to compile a function."""
        if event.data["dispatcher"] not in _WALKS.values():
            return
        self.collects = gc.isenabled()
        gc.disable()
        if sys.stderr.isatty():
            self.timer = threading.Timer(PATIENCE, _say_compiling, [kept(event.data["dispatcher"])])
            self.timer.daemon = True
            self.timer.start()

    def on_end(self, event: Event) -> None:
        """Handle the event that Numba has compiled the function."""
        if event.data["dispatcher"] not in _WALKS.values():
            return
        if self.collects:
            gc.enable()
        if hasattr(self, "timer"):
            self.timer.cancel()


register("numba:compile", _Notice())


def _say_compiling(on_disk: bool) -> None:
    then = "; the result is cached on disk for the next time" if on_disk else ""
    print(f"flashsim: compiling the CPU kernels{then}", file=sys.stderr)
