"""`decode`: attention of a few queries over a KV cache, as ``flashsim::decode`` for torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flashsim.api import execution
from flashsim.api.arrays import name_of
from flashsim.errors import DTypeError, ShapeError, UnsupportedError, own_errors
from flashsim.problem import checks
from flashsim.problem.problem import Problem
from flashsim.torch import direct, ops
from flashsim.torch.functional import autocast, taken
from flashsim.torch.ops import readable


@own_errors
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | Sequence[int] | int | None = None,
    block_table: Tensor | None = None,
    cache_starts: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    splits: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute attention of a few queries over the live keys of a KV cache, without a gradient.

    If cache lengths, starts and block table are GPU tensors, the decode kernel reads them itself.
    With lengths and block table on the GPU, a call never waits for the GPU, works under
    torch.compile, and can be captured in a CUDA graph. New lengths may be written before a replay
    of the graph. The decode kernels support float16 and bfloat16, and head dimensions up to 256.
    For other types and widths, torch's own operators run on the GPU.

    Autocast casts q and the caches, as it does for torch's own attention. A cache of another type
    is then copied in each call, so allocate caches in autocast's type.

    Parameters
    ----------
    q : Tensor, (batch, heads, n_q, head_dim)
    k_cache, v_cache : Tensor
        (entries, kv_heads, n, head_dim) and (entries, kv_heads, n, head_dim_v), with entry b for
        sequence b unless `cache_batch_idx` says otherwise. With a `block_table`, (pages, kv_heads,
        page_size, ..).
    cache_seqlens : Tensor of int, (batch,), a sequence of int, or int, optional
        The end of each sequence's live keys. Default: the whole cache. On a GPU, a number below 0
        counts as 0, and one above n as n.
    block_table : Tensor of int32, (batch, max_pages), optional
        The pages of each sequence. On a GPU, a page that the pool does not have makes the results
        of its sequence NaN.
    cache_starts : Tensor of int, (batch,), optional
        The first live key of each sequence (left padding); not with a `block_table`.
    cache_batch_idx : Tensor of int, (batch,), optional
        The entry of the cache that belongs to each sequence; not with a `block_table`.
    causal, window, softcap, scale
        As in `flashsim.run`, aligned to the end of the live keys.
    splits : int, optional
        The number of splits of a sequence's keys, on a GPU. Default: chosen for the GPU.
    return_lse : bool
        Return ``(out, lse)``, the LSE as (batch, heads, n_q).

    Returns
    -------
    Tensor, (batch, heads, n_q, head_dim_v)

    Raises
    ------
    FlashSimError
        For shapes, types and options that flashsim does not support.
    """
    if not (isinstance(q, Tensor) and isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)):
        kinds = ", ".join(type(x).__name__ for x in (q, k_cache, v_cache))
        raise DTypeError(f"q, k_cache and v_cache must be tensors, got {kinds}")
    if q.ndim != 4:
        raise ShapeError(f"q must be (batch, heads, n_q, head_dim), got {tuple(q.shape)}")
    if not q.layout == k_cache.layout == v_cache.layout == torch.strided:
        taken(q=q, k_cache=k_cache, v_cache=v_cache)  # raises
    causal, return_lse = checks.flag("causal", causal), checks.flag("return_lse", return_lse)
    splits = 0 if splits is None else checks.count("splits", splits)
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        q, k_cache, v_cache = map(autocast, (q, k_cache, v_cache))
    lengths = integers("cache_seqlens", cache_seqlens, q)
    starts = integers("cache_starts", cache_starts, q)
    entries = integers("cache_batch_idx", cache_batch_idx, q)
    sides = window if torch.compiler.is_compiling() else checks.window(window)  # not of symbols
    left, right = sides or (-1, -1)
    run: Any = (operator := torch.ops.flashsim.decode.default)
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled() and not q.is_meta:
        plain = type(q) is type(k_cache) is type(v_cache) is Tensor
        if plain and direct.unwatched():
            run = _on_gpu if q.is_cuda else _packed
    if run is operator:
        _check_types(q, k_cache, v_cache)  # torch would run a meta tensor's part without a check
        if not torch.compiler.is_compiling():
            _refuse_transforms(q, k_cache, v_cache)
    out, lse = run(
        *(q, k_cache, v_cache, lengths, block_table, starts, entries),
        *(causal, left, right, softcap, scale, splits),
    )
    return (out, lse) if return_lse else out


def integers(name: str, given: Any, q: Tensor) -> Tensor | None:
    """Return an int32 tensor on q's device with one integer per sequence; None stays None."""
    if given is None:
        return None
    if checks.is_int(given):
        if not -(2**31) <= given < 2**31:
            raise ShapeError(f"{name} must fit in 32 bits, got {given}")
        given = torch.full((q.shape[0],), given, dtype=torch.int32, device=q.device)
    elif not isinstance(given, Tensor):
        given = torch.tensor(given, device=q.device)
    if given.shape != q.shape[:1] or given.is_floating_point() or given.dtype == torch.bool:
        raise ShapeError(
            f"{name} must be {q.shape[0]} integers, one per sequence, got {name_of(given.dtype)} "
            f"of shape {tuple(given.shape)}"
        )
    if given.device != q.device:
        given = given.to(q.device)
    return given if given.dtype == torch.int32 else given.to(torch.int32)


_LIBRARY = torch.library.Library("flashsim", "FRAGMENT")
_LIBRARY.define(
    "decode(Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? table, Tensor? starts, "
    "Tensor? entries, bool causal, int left, int right, float softcap, float? scale, int splits) "
    "-> (Tensor out, Tensor lse)"
)
#: Checked calls; the key is everything that the checks read. None: no kernel supports the call.
_DECODERS: dict[tuple[Any, ...], Any] = {}
_MOST = 1024


def _on_gpu(*call: Any) -> tuple[Tensor, Tensor]:
    q, k, v, _, table, starts, entries, *_ = call
    asked = call[7:]
    pages = None if table is None else (table.shape, table.stride(), table.dtype, table.device)
    key = (
        *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
        *(pages, starts is None, entries is None, asked, *map(type, asked)),
    )
    try:
        decoder = _DECODERS[key]
    except KeyError:
        problem = _problem(call)
        decoder, widest = None, max(problem.head_dim, problem.head_dim_v)
        if problem.dtype in ("float16", "bfloat16") and widest <= 256:
            import flashsim.backends.cupy_gpu.engine as cupy_engine

            page = 0 if table is None else k.shape[2]
            decoder = cupy_engine.decoder(problem, q, page, asked[-1] or None)
        if len(_DECODERS) >= _MOST:
            _DECODERS.clear()
        _DECODERS[key] = decoder
    return _written_out(*call) if decoder is None else decoder(*call[:7])


def _check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise DTypeError(
            "q and the caches must have the same dtype and be on the same device, got "
            + ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        )


def _problem(call: tuple[Any, ...]) -> Problem:
    """Check shapes and types, and return a `Problem` that assumes that all cached keys are live."""
    q, k, v, _, table, starts, entries, causal, left, right, softcap, scale, _ = call
    found = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", (q, k, v), strict=True))
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3]:
        raise ShapeError(
            "q must be (batch, heads, n_q, head_dim), and the caches (entries, kv_heads, n, "
            f"width) with the same entries, heads and n, got {found}"
        )
    _check_types(q, k, v)
    if q.shape[3] != k.shape[3] or 0 in q.shape or 0 in k.shape or 0 in v.shape:
        raise ShapeError(f"q and k must have the same head_dim, and no size may be 0, got {found}")
    batch, heads, n_q, d = q.shape
    n_kv = k.shape[2]
    if table is not None:
        if starts is not None or entries is not None:
            raise UnsupportedError(
                "with block_table=, each sequence's keys begin in its first page; leave out "
                "cache_starts= and cache_batch_idx="
            )
        if table.dtype != torch.int32 or table.ndim != 2 or table.shape[0] != batch:
            raise ShapeError(
                f"block_table must be int32 of shape ({batch}, max_pages), got {table.dtype} of "
                f"shape {tuple(table.shape)}"
            )
        if table.device != q.device or (table.stride(1) != 1 and table.shape[1] > 1):
            raise ShapeError(
                "block_table must be on q's device and have contiguous rows; pass "
                "block_table.to(q.device).contiguous()"
            )
        n_kv *= table.shape[1]
    elif entries is None and k.shape[0] < batch:
        raise ShapeError(
            f"the caches must have an entry for each of the {batch} sequences, or "
            f"cache_batch_idx= must select the entries, got {found}"
        )
    # One query sees every key up to its own, the last one.
    return Problem(
        n_q,
        n_kv,
        d,
        v.shape[3],
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        dtype=name_of(q.dtype),
        causal=bool(causal) and n_q > 1,
        window=None if left < 0 and right < 0 else (left, right),
        softcap=softcap,
        scale=scale,
    )


def _written_out(*call: Any) -> tuple[Tensor, Tensor]:
    """Decode with torch's own operators in float32 or wider, without waiting for the GPU."""
    q, k, v, lengths, table, starts, entries, causal, left, right, softcap, scale, _ = call
    batch, heads, n_q, d = q.shape
    if table is not None:
        pages = table.long().clamp(0, k.shape[0] - 1)
        k, v = (x[pages].transpose(1, 2).flatten(2, 3) for x in (k, v))
    elif entries is not None:
        k, v = k[entries.long()], v[entries.long()]
    k, v, kv_heads, n = k[:batch], v[:batch], k.shape[1], k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    by_group = q.to(wide).reshape(batch, kv_heads, heads // kv_heads * n_q, d)
    scores = (by_group @ k.to(wide).mT).view(batch, kv_heads, -1, n_q, n)
    scores = scores * (d**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(n, device=q.device)
    whole = torch.full((batch,), n, device=q.device)
    stops = (whole if lengths is None else lengths.long().clamp(0, n))[:, None]
    begins = torch.zeros_like(stops) if starts is None else starts.long().clamp_min(0)[:, None]
    kept = (at >= begins) & (at < stops)
    distance = at - (stops - n_q + torch.arange(n_q, device=q.device))[..., None]
    seen = kept[:, None].expand(batch, n_q, n)
    if causal or right >= 0:
        seen = seen & (distance <= (0 if causal else right))
    if left >= 0:
        seen = seen & (distance >= -left)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
    values = torch.where(kept[:, None, :, None], v.to(wide), 0)  # keys that are not live may be NaN
    out = weights.flatten(2, 3) @ values
    shape = batch, heads, n_q
    return out.view(*shape, -1).to(q.dtype), lse.reshape(shape)


def _packed(*call: Any) -> tuple[Tensor, Tensor]:
    """Decode on any engine.

    If the sequences' live keys differ, or lie in pages, they are copied into one packed array.
    """
    q, k, v, lengths, table, starts, entries, _, _, _, softcap, scale, _ = call
    problem = _problem(call)
    batch, n_q = q.shape[0], q.shape[2]
    stops = [problem.n_kv] * batch
    if lengths is not None:
        stops = lengths.tolist()
    begins = None if starts is None else starts.tolist()
    told: dict[str, Any] = {
        **{"causal": problem.causal, "window": problem.window, "softcap": softcap, "scale": scale},
        "backend": "cupy" if q.is_cuda else "numba",
    }
    if table is entries is None and len({*stops}) == len({*(begins or (0,))}) == 1:
        stop = min(max(stops[0], 0), problem.n_kv)
        begin = min(max(begins[0], 0) if begins else 0, stop)
        same = (x[:batch, :, begin:stop] for x in (k, v))  # views
        result = execution.run(*map(readable, (q, *same)), **told)
        return result.out, result.lse
    k, v, cu_k = live(k, v, stops, begins, None if entries is None else entries.tolist(), table)
    rows_of_q = q.transpose(0, 1).reshape(1, q.shape[1], batch * n_q, -1)
    cu_q = tuple(range(0, batch * n_q + 1, n_q))
    packed = map(readable, (rows_of_q, k, v))
    result = execution.run(*packed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **told)
    shape = (q.shape[1], batch, n_q)
    out = result.out.reshape(*shape, -1).transpose(0, 1).contiguous()
    return out, result.lse.reshape(shape).transpose(0, 1).contiguous()


def live(
    k: Tensor,
    v: Tensor,
    stops: Sequence[int],
    starts: Sequence[int] | None = None,
    entries: Sequence[int] | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Copy the live keys and values of all sequences, each to (1, kv_heads, tokens, width).

    Also return the offsets of the sequences. The caches and the table are those of `decode`. Starts
    and stops outside a sequence's room in the cache count as the nearest end of it.
    """
    if table is not None and not k.shape[2]:
        raise ShapeError(f"a page must hold at least one key, got pages of shape {tuple(k.shape)}")
    packed, room = [], k.shape[2] * (1 if table is None else table.shape[1])
    stops = [min(max(stop, 0), room) for stop in stops]
    pairs = zip(starts or (0,) * len(stops), stops, strict=True)
    begins = [min(max(start, 0), stop) for start, stop in pairs]
    if entries is not None:
        numbers = torch.tensor(entries, device="cpu")
        check_within("cache_batch_idx must select the caches' entries", numbers, k.shape[0])
    for x in (k, v):
        parts = []
        for b, stop in enumerate(stops):
            if table is None:
                whole = x[b if entries is None else entries[b]]
            else:
                used = table[b, : -(-stop // x.shape[2])].long()
                check_within("block_table must select the caches' pages", used, x.shape[0])
                whole = x[used].transpose(0, 1).flatten(1, 2)
            parts.append(whole[:, begins[b] : stop])
        packed.append(torch.cat(parts, 1)[None])
    offsets = tuple(accumulate((part.shape[1] for part in parts), initial=0))
    return packed[0], packed[1], offsets


def check_within(rule: str, numbers: Tensor, size: int) -> None:
    """Raise `ShapeError`, which begins with `rule`, unless the numbers are 0 to ``size - 1``.

    Numbers on a GPU, and those that torch.compile or a mode of torch observes, are not read.
    """
    if not numbers.is_cpu or torch.compiler.is_compiling() or not numbers.numel():
        return
    if type(numbers) is not Tensor or not direct.unwatched():
        return
    least, most = (int(n) for n in numbers.aminmax())
    if least < 0 or most >= size:
        raise ShapeError(f"{rule} 0 to {size - 1}, got {least} to {most}")


_LIBRARY.impl("decode", _on_gpu, "CUDA")
_LIBRARY.impl("decode", _packed, "CPU")


@torch.library.register_fake("flashsim::decode", lib=_LIBRARY)
def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return ops.empty_results(q, v)


def _refuse_transforms(*tensors: Tensor) -> None:
    """Raise UnsupportedError if a tensor is differentiated by torch.func or in forward mode."""
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    tangent_of = lambda x: torch.autograd.forward_ad.unpack_dual(x).tangent  # noqa: E731
    if forward_mode and any(tangent_of(x) is not None for x in tensors):
        ops.no_forward_mode()
    functorch: Any = torch._C._functorch
    for x in tensors:
        while functorch.is_functorch_wrapped_tensor(x):
            if functorch.is_gradtrackingtensor(x) and x.requires_grad and torch.is_grad_enabled():
                _no_gradient()
            x = functorch.get_unwrapped(x)


def _no_gradient(*_: Any) -> Any:
    raise UnsupportedError(
        "flashsim.torch.decode has no gradient; use flashsim.torch.attention, or call decode "
        "under torch.no_grad()"
    )


torch.library.register_autograd("flashsim::decode", _no_gradient, lib=_LIBRARY)
