"""The tables that compiled kernels receive: sizes, tiles, arrays, and notes for the trace."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

#: A kernel's notes store a tile's size as one number: rows times this, plus columns.
NOTE = 1 << 32

#: Indices into the counter that the threads of a kernel share: the next work tile, whether to stop,
#: and whether a result is NaN or infinite.
PLACES, STOP, ODD = 3, 1, 2


class Shape(NamedTuple):
    """Sizes of a problem: heads per batch entry, lengths, head dims and the sides of a tile."""

    heads: int
    kv_heads: int
    n_q: int
    n_kv: int
    d: int
    dv: int
    block_q: int
    block_k: int


class Tiles(NamedTuple):
    """A schedule's tables, and how its tiles are divided among threads.

    Attributes
    ----------
    own, other : int32 (T, 5)
        The outer and the inner tiles: start, stop, offset, .., and the start of their sequence.
    ptr, inner, kind : int32
        CSR: inner tiles of each outer tile, and their kinds.
    keep_at : int64 (visits,)
        The start of a visit's (tile pair's) mask bits in `keep`; -1 if it has no mask bits.
    keep : uint8
        The mask bits of all visits, one visit after the other: (rows, slots, columns) each. There
        is one slot for all heads, or one per batch entry or head between which the mask differs.
    edges_at : int64 (visits,)
        The start of a visit's `edges`.
    edges : int32
        For each panel and slot of a visit with mask bits, the first and last + 1 row in which any
        score is kept, and the first and last + 1 row in which any score is hidden.
    turn : int32 (visits,)
        Minus the number of remaining visits of the same row tile, including this visit. It fixes
        the order in which dQ is summed.
    runs : int64 (n, 2)
        Runs of neighbouring outer tiles, (first, last + 1), in the order in which threads take
        them. One thread processes a run as one work tile.
    set_ptr, sets : int64
        CSR: heads that one work tile processes one after the other, because they add to the same
        memory.
    longest : int
        The number of outer tiles in the longest run.
    descending : bool
        Whether a kernel processes its inner tiles from the last to the first.
    """

    own: np.ndarray
    other: np.ndarray
    ptr: np.ndarray
    inner: np.ndarray
    kind: np.ndarray
    keep_at: np.ndarray
    keep: np.ndarray
    edges_at: np.ndarray
    edges: np.ndarray
    turn: np.ndarray
    runs: np.ndarray
    set_ptr: np.ndarray
    sets: np.ndarray
    longest: int
    descending: bool


class Notes(NamedTuple):
    """A kernel's notes for a trace: `steps` (head loops, outer tiles) and `visits` (heads, visits).

    Both are empty if no trace is requested.
    """

    steps: np.ndarray
    visits: np.ndarray


class BackwardInputs(NamedTuple):
    """The flat arrays that the kernels of a backward pass read.

    LSE is 0 for rows that saw no key. With one query per head, the decode kernel (`kernels_decode`)
    runs the forward pass. Then `along` and `factor` are Q and the factor of scores as that kernel
    uses them; otherwise `along` is empty.
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
    """The flat arrays that the kernels of a backward pass write.

    The array `dbias` is empty without a bias. `dq_stride` is the length of one row of `dq`. In the
    fused backward pass, which sums dQ in memory, that length is head_dim plus padding to whole
    panels.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray
    dq_stride: int
