"""A pool of threads that outlive kernel calls, with control over the CPUs on which they wake.

Linux often wakes a thread on the caller's CPU, and moves it only milliseconds later, when a short
kernel has already ended (docs/notebooks/cpu.md). So a caller first restricts sleeping threads to
other CPUs. A woken thread may use all CPUs again, so that Linux can move it.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from queue import Empty, SimpleQueue

#: Seconds between two checks for an interrupt: on Windows, an interrupt does not end a wait.
HEARING = 0.2


class PoolTask:
    """A call that several threads make at once; threads that wake too late skip it."""

    def __init__(self, call: Callable, args: tuple) -> None:
        self.call, self.args = call, args
        self.begun, self.over, self.lock = 0, False, threading.Lock()
        self.ended = SimpleQueue[BaseException | None]()

    def __call__(self) -> None:
        """Make the task's call on this thread."""
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
        """Let no more threads begin the call; wait for all but `ended` of those that began it."""
        with self.lock:
            self.over = True
        for _ in range(self.begun - ended):
            self.wait()

    def wait(self) -> None:
        """Wait until a thread has ended its call, or until Ctrl-C; raise that thread's error."""
        error: BaseException | None = None
        waiting = True
        while waiting:
            with suppress(Empty):
                error, waiting = self.ended.get(timeout=HEARING), False
        if error:
            raise error


class Worker:
    """A thread that waits for tasks; `thread` is the thread's id in the operating system."""

    def __init__(self) -> None:
        self.tasks, self.thread = SimpleQueue[PoolTask](), 0
        self.cpus = frozenset[int]()
        threading.Thread(target=self.work, name="flashsim", daemon=True).start()

    def work(self) -> None:
        """Run tasks in an endless loop, each on the CPUs that the caller of the task may use."""
        self.thread = threading.get_native_id()
        while True:
            task = self.tasks.get()
            allow([self.thread], self.cpus)
            task()
            del task  # releases its arrays


class Pool:
    """A pool of threads from which callers take free ones, and which grows on demand."""

    def __init__(self) -> None:
        self.size = 0
        self.free: list[Worker] = []
        self.lock = threading.Lock()

    def run(self, threads: int, call: Callable, args: tuple, *, wait: bool = False) -> None:
        """Run ``call(*args)`` on `threads` threads at the same time.

        Without `wait`, the caller's thread is one of these threads; with `wait`, only workers make
        the call. With `wait`, Ctrl-C can end the caller's wait, while the threads continue to the
        end of the call.
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
        """Take `count` free workers from the pool, which creates workers if there are too few."""
        with self.lock:
            while len(self.free) < count:
                self.free.append(Worker())
                self.size += 1
            return [self.free.pop() for _ in range(count)]


def keep_off(workers: list[Worker]) -> None:
    """Restrict sleeping workers to the caller's CPUs, except the one on which the caller runs."""
    if workers and hasattr(os, "sched_getaffinity"):
        cpus = frozenset(os.sched_getaffinity(0))
        for worker in workers:
            worker.cpus = cpus
        allow([worker.thread for worker in workers if worker.thread], cpus - {here()})


def allow(threads: list[int], cpus: Iterable[int]) -> None:
    """Restrict threads to these CPUs, if the system allows it."""
    with suppress(OSError):
        for thread in threads if cpus else ():
            os.sched_setaffinity(thread, cpus)


def here() -> int:
    """Return the number of the CPU on which this thread runs."""
    return _libc().sched_getcpu()


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def pool() -> Pool:
    """Return the thread pool of this process; a forked process gets a new pool."""
    return _of(os.getpid())


@lru_cache(maxsize=1)
def _of(process: int) -> Pool:
    del process
    return Pool()
