"""Build the `Problem` of a KV cache whose entries differ in length or share a prefix.

Each batch entry becomes a packed sequence of its live keys (the keys in use). The arrays are not
changed: the engine gets `cache_seqlens` and `block_table` among its options.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from flashsim.errors import DTypeError, OptionError, ShapeError, UnsupportedError
from flashsim.problem import checks, live_keys
from flashsim.problem.problem import Problem

Shapes = tuple[tuple[int, ...], ...]

#: Options that choose the live keys of a KV cache.
CACHES = {"cache_seqlens", "block_table", "shared_prefix"}


def paged_shapes(shapes: Shapes, block_table: Any) -> Shapes:
    """Return the shapes of q, k and v as if each batch entry's pages were joined to one array.

    Only the block table's shape and type are read, so a table on a GPU causes no wait.
    """
    q, k, v = shapes
    table = check_table_kind(block_table)
    if len(q) != 4 or len(table) != 2 or table[0] != q[0]:
        raise ShapeError(
            "block_table must have shape (batch, max_pages) for q of shape (batch, heads, n_q, "
            f"d), got shape {table} for q of shape {q}"
        )
    if len(k) != 4 or k[:3] != v[:3] or 0 in k[1:] or (not k[0] and 0 not in table):
        raise ShapeError(
            "with block_table=, k and v must be (pages, kv_heads, page_size, width), both with "
            f"the same number of pages, got k {k}, v {v}, block_table {table}"
        )
    k, v = ((q[0], x[1], table[1] * x[2], x[3]) for x in (k, v))
    return q, k, v


def check_table_kind(block_table: Any) -> tuple[int, ...]:
    """Return the shape of a block table; raise `DTypeError` unless it is an array of integers."""
    if not hasattr(block_table, "shape") or not hasattr(block_table, "dtype"):
        raise DTypeError(f"block_table must be an array, got {type(block_table).__name__}")
    kind = str(block_table.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        raise DTypeError(
            f"block_table must be an array of integers of shape (batch, max_pages), got {kind}"
        )
    return tuple(block_table.shape)


def live_problem(
    whole: Problem, options: Mapping[str, Any], pool: tuple[int, ...] = ()
) -> tuple[Problem, dict[str, Any]]:
    """Return the `Problem` that attends to a cache's live keys only, and the checked `options`.

    `whole` is the problem in which every key of the cache is live. `options` may contain
    `cache_seqlens`, `block_table` and `shared_prefix`, as in `DecodeOptions`. `pool` is the shape
    of k if there is a `block_table`.
    """
    lengths = live_lengths(whole, options)
    if not any(lengths):
        raise OptionError(
            "cache_seqlens are all 0, so there is no key to attend to; at least one length must "
            "be 1 or more"
        )
    live = {**options, "cache_seqlens": lengths}
    page_size = whole.page_size
    prefix = checks.count("shared_prefix", live.pop("shared_prefix", 0))
    live_keys.check_prefix(prefix, lengths)
    if "block_table" in options:
        page_size = pool[2]
        live["block_table"] = _checked_table(options["block_table"], lengths, pool, prefix)
    own = (n - prefix for n in lengths)
    problem = replace(
        whole,
        batch=1,
        page_size=page_size,
        n_q=whole.n_q * whole.batch,
        n_kv=sum(lengths) - prefix * (whole.batch - 1),
        cu_seqlens_q=tuple(range(0, whole.n_q * whole.batch + 1, whole.n_q)),
        cu_seqlens_k=tuple(accumulate(own, initial=prefix)),
        shared_prefix=prefix,
    )
    return problem, live


def live_lengths(whole: Problem, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return how many keys each batch entry uses; the arguments are those of `live_problem`."""
    lengths = live_keys.live_lengths(
        options.get("cache_seqlens"), whole.batch, whole.n_kv, paged="block_table" in options
    )
    if whole.cu_seqlens_q is not None:
        raise OptionError(
            "cache_seqlens and cu_seqlens both set the sequence lengths; pass only one"
        )
    if whole.bias is not None:
        raise UnsupportedError(
            f"{' and '.join(CACHES & options.keys())} cannot be combined with bias=; call run "
            "once per batch entry"
        )
    return lengths


def check_alike(prefix: int, **caches: np.ndarray) -> None:
    """Raise `OptionError` unless all batch entries' first `prefix` keys are equal, bit for bit."""
    for name, x in caches.items():
        bits = x[:, :, :prefix].view(f"u{min(x.itemsize, 8)}")
        for b in np.flatnonzero((bits != bits[:1]).any(axis=(1, 2, 3)))[:1]:
            raise OptionError(
                f"the first {prefix:,} keys must be the same in all batch entries, but those of "
                f"{name}[{b}] differ from those of {name}[0]; set shared_prefix= to the number of "
                "leading keys that all entries share"
            )


def _checked_table(
    said: Any, lengths: tuple[int, ...], pool: tuple[int, ...], prefix: int
) -> np.ndarray:
    """Return the block table as int64, after checking that the pool has every page of live keys.

    The pages of a shared prefix must be the same in every row.
    """
    said = checks.as_array("block_table", said)
    if said.dtype.kind == "u":  # a number beyond int64 would look negative
        said = np.minimum(said, np.uint64(checks.LARGEST))
    table = said.astype(np.int64)
    live_keys.check_pages(table, lengths, pool[2], pool[0], prefix)
    return table
