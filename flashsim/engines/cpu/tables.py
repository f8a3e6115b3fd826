"""The named tuples of sizes, tile tables and arrays that compiled kernels receive."""

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
    """A schedule's tables, and the division of its tiles among threads.

    `own` (outer tiles) and `other` (inner tiles) have five columns: start, stop, offset, stop on
    the other axis, and start of the sequence. `ptr` and `inner` list the inner tiles of each outer
    tile in CSR form, and `kind` has the kind of each of these visits (tile pairs). `keep` holds the
    mask bits of each visit, (rows, slots, columns). A visit's bits start at index `keep_at`, or the
    visit has none if `keep_at` is -1. If all batch entries and heads have the same mask, there is
    one slot, and otherwise one per different mask. `edges` holds four numbers for each panel and
    slot of a visit with mask bits, from index `edges_at` on. The numbers in `edges` are two ranges
    of rows (first, last + 1): where the mask keeps a score, and where it hides one. `turn` fixes
    the order in which a row tile's visits add to dQ (see `work_tiles.turns`).

    `runs` are neighbouring outer tiles, (first, last + 1), in the order in which threads take them;
    `longest` is the largest number of tiles in a run. `set_ptr` and `sets` list the heads of each
    set in CSR form. One thread processes a work tile (a run and a set), because a set's heads add
    to the same memory. `descending` says whether inner tiles are processed from the last to the
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
    """Tile sizes for a trace: `steps` (loops, outer tiles) and `visits` (heads, visits)."""

    steps: np.ndarray
    visits: np.ndarray


class BackwardInputs(NamedTuple):
    """The flat arrays that backward kernels read; the LSE is 0 for rows without a visible key.

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
    """The flat arrays that a backward pass's kernels write.

    `dbias` is empty without a bias. `dq_stride` is the length of a row of `dq`: head_dim, which a
    fused pass rounds up to full panels.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray
    dq_stride: int
