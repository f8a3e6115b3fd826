"""Which keys of a KV cache are live: the checks of lengths, pages and a shared prefix.

The simulator's decoding and the GPU's take the same `cache_seqlens`, `block_table` and
`shared_prefix`, and refuse the same mistakes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashsim.errors import OptionError, ShapeError, shown
from flashsim.problem import checks


def live_lengths(lengths: Any, batch: int, n_kv: int, *, paged: bool = False) -> tuple[int, ...]:
    """Return `cache_seqlens` as integers; None stands for entries that fill their cache.

    Parameters
    ----------
    lengths : sequence or array of int, (batch,), or None
        Of an array on a GPU, the call waits for the numbers.
    n_kv : int
        The capacity of the cache per entry.
    paged : bool
        Whether a block table says where the keys are.

    Raises
    ------
    ShapeError
        If there is not one integer per entry.
    OptionError
        If a length is negative or exceeds the capacity.
    """
    if lengths is None:
        return (n_kv,) * batch
    host = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    numbers = tuple(host) if isinstance(host, (list, tuple)) else ()
    if len(numbers) != batch or not all(checks.is_int(n) for n in numbers):
        raise ShapeError(
            f"cache_seqlens must be {batch} integers, one for each entry of the batch, got "
            f"{shown(lengths)}"
        )
    for b, n in enumerate(numbers):
        if not 0 <= n <= n_kv:
            where = "its row of the table" if paged else "the cache"
            raise OptionError(
                f"cache_seqlens[{b}] is {n}, not from 0 to the {n_kv} keys of {where}"
            )
    return tuple(int(n) for n in numbers)


def check_prefix(prefix: int, lengths: tuple[int, ...]) -> None:
    """Raise `OptionError` if an entry has fewer keys than the shared prefix."""
    for b, n in enumerate(lengths):
        if n < prefix:
            raise OptionError(
                f"shared_prefix is {prefix:,} keys, and entry {b} of the batch has only {n:,}"
            )


def check_pages(
    table: np.ndarray, lengths: tuple[int, ...], page: int, pages: int, prefix: int
) -> None:
    """Raise `OptionError` unless every live key has a page, and a shared prefix the same pages.

    Parameters
    ----------
    table : ndarray of int, (batch, max_pages)
    page, pages : int
        Keys per page, and pages of the pool.
    prefix : int
        Keys that all entries share.
    """
    for b, n in enumerate(lengths):
        used = table[b, : -(-n // page)]
        for j in np.flatnonzero((used < 0) | (used >= pages))[:1]:
            raise OptionError(
                f"block_table[{b}, {j}] is {used[j]}, not one of the pool's pages, 0 to {pages - 1}"
            )
    shared = table[:, : prefix // page]
    for b, j in np.argwhere(shared != shared[:1])[:1]:
        raise OptionError(
            f"block_table[{b}, {j}] is {table[b, j]}, but the first {prefix:,} keys are shared, "
            f"and entry 0 keeps them in page {table[0, j]}"
        )
