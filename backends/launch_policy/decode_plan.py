"""Plan the thread blocks and kernels of decode launches (kernels/portable/decode.cu).

Several thread blocks divide the keys of a sequence (splits). The number of splits depends on all
sequence lengths and the GPU's number of SMs (see `flashsim.schedule.split`). Latent attention has
its own kernel (kernels/hopper/decode_latent.cu). A prefix that all sequences share is read only
once (cascade attention): row tiles for the prefix hold the queries of all sequences. Nothing in
this module needs a GPU.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from flashsim.backends.launch.device_tables import refuse_functions
from flashsim.backends.launch.kernel import (
    Gpu,
    Kernel,
    Variant,
    check_head_dims,
    padded_dims,
    row_elements,
)
from flashsim.backends.launch_policy import decode_kernels as kernels
from flashsim.errors import OptionError, UnsupportedError
from flashsim.problem.live_keys import check_prefix
from flashsim.problem.problem import Problem
from flashsim.schedule.split import Split, cut, longest_part

ALGORITHM = "flash-decode"
#: Options of `run` for this algorithm: splits, lengths, pages, memory that calls share.
OPTIONS = (
    *("splits", "pack_gqa", "cache_seqlens", "block_table", "workspace", "head_dim_v"),
    "shared_prefix",
)
#: Slots of a count record, per visit and per block; see `Decode.expected`.
VISIT_SLOTS = ("K", "V", "table")
ITEM_SLOTS = ("Q", "O_part", "L_part", "O", "L", "O_part read", "L_part read")
SLOTS = 8
#: Time stamps per visit and per block. A block's are its SM, cycles and ns at its start, the same
#: at its end, and the cycles when it began to merge, or 0.
VISIT_STAMPS, ITEM_STAMPS = 5, 6

_INT32 = int(np.iinfo(np.int32).max)
#: Numbers of splits that can form a cluster, whose blocks merge through shared memory (sm_90 and
#: later). The CUDA programming guide guarantees a cluster size of 8.
CLUSTERS = (2, 4, 8)
#: Key tiles per block up to which 8 splits in a cluster are faster than more splits that merge
#: through HBM.
_CLUSTERED = 4
#: The fraction of the SMs that nearly saturates the memory bandwidth; the number of key tiles from
#: which on a sequence with more than 128 columns of K and V together stays whole if its blocks
#: saturate it.
_ENOUGH, _LONG = 0.45, 128
#: The memory bandwidth up to which a GPU counts as having slower memory, in bytes per second; its
#: fraction of the SMs.
_FAST_MEMORY, _MOST = 4e12, 0.9
#: Key tiles up to which a range is short, and its block keeps fewer bytes in flight.
_SHORT = 8
#: Bytes of K and V up to which a launch may begin before the previous one ends, if two blocks share
#: an SM and all blocks run at once. Larger launches are faster if they wait.
_OVERLAPPED = 600e6
#: The largest fraction of L2 that a KV cache takes if it may stay there between calls.
_IN_L2 = 0.7


@dataclass(frozen=True, eq=False)
class Decode:
    """The plan of one launch of the decode kernel.

    `items` is an int32 array (n, 8) with one row ("entry") for each thread block of one KV head and
    row tile. Fields 0 to 3 of an entry are the sequence, the first key tile, the end of the key
    tiles, and the slot for partial results. Fields 4 to 6 are the sequence's first slot, number of
    splits and length. Field 7 is the row tile if there is a prefix, and otherwise 0. Entries with
    the most key tiles come first. If a sequence's splits form a cluster, their entries are
    adjacent.

    `splits` holds the number of splits per sequence. `rows` is the number of packed rows per KV
    head: queries times query heads per KV head, in `row_tiles` row tiles. `n_visits` is the number
    of key tiles of the longest sequence. The kernel `merge` runs after `kernel` and merges splits.
    If `merge` is None, `kernel` itself merges the splits. `prefix` is the number of keys that all
    sequences share; they are read only once, in `prefix_splits` parts.
    """

    problem: Problem
    kernel: Kernel
    items: np.ndarray
    splits: tuple[int, ...]
    rows: int
    row_tiles: int
    block_k: int
    n_visits: int
    split: Split
    merge: Kernel | None = None
    prefix: int = 0
    prefix_splits: int = 0

    @property
    def prefix_tiles(self) -> int:
        """The number of row tiles for a shared prefix, which contain all sequences' queries."""
        block_q = dict(self.kernel.constants)["FS_BLOCK_Q"]
        return -(-self.problem.batch * self.rows // block_q) if self.prefix else 0

    @property
    def grid(self) -> tuple[int, int]:
        """The decode kernel's grid of thread blocks.

        If a second kernel merges the splits, blocks for one split's row tiles are neighbours along
        x.
        """
        blocks = len(self.items) * self.problem.kv_heads
        if self.prefix:
            return blocks, 1
        return (blocks * self.row_tiles, 1) if self.merge else (blocks, self.row_tiles)

    @property
    def merges(self) -> np.ndarray:
        """The merging kernel's table, as int32 (n, 8), with one row per split sequence.

        Fields 0 to 3 are the sequence's number, first slot of partial results, number of splits,
        and first index in `items`. Field 4 is the number of parts of a shared prefix, field 5 the
        number of slots per part, and fields 6 and 7 are 0.
        """
        first = {b: i for i, b in reversed([*enumerate(self.items[:, 0].tolist())])}
        parted = [b for b, n in enumerate(self.splits) if n > 1 or self.prefix]
        shared = (self.prefix_splits, self.problem.batch, 0, 0)
        made = [(b, self.items[first[b], 4], self.splits[b], first[b], *shared) for b in parted]
        return np.array(made, np.int32).reshape(-1, 8)

    @property
    def merge_grid(self) -> tuple[int, int]:
        """The merging kernel's grid of thread blocks."""
        return -(-self.rows // kernels.MERGE_WARPS), len(self.merges) * self.problem.kv_heads

    @cached_property
    def cluster(self) -> int:
        """The number of thread blocks per cluster, or 1 if splits merge through HBM."""
        return dict(self.kernel.constants)["FS_CLUSTER"]

    @property
    def overlaps(self) -> bool:
        """Whether a launch may begin before the kernel ahead of it in the stream ends (sm_90)."""
        return bool(dict(self.kernel.constants)["FS_OVERLAP"])

    @cached_property
    def slots(self) -> int:
        """The number of partial results in HBM that are to be merged."""
        if self.cluster > 1:
            return 0
        if self.prefix:
            return self.prefix_splits * self.problem.batch + sum(self.splits)
        return sum(n for n in self.splits if n > 1)

    @cached_property
    def partial_elements(self) -> tuple[int, int]:
        """The number of float32 elements in all partial outputs O, and in all partial LSEs."""
        rows = self.slots * self.problem.kv_heads * self.rows
        return rows * row_elements(self.problem.head_dim_v), rows

    @cached_property
    def counters(self) -> int:
        """The number of arrival counters (uint32): one per sequence, KV head and row tile."""
        return self.problem.batch * self.problem.kv_heads * self.row_tiles

    @property
    def walks(self) -> int:
        """The number of row tiles of all sequences and of a shared prefix, summed over KV heads."""
        return self.counters + self.problem.kv_heads * self.prefix_tiles


def record(made: Decode, table_row: int = 0, pages: int = 0) -> np.ndarray:
    """Return a launch's argument struct, with all fields set except addresses and strides.

    `table_row` is the number of block-table entries per sequence, and `pages` is the number of
    pages in the pool.
    """
    made_of = {"row_tiles": made.row_tiles, "n_visits": made.n_visits}
    made_of |= {"capacity": made.problem.n_kv}
    made_of |= {"prefix": made.prefix, "prefix_tiles": made.prefix_tiles}
    given = made_of | {"table_row": table_row, "pages": pages}
    packed = np.zeros((), kernels.record_dtype(made.problem))
    for name in (*kernels.INTEGERS, "scale", "softcap"):
        packed[name] = given[name] if name in given else getattr(made.problem, name)
    return packed


def live(problem: Problem, lengths: tuple[int, ...], page: int, prefix: int = 0) -> Problem:
    """Return the problem with packed sequences, which contain only live keys.

    All sequences share `prefix` keys. The function raises `OptionError` or `UnsupportedError` if a
    sequence is shorter than the prefix, if a query does not see the whole prefix, or if the prefix
    ends within a page.
    """
    p = problem
    check_prefix(prefix, lengths)
    own = (length - prefix for length in lengths)
    return replace(
        p, batch=1, n_q=p.n_q * p.batch, n_kv=sum(lengths) - prefix * (p.batch - 1),
        cu_seqlens_q=tuple(range(0, p.n_q * p.batch + 1, p.n_q)), page_size=page or None,
        cu_seqlens_k=tuple(accumulate(own, initial=prefix)), shared_prefix=prefix,
    )  # fmt: skip


def check(problem: Problem, gpu: Gpu) -> None:
    """Raise `UnsupportedError` if no kernel can decode this problem on this GPU."""
    p = problem
    if p.dtype not in ("float16", "bfloat16"):
        raise UnsupportedError(
            f"decoding on a GPU supports float16 and bfloat16, not {p.dtype}; convert q, k and v"
        )
    for name in ("bias", "mask", "block_mask", "cu_seqlens_q"):
        if getattr(p, name) is not None:
            raise UnsupportedError(
                f"decoding on a GPU does not support {name}; use causal=, window= or softcap= "
                "instead, or cache_seqlens= for sequences of different lengths"
            )
    if p.latent:
        elsewhere = "use algorithm='flash2' with backend='simulator' and a separate v="
        refuse_functions(p, "latent attention's", elsewhere)
        kernels.check_latent(p, gpu)
    else:
        check_head_dims(p, "decoding on a GPU")


@lru_cache(maxsize=256)
def plan(
    problem: Problem,
    lengths: tuple[int, ...],
    gpu: Gpu,
    splits: int | None = None,
    page: int = 0,
    counts: bool = False,
    timeline: bool = False,
    prefix: int = 0,
) -> Decode:
    """Return the plan of a decode launch for sequences that have `lengths` keys.

    If `splits` is None, the sequences get as many splits as needed to fill all SMs once. If
    `splits` is a number, each sequence gets `splits` splits, but at most one per key tile. With a
    `prefix`, the prefix and each sequence's other keys are divided in proportion to their key
    tiles. No sequence or prefix has more than `splits` parts.

    `problem.n_kv` is the capacity of the cache per sequence. `page` is the number of rows per page,
    or 0 for a contiguous cache. With `counts`, the kernel reports the bytes that it moves; with
    `timeline`, it reports time stamps. `prefix` is the number of keys that all sequences share. The
    function raises `UnsupportedError` if no kernel decodes this problem, and `OptionError` if the
    kernel cannot merge so many splits.
    """
    check(problem, gpu)
    if max(problem.n_kv, *lengths) > _INT32:
        raise UnsupportedError(
            "the decode kernel numbers keys with 32-bit integers, so n_kv can be at most "
            f"{_INT32:,}, got {problem.n_kv:,}; use a smaller cache"
        )
    variant = Variant(True, False, counts=counts, timeline=timeline)
    asked = _DecodeRequest(problem, lengths, gpu, splits, page, variant, prefix)
    return (_behind_prefix if prefix else _latent if problem.latent else _plain)(asked)


@lru_cache(maxsize=256)
def dynamic(problem: Problem, gpu: Gpu, splits: int | None = None, page: int = 0) -> Decode:
    """Return the plan of a decode launch whose kernel reads the sequence lengths at run time.

    The number of splits is chosen for sequences that fill the cache. The splits of a shorter
    sequence have fewer key tiles, or none. In the entries of `Decode.items`, field 1 is the split's
    number, and field 2 is 0. The kernel computes each split's key tiles. One launch thus works for
    all lengths up to `problem.n_kv`. The function raises the errors of `plan`; for latent attention
    it raises `UnsupportedError`, since that kernel cannot read lengths.
    """
    if problem.latent:
        raise UnsupportedError(
            "latent attention on a GPU needs cache_seqlens in the CPU's memory; pass a list of "
            "integers"
        )
    full = plan(problem, (problem.n_kv,) * problem.batch, gpu, splits, page)
    n = full.splits[0]
    listed = [
        (b, i, 0, b * n + i if n > 1 else 0, b * n, n, 0, 0)
        for b in range(problem.batch)
        for i in range(n)
    ]
    constants = (*full.kernel.constants, ("FS_DYNAMIC", 1))
    kernel = replace(full.kernel, constants=constants)
    return replace(full, kernel=kernel, items=np.array(listed, np.int32))


class _DecodeRequest(NamedTuple):
    """The arguments of the function `plan`, as a named tuple."""

    problem: Problem
    lengths: tuple[int, ...]
    gpu: Gpu
    splits: int | None
    page: int
    variant: Variant
    prefix: int


def _plain(asked: _DecodeRequest) -> Decode:
    """Return the plan of a decode launch for ordinary attention without a shared prefix.

    If unsplit sequences need no more blocks than the GPU has SMs, each SM runs one block of 8
    warps. If more blocks are needed, each SM runs two blocks of 4 warps.

    On GPUs with clusters, short sequences of equal length have 8 splits, which a cluster merges.
    Below 8 key tiles, a sequence has 4 or 2 splits. Contiguous sequences of about equal length are
    not split if their blocks fill a large enough fraction of the SMs. The required fraction is
    `_ENOUGH`, or `_MOST` on GPUs with slower HBM. On Hopper, sequences with more than 128 columns
    of K and V together, and fewer than `_LONG` key tiles, are split all the same. Measurements on
    an H200 and an H100 are in docs/notebooks/decoding.md.

    A sequence's splits form a cluster only if the GPU can run all clusters at the same time. If
    there are too many clusters, each sequence gets fewer splits, which form a smaller cluster. If
    key and value together have at most 128 columns, the number of splits stays, and splits merge
    through HBM.
    """
    p, lengths, gpu, splits, page, variant, _ = asked
    hopper, rows, (d, dv) = gpu.compute_capability >= (9, 0), p.n_q * p.group, padded_dims(p)
    block_q = kernels.block_q_of(rows, d, dv)
    each = p.kv_heads * -(-rows // block_q)  # blocks per part of a sequence
    wide = sum(n > 0 for n in lengths) * each <= gpu.multiprocessors
    warps = kernels.on_chip(block_q, d, dv, gpu, wide=wide)[0]
    ranges, tiles = _ranges(p, lengths, kernels.KEYS * warps)
    capacity = gpu.multiprocessors * (1 if wide else 2) // each
    longest = longest_part(tiles, capacity)
    whole = wide and not page and (not hopper or d + dv <= 128 or max(tiles) >= _LONG)
    enough = _ENOUGH if gpu.hbm_bandwidth > _FAST_MEMORY else _MOST
    if whole and sum(tiles) * each >= enough * max(tiles) * gpu.multiprocessors:
        longest = max(longest, *tiles)
    chosen = splits is None
    clusters, alike, most = hopper and wide, len({*tiles}) == 1, max(CLUSTERS)
    if clusters and alike and p.batch * most <= capacity and 1 < tiles[0] <= most * _CLUSTERED:
        splits = splits or max(n for n in CLUSTERS if n <= tiles[0])
    split = _packed(splits, longest)
    made = split.parts(tiles).tolist()
    together = sum(n > 0 for n in tiles) * each  # clusters, with one per sequence
    if clusters and alike and made[0] in CLUSTERS and together > gpu.at_once(made[0]):
        fewer = [n for n in CLUSTERS if n < made[0] and together <= gpu.at_once(n)]
        if chosen and fewer and d + dv > 128:
            split = _packed(max(fewer), longest)
            made = split.parts(tiles).tolist()
        else:
            clusters = False
    short = page or not wide or -(-max(tiles) // max(made)) <= _SHORT
    ring = kernels.SHORT_RING if short else kernels.RING
    chip = kernels.on_chip(block_q, d, dv, gpu, wide=wide, ring=ring)
    if max(made) > chip[3]:
        raise OptionError(
            f"splits= must be at most {chip[3]} here, because the weights of all splits must fit "
            f"in a thread block's shared memory, got {max(made)}"
        )
    cluster = made[0] if clusters and made[0] in CLUSTERS and len({*made}) == 1 else 1
    exchanged = kernels.exchanged(cluster, block_q, row_elements(p.head_dim_v))
    if chip[2] + exchanged > gpu.shared_bytes:
        cluster, exchanged = 1, 0
    read = sum(lengths) * p.kv_heads * (p.head_dim + p.head_dim_v) * p.itemsize
    at_once = not wide and sum(made) <= capacity
    kernel = kernels.walking_kernel(
        *(p, variant, block_q, (*chip[:2], chip[2] + exchanged, chip[3])),
        page=page,
        overlap=hopper and not (at_once and read > _OVERLAPPED),
        cluster=cluster,
        in_l2=read <= _IN_L2 * gpu.l2_bytes,
    )
    return _launch(p, kernel, lengths, split, ranges, made)


def _latent(asked: _DecodeRequest) -> Decode:
    """Return the plan of a decode launch for latent attention.

    Latent attention has a single KV head, and V is a part of K's columns. A thread block uses an
    SM's entire shared memory, and a second kernel merges the splits.
    """
    p, lengths, gpu, splits, page, variant, _ = asked
    kernel = kernels.latent_kernel(p, variant, page)
    merge = kernels.merge_kernel(p, kernels.LATENT_ROWS, counts=variant.counts, overlap=True)
    ranges, tiles = _ranges(p, lengths, kernels.LATENT_KEYS)
    capacity = gpu.multiprocessors // (p.kv_heads * -(-p.n_q * p.group // kernels.LATENT_ROWS))
    split = _packed(splits, longest_part(tiles, capacity, kernels.LATENT_TILES))
    return _launch(p, kernel, lengths, split, ranges, split.parts(tiles).tolist(), merge)


def _behind_prefix(asked: _DecodeRequest) -> Decode:
    """Return the plan of a decode launch for sequences with a shared prefix.

    A second kernel merges the prefix's partial results with those of each sequence's own keys. If
    `splits` is None, no part has more key tiles than the average per SM.
    """
    p, lengths, gpu, splits, page, variant, prefix = asked
    if p.latent:
        raise UnsupportedError(
            "on a GPU, latent attention does not support shared_prefix=; leave it out"
        )
    live(p, lengths, page, prefix)
    rows, (d, dv) = p.n_q * p.group, padded_dims(p)
    block_q = kernels.block_q_of(rows * p.batch, d, dv)
    ring = kernels.SHORT_RING if page else kernels.RING
    chip = kernels.on_chip(block_q, d, dv, gpu, wide=True, ring=ring)
    block_k, overlap = kernels.KEYS * chip[0], gpu.compute_capability >= (9, 0)
    own = tuple(length - prefix for length in lengths)
    shared, (ranges, tiles) = -(-prefix // block_k), _ranges(p, own, block_k)
    if splits is None:
        visits = shared * -(-rows * p.batch // block_q) + sum(tiles) * -(-rows // block_q)
        longest = longest_part([p.kv_heads * visits], gpu.multiprocessors)
        splits = -(-max(shared, *tiles) // longest)
    split = Split(splits, pack_gqa=True)
    parts = split.parts([*tiles, shared], alike=True).tolist()
    kernel = kernels.walking_kernel(
        p, variant, block_q, chip, page=page, overlap=overlap, cascade=True
    )
    merge = kernels.merge_kernel(p, block_q, counts=variant.counts, overlap=overlap, cascade=True)
    return _launch(p, kernel, own, split, ranges, parts, merge, prefix)


@lru_cache(maxsize=256)
def _packed(splits: int | None, longest: int) -> Split:
    """Return a rule for the number of splits: `splits` or, if None, one per `longest` key tiles."""
    return Split(pack_gqa=True, part_tiles=longest) if splits is None else Split(splits, True)


def _ranges(
    p: Problem, lengths: tuple[int, ...], block_k: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return each sequence's range of visible key tiles, and the lengths of these ranges."""
    ends = [-(-length // block_k) for length in lengths]
    first = [max(0, length - p.n_q - p.left) // block_k for length in lengths]
    ranges = [(min(lo, hi), hi) for lo, hi in zip(first, ends, strict=True)]
    return ranges, [hi - lo for lo, hi in ranges]


def _launch(
    p: Problem,
    kernel: Kernel,
    lengths: tuple[int, ...],
    split: Split,
    ranges: list[tuple[int, int]],
    parts: list[int],
    merge: Kernel | None = None,
    prefix: int = 0,
) -> Decode:
    """Return the plan of a decode launch; sequence b has the key tiles ``range(*ranges[b])``.

    `parts` is the number of parts of each sequence, which `split` computes. With a prefix,
    `lengths` exclude the prefix's keys, and the last number in `parts` belongs to the prefix.
    """
    values, rows = dict(kernel.constants), p.n_q * p.group
    block_q, block_k = values["FS_BLOCK_Q"], values["FS_BLOCK_K"]
    listed, shared, row_tiles = [], -(-prefix // block_k), -(-rows // block_q)
    *made, shared_parts = parts if prefix else (*parts, 0)
    for tile in range(-(-rows * p.batch // block_q) if prefix else 0):
        for i in range(shared_parts):  # a part has a slot per sequence
            keys = cut(0, shared, i, shared_parts)
            listed.append((-1, *keys, i * p.batch, 0, shared_parts, prefix, tile))
    slot = shared_parts * p.batch
    for b, (length, (lo, hi), n) in enumerate(zip(lengths, ranges, made, strict=True)):
        kept = n > 1 or prefix > 0
        for tile in range(row_tiles if prefix else 1):
            for i in range(n):
                keys = cut(lo, hi, i, n)
                listed.append((b, *keys, slot + i if kept else 0, slot, n, length, tile))
        slot += n if kept else 0
    if values["FS_CLUSTER"] > 1:  # the splits of a sequence stay together
        listed.sort(key=lambda item: ranges[item[0]][0] - ranges[item[0]][1])
    else:
        listed.sort(key=lambda item: item[1] - item[2])
    return Decode(
        *(p, kernel, np.array(listed, np.int32), tuple(made), rows, row_tiles, block_k),
        *(max(1, shared, *(hi for _, hi in ranges)), split, merge, prefix, shared_parts),
    )
