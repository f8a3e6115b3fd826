"""Inputs, judges and the list of engines that several test files share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest

import flashsim
from flashsim.problem import oracle
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule.plans import GENERAL as ALGORITHMS

KINDS = ("normal", "rising", "falling", "heavy")
DTYPES = ("float64", "float32", "float16", "bfloat16")
#: float64, where the judge has a wider type.
FLOAT64 = pytest.param(
    "float64",
    marks=pytest.mark.skipif(
        np.finfo(np.longdouble).eps >= np.finfo(np.float64).eps,
        reason="this platform has no type wider than float64 to judge it by",
    ),
)
JUDGED = (FLOAT64, *DTYPES[1:])


@dataclass(frozen=True)
class Target:
    """A backend under test: its algorithms, and the cases of `OPTION_CASES` that it refuses."""

    backend: str
    algorithms: tuple[str, ...] = ALGORITHMS
    refuses: frozenset[str] = frozenset()
    gpu: bool = False


#: One line per backend.
TARGETS = (Target("simulator"), Target("numba", ("flash2", "flash2-fused")))

#: Every (target, algorithm) to test.
ENGINES = [
    pytest.param(
        target,
        algorithm,
        id=f"{target.backend}-{algorithm}",
        marks=[pytest.mark.gpu] if target.gpu else [],
    )
    for target in TARGETS
    for algorithm in target.algorithms
]


def tensors(
    n_q,
    n_kv,
    d,
    *,
    kind="normal",
    dtype="float32",
    dv=None,
    batch=1,
    heads=2,
    kv_heads=None,
    bias=None,
    seed=0,
):
    """Inputs q, k, v, dout and bias (or None) of one of four `KINDS`.

    normal: all elements are from N(0, 1). rising, falling: scores rise from -50 to 50 along the
    keys (or fall), so the running maximum moves at every tile, and a stale one overflows float32.
    heavy: one element in a hundred of a normal input is 8 times as large.
    """
    rng = np.random.default_rng(seed)
    kv_heads, dv = kv_heads or heads, dv or d
    draw = rng.standard_normal
    q, k = draw((batch, heads, n_q, d)), draw((batch, kv_heads, n_kv, d))
    v, dout = draw((batch, kv_heads, n_kv, dv)), draw((batch, heads, n_q, dv))
    if kind == "heavy":
        for x in (q, k, v, dout):
            x[rng.random(x.shape) < 0.01] *= 8
    elif kind != "normal":
        ramp = np.linspace(-50, 50, n_kv) if n_kv > 1 else np.zeros(1)
        direction = np.full(d, d**-0.5)  # a unit vector; the default scale is 1 / sqrt(d)
        q = 0.1 * q + direction
        k = k + d**0.5 * (ramp if kind == "rising" else ramp[::-1])[:, None] * direction
    bias = None if bias is None else draw((*bias, n_q, n_kv))
    result = Problem(1, dtype=dtype).result_dtype
    kinds = (dtype, dtype, dtype, result, result)
    given = zip(("q", "k", "v", "dout", "bias"), (q, k, v, dout, bias), kinds, strict=True)
    return SimpleNamespace(
        **{name: None if x is None else x.astype(numpy_dtype(kind)) for name, x, kind in given}
    )


def with_lse_gradient(x) -> None:
    """Add a gradient of the LSE, `dlse`, of the size of dout's contribution to dS."""
    rng = np.random.default_rng(7)
    wide = np.float64 if x.q.dtype == np.float64 else np.float32
    x.dlse = (3 * rng.standard_normal(x.q.shape[:3])).astype(wide)


def brute_force_mask(p: Problem) -> np.ndarray:
    """Return the kept scores, (n_q, n_kv), one at a time by the documented rules."""
    return _mask(replace(p, dtype="float64"))


@lru_cache(maxsize=256)
def _mask(p: Problem) -> np.ndarray:
    kept = np.zeros((p.n_q, p.n_kv), bool)
    cu_q, cu_k = p.cu_seqlens_q or (0, p.n_q), p.cu_seqlens_k or (0, p.n_kv)
    left, right = p.window or (-1, -1)
    for s in range(len(cu_q) - 1):
        n_q, n_kv = cu_q[s + 1] - cu_q[s], cu_k[s + 1] - cu_k[s]
        for i in range(n_q):
            diagonal = i + n_kv - n_q
            for j in range(n_kv):
                keep = not (p.causal and j > diagonal)
                keep &= left < 0 or j >= diagonal - left
                keep &= right < 0 or j <= diagonal + right
                if p.block_mask is not None:
                    b = p.block_mask
                    keep &= bool(b.grid[i // b.block_q, j // b.block_k])
                if p.mask is not None:
                    keep &= bool(p.mask(np.array([[i]]), np.array([[j]]))[0, 0])
                kept[cu_q[s] + i, cu_k[s] + j] = keep
    return kept


def in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a @ b, with each sum from its first term to its last, rounded at every step."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., i, None] * b[..., i, None, :]
    return total


def plain(
    x, p: Problem, work, times=np.matmul, late=False, *, kept=None, rounded=lambda a: a
) -> dict[str, np.ndarray]:
    """Return attention, P and the gradients on whole matrices in NumPy arithmetic of type `work`.

    It is written independently of `flashsim.problem.oracle`, and its mask is `brute_force_mask`.
    With ``work=np.longdouble`` it judges float64 problems. `times` multiplies matrices. `late`
    divides by the sum of the weights after P V, as FlashAttention does. `kept` replaces the mask,
    and `rounded` follows each step.
    """
    q, k, v, dout = (a.astype(work) for a in (x.q, x.k, x.v, x.dout))
    k, v = (np.repeat(a, p.group, axis=1) for a in (k, v))
    z = rounded(times(q, k.mT) * work(p.scale))
    slope = np.ones_like(z)
    if p.softcap:
        c = work(p.softcap)
        with np.errstate(over="ignore"):
            slope = 1 / np.cosh(z / c) ** 2
        z = rounded(c * np.tanh(z / c))
    if x.bias is not None:
        z = rounded(z + x.bias.astype(work))
    kept = (brute_force_mask(p) if kept is None else kept) & ~(
        z <= np.finfo(p.compute_dtype).min / 2
    )
    top = np.where(kept, z, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isinf(top), work(0), top)
    weights = np.where(kept, np.exp(np.where(kept, z - top, 0)), work(0))
    total = weights.sum(axis=-1, keepdims=True)
    seen = total > 0
    prob = rounded(weights / np.where(seen, total, 1))
    lse = np.where(seen, top + np.log(np.where(seen, total, 1)), -np.inf)[..., 0]
    out = times(weights, v) / np.where(seen, total, 1) if late else times(prob, v)
    dprob = rounded(times(dout, v.mT))
    dz = rounded(prob * (dprob - (prob * dprob).sum(axis=-1, keepdims=True)))
    if getattr(x, "dlse", None) is not None:
        dz = dz + prob * x.dlse.astype(work)[..., None]
    fold = lambda a: a.reshape(p.batch, p.kv_heads, p.group, *a.shape[2:]).sum(axis=2)  # noqa: E731
    inner = rounded(dz * slope) * work(p.scale)
    result = {
        "out": rounded(out),
        "lse": lse,
        "P": prob,
        "dq": rounded(times(inner, k)),
        "dk": rounded(fold(times(inner.mT, q))),
        "dv": rounded(fold(times(prob.mT, dout))),
    }
    if x.bias is not None:
        shared = tuple(axis for axis in (0, 1) if x.bias.shape[axis] == 1)
        result["dbias"] = dz.sum(axis=shared, keepdims=True)
    return result


def terms(x, p: Problem, prob: np.ndarray) -> dict[str, np.ndarray]:
    """Return sums of the absolute values of the terms that each result adds up, in float64.

    dS = P (dP - delta) subtracts two dot products that are equal if a row has one key. The rounding
    of either shows in dQ, however small dQ is. `prob` is P.
    """
    q, k, v, dout = (np.abs(a.astype(np.float64)) for a in (x.q, x.k, x.v, x.dout))
    k, v = (np.repeat(a, p.group, axis=1) for a in (k, v))
    dprob = dout @ v.mT
    dz = prob * (dprob + (prob * dprob).sum(axis=-1, keepdims=True))
    if getattr(x, "dlse", None) is not None:
        dz = dz + prob * np.abs(x.dlse.astype(np.float64))[..., None]
    fold = lambda a: a.reshape(p.batch, p.kv_heads, p.group, *a.shape[2:]).sum(axis=2)  # noqa: E731
    scale = abs(p.scale)
    return {
        "out": prob @ v,
        "lse": scale * (q @ k.mT),
        "dq": scale * dz @ k,
        "dk": scale * fold(dz.mT @ q),
        "dv": fold(prob.mT @ dout),
        "dbias": dz.sum(axis=(0, 1)),
    }


@dataclass(frozen=True)
class Judge:
    """The true results, plain attention's in the problem's type, and the size of one rounding."""

    truth: dict[str, np.ndarray]
    yardstick: list[dict[str, np.ndarray]]
    rounding: dict[str, float]

    @classmethod
    def of(cls, x, p: Problem) -> Judge:
        """Return the judge of one problem; cached for all engines with the same arrays."""
        given = vars(x).items()
        return _judge(p, *((k, a.dtype, a.shape, a.tobytes()) for k, a in given if a is not None))

    def check(self, got: dict[str, np.ndarray]) -> None:
        """Check that error <= 2 x plain attention's + one rounding, in maxima over an array."""
        for name, array in got.items():
            exact, rough = self.truth[name], np.stack([one[name] for one in self.yardstick])
            value = np.asarray(array).astype(exact.dtype)
            assert value.shape == exact.shape, name
            nothing = np.isneginf(exact)  # LSE of rows that see no key
            np.testing.assert_array_equal(np.isneginf(value), nothing, err_msg=name)
            exact, rough, value = (np.where(nothing, 0, a) for a in (exact, rough, value))
            error, plain_error = np.abs(value - exact).max(), np.abs(rough - exact).max()
            assert error <= 2 * plain_error + self.rounding[name], (
                f"{name}: error {error:.3g}, plain attention's {plain_error:.3g}, one rounding "
                f"{self.rounding[name]:.3g}"
            )


@lru_cache(maxsize=256)
def _judge(p: Problem, *given: tuple) -> Judge:
    """Return `Judge.of` arrays given by name, type, shape and bytes.

    Half-precision problems are compared with `oracle` rounded after every step; float32 and float64
    problems with whole-matrix arithmetic of that type, summed in two ways. One rounding is the
    type's epsilon of the largest true value, plus the accumulator's epsilon of the sum of absolute
    terms.
    """
    arrays = {k: np.frombuffer(data, kind).reshape(shape) for k, kind, shape, data in given}
    x = SimpleNamespace(**{"bias": None} | arrays)
    exact = plain(x, p, np.longdouble if p.dtype == "float64" else np.float64)
    prob = exact.pop("P")
    if p.dtype == p.compute_dtype:
        # A BLAS splits sums differently on each CPU, so sums in order are tried too.
        own = np.dtype(p.dtype).type
        rough = [plain(x, p, own), plain(x, p, own, in_order, late=True)]
    else:
        out, lse = oracle.attention(x.q, x.k, x.v, p, bias=x.bias, dtype=p.dtype)
        dlse = getattr(x, "dlse", None)
        grads = oracle.gradients(x.q, x.k, x.v, x.dout, p, dlse=dlse, bias=x.bias, dtype=p.dtype)
        rough = [{"out": out, "lse": lse, **grads}]
    size = terms(x, p, prob.astype(np.float64))
    inner = np.finfo(p.compute_dtype).eps
    outer = {"float16": 2**-10, "bfloat16": 2**-7}.get(p.dtype, inner)
    finite = lambda a: np.abs(np.where(np.isneginf(a), 0, a)).max()  # noqa: E731
    # A backward pass recomputes P = exp(S - LSE): a rounding of the LSE changes all of P.
    moved = {"out": 1, "lse": 1}
    rounding = {
        name: float(
            outer * finite(value)
            + inner * size[name].max() * moved.get(name, 1 + finite(exact["lse"]))
        )
        for name, value in exact.items()
    }
    return Judge(exact, rough, rounding)


def run_both(x, target: Target, algorithm: str, **options):
    """Run forward and backward of one engine; return (result, gradients, all results by name)."""
    r = flashsim.run(
        x.q, x.k, x.v, bias=x.bias, backend=target.backend, algorithm=algorithm, **options
    )
    g = r.backward(x.dout, dlse=getattr(x, "dlse", None), tiling=options.get("tiling"))
    got = {"out": r.out, "lse": r.lse, "dq": g.dq, "dk": g.dk, "dv": g.dv}
    if x.bias is not None:
        got["dbias"] = g.dbias
    return r, g, got
