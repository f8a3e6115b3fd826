"""Block-sparse masks, users' mask functions, and the largest score that counts as masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashsim.errors import FlashSimError, MaskError, own_errors
from flashsim.problem import checks


def masked_score(dtype: Any) -> float:
    """Return the largest score that counts as masked: half the lowest finite number of `dtype`.

    `dtype` is the type in which scores are computed. Model code often masks a score by adding the
    lowest finite number of a type. A row whose scores all count as masked is a row without keys.
    Rounding erases the differences between such a row's scores, and the term log n of the LSE.
    """
    return float(np.finfo(dtype).min) / 2


@own_errors
class BlockMask:
    """A block-sparse mask: score (q, k) is kept if ``grid[q // block_q, k // block_k]`` is True.

    Parameters
    ----------
    grid : array_like of bool, shape (ceil(n_q / block_q), ceil(n_kv / block_k))
        True for each cell whose scores are kept. q and k count from the start of each sequence.
    block_q, block_k : int
        Rows and columns of one cell, in scores, which may differ from the sides of a tile.
    """

    def __init__(self, grid: Any, block_q: int, block_k: int) -> None:
        array = checks.as_array("a block mask's grid", grid)
        if array.dtype != np.bool_ or array.ndim != 2 or 0 in array.shape:
            raise MaskError(
                "a block mask's grid must be a non-empty 2-D array of booleans, one per block, "
                f"got dtype {array.dtype}, shape {array.shape}"
            )
        self.block_q = checks.positive_int("block_mask block_q", block_q)
        self.block_k = checks.positive_int("block_mask block_k", block_k)
        self.grid = array.copy()
        self.grid.setflags(write=False)
        self._key = (self.block_q, self.block_k, array.shape, self.grid.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockMask) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        r, c = self.grid.shape
        return (
            f"BlockMask({r} x {c} cells of {self.block_q} x {self.block_k}, "
            f"{self.grid.mean():.0%} kept)"
        )


def call_mask(mask: Callable[..., Any], q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return a mask function's booleans for index arrays; raise `MaskError` if the call fails."""
    shape = np.broadcast_shapes(q.shape, k.shape)
    name = getattr(mask, "__name__", repr(mask))
    try:
        result = mask(q, k)
        if isinstance(result, np.ma.MaskedArray):
            raise MaskError(
                f"mask function {name!r} returned a masked array; return a plain boolean array"
            )
        result = np.asarray(result)
    except FlashSimError:
        raise
    except Exception as error:
        raise MaskError(
            f"mask function {name!r} failed on index arrays of shapes {q.shape} and {k.shape} "
            f"({type(error).__name__}: {error}); write it with operations on whole arrays of "
            "indices, e.g. (q - k) % 2 == 0"
        ) from error
    if result.dtype != np.bool_:
        raise MaskError(f"mask function {name!r} must return booleans, got dtype {result.dtype}")
    try:
        return np.broadcast_to(result, shape)
    except ValueError:
        raise MaskError(
            f"mask function {name!r} must return an array that broadcasts to {shape}, got "
            f"{result.shape}"
        ) from None
