"""Decoding of latent attention on Hopper (kernels/hopper/decode_latent.cu): V is columns of K, one
key head serves all, and the parts of its splits are merged by a kernel of their own.
"""

from __future__ import annotations

from functools import lru_cache

from flashsim.backends.launch.kernel import (
    Gpu,
    Kernel,
    Variant,
    constants,
    macros,
)
from flashsim.backends.launch_policy import decode, decode_kernels, decode_splits
from flashsim.errors import UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

ROWS, BLOCK_K, STAGES, THREADS = 64, 64, 2, 384
#: Columns of a chunk of a tile; values fill chunks of both consumer warpgroups alike.
_CHUNK = 64
#: Key tiles that a split has at least.
_LEAST_TILES = 4


def check(problem: Problem, gpu: Gpu) -> None:
    """Raise `UnsupportedError` for what the kernel does not decode."""
    p = problem
    decode.check_type(p)
    if gpu.compute_capability != (9, 0):
        raise UnsupportedError(
            f"latent attention is decoded on Hopper (sm_90), not on {gpu.name}; give v as well, "
            "or use backend='numpy'"
        )
    if p.head_dim_v % (2 * _CHUNK):
        raise UnsupportedError(
            f"latent attention on a GPU takes head_dim_v in multiples of {2 * _CHUNK}, got "
            f"{p.head_dim_v}"
        )


@lru_cache(maxsize=256)
def plan(
    problem: Problem,
    lengths: tuple[int, ...],
    gpu: Gpu,
    splits: int | None = None,
    page: int = 0,
    counts: bool = False,
) -> decode.Decode:
    """The launch for a batch of these live lengths; parameters and errors as `decode.plan`.

    A block holds all of a multiprocessor's shared memory. Without `splits`, a sequence gets so many
    that the blocks fill the multiprocessors once.
    """
    check(problem, gpu)
    decode.check_numbers(problem, lengths)
    p = problem
    row_tiles = -(-p.n_q * p.group // ROWS)
    ranges = [decode_splits.key_tiles(p, length, BLOCK_K) for length in lengths]
    tiles = [hi - lo for lo, hi in ranges]
    capacity = gpu.multiprocessors // (p.kv_heads * row_tiles)
    longest = decode_splits.longest_split(tiles, capacity, _LEAST_TILES)
    chunks = -(-p.head_dim // _CHUNK)
    bytes_of = 2 * _CHUNK * ((1 + STAGES) * chunks * BLOCK_K + BLOCK_K)
    shared = -(-(bytes_of + 2 * 4 * ROWS + 2 * 8 * STAGES + 4) // 1024) * 1024
    values = constants(p, Tiling(ROWS, BLOCK_K), Variant(True, False, counts=counts))
    values |= {
        **{"D": chunks * _CHUNK, "DV": p.head_dim_v, "SMEM_BYTES": shared, "PAGE": page},
        **{"DECODE_ARGS_BYTES": decode_kernels.RECORD.itemsize, "OVERLAP": True, "CLUSTER": 1},
    }
    name = "flash_decode_latent"
    kernel = Kernel("hopper/decode_latent.cu", name, THREADS, shared, macros(values))
    merge = decode_kernels.merge_kernel(p, ROWS, counts=counts, overlap=True)
    made = decode_splits.divided(tiles, splits, longest)
    return decode.launch(p, kernel, lengths, ranges, made, row_tiles, merge)
