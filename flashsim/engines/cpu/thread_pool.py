"""Threads that wait for kernels from one call to the next, and the CPUs on which they wake.

After a pause Linux often wakes a thread on the CPU of the thread that calls it and moves it some
milliseconds later, by when a short kernel is over (docs/notebooks/cpu.md). So a caller keeps
sleeping threads off its CPU. Each takes all CPUs back as soon as it runs: where other processes
are busy as well, it is moved like any other thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from queue import Empty, SimpleQueue

#: Seconds between two looks for an interrupt: on Windows, waiting does not end with one.
HEARING = 0.2


class PoolTask:
    """A call that several threads make at a time; a thread that comes too late makes none."""

    def __init__(self, call: Callable, args: tuple) -> None:
        self.call, self.args = call, args
        self.begun, self.over, self.lock = 0, False, threading.Lock()
        self.ended = SimpleQueue[BaseException | None]()

    def __call__(self) -> None:
        """Make the call on this thread."""
        with self.lock:
            if self.over:
                return
            self.begun += 1
        error = None
        try:
            self.call(*self.args)
        except BaseException as raised:
            error = raised
        self.ended.put(error)

    def finish(self, ended: int = 0) -> None:
        """Wait for threads that began, of which `ended` were waited for; none begins any more."""
        with self.lock:
            self.over = True
        for _ in range(self.begun - ended):
            self.wait()

    def wait(self) -> None:
        """Wait for one thread; raise what the call raised there. An interrupt is heard."""
        error: BaseException | None = None
        waiting = True
        while waiting:
            with suppress(Empty):
                error, waiting = self.ended.get(timeout=HEARING), False
        if error:
            raise error


class Worker:
    """A thread that waits for tasks; `thread` is its number in the operating system."""

    def __init__(self) -> None:
        self.tasks, self.thread = SimpleQueue[PoolTask](), 0
        self.cpus = frozenset[int]()
        threading.Thread(target=self.work, name="flashsim", daemon=True).start()

    def work(self) -> None:
        """Do tasks, for ever, each on the CPUs that its caller may use."""
        self.thread = threading.get_native_id()
        while True:
            task = self.tasks.get()
            allow([self.thread], self.cpus)
            task()
            del task  # and its arrays


class Pool:
    """Threads, as many as were ever at work at a time; a caller takes those that are free."""

    def __init__(self) -> None:
        self.size = 0
        self.free: list[Worker] = []
        self.lock = threading.Lock()

    def run(self, threads: int, call: Callable, args: tuple, *, wait: bool = False) -> None:
        """``call(*args)`` on so many threads, of which this is one unless it is to `wait`.

        An interrupt is heard while it waits; the others then end when they do.
        """
        task, others = PoolTask(call, args), threads if wait else threads - 1
        taken = self.take(others) if others else []
        try:
            keep_off(taken)
            for worker in taken:
                worker.tasks.put(task)
            if wait:
                task.wait()
            else:
                task()
            task.finish(ended=int(wait))
        finally:
            with self.lock:
                self.free += taken

    def take(self, count: int) -> list[Worker]:
        """So many workers that are free."""
        with self.lock:
            while len(self.free) < count:
                self.free.append(Worker())
                self.size += 1
            return [self.free.pop() for _ in range(count)]


def keep_off(workers: list[Worker]) -> None:
    """Leave threads that sleep all CPUs of this one's but that which it is on, for now."""
    if workers and hasattr(os, "sched_getaffinity"):
        cpus = frozenset(os.sched_getaffinity(0))
        for worker in workers:
            worker.cpus = cpus
        allow([worker.thread for worker in workers if worker.thread], cpus - {here()})


def allow(threads: list[int], cpus: Iterable[int]) -> None:
    """Let them use these CPUs only; if a sandbox forbids it, they wake where the system likes."""
    with suppress(OSError):
        for thread in threads if cpus else ():
            os.sched_setaffinity(thread, cpus)


def here() -> int:
    """The CPU that this thread runs on."""
    return _libc().sched_getcpu()


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def pool() -> Pool:
    """The pool of this process; a new one after a fork."""
    return _of(os.getpid())


@lru_cache(maxsize=1)
def _of(process: int) -> Pool:
    del process
    return Pool()
