"""Code that the three interfaces of flash-attention share: packing, FP8, ALiBi, checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsim.errors import DTypeError, ShapeError, UnsupportedError, shown
from flashsim.functions.mask import MaskFunction
from flashsim.torch import decoding
from flashsim.torch.flex import Tensors, with_functions
from flashsim.torch.functional import attention, check_sinks, default_backend, taken

Window = Sequence[int | None]
Cuts = tuple[tuple[int, ...], tuple[int, ...]]
FP8 = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2"))


#: Up to this distance, with slopes of at most 1, float32 rounds ALiBi's term by at most 2^-13,
#: which is less than the rounding of probabilities to a 16-bit type.
_NEAR = 4096


class ScoreOptions(NamedTuple):
    """How scores are computed; the names are those of `flashsim.run`, except:

    - `window` may have None for no limit. If `signed` is false, a negative number also means no
      limit. If `signed` is true, a negative number moves the limit to the diagonal's opposite side.
    - `chunk`: queries see keys of their own chunk of this many positions; 0: all keys.
    - `slopes`: ALiBi's, (heads,) or (sequences, heads). `descales`: factors of FP8 q, k and v.
    """

    scale: float | None
    causal: bool
    window: Window
    softcap: float
    deterministic: bool = False
    chunk: int = 0
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    signed: bool = False
    descales: tuple[Tensor | None, ...] = ()


def with_options_of(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Show the arguments of `whole` after q, k and v in place of ``*options`` and ``**named``.

    Other arguments raise TypeError, of which `own_errors` makes an error of flashsim.
    """
    shared = [*inspect.signature(whole).parameters.values()][3:]

    def decorated(function: Any) -> Any:
        signature = inspect.signature(function)
        own = [x for x in signature.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        names = [x.name for x in (*own, *shared)]
        takes = f"{function.__name__} takes {', '.join(names)}"

        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            if len(given) > len(names) or not all([name in names for name in named]):
                raise TypeError(takes)
            return function(*given, **named)

        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *shared]
        )
        return call

    return decorated


def by_token(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, *, scores: ScoreOptions
) -> tuple[Tensor, Tensor]:
    """Compute attention of (batch, n, heads, d) tensors; the LSE is (batch, heads, n_q)."""
    for name, x in (("q", q), ("k", k), ("v", v), ("qv", qv)):
        if name != "qv" or x is not None:
            check_axes(name, x)
    of_qv = None if qv is None else qv.transpose(1, 2)
    by_head = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = attend(*by_head, of_qv, scores=scores)
    return out.transpose(1, 2), lse


def varlen(
    packed: tuple[Tensor | None, ...],
    offsets: tuple[Any, Any],
    scores: ScoreOptions,
    *,
    table: Tensor | None = None,
    used: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Return packed sequences' output (tokens, heads, d) and LSE (heads, tokens).

    `packed` are q, k, v and maybe qv; `offsets` and `used` are of the queries and of the keys.
    """
    pairs = zip(("q", "k", "v", "qv"), packed, strict=False)
    tensors: dict[str, Any] = {n: x for n, x in pairs if n != "qv" or x is not None}
    tokens, pages = "(tokens, heads, head_dim)", "(pages, page_size, heads, head_dim)"
    for name, x in tensors.items():
        check_axes(name, x, pages if table is not None and name in ("k", "v") else tokens)
    of_q, of_k = (offsets_of(f"cu_seqlens_{x}", of) for x, of in zip("qk", offsets, strict=True))
    if len(of_q) != len(of_k):
        raise ShapeError(
            "cu_seqlens_q and cu_seqlens_k must have the same number of sequences, got "
            f"{len(of_q) - 1} and {len(of_k) - 1}"
        )
    if table is not None:
        check_axes("the table of pages", table, "(batch, max_pages)")
        stops = [b - a for a, b in pairwise(of_k)]
        k, v = (tensors[name].transpose(1, 2) for name in ("k", "v"))
        k, v, _ = decoding.live(k, v, stops, table=table)
        tensors |= {"k": k[0].transpose(0, 1), "v": v[0].transpose(0, 1)}
    n_q, device = len(tensors["q"]), tensors["q"].device
    for name, x in tensors.items():
        of = of_k if name in ("k", "v") else of_q
        if of[-1] > len(x):
            raise ShapeError(
                f"cu_seqlens must end at the number of tokens of {name}, {len(x)}, got {of[-1]}"
            )
    rows_q, cut_q = _kept_rows(of_q, _used("seqused_q", used[0], of_q), device)
    rows_k, cut_k = _kept_rows(of_k, _used("seqused_k", used[1], of_k), device)
    for name, x in tensors.items():
        rows = rows_k if name in ("k", "v") else rows_q
        tensors[name] = (x if rows is None else x.index_select(0, rows)).transpose(0, 1)[None]
    out, lse = attend(*tensors.values(), scores=scores, cuts=(cut_q, cut_k))
    out, lse = out[0].transpose(0, 1), lse[0]
    if rows_q is not None:
        out = out.new_zeros(n_q, *out.shape[1:]).index_copy(0, rows_q, out)
        whole = lse.new_full((lse.shape[0], n_q), float("-inf"))
        lse = whole.index_copy(1, rows_q, lse)
    return out, lse


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    *,
    scores: ScoreOptions,
    cuts: Cuts | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of (batch, heads, n, d) tensors; return out and LSE.

    `cuts` divides a batch of 1 into packed sequences.
    """
    scale, window, chunk = scores.scale, scores.window, scores.chunk
    if scores.descales or q.dtype in FP8:
        q, k, v = _widened(q, k, v, scores.descales, cuts)
    if qv is not None:
        if qv.shape != (*q.shape[:-1], v.shape[-1]):
            raise ShapeError(
                "qv must have q's rows and heads, and v's head_dim; as (batch, heads, n, d), got "
                f"qv {tuple(qv.shape)}, q {tuple(q.shape)} and v {tuple(v.shape)}"
            )
        if k.shape[:-1] != v.shape[:-1]:
            raise ShapeError(
                "k and v must have the same heads and rows; as (batch, heads, n, d), got "
                f"k {tuple(k.shape)} and v {tuple(v.shape)}"
            )
        scale = (q.shape[-1] + qv.shape[-1]) ** -0.5 if scale is None else scale
        q, k = torch.cat((qv.to(q.dtype), q), -1), torch.cat((v, k), -1)
    batch, _, n_q, _ = q.shape
    packed = cuts is None and chunk > 0
    if packed:  # each chunk is a sequence of its own
        n_k = k.shape[2]
        cuts = even_offsets(batch, n_q), even_offsets(batch, n_k)
        q, k, v = _flat(q), _flat(k), _flat(v)
    if cuts is not None:
        cuts = _chunked(cuts, chunk) if chunk > 0 else cuts
    options: dict[str, Any] = {
        **{"causal": scores.causal, "softcap": max(float(scores.softcap), 0.0), "scale": scale},
        "deterministic": scores.deterministic,
    }
    moved = scores.signed and any(side is not None and side < 0 for side in window)
    if moved or scores.slopes is not None:
        if not moved:
            options["window"] = limits(window)
            scores = scores._replace(window=(None, None))
        out, lse = _by_functions(q, k, v, scores, cuts, options)
    else:
        if cuts is not None:
            options |= {"cu_seqlens_q": cuts[0], "cu_seqlens_k": cuts[1]}
        options |= {"window": limits(window), "sinks": scores.sinks, "return_lse": True}
        out, lse = attention(q, k, v, **options)
    if packed:
        out, lse = (x[0].unflatten(1, (batch, n_q)).transpose(0, 1) for x in (out, lse))
    return out, lse


def _chunked(cuts: Cuts, chunk: int) -> Cuts:
    """Cut each sequence at the positions that are multiples of `chunk`.

    In each piece, query i still has the position of key ``i + n_k - n_q``, so masks do not change.
    Pieces may have no queries or no keys.
    """
    of_q, of_k = [0], [0]
    for (a, b), (c, d) in zip(pairwise(cuts[0]), pairwise(cuts[1]), strict=True):
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
    return (tuple(of_q), tuple(of_k)) if len(of_q) > 1 else ((0, 0), (0, 0))


def _widened(
    q: Tensor, k: Tensor, v: Tensor, descales: tuple[Tensor | None, ...], cuts: Cuts | None
) -> tuple[Tensor, ...]:
    """Return FP8 inputs as bfloat16, multiplied by the descales, and any other inputs unchanged."""
    if q.dtype not in FP8:
        if any(x is not None for x in descales):
            raise DTypeError(
                f"q_descale, k_descale and v_descale are for FP8 inputs, got {q.dtype}"
            )
        return q, k, v
    wide = []
    for x, scale, of in zip((q, k, v), descales or (None,) * 3, (0, 1, 1), strict=True):
        y = x.float()
        if scale is not None:  # (batch, heads_k)
            each = scale.float().repeat_interleave(x.shape[1] // scale.shape[1], 1)
            if cuts is None:
                each = each[:, :, None]
            else:
                sizes = torch.tensor([b - a for a, b in pairwise(cuts[of])], device=x.device)
                each = each.repeat_interleave(sizes, 0).T[None]
            y = y * each[..., None]
        wide.append(y.to(torch.bfloat16))
    return tuple(wide)


@torch.compiler.disable
def _by_functions(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreOptions,
    cuts: Cuts | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Compute attention with ALiBi as a score function and a signed window as a mask function.

    Sequences are computed one by one if slopes or diagonals (``n_k - n_q``) differ between them.
    """
    slopes = scores.slopes
    q, k, v = taken(q=q, k=k, v=v)
    batch, heads = q.shape[:2]
    sequences = batch if cuts is None else len(cuts[0]) - 1
    if slopes is not None and slopes.shape not in ((heads,), (sequences, heads)):
        raise ShapeError(
            f"alibi_slopes must have one slope per head, of shape ({heads},), or one per sequence "
            f"and head, of shape ({sequences}, {heads}), got {tuple(slopes.shape)}"
        )
    if scores.sinks is not None:
        check_sinks(scores.sinks, q)
    if cuts is None:
        return _functions_of((q, k, v), scores, k.shape[2] - q.shape[2], options)
    spans = [(*of_q, *of_k) for of_q, of_k in zip(*map(pairwise, cuts), strict=True)]
    starts = {(d - c) - (b - a) for a, b, c, d in spans}
    if len(starts) == 1 and (slopes is None or slopes.ndim == 1):
        options = {**options, "cu_seqlens_q": cuts[0], "cu_seqlens_k": cuts[1]}
        return _functions_of((q, k, v), scores, starts.pop(), options)
    results = []
    for n, (a, b, c, d) in enumerate(spans):
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[n]
        rows = q[:, :, a:b], k[:, :, c:d], v[:, :, c:d]
        each = scores._replace(slopes=own)
        results.append(_functions_of(rows, each, (d - c) - (b - a), options))
    return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 2)


def _functions_of(
    qkv: Tensors, scores: ScoreOptions, start: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Compute attention with ALiBi and a signed window, if all diagonals start at key `start`."""
    q, slopes, mask = qkv[0], scores.slopes, None
    if tuple(scores.window) != (None, None):
        mask = MaskFunction.of(_signed_window(scores.window, _start_array(start, q)))
    given = {"mask": mask, "sinks": scores.sinks, "backend": default_backend(q), **options}
    attend_by = partial(with_functions, qkv, **given)
    if slopes is None:
        return attend_by(score_mod=None)
    slopes = slopes.detach().float()
    near = abs(start) <= (_NEAR if q.element_size() == 2 else 0)
    if not (scores.causal and near) or scores.sinks is not None:
        return attend_by(score_mod=_alibi(slopes, _start_array(start, q)))
    # No key that a query sees lies after it. Without `start`, all scores of a row are larger by the
    # same number: the output does not change, and the GPU's kernels add this form without a load.
    # Large scores round more coarsely, so `start` must be small.
    out, lse = attend_by(score_mod=_falling(slopes))
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
    of: tuple[int, ...], used: Sequence[int] | None, device: torch.device
) -> tuple[Tensor | None, tuple[int, ...]]:
    """Return the indices of rows in use (None: all rows), and sequence offsets among these rows."""
    if used is None:
        return None, of
    rows = [torch.arange(a, a + n, device=device) for a, n in zip(of, used, strict=False)]
    return torch.cat(rows), tuple(accumulate(used, initial=0))


def _used(name: str, given: Tensor | None, of: tuple[int, ...]) -> list[int] | None:
    if given is None:
        return None
    used = integers_of(name, given)
    if len(used) != len(of) - 1 or any(
        not 0 <= n <= b - a for n, (a, b) in zip(used, pairwise(of), strict=True)
    ):
        raise ShapeError(
            f"{name} must be {len(of) - 1} lengths, each at most the length of its sequence, got "
            f"{used}"
        )
    return used


def integers_of(name: str, given: Tensor) -> list[int]:
    """Return a tensor's integers; raise ShapeError unless it is a 1-D tensor of integers."""
    if given.ndim != 1 or given.is_floating_point():
        raise ShapeError(
            f"{name} must be a 1-D tensor of integers, got {given.dtype} of shape "
            f"{tuple(given.shape)}"
        )
    return given.tolist()


def offsets_of(name: str, given: Any) -> tuple[int, ...]:
    """Return cumulative sequence lengths as integers; raise ShapeError if they decrease."""
    values = integers_of(name, given) if isinstance(given, Tensor) else list(given)
    if not values or values[0] != 0 or any(b < a for a, b in pairwise(values)):
        raise ShapeError(f"{name} must begin at 0 and not decrease, got {values[:8]}")
    return tuple(values)


def even_offsets(batch: int, n: int) -> tuple[int, ...]:
    """Return the offsets of `batch` sequences of `n` rows each."""
    return tuple(n * b for b in range(batch + 1))


def check_axes(name: str, x: Any, axes: str = "(batch, n, heads, head_dim)") -> None:
    """Raise ShapeError unless `x` is a tensor with these axes."""
    if not isinstance(x, Tensor) or x.ndim != axes.count(",") + 1:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"{name} must be a tensor {axes}, got {found}")


def unpacked(name: str, x: Tensor, rows: str = "batch, n") -> tuple[Tensor, ...]:
    """Return q, k and v, or k and v, as views of one tensor; its name is theirs together."""
    axes = f"({rows}, {len(name)}, heads, head_dim)"
    if x.ndim != axes.count(",") + 1 or x.shape[-3] != len(name):
        raise ShapeError(f"{name} must be {axes}, got {tuple(x.shape)}")
    return x.unbind(-3)


def sides(window: Window) -> tuple[int | None, int | None]:
    """Return the two entries of window_size; raise ShapeError for another number of entries."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ShapeError(f"window_size must be a pair (left, right), got {shown(window)}") from None
    return left, right


def limits(window: Window) -> tuple[int, int] | None:
    """Return a window as `flashsim.torch.decode` takes it; None for no limit on either side."""
    left, right = sides(window)
    left = -1 if left is None or left < 0 else int(left)
    right = -1 if right is None or right < 0 else int(right)
    return None if left == right == -1 else (left, right)


def no_dropout(p: float) -> None:
    """Raise UnsupportedError if the dropout probability `p` is not 0."""
    if p:
        raise UnsupportedError(f"flashsim's attention has no dropout, got dropout_p={p}; pass 0.0")


def _flat(x: Tensor) -> Tensor:
    """Return a batch, (batch, heads, n, d), as one sequence, (1, heads, batch * n, d)."""
    return x.transpose(0, 1).flatten(1, 2)[None]
