"""`SavedMask`: the tiles that a user's mask function kept, in the form of a trace file.

A trace file cannot contain the mask function itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from flashsim.errors import TraceError
from flashsim.schedule.tiling import Tiling

Csr = tuple[np.ndarray, np.ndarray, np.ndarray]


class SavedMask:
    """Replaces the mask function in a problem that was read from a trace file.

    The object has the tables of FULL and MASKED tiles for the tilings of that trace. Schedules,
    counts and plots need only these tables. The mask's values at single scores are lost.

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
        """Return the tiles that the mask kept under `tiling`, with keys in ascending order.

        Raises
        ------
        TraceError
            If no stage of the trace has that tiling.
        """
        if tiling not in self.tables:
            known = ", ".join(str(t) for t in self.tables)
            raise TraceError(
                f"mask function {self.__name__!r} was not saved with its trace, which records "
                f"only which {known} tiles the mask keeps, not which {tiling} tiles; pass the "
                "function as mask= to the Problem"
            )
        return self.tables[tiling]

    def __call__(self, *_: object) -> NoReturn:
        """Raise `TraceError`, because the mask function itself is not in the file."""
        raise TraceError(
            f"mask function {self.__name__!r} was not saved with its trace, which records only "
            "which tiles the mask keeps, not which scores; pass the function as mask= to the "
            "Problem"
        )

    def __repr__(self) -> str:
        return f"SavedMask({self.__name__!r})"
