"""The named tuples that compiled kernels receive as arguments.

They contain a problem's sizes, the tables of tiles, the arrays, and the notes for a trace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

#: A kernel's notes store a tile's size as one number: rows times this, plus columns.
NOTE = 1 << 32

#: Indices into the counter that the threads of a kernel share: the next work tile, whether to stop,
#: and whether a result is NaN or infinite.
PLACES, STOP, ODD = 3, 1, 2


class Shape(NamedTuple):
    """A problem's sizes: heads per batch entry, sequence lengths, head dims and a tile's sides."""

    heads: int
    kv_heads: int
    n_q: int
    n_kv: int
    d: int
    dv: int
    block_q: int
    block_k: int


class Tiles(NamedTuple):
    """A schedule's tables, and the division of the schedule's tiles among threads.

    Attributes
    ----------
    own, other : int32 (T, 5)
        One row per outer (`own`) or inner (`other`) tile. A row has the columns start, stop,
        offset, .., and the start of the tile's sequence.
    ptr, inner, kind : int32
        The inner tiles of each outer tile and the kinds of these visits, in CSR form.
    keep_at : int64 (visits,)
        The start of a visit's (tile pair's) mask bits in `keep`; -1 if it has no mask bits.
    keep : uint8
        The mask bits of all visits, one visit after the other; those of one visit have shape (rows,
        slots, columns). If the mask is the same for all batch entries and heads, there is one slot;
        otherwise there is one slot per batch entry or head.
    edges_at : int64 (visits,)
        The start of a visit's `edges`.
    edges : int32
        Four numbers for each panel and slot of a visit with mask bits. The first two are the first
        and the last + 1 row in which the mask keeps a score. The other two are the first and the
        last + 1 row in which it hides a score.
    turn : int32 (visits,)
        Minus the number of visits to the same row tile that are left, including this visit. This
        number fixes the order in which the terms of dQ are added.
    runs : int64 (n, 2)
        Runs of neighbouring outer tiles, (first, last + 1), in the order in which threads take
        them. One thread processes a run as one work tile.
    set_ptr, sets : int64
        The heads of each set, in CSR form. A work tile processes the heads of a set one after the
        other, because these heads add to the same memory.
    longest : int
        The number of outer tiles in the longest run.
    descending : bool
        Whether a kernel processes inner tiles from the last to the first.
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
    """The sizes of tiles that a kernel writes down, from which the engine builds a trace.

    The array `steps` has shape (head loops, outer tiles), and `visits` has shape (heads, visits).
    Both arrays are empty if no trace is requested.
    """

    steps: np.ndarray
    visits: np.ndarray


class BackwardInputs(NamedTuple):
    """The flat arrays that the kernels of a backward pass read.

    The LSE is 0 for rows that saw no key. If the decode kernel (`kernels_decode`) ran the forward
    pass, `along` and `factor` are the Q and the factor of scores that the decode kernel used.
    Otherwise `along` is empty.
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

    The array `dbias` is empty if the problem has no bias. `dq_stride` is the length of one row of
    `dq`. In the fused backward pass, which sums dQ in memory, `dq_stride` is head_dim rounded up to
    whole panels.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray
    dq_stride: int
