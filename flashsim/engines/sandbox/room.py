"""Room on chip: what a tile and its views share, and when a temporary's is given back."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashsim.engines.sandbox.lines import at_work


class Room:
    """Bytes of SRAM that one tile and its views share.

    `gone` is "" as long as they are held, then where they were given back. `narrow` is the type of
    a tile that was loaded from a narrower tensor: it takes that type's room, so what is written
    into it is rounded to that type.
    """

    __slots__ = ("data", "depth", "gone", "made", "name", "narrow", "nbytes", "sram", "temporary")

    def __init__(
        self, sram: Any, name: str, nbytes: int, data: np.ndarray, depth: int, temporary: bool
    ) -> None:
        self.sram, self.name, self.nbytes, self.data = sram, name, nbytes, data
        self.depth, self.temporary = depth, temporary
        self.made, self.gone = at_work(), ""
        self.narrow: np.dtype | None = None


class Lease:
    """What the tiles in a room hold together: when the last of them goes, so does a temporary."""

    __slots__ = ("room",)

    def __init__(self, room: Room) -> None:
        self.room = room

    def __del__(self) -> None:
        if self.room.temporary and not self.room.gone:
            self.room.sram._give_back(self.room, "where its last name went")
