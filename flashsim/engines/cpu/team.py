"""Threads that wait for work from one call to the next, and the CPUs on which they wake.

After a pause Linux often wakes a thread on the CPU of the one that calls it and moves it some
milliseconds later, by when a short walk is over (docs/notebooks/cpu.md). So a caller keeps the
others off its CPU while they sleep. Each takes all CPUs back as soon as it runs: where other
processes are busy, too, it is moved like any other thread. How they begin, `primitives.seats` says.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

import numpy as np

from flashsim.engines.cpu.primitives import seats


class Seat:
    """Where a thread waits; `thread` is its number in the operating system, `cpus` its caller's."""

    def __init__(self) -> None:
        self.numbers, self.thread = seats.new_seat(), 0
        self.address, self.cpus = self.numbers.ctypes.data, frozenset[int]()

    def sit(self) -> None:
        """What its thread does, for ever."""
        self.thread = threading.get_native_id()
        seats.sit(self.numbers)


class Team:
    """Threads, as many as were ever at work at a time; a caller takes those that are free."""

    def __init__(self) -> None:
        self.size = 0
        self.free: list[Seat] = []
        self.lock = threading.Lock()

    @contextmanager
    def seats(self, count: int) -> Iterator[np.ndarray]:
        """Addresses of `count` seats whose threads are this caller's for the time."""
        with self.lock:
            while len(self.free) < count:
                self._join()
            split = len(self.free) - count
            taken, self.free = self.free[split:], self.free[:split]
        self.keep_off(taken)
        try:
            yield np.array([seat.address for seat in taken], np.int64)
        finally:
            with self.lock:
                self.free += taken

    def _join(self) -> None:
        seat = Seat()
        threading.Thread(target=seat.sit, name="flashsim", daemon=True).start()
        self.free.append(seat)
        self.size += 1

    def keep_off(self, taken: list[Seat]) -> None:
        """Leave threads that sleep all CPUs of this one's but that which it is on, for now."""
        cpus = _allowed() if taken else frozenset[int]()
        if not cpus or max(cpus) >= 64 * seats.CPU_WORDS:  # more than a seat has room to name
            return
        for seat in taken:
            if seat.cpus != cpus:
                bits = sum(1 << cpu for cpu in cpus).to_bytes(8 * seats.CPU_WORDS, "little")
                seat.numbers[seats.CPUS :], seat.cpus = np.frombuffer(bits, np.int64), cpus
        others = cpus - {_here()}
        if others:
            _allow([seat.thread for seat in taken if seat.thread], others)


def _allowed() -> frozenset[int]:
    """The CPUs that this thread may use; none where the system does not say."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())


def _allow(threads: list[int], cpus: frozenset[int]) -> None:
    """Let them use these CPUs only; if a sandbox forbids it, they wake where the system likes."""
    with suppress(OSError):
        for thread in threads:
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
