"""Threads that wait for work from one call to the next, and the CPUs on which they wake.

After a pause Linux often wakes a thread on the CPU of the one that calls it and moves it some
milliseconds later, by when a short walk is over (docs/notebooks/cpu.md). So a caller that works
itself keeps the others off its CPU while they sleep. Each takes all CPUs back as soon as it runs:
where other processes are busy, too, it is moved like any other thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any


class Team:
    """Up to `size` threads."""

    def __init__(self, size: int) -> None:
        self.asleep: set[int] = set()  # threads, by the operating system's numbers
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(size, "flashsim")

    def start(self, count: int, work: Callable, *args: Any, apart: bool) -> list[Future]:
        """Begin `work(*args)` on `count` threads; on other CPUs than this one's if `apart`."""
        cpus = _allowed()
        if apart and cpus:
            self.keep_off(cpus)
        return [self.pool.submit(self._begin, cpus, work, args) for _ in range(count)]

    def keep_off(self, cpus: set[int]) -> None:
        """Leave threads that sleep all of `cpus` but the one that this thread is on."""
        others = cpus - {_here()}
        with self.lock:
            for thread in self.asleep if others else ():
                _allow(thread, others)

    def _begin(self, cpus: set[int], work: Callable, args: tuple[Any, ...]) -> None:
        """What a thread does: its caller's CPUs are its own again before it works."""
        thread = threading.get_native_id()
        with self.lock:
            self.asleep.discard(thread)
            if cpus:
                _allow(thread, cpus)
        try:
            work(*args)
        finally:
            with self.lock:
                self.asleep.add(thread)


def _allowed() -> set[int]:
    """The CPUs that this thread may use; none where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _allow(thread: int, cpus: set[int]) -> None:
    """Let it use these CPUs only; where a sandbox forbids that, it wakes where the system likes."""
    with suppress(OSError):
        os.sched_setaffinity(thread, cpus)


def _here() -> int:
    """The CPU that this thread runs on."""
    return _libc().sched_getcpu()


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def of(size: int) -> Team:
    """The team of this process; a new one after a fork."""
    return _of(size, os.getpid())


@lru_cache(maxsize=4)
def _of(size: int, process: int) -> Team:
    del process
    return Team(size)
