"""`Split`: the number of parts into which keys are split, and whether heads are packed.

FlashDecoding (Dao, Haziza, Massa and Sizov, 2023) distributes the keys of each row tile over SMs. A
GPU has over a hundred SMs, but a single query with eight key heads yields only eight row tiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flashsim.errors import OptionError, choices, shown
from flashsim.problem import checks

RULES = ("auto", "fa3")
#: The fewest key tiles per part on a GPU: a warp fetches this many before its first product.
LEAST_TILES = 2


@dataclass(frozen=True)
class Split:
    """How keys are split into parts, and whether the query heads of a group share a row tile.

    Parameters
    ----------
    splits : int
        The number of contiguous parts into which a row tile's key tiles are split. The parts' sizes
        differ by at most one tile. A row tile with fewer key tiles has one part per key tile. With
        a shared prefix, this is the number of parts of the row tile that visits the most key tiles;
        other row tiles have proportionally fewer parts.
    pack_gqa : bool
        True if all query heads of a key head share a row tile, so that K and V are loaded once for
        all of them. Row r is then query ``r // group`` of the group's query head ``r % group``.
    part_tiles : int, optional
        The largest number of key tiles per part, instead of `splits`. A longer sequence then has
        proportionally more parts. The GPU kernels choose splits in this way.

    Raises
    ------
    OptionError, DTypeError
        If there is less than one part, or less than one tile per part; if both `splits` and
        `part_tiles` are passed; or if an argument has the wrong type.
    """

    splits: int = 1
    pack_gqa: bool = False
    part_tiles: int | None = None

    def __post_init__(self) -> None:
        if not checks.is_int(self.splits) or self.splits < 1:
            raise OptionError(
                f"splits= must be an integer of at least 1, or one of {', '.join(RULES)}, got "
                f"{shown(self.splits)}"
            )
        object.__setattr__(self, "splits", int(self.splits))
        object.__setattr__(self, "pack_gqa", checks.flag("pack_gqa", self.pack_gqa))
        if self.part_tiles is not None:
            if not checks.is_int(self.part_tiles) or self.part_tiles < 1:
                raise OptionError(
                    f"part_tiles= must be an integer of at least 1, got {shown(self.part_tiles)}"
                )
            object.__setattr__(self, "part_tiles", int(self.part_tiles))
            if self.splits != 1:
                raise OptionError(
                    f"pass either splits= or part_tiles=, not both; got splits={self.splits} and "
                    f"part_tiles={self.part_tiles}"
                )

    def parts(self, visits: ArrayLike, *, alike: bool = False) -> np.ndarray:
        """Return the number of parts of each row tile's keys, at least 1, as int64.

        The argument `visits` has the number of key tiles of each row tile. With `alike`, the parts
        of all row tiles are about equally long.
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
    """Return the bounds of part `part` of ``range(first, last)`` cut into nearly equal parts."""
    n = last - first
    return first + n * part // parts, first + n * (part + 1) // parts


def check_splits(splits: Any) -> None:
    """Raise `OptionError` unless `splits` is a number of parts of the keys or a rule's name."""
    if isinstance(splits, str):
        if splits not in RULES:
            raise OptionError(
                f"unknown splits={splits!r}; pass an integer or a name; choose from "
                f"{choices(splits, RULES)}"
            )
    else:
        Split(splits)


def fill_once(blocks: int, processors: int, visits: int) -> int:
    """Return the largest number of parts per row tile for which all parts run at the same time.

    The loop has `blocks` row tiles with `visits` key tiles each. More parts would need several
    waves of thread blocks, without ending sooner. If the row tiles alone occupy every SM, the
    result is 1 (no split).
    """
    return max(1, min(processors // blocks, visits))


def fa3(blocks: int, processors: int, visits: int) -> int:
    """Return the number of parts of the keys that FlashAttention-3's rule chooses.

    The rule is `num_splits_heuristic` in hopper/heuristics.h of Dao-AILab/flash-attention, without
    its case for K and V that exceed L2. The rule returns 1 (no split) if the row tiles alone occupy
    80% of the SMs, or if there are at most 4 key tiles. Otherwise, for each number of parts up to
    128, the rule computes the average fraction of busy SMs over all waves. The result is the
    smallest number of parts that reaches 0.85 times the largest fraction.
    """
    if 5 * blocks >= 4 * processors or visits <= 4:
        return 1
    rounds = [blocks * n / processors for n in range(1, min(128, processors, visits) + 1)]
    filled = [x / -(-x // 1) for x in rounds]
    return next(n for n, x in enumerate(filled, 1) if x >= 0.85 * max(filled))


def longest_part(tiles: Sequence[int], capacity: int, least: int = LEAST_TILES) -> int:
    """Return the smallest number of key tiles per part that gives at most `capacity` parts in all.

    The argument `tiles` has the number of key tiles of each row tile. If more than `capacity` row
    tiles have key tiles, the result is the average load: all key tiles divided by `capacity`. The
    result is at least `least`.
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
