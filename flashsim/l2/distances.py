"""Computes stack distances: the size of the smallest cache in which a request hits."""

import numpy as np
from numba import int64, njit
from numba.typed import Dict

from flashsim.l2.compiled import keep
from flashsim.schedule.names import LOAD

#: The stack distance of the first request of a tile.
COLD = np.iinfo(np.int64).max


@keep
@njit
def _add(tree, at, value):
    at += 1
    while at < len(tree):
        tree[at] += value
        at += at & -at


@keep
@njit
def _sum(tree, at):
    """Return the sum of the first `at` + 1 entries of a Fenwick tree."""
    at += 1
    total = 0
    while at:
        total += tree[at]
        at -= at & -at
    return total


@keep
@njit
def distances(ids, codes, size):
    """Return each request's stack distance, and the largest distance after each write, in bytes.

    A request's stack distance is the size of all distinct tiles requested since the tile's last
    request, the tile included (COLD for a first request). A request hits in a cache of C bytes
    exactly if its distance is at most C (Mattson et al. 1970). Between two writes of a tile, a
    cache of C bytes writes the tile to DRAM exactly if a request after the first and up to the
    second write has a distance above C.

    The second result has, per store or reduction, the largest distance of the tile's requests up to
    the next write. After a tile's last write, an imagined request at the end also counts. For a
    load, the result is -1.
    """
    tiles, n = len(size), len(ids)
    room = max(4 * tiles, 1024)
    tree = np.zeros(room + 1, np.int64)  # bytes of each tile, at the time of its last request
    last = np.full(tiles, -1, np.int64)
    owner = np.full(room, -1, np.int64)
    near = np.empty(n, np.int64)
    strayed = np.full(n, -1, np.int64)
    writer = np.full(tiles, -1, np.int64)  # the last request that wrote the tile
    now, total = 0, 0
    for r in range(n):
        tile = ids[r]
        if now == room:  # renumber the times in the same order without gaps
            tree[:] = 0
            kept = 0
            for at in range(room):
                if owner[at] >= 0:
                    t = owner[at]
                    owner[at] = -1
                    owner[kept] = t
                    last[t] = kept
                    _add(tree, kept, size[t])
                    kept += 1
            now = kept
        if last[tile] < 0:
            near[r] = COLD
            total += size[tile]
        else:
            near[r] = total - _sum(tree, last[tile]) + size[tile]
            _add(tree, last[tile], -size[tile])
            owner[last[tile]] = -1
            if writer[tile] >= 0:
                strayed[writer[tile]] = max(strayed[writer[tile]], near[r])
        if codes[r] & 3 != LOAD:
            writer[tile] = r
            strayed[r] = 0
        last[tile] = now
        owner[now] = tile
        _add(tree, now, size[tile])
        now += 1
    for tile in range(tiles):
        if writer[tile] >= 0:
            depth = total - _sum(tree, last[tile]) + size[tile]
            strayed[writer[tile]] = max(strayed[writer[tile]], depth)
    return near, strayed


@keep
@njit
def tally(keys, weights):
    """Return the distinct integers in `keys`, unordered, and the sum of the weights per integer.

    A dict beats sorting, because millions of requests have only thousands of distinct distances.
    """
    sums = Dict.empty(int64, int64)
    for k in range(len(keys)):
        sums[keys[k]] = sums.get(keys[k], 0) + weights[k]
    found, totals = np.empty(len(sums), np.int64), np.empty(len(sums), np.int64)
    for n, key in enumerate(sums):
        found[n], totals[n] = key, sums[key]
    return found, totals
