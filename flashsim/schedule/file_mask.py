"""`SavedMask`: the tiles that a mask function kept; a trace file cannot store the function."""

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from flashsim.errors import TraceError
from flashsim.schedule.tiling import Tiling

Csr = tuple[np.ndarray, np.ndarray, np.ndarray]


class SavedMask:
    """Replaces the mask function of a problem that was read from a trace file.

    The object has the table of FULL and MASKED tiles (`Schedule.row_csr`) for each tiling of the
    trace. Schedules, counts and plots need only this table; the mask's values at single scores are
    lost.
    """

    def __init__(self, name: str, tables: Mapping[Tiling, Csr]) -> None:
        self.__name__ = name
        self.tables = dict(tables)

    def row_csr(self, tiling: Tiling) -> Csr:
        """Return the mask's table of tiles, or raise `TraceError` for a tiling not in the trace."""
        if tiling not in self.tables:
            known = ", ".join(str(t) for t in self.tables)
            raise TraceError(
                f"mask function {self.__name__!r} was not saved with its trace, which records "
                f"only which {known} tiles the mask keeps, not which {tiling} tiles; pass the "
                "function as mask= to the Problem"
            )
        return self.tables[tiling]

    def __call__(self, *_: object) -> NoReturn:
        """Raise `TraceError`, because the mask function itself is not in the trace file."""
        raise TraceError(
            f"mask function {self.__name__!r} was not saved with its trace, which records only "
            "which tiles the mask keeps, not which scores; pass the function as mask= to the "
            "Problem"
        )

    def __repr__(self) -> str:
        return f"SavedMask({self.__name__!r})"
