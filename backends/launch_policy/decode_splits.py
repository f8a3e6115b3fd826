"""Which parts the keys of a batch are divided into, in key tiles: arithmetic of integers alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from flashsim.problem.problem import Problem

#: Key tiles that a split has at least: so many a warp fetches at once before its first product.
LEAST_TILES = 2


def key_tiles(problem: Problem, length: int, block_k: int) -> tuple[int, int]:
    """The key tiles that a sequence's queries see: a window leaves out the first ones."""
    first = max(0, length - problem.n_q - problem.left) // block_k
    last = -(-length // block_k)
    return min(first, last), last


def longest_split(tiles: list[int], capacity: int, least: int = LEAST_TILES) -> int:
    """Key tiles of the longest split, so that there are at most `capacity` splits; where there are
    more sequences than that, the average load of so many.
    """
    if sum(n > 0 for n in tiles) > capacity:
        return max(least, -(-sum(tiles) // max(1, capacity)))
    low, high = least, max(least, *tiles)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-n // middle) for n in tiles) <= capacity:
            high = middle
        else:
            low = middle + 1
    return low


def divided(tiles: list[int], splits: int | None, longest: int) -> list[int]:
    """Splits of sequences of so many key tiles: `splits`, or as many as have `longest` at most."""
    if splits is None:
        return [max(1, -(-n // longest)) for n in tiles]
    return [max(1, min(splits, n)) for n in tiles]


def cuts(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of key tiles whose lengths differ by one at most."""
    ends = [first + (last - first) * i // parts for i in range(parts + 1)]
    return list(pairwise(ends))


def items(
    lengths: tuple[int, ...],
    ranges: list[tuple[int, int]],
    splits: list[int],
    *,
    together: bool = False,
) -> np.ndarray:
    """`decode.Decode.items` of sequences whose key tiles, ``range(*ranges[b])``, are split evenly;
    those of a sequence one after the other, if they are to stay `together`.
    """
    listed, slot = [], 0
    for b, (length, (lo, hi), n) in enumerate(zip(lengths, ranges, splits, strict=True)):
        for i, cut in enumerate(cuts(lo, hi, n)):
            listed.append((b, *cut, slot + i if n > 1 else 0, slot, n, length, 0))
        slot += n if n > 1 else 0
    if together:
        listed.sort(key=lambda item: ranges[item[0]][0] - ranges[item[0]][1])
    else:
        listed.sort(key=lambda item: item[1] - item[2])
    return np.array(listed, np.int32)
