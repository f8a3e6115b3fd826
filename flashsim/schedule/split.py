"""`Split`: how the keys of a row tile are divided, and whether grouped heads share its rows.

The simulator's schedule and the GPU's launches both use it and the rules in this module.

A GPU has over a hundred SMs, but a single query with eight key heads gives work to only eight.
FlashDecoding (Dao, Haziza, Massa and Sizov, 2023) also distributes the keys of a row tile.
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
    """How keys are divided into parts, and whether query heads of a group share a tile's rows.

    Parameters
    ----------
    splits : int
        The number of contiguous parts that a row tile's key tiles are divided into. Their sizes
        differ by at most one tile. A row tile with fewer key tiles has one part per key tile. With
        a shared prefix, this is the number of parts of the row tile that visits the most key tiles.
        Other row tiles have proportionally fewer, so that all parts are about as long.
    pack_gqa : bool
        All query heads of a key head share a tile, and K and V are loaded once for them. Row r is
        then query ``r // group`` of the group's query head ``r % group``.
    part_tiles : int, optional
        The most key tiles per part, instead of `splits`. Sequences of different lengths are then
        divided in proportion. The GPU's kernels choose splits in this way.

    Raises
    ------
    OptionError, DTypeError
        For fewer than one part, or fewer than one tile per part; for both `splits` and
        `part_tiles`; for other types.
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
        """int64: the number of parts for each row tile, at least 1, given its number of visits.

        Parameters
        ----------
        visits : array_like of int
            Key tiles that each row tile visits.
        alike : bool
            Make parts of all row tiles about as long as those of the row tile with the most visits,
            as with a shared prefix.
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
    """Start and stop of one of `parts` contiguous parts of ``range(first, last)``.

    The lengths of the parts differ by at most one.
    """
    n = last - first
    return first + n * part // parts, first + n * (part + 1) // parts


def check_splits(splits: Any) -> None:
    """Raise `OptionError` unless `splits` is a number of splits or the name of a rule."""
    if isinstance(splits, str):
        if splits not in RULES:
            raise OptionError(f"unknown splits {splits!r}; {choices(splits, RULES)}, or an integer")
    else:
        Split(splits)


def fill_once(blocks: int, processors: int, visits: int) -> int:
    """The most parts per row tile such that all parts of all `blocks` row tiles run at once.

    Each row tile visits `visits` key tiles. More waves of smaller parts do not end sooner, and each
    part costs a partial O that is written and read. So if the row tiles alone occupy every SM, they
    stay whole.
    """
    return max(1, min(processors // blocks, visits))


def fa3(blocks: int, processors: int, visits: int) -> int:
    """The number of parts by FlashAttention-3's rule, without its case for heads that exceed L2.

    The rule is `num_splits_heuristic` in hopper/heuristics.h of Dao-AILab/flash-attention. It gives
    one part if 0.8 of the SMs are busy or there are at most 4 key tiles. Otherwise it gives the
    fewest parts, up to 128, whose last wave is filled at least 0.85 times as well as the
    best-filled one.
    """
    if 5 * blocks >= 4 * processors or visits <= 4:
        return 1
    rounds = [blocks * n / processors for n in range(1, min(128, processors, visits) + 1)]
    filled = [x / -(-x // 1) for x in rounds]
    return next(n for n, x in enumerate(filled, 1) if x >= 0.85 * max(filled))


def longest_part(tiles: Sequence[int], capacity: int, least: int = LEAST_TILES) -> int:
    """The smallest part length, in key tiles, with which there are at most `capacity` parts in all.

    `tiles` holds the number of key tiles of each row tile. If more row tiles than `capacity` have
    key tiles, the result is the average load instead: all key tiles divided by `capacity`. The
    result is at least `least`. Row tiles of equal length get no more parts than `fill_once` gives.
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
