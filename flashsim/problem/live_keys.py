"""Checks which keys of a KV cache are live (in use): lengths, pages and a shared prefix."""

from typing import Any

import numpy as np

from flashsim.errors import OptionError, ShapeError, shown
from flashsim.problem import checks


def read_lengths(lengths: Any, count: int | None = None) -> tuple[int, ...]:
    """Return `cache_seqlens` as a tuple of integers, `count` of them if it is not None."""
    host = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    listed = isinstance(host, (list, tuple)) and all(map(checks.is_int, host))
    if not listed or count not in (None, len(host)):
        number = "" if count is None else f"{count} "
        raise ShapeError(
            f"cache_seqlens must be {number}integers, one per batch entry, got {shown(lengths)}"
        )
    return tuple(map(int, host))


def live_lengths(lengths: Any, batch: int, n_kv: int, *, paged: bool = False) -> tuple[int, ...]:
    """Return the number of live keys in each batch entry's KV cache, from `cache_seqlens`.

    If `lengths` is None, every batch entry has `n_kv` live keys. If `lengths`, (batch,), is an
    array on a GPU, the call waits until the GPU has computed it. `paged` says whether K and V are
    in pages that a block table lists.

    Raises
    ------
    ShapeError
        If there is not one integer per entry.
    OptionError
        If a length is negative or exceeds the capacity.
    """
    if lengths is None:
        return (n_kv,) * batch
    numbers = read_lengths(lengths, batch)
    for b, n in enumerate(numbers):
        if not 0 <= n <= n_kv:
            where = "its row of the table" if paged else "the cache"
            raise OptionError(
                f"cache_seqlens[{b}] must be from 0 to {n_kv}, the number of keys in {where}, got "
                f"{n}"
            )
    return numbers


def check_prefix(prefix: int, lengths: tuple[int, ...]) -> None:
    """Raise `OptionError` if a batch entry has fewer keys than the shared prefix."""
    for b, n in enumerate(lengths):
        if n < prefix:
            raise OptionError(
                "shared_prefix= must be at most the number of keys of every batch entry, got "
                f"{prefix:,}, but entry {b} has only {n:,} keys"
            )


def check_pages(
    table: np.ndarray, lengths: tuple[int, ...], page: int, pages: int, prefix: int
) -> None:
    """Raise `OptionError` unless all live keys have valid pages.

    The first `prefix` keys, which all entries share, must have the same pages in all entries.
    `table` is (batch, max_pages), and the pool has `pages` pages of `page` keys.
    """
    for b, n in enumerate(lengths):
        used = table[b, : -(-n // page)]
        for j in np.flatnonzero((used < 0) | (used >= pages))[:1]:
            raise OptionError(
                f"block_table[{b}, {j}] must be a page of the pool, from 0 to {pages - 1}, got "
                f"{used[j]}"
            )
    shared = table[:, : prefix // page]
    for b, j in np.argwhere(shared != shared[:1])[:1]:
        raise OptionError(
            f"block_table[{b}, {j}] must be page {table[0, j]}, as for entry 0, because all "
            f"batch entries share the first {prefix:,} keys, got page {table[b, j]}"
        )
