"""The named tuples of sizes, tables of tiles and arrays that compiled kernels receive."""

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
        Outer (`own`) and inner (`other`) tiles: start, stop, offset, .., start of the sequence.
    ptr, inner, kind : int32
        The inner tiles of each outer tile and the kinds of these visits, in CSR form.
    keep_at, edges_at : int64 (visits,)
        The start of a visit's (tile pair's) mask bits in `keep`, or -1, and of its `edges`.
    keep : uint8
        The mask bits of each visit, (rows, slots, columns). There is one slot if the mask is the
        same for all batch entries and heads, or else one per batch entry or head.
    edges : int32
        Four numbers for each panel and slot of a visit with mask bits: the first and the last + 1
        row in which the mask keeps a score, then those in which it hides a score.
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
    """The sizes of tiles that a kernel writes down for a trace; empty without a trace.

    `steps` has shape (head loops, outer tiles), and `visits` has shape (heads, visits).
    """

    steps: np.ndarray
    visits: np.ndarray


class BackwardInputs(NamedTuple):
    """The flat arrays that the kernels of a backward pass read.

    The LSE is 0 for rows that saw no key. The method `along` in `engine.py` explains `along` and
    `factor`.
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

    `dbias` is empty if the problem has no bias. `dq_stride` is the length of one row of `dq`:
    head_dim, or, in the fused backward pass, head_dim rounded up to whole panels.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray
    dq_stride: int
