"""Simulates two caches, compiled by Numba: a textbook cache, and one built like a GPU's L2."""

import numpy as np
from numba import njit

from flashsim.l2.compiled import keep
from flashsim.l2.launch import SIDE
from flashsim.schedule.names import LOAD, STORE

# -- fully associative: whole tiles ----------------------------------------------------------------
#
# The cache is a list of tiles, the most recently used first, linked by `links[tile] = (before,
# after)`. The last tile number is the sentinel at which the list ends and begins.

ABSENT, CLEAN, DIRTY = 0, 1, 2


@keep
@njit
def _unlink(links, tile):
    before, after = links[tile, 0], links[tile, 1]
    links[before, 1] = after
    links[after, 0] = before


@keep
@njit
def replay(ids, codes, size, capacity, links, state, used, fetched, lost):
    """Count the bytes that requests read from DRAM, and the bytes that evictions write to DRAM.

    The cache is fully associative, holds complete tiles, and evicts the least recently used tile.
    `capacity` and each tile's `size` are in bytes. The cache's state, changed in place, is `links`,
    int32 (tiles + 1, 2), `state`, uint8 (tiles + 1), and `used`, int64 (1,). Each tile's DRAM reads
    are added to `fetched`, and DRAM writes to `lost`, int64 (tiles,), in bytes.
    """
    end = len(links) - 1
    for r in range(len(ids)):
        tile, op = ids[r], codes[r] & 3
        if state[tile] == ABSENT:
            if op != STORE:  # a store overwrites the whole tile: nothing to fetch
                fetched[tile] += size[tile]
            used[0] += size[tile]
            state[tile] = CLEAN
        else:
            _unlink(links, tile)
        if op != LOAD:
            state[tile] = DIRTY
        first = links[end, 1]
        links[tile, 0], links[tile, 1] = end, first
        links[first, 0] = tile
        links[end, 1] = tile
        while used[0] > capacity:
            last = links[end, 0]
            _unlink(links, last)
            if state[last] == DIRTY:
                lost[last] += size[last]
            state[last] = ABSENT
            used[0] -= size[last]


# -- set-associative, with partitions: a sample of the lines ---------------------------------------


@keep
@njit
def _way(held, part, cache_set, line):
    for way in range(held.shape[2]):
        if held[part, cache_set, way] == line:
            return way
    return -1


@keep
@njit
def _insert(cache, part, line):
    """Store a line in an empty or the least recently used way of the line's set; return the way."""
    held, touched, cache_set, way = cache.held, cache.touched, cache.place_of[line], 0
    for other in range(held.shape[2]):
        if held[part, cache_set, other] < 0:
            way = other
            break
        if touched[part, cache_set, other] < touched[part, cache_set, way]:
            way = other
    if held[part, cache_set, way] >= 0 and cache.dirty[part, cache_set, way]:
        cache.lost[cache.tile_of[held[part, cache_set, way]]] += 1
    held[part, cache_set, way] = line
    touched[part, cache_set, way] = cache.clock[0]
    cache.dirty[part, cache_set, way] = False
    return way


@keep
@njit
def replay_sets(ids, codes, cache):
    """Count the lines that requests read from DRAM, and the lines that evictions write to DRAM.

    `cache` is a `requests.SetCache`, whose state and counts change. An SM sends all its requests to
    its own partition. If a line's home is the opposite partition, the line is read through the
    home, and both partitions keep a copy. A store or a reduction goes to the line's home partition,
    and drops any copy in the opposite partition.

    Returns the number of lines that requests load, and how many of these come from DRAM.
    Placeholders (`captured.Requests`) are skipped.
    """
    first, held, touched = cache.first, cache.held, cache.touched
    partitions = held.shape[0]
    loaded = missed = 0
    for r in range(len(ids)):
        tile, op = ids[r], codes[r] & 3
        if tile >= len(first) - 1:
            continue
        if op == LOAD:
            loaded += first[tile + 1] - first[tile]
        # The conversion keeps the type the same in both branches, so Numba compiles _way once.
        side = np.int64(codes[r] // SIDE if partitions == 2 else 0)
        for line in range(first[tile], first[tile + 1]):
            cache.clock[0] += 1
            cache_set, home = cache.place_of[line], np.int64(cache.home_of[line])
            if op == LOAD and home != side:
                way = _way(held, side, cache_set, line)
                if way >= 0:
                    touched[side, cache_set, way] = cache.clock[0]
                    continue
            way = _way(held, home, cache_set, line)
            if way >= 0:
                touched[home, cache_set, way] = cache.clock[0]
            else:
                if op != STORE:  # a store overwrites whole lines: nothing to fetch
                    cache.fetched[tile] += 1
                    missed += op == LOAD
                way = _insert(cache, home, line)
            if op != LOAD:
                cache.dirty[home, cache_set, way] = True
                if partitions == 2:
                    copy = _way(held, 1 - home, cache_set, line)
                    if copy >= 0:
                        held[1 - home, cache_set, copy] = -1
            elif home != side:
                _insert(cache, side, line)
    return loaded, missed
