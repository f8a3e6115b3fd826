"""Random problems, an oracle and a counter of transfers of their own; nothing shared with flashsim.

`draw(rng)` makes a `Case`, plain values that print as code; `check(case)` runs it and raises
`AssertionError` unless results are right by flash-attention's rule (error at most twice plain
attention's, plus one rounding) and the bytes and products of trace and closed form are those
counted here, a tile at a time. `mutate(rng)` spoils a good case: it must raise a `FlashSimError`.

Only flashsim's public names are used. Conventions are written from docs/reference/model.md.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

import flashsim

ALGORITHMS = {
    "numpy": ("standard", "flash1", "flash2", "flash2-fused"),
    "numba": ("flash2", "flash2-fused"),
}
LENGTHS = (1, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 19, 23, 31, 32, 33, 41, 53, 64)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 24, 31, 32, 40)
SIDES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 29, 32, 64, 100)
#: Most score tiles of one head: what a case may cost.
VISITS = 60
MASKS: dict[str, Callable[[Any, Any], Any]] = {
    "stripes": lambda q, k: (q - k) % 3 != 1,
    "prefix": lambda q, k: (k < 5) | (k <= q),
    "odd rows": lambda q, k: (q % 2 == 1) & (k >= 0),
    "nothing": lambda q, k: (q < 0) & (k < 0),
}


@dataclass(frozen=True)
class Case:
    """One call of `run` and `backward`. Values are plain, so that a case prints as code."""

    seed: int
    kind: str = "normal"  # how the inputs are drawn
    layout: str = "plain"  # how they lie in memory
    backend: str = "numpy"
    algorithm: str = "flash2"
    deterministic: bool | None = None
    dtype: str = "float32"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    n_q: int = 8
    n_kv: int = 8
    d: int = 8
    dv: int = 8
    ndim: int = 4
    causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    scale: float | None = None
    key_order: str = "ascending"
    cu_q: tuple[int, ...] | None = None
    cu_k: tuple[int, ...] | None = None
    bias: tuple[int, int] | None = None
    bias_inf: float = 0.0  # the share of -inf in the bias
    mask: str | None = None
    block: tuple[int, int, float] | None = None  # cell of the block mask and share kept
    tiling: tuple[int, int] | None = None
    tiling_backward: tuple[int, int] | None = None
    threads: int | None = None
    micro_kernel: str | None = None

    @property
    def longest(self) -> tuple[int, int]:
        """Queries and keys of the longest packed sequences."""
        queries, keys = _sequences(self)
        return max(stop - start for start, stop in queries), max(b - a for a, b in keys)


def draw(rng: np.random.Generator, backend: str | None = None) -> Case:
    """A valid case."""
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    backend = backend or pick(*ALGORITHMS)
    n_q, n_kv = int(pick(*LENGTHS)), int(pick(*LENGTHS))
    kv_heads = pick(1, 1, 2, 3)
    heads, batch = kv_heads * pick(1, 1, 2, 3), pick(1, 1, 2, 3)
    algorithm = pick(*ALGORITHMS[backend])
    case = Case(
        seed=int(rng.integers(2**31)),
        kind=pick("normal", "rising", "falling", "heavy", "zero"),
        layout=pick("plain", "plain", "sliced", "heads inside", "read-only"),
        backend=backend,
        algorithm=algorithm,
        deterministic=pick(None, True, False) if algorithm.startswith("flash2") else None,
        dtype=pick("float32", "float32", "float64", "float16", "bfloat16"),
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        n_q=n_q,
        n_kv=n_kv,
        d=int(pick(*WIDTHS)),
        dv=int(pick(*WIDTHS)),
        ndim=4 if batch > 1 else 3 if heads > 1 else pick(2, 3, 4),
        causal=pick(False, True),
        window=pick(None, None, (int(rng.integers(-1, n_kv)), int(rng.integers(-1, n_kv)))),
        softcap=pick(0.0, 0.0, 0.7, 5.0, 50.0),
        scale=pick(None, None, None, 0.3, -0.5, 0.0),
        key_order=pick("ascending", "ascending", "descending"),
        bias=pick(None, None, (pick(1, batch), pick(1, heads))),
        bias_inf=pick(0.0, 0.2, 0.9, 1.0),
        mask=pick(None, None, None, *MASKS),
        threads=pick(1, 2, 3) if backend == "numba" else None,
    )
    if batch == 1 and rng.random() < 0.25:
        sequences = int(rng.integers(1, 5))
        case = replace(case, cu_q=_cuts(rng, n_q, sequences), cu_k=_cuts(rng, n_kv, sequences))
    if rng.random() < 0.2:
        case = replace(case, block=(pick(1, 3, 4, 7, 16), pick(1, 2, 5, 16), pick(0.0, 0.5, 0.9)))
        if case.cu_q is not None and not (case.longest[0] and case.longest[1]):
            case = replace(case, block=None)  # a grid of no cells is refused
    forward, backward = _tile(rng, case), _tile(rng, case)
    return replace(case, tiling=pick(None, *(forward,) * 4), tiling_backward=backward)


def _cuts(rng, total: int, sequences: int) -> tuple[int, ...]:
    inner = np.sort(rng.integers(0, total + 1, sequences - 1))
    return (0, *map(int, inner), total)


def _tile(rng, case: Case) -> tuple[int, int]:
    while True:
        q, k = (int(SIDES[rng.integers(len(SIDES))]) for _ in range(2))
        if -(-case.n_q // q) * -(-case.n_kv // k) <= VISITS:
            return q, k


# -- arrays -------------------------------------------------------------------------------------


def _dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def arrays(case: Case) -> dict[str, np.ndarray]:
    """q, k, v, dout and bias, 4-D, in the case's type."""
    rng = np.random.default_rng(case.seed)
    c = case
    shapes = {
        "q": (c.batch, c.heads, c.n_q, c.d),
        "k": (c.batch, c.kv_heads, c.n_kv, c.d),
        "v": (c.batch, c.kv_heads, c.n_kv, c.dv),
        "dout": (c.batch, c.heads, c.n_q, c.dv),
    }
    x = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if c.kind == "heavy":
        for a in x.values():
            a[rng.random(a.shape) < 0.02] *= 8
    elif c.kind == "zero":
        x["q"][:] = 0
    elif c.kind != "normal":  # scores climb (fall) along the keys: the running maximum moves
        ramp = np.linspace(-20, 20, c.n_kv) if c.n_kv > 1 else np.zeros(1)
        direction = np.full(c.d, c.d**-0.5)
        x["q"] = 0.1 * x["q"] + direction
        x["k"] += c.d**0.5 * (ramp if c.kind == "rising" else ramp[::-1])[:, None] * direction
    if c.bias is not None:
        x["bias"] = rng.standard_normal((*c.bias, c.n_q, c.n_kv)) * 2
        x["bias"][rng.random(x["bias"].shape) < c.bias_inf] = -np.inf
    return {name: a.astype(_dtype(c.dtype)) for name, a in x.items()}


def _laid(a: np.ndarray, layout: str) -> np.ndarray:
    """The same values, lying otherwise in memory."""
    if layout == "sliced":  # rows apart from each other, not on a boundary of their own
        wide = np.zeros((*a.shape[:-1], a.shape[-1] + 3), a.dtype)
        wide[..., 1 : a.shape[-1] + 1] = a
        return wide[..., 1 : a.shape[-1] + 1]
    if layout == "heads inside":  # (batch, n, heads, d) in memory
        return np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)
    if layout == "read-only":
        a = a.copy()
        a.setflags(write=False)
    return a


# -- which scores count -------------------------------------------------------------------------


def _sequences(case: Case) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Start and stop of each packed sequence's queries, and of its keys."""
    q, k = case.cu_q or (0, case.n_q), case.cu_k or (0, case.n_kv)
    return list(pairwise(q)), list(pairwise(k))


def block_grid(case: Case) -> np.ndarray:
    """The block mask's grid."""
    assert case.block is not None
    (q, k, share), rng = case.block, np.random.default_rng(case.seed + 1)
    rows, cols = case.longest
    return rng.random((-(-rows // q), -(-cols // k))) < share


def kept(case: Case) -> np.ndarray:
    """Boolean (n_q, n_kv): which scores count."""
    result = np.zeros((case.n_q, case.n_kv), bool)
    for (q0, q1), (k0, k1) in zip(*_sequences(case), strict=True):
        q, k = np.arange(q1 - q0)[:, None], np.arange(k1 - k0)[None, :]
        diagonal = q + (k1 - k0) - (q1 - q0)
        keep = np.ones((q1 - q0, k1 - k0), bool)
        if case.causal:
            keep &= k <= diagonal
        if case.window is not None:
            left, right = case.window
            keep &= (k >= diagonal - left) if left >= 0 else True
            keep &= (k <= diagonal + right) if right >= 0 else True
        if case.block is not None and keep.size:
            keep &= block_grid(case)[q // case.block[0], k // case.block[1]]
        if case.mask is not None:
            keep &= MASKS[case.mask](q, k)
        result[q0:q1, k0:k1] = keep
    return result


# -- the oracle ---------------------------------------------------------------------------------

Round = Callable[[np.ndarray], np.ndarray]


def attention(case: Case, x: dict[str, np.ndarray], work: Any, rounded: Round, in_order=False):
    """Attention and its gradients on whole matrices of type `work`; `rounded` follows each step."""
    times = _in_order if in_order else np.matmul
    q, k, v, dout = (x[name].astype(work) for name in ("q", "k", "v", "dout"))
    group = case.heads // case.kv_heads
    k, v = (np.repeat(a, group, axis=1) for a in (k, v))
    scale = work(case.d**-0.5 if case.scale is None else case.scale)
    s = rounded(times(q, k.mT) * scale)
    slope = np.ones_like(s)
    if case.softcap:
        t = np.tanh(s / work(case.softcap))
        s, slope = rounded(t * work(case.softcap)), 1 - t * t
    if "bias" in x:
        s = rounded(s + x["bias"].astype(work))
    s = np.where(kept(case), s, work(-np.inf))
    top = s.max(axis=-1, keepdims=True)
    top = np.where(np.isneginf(top), work(0), top)
    e = np.exp(s - top)
    total = e.sum(axis=-1, keepdims=True)
    safe = np.where(total == 0, work(1), total)
    p = rounded(e / safe)
    lse = np.where(total == 0, work(-np.inf), top + np.log(safe))[..., 0]
    dp = rounded(times(dout, v.mT))
    ds = rounded(p * (dp - (p * dp).sum(axis=-1, keepdims=True)))
    inner = rounded(ds * slope) * scale
    fold = lambda a: a.reshape(case.batch, case.kv_heads, group, *a.shape[2:]).sum(axis=2)  # noqa: E731
    result = {
        "out": rounded(times(p, v)),
        "lse": lse,
        "dq": rounded(times(inner, k)),
        "dk": rounded(fold(times(inner.mT, q))),
        "dv": rounded(fold(times(p.mT, dout))),
    }
    if "bias" in x:
        assert case.bias is not None
        shared = tuple(axis for axis in (0, 1) if case.bias[axis] == 1)
        result["dbias"] = ds.sum(axis=shared, keepdims=True)
    return result


def _in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., i, None] * b[..., i, None, :]
    return total


def _sizes(case: Case, x: dict[str, np.ndarray]) -> dict[str, float]:
    """For each result, the largest sum of the absolute values of the terms it adds up."""
    big = {name: np.abs(a.astype(np.float64)) for name, a in x.items()}
    group = case.heads // case.kv_heads
    k, v = (np.repeat(big[name], group, axis=1) for name in ("k", "v"))
    scale = abs(case.d**-0.5 if case.scale is None else case.scale)
    p = np.zeros((case.batch, case.heads, case.n_q, case.n_kv))
    p[:] = kept(case)
    p = np.where(p, attention_weights(case, x), 0)
    scores = float((scale * big["q"] @ k.mT).max())
    if "bias" in x:
        scores += float(np.where(np.isinf(big["bias"]), 0, big["bias"]).max())
    dp = big["dout"] @ v.mT
    ds = p * (dp + (p * dp).sum(axis=-1, keepdims=True))
    fold = lambda a: a.reshape(case.batch, case.kv_heads, group, *a.shape[2:]).sum(axis=2)  # noqa: E731
    # P is exp(S - m), and in a backward pass exp(S - LSE), with S summed up once more: roundings
    # of S, of its twin and of LSE move all of P.
    moved, again = 1 + scores, 1 + 3 * scores
    sizes = {
        "out": (p @ v).max() * moved,
        "lse": moved,
        "dq": scale * (ds @ k).max() * again,
        "dk": scale * fold(ds.mT @ big["q"]).max() * again,
        "dv": fold(p.mT @ big["dout"]).max() * again,
        "dbias": ds.sum(axis=(0, 1)).max() * again,
    }
    return {name: float(size) for name, size in sizes.items()}


def attention_weights(case: Case, x: dict[str, np.ndarray]) -> np.ndarray:
    """P in float64."""
    q, k = x["q"].astype(np.float64), x["k"].astype(np.float64)
    k = np.repeat(k, case.heads // case.kv_heads, axis=1)
    s = q @ k.mT * (case.d**-0.5 if case.scale is None else case.scale)
    if case.softcap:
        s = case.softcap * np.tanh(s / case.softcap)
    if "bias" in x:
        s = s + x["bias"].astype(np.float64)
    s = np.where(kept(case), s, -np.inf)
    top = s.max(axis=-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def _judged(case: Case, x: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The true results, and the error that each may have."""
    kind = _dtype(case.dtype)
    exact = attention(case, x, np.longdouble if case.dtype == "float64" else np.float64, _as_is)
    if case.dtype in ("float16", "bfloat16"):
        eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[case.dtype]
        narrow = lambda a: a.astype(kind).astype(np.float32)  # noqa: E731
        rough = [attention(case, x, np.float32, narrow)]
    else:
        eps = float(np.finfo(kind).eps)
        rough = [attention(case, x, kind.type, _as_is, in_order) for in_order in (False, True)]
    inner = float(np.finfo(np.float64 if case.dtype == "float64" else np.float32).eps)
    sizes, may = _sizes(case, x), {}
    for name, true in exact.items():
        error = max(_error(one[name], true) for one in rough)
        one = 1.0 if name == "lse" else eps / inner  # LSE is kept in the accumulator's type
        largest = float(np.abs(_finite(true)).max(initial=0))
        may[name] = 2 * error + inner * (sizes[name] + one * largest)
    return exact, may


def _as_is(a: np.ndarray) -> np.ndarray:
    return a


def _finite(a: np.ndarray) -> np.ndarray:
    return np.where(np.isneginf(a), 0, a)


def _error(value: np.ndarray, true: np.ndarray) -> float:
    """Largest difference; infinite where one is -inf or NaN and the other is not."""
    value = np.asarray(value).astype(true.dtype)
    if not np.array_equal(np.isneginf(value), np.isneginf(true)):
        return np.inf
    error = float(np.abs(_finite(value) - _finite(true)).max(initial=0))
    return np.inf if np.isnan(error) else error


# -- the counter --------------------------------------------------------------------------------

Moves = Counter


def count(case: Case, tiling: Any, direction: str, algorithm: str) -> tuple[Moves, int]:
    """Bytes by (op, tensor) over all heads, and FLOPs of matrix products, a tile at a time."""
    e = {"float64": 8, "float32": 4}.get(case.dtype, 2)
    a, d, dv = max(e, 4), case.d, case.dv
    acc = "_acc" if e < a else ""
    heads, group = case.batch * case.heads, case.heads // case.kv_heads
    moved: Moves = Counter()

    def move(op: str, tensor: str, nbytes: int, times: int = heads) -> None:
        moved[op, tensor] += nbytes * times

    rows, cols, visits = _tiles(case, tiling, dense=algorithm == "standard")
    area = sum(r * c for r, c in visits)
    matrices = 0 if case.bias is None else case.bias[0] * case.bias[1]
    has_bias = case.bias is not None
    if direction == "forward":
        walk = _forward(case, algorithm, rows, cols, visits, e, a, acc)
        products = d + dv
    else:
        walk = _backward(case, algorithm, rows, cols, visits, e, a, acc)
        products = {"standard": 2 * d + 2 * dv, "flash2": 4 * d + 3 * dv}.get(
            algorithm, 3 * d + 2 * dv
        )
        if has_bias:
            move("store", f"dBias{acc}", case.n_q * case.n_kv * a, matrices)
            if acc:
                move("load", "dBias_acc", case.n_q * case.n_kv * a, matrices)
                move("store", "dBias", case.n_q * case.n_kv * e, matrices)
    for op, tensor, nbytes, shared in walk:
        move(op, tensor, nbytes, heads // group if shared else heads)
    return Counter({key: n for key, n in moved.items() if n}), 2 * area * products * heads


Move = tuple[str, str, int, bool]  # operation, tensor, bytes, once for the heads of a key head?


def _forward(case, algorithm, rows, cols, visits, e, a, acc) -> Iterator[Move]:
    d, dv, has_bias = case.d, case.dv, case.bias is not None
    for r, c in visits:
        if has_bias:
            yield "load", "bias", r * c * e, False
        if algorithm == "flash1":
            yield "load", "Q", r * d * e, False
            for op in ("load", "store"):
                yield op, f"O{acc}", r * dv * a, False
                yield op, "l", r * a, False
                yield op, "m", r * a, False
            continue
        yield "load", "K", c * d * e, False
        yield "load", "V", c * dv * e, False
        if algorithm == "standard":
            for tensor in "SP":
                yield "store", tensor, r * c * e, False
                yield "load", tensor, r * c * e, False
    for r in rows:
        if algorithm == "flash1":
            yield "store", f"O{acc}", r * dv * a, False
            yield "store", "l", r * a, False
            yield "store", "m", r * a, False
            if acc:
                yield "load", "O_acc", r * dv * a, False
                yield "store", "O", r * dv * e, False
            continue
        yield "load", "Q", r * d * e, False
        yield "store", "O", r * dv * e, False
        if algorithm != "standard":
            yield "store", "L", r * a, False
    if algorithm == "flash1":
        for c in cols:
            yield "load", "K", c * d * e, False
            yield "load", "V", c * dv * e, False


def _backward(case, algorithm, rows, cols, visits, e, a, acc) -> Iterator[Move]:
    d, dv, has_bias = case.d, case.dv, case.bias is not None
    for r, c in visits:
        if has_bias:
            yield "reduce", f"dBias{acc}", r * c * a, False
        if algorithm == "standard":
            for tensor in ("P", "P", "dP", "dS", "dS"):  # dv and ds; ds; dq and dk
                yield "load", tensor, r * c * e, False
            for tensor in ("dP", "dS"):
                yield "store", tensor, r * c * e, False
            if case.softcap:
                yield "load", "S", r * c * e, False
                if has_bias:
                    yield "load", "bias", r * c * e, False
            yield "load", "dO", r * dv * e, False
            yield "load", "Q", r * d * e, False
            yield "load", "V", c * dv * e, False
            yield "load", "K", c * d * e, False
            continue
        if has_bias:
            yield "load", "bias", r * c * e, False
        yield "load", "Q", r * d * e, False
        yield "load", "dO", r * dv * e, False
        if algorithm == "flash1":
            yield "load", "O", r * dv * e, False
            for op in ("load", "store"):
                yield op, f"dQ{acc}", r * d * a, False
        elif algorithm == "flash2-fused":
            yield "reduce", f"dQ{acc}", r * d * a, False
        else:  # the second walk, for dQ
            yield "load", "K", c * d * e, False
            yield "load", "V", c * dv * e, False
            if has_bias:
                yield "load", "bias", r * c * e, False
        for statistic in ("l", "m") if algorithm == "flash1" else ("L", "delta"):
            yield "load", statistic, r * a, False
    for r in rows:
        if algorithm == "standard":
            yield "load", "dO", r * dv * e, False
            yield "store", "dQ", r * d * e, False
            continue
        if algorithm != "flash1":
            yield "load", "O", r * dv * e, False
            yield "load", "dO", r * dv * e, False
            yield "store", "delta", r * a, False
        if algorithm == "flash2":
            yield "load", "Q", r * d * e, False
            yield "load", "dO", r * dv * e, False
            yield "load", "L", r * a, False
            yield "load", "delta", r * a, False
            yield "store", "dQ", r * d * e, False
            continue
        yield "store", f"dQ{acc}", r * d * a, False
        if acc:
            yield "load", "dQ_acc", r * d * a, False
            yield "store", "dQ", r * d * e, False
    for c in cols:
        if algorithm != "standard":
            yield "load", "K", c * d * e, True
            yield "load", "V", c * dv * e, True
        yield "store", "dK", c * d * e, True
        yield "store", "dV", c * dv * e, True


def _tiles(case: Case, tiling: Any, *, dense: bool):
    """Heights of row tiles, widths of column tiles, and (height, width) of each that is visited."""
    keep = kept(case)
    rows, cols, visits = [], [], []
    for (q0, q1), (k0, k1) in zip(*_sequences(case), strict=True):
        own = [(q, min(q + tiling.block_q, q1)) for q in range(q0, q1, tiling.block_q)]
        other = [(k, min(k + tiling.block_k, k1)) for k in range(k0, k1, tiling.block_k)]
        rows += [stop - start for start, stop in own]
        cols += [stop - start for start, stop in other]
        visits += [
            (b - a, d - c) for a, b in own for c, d in other if dense or keep[a:b, c:d].any()
        ]
    return rows, cols, visits


# -- running a case -----------------------------------------------------------------------------


def keywords(case: Case) -> dict[str, Any]:
    """What `run` is called with, besides the arrays."""
    options: dict[str, Any] = {
        name: getattr(case, name)
        for name in ("backend", "algorithm", "causal", "window", "softcap", "scale", "key_order")
    }
    if case.cu_q is not None:
        options |= {"cu_seqlens_q": case.cu_q, "cu_seqlens_k": case.cu_k}
    if case.block is not None:
        options["block_mask"] = flashsim.BlockMask(block_grid(case), *case.block[:2])
    if case.mask is not None:
        options["mask"] = MASKS[case.mask]
    if case.tiling is not None:
        options["tiling"] = flashsim.Tiling(*case.tiling)
    for name in ("threads", "micro_kernel"):
        if getattr(case, name) is not None:
            options[name] = getattr(case, name)
    return options


def check(case: Case) -> None:
    """Run forward and backward; AssertionError unless all is right."""
    x = arrays(case)
    given = {
        name: _laid(a, case.layout).reshape(a.shape[4 - case.ndim :])
        for name, a in x.items()
        if name != "bias"
    }
    bias = _laid(x["bias"], case.layout) if "bias" in x else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = flashsim.run(
            given["q"], given["k"], given["v"], bias=bias, trace=True, **keywords(case)
        )
        tiling = case.tiling_backward and flashsim.Tiling(*case.tiling_backward)
        grads = result.backward(given["dout"], tiling=tiling, deterministic=case.deterministic)
    got = {"out": result.out, "lse": result.lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    if bias is not None:
        got["dbias"] = grads.dbias
    form = case.algorithm
    if case.deterministic is not None:
        form = "flash2" if case.deterministic else "flash2-fused"
    for trace, algorithm in ((result.trace, case.algorithm), (grads.trace, form)):
        moved, products = count(case, trace.tiling, trace.direction, algorithm)
        predicted = trace.predicted()
        for what, other in (("trace", trace), ("closed form", predicted)):
            theirs: Moves = Counter()
            for (_, op, tensor), nbytes in other.transfers.items():
                theirs[op, tensor] += nbytes
            assert +theirs == moved, f"{trace.direction}, {what}: {+theirs - moved} too much"
            assert other.flops("matmul") == products, f"{trace.direction}, {what}: FLOPs"
    _check_errors(case, x, got)


def _check_errors(case: Case, x: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
    exact, may = _judged(case, x)
    errors = {}
    for name, value in got.items():
        true = exact[name]
        assert np.asarray(value).size == true.size, f"{name} has shape {np.shape(value)}"
        errors[name] = _error(np.reshape(value, true.shape), true)
    wrong = {name for name in errors if not errors[name] <= may[name]}
    if wrong:  # was plain attention lucky with this draw? The worst of other draws decides.
        for seed in range(16):
            other = replace(case, seed=case.seed + 1000 + seed)
            more = _judged(other, {**arrays(other), **({"bias": x["bias"]} if "bias" in x else {})})
            may = {name: max(may[name], more[1][name]) for name in may}
        wrong = {name for name in wrong if not errors[name] <= may[name]}
    assert not wrong, ", ".join(f"{n}: error {errors[n]:.3g}, may be {may[n]:.3g}" for n in wrong)


# -- spoilt calls -------------------------------------------------------------------------------


class Odd:
    """Something that no argument can be."""


#: What is passed in place of a good argument. Some fit some arguments: then the call runs.
ODD_VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "Odd()": Odd,
    "'x'": lambda: "x",
    "b'x'": lambda: b"x",
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "2.5": lambda: 2.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "10**400": lambda: 10**400,
    "2**63": lambda: 2**63,
    "1j": lambda: 1j,
    "[]": list,
    "{}": dict,
    "[[1], [2, 3]]": lambda: [[1], [2, 3]],
    "(1, 2, 3)": lambda: (1, 2, 3),
    "(-5, 1)": lambda: (-5, 1),
    "(1.5, 2)": lambda: (1.5, 2),
    "zeros(0)": lambda: np.zeros(0),
    "zeros((2, 3))": lambda: np.zeros((2, 3), np.float32),
    "zeros((1, 1, 1, 1, 1))": lambda: np.zeros((1,) * 5, np.float32),
    "array(object)": lambda: np.array([None, "x"], object),
    "array(str)": lambda: np.array(["x"]),
    "complex": lambda: np.zeros((1, 1, 2, 2), complex),
    "bool array": lambda: np.zeros((1, 1, 2, 2), bool),
    "int array": lambda: np.zeros((1, 1, 2, 2), int),
    "big-endian": lambda: np.zeros((1, 1, 2, 2), ">f4"),
    "raises": lambda: _raises,
    "returns None": lambda: lambda q, k: None,
    "returns a string": lambda: lambda q, k: "yes",
    "float": lambda: float,
    "Tiling(1, 1)": lambda: flashsim.Tiling(1, 1),
    "Device.get('T4')": lambda: flashsim.Device.get("T4"),
}
ARGUMENTS = (
    *("q", "k", "v", "bias", "dout", "algorithm", "causal", "window", "softcap", "scale", "mask"),
    *("block_mask", "cu_seqlens_q", "cu_seqlens_k", "tiling", "device", "backend", "key_order"),
    *("nan_policy", "trace", "threads", "micro_kernel", "deterministic", "tiling (backward)"),
    *("trace (backward)", "no such argument"),
)


def _raises(*_: Any) -> None:
    raise RuntimeError("a mask that fails")


def draw_spoilt(rng: np.random.Generator, backend: str | None = None) -> tuple[Case, str, str]:
    """A case, the argument that is spoilt, and the name of the value it gets."""
    case = draw(rng, backend)
    argument = ARGUMENTS[rng.integers(len(ARGUMENTS))]
    return case, argument, list(ODD_VALUES)[rng.integers(len(ODD_VALUES))]


def spoil(case: Case, argument: str, value: str) -> bool:
    """Call with a bad argument; AssertionError unless that is a FlashSimError, or runs.

    Returns whether it was refused.
    """
    x = arrays(case)
    odd = ODD_VALUES[value]()
    forward = {**{n: x[n] for n in "qkv"}, "bias": x.get("bias"), **keywords(case)}
    backward = {
        "dout": x["dout"],
        "tiling": case.tiling_backward and flashsim.Tiling(*case.tiling_backward),
        "deterministic": case.deterministic,
    }
    if argument in backward and argument != "tiling":
        backward[argument] = odd
    elif argument.endswith(" (backward)"):
        backward[argument.removesuffix(" (backward)")] = odd
    else:
        forward[argument] = odd
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flashsim.run(**forward).backward(**backward)
    except flashsim.FlashSimError:
        return True
    except MemoryError:
        raise
    except Exception as error:
        raise AssertionError(f"{argument} = {value}: {type(error).__name__}: {error}") from error
    return False


# -- for people ---------------------------------------------------------------------------------


def code(case: Case, *spoilt: str) -> str:
    """Python that runs a case again, in the folder of this module."""
    shown = {
        name: value
        for name, value in vars(case).items()
        if name == "seed" or value != Case.__dataclass_fields__[name].default
    }
    text = ", ".join(f"{name}={value!r}" for name, value in shown.items())
    call = "spoil" if spoilt else "check"
    return f"from fuzz import *\n{call}({', '.join([f'Case({text})', *map(repr, spoilt)])})"
