"""On which CPUs the engine's threads wake, and whom a call waits for."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import flashsim
from flashsim.engines.cpu import team, threads

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or threads.available() < 2,
    reason="needs two CPUs and a system that says which thread may use which",
)


def once(crew: team.Team, work, *args, apart: bool = True) -> None:
    """The work as one thread of a team does it."""
    crew.start(1, work, *args, apart=apart).wait(some=True)


def cpus_of(crew: team.Team) -> list[set[int]]:
    return [os.sched_getaffinity(thread) for thread in crew.asleep]


def test_a_sleeping_thread_is_kept_off_the_callers_cpu_until_it_runs():
    crew, every, seen = team.Team(), os.sched_getaffinity(0), []
    once(crew, len, ())
    for here in sorted(every):
        os.sched_setaffinity(0, {here})
        try:
            crew.keep_off(every)
        finally:
            os.sched_setaffinity(0, every)
        assert cpus_of(crew) == [every - {here}]
    once(crew, lambda: seen.append(os.sched_getaffinity(0)), apart=False)
    assert seen == [every]


def test_threads_wake_on_other_cpus(monkeypatch):
    """The caller keeps its CPU meanwhile, as if it were at work."""
    crew, every, woken = team.Team(), os.sched_getaffinity(0), []
    once(crew, len, ())
    begin = crew._begin
    monkeypatch.setattr(crew, "_begin", lambda *args: (woken.append(team._here()), begin(*args)))
    monkeypatch.setattr(team, "_allowed", lambda: every)
    for here in sorted(every)[:2] * 20:
        os.sched_setaffinity(0, {here})
        try:
            once(crew, len, ())
        finally:
            os.sched_setaffinity(0, every)
        assert woken.pop() != here


def test_a_thread_at_work_is_left_alone():
    crew, every = team.Team(), os.sched_getaffinity(0)
    begun, free, seen = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        free.wait(60)
        seen.append(os.sched_getaffinity(0))

    once(crew, len, ())
    call = crew.start(1, work, apart=True)
    assert begun.wait(60)
    crew.keep_off(every)
    free.set()
    call.wait(some=True)
    assert seen == [every]


def test_a_thread_takes_what_its_caller_may_use():
    crew, every, seen = team.Team(), os.sched_getaffinity(0), []
    one = {min(every)}
    once(crew, len, ())
    os.sched_setaffinity(0, one)
    try:
        once(crew, lambda: seen.append(os.sched_getaffinity(0)))
    finally:
        os.sched_setaffinity(0, every)
    assert seen == [one]  # no other CPU was left to wake on
    once(crew, lambda: seen.append(os.sched_getaffinity(0)))
    assert seen[1:] == [every]


def test_where_that_is_forbidden_threads_work_as_before(monkeypatch):
    def forbidden(*_):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    crew, done = team.Team(), []
    once(crew, len, ())
    once(crew, done.append, 1)
    assert done == [1]


@pytest.mark.parametrize("n_q", [1, 64], ids=["decode", "forward"])
def test_a_call_does_not_wait_for_threads_that_never_began(n_q):
    rng = np.random.default_rng(0)
    k = rng.standard_normal((4, 1500, 16), dtype=np.float32)
    q = k[:, :n_q]
    expected = flashsim.run(q, k, k, backend="numba", threads=1).out
    free, crew = threading.Event(), team.here()
    timer = threading.Timer(60, free.set)
    timer.start()
    busy = crew.start(max(3, crew.size), free.wait, apart=False)
    try:
        out = flashsim.run(q, k, k, backend="numba", threads=3).out
        assert not free.is_set()
    finally:
        timer.cancel()
        free.set()
    np.testing.assert_array_equal(out, expected)
    busy.wait(some=True)
