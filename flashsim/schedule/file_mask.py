"""`SavedMask`: the tiles that a user's mask function kept, as a trace file stores them.

The function itself cannot be saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from flashsim.errors import TraceError
from flashsim.schedule.tiling import Tiling

Csr = tuple[np.ndarray, np.ndarray, np.ndarray]


class SavedMask:
    """Stands for a mask function in a problem that was read from a trace file.

    It knows which tiles the mask kept, and which of them needed it, for the tilings of that trace.
    This is enough for schedules, counts and plots. The mask's value at single scores is lost.

    Parameters
    ----------
    name : str
        The function's name.
    tables : mapping of Tiling to (ptr (T_r + 1,), col (n,), kind (n,)), int32
        `Schedule.row_csr` with ascending keys, for each tiling.
    """

    def __init__(self, name: str, tables: Mapping[Tiling, Csr]) -> None:
        self.__name__ = name
        self.tables = dict(tables)

    def row_csr(self, tiling: Tiling) -> Csr:
        """The tiles that the mask kept under `tiling`, with keys in ascending order.

        Raises
        ------
        TraceError
            If the trace did not run with that tiling.
        """
        if tiling not in self.tables:
            known = ", ".join(str(t) for t in self.tables)
            raise TraceError(
                f"mask function {self.__name__!r} was not saved with its trace, which only "
                f"records the tiles it kept under {known} tiles: a schedule with {tiling} tiles "
                "needs the function; build the Problem with it"
            )
        return self.tables[tiling]

    def __call__(self, *_: object) -> NoReturn:
        """Raise `TraceError`: the function itself is not in the file."""
        raise TraceError(
            f"mask function {self.__name__!r} was not saved with its trace, which only records "
            "the tiles it kept: single scores need the function; build the Problem with it"
        )

    def __repr__(self) -> str:
        return f"SavedMask({self.__name__!r})"
