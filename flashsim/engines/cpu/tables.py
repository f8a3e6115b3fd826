"""The tables that a walk is handed: sizes, tiles, arrays, and the notes it takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

#: A tile's size as one number, in the notes of a walk: rows times this plus columns.
NOTE = 1 << 32

#: Places of the counter that the threads of a walk share: the next item, whether to stop, and
#: whether a result is NaN or infinite.
PLACES, STOP, ODD = 3, 1, 2


class Shape(NamedTuple):
    """Sizes: heads of one batch entry, lengths, head dims and the tile's sides."""

    heads: int
    kv_heads: int
    n_q: int
    n_kv: int
    d: int
    dv: int
    block_q: int
    block_k: int


class Tiles(NamedTuple):
    """A schedule's tables, and who walks what.

    Attributes
    ----------
    own, other : int32 (T, 4)
        The outer and the inner tiles: start, stop, offset, ..
    ptr, inner, kind : int32
        CSR: inner tiles of each outer tile.
    keep_at : int64 (visits,)
        Where a visit's mask bits start in `keep`; -1 where it has none.
    keep : uint8
        Rows x columns bits of visits, one after the other.
    turn : int32 (visits,)
        How many visits of the same row tile are still to come, this one with them, negated: fixes
        the order in which dQ is summed.
    runs : int64 (items, 2)
        Neighbouring outer tiles, first and last + 1, that one thread walks together, in the order
        they are handed out.
    set_ptr, sets : int64
        CSR: heads that one item takes one after the other, since they add to the same memory.
    longest : int
        Outer tiles of the longest run.
    descending : bool
        Whether a walk takes its inner tiles from the last to the first.
    """

    own: np.ndarray
    other: np.ndarray
    ptr: np.ndarray
    inner: np.ndarray
    kind: np.ndarray
    keep_at: np.ndarray
    keep: np.ndarray
    turn: np.ndarray
    runs: np.ndarray
    set_ptr: np.ndarray
    sets: np.ndarray
    longest: int
    descending: bool


class Notes(NamedTuple):
    """What was walked: `steps` (walks, T) and `visits` (heads, visits), or both empty."""

    steps: np.ndarray
    visits: np.ndarray


class WalkInputs(NamedTuple):
    """What a backward pass reads, flat; `lse` has 0 where no key was seen.

    With one query per head, whose forward pass is `walks_decode`'s, `along` and `factor` are Q and
    the factor of its scores as that walk has them; `along` is empty otherwise.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    lse: np.ndarray
    delta: np.ndarray
    along: np.ndarray
    factor: np.ndarray


class Grads(NamedTuple):
    """What a backward pass writes, flat; `dbias` is empty without bias.

    `dq_stride` is the length of one row of `dq`: where it is summed up in memory, head_dim and
    padding, so that whole panels fit.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray
    dq_stride: int
