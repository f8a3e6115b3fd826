"""Weave the blocks' requests together, in the order in which the SMs issue them (Numba).

A request is a tile number and a code: its operation (`names.OPS`) plus SIDE for an SM of the
second partition.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from flashsim.l2.compiled import keep
from flashsim.l2.launch import SIDE

#: After how much of a visit's time a block that waits for its turn looks again.
POLL = 0.02


@keep
@njit
def _earlier(time, a, b):
    """Whether slot a acts before slot b; lock-step slots act in the order of their numbers."""
    return time[a] < time[b] or (time[a] == time[b] and a < b)


@keep
@njit
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


@keep
@njit
def _ask(
    requests, first, last, head_of, walk_head, outer, own, inner, keys_outside, side, out, codes, n
):
    """Append requests first .. last - 1 of the table for one block at one visit."""
    i, j = (inner, own) if keys_outside else (own, inner)
    for r in range(first, last):
        axis, owner = requests[r, 1], requests[r, 2]
        if axis == 0:
            tile = i
        elif axis == 1:
            tile = j
        elif axis == 2:
            tile = i * requests[r, 5] + j
        else:  # a part of the keys, which is what the block owns
            tile = outer
        out[n] = requests[r, 3] + head_of[owner, walk_head] * requests[r, 4] + tile
        codes[n] = requests[r, 0] + side
        n += 1
    return n


@keep
@njit
def weave(
    walks, outers, ptr, inner, tile_of, several, requests, parts, head_of, stride, members, in_step,
    flipped, time, block, done, heap, sides, jitter, seed, keys_outside, out, codes, ranks, turns,
    since, turn,
):  # fmt: skip
    """Lay out all requests of one stage in the order in which the SMs issue them.

    Block b belongs to walk ``walks[b]``, owns ``outers[b]``, an outer tile or a part of it, and
    makes the visits ``inner[ptr[outer]:ptr[outer + 1]]`` once for each of `members` query heads.
    As many blocks run at once as `time` has slots; one that ends makes room for the next. A visit
    takes 1 plus a draw from ± `jitter`. With `ranks`, it begins when as many others have visited
    its inner tile.

    Parameters
    ----------
    tile_of : int32 (outers,)
        The outer tile of each.
    several : bool (outers,)
        Whether it is one part of several.
    requests : int64 (n, 6)
        op, axis, owner, first tile number, tiles a head, column tiles; `parts` (5,) splits the
        table into those before, at and after the visits, the last for one of several parts.
    head_of : int32 (3, heads)
        Number of a query head's matrix among those of query heads, key heads and bias heads.
    in_step : bool
        Whether a visit is made for each of the members before the next one is.
    flipped : bool (blocks,)
        Whether the block makes its visits backwards.
    time : float64 (slots,); block, done, heap : int64 (slots,)
        To work with: zeros, the first blocks, zeros, and the numbers of the slots.
    sides : uint8 (slots,)
        Partition of each slot's SM.
    out, codes : int32, uint8
        Filled in.
    ranks : int32 (visits,), or empty
        How many visits of an inner tile come before each; none wait if it is empty.
    turns : int32, since : float64 (query heads, inner tiles)
        To work with: zeros. Visits that an inner tile has had, and when the next one may begin.
    turn : float
        Time from the beginning of one visit of an inner tile to that of the next.

    Returns
    -------
    int
        Number of requests.
    """
    blocks = len(walks)
    n, no_inner, draw = np.int64(0), np.int64(0), np.int64(seed)
    alive = started = len(heap)
    while alive:
        slot = heap[0]
        b = block[slot]
        head, outer = np.int64(walks[b] * stride), outers[b]  # one type, so compiled once
        side = SIDE * sides[slot]
        visits, own = ptr[outer + 1] - ptr[outer], np.int64(tile_of[outer])
        total = visits * members
        if len(ranks) and done[slot] < total:
            member, v = done[slot] // visits, done[slot] % visits
            if flipped[b]:
                v = visits - 1 - v
            tile = inner[ptr[outer] + v]
            if turns[head + member, tile] < ranks[ptr[outer] + v]:
                # Look again a little after the next slot acts: there is one, since the first of
                # those that wait for each other has nobody to wait for.
                soon = time[heap[1]]
                if alive > 2:
                    soon = min(soon, time[heap[2]])
                time[slot] = max(time[slot], soon) + POLL
                _sift_down(heap, alive, time)
                continue
            if time[slot] < since[head + member, tile]:
                time[slot] = since[head + member, tile]
                _sift_down(heap, alive, time)
                continue
            turns[head + member, tile] += 1
            since[head + member, tile] = time[slot] + turn
        if done[slot] == 0:
            n = _ask(
                requests, parts[0], parts[1], head_of, head, outer, own, no_inner,
                keys_outside, side, out, codes, n,
            )  # fmt: skip
        if done[slot] < total:
            member, v = done[slot] // visits, done[slot] % visits
            if in_step:
                member, v = done[slot] % members, done[slot] // members
            if flipped[b]:
                v = visits - 1 - v
            n = _ask(
                requests, parts[1], parts[2], head_of, head + member, outer, own,
                np.int64(inner[ptr[outer] + v]), keys_outside, side, out, codes, n,
            )  # fmt: skip
        done[slot] += 1
        draw = (draw * 1103515245 + 12345) & 0x7FFFFFFF  # a linear congruential generator
        time[slot] += 1.0 + jitter * (draw / 0x40000000 - 1.0)
        if done[slot] >= total:
            after = 3 if several[outer] else 2
            n = _ask(
                requests, parts[after], parts[after + 1], head_of, head, outer, own, no_inner,
                keys_outside, side, out, codes, n,
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
