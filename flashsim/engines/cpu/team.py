"""Threads that wait for work from one call to the next, and the CPUs on which they wake.

After a pause Linux often wakes a thread on the CPU of the one that calls it and moves it some
milliseconds later, by when a short walk is over (docs/notebooks/cpu.md). So a caller that works
itself keeps the others off its CPU while they sleep. Each takes all CPUs back as soon as it runs:
where other processes are busy, too, it is moved like any other thread.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

#: Seconds between two looks for an interrupt, where waiting does not end with it.
HEARING = 0.2


class Errand:
    """Work that several threads do at a time, each of which leaves when nothing is left to do."""

    def __init__(self, cpus: set[int], work: Callable, args: tuple[Any, ...]) -> None:
        self.cpus, self.work, self.args = cpus, work, args
        self.lock, self.open, self.begun = threading.Lock(), True, 0
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def begins(self) -> bool:
        """Whether a thread that comes now is still wanted; it is waited for then."""
        with self.lock:
            self.begun += self.open
            return self.open

    def wait(self, *, some: bool) -> None:
        """Until all threads that began have ended, with `some` at least one; what one raised."""
        ended = 0
        if some:
            ended += self._next()
        with self.lock:
            self.open = False
        while ended < self.begun:
            ended += self._next()

    def _next(self) -> int:
        while True:  # Windows hears no interrupt without a timeout
            with suppress(queue.Empty):
                error = self.ended.get(timeout=HEARING)
                break
        if error is not None:
            raise error
        return 1


class Team:
    """Threads, as many as were ever asked for at a time.

    They take errands from a queue that is written in C: waking seven of a `ThreadPoolExecutor` for
    a third of a millisecond's work took 2 ms of its locks (docs/notebooks/cpu.md).
    """

    def __init__(self) -> None:
        self.size = 0
        self.asleep: set[int] = set()  # threads, by the operating system's numbers
        self.lock = threading.Lock()
        self.errands: queue.SimpleQueue[Errand] = queue.SimpleQueue()

    def start(self, count: int, work: Callable, *args: Any, apart: bool) -> Errand:
        """Begin `work(*args)` on `count` threads; on other CPUs than this one's if `apart`."""
        with self.lock:
            for _ in range(count - self.size):
                threading.Thread(target=self._live, name="flashsim", daemon=True).start()
            self.size = max(self.size, count)
        cpus = _allowed()
        if apart and cpus:
            self.keep_off(cpus)
        errand = Errand(cpus, work, args)
        for _ in range(count):
            self.errands.put(errand)
        return errand

    def keep_off(self, cpus: set[int]) -> None:
        """Leave threads that sleep all of `cpus` but the one that this thread is on."""
        others = cpus - {_here()}
        with self.lock:
            for thread in self.asleep if others else ():
                _allow(thread, others)

    def _live(self) -> None:
        """What a thread does, for ever."""
        while True:
            errand = self.errands.get()
            if errand.begins():
                self._begin(errand)
            del errand  # and with it the arrays that it was about

    def _begin(self, errand: Errand) -> None:
        """Its caller's CPUs are a thread's own again before it works."""
        thread = threading.get_native_id()
        with self.lock:
            self.asleep.discard(thread)
            if errand.cpus:
                _allow(thread, errand.cpus)
        error = None
        try:
            errand.work(*errand.args)
        except BaseException as raised:
            error = raised
        with self.lock:
            self.asleep.add(thread)
        errand.ended.put(error)


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


def here() -> Team:
    """The team of this process; a new one after a fork."""
    return _of(os.getpid())


@lru_cache(maxsize=1)
def _of(process: int) -> Team:
    del process
    return Team()
