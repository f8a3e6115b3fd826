"""Checks of a decode job's options and arrays."""

from operator import index
from typing import Any

import cupy
import numpy as np

from flashsim.backends.cupy_gpu import arrays
from flashsim.backends.cupy_gpu.workspace import Workspace
from flashsim.engines.protocol import Job
from flashsim.errors import DTypeError, OptionError, ShapeError, UnsupportedError, shown
from flashsim.problem import checks, live_keys


def keys_of(job: Job, table: Any, page: int) -> tuple[tuple[int, ...], int]:
    """Return each sequence's number of keys, and the number of keys that all sequences share.

    The function does not check a block table in GPU memory, since reading it would wait for the
    GPU. The kernel skips page numbers outside the page pool; the output of a sequence with such a
    page number is NaN. The function does not check whether all sequences really share these keys.
    """
    p, options = job.problem, job.options
    lengths = live_keys.live_lengths(
        options.get("cache_seqlens"), p.batch, p.n_kv, paged=table is not None
    )
    prefix = checks.count("shared_prefix", options.get("shared_prefix", 0))
    if table is None:
        return lengths, prefix
    if arrays.dtype_name(table) != "int32":
        raise DTypeError(
            f"block_table must be int32, got {table.dtype}; convert it with "
            "block_table.astype('int32')"
        )
    if isinstance(table, np.ndarray):
        live_keys.check_pages(table, lengths, page, int(job.k.shape[0]), prefix)
    return lengths, prefix


def table_of(table: Any) -> tuple[int, int, Any]:
    """Return a block table's address and row length, and the GPU array that holds the table."""
    if table is None:
        return 0, 0, None
    if isinstance(table, np.ndarray):
        table = cupy.asarray(np.ascontiguousarray(table))
    if hasattr(table, "data_ptr"):
        if not table.is_cuda:
            raise DTypeError(
                f"block_table is on {table.device}, but must be on the GPU; pass block_table.cuda()"
            )
        row, last = table.stride()
        address = table.data_ptr()
    else:
        table = cupy.asarray(table)
        row, last = (s // 4 for s in table.strides)
        address = table.data.ptr
    if last != 1 and table.shape[1] > 1:
        raise ShapeError("block_table's rows must be contiguous; pass a contiguous copy of it")
    return address, row, table


def splits_of(given: Any) -> int | None:
    """Return the option `splits` as a number, or None for "auto"."""
    if isinstance(given, str) and given == "auto":
        return None
    try:
        n = index(given)
    except TypeError:
        n = 0
    if n < 1 or isinstance(given, bool):
        raise OptionError(f"splits= must be 'auto' or an integer of at least 1, got {shown(given)}")
    return n


def check(job: Job) -> None:
    """Raise an error if a job has options that decoding does not support."""
    if job.tiling is not None or job.key_order != "ascending":
        raise UnsupportedError(
            "on a GPU, algorithm='flash-decode' chooses the tile size and reads keys in "
            "ascending order; leave out tiling= and key_order=, and set the number of thread "
            "blocks per sequence by splits="
        )
    if job.options.get("kernel", "auto") not in ("auto", "portable"):
        raise UnsupportedError(
            "on a GPU, algorithm='flash-decode' chooses its kernel itself; leave out kernel=, "
            f"got kernel={job.options['kernel']!r}"
        )
    packs = checks.flag("pack_gqa", job.options.get("pack_gqa", True))
    if not packs and job.problem.group > 1:
        raise UnsupportedError(
            "on a GPU, the query heads that share a KV head always share a tile, so K and V are "
            "loaded once for all of them; leave out pack_gqa=, or use backend='simulator' for "
            "pack_gqa=False"
        )
    if job.trace and job.problem.has_functions:
        raise UnsupportedError(
            "on a GPU, decoding with mask_mod=, score_mod= or sinks= cannot be traced, because the "
            "kernel does not count the bytes that these read; leave out trace="
        )
    workspace = job.options.get("workspace")
    if workspace is not None and not isinstance(workspace, Workspace):
        raise DTypeError(
            "workspace= must be a flashsim.backends.cupy_gpu.decode.Workspace, got "
            f"{shown(workspace)}"
        )
