"""The L2 model's caches and stack distances, against caches written out in Python."""

from collections import OrderedDict, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashsim
from flashsim import Problem, l2
from flashsim.l2 import caches, distances, requests
from flashsim.l2.launch import SIDE
from flashsim.schedule.names import LOAD, STORE

pytestmark = pytest.mark.promise("predictions are judged")


class BruteForce:
    """An LRU cache of pieces, written out: what the kernels must equal."""

    def __init__(self, capacity, size):
        self.capacity, self.size, self.held = capacity, size, OrderedDict()
        self.read = self.written = 0

    def touch(self, piece, dirty):
        self.held[piece] = self.held.pop(piece, False) or dirty
        while sum(self.size[p] for p in self.held) > self.capacity:
            last, was_dirty = self.held.popitem(last=False)
            self.written += self.size[last] * was_dirty

    def access(self, piece, op):
        if op != STORE and piece not in self.held:
            self.read += self.size[piece]
        self.touch(piece, op != LOAD)


SIZE = st.lists(st.integers(1, 9), min_size=2, max_size=8)
REQUESTS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2), st.integers(0, 1)), max_size=60)


def arrays(size, asked):
    ids = np.array([tile % len(size) for tile, _, _ in asked], np.int32)
    codes = np.array([op + SIDE * side for _, op, side in asked], np.uint8)
    return np.array(size, np.int64), ids, codes


def replayed(size, ids, codes, capacity):
    end = len(size)
    links = np.zeros((end + 1, 2), np.int32)
    links[end] = end
    fetched, lost = np.zeros((2, end), np.int64)
    state, used = np.zeros(end + 1, np.uint8), np.zeros(1, np.int64)
    caches.replay(ids, codes, size, capacity, links, state, used, fetched, lost)
    return fetched.sum(), lost.sum()


@settings(max_examples=150, deadline=None)
@given(SIZE, REQUESTS, st.integers(0, 40))
def test_replay_equals_a_cache_written_out(size, asked, capacity):
    size, ids, codes = arrays(size, asked)
    brute = BruteForce(capacity, size)
    for tile, code in zip(ids, codes, strict=True):
        brute.access(tile, code & 3)
    assert replayed(size, ids, codes, capacity) == (brute.read, brute.written)


class Sets:
    """Set-associative partitions of lines, written out; sizes are lines of a tile."""

    def __init__(self, partitions, sets, ways):
        self.caches = [
            [BruteForce(ways, defaultdict(lambda: 1)) for _ in range(sets)]
            for _ in range(partitions)
        ]

    def access(self, line, place, home, side, op):
        mine, at_home = self.caches[side][place], self.caches[home][place]
        if op == LOAD and side != home and line in mine.held:
            mine.touch(line, False)
            return
        at_home.access(line, op)
        if op == LOAD and side != home:
            mine.touch(line, False)
        if op != LOAD and len(self.caches) == 2:
            self.caches[1 - home][place].held.pop(line, None)

    def total(self, what):
        return sum(getattr(cache, what) for part in self.caches for cache in part)


@settings(max_examples=150, deadline=None)
@given(SIZE, REQUESTS, st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(0, 99))
def test_sets_and_partitions_equal_caches_written_out(size, asked, parts, sets, ways, seed):
    size, ids, codes = arrays(size, asked)
    rng = np.random.default_rng(seed)
    first = np.concatenate([[0], np.cumsum(size)])
    places = rng.integers(sets, size=first[-1], dtype=np.int32)
    homes = rng.integers(parts, size=first[-1], dtype=np.uint8)
    brute = Sets(parts, sets, ways)
    for tile, code in zip(ids, codes, strict=True):
        side = code // SIDE if parts == 2 else 0
        for line in range(first[tile], first[tile + 1]):
            brute.access(line, places[line], homes[line], side, code & 3)
    tile_of = np.repeat(np.arange(len(size), dtype=np.int32), size)
    cache = requests.SetCache.empty(first, places, homes, tile_of, shape=(parts, sets, ways))
    caches.replay_sets(ids, codes, cache)
    assert (cache.fetched.sum(), cache.lost.sum()) == (brute.total("read"), brute.total("written"))


@settings(max_examples=150, deadline=None)
@given(SIZE, REQUESTS)
def test_stack_distances_give_every_cache_size_at_once(size, asked):
    size, ids, codes = arrays(size, asked)
    traffic = flashsim.count(Problem(8, head_dim=8))
    curve = l2.Curve.measure(requests.Stream(traffic.stages[0], ids, codes), size)
    for capacity in range(int(size.sum()) + 2):
        assert (curve.reads(capacity), curve.writes(capacity)) == replayed(
            size, ids, codes, capacity
        )


def test_distances_survive_renumbering():
    """More requests than the table of times holds at once."""
    rng = np.random.default_rng(1)
    size = rng.integers(1, 50, 40)
    ids = rng.integers(0, 40, 6000).astype(np.int32)
    codes = rng.integers(0, 3, 6000).astype(np.uint8)
    traffic = flashsim.count(Problem(8, head_dim=8))
    curve = l2.Curve.measure(requests.Stream(traffic.stages[0], ids, codes), size)
    for capacity in (0, 100, 400, 700, 2000):
        assert (curve.reads(capacity), curve.writes(capacity)) == replayed(
            size, ids, codes, capacity
        )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 9)), max_size=50))
def test_tally_adds_up_by_key(pairs):
    keys, weights = np.array(pairs, np.int64).reshape(-1, 2).T
    found = dict(zip(*(x.tolist() for x in distances.tally(keys, weights)), strict=True))
    assert found == {key: sum(w for k, w in pairs if k == key) for key, _ in pairs}


def test_tally_grows():
    keys = np.arange(20_000, dtype=np.int64) * 512 % 6_400_000
    found, sums = distances.tally(keys, np.ones_like(keys))
    assert np.array_equal(np.sort(found), np.unique(keys))
    assert sums.sum() == 20_000
