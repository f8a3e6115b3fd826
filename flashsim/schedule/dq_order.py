"""In which order keys-outside blocks add to one dQ, where that order is fixed."""

from __future__ import annotations

import numpy as np


def turns(ptr: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns in the order in which they are taken, and each visit's turn among its row's.

    A visit adds to its row tile's dQ when the columns that were taken before its own have added
    theirs: blocks thus wait only for blocks that started earlier, so the waiting ends. Columns that
    start at the last rows are taken first: a causal column reaches the rows of the next one just
    when that one has left them.

    Parameters
    ----------
    ptr : ndarray, (columns + 1,)
        Where each column's visits begin.
    index : ndarray, (visits,)
        The row tile of each visit.

    Returns
    -------
    order : ndarray of int32, (columns,)
    ranks : ndarray of int32, (visits,)
        How many visits of its row tile come before each.
    """
    tiles, visits = len(ptr) - 1, len(index)
    columns = np.repeat(np.arange(tiles), np.diff(ptr))
    first = np.full(tiles, -1)
    visited = np.diff(ptr) > 0
    first[visited] = index[ptr[:-1][visited]]
    order = np.argsort(-first, kind="stable").astype(np.int32)
    place = np.empty(tiles, np.int64)
    place[order] = np.arange(tiles)
    by_row = np.lexsort((place[columns], index))
    rows = index[by_row]
    ranks = np.empty(visits, np.int32)
    ranks[by_row] = np.arange(visits) - np.searchsorted(rows, rows)
    return order, ranks
