"""The order in which thread blocks of a KV-outer loop add to dQ, if that order is fixed."""

from __future__ import annotations

import numpy as np


def turns(ptr: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order in which blocks take the columns, and each visit's rank within its row tile.

    A visit adds to its row tile's dQ after the visits of all columns that were taken earlier. So a
    block only ever waits for blocks that started before it, and the waiting ends. Columns that
    start at the last rows are taken first: a causal column reaches the next column's rows just when
    the block of that next column has left them.

    Parameters
    ----------
    ptr : ndarray, (columns + 1,)
        Where each column's visits begin.
    index : ndarray, (visits,)
        The row tile of each visit.

    Returns
    -------
    order : ndarray of int32, (columns,)
        The columns, in the order in which they are taken.
    ranks : ndarray of int32, (visits,)
        The number of earlier visits of the same row tile.
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
