"""The cases of `fuzz`: random problems, their arrays and their kept scores."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

ALGORITHMS = {
    "simulator": ("standard", "flash1", "flash2", "flash2-fused"),
    "numba": ("flash2", "flash2-fused"),
}
LENGTHS = (1, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 19, 23, 31, 32, 33, 41, 53, 64)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 24, 31, 32, 40)
SIDES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 29, 32, 64, 100)
#: Maximum number of score tiles per head: it limits the cost of a case.
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
    kind: str = "normal"  # distribution of the inputs
    layout: str = "plain"  # memory layout of the inputs
    backend: str = "simulator"
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
    bias_inf: float = 0.0  # the fraction of -inf in the bias
    mask: str | None = None
    # cell size of the block mask, and the fraction of cells kept
    block: tuple[int, int, float] | None = None
    tiling: tuple[int, int] | None = None
    tiling_backward: tuple[int, int] | None = None
    threads: int | None = None
    micro_kernel: str | None = None

    @property
    def longest(self) -> tuple[int, int]:
        """Return the queries and keys of the longest packed sequences."""
        queries, keys = sequences(self)
        return max(stop - start for start, stop in queries), max(b - a for a, b in keys)


def draw(rng: np.random.Generator, backend: str | None = None) -> Case:
    """Return a valid random case."""
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
            case = replace(case, block=None)  # a grid without cells is refused
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


def dtype_of(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def arrays(case: Case) -> dict[str, np.ndarray]:
    """Return q, k, v, dout and bias, 4-D, in the case's type."""
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
    elif c.kind != "normal":  # scores rise or fall along the keys, so the running maximum moves
        ramp = np.linspace(-20, 20, c.n_kv) if c.n_kv > 1 else np.zeros(1)
        direction = np.full(c.d, c.d**-0.5)
        x["q"] = 0.1 * x["q"] + direction
        x["k"] += c.d**0.5 * (ramp if c.kind == "rising" else ramp[::-1])[:, None] * direction
    if c.bias is not None:
        x["bias"] = rng.standard_normal((*c.bias, c.n_q, c.n_kv)) * 2
        x["bias"][rng.random(x["bias"].shape) < c.bias_inf] = -np.inf
    return {name: a.astype(dtype_of(c.dtype)) for name, a in x.items()}


def laid(a: np.ndarray, layout: str) -> np.ndarray:
    """Return the same values in another memory layout."""
    if layout == "sliced":  # strided rows, not aligned
        wide = np.zeros((*a.shape[:-1], a.shape[-1] + 3), a.dtype)
        wide[..., 1 : a.shape[-1] + 1] = a
        return wide[..., 1 : a.shape[-1] + 1]
    if layout == "heads inside":  # (batch, n, heads, d) in memory
        return np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)
    if layout == "read-only":
        a = a.copy()
        a.setflags(write=False)
    return a


# -- which scores are kept ------------------------------------------------------------------


def sequences(case: Case) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return start and stop of each packed sequence's queries, and of its keys."""
    q, k = case.cu_q or (0, case.n_q), case.cu_k or (0, case.n_kv)
    return list(pairwise(q)), list(pairwise(k))


def block_grid(case: Case) -> np.ndarray:
    """Return the block mask's grid."""
    assert case.block is not None
    (q, k, share), rng = case.block, np.random.default_rng(case.seed + 1)
    rows, cols = case.longest
    return rng.random((-(-rows // q), -(-cols // k))) < share


def kept(case: Case) -> np.ndarray:
    """Return which scores are kept, as a boolean (n_q, n_kv)."""
    result = np.zeros((case.n_q, case.n_kv), bool)
    for (q0, q1), (k0, k1) in zip(*sequences(case), strict=True):
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
