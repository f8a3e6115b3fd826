"""Code that the three interfaces of flash-attention share: rotation, caches, packing, FP8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from flashsim.errors import DTypeError, OptionError, ShapeError, UnsupportedError
from flashsim.functions.mask import MaskFunction
from flashsim.torch.decoding import decode
from flashsim.torch.flex import with_functions
from flashsim.torch.functional import attention, check_sinks, default_backend, taken

Window = Sequence[int | None]
Cuts = tuple[tuple[int, ...], tuple[int, ...]]
_FP8 = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2"))


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    table: Tensor | None,
    used_q: Tensor | None = None,
    used_k: Tensor | None = None,
    qv: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return packed sequences' output (tokens, heads, d) and LSE (heads, tokens)."""
    of_q, of_k = _offsets("cu_seqlens_q", cu_seqlens_q), _offsets("cu_seqlens_k", cu_seqlens_k)
    if len(of_q) != len(of_k):
        raise ShapeError(
            "cu_seqlens_q and cu_seqlens_k must have the same number of sequences, got "
            f"{len(of_q) - 1} and {len(of_k) - 1}"
        )
    if table is not None:
        k, v = _from_pages(k, table, of_k), _from_pages(v, table, of_k)
    tokens = q.shape[0]
    rows_q, cut_q = _kept_rows(of_q, _used("seqused_q", used_q, of_q), q)
    rows_k, cut_k = _kept_rows(of_k, _used("seqused_k", used_k, of_k), k)
    if rows_k is not None:
        k, v = k.index_select(0, rows_k), v.index_select(0, rows_k)
    if rows_q is not None:
        q = q.index_select(0, rows_q)
        qv = None if qv is None else qv.index_select(0, rows_q)
    by_head = [None if x is None else x.transpose(0, 1)[None] for x in (q, k, v, qv)]
    out, lse = attend(*by_head, cuts=(cut_q, cut_k), **options)
    out, lse = out[0].transpose(0, 1), lse[0]
    if rows_q is not None:
        out = out.new_zeros(tokens, *out.shape[1:]).index_copy(0, rows_q, out)
        whole = lse.new_full((lse.shape[0], tokens), float("-inf"))
        lse = whole.index_copy(1, rows_q, lse)
    return out, lse


def with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    lengths: int | Tensor | None,
    entries: Tensor | None,
    starts: Tensor | None,
    table: Tensor | None,
    *,
    interleaved: bool,
    splits: int,
    at: Tensor | None = None,
    qv: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Rotate new rows, append keys and values to the cache, and compute attention over the cache.

    The results are an output of shape (batch, n_q, heads, d) and an LSE of shape (batch, heads,
    n_q). New rows are rotated by the positions in `at`, or by `lengths` if `at` is None.
    """
    if table is not None and entries is not None:
        table, entries = table[entries.long()], None
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1:
            raise ShapeError(
                f"{name} must have a contiguous last dimension, got strides {x.stride()}; pass "
                f"{name}.contiguous()"
            )
    if (k is None) != (v is None):
        raise OptionError(
            "k= and v= hold the new keys and values, but only one of them was passed; pass "
            "both, or neither"
        )
    batch, n_q = q.shape[:2]
    if isinstance(lengths, int):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    if cos is not None:
        if sin is None or k is None or lengths is None:
            raise OptionError(
                "rotary_cos= also needs rotary_sin=, new keys and values as k= and v=, and "
                "their positions as cache_seqlens="
            )
        at = lengths if at is None else at
        moves = options["causal"] or _window(options["window"]) is not None
        q = rotated(q, cos, sin, at, interleaved=interleaved, moves=moves)
        k = rotated(k, cos, sin, at, interleaved=interleaved)
    if k is not None and v is not None:
        if lengths is None:
            raise OptionError(
                "new keys and values, k= and v=, also need cache_seqlens=, the positions at "
                "which they are written"
            )
        _append(k_cache, k, lengths, entries, table)
        _append(v_cache, v, lengths, entries, table)
        lengths = lengths + k.shape[1]
    padded_pages = table is not None and starts is not None
    alone = qv is not None or options.get("chunk") or options.get("slopes") is not None
    if alone or q.dtype in _FP8 or padded_pages:
        n = k_cache.shape[1] * (1 if table is None else table.shape[1])
        stops = [n] * batch if lengths is None else torch.as_tensor(lengths).tolist()
        begins = [0] * batch if starts is None else starts.tolist()
        out, lse = _over_cache(
            *(q.flatten(0, 1), tuple(range(0, batch * n_q + 1, n_q)), k_cache, v_cache),
            *(stops, begins, None if entries is None else entries.tolist(), table),
            *(None if qv is None else qv.flatten(0, 1),),
            **options,
        )
        return out.unflatten(0, (batch, n_q)), lse.unflatten(1, (batch, n_q)).transpose(0, 1)
    out, lse = decode(
        *(x.transpose(1, 2) for x in (q, k_cache, v_cache)),
        cache_seqlens=lengths,
        block_table=table,
        cache_starts=starts,
        cache_batch_idx=entries,
        causal=options["causal"],
        window=_window(options["window"]),
        softcap=max(float(options["softcap"]), 0.0),
        scale=options["scale"],
        splits=splits or None,
        return_lse=True,
    )
    return out.transpose(1, 2), lse


def packed_over_cache(
    q: Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_new: Any,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    lengths: int | Tensor | None,
    entries: Tensor | None,
    starts: Tensor | None,
    table: Tensor | None,
    *,
    interleaved: bool,
    splits: int,
    at: Tensor | None = None,
    qv: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Do the work of `with_cache` (rotate, append, attend) for packed (tokens, heads, d) arrays.

    Cache lengths are read on the host, and `splits` has no effect.
    """
    of_q = _offsets("cu_seqlens_q", cu_seqlens_q)
    batch = len(of_q) - 1
    if table is not None and entries is not None:
        table, entries = table[entries.long()], None
    if lengths is None:
        n = k_cache.shape[1] * (1 if table is None else table.shape[1])
        before = [n] * batch
    else:
        before = [lengths] * batch if isinstance(lengths, int) else lengths.tolist()
    positions = before if at is None else at.tolist()
    moves = options["causal"] or _window(options["window"]) is not None
    if k is not None and cu_seqlens_new is None:  # (batch, n_new, heads, d)
        of_new: tuple[int, ...] = tuple(k.shape[1] * b for b in range(batch + 1))
        k, v = k.flatten(0, 1), None if v is None else v.flatten(0, 1)
    else:
        of_new = (0,) * (batch + 1) if k is None else _offsets("cu_seqlens_k_new", cu_seqlens_new)
    turned = []
    for b, ((first, last), (a, z)) in enumerate(zip(_pairs(of_q), _pairs(of_new), strict=True)):
        rows = q[None, first:last]
        if cos is not None and sin is not None:
            how: dict[str, Any] = {"interleaved": interleaved, "moves": moves}
            rows = rotated(rows, cos, sin, positions[b], **how)
        turned.append(rows[0])
        if k is None or v is None:
            continue
        new = k[None, a:z]
        if cos is not None and sin is not None:
            new = rotated(new, cos, sin, positions[b], interleaved=interleaved)
        where = torch.tensor([before[b]], device=q.device)
        row = torch.tensor([b], device=q.device) if entries is None else entries[b : b + 1]
        of_table = None if table is None else table[b : b + 1]
        _append(k_cache, new, where, row, of_table)
        _append(v_cache, v[None, a:z], where, row, of_table)
        before[b] += z - a
    begins = [0] * batch if starts is None else starts.tolist()
    return _over_cache(
        *(torch.cat(turned), of_q, k_cache, v_cache, before, begins),
        *(None if entries is None else entries.tolist(), table, qv),
        **options,
    )


def rotated(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: Tensor | int,
    *,
    interleaved: bool,
    moves: bool = True,
) -> Tensor:
    """Return `x`, (batch, n, heads, d), with the first columns rotated by each row's position.

    Row i of sequence b has position ``offsets[b] + i``, or ``offsets[b]`` if `moves` is false. The
    rotation is computed in float32 and rounded once.
    """
    half = cos.shape[-1]
    if cos.shape != sin.shape or 2 * half > x.shape[-1]:
        raise ShapeError(
            "rotary_cos and rotary_sin must have the same shape (positions, at most "
            f"{x.shape[-1] // 2}), got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    steps = torch.arange(x.shape[1] if moves else 1, device=x.device)
    at = torch.as_tensor(offsets, device=x.device).reshape(-1, 1).long() + steps
    c, s = (t[at][:, :, None].float() for t in (cos, sin))
    turning, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = turning[..., :half], turning[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _append(
    cache: Tensor, new: Tensor, lengths: Tensor, entries: Tensor | None, table: Tensor | None
) -> None:
    """Append new rows, (batch, n, heads, d), to each sequence's rows in a cache, in place."""
    batch, n = new.shape[:2]
    rows = lengths.reshape(-1, 1).long() + torch.arange(n, device=new.device)
    if table is not None:
        size = cache.shape[1]
        pages = table.long().gather(1, rows // size)
        cache.index_put_((pages, rows % size), new.to(cache.dtype))
        return
    which = torch.arange(batch, device=new.device) if entries is None else entries.long()
    cache.index_put_((which[:, None].expand(batch, n), rows), new.to(cache.dtype))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    *,
    descales: tuple[Tensor | None, ...] = (None, None, None),
    scale: float | None,
    causal: bool,
    window: Window,
    softcap: float,
    chunk: int = 0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    signed: bool = False,
    deterministic: bool = False,
    cuts: Cuts | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of (batch, heads, n, d) tensors; return out and LSE.

    `cuts` divides a batch of 1 into packed sequences. In `window`, None means no limit; if `signed`
    is false, a negative number also means no limit. If `signed` is true, a negative number moves
    the limit to the diagonal's opposite side.
    """
    q, k, v = _widened(q, k, v, descales, cuts)
    if qv is not None:
        scale = (q.shape[-1] + qv.shape[-1]) ** -0.5 if scale is None else scale
        q, k = torch.cat((qv.to(q.dtype), q), -1), torch.cat((v, k), -1)
    batch, heads, n_q, _ = q.shape
    packed = cuts is None and chunk > 0
    if packed:  # each chunk is a sequence of its own
        n_k = k.shape[2]
        cuts = tuple(range(0, batch * n_q + 1, n_q)), tuple(range(0, batch * n_k + 1, n_k))
        q, k, v = _flat(q), _flat(k), _flat(v)
    if cuts is not None:
        cuts = _chunked(cuts, chunk) if chunk > 0 else cuts
    options: dict[str, Any] = {
        **{"causal": causal, "softcap": max(float(softcap), 0.0), "scale": scale},
        "deterministic": deterministic,
    }
    moved = signed and any(side is not None and side < 0 for side in window)
    if moved or slopes is not None:
        if not moved:
            options["window"], window = _window(window), (None, None)
        out, lse = _by_functions(q, k, v, slopes, window, sinks, cuts, options)
    else:
        if cuts is not None:
            options |= {"cu_seqlens_q": cuts[0], "cu_seqlens_k": cuts[1]}
        options |= {"window": _window(window), "sinks": sinks, "return_lse": True}
        out, lse = attention(q, k, v, **options)
    if packed:
        out = out.reshape(heads, batch, n_q, -1).transpose(0, 1)
        lse = lse.reshape(heads, batch, n_q).transpose(0, 1)
    return out, lse


def _chunked(cuts: Cuts, chunk: int) -> Cuts:
    """Cut each sequence at the positions that are multiples of `chunk`.

    In each piece, query i still has the position of key ``i + n_k - n_q``, so masks do not change.
    Pieces may have no queries or no keys.
    """
    of_q, of_k = [0], [0]
    for (a, b), (c, d) in zip(_pairs(cuts[0]), _pairs(cuts[1]), strict=True):
        first = (d - c) - (b - a)  # the position of the first query
        if first < 0:  # chunks before the first key
            of_q.append(min(a - first, b))
            of_k.append(c)
        for end in range(chunk, d - c + chunk, chunk):
            of_k.append(c + min(end, d - c))
            of_q.append(min(max(a + min(end, d - c) - first, of_q[-1]), b))
        if of_q[-1] < b:
            of_q.append(b)
            of_k.append(d)
    return tuple(of_q), tuple(of_k)


def _widened(
    q: Tensor, k: Tensor, v: Tensor, descales: tuple[Tensor | None, ...], cuts: Cuts | None
) -> tuple[Tensor, ...]:
    """Return FP8 inputs as bfloat16, multiplied by the descales, and any other inputs unchanged."""
    if q.dtype not in _FP8:
        if any(x is not None for x in descales):
            raise DTypeError(
                f"q_descale, k_descale and v_descale are for FP8 inputs, got {q.dtype}"
            )
        return q, k, v
    wide = []
    for x, scale, of in zip((q, k, v), descales, (0, 1, 1), strict=True):
        y = x.float()
        if scale is not None:  # (batch, heads_k)
            each = scale.float().repeat_interleave(x.shape[1] // scale.shape[1], 1)
            if cuts is None:
                each = each[:, :, None]
            else:
                sizes = torch.tensor([b - a for a, b in _pairs(cuts[of])], device=x.device)
                each = each.repeat_interleave(sizes, 0).T[None]
            y = y * each[..., None]
        wide.append(y.to(torch.bfloat16))
    return tuple(wide)


def _over_cache(
    q: Tensor,
    of_q: tuple[int, ...],
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Sequence[int],
    starts: Sequence[int],
    rows: Sequence[int] | None,
    table: Tensor | None,
    qv: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention of packed queries, (tokens, heads, d), over copies of the live keys."""
    packed, of_k = [], [0]
    for start, stop in zip(starts, lengths, strict=True):
        of_k.append(of_k[-1] + max(stop - start, 0))
    for cache in (k_cache, v_cache):
        live = []
        for b, (start, stop) in enumerate(zip(starts, lengths, strict=True)):
            if table is None:
                whole = cache[b if rows is None else rows[b]]
            else:
                whole = cache[table[b, : -(-stop // cache.shape[1])].long()].flatten(0, 1)
            live.append(whole[start : max(stop, start)])
        packed.append(torch.cat(live).transpose(0, 1)[None])
    of_qv = None if qv is None else qv.transpose(0, 1)[None]
    k, v = packed
    given = q.transpose(0, 1)[None], k, v, of_qv
    out, lse = attend(*given, cuts=(of_q, tuple(of_k)), **options)
    return out[0].transpose(0, 1), lse[0]


@torch.compiler.disable
def _by_functions(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    window: Window,
    sinks: Tensor | None,
    cuts: Cuts | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Compute attention with ALiBi as a score function and a signed window as a mask function.

    Sequences are computed one by one if slopes or diagonals (``n_k - n_q``) differ between them.
    """
    q, k, v = taken(q=q, k=k, v=v)
    batch, heads = q.shape[:2]
    sequences = batch if cuts is None else len(cuts[0]) - 1
    if slopes is not None and slopes.shape not in ((heads,), (sequences, heads)):
        raise ShapeError(
            f"alibi_slopes must have one slope per head, of shape ({heads},), or one per sequence "
            f"and head, of shape ({sequences}, {heads}), got {tuple(slopes.shape)}"
        )
    if sinks is not None:
        check_sinks(sinks, q)
    if cuts is None:
        return _functions_of(q, k, v, slopes, window, sinks, k.shape[2] - q.shape[2], options)
    spans = [(*of_q, *of_k) for of_q, of_k in zip(_pairs(cuts[0]), _pairs(cuts[1]), strict=True)]
    starts = {(d - c) - (b - a) for a, b, c, d in spans}
    if len(starts) == 1 and (slopes is None or slopes.ndim == 1):
        options = {**options, "cu_seqlens_q": cuts[0], "cu_seqlens_k": cuts[1]}
        return _functions_of(q, k, v, slopes, window, sinks, starts.pop(), options)
    results = []
    for n, (a, b, c, d) in enumerate(spans):
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[n]
        rows = q[:, :, a:b], k[:, :, c:d], v[:, :, c:d]
        results.append(_functions_of(*rows, own, window, sinks, (d - c) - (b - a), options))
    return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 2)


def _functions_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    window: Window,
    sinks: Tensor | None,
    start: int,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Compute attention with ALiBi and a signed window, if all diagonals start at key `start`."""
    mask = None
    if tuple(window) != (None, None):
        mask = MaskFunction.of(_signed_window(window, _start_array(start, q)))
    given: dict[str, Any] = {"mask": mask, "sinks": sinks, "backend": default_backend(q)}
    if slopes is None:
        return with_functions(q, k, v, None, **given, **options)
    slopes = slopes.detach().float()
    if not options["causal"] or sinks is not None:
        score = _alibi(slopes, _start_array(start, q))
        return with_functions(q, k, v, score, **given, **options)
    # No key that a query sees lies after it. Without `start`, all scores of a row are larger by the
    # same number: the output does not change, and the GPU's kernels add this form without a load.
    out, lse = with_functions(q, k, v, _falling(slopes), **given, **options)
    return out, lse - slopes.reshape(-1, q.shape[1], 1) * start


def _start_array(start: int, q: Tensor) -> Tensor:
    """Return `start` as an int32 tensor (1,) on q's device, without waiting for the device."""
    return torch.full((1,), start, dtype=torch.int32, device=q.device)


def _alibi(slopes: Tensor, starts: Tensor) -> Callable[..., Any]:
    """Return a score function that computes ALiBi with slopes (heads,) or (batch, heads).

    The score function reads the diagonal's first key from the array `starts`, so one compilation
    serves every cache length.
    """

    def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
        return score - slope * abs(i + starts[0] - j)

    return alibi


def _falling(slopes: Tensor) -> Callable[..., Any]:
    """Return a score function for ALiBi under a causal mask whose diagonal starts at key 0."""

    def falling(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score - (slopes[h] if slopes.ndim == 1 else slopes[b, h]) * (i - j)

    return falling


def _signed_window(window: Window, starts: Tensor) -> Callable[..., Any]:
    """Return a mask function that keeps scores inside a window; a limit may be negative or None."""
    left, right = window

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        distance = i + starts[0] - j
        if left is None:
            return -distance <= right
        return distance <= left if right is None else (distance <= left) & (-distance <= right)

    return seen


def _kept_rows(
    of: tuple[int, ...], used: Sequence[int] | None, x: Tensor
) -> tuple[Tensor | None, tuple[int, ...]]:
    """Return the indices of rows in use (None: all rows), and sequence offsets among these rows."""
    if used is None:
        return None, of
    rows = [torch.arange(a, a + n) for a, n in zip(of, used, strict=False)]
    return torch.cat(rows).to(x.device), tuple(accumulate(used, initial=0))


def _used(name: str, given: Tensor | None, of: tuple[int, ...]) -> list[int] | None:
    if given is None:
        return None
    used = [int(n) for n in given.tolist()]
    if len(used) != len(of) - 1 or any(
        n > b - a for n, (a, b) in zip(used, _pairs(of), strict=True)
    ):
        raise ShapeError(
            f"{name} must be {len(of) - 1} lengths, each at most the length of its sequence, got "
            f"{used}"
        )
    return used


def _from_pages(x: Tensor, table: Tensor, of: tuple[int, ...]) -> Tensor:
    """Copy sequences from pages (pages, page_size, heads, d) to an array (tokens, heads, d)."""
    parts = []
    for b, (start, stop) in enumerate(_pairs(of)):
        n = stop - start
        parts.append(x[table[b, : -(-n // x.shape[1])].long()].flatten(0, 1)[:n])
    return torch.cat(parts)


def _offsets(name: str, given: Any) -> tuple[int, ...]:
    values = given.tolist() if isinstance(given, Tensor) else list(given)
    if not values or values[0] != 0 or any(b < a for a, b in _pairs(values)):
        raise ShapeError(f"{name} must begin at 0 and not decrease, got {values[:8]}")
    return tuple(values)


def by_head(name: str, x: Tensor) -> Tensor:
    """Return a (batch, n, heads, d) tensor as (batch, heads, n, d); raise ShapeError otherwise."""
    if not isinstance(x, Tensor) or x.ndim != 4:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"{name} must be a tensor (batch, n, heads, head_dim), got {found}")
    return x.transpose(1, 2)


def unpacked(qkv: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and v as views of one tensor (batch, n, 3, heads, d)."""
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ShapeError(f"qkv must be (batch, n, 3, heads, head_dim), got {tuple(qkv.shape)}")
    return qkv.unbind(2)


def _window(window: Window) -> tuple[int, int] | None:
    left, right = (-1 if side is None or side < 0 else int(side) for side in window)
    return None if left < 0 and right < 0 else (left, right)


def no_dropout(p: float) -> None:
    """Raise UnsupportedError if the dropout probability `p` is not 0."""
    if p:
        raise UnsupportedError(f"flashsim's attention has no dropout, got dropout_p={p}; pass 0.0")


def _flat(x: Tensor) -> Tensor:
    """Return a batch, (batch, heads, n, d), as one sequence, (1, heads, batch * n, d)."""
    return x.transpose(0, 1).reshape(1, x.shape[1], -1, x.shape[3])


def _pairs(offsets: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(offsets))
