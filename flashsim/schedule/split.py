"""`Split`: how the keys of a row tile are divided, and whether grouped heads share its rows.

The simulator's schedule and the GPU's launches divide by it, and by the rules here.

A GPU has over a hundred SMs; one query of eight key heads gives work to eight. FlashDecoding (Dao,
Haziza, Massa and Sizov, 2023) deals the keys of a row tile out as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flashsim.errors import OptionError, choices, shown
from flashsim.problem import checks

RULES = ("auto", "fa3")
#: Key tiles that a part has at least on a GPU: so many a warp fetches before its first product.
LEAST_TILES = 2


@dataclass(frozen=True)
class Split:
    """Parts of the keys, and rows of a tile.

    Parameters
    ----------
    splits : int
        The key tiles that a row tile visits are divided into this many contiguous parts, whose
        numbers of tiles differ by one at most; into as many as there are tiles, where these are
        fewer. With a shared prefix, so many are the parts of the row tile that visits the most key
        tiles; another has fewer in proportion, so that a part is as long anywhere.
    pack_gqa : bool
        Row r of a head's walk is query ``r // group`` of the group's query head ``r % group``: all
        query heads of a key head share a tile, and K and V are loaded once for them.
    part_tiles : int, optional
        Instead of `splits`: a part has at most so many key tiles, so that sequences of different
        lengths are divided in proportion. The GPU's kernels choose splits in this way.

    Raises
    ------
    OptionError, DTypeError
        For less than one part, or one tile in it; for both `splits` and `part_tiles`; for other
        types.
    """

    splits: int = 1
    pack_gqa: bool = False
    part_tiles: int | None = None

    def __post_init__(self) -> None:
        if not checks.is_int(self.splits) or self.splits < 1:
            raise OptionError(
                f"splits must be an integer of at least 1, or one of {', '.join(RULES)}, got "
                f"{shown(self.splits)}"
            )
        object.__setattr__(self, "splits", int(self.splits))
        object.__setattr__(self, "pack_gqa", checks.flag("pack_gqa", self.pack_gqa))
        if self.part_tiles is not None:
            if not checks.is_int(self.part_tiles) or self.part_tiles < 1:
                raise OptionError(
                    f"part_tiles must be an integer of at least 1, got {shown(self.part_tiles)}"
                )
            object.__setattr__(self, "part_tiles", int(self.part_tiles))
            if self.splits != 1:
                raise OptionError(
                    f"give splits or part_tiles, not both: got {self.splits} and {self.part_tiles}"
                )

    def parts(self, visits: ArrayLike, *, alike: bool = False) -> np.ndarray:
        """int64: into how many parts so many visits of each row tile are divided, at least 1.

        Parameters
        ----------
        visits : array_like of int
            Key tiles that each row tile visits.
        alike : bool
            Parts of all row tiles are about as long as those of the one with the most visits. With
            a shared prefix it is so.
        """
        tiles = np.asarray(visits, np.int64)
        if self.part_tiles is not None:
            parts = -(-tiles // self.part_tiles)
        elif alike:
            longest = max(1, int(tiles.max()))
            parts = -(-tiles * min(self.splits, longest) // longest)
        else:
            parts = np.minimum(tiles, self.splits)
        return np.maximum(parts, 1)

    def __str__(self) -> str:
        if self.part_tiles is not None:
            return f"parts of {self.part_tiles} key tiles" + ", heads packed" * self.pack_gqa
        parts = "1 split" if self.splits == 1 else f"{self.splits} splits"
        return f"{parts}, heads packed" if self.pack_gqa else parts


WHOLE = Split()


def cut(first: int, last: int, part: int, parts: int) -> tuple[int, int]:
    """The part-th of so many contiguous parts of ``range(first, last)``: where it begins and ends.

    Parts differ by one at most.
    """
    n = last - first
    return first + n * part // parts, first + n * (part + 1) // parts


def check_splits(splits: Any) -> None:
    """Raise `OptionError` unless this is a number of splits, or a rule that chooses one."""
    if isinstance(splits, str):
        if splits not in RULES:
            raise OptionError(f"unknown splits {splits!r}; {choices(splits, RULES)}, or an integer")
    else:
        Split(splits)


def fill_once(blocks: int, processors: int, visits: int) -> int:
    """The most parts of `blocks` row tiles, of `visits` key tiles each, that run all at once.

    More rounds of smaller parts do not end sooner, and each part costs a partial O, written and
    read; so where the row tiles alone occupy every SM, they stay whole.
    """
    return max(1, min(processors // blocks, visits))


def fa3(blocks: int, processors: int, visits: int) -> int:
    """FlashAttention-3's rule, without its case for heads that exceed L2.

    `num_splits_heuristic` in hopper/heuristics.h of Dao-AILab/flash-attention: one part where 0.8
    of the SMs are busy or there are at most 4 key tiles; else the fewest, up to 128, whose last
    round is filled at least 0.85 times as well as the best filled one's.
    """
    if 5 * blocks >= 4 * processors or visits <= 4:
        return 1
    rounds = [blocks * n / processors for n in range(1, min(128, processors, visits) + 1)]
    filled = [x / -(-x // 1) for x in rounds]
    return next(n for n, x in enumerate(filled, 1) if x >= 0.85 * max(filled))


def longest_part(tiles: Sequence[int], capacity: int, least: int = LEAST_TILES) -> int:
    """Key tiles of the longest part, so that row tiles of so many visits have at most `capacity`
    parts; where there are more row tiles than that, the average load of so many.

    Row tiles of one length get no more parts than `fill_once` says.
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
