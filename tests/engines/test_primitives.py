"""What threads of the CPU engine share work with: atomics, turns, arrays that nobody counts."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba import njit

from flashsim.engines.cpu import engine
from flashsim.engines.cpu.primitives import atomics, packing
from flashsim.engines.cpu.primitives.references import borrow


@njit(nogil=True)
def take(counter, taken):
    """Note every number taken from a counter, until there are as many as places."""
    while True:
        number = atomics.fetch_add(counter)
        if number >= len(taken):
            return
        taken[number] += 1


@njit(nogil=True)
def pass_on(turn, number, of, total, rounds):
    """Add to a sum that has no lock, when it is this thread's turn."""
    for n in range(rounds):
        while atomics.load_acquire(turn, 0) != n * of + number:
            atomics.give_way()
        total[0] += 1
        atomics.store_release(turn, 0, n * of + number + 1)


@njit
def panels(n, like):
    return packing.panel_array(n, like.dtype)


@njit
def sums(nested):
    number, (array, more) = borrow(nested)
    return number + array.sum() + more[0].sum()


def in_threads(function, *arguments):
    with ThreadPoolExecutor(len(arguments)) as pool:
        list(pool.map(lambda given: function(*given), arguments))


def test_every_number_is_taken_once():
    counter, taken = np.zeros(1, np.int64), np.zeros(3_000_000, np.int8)
    take(np.ones(1, np.int64), taken[:0])  # compiled: now all begin at about the same time
    in_threads(take, *[(counter, taken)] * 4)
    assert (taken == 1).all()
    assert counter[0] == len(taken) + 4


@pytest.mark.parametrize("threads", [2, 3])
def test_a_turn_that_is_waited_for_shows_what_was_written_before(threads):
    turn, total = np.zeros(1, np.int64), np.zeros(1, np.int64)
    in_threads(pass_on, *[(turn, number, threads, total, 500) for number in range(threads)])
    assert total[0] == threads * 500
    assert turn[0] == threads * 500


def test_borrowed_arrays_are_the_same_and_not_counted():
    a, b = np.arange(5.0), np.ones((2, 3))
    before = sys.getrefcount(a), sys.getrefcount(b)
    assert sums((2.0, (a, (b,)))) == 18
    assert (sys.getrefcount(a), sys.getrefcount(b)) == before


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_panels_begin_with_a_cache_line(dtype):
    """Where one vector register of 64 bytes lies across two lines, all do."""
    sizes = [1, 7, 16, 300, 4096, 100_000]
    arrays = [panels(n, np.zeros(1, dtype)) for n in sizes]
    assert [a.size for a in arrays] == sizes
    arrays += [engine._zeros((1, n, 3), dtype) for n in sizes]
    assert all(a.ctypes.data % packing.LINE == 0 and a.flags.c_contiguous for a in arrays)
    assert all((a == 0).all() for a in arrays[len(sizes) :])
