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

    The five columns of `own` (outer tiles) and `other` (inner tiles) are: start, stop, offset, stop
    on the other axis, and start of the sequence. In CSR form, `ptr` and `inner` list the inner
    tiles of each outer tile, and `kind` lists the kinds of these visits (tile pairs). `keep`
    contains the mask bits of each visit, (rows, slots, columns). The bits of a visit start at index
    `keep_at`, which is -1 if the visit has none. There is one slot if all batch entries and heads
    have the same mask; otherwise, one for each different mask. For each panel and slot of a visit
    with mask bits, `edges` contains four numbers, from index `edges_at` on. The numbers in `edges`
    are two ranges (first, last + 1) of rows: those in which the mask keeps a score, and those in
    which it hides one. `turn` fixes the order in which a row tile's visits add to dQ (see
    `work_tiles.turns`).

    `runs` are neighbouring outer tiles, (first, last + 1), in the order in which threads take them;
    the longest run has `longest` tiles. `set_ptr` and `sets` list the heads of each set, in CSR
    form. One thread processes a work tile (a run and a set), because the heads of a set add to the
    same memory. `descending` says whether a kernel processes inner tiles from the last to the
    first.
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
    """Tile sizes for a trace: arrays `steps` (loops, outer tiles) and `visits` (heads, visits)."""

    steps: np.ndarray
    visits: np.ndarray


class BackwardInputs(NamedTuple):
    """The flat arrays that backward kernels read; the LSE is 0 for rows that saw no key.

    `along` and `factor` are the arrays that `_CpuPass.along` in `engine.py` returns.
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

    `dbias` is empty without a bias. `dq_stride` is the length of one row of `dq`: head_dim, which
    the fused pass rounds up to whole panels.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray
    dq_stride: int
