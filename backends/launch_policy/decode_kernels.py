"""The decode kernels: their argument struct, their blocks, and their shared memory."""

import numpy as np

from flashsim.backends.launch.functions import functions_of
from flashsim.backends.launch.kernel import ARGS, Gpu, Kernel, Variant, built
from flashsim.errors import UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

TENSORS = ("q", "o", "k", "v")
POINTERS = (
    *("lse", "o_part", "l_part", "arrived", "items", "table", "lengths", "starts", "entries"),
    *("visit_counts", "item_counts", "visit_stamps", "item_stamps"),
)
INTEGERS = (
    *("n_q", "heads", "group", "kv_heads", "left", "right", "row_tiles", "table_row", "pages"),
    *("n_visits", "batch", "prefix", "prefix_tiles", "capacity"),
)
#: ``struct DecodeArgs``, the kernel's only argument, passed by value.
RECORD = np.dtype(
    [
        *((name, ARGS["q"]) for name in TENSORS),
        *((name, "<u8") for name in POINTERS),
        *((name, "<i4") for name in INTEGERS),
        ("scale", "<f4"),
        ("softcap", "<f4"),
    ]
)
_ARGS = {"DECODE_ARGS_BYTES": RECORD.itemsize}


def record_dtype(problem: Problem) -> np.dtype:
    """Return the type of the decode kernels' argument struct.

    The struct's first fields are those of `RECORD`. The field ``captured`` exists only if a score
    function captures arrays, and the field ``sinks`` (an address) only with sinks.
    """
    functions = functions_of(problem)
    more = [] if functions is None else [("captured", f"V{functions.plain.captured_bytes}")]
    more += [("sinks", "<u8")] if problem.sinks else []
    return np.dtype([*RECORD.descr, *more]) if more else RECORD


#: Rows per block of the merging kernel: one per warp.
MERGE_WARPS = 4
KEYS = 16  # keys of a tile per warp
#: Registers per thread for Q and O; the rest of its 255 is for scores and addresses.
_HELD = 192
#: Bytes of K and V in flight per SM: for one block with a long contiguous range of keys; for two
#: blocks, paged caches, or short ranges.
RING, SHORT_RING = 192 << 10, 128 << 10
_STAGES = 6  # at most
#: Latent attention: rows and keys per tile, stages of the ring, threads.
LATENT_ROWS, LATENT_KEYS, _LATENT_STAGES, _LATENT_THREADS = 64, 64, 2, 384
#: Columns per chunk of a tile; both consumer warpgroups have the same number of chunks of V.
_CHUNK = 64
#: Minimum key tiles per split for latent attention.
LATENT_TILES = 4


def walking_kernel(
    problem: Problem,
    variant: Variant,
    block_q: int,
    chip: tuple[int, int, int, int],
    *,
    page: int,
    overlap: bool,
    cluster: int = 1,
    cascade: bool = False,
    in_l2: bool = False,
) -> Kernel:
    """Return the decode kernel for row tiles of `block_q` rows (`chip`: a result of `on_chip`).

    With `in_l2`, the KV cache may stay in L2 for the next call.
    """
    warps, stages, shared, most = chip
    return built(
        *("portable/decode.cu", "flash_decode", 32 * warps, shared),
        (problem, Tiling(block_q, KEYS * warps), variant),
        {"WARPS": warps, "STAGES": stages, "PAGE": page, "SPLITS": most}
        | {"DECODE_ARGS_BYTES": record_dtype(problem).itemsize}
        | {"CLUSTER": cluster, "OVERLAP": overlap, "CASCADE": cascade}
        | {"IN_L2": in_l2},
    )


def latent_kernel(problem: Problem, variant: Variant, page: int) -> Kernel:
    """Return the decode kernel for latent attention (kernels/hopper/decode_latent.cu)."""
    p, chunks = problem, -(-problem.head_dim // _CHUNK)
    tiles = 2 * _CHUNK * ((1 + _LATENT_STAGES) * chunks * LATENT_KEYS + LATENT_KEYS)
    shared = -(-(tiles + 2 * 4 * LATENT_ROWS + 2 * 8 * _LATENT_STAGES + 4) // 1024) * 1024
    return built(
        *("hopper/decode_latent.cu", "flash_decode_latent", _LATENT_THREADS, shared),
        (p, Tiling(LATENT_ROWS, LATENT_KEYS), variant),
        {"D": chunks * _CHUNK, "DV": p.head_dim_v, "PAGE": page, "OVERLAP": True, "CLUSTER": 1}
        | _ARGS,
    )


def check_latent(problem: Problem, gpu: Gpu) -> None:
    """Raise `UnsupportedError` if `latent_kernel` cannot decode this latent attention."""
    if gpu.compute_capability != (9, 0):
        raise UnsupportedError(
            f"latent attention is decoded on Hopper GPUs (sm_90) only, not on {gpu.name}; pass "
            "v= as a separate array, or use backend='simulator'"
        )
    if problem.head_dim_v % (2 * _CHUNK):
        raise UnsupportedError(
            f"latent attention on a GPU needs a head_dim_v that is a multiple of {2 * _CHUNK}, got "
            f"{problem.head_dim_v}"
        )


def block_q_of(rows: int, d: int, dv: int) -> int:
    """Return the number of rows per row tile, 16 times a power of two, that registers allow."""
    blocks = 1
    while 16 * blocks < rows and 2 * blocks * (d // 4 + dv // 2) <= _HELD:
        blocks *= 2
    return 16 * blocks


def merge_kernel(
    problem: Problem, block_q: int, *, counts: bool, overlap: bool, cascade: bool = False
) -> Kernel:
    """Return the kernel that merges the splits of a decode kernel (row tiles of `block_q` rows)."""
    variant = Variant(True, False, counts=counts)
    return built(
        *("portable/decode_merge.cu", "flash_decode_merge", 32 * MERGE_WARPS, 0),
        (problem, Tiling(block_q, 1), variant),
        {"WARPS": MERGE_WARPS, "OVERLAP": overlap, "CASCADE": cascade, **_ARGS},
        outer=None,
    )


def on_chip(
    rows: int, d: int, dv: int, gpu: Gpu, *, wide: bool, ring: int = RING
) -> tuple[int, int, int, int]:
    """Return a decode block's (warps, pipeline stages, bytes of shared memory, most splits).

    The bytes of shared memory are ``sizeof(OnChip)`` of the kernel. The last number is how many
    splits one block can merge. The splits' weights must fit into the pipeline stages' memory.
    `ring` limits the bytes of K and V in flight per SM.
    """
    room, blocks = (gpu.shared_bytes, 1) if wide else ((gpu.shared_bytes - 1024) // 2, 2)
    for warps in (8, 4, 2, 1) if wide else (4, 2, 1):
        stage = warps * 2 * KEYS * (d + dv)
        most = max(2, min(_STAGES, ring // blocks // stage))
        for stages in range(most, 1, -1):
            after = max(stages * stage, 4 * warps * rows * dv)
            shared = 2 * rows * d + after + _lines(8 * warps * rows) + 128
            if shared <= room or (warps, stages) == (1, 2):
                return warps, stages, shared, stages * stage // (4 * rows)
    raise AssertionError(
        "no decode kernel fits this call, although the last choice always fits; this is a bug in "
        "flashsim"
    )


def exchanged(cluster: int, rows: int, width: int) -> int:
    """Return the bytes of shared memory per block for results from the blocks of its cluster."""
    if cluster == 1:
        return 0
    share = -(-rows * width // 4 // cluster)
    return _lines(cluster * (16 * share + 4 * rows))


def _lines(n: int) -> int:
    """Return a number of bytes, rounded up to a multiple of 128."""
    return -(-n // 128) * 128
