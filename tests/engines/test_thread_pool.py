"""On which CPUs the engine's threads wake, and whom a call waits for."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import flashsim
from flashsim.engines.cpu import thread_pool, threads
from flashsim.engines.cpu.primitives.atomics import fetch_add, load_acquire
from flashsim.engines.cpu.primitives.inline_jit import part

pytestmark = pytest.mark.promise("failures end in words")

on_linux = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or threads.available() < 2,
    reason="needs two CPUs and a system that says which thread may use which",
)


#: What a walk here is compiled from.
SOURCES = threads._SOURCES + Path(__file__).read_text()


@part
def _meet(cpu, counter):
    """Comes back when as many threads as ``counter[1]`` have come, or somebody sets it to 0."""
    fetch_add(counter, 0)
    while load_acquire(counter, 0) < load_acquire(counter, 1):
        pass


@part
def _slow(cpu, counter):
    """Who comes first leaves as soon as another has come, which takes its time."""
    if fetch_add(counter, 0) > 0:
        for _ in range(1_000_000):
            load_acquire(counter, 1)
        counter[2] = 1
    while load_acquire(counter, 0) < load_acquire(counter, 1):
        pass


@part
def _huge(cpu, counter):
    """Asks for more memory than there is, but for who comes first."""
    if fetch_add(counter, 0) > 0:
        counter[2] = np.empty(1 << 57, np.int64)[0]
    while load_acquire(counter, 0) < load_acquire(counter, 1):
        pass


@pytest.fixture
def walks(monkeypatch):
    """Walks that compute nothing."""
    for name, walk in {"meet": _meet, "slow": _slow, "huge": _huge}.items():
        monkeypatch.setitem(threads._KERNELS, name, threads._entry(name, walk, SOURCES))
        counter = np.zeros(3, np.int64)
        threads.run(name, 1, 0, counter, counter=counter)  # compiled


def meet(count: int) -> None:
    counter = np.array([0, count, 0])
    threads.run("meet", count, 0, counter, counter=counter)
    assert counter[0] == count


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


def sleepers(pool: thread_pool.Pool) -> list[int]:
    """The operating system's numbers of a pool's threads, once all of them have begun."""
    until(lambda: all(worker.thread for worker in pool.free))
    return [worker.thread for worker in pool.free]


def test_threads_work_at_the_same_time(walks):
    for count in (2, 5, 3):
        meet(count)
    pool = thread_pool.pool()
    assert pool.size >= 4
    assert len(pool.free) == pool.size


def test_a_call_waits_for_threads_that_began(walks):
    for _ in range(20):  # in some of which the caller comes first
        counter = np.array([0, 2, 0])
        threads.run("slow", 2, 0, counter, counter=counter)
        assert counter[2] == 1


@on_linux
def test_a_sleeping_thread_is_kept_off_the_callers_cpu_until_it_runs(walks, monkeypatch):
    pool, every = thread_pool.Pool(), os.sched_getaffinity(0)
    pool.free += pool.take(1)
    (thread,) = sleepers(pool)
    for here in sorted(every):
        monkeypatch.setattr(thread_pool, "here", lambda here=here: here)
        thread_pool.keep_off(pool.free)
        assert os.sched_getaffinity(thread) == every - {here}
    pool.run(2, lambda: None, (), wait=True)  # by this one and one more
    until(lambda: all(os.sched_getaffinity(each) == every for each in sleepers(pool)))


@on_linux
def test_a_thread_takes_what_its_caller_may_use(walks):
    every = os.sched_getaffinity(0)
    one = {min(every)}
    meet(2)
    os.sched_setaffinity(0, one)
    try:
        meet(2)
        thread = sleepers(thread_pool.pool())[-1]
        until(lambda: os.sched_getaffinity(thread) == one)
    finally:
        os.sched_setaffinity(0, every)
    meet(2)
    until(lambda: os.sched_getaffinity(thread) == every)


@on_linux
def test_where_that_is_forbidden_threads_work_as_before(walks, monkeypatch):
    def forbidden(*_):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    meet(3)


@pytest.mark.parametrize("n_q", [1, 64], ids=["decode", "forward"])
def test_a_call_does_not_wait_for_threads_that_never_began(n_q, monkeypatch):
    """Whoever comes to such a task later finds nothing to do."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((4, 1500, 16), dtype=np.float32)
    q = k[:, :n_q]
    expected = flashsim.run(q, k, k, backend="numba", threads=1).out
    late: list[thread_pool.PoolTask] = []
    workers = [SimpleNamespace(thread=0, tasks=SimpleNamespace(put=late.append)) for _ in "12"]
    monkeypatch.setattr(thread_pool.Pool, "take", lambda *_: workers)
    monkeypatch.setattr(thread_pool, "_of", lambda _: thread_pool.Pool())
    out = flashsim.run(q, k, k, backend="numba", threads=3).out
    np.testing.assert_array_equal(out, expected)
    assert len(late) == 2
    late[0].call = pytest.fail
    late[0]()
    assert late[0].begun == 1  # who called


def test_callers_at_a_time_have_threads_of_their_own(walks):
    """A long walk that begins beside a short one must not end with one thread."""
    pool = thread_pool.pool()
    meet(2)
    size = pool.size
    taken = pool.take(size)
    try:
        meet(3)
        assert pool.size == size + 2
    finally:
        pool.free += taken
    meet(size + 3)
    assert pool.size == size + 2 == len(pool.free)


def test_a_thread_without_memory_is_an_error_of_the_call(walks):
    counter = np.array([0, 2, 0])
    with pytest.raises(MemoryError, match="not enough memory for the threads' tiles"):
        threads.run("huge", 2, 0, counter, counter=counter)
    meet(2)


FORKED = """
import os, sys
import numpy as np, flashsim
x = np.random.default_rng(0).standard_normal((4, 300, 16), dtype=np.float32)
work = lambda: flashsim.run(x, x, x, backend="numba", threads=3).out
expected = work()
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(work(), expected) else 3)
assert os.waitpid(child, 0)[1] == 0
assert np.array_equal(work(), expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_a_fork_has_threads_of_its_own():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], timeout=120)
    assert done.returncode == 0
