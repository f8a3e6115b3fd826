"""Compiles the CPU engine's kernels once per machine, and runs each kernel on several threads."""

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

#: Seconds of compiling after which a message on the terminal explains the wait.
PATIENCE = 1.0
#: Multiply-adds of a kernel above which it is interruptible; they take at most a tenth of a second.
LONG = 1 << 30
#: Multiply-adds of a pass up to which one thread runs it, because waking another takes as long.
SHORT = 1 << 19

#: The number of threads that callers can request on any machine. More threads than CPUs are not
#: faster, but tests use them to show that results do not depend on the number of threads.
ALWAYS = 64

#: Numba need not generate a wrapper for callers in C.
_LESS: Any = {"no_cfunc_wrapper": True, "pipeline_class": Whole}

#: The kernels by name.
_ALL: dict[str, Callable] = {
    "forward": kernels_forward.forward,
    "decode": kernels_decode.decode,
    "delta": kernels_backward.delta_rows,
    "grad_keys": kernels_backward.grad_keys,
    "grad_queries": kernels_backward.grad_queries,
}


def _entry(name: str, kernel: Callable, sources: str) -> Any:
    """Return a kernel's compiled function, which is cached on disk under the name `name`.

    Numba notices changes only in the file that contains a cached function. So the function has a
    free variable, `sources`: a digest of all kernels' source files. Numba includes free variables
    in the cache's key.
    """

    def entry(cpu, *args):
        sources  # noqa: B018
        call_with_lent(kernel, cpu, args)

    entry.__name__ = entry.__qualname__ = name
    return keep(njit(nogil=True, error_model="numpy", **_LESS)(entry))


def _digest() -> str:
    """Return a digest of all source files from which kernels are compiled."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()


_SOURCES = _digest()
_KERNELS = {name: _entry(name, kernel, _SOURCES) for name, kernel in _ALL.items()}


def folder() -> Path | None:
    """Return the folder for cached kernels, or None if no folder is writable."""
    kernel = _KERNELS["forward"]
    return Path(kernel._cache.cache_path) if kept(kernel) else None


def compiled() -> dict[str, int]:
    """Return how often this process compiled each kernel, not counting the disk cache's loads."""
    return {name: sum(k.stats.cache_misses.values()) for name, k in _KERNELS.items()}


def available() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def most() -> int:
    """Return the largest number of threads that a caller may request."""
    return max(available(), ALWAYS)


def run(name: str, threads: int, *args: Any, counter: np.ndarray, long: bool = False) -> None:
    """Run one kernel on `threads` threads, and compile the kernel first if necessary.

    Python handles an interrupt (Ctrl-C) only between Python instructions. So the calling thread of
    a `long` kernel only waits for computing threads. After an interrupt, the calling thread stops
    the other threads through `counter` (`kernels_forward.stopped`). When no work tiles are left,
    the calling thread does not wait for threads that never began.
    """
    call = partial(_call, _KERNELS[name])
    if threads == 1 and not long:
        call(*args)
        return
    kind = name, _kind(args)
    if kind not in _COMPILED:  # compile on this thread, which handles interrupts
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
    except MemoryError:  # Numba's own message is only "Allocation failed"
        raise MemoryError(
            "there is not enough memory for the threads' tiles; use fewer threads= or smaller "
            "tiles (tiling=)"
        ) from None


#: The kernels, and types of their arguments, that this process has compiled or loaded.
_COMPILED: set[tuple] = set()


def _kind(x: Any) -> Any:
    """Return the part of an argument's type that affects compilation."""
    if isinstance(x, np.ndarray):
        return x.dtype
    return (type(x), *map(_kind, x)) if isinstance(x, tuple) else type(x)


def frozen(array: np.ndarray) -> np.ndarray:
    """Return a flat, read-only view of an array, so that Numba compiles a kernel only once."""
    view = np.ascontiguousarray(array).reshape(-1)[:]  # a flat view of one column would be strided
    floats = view[: view.size // 2 * 2].view(np.float32) if view.itemsize == 2 else view
    if not floats.flags.aligned:
        view = view.copy()  # pairs of 16-bit numbers are read as floats, so they must be aligned
    view.setflags(write=False)
    return view


class _Notice(threading.local, Listener):
    """Prints a message on a terminal when a compilation takes longer than `PATIENCE` seconds.

    Python's garbage collection pauses during a compilation: it would free nothing, but take a tenth
    of the time.
    """

    def on_start(self, event: Event) -> None:
        """Pause garbage collection and start the timer, before Numba compiles a kernel."""
        if event.data["dispatcher"] not in _KERNELS.values():
            return
        self.collects = gc.isenabled()
        gc.disable()
        if sys.stderr.isatty():
            self.timer = threading.Timer(PATIENCE, _say_compiling, [kept(event.data["dispatcher"])])
            self.timer.daemon = True
            self.timer.start()

    def on_end(self, event: Event) -> None:
        """Resume garbage collection and stop the timer, after Numba has compiled a kernel."""
        if event.data["dispatcher"] not in _KERNELS.values():
            return
        if self.collects:
            gc.enable()
        if hasattr(self, "timer"):
            self.timer.cancel()


register("numba:compile", _Notice())


def _say_compiling(on_disk: bool) -> None:
    then = "; the result is cached on disk for the next time" if on_disk else ""
    print(f"flashsim: compiling the CPU kernels{then}", file=sys.stderr)
