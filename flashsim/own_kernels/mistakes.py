"""Computes attention with known mistakes, to find the mistake that explains a kernel's results.

Each variant computes float64 attention with one mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from flashsim.problem.oracle import keep_matrix
from flashsim.problem.problem import Problem

#: Arrays by the papers' names: Q (heads, n_q, d), K, V, L (heads, n_q), ...
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Way:
    """Settings for computing attention; any value except the default is a known mistake.

    Attributes
    ----------
    factor : the scores are multiplied by scale times `factor`
    shift : a causal mask keeps key k if k <= q + offset + shift; None means no mask at all
    top_left : align the causal mask at the top left corner instead of the bottom right one
    rescale_o, rescale_l : multiply the running O, or the running l, by exp(m_old - m_new)
    divide : O is divided by l at the "end", "never", in "each" iteration, or "both" (end and each)
    exp2 : apply exp2 to scores that are not multiplied by log2(e)
    padded : count keys past the end, which fill up the last tile, with a score of 0
    skip_last : leave out the last key tile: "tile" always, "rest" only if the tile is not full
    skip_first : leave out the first key tile
    step : key tile j begins at key j instead of at j times the tile's size
    one_head : query head h uses KV head 0 ("first"), h % kv_heads ("modulo") or h // group ("")
    axis : axis of the softmax; the right axis is -1, the keys
    lse : value stored as the LSE, one of "e" (base e, right), "2", "m", "l", "no m", "log2", or
        m converted from base 2 to base e ("m ln2") or from e to 2 ("m log2"), plus log(l)
    rows : rows per program if the loop over keys ends at the program's diagonal; 0 for all keys
    early : the loop over keys ends before the program's diagonal tile
    """

    factor: float = 1.0
    shift: int | None = 0
    top_left: bool = False
    rescale_o: bool = True
    rescale_l: bool = True
    divide: str = "end"
    exp2: bool = False
    padded: bool = False
    skip_last: str = ""
    skip_first: bool = False
    step: bool = False
    one_head: str = ""
    axis: int = -1
    lse: str = "e"
    rows: int = 0
    early: bool = False


def forward(p: Problem, x: Arrays, way: Way, block_k: int) -> dict[str, np.ndarray]:
    """Compute attention with the settings `way`; return O (heads, n_q, d_v) and L (heads, n_q).

    A row that sees no key is NaN in both results.
    """
    heads = p.batch * p.heads
    out = np.zeros((heads, p.n_q, p.head_dim_v))
    lse = np.zeros((heads, p.n_q))
    keep = _kept(p, way)
    if way.rows:
        tile = np.arange(p.n_q) // way.rows + (not way.early)
        ends = tile * way.rows + p.n_kv - p.n_q
        keep = keep & (np.arange(p.n_kv) < -(-ends // block_k)[:, None] * block_k)
    for head in range(heads):
        key = _key_head(p, head, way)
        out[head], lse[head] = _one(p, x["Q"][head], x["K"][key], x["V"][key], keep, way, block_k)
    out[:, ~keep.any(axis=1)] = lse[:, ~keep.any(axis=1)] = np.nan
    return {"O": out, "L": lse}


def _key_head(p: Problem, head: int, way: Way) -> int:
    b, h = divmod(head, p.heads)
    if way.one_head == "first":
        return 0
    if way.one_head == "modulo":
        return b * p.kv_heads + h % p.kv_heads
    return b * p.kv_heads + h // p.group


def _kept(p: Problem, way: Way) -> np.ndarray:
    if not p.causal or (way.shift == 0 and not way.top_left):
        return keep_matrix(p)
    if way.shift is None:
        return np.ones((p.n_q, p.n_kv), bool)
    offset = (0 if way.top_left else p.n_kv - p.n_q) + way.shift
    return np.arange(p.n_kv)[None, :] <= np.arange(p.n_q)[:, None] + offset


def _one(
    p: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray, keep: np.ndarray, way: Way, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute O and L of one head as FlashAttention-2 does, by updating m, l and O at each tile."""
    s = np.where(keep, q @ k.T * (p.scale * way.factor), -np.inf)
    if way.axis == 0:
        e = np.exp(s - s.max(axis=0, keepdims=True))
        return e / e.sum(axis=0, keepdims=True) @ v, np.log(np.exp(s).sum(axis=1))
    n = p.n_kv
    if way.padded:
        more = -n % block
        s = np.concatenate([s, np.zeros((p.n_q, more))], axis=1)
        v = np.concatenate([v, np.zeros((more, v.shape[1]))])
        n += more
    starts = list(range(0, n, block))
    if way.step:
        starts = list(range(len(starts)))
    if way.skip_first:
        starts = starts[1:]
    if way.skip_last == "tile" or (way.skip_last == "rest" and n % block):
        starts = starts[:-1]
    power = np.exp2 if way.exp2 else np.exp
    m, l = np.full(p.n_q, -np.inf), np.zeros(p.n_q)
    out = np.zeros((p.n_q, v.shape[1]))
    for first in starts:
        tile = s[:, first : first + block]
        m_new = np.maximum(m, tile.max(axis=1, initial=-np.inf))
        base = np.where(np.isneginf(m_new), 0, m_new)
        e, alpha = power(tile - base[:, None]), power(m - base)
        l = (alpha if way.rescale_l else 1) * l + e.sum(axis=1)
        out = (alpha[:, None] if way.rescale_o else 1) * out + e @ v[first : first + block]
        if way.divide in ("each", "both"):
            out = out / np.where(l == 0, 1, l)[:, None]
        m = m_new
    if way.divide in ("end", "both"):
        out = out / np.where(l == 0, 1, l)[:, None]
    safe = np.where(l <= 0, 1, l)
    lse = {
        "e": m + np.log(safe),
        "2": m * np.log2(np.e) + np.log2(safe),
        "m": m,
        "l": l,
        "no m": np.log(safe),
        "log2": m + np.log2(safe),
        "m ln2": m * np.log(2) + np.log(safe),
        "m log2": m * np.log2(np.e) + np.log(safe),
    }[way.lse]
    out[l == 0] = lse[l == 0] = np.nan  # rows that saw no key: kernels differ there
    return out, lse


@dataclass(frozen=True)
class Back:
    """Settings for computing gradients; any value except the default is a known mistake.

    Attributes
    ----------
    dq, dk : additional factors on dQ and dK
    delta : subtract delta from dP
    mask : the causal mask's shift, as in `Way.shift`
    base2 : use L as if it were in base 2
    whole_group : sum dK and dV over the query heads of a group
    last_tile : dQ has only the contribution of the last key tile
    p : multiply dP - delta by P to get dS
    """

    dq: float = 1.0
    dk: float = 1.0
    delta: bool = True
    mask: int | None = 0
    base2: bool = False
    whole_group: bool = True
    last_tile: bool = False
    p: bool = True


def backward(p: Problem, x: Arrays, way: Back, block_k: int) -> dict[str, np.ndarray]:
    """Return dQ, dK, dV and delta, computed from Q, K, V, dO and, if passed, O, L and delta."""
    heads = p.batch * p.heads
    dq = np.zeros((heads, p.n_q, p.head_dim))
    dk = np.zeros((p.batch * p.kv_heads, p.n_kv, p.head_dim))
    dv = np.zeros((p.batch * p.kv_heads, p.n_kv, p.head_dim_v))
    delta = np.zeros((heads, p.n_q))
    keep = _kept(p, Way(shift=way.mask))
    for head in range(heads):
        key = _key_head(p, head, Way())
        q, k, v, do = x["Q"][head], x["K"][key], x["V"][key], x["dO"][head]
        s = np.where(keep, q @ k.T * p.scale, -np.inf)
        lse = np.log(np.exp(s - s.max(1, keepdims=True)).sum(1)) + s.max(1)
        lse = np.asarray(x["L"][head], np.float64) if "L" in x else lse
        weights = (np.exp2 if way.base2 else np.exp)(s - lse[:, None])
        dp = do @ v.T
        own = (weights * dp).sum(axis=1)
        if "O" in x:
            own = (do * x["O"][head]).sum(axis=1)
        delta[head] = own
        used = np.asarray(x["delta"][head], np.float64) if "delta" in x else own
        ds = (weights if way.p else 1) * (dp - (used[:, None] if way.delta else 0))
        ds = np.where(keep, ds, 0)
        part = slice((p.n_kv - 1) // block_k * block_k if way.last_tile else 0, p.n_kv)
        dq[head] = way.dq * p.scale * (ds[:, part] @ k[part])
        more_k, more_v = way.dk * p.scale * (ds.T @ q), weights.T @ do
        if way.whole_group:
            dk[key] += more_k
            dv[key] += more_v
        else:
            dk[key], dv[key] = more_k, more_v
    return {"dQ": dq, "dK": dk, "dV": dv, "delta": delta}


Made = Callable[[], dict[str, np.ndarray]]


def known(
    p: Problem, x: Arrays, block_q: int, block_k: int, scale: float | None = None
) -> Iterator[tuple[str, Made]]:
    """Yield a description of each known mistake, and a function that computes the wrong results.

    `scale` is the kernel's softmax scale, or None for the problem's scale.
    """
    if scale is not None:
        text = f"the scores are multiplied by {scale:.6g}; the scale is {p.scale:.6g}"
        yield text, lambda: forward(replace(p, scale=scale), x, Way(), block_k)
    for text, way in _forward_mistakes(p, block_q, block_k):
        yield text, lambda way=way: forward(p, x, way, block_k)  # type: ignore[misc]
    if "dO" in x:
        for text, back in _backward_mistakes(p):
            yield text, lambda back=back: backward(p, x, back, block_k)  # type: ignore[misc]


def _forward_mistakes(p: Problem, block_q: int, block_k: int) -> Iterator[tuple[str, Way]]:
    grows = "not multiplied by exp(m_old - m_new) when the running maximum grows"
    yield f"O is {grows}", Way(rescale_o=False)
    yield f"l is {grows}", Way(rescale_l=False)
    neither = grows.removeprefix("not ")
    yield f"neither O nor l is {neither}", Way(rescale_o=False, rescale_l=False)
    yield "O is not divided by l at the end", Way(divide="never")
    yield "O is divided by l in every iteration, not once at the end", Way(divide="each")
    yield "O is divided by l in every iteration, and once more at the end", Way(divide="both")
    yield "the scores are not multiplied by the scale", Way(factor=1 / p.scale)
    twice = "the scores are multiplied by the scale twice (by 1 / d instead of 1 / sqrt(d))"
    yield twice, Way(factor=p.scale)
    root = np.sqrt(p.head_dim)
    yield (
        "the scores are multiplied by sqrt(d) instead of divided by it",
        Way(factor=root / p.scale),
    )
    for lse in ("e", "log2", "m ln2"):
        base_2 = "exp2 is taken of scores that were not multiplied by log2(e)"
        yield base_2, Way(exp2=True, lse=lse)
    log2_e = float(np.log2(np.e))
    yield "exp is taken of scores that were multiplied by log2(e) for exp2", Way(factor=log2_e)
    if p.causal:
        shifted = "the causal mask is shifted by one: a query"
        yield f"{shifted} does not see its own key (> instead of >=)", Way(shift=-1)
        early = "(i + 1) * BLOCK rows see keys, not i * BLOCK"
        ends = f"the loop over keys ends before the diagonal: {early}"
        yield ends, Way(rows=block_q, early=True)
        for rows in (0, block_q):
            yield f"{shifted} also sees the next key", Way(shift=1, rows=rows)
            yield "there is no causal mask", Way(shift=None, rows=rows)
            if p.n_q != p.n_kv:
                yield (
                    "the causal mask is aligned at the top left corner instead of the bottom right "
                    "one (k <= q + n_kv - n_q)",
                    Way(top_left=True, rows=rows),
                )
    yield "the LSE is in base 2, not in base e", Way(lse="2")
    yield "the LSE is m + log2(l) instead of m + log(l)", Way(lse="log2")
    base = "the LSE is m + log(l), but m is in base 2: multiply m by log(2)"
    yield base, Way(lse="m log2")
    yield "the LSE is m alone, without log(l)", Way(lse="m")
    yield "the LSE is log(l) alone, without m", Way(lse="no m")
    yield "the LSE is l itself", Way(lse="l")
    if p.n_kv % block_k:
        padded = "the padded keys of the last tile are not masked: each counts with a score of 0"
        yield padded, Way(padded=True)
        rest = "the last key tile, which is not whole, is left out (the loop has n // BLOCK tiles)"
        yield rest, Way(skip_last="rest")
    if p.n_kv > block_k:
        yield "the last key tile is left out", Way(skip_last="tile")
        yield "the first key tile is left out", Way(skip_first=True)
        step = "key tile j begins at key j: its index is not multiplied by the tile's size"
        yield step, Way(step=True)
    if p.batch * p.kv_heads > 1:
        yield "all heads read K and V of the first head", Way(one_head="first")
    if p.group > 1:
        modulo = "query head h reads KV head h % kv_heads instead of h // group"
        yield modulo, Way(one_head="modulo")
    yield "the softmax is over the queries, not over the keys", Way(axis=0)


def _backward_mistakes(p: Problem) -> Iterator[tuple[str, Back]]:
    more = 1 / p.scale
    yield "dQ is not multiplied by the scale", Back(dq=more)
    yield "dK is not multiplied by the scale", Back(dk=more)
    yield "neither dQ nor dK is multiplied by the scale", Back(dq=more, dk=more)
    yield "delta is not subtracted from dP", Back(delta=False)
    yield "dS lacks its factor P", Back(p=False)
    yield "P is recomputed with exp2 from an LSE in base e", Back(base2=True)
    last = "each tile overwrites it instead of adding"
    yield f"dQ has only the last key tile's contribution: {last}", Back(last_tile=True)
    if p.causal:
        yield "the backward pass has no causal mask", Back(mask=None)
        yield "the backward pass's causal mask is shifted by one", Back(mask=-1)
    if p.group > 1:
        group = "those of the group's last query head instead of sums over the group"
        yield f"dK and dV are {group}", Back(whole_group=False)
