"""Decoding (kernels/portable/decode.cu): which blocks a call has, and how they are launched.

The keys of a sequence are split over blocks, as many as the live lengths of the whole batch and the
GPU's multiprocessors ask for. Needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flashsim.backends.families import decode_kernels as kernels
from flashsim.backends.families import decode_splits
from flashsim.backends.launch.kernel import (
    MAX_HEAD_DIM,
    Gpu,
    Kernel,
    Variant,
    padded_dims,
    row_elements,
)
from flashsim.errors import OptionError, UnsupportedError
from flashsim.problem.problem import Problem

ALGORITHM = "flash-decode"
#: What `run` takes for it besides `splits`: lengths, pages, memory that calls share.
OPTIONS = (
    *("splits", "pack_gqa", "cache_seqlens", "block_table", "workspace", "head_dim_v"),
    "shared_prefix",
)
#: Slots of a count record: of a visit, and of a block. See `Decode.expected`.
VISIT_SLOTS = ("K", "V", "table")
ITEM_SLOTS = ("Q", "O_part", "L_part", "O", "L", "O_part read", "L_part read")
SLOTS = 8
#: Time stamps of a visit, and of a block: SM, cycles and ns at its start, and at its end; cycles
#: when it began to merge, or 0.
VISIT_STAMPS, ITEM_STAMPS = 5, 6

_INT32 = int(np.iinfo(np.int32).max)
#: Splits that may be a cluster of blocks, which merge through their shared memory (sm_90 and
#: later); the programming guide promises a cluster of 8.
_CLUSTERS = (2, 4, 8)
#: Key tiles of a block up to which 8 splits that are a cluster are better than more through HBM.
_CLUSTERED = 4
#: Of the multiprocessors, as many as take nearly all that the memory gives; key tiles from which
#: on wide rows stay whole where they take so many.
_ENOUGH, _LONG = 0.45, 128
#: Key tiles of a range up to which it is short, and has fewer bytes under way.
_SHORT = 8
#: Bytes of K and V up to which a call begins before what runs before it has ended, if its blocks
#: are two on a multiprocessor and all there at once: more of them stream faster behind it.
_OVERLAPPED = 600e6


@dataclass(frozen=True, eq=False)
class Decode:
    """One launch of `flash_decode`.

    Attributes
    ----------
    kernel : Kernel
    items : ndarray of int32, (n, 8)
        Of each block of a key head and row tile: sequence, first key tile and the one after the
        last, slot of its partial results; the sequence's first slot, its splits, its length, 0. The
        longest come first; where the splits of a sequence are a cluster, they stay together.
    splits : tuple of int
        Of each sequence.
    rows : int
        Packed rows of a key head: queries times the query heads that share it.
    row_tiles : int
        Tiles that these rows fill.
    block_k : int
        Keys of a tile.
    n_visits : int
        Key tiles of the longest sequence.
    merge : Kernel, optional
        What merges the splits, launched behind `kernel` where there are any; otherwise it does.
    prefix, prefix_splits : int
        Keys that all sequences share, walked once, and the parts that these are divided into.
    """

    problem: Problem
    kernel: Kernel
    items: np.ndarray
    splits: tuple[int, ...]
    rows: int
    row_tiles: int
    block_k: int
    n_visits: int
    merge: Kernel | None = None
    prefix: int = 0
    prefix_splits: int = 0

    @property
    def prefix_tiles(self) -> int:
        """Row tiles of the queries of all sequences, which visit a shared prefix."""
        block_q = dict(self.kernel.constants)["FS_BLOCK_Q"]
        return -(-self.problem.batch * self.rows // block_q) if self.prefix else 0

    @property
    def grid(self) -> tuple[int, int]:
        """Thread blocks; where another kernel merges, row tiles of a split follow each other."""
        blocks = len(self.items) * self.problem.kv_heads
        if self.prefix:
            return blocks, 1
        return (blocks * self.row_tiles, 1) if self.merge else (blocks, self.row_tiles)

    @property
    def merges(self) -> np.ndarray:
        """What the merging kernel does: of each sequence that has parts its number, its first slot,
        its splits, the first of its items; parts of a shared prefix, slots from one of these to the
        next; int32, (n, 8)."""
        first = {b: i for i, b in reversed([*enumerate(self.items[:, 0].tolist())])}
        parted = [b for b, n in enumerate(self.splits) if n > 1 or self.prefix]
        shared = (self.prefix_splits, self.problem.batch, 0, 0)
        made = [(b, self.items[first[b], 4], self.splits[b], first[b], *shared) for b in parted]
        return np.array(made, np.int32).reshape(-1, 8)

    @property
    def merge_grid(self) -> tuple[int, int]:
        """Its thread blocks."""
        return -(-self.rows // kernels.MERGE_WARPS), len(self.merges) * self.problem.kv_heads

    @property
    def cluster(self) -> int:
        """Blocks that merge through each other's shared memory; 1: parts go through HBM."""
        return dict(self.kernel.constants)["FS_CLUSTER"]

    @property
    def overlaps(self) -> bool:
        """Whether a launch may begin before what runs before it has ended (sm_90)."""
        return bool(dict(self.kernel.constants)["FS_OVERLAP"])

    @property
    def slots(self) -> int:
        """Splits whose partial results are kept in HBM until they are merged."""
        if self.cluster > 1:
            return 0
        if self.prefix:
            return self.prefix_splits * self.problem.batch + sum(self.splits)
        return sum(n for n in self.splits if n > 1)

    @property
    def partial_elements(self) -> tuple[int, int]:
        """float32 elements of the partial O, and of the partial LSE."""
        rows = self.slots * self.problem.kv_heads * self.rows
        return rows * row_elements(self.problem.head_dim_v), rows

    @property
    def counters(self) -> int:
        """Arrival counters, uint32."""
        return self.problem.batch * self.problem.kv_heads * self.row_tiles

    @property
    def walks(self) -> int:
        """Row tiles of all key heads, a shared prefix's behind the others."""
        return self.counters + self.problem.kv_heads * self.prefix_tiles


def record(made: Decode, table_row: int = 0, pages: int = 0) -> np.ndarray:
    """A launch's argument but for its addresses and strides.

    Parameters
    ----------
    table_row : int
        Entries of a sequence in the block table.
    pages : int
        Pages of the pool.
    """
    made_of = {"row_tiles": made.row_tiles, "n_visits": made.n_visits, "unused": 0}
    made_of |= {"prefix": made.prefix, "prefix_tiles": made.prefix_tiles}
    given = made_of | {"table_row": table_row, "pages": pages}
    packed = np.zeros((), kernels.RECORD)
    for name in (*kernels.INTEGERS, "scale", "softcap"):
        packed[name] = given[name] if name in given else getattr(made.problem, name)
    return packed


def check_type(problem: Problem) -> None:
    """Raise `UnsupportedError` for types and masks that no kernel here decodes."""
    p = problem
    if p.dtype not in ("float16", "bfloat16"):
        raise UnsupportedError(
            f"decoding on a GPU takes float16 and bfloat16, not {p.dtype}; convert the arrays"
        )
    for name in ("bias", "mask", "block_mask", "cu_seqlens_q"):
        if getattr(p, name) is not None:
            raise UnsupportedError(
                f"decoding on a GPU takes no {name}; causal, window and softcap it does, and "
                "cache_seqlens says how long each sequence is"
            )


def check(problem: Problem) -> None:
    """Raise `UnsupportedError` for what the kernel does not decode."""
    check_type(problem)
    for name in ("head_dim", "head_dim_v"):
        if getattr(problem, name) > MAX_HEAD_DIM:
            raise UnsupportedError(
                f"decoding on a GPU takes {name} up to {MAX_HEAD_DIM}, got {getattr(problem, name)}"
            )


def check_numbers(problem: Problem, lengths: tuple[int, ...]) -> None:
    """Raise `UnsupportedError` for more keys than the kernels number."""
    if max(problem.n_kv, *lengths) > _INT32:
        raise UnsupportedError(
            f"the decode kernel numbers keys in 32 bits, up to {_INT32:,}, got {problem.n_kv:,}"
        )


@lru_cache(maxsize=256)
def plan(
    problem: Problem,
    lengths: tuple[int, ...],
    gpu: Gpu,
    splits: int | None = None,
    page: int = 0,
    counts: bool = False,
    timeline: bool = False,
) -> Decode:
    """The launch for a batch of these live lengths.

    Without `splits`, a sequence gets so many that the blocks fill the multiprocessors once: where
    they must be split for that, blocks of 8 warps, one on each multiprocessor; where the batch has
    more blocks than there are multiprocessors, blocks of 4 warps, two on each, of which no one is
    longer than the average load. Where clusters merge, short sequences alike in length get 8, or as
    many of these as they have key tiles. Contiguous sequences alike in length, whose blocks are
    `_ENOUGH` by themselves, stay whole, since a split would cost a merge for nothing: with up to
    128 columns of keys and values; with more where no cluster merges, or from `_LONG` tiles on.
    (Measured on an H200; docs/notebooks/decoding.md and benchmarks/decode.py have the sweeps.)

    Parameters
    ----------
    problem : Problem
        `n_kv` is the room of the cache.
    lengths : tuple of int
        Keys of each sequence that are read.
    splits : int, optional
        Of every sequence; a sequence of fewer key tiles has one a tile.
    page : int
        Rows of a page; 0: the cache is contiguous.
    counts, timeline : bool
        Whether the kernel reports what it moves, and when.

    Raises
    ------
    UnsupportedError, OptionError
        If the kernel cannot merge so many splits.
    """
    check(problem)
    check_numbers(problem, lengths)
    p, hopper = problem, gpu.compute_capability >= (9, 0)
    rows = p.n_q * p.group
    d, dv = padded_dims(p)
    block_q = kernels.block_q_of(rows, d, dv)
    row_tiles = -(-rows // block_q)
    alone = sum(n > 0 for n in lengths) * p.kv_heads * row_tiles
    wide = alone <= gpu.multiprocessors
    warps = kernels.on_chip(block_q, d, dv, gpu, wide=wide)[0]
    ranges = [decode_splits.key_tiles(p, length, kernels.KEYS * warps) for length in lengths]
    tiles = [hi - lo for lo, hi in ranges]
    capacity = gpu.multiprocessors * (1 if wide else 2) // (p.kv_heads * row_tiles)
    longest = decode_splits.longest_split(tiles, capacity)
    whole = wide and not page and (not hopper or d + dv <= 128 or max(tiles) >= _LONG)
    busy = sum(tiles) * p.kv_heads * row_tiles  # blocks of one key tile
    if whole and busy >= _ENOUGH * max(tiles) * gpu.multiprocessors:
        longest = max(longest, *tiles)
    clusters, alike, most = hopper and wide, len({*tiles}) == 1, max(_CLUSTERS)
    if clusters and alike and p.batch * most <= capacity and 1 < tiles[0] <= most * _CLUSTERED:
        splits = splits or max(n for n in _CLUSTERS if n <= tiles[0])
    made = decode_splits.divided(tiles, splits, longest)
    short = page or not wide or -(-max(tiles) // max(made)) <= _SHORT
    chip = kernels.on_chip(
        block_q, d, dv, gpu, wide=wide, ring=kernels.SHORT_RING if short else kernels.RING
    )
    most = chip[3]
    if max(made) > most:
        raise OptionError(
            f"splits must be at most {most} here, whose weights fit a block's shared memory, got "
            f"{max(made)}"
        )
    cluster = made[0] if clusters and made[0] in _CLUSTERS and len({*made}) == 1 else 1
    exchanged = kernels.exchanged(cluster, block_q, row_elements(p.head_dim_v))
    if chip[2] + exchanged > gpu.shared_bytes:
        cluster, exchanged = 1, 0
    read = sum(lengths) * p.kv_heads * (p.head_dim + p.head_dim_v) * p.itemsize
    at_once = not wide and sum(made) <= capacity
    variant = Variant(True, False, counts=counts, timeline=timeline)
    kernel = kernels.walking_kernel(
        *(p, variant, block_q, (*chip[:2], chip[2] + exchanged, most)),
        page=page,
        overlap=hopper and not (at_once and read > _OVERLAPPED),
        cluster=cluster,
    )
    return launch(p, kernel, lengths, ranges, made, row_tiles)


def launch(
    problem: Problem,
    kernel: Kernel,
    lengths: tuple[int, ...],
    ranges: list[tuple[int, int]],
    splits: list[int],
    row_tiles: int,
    merge: Kernel | None = None,
) -> Decode:
    """The launch of a kernel on sequences whose key tiles, ``range(*ranges[b])``, are so split."""
    values = dict(kernel.constants)
    listed = decode_splits.items(lengths, ranges, splits, together=values["FS_CLUSTER"] > 1)
    rows, n_visits = problem.n_q * problem.group, max(1, *(hi for _, hi in ranges))
    return Decode(
        *(problem, kernel, listed, tuple(splits), rows, row_tiles, values["FS_BLOCK_K"], n_visits),
        merge=merge,
    )
