"""On-chip memory that a tile and its views share, and the lifetime of temporaries."""

from typing import Any

import numpy as np

from flashsim.engines.sandbox.lines import at_work
from flashsim.engines.sandbox.tape import Tape


class Room:
    """The SRAM bytes of a tile and all its views.

    `gone` is "" while the memory is allocated, and later says where it was freed. `narrow` is the
    type of the narrower tensor from which the tile was loaded, if any: the tile takes that type's
    bytes, and writes are rounded to that type.
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
    """A reference to a `Room`, held by the tile and all its views.

    A temporary's bytes are freed when the tile and all its views are gone. `numbers` are the
    numbers that stand for the tile and its views in the `tape`.
    """

    __slots__ = ("numbers", "room", "tape")

    def __init__(self, room: Room) -> None:
        self.room = room
        self.tape: Tape | None = None
        self.numbers: list[int] = []

    def __del__(self) -> None:
        if self.tape is not None:
            self.tape.dropped(self.numbers)
        if self.room.temporary and not self.room.gone:
            self.room.sram._give_back(self.room, "where its last name went")
