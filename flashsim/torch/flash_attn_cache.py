"""Attention over flash-attention's KV caches: rotation, new keys, pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsim.api.arrays import name_of
from flashsim.errors import DTypeError, OptionError, ShapeError
from flashsim.torch import decoding
from flashsim.torch.flash_attn_core import (
    FP8,
    ScoreOptions,
    attend,
    check_axes,
    even_offsets,
    limits,
    offsets_of,
)


class Cache(NamedTuple):
    """A KV cache in flash-attention's layout, and the new keys and values that are appended to it.

    `k` and `v` are (entries, n, heads, d) or, with a block table, (pages, page_size, heads, d). New
    rows are rotated by `cos` and `sin` at the positions `at`, or at `lengths` if `at` is None.
    """

    k: Tensor
    v: Tensor
    new_k: Tensor | None
    new_v: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    lengths: Any
    entries: Tensor | None
    starts: Tensor | None
    table: Tensor | None
    interleaved: bool = True
    splits: int = 0
    at: Tensor | None = None


def with_cache(
    q: Tensor, cache: Cache, scores: ScoreOptions, qv: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate new rows, append keys and values to the cache, and compute attention over the cache.

    The results are an output of shape (batch, n_q, heads, d) and an LSE of shape (batch, heads,
    n_q).
    """
    check_axes("q", q)
    names = ("cache_seqlens", "cache_batch_idx", "cache_leftpad")
    numbers = zip(names, (cache.lengths, cache.entries, cache.starts), strict=True)
    lengths, entries, starts = (decoding.integers(name, x, q) for name, x in numbers)
    cache = cache._replace(lengths=lengths, entries=entries, starts=starts)
    cache = _checked(cache, q.shape[0])
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        if x.stride(-1) != 1:
            raise ShapeError(
                f"{name} must have a contiguous last dimension, got strides {x.stride()}; pass "
                f"{name}.contiguous()"
            )
    batch, n_q = q.shape[:2]
    needed = cache.cos, cache.sin, cache.new_k, cache.lengths
    if (cache.cos is not None or cache.sin is not None) and any(x is None for x in needed):
        raise OptionError(
            "rotary_cos= also needs rotary_sin=, new keys and values as k= and v=, and "
            "their positions as cache_seqlens=; rotary_sin= needs rotary_cos="
        )
    if cache.new_k is not None and cache.lengths is None:
        raise OptionError(
            "new keys and values, k= and v=, also need cache_seqlens=, the positions at "
            "which they are written"
        )
    if cache.new_k is not None:
        check_axes("k", cache.new_k)
        n_new = cache.new_k.shape[1]
        rows = (_Rows.of_batch(batch, n, q.device) for n in (n_q, n_new))
        q, lengths = _turned_and_appended(q, cache, scores, *rows), lengths + n_new
    padded_pages = cache.table is not None and cache.starts is not None
    if qv is not None:
        check_axes("qv", qv)
    alone = qv is not None or scores.chunk or scores.slopes is not None
    if alone or q.dtype in FP8 or padded_pages:
        stops = [_room(cache)] * batch if lengths is None else lengths.tolist()
        of_q = even_offsets(batch, n_q)
        qv = None if qv is None else qv.flatten(0, 1)
        out, lse = _over_cache(q.flatten(0, 1), of_q, cache, stops, qv, scores)
        return out.unflatten(0, (batch, n_q)), lse.unflatten(1, (batch, n_q)).transpose(0, 1)
    out, lse = decoding.decode(
        *(x.transpose(1, 2) for x in (q, cache.k, cache.v)),
        cache_seqlens=lengths,
        block_table=cache.table,
        cache_starts=cache.starts,
        cache_batch_idx=cache.entries,
        causal=scores.causal,
        window=limits(scores.window),
        softcap=max(float(scores.softcap), 0.0),
        scale=scores.scale,
        splits=cache.splits or None,
        return_lse=True,
    )
    return out.transpose(1, 2), lse


def packed_over_cache(
    q: Tensor, cu_seqlens_q: Any, cu_seqlens_new: Any, cache: Cache, scores: ScoreOptions, qv: Any
) -> tuple[Tensor, Tensor]:
    """Do the work of `with_cache` (rotate, append, attend) for packed (tokens, heads, d) arrays.

    Cache lengths are read on the host, and `splits` has no effect.
    """
    check_axes("q", q, "(tokens, heads, head_dim)")
    of_q = offsets_of("cu_seqlens_q", cu_seqlens_q)
    if of_q[-1] != len(q):
        raise ShapeError(f"cu_seqlens_q must end at q's {len(q)} tokens, got {of_q[-1]}")
    batch, lengths = len(of_q) - 1, cache.lengths
    cache = _checked(cache, batch)
    if lengths is None or isinstance(lengths, int):
        lengths = [_room(cache) if lengths is None else lengths] * batch
    before = torch.as_tensor(lengths, device=q.device)
    if before.shape != (batch,) or before.is_floating_point():
        raise ShapeError(
            f"cache_seqlens must be {batch} integers, one per sequence, got {before.dtype} of "
            f"shape {tuple(before.shape)}"
        )
    k, v, of_new = cache.new_k, cache.new_v, (0,) * (batch + 1)
    if k is not None and cu_seqlens_new is not None:
        of_new = offsets_of("cu_seqlens_k_new", cu_seqlens_new)
        if len(of_new) != batch + 1:
            raise ShapeError(
                f"cu_seqlens_k_new must have {batch + 1} offsets, as cu_seqlens_q, got "
                f"{len(of_new)}"
            )
    elif k is not None and v is not None:  # (batch, n_new, heads, d)
        of_new = even_offsets(batch, k.shape[1])
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    cache = cache._replace(new_k=k, new_v=v, lengths=before)
    rows, new_rows = (_Rows.packed(of, q.device) for of in (of_q, of_new))
    q = _turned_and_appended(q, cache, scores, rows, new_rows)
    stops = [n + b - a for n, (a, b) in zip(before.tolist(), pairwise(of_new), strict=True)]
    return _over_cache(q, of_q, cache, stops, qv, scores)


class _Rows(NamedTuple):
    """The sequence of each row, and the row's number within the sequence."""

    sequence: Tensor
    number: Tensor

    @classmethod
    def of_batch(cls, batch: int, n: int, device: Any) -> _Rows:
        """Return the rows of a batch, which broadcast to (batch, n)."""
        return cls(torch.arange(batch, device=device)[:, None], torch.arange(n, device=device))

    @classmethod
    def packed(cls, of: tuple[int, ...], device: Any) -> _Rows:
        """Return the rows of packed sequences, (tokens,)."""
        offsets = torch.tensor(of, device=device)
        sequence = torch.arange(len(of) - 1, device=device).repeat_interleave(offsets.diff())
        return cls(sequence, torch.arange(of[-1], device=device) - offsets[sequence])


def _checked(cache: Cache, batch: int) -> Cache:
    """Return a cache in which row b of the block table, if there is one, is of sequence b."""
    if (cache.new_k is None) != (cache.new_v is None):
        raise OptionError(
            "k= and v= hold the new keys and values, but only one of them was passed; pass "
            "both, or neither"
        )
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        check_axes(name, x)
    if cache.k.shape[:3] != cache.v.shape[:3]:
        raise ShapeError(
            "k_cache and v_cache must have the same shape, except for head_dim, got "
            f"{tuple(cache.k.shape)} and {tuple(cache.v.shape)}"
        )
    table, entries = cache.table, cache.entries
    if table is None:
        return cache
    if table.ndim != 2 or table.is_floating_point() or (entries is None and len(table) != batch):
        raise ShapeError(
            f"block_table must be integers of shape ({batch}, max_pages), got {table.dtype} of "
            f"shape {tuple(table.shape)}"
        )
    if entries is None:
        return cache
    decoding.check_within("cache_batch_idx must select rows of block_table,", entries, len(table))
    return cache._replace(table=table[entries.long()], entries=None)


def _room(cache: Cache) -> int:
    """Return the number of keys for which a sequence has room in the cache."""
    return cache.k.shape[1] * (1 if cache.table is None else cache.table.shape[1])


def _turned_and_appended(
    q: Tensor, cache: Cache, scores: ScoreOptions, rows: _Rows, new_rows: _Rows
) -> Tensor:
    """Write new keys and values to the cache, in place; rotate new keys and queries; return these.

    Without a causal mask and a window, all queries of a sequence have the same position.
    """
    k, v = cache.new_k, cache.new_v
    leading = *new_rows.sequence.shape[:-1], *new_rows.number.shape
    for name, new, old in (("k", k, cache.k), ("v", v, cache.v)):
        if new is not None and new.shape != (*leading, *old.shape[2:]):
            raise ShapeError(
                f"{name}= must have new rows for {name}_cache, of shape "
                f"{(*leading, *old.shape[2:])}, got {tuple(new.shape)}"
            )
        if new is not None and new.dtype != old.dtype:
            raise DTypeError(
                f"{name}= must have the dtype of {name}_cache, {name_of(old.dtype)}, got "
                f"{name_of(new.dtype)}; convert it with {name}.to({name}_cache.dtype)"
            )
    if cache.cos is not None and cache.sin is not None:
        first = cache.lengths if cache.at is None else cache.at
        if first.shape != cache.lengths.shape:
            raise ShapeError(
                f"rotary_seqlens must have the shape {tuple(cache.lengths.shape)}, one position "
                f"per sequence, got {tuple(first.shape)}"
            )
        turn = partial(rotated, cos=cache.cos, sin=cache.sin, interleaved=cache.interleaved)
        moves = scores.causal or limits(scores.window) is not None
        q = turn(q, first[rows.sequence].long() + (rows.number if moves else 0))
        k = k if k is None else turn(k, first[new_rows.sequence].long() + new_rows.number)
    if k is not None and v is not None:
        _append(cache, k, v, new_rows)
    return q


def rotated(x: Tensor, at: Tensor, *, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return `x`, (..., heads, d), with the first columns rotated by each row's position `at`.

    The rotation is computed in float32, or in float64 for float64 rows, and rounded once.
    """
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ShapeError(
            "rotary_cos and rotary_sin must have the same shape (positions, at most "
            f"{x.shape[-1] // 2}), got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    half = cos.shape[1]
    rows = "positions to rotate by must be rows of rotary_cos,"
    decoding.check_within(rows, at, cos.shape[0])
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (t[at].unsqueeze(-2).to(wide) for t in (cos, sin))
    turning, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    if interleaved:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = turning[..., :half], turning[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _append(cache: Cache, k: Tensor, v: Tensor, rows: _Rows) -> None:
    """Append new rows to each sequence's rows in a cache, in place."""
    which, at = rows.sequence, cache.lengths[rows.sequence].long() + rows.number
    within = decoding.check_within
    within("new keys, from cache_seqlens on, must fit in the cache's rows", at, _room(cache))
    if cache.table is not None:
        size = cache.k.shape[1]
        which, at = cache.table.long()[which, at // size], at % size
        within("block_table must select the caches' pages", which, cache.k.shape[0])
    elif cache.entries is not None:
        which = cache.entries.long()[which]
        within("cache_batch_idx must select the caches' entries", which, cache.k.shape[0])
    for place, new in ((cache.k, k), (cache.v, v)):
        place.index_put_((which, at), new)


def _over_cache(
    q: Tensor,
    of_q: tuple[int, ...],
    cache: Cache,
    stops: Sequence[int],
    qv: Tensor | None,
    scores: ScoreOptions,
) -> tuple[Tensor, Tensor]:
    """Compute attention of packed queries, (tokens, heads, d), over copies of the live keys."""
    starts = None if cache.starts is None else cache.starts.tolist()
    entries = None if cache.entries is None else cache.entries.tolist()
    both = cache.k.transpose(1, 2), cache.v.transpose(1, 2)
    k, v, of_k = decoding.live(*both, stops, starts, entries, cache.table)
    of_qv = None if qv is None else qv.transpose(0, 1)[None]
    out, lse = attend(q.transpose(0, 1)[None], k, v, of_qv, scores=scores, cuts=(of_q, of_k))
    return out[0].transpose(0, 1), lse[0]
