"""What threads of the CPU engine share work with: atomics, turns, arrays that nobody counts."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numba
import numpy as np
import pytest
from numba import njit
from numba.core.bytecode import FunctionIdentity
from numba.core.errors import TypingError

from flashsim.engines.cpu import engine
from flashsim.engines.cpu.micro_kernels import writer
from flashsim.engines.cpu.primitives import atomics, inline_jit
from flashsim.engines.cpu.primitives.arrays import panel_array, rest
from flashsim.engines.cpu.primitives.borrowed_args import borrow, call_with_lent
from flashsim.engines.cpu.primitives.inline_jit import Whole, part
from flashsim.engines.cpu.primitives.packing import filled


@njit(nogil=True)
def take(counter, taken):
    """Note every number taken from a counter, until there are as many as places."""
    while True:
        number = atomics.fetch_add(counter, 0)
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
    return panel_array(n, like.dtype)


@njit
def sums(nested):
    number, (array, more) = borrow(nested)
    return number + array.sum() + more[0].sum()


class Held(NamedTuple):
    """What a walk may be handed: arrays, numbers and nothing, some of them alike."""

    grid: np.ndarray
    factor: float
    nothing: None
    row: np.ndarray
    on: bool


class Alike(NamedTuple):
    """Of one type throughout, which Numba keeps in another way."""

    first: np.ndarray
    second: np.ndarray


@part
def weigh_rows(held, i):
    """A row's sum, times what stands beside it; a part of a part's table."""
    if held.nothing is not None:
        return 0.0
    return held.grid[i].sum() * held.factor + held.row[i] * held.on


@part
def read_tables(cpu, held, alike, nested, out):
    """Something of everything that it is handed."""
    (number, (array,)), total = nested, 0.0
    for i in range(held.grid.shape[0]):
        total += weigh_rows(held, i)
    tail = rest(filled(5, number, out.dtype), 3)
    out[0], out[1], out[2] = total, alike.second[1] - alike.first[0], tail.sum() + array[-1]


@njit(pipeline_class=Whole)
def walk_once(*args):
    call_with_lent(read_tables, 0, args)


@njit
def rests(n, like):
    """Of an array that nothing else holds any more."""
    array = filled(n, 2, like.dtype)
    return rest(array, n - 2), rest(rest(array, 1), 1)


def in_threads(function, *arguments):
    with ThreadPoolExecutor(len(arguments)) as pool:
        list(pool.map(lambda given: function(*given), arguments))


def test_every_number_is_taken_once():
    counter, taken = np.zeros(1, np.int64), np.zeros(3_000_000, np.int8)
    take(np.ones(1, np.int64), taken[:0])  # compiled: now all begin at about the same time
    in_threads(take, *[(counter, taken)] * 4)
    assert (taken == 1).all()
    assert counter[0] == len(taken) + 4


@pytest.mark.promise("deterministic")
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


def test_a_walk_reads_its_tables_where_they_lie():
    grid, row = np.arange(6.0).reshape(3, 2)[::-1], np.array([5.0, 6, 7])
    held = Held(grid, 10.0, None, row, True)
    alike, nested, out = Alike(row, row[::-1]), (4.0, (grid[:, 1],)), np.zeros(3)
    counts = [sys.getrefcount(x) for x in (grid, row, out)]
    walk_once(held, alike, nested, out)
    assert out.tolist() == [150 + 18, 6 - 5, 8 + 1]
    assert [sys.getrefcount(x) for x in (grid, row, out)] == counts


def test_numba_is_of_a_version_that_is_tried():
    """The engine builds on classes of its compiler that any release may change."""
    root = Path(__file__).parents[2]
    allowed = re.search(r"numba >= (\S+), < (\S+)", (root / "setup.cfg").read_text())
    tried = re.search(r"NUMBA := (\S+) (\S+)", (root / "Makefile").read_text())
    low, high, oldest, newest, here = (
        tuple(map(int, version.split(".")[:2]))
        for version in (*allowed.groups(), *tried.groups(), numba.__version__)
    )
    assert low <= here < high, f"Numba {numba.__version__} is outside of what setup.cfg allows"
    assert (oldest, newest) == (low, (high[0], high[1] - 1)), "`make numba` tries other versions"


def test_text_of_numba_0_61_is_linked():
    """Its libraries do not say how they begin anew."""
    other = Mock(spec=["_get_module_for_linking"])
    library, module = Mock(spec=["_linking_libraries"], _linking_libraries=[other, other]), Mock()
    inline_jit._link(library, module)
    module.link_in.assert_called_once_with(other._get_module_for_linking(), preserve=True)


def test_functions_that_numba_gives_the_same_name_keep_their_own_code(monkeypatch):
    """Two processes number such functions alike, and a third loads both kernels from disk."""
    monkeypatch.setattr(numba.config, "OPT", type(numba.config.OPT)(0))  # nothing is inlined

    def kernel(number):
        @part
        def own(cpu, out):
            out[0] = number

        def call(*args):
            call_with_lent(own, 0, args)

        call.__qualname__ = f"call_{number}"
        monkeypatch.setattr(FunctionIdentity, "_unique_ids", count(1000))
        out = np.zeros(1)
        njit(pipeline_class=Whole)(call)(out)
        return out[0]

    assert [kernel(1), kernel(2)] == [1, 2]


def test_a_table_has_no_other_fields():
    @part
    def ask(cpu, held):
        held.missing  # noqa: B018

    @njit(pipeline_class=Whole)
    def call(*args):
        call_with_lent(ask, 0, args)

    held = Held(np.ones((1, 1)), 1.0, None, np.ones(1), True)
    with pytest.raises(TypingError, match="Unknown attribute 'missing'"):
        call(held)


def test_the_rest_of_an_array_holds_all_of_it():
    end, both = rests(300, np.zeros(1))
    keep = [rests(300, np.zeros(1)) for _ in range(50)]  # would take its place
    assert (end == 2).all()
    assert end.size == 2
    assert (both == 2).all()
    assert both.size == 298
    assert len(keep) == 50


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_panels_begin_with_a_cache_line(dtype):
    """Where one vector register of 64 bytes lies across two lines, all do."""
    sizes = [1, 7, 16, 300, 4096, 100_000]
    arrays = [panels(n, np.zeros(1, dtype)) for n in sizes]
    assert [a.size for a in arrays] == sizes
    arrays += [engine._zeros((1, n, 3), dtype) for n in sizes]
    assert all(a.ctypes.data % writer.LINE == 0 and a.flags.c_contiguous for a in arrays)
    assert all((a == 0).all() for a in arrays[len(sizes) :])
