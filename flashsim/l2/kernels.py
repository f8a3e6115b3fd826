"""The loops, compiled by Numba: weave the blocks' requests, replay a cache, measure distances.

A request is a tile number and a code: its operation (LOAD, STORE, REDUCE) plus SIDE for an SM of
the second partition.
"""

from __future__ import annotations

import numpy as np
from numba import njit

LOAD, STORE, REDUCE, SIDE = 0, 1, 2, 4
OPS = {"load": LOAD, "store": STORE, "reduce": REDUCE}

#: Stack distance of a tile that was never seen before.
COLD = np.iinfo(np.int64).max


@njit(cache=True)
def _earlier(time, a, b):
    """Whether slot a acts before slot b; lock-step slots act in the order of their numbers."""
    return time[a] < time[b] or (time[a] == time[b] and a < b)


@njit(cache=True)
def _sift_down(heap, n, time):
    at = 0
    while True:
        child = 2 * at + 1
        if child >= n:
            return
        if child + 1 < n and _earlier(time, heap[child + 1], heap[child]):
            child += 1
        if not _earlier(time, heap[child], heap[at]):
            return
        heap[at], heap[child] = heap[child], heap[at]
        at = child


@njit(cache=True)
def _ask(
    requests, first, last, head_of, walk_head, outer, inner, keys_outside, side, out, codes, n
):
    """Append requests first .. last - 1 of the table for one block at one visit."""
    i, j = (inner, outer) if keys_outside else (outer, inner)
    for r in range(first, last):
        axis, owner = requests[r, 1], requests[r, 2]
        if axis == 0:
            tile = i
        elif axis == 1:
            tile = j
        else:
            tile = i * requests[r, 5] + j
        out[n] = requests[r, 3] + head_of[owner, walk_head] * requests[r, 4] + tile
        codes[n] = requests[r, 0] + side
        n += 1
    return n


@njit(cache=True)
def weave(
    walks, outers, ptr, inner, requests, parts, head_of, stride, members, pace, flipped,
    slots, sms, partitions, keys_outside, out, codes,
):  # fmt: skip
    """Lay out all requests of one stage in the order in which the SMs issue them.

    Block b belongs to walk ``walks[b]``, owns outer tile ``outers[b]`` and makes the visits
    ``inner[ptr[outer]:ptr[outer + 1]]`` once for each of `members` query heads. `slots` blocks run
    at once; one that ends makes room for the next. A visit of block b takes ``pace[b]``.

    Parameters
    ----------
    requests : int64 (n, 6)
        op, axis, owner, first tile number, tiles a head, column tiles; `parts` (4,) splits the
        table into those before, at and after the visits.
    head_of : int32 (3, heads)
        Number of a query head's matrix among those of query heads, key heads and bias heads.
    flipped : bool (blocks,)
        Whether the block makes its visits backwards.
    out, codes : int32, uint8
        Filled in.

    Returns
    -------
    int
        Number of requests.
    """
    blocks, n, started = len(walks), 0, 0
    time = np.zeros(slots)
    block = np.zeros(slots, np.int64)
    done = np.zeros(slots, np.int64)
    heap = np.arange(slots)
    alive = min(slots, blocks)
    for slot in range(alive):
        block[slot] = slot
    started = alive
    while alive:
        slot = heap[0]
        b = block[slot]
        head, outer = walks[b] * stride, outers[b]
        side = SIDE * (slot % sms % partitions)
        visits = ptr[outer + 1] - ptr[outer]
        total = visits * members
        if done[slot] == 0:
            n = _ask(
                requests, parts[0], parts[1], head_of, head, outer, 0, keys_outside, side,
                out, codes, n,
            )  # fmt: skip
        if done[slot] < total:
            member, v = done[slot] // visits, done[slot] % visits
            if flipped[b]:
                v = visits - 1 - v
            n = _ask(
                requests, parts[1], parts[2], head_of, head + member, outer, inner[ptr[outer] + v],
                keys_outside, side, out, codes, n,
            )  # fmt: skip
        done[slot] += 1
        time[slot] += pace[b]
        if done[slot] >= total:
            n = _ask(
                requests, parts[2], parts[3], head_of, head, outer, 0, keys_outside, side,
                out, codes, n,
            )  # fmt: skip
            done[slot] = 0
            if started < blocks:
                block[slot] = started
                started += 1
            else:
                alive -= 1
                heap[0] = heap[alive]
        _sift_down(heap, alive, time)
    return n


# -- a cache with least-recently-used replacement --------------------------------------------------
#
# One list a partition, most recent first, linked through `links[part, piece] = (before, after)`;
# the last piece number is the sentinel that closes the ring.

ABSENT, CLEAN, DIRTY = 0, 1, 2


@njit(cache=True)
def _unlink(links, piece):
    before, after = links[piece, 0], links[piece, 1]
    links[before, 1] = after
    links[after, 0] = before


@njit(cache=True)
def _touch(links, state, used, part, piece, size, capacity, status, lost):
    """Make a piece the most recent one, in `status`; evict from the end what no longer fits.

    Dirty bytes that had to leave are added to ``lost[tile]``; `size` is of a tile's piece.
    """
    ring = links[part]
    if state[part, piece] == ABSENT:
        used[part] += size[piece]
        state[part, piece] = status
    else:
        _unlink(ring, piece)
        if status == DIRTY:
            state[part, piece] = DIRTY
    end = len(ring) - 1
    first = ring[end, 1]
    ring[piece, 0], ring[piece, 1] = end, first
    ring[first, 0] = piece
    ring[end, 1] = piece
    while used[part] > capacity:
        last = ring[end, 0]
        _unlink(ring, last)
        if state[part, last] == DIRTY:
            lost[last] += size[last]
        state[part, last] = ABSENT
        used[part] -= size[last]


@njit(cache=True)
def replay(ids, codes, size, capacity, links, state, used, fetched, lost):
    """One cache: what requests read from DRAM and what evictions write to it.

    Parameters
    ----------
    ids, codes : requests
    size : int64 (tiles,)
        Bytes of each tile.
    capacity : int
        Bytes.
    links : int32 (1, tiles + 1, 2); state : uint8 (1, tiles + 1); used : int64 (1,)
        The cache, changed in place.
    fetched, lost : int64 (tiles,)
        Bytes of each tile read from and written to DRAM, added to.
    """
    for r in range(len(ids)):
        tile, op = ids[r], codes[r] & 3
        if op != STORE and state[0, tile] == ABSENT:
            fetched[tile] += size[tile]  # a store overwrites the whole tile: nothing to fetch
        _touch(links, state, used, 0, tile, size, capacity, CLEAN if op == LOAD else DIRTY, lost)


@njit(cache=True)
def replay_two(ids, codes, size, capacity, links, state, used, fetched, lost):
    """Two partitions of `capacity` each; a tile's even piece lives in the first, its odd one there.

    Piece 2 t + h is half h of tile t; arrays are indexed by pieces. An SM asks its own partition;
    what is at home in the other one is fetched from there and kept as a clean copy. Writes and
    reductions happen at home and drop the copy.
    """
    for r in range(len(ids)):
        op, side = codes[r] & 3, codes[r] // SIDE
        for home in range(2):
            piece, away = 2 * ids[r] + home, side != home
            if op == LOAD:
                if away and state[side, piece] != ABSENT:
                    _touch(links, state, used, side, piece, size, capacity, CLEAN, lost)
                    continue
                if state[home, piece] == ABSENT:
                    fetched[piece] += size[piece]
                _touch(links, state, used, home, piece, size, capacity, CLEAN, lost)
                if away:
                    _touch(links, state, used, side, piece, size, capacity, CLEAN, lost)
                continue
            if op == REDUCE and state[home, piece] == ABSENT:
                fetched[piece] += size[piece]
            _touch(links, state, used, home, piece, size, capacity, DIRTY, lost)
            other = 1 - home
            if state[other, piece] != ABSENT:
                _unlink(links[other], piece)
                state[other, piece] = ABSENT
                used[other] -= size[piece]


# -- stack distances -------------------------------------------------------------------------------


@njit(cache=True)
def _add(tree, at, value):
    at += 1
    while at < len(tree):
        tree[at] += value
        at += at & -at


@njit(cache=True)
def _sum(tree, at):
    """Sum of entries 0 .. at."""
    at += 1
    total = 0
    while at:
        total += tree[at]
        at -= at & -at
    return total


@njit(cache=True)
def distances(ids, codes, size):
    """Stack distance in bytes of every request, and how far each written tile strayed.

    The distance of a request is the size of all different tiles touched since its tile was last
    touched, its own size included: a cache of C bytes hits exactly when distance <= C
    (Mattson et al. 1970). A tile written once is written back once by every cache that its
    largest distance until it is next written, or dropped at the end, exceeds.

    Returns
    -------
    near : int64 (n,)
        Distance of each request, COLD at a tile's first.
    strayed : int64 (n,)
        For each store or reduction: the largest distance at which its tile was asked for again, up
        to and including the next write, or the depth at which it ends; -1 for a load.
    """
    tiles, n = len(size), len(ids)
    room = max(4 * tiles, 1024)
    tree = np.zeros(room + 1, np.int64)  # bytes of each tile, at the time it was last touched
    last = np.full(tiles, -1, np.int64)
    owner = np.full(room, -1, np.int64)
    near = np.empty(n, np.int64)
    strayed = np.full(n, -1, np.int64)
    writer = np.full(tiles, -1, np.int64)  # the last request that wrote the tile
    now, total = 0, 0
    for r in range(n):
        tile = ids[r]
        if now == room:  # renumber times: keep the order, drop the gaps
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
