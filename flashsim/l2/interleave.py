"""Interleaves the requests of thread blocks, in the order in which the SMs issue them.

A request to L2 is a tile number and a code. The code is the request's operation (`names.OPS`), plus
SIDE if the SM belongs to the second partition.
"""

import numpy as np
from numba import njit

from flashsim.l2.caches import replay_sets
from flashsim.l2.compiled import keep
from flashsim.l2.launch import SIDE

#: The fraction of a visit's time after which a block that waits for its turn checks again.
POLL = 0.02


@keep
@njit
def _earlier(time, a, b):
    """Return True if slot a makes the next requests before slot b; ties go to the lower slot."""
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
    requests, first, last, head_of, walk_head, outer, own, inner, keys_outside, side, grid_rows,
    out, codes, n,
):  # fmt: skip
    """Append a block's requests for one tile pair: rows `first` to `last` - 1 of `requests`."""
    i, j = (inner, own) if keys_outside else (own, inner)
    for r in range(first, last):
        axis, owner = requests[r, 1], requests[r, 2]
        if axis > 3:  # the tiles of the pass's grid that lie in this stage's tile
            for row in range(grid_rows[i], grid_rows[i + 1]):
                tile = row if axis == 4 else row * requests[r, 5] + j
                out[n] = requests[r, 3] + head_of[owner, walk_head] * requests[r, 4] + tile
                codes[n] = requests[r, 0] + side
                n += 1
            continue
        if axis == 0:
            tile = i
        elif axis == 1:
            tile = j
        elif axis == 2:
            tile = i * requests[r, 5] + j
        else:  # a tile of the part of the keys that the block owns
            tile = outer
        out[n] = requests[r, 3] + head_of[owner, walk_head] * requests[r, 4] + tile
        codes[n] = requests[r, 0] + side
        n += 1
    return n


@keep
@njit
def weave(
    walks, outers, ptr, inner, slower, tile_of, several, requests, parts, head_of, stride, members,
    in_step, flipped, cluster, time, block, done, heap, sides, pace, jitter, seed, keys_outside,
    grid_rows, out, codes, ranks, turns, since, turn, wait, cache,
):  # fmt: skip
    """Write all requests of one kernel in the order in which the SMs issue them; return how many.

    Block b belongs to loop ``walks[b]``, which visits the tiles of one head or of one group of
    query heads. Block b owns the entry ``outer = outers[b]``, an outer tile or one part of a tile's
    keys. The block makes the visits ``inner[ptr[outer]:ptr[outer + 1]]`` once per query head (of
    `members`). Clusters of n consecutive blocks (n = `cluster`) own one entry, and divide the
    visits into consecutive ranges. The cluster's first block also makes the requests before and
    after the visits. Blocks run in ``len(time)`` slots; when a block ends, the next block starts in
    the same slot. Visit v takes 1 unit of time, plus ``slower[v]``, plus `wait` times the fraction
    of its loaded lines that come from DRAM, plus a random number between -`jitter` and `jitter`.
    With `ranks`, `cluster` is 1, and visit v waits until ``ranks[v]`` visits to the same
    inner tile have started. `turn` is the least time between the starts of two visits to the same
    inner tile.

    `tile_of`, int32 (outers,), has the outer tile of each entry. `several`, bool (outers,), is True
    for an entry that is one of a tile's several parts. `requests`, int64 (n, 6), has the columns
    op, axis, owner, first tile number, tiles per head, column tiles. `parts` (5,) splits the rows
    of `requests` into four sections: before, at and after the visits of a tile, and after the
    visits of a part. `head_of`, int32 (3, heads), has the numbers of each query head's query, key
    and bias matrix. With `in_step`, all `members` query heads make a visit before the block's next
    visit. A block that is `flipped`, bool (blocks,), makes its visits in reverse order. `sides`,
    uint8 (slots,), has the partition of each slot's SM. `pace`, float64 (slots,), has each slot's
    relative time per visit, less than 1 on SMs that run fewer blocks. Row tile i of the stage
    consists of the row tiles ``grid_rows[i] .. grid_rows[i + 1] - 1`` of the numbering of tiles.

    The results are written to `out`, int32 (tile numbers), and `codes`, uint8. Four work arrays
    have one element per slot. `time`, float64, and `done`, int64, start as zeros. `block`, int64,
    starts with the first blocks' numbers, and `heap`, int64, with the slots' numbers. Two work
    arrays, (query heads, inner tiles), start as zeros. `turns`, int32, holds how many visits to an
    inner tile have started. `since`, float64, holds when the next visit may start.

    If `wait` is positive, requests go through `cache` (`requests.SetCache`) as they are issued.
    """
    blocks = len(walks)
    n, no_inner, draw = np.int64(0), np.int64(0), np.int64(seed)
    alive = started = len(heap)
    while alive:
        slot = heap[0]
        b = block[slot]
        # The conversion gives `head` one type everywhere, so Numba compiles _ask once.
        head, outer = np.int64(walks[b] * stride), outers[b]
        side = SIDE * sides[slot]
        visits, own = ptr[outer + 1] - ptr[outer], np.int64(tile_of[outer])
        rank = b % cluster
        first = visits * members * rank // cluster
        total = visits * members * (rank + 1) // cluster - first
        if len(ranks) and done[slot] < total:
            member, v = done[slot] // visits, done[slot] % visits
            if flipped[b]:
                v = visits - 1 - v
            tile = inner[ptr[outer] + v]
            if turns[head + member, tile] < ranks[ptr[outer] + v]:
                # Check again a little after the next slot acts. Another slot always can act,
                # because the first of the blocks that wait for each other need not wait.
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
        issued, v = n, np.int64(0)
        if done[slot] == 0 and rank == 0:
            n = _ask(
                requests, parts[0], parts[1], head_of, head, outer, own, no_inner,
                keys_outside, side, grid_rows, out, codes, n,
            )  # fmt: skip
        if done[slot] < total:
            step = first + done[slot]
            member, v = step // visits, step % visits
            if in_step:
                member, v = step % members, step // members
            if flipped[b]:
                v = visits - 1 - v
            n = _ask(
                requests, parts[1], parts[2], head_of, head + member, outer, own,
                np.int64(inner[ptr[outer] + v]), keys_outside, side, grid_rows, out, codes, n,
            )  # fmt: skip
        takes = 1.0
        if total:
            takes += slower[ptr[outer] + v]
        if wait > 0.0:
            loaded, missed = replay_sets(out[issued:n], codes[issued:n], cache)
            if loaded:
                takes += wait * missed / loaded
            issued = n
        done[slot] += 1
        draw = (draw * 1103515245 + 12345) & 0x7FFFFFFF  # a linear congruential generator
        time[slot] += pace[slot] * (takes + jitter * (draw / 0x40000000 - 1.0))
        if done[slot] >= total:
            after = 3 if several[outer] else 2
            if rank == 0:
                n = _ask(
                    requests, parts[after], parts[after + 1], head_of, head, outer, own, no_inner,
                    keys_outside, side, grid_rows, out, codes, n,
                )  # fmt: skip
            if wait > 0.0:
                replay_sets(out[issued:n], codes[issued:n], cache)
            done[slot] = 0
            if started < blocks:
                block[slot] = started
                started += 1
            else:
                alive -= 1
                heap[0] = heap[alive]
        _sift_down(heap, alive, time)
    return n
