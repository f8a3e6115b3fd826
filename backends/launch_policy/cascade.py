"""Decoding behind a shared prefix (cascade attention) by kernels/portable/decode.cu: the keys that
all sequences begin with are walked once, with the queries of all of them in their row tiles; a
second kernel merges these parts with those of each sequence's own keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from flashsim.backends.launch.kernel import Gpu, Variant, padded_dims
from flashsim.backends.launch_policy import decode, decode_kernels, decode_splits
from flashsim.errors import OptionError, UnsupportedError
from flashsim.problem.problem import Problem


def live(problem: Problem, lengths: tuple[int, ...], prefix: int, page: int) -> Problem:
    """What a batch whose sequences share their first keys poses: its live keys, packed.

    Raises
    ------
    OptionError, UnsupportedError
        If a sequence is shorter than the prefix, or a query does not see all of it, or it is not
        whole pages.
    """
    p = problem
    for b, length in enumerate(lengths):
        if length < prefix:
            raise OptionError(
                f"shared_prefix is {prefix:,} keys, and entry {b} of the batch has {length:,}"
            )
    own = (length - prefix for length in lengths)
    return replace(
        p, batch=1, n_q=p.n_q * p.batch, n_kv=sum(lengths) - prefix * (p.batch - 1),
        cu_seqlens_q=tuple(range(0, p.n_q * p.batch + 1, p.n_q)), page_size=page or None,
        cu_seqlens_k=tuple(accumulate(own, initial=prefix)), shared_prefix=prefix,
    )  # fmt: skip


@lru_cache(maxsize=256)
def plan(
    problem: Problem,
    lengths: tuple[int, ...],
    prefix: int,
    gpu: Gpu,
    splits: int | None = None,
    page: int = 0,
    counts: bool = False,
) -> decode.Decode:
    """The launch for a batch of these live lengths, of which the first `prefix` keys are shared.

    The row tile that visits the most key tiles has `splits` parts, another as many in proportion,
    so that a part is as long anywhere (`Schedule.part_counts`); without `splits`, as many as make a
    part no longer than what all of them are to a multiprocessor.

    Raises
    ------
    UnsupportedError, OptionError
        As `live` and `decode.check`.
    """
    decode.check(problem)
    decode.check_numbers(problem, lengths)
    if problem.latent:
        raise UnsupportedError("on a GPU latent attention has no shared_prefix; leave it out")
    live(problem, lengths, prefix, page)
    p, rows = problem, problem.n_q * problem.group
    d, dv = padded_dims(p)
    block_q = decode_kernels.block_q_of(rows * p.batch, d, dv)
    row_tiles, prefix_tiles = -(-rows // block_q), -(-rows * p.batch // block_q)
    ring = decode_kernels.SHORT_RING if page else decode_kernels.RING
    chip = decode_kernels.on_chip(block_q, d, dv, gpu, wide=True, ring=ring)
    block_k = decode_kernels.KEYS * chip[0]
    own = [length - prefix for length in lengths]
    tiles = [-(-n // block_k) for n in own]
    shared_tiles = -(-prefix // block_k)
    longest = max(shared_tiles, *tiles)
    if splits is None:
        visits = p.kv_heads * (shared_tiles * prefix_tiles + sum(tiles) * row_tiles)
        splits = -(-longest // max(decode_splits.LEAST_TILES, -(-visits // gpu.multiprocessors)))
    splits = min(splits, longest)
    made = [max(1, -(-n * splits // longest)) for n in tiles]
    prefix_splits = -(-shared_tiles * splits // longest)
    overlap = gpu.compute_capability >= (9, 0)
    variant = Variant(True, False, counts=counts)
    kernel = decode_kernels.walking_kernel(
        p, variant, block_q, chip, page=page, overlap=overlap, cascade=True
    )
    slot, listed = prefix_splits * p.batch, []
    for tile in range(prefix_tiles):
        # A part takes a slot of each sequence.
        for i, cut in enumerate(decode_splits.cuts(0, shared_tiles, prefix_splits)):
            listed.append((-1, *cut, i * p.batch, 0, prefix_splits, prefix, tile))
    for b, (length, n) in enumerate(zip(own, made, strict=True)):
        for tile in range(row_tiles):
            for i, cut in enumerate(decode_splits.cuts(0, tiles[b], n)):
                listed.append((b, *cut, slot + i, slot, n, length, tile))
        slot += n
    listed.sort(key=lambda item: item[1] - item[2])
    return decode.Decode(
        *(p, kernel, np.array(listed, np.int32), tuple(made), rows, row_tiles, block_k, longest),
        merge=decode_kernels.merge_kernel(p, block_q, counts=counts, overlap=overlap, cascade=True),
        prefix=prefix,
        prefix_splits=prefix_splits,
    )
