"""Converts a user's slices of rows and columns to tiles of a stage's grid."""

from contextlib import suppress
from typing import Any

import numpy as np

from flashsim.errors import ShapeError, shown
from flashsim.schedule.schedule import Schedule


def span(which: Any, size: int, what: str) -> range:
    """Return the positions below `size` that the user's slice selects."""
    if isinstance(which, slice):
        with suppress(TypeError, ValueError):  # e.g. ends that are no integers, or a step of 0
            return range(size)[which]
    raise ShapeError(f"{what} must be a slice of integers, got {shown(which)}")


def tile_number(which: int | slice, side: str, schedule: Schedule, stage: str) -> int:
    """Return the number of the tile that contains these rows or keys, in the stage's grid."""
    table = schedule.rows if side == "queries" else schedule.cols
    block = schedule.tiling.block_q if side == "queries" else schedule.tiling.block_k
    if isinstance(which, (int, np.integer)):
        if not 0 <= which < len(table):
            raise ShapeError(
                f"there are {len(table)} tiles of {side}, numbered from 0, got tile number {which}"
            )
        return int(which)
    part = span(which, int(table[-1, 1]), f"{side} of a tile, such as slice(0, 64),")
    if not len(part) or part.step != 1:
        raise ShapeError(
            f"the slice {which.start}:{which.stop} must select at least one of the "
            f"{int(table[-1, 1])} {side}, in steps of 1"
        )
    first, last = part[0] // block, part[-1] // block
    if first != last:
        name = "block_q" if side == "queries" else "block_k"
        raise ShapeError(
            f"a slice of {side} must lie in one tile, but {part.start}:{part.stop} reaches past "
            f"the end of a tile of {block} {side}; loop over tiles of machine.tiling.{name} "
            f"{side}, or set larger tiles by machine.stage({stage!r}, "
            "tiling=flashsim.Tiling(block_q, block_k))"
        )
    return first
