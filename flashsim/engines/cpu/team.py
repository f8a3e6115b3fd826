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
from contextlib import suppress
from functools import lru_cache

import numpy as np

from flashsim.engines.cpu.primitives import seats


class Seat:
    """Where one thread waits; `thread` is its number in the operating system."""

    def __init__(self) -> None:
        self.numbers, self.thread = seats.new_seat(), 0
        self.address = self.numbers.ctypes.data

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

    def seats(self, count: int) -> Taken:
        """Addresses of `count` seats whose threads are this caller's for the time."""
        return Taken(self, count)

    def take(self, count: int) -> list[Seat]:
        """Seats that are free, or new."""
        with self.lock:
            while len(self.free) < count:
                self._join()
            split = len(self.free) - count
            taken, self.free = self.free[split:], self.free[:split]
        self.keep_off(taken)
        return taken

    def give_back(self, taken: list[Seat]) -> None:
        """They are free again."""
        with self.lock:
            self.free += taken

    def _join(self) -> None:
        seat = Seat()
        threading.Thread(target=seat.sit, name="flashsim", daemon=True).start()
        self.free.append(seat)
        self.size += 1

    def keep_off(self, taken: list[Seat]) -> None:
        """Leave threads that sleep all CPUs of this one's but that which it is on, for now."""
        cpus = _allowed() if taken else set()
        if not cpus or max(cpus) >= 64 * seats.CPU_WORDS:  # more than a seat has room to name
            return
        words, others = _words(frozenset(cpus)), cpus - {_here()}
        for seat in taken:
            seat.numbers[seats.CPUS :] = words
            if others and seat.thread:
                _allow(seat.thread, others)


class Taken:
    """What `Team.seats` gives; a generator would do, and take longer."""

    def __init__(self, team: Team, count: int) -> None:
        self.team, self.count = team, count

    def __enter__(self) -> np.ndarray:
        self.taken = self.team.take(self.count)
        return np.array([seat.address for seat in self.taken], np.int64)

    def __exit__(self, *_: object) -> None:
        self.team.give_back(self.taken)


@lru_cache(maxsize=4)
def _words(cpus: frozenset[int]) -> np.ndarray:
    """A set of CPUs, a bit each."""
    bits = sum(1 << cpu for cpu in cpus)
    return np.frombuffer(bits.to_bytes(8 * seats.CPU_WORDS, "little"), np.int64)


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
