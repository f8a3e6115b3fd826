"""A fixed order in which thread blocks add to dQ, so that timing does not change the sums."""

import numpy as np


def turns(ptr: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of column tiles, and each visit's rank among the visits of one row tile.

    A row tile's visits add to dQ one after another, in the returned order of column tiles. A block
    waits only for blocks that started before it, so a deadlock is impossible. Column tiles are
    sorted by their first visited row tile, from the last row tile to the first. Under a causal
    mask, a block thus reaches each row tile just after the next column tile's block has added to
    dQ.

    `ptr`, (columns + 1,), has the index of each column tile's first visit, and `index`, (visits,),
    the row tile of each visit. A rank is the number of earlier visits of the same row tile.
    """
    tiles, visits = len(ptr) - 1, len(index)
    columns = np.repeat(np.arange(tiles), np.diff(ptr))
    first = np.full(tiles, -1)
    visited = np.diff(ptr) > 0
    first[visited] = index[ptr[:-1][visited]]
    order = np.argsort(-first, kind="stable").astype(np.int32)
    rank = np.empty(tiles, np.int64)
    rank[order] = np.arange(tiles)
    by_row = np.lexsort((rank[columns], index))
    rows = index[by_row]
    ranks = np.empty(visits, np.int32)
    ranks[by_row] = np.arange(visits) - np.searchsorted(rows, rows)
    return order, ranks
