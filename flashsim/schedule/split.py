"""`Split`: how the keys of a row tile are dealt out, and whether grouped heads share its rows.

A GPU has over a hundred SMs; one query of eight key heads gives work to eight. FlashDecoding (Dao,
Haziza, Massa and Sizov, 2023) deals the keys of a row tile out as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashsim.errors import OptionError, choices, shown
from flashsim.problem import checks

RULES = ("auto", "fa3")


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

    Raises
    ------
    OptionError, DTypeError
        For less than one part, or other types.
    """

    splits: int = 1
    pack_gqa: bool = False

    def __post_init__(self) -> None:
        if not checks.is_int(self.splits) or self.splits < 1:
            raise OptionError(
                f"splits must be an integer of at least 1, or one of {', '.join(RULES)}, got "
                f"{shown(self.splits)}"
            )
        object.__setattr__(self, "splits", int(self.splits))
        object.__setattr__(self, "pack_gqa", checks.flag("pack_gqa", self.pack_gqa))

    def __str__(self) -> str:
        parts = "1 split" if self.splits == 1 else f"{self.splits} splits"
        return f"{parts}, heads packed" if self.pack_gqa else parts


WHOLE = Split()


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
