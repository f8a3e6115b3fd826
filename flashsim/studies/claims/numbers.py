"""Checks write-ups' claims about numerical results, by computing the results."""

from __future__ import annotations

import numpy as np

from flashsim.problem.problem import numpy_dtype
from flashsim.studies.claims.finding import Claim, Finding

_N, _D, _BLOCK = 64, 16, 16
_HALF_A_UNIT = 2.0**-9  # the relative error of one rounding to bfloat16's 8 bits


def _inputs() -> tuple[np.ndarray, ...]:
    """Return random q, k, v and dout, each of shape (64, 16) and type float64."""
    return tuple(np.random.default_rng(0).standard_normal((4, _N, _D)))


def _softmax(S: np.ndarray) -> np.ndarray:
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return P / P.sum(axis=1, keepdims=True)


def _worst(computed: np.ndarray, true: np.ndarray) -> float:
    """Return the largest error of a computed result, divided by the largest true value."""
    return float(np.abs(computed - true).max() / np.abs(true).max())


def _hadamard(n: int) -> np.ndarray:
    """Return the orthogonal n x n matrix H / sqrt(n) for a Hadamard matrix H; n is a power of 2."""
    H = np.ones((1, 1))
    while len(H) < n:
        H = np.block([[H, H], [H, -H]])
    return H / np.sqrt(n)


def _incoherent() -> Finding:
    """Check that an orthogonal matrix spreads outliers of q and k (FlashAttention-3, section 3)."""
    q, k = _inputs()[:2]
    q[:, 3] *= 30  # a column of outliers
    rng = np.random.default_rng(1)
    order = rng.permutation(_D)
    M = rng.choice([-1.0, 1.0], _D)[:, None] * _hadamard(_D)
    ways = {"as it is": (q, k), "reordered": (q[:, order], k[:, order]), "rotated": (q @ M, k @ M)}
    assert all(np.allclose(a @ b.T, q @ k.T) for a, b in ways.values())
    error = {name: _worst(_int8(a) @ _int8(b).T, q @ k.T) for name, (a, b) in ways.items()}
    return Finding(
        "error of q k^T: " + ", ".join(f"{name} {e:.2%}" for name, e in error.items()),
        error["reordered"] <= error["rotated"],
        "it rotates rows, which spreads an outlier over all columns; reordering only moves it "
        "(computed with 8-bit integers and one scale per tensor)",
    )


def _int8(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max() / 127
    return np.round(x / scale) * scale


def _tile_softmax() -> Finding:
    q, k, _, dout = _inputs()
    S = q @ k.T / np.sqrt(_D)
    P = _softmax(S)
    tiles = np.concatenate([_softmax(S[:, j : j + _BLOCK]) for j in range(0, _N, _BLOCK)], axis=1)
    off = _worst(tiles.T @ dout, P.T @ dout)
    return Finding(
        f"dV off by {off:.0%}; a row sums to {tiles.sum(axis=1)[0]:.3g}",
        off < 1e-6,
        "the softmax of each tile sums to 1, but P must sum to 1 over the whole row; "
        "P = exp(S - L) uses the saved L of the whole row",
    )


def _logarithm() -> Finding:
    q, k = _inputs()[:2]
    S = q @ k.T / np.sqrt(_D)
    m = S.max(axis=1, keepdims=True)
    l = np.exp(S - m).sum(axis=1, keepdims=True)
    sums, logs = (_worst(np.exp(S - L), _softmax(S)) for L in (l, m + np.log(l)))
    return Finding(
        f"P is wrong by {sums:.0%} with L = l, and by {logs:.1g} with L = m + log l",
        sums < 1e-6,
        "L is subtracted in the exponent, so it is a logarithm: L = m + log l (FlashAttention-2, "
        "Algorithm 1, line 13)",
    )


def _row_sums() -> Finding:
    q, k, v, dout = _inputs()
    P = _softmax(q @ k.T / np.sqrt(_D))
    off = _worst((P @ v * dout).sum(axis=1), (P * (dout @ v.T)).sum(axis=1))
    return Finding(
        f"they differ by {off:.1g}",
        off < 1e-12,
        "sum_j P_ij (dO_i . V_j) = dO_i . (sum_j P_ij V_j) = dO_i . O_i, which needs N d "
        "multiplications instead of N^2",
    )


def _overflow() -> Finding:
    most = float(np.log(np.float64(np.finfo(np.float32).max)))
    with np.errstate(over="ignore"):
        overflows = bool(np.isinf(np.exp(np.float32(90))))
    return Finding(
        f"exp overflows from {most:.2f} on",
        overflows,
        "this is the logarithm of float32's largest number: exp of 70 and 80 fits, exp of 90 does "
        "not",
    )


def _underflow() -> Finding:
    kept, least = np.exp(np.float32(-90)), np.finfo(np.float32).smallest_normal
    return Finding(
        f"{kept:.2g}, below the smallest normal {least:.2g}",
        bool(0 < kept < least),
        "it is a subnormal number: NumPy keeps it, but a GPU's fast exponential flushes it to 0, "
        "so that the softmax of a row of such logits is 0 / 0",
    )


def _online(S: np.ndarray, m_type: str, l_type: str) -> np.ndarray:
    """Return the weights of an online softmax; each tile rounds m to `m_type` and l to `l_type`."""
    narrow = lambda x, kind: x.astype(numpy_dtype(kind)).astype(np.float32)  # noqa: E731
    m, l = np.full((len(S), 1), -np.inf, np.float32), np.zeros((len(S), 1), np.float32)
    for j in range(0, S.shape[1], _BLOCK):
        tile = S[:, j : j + _BLOCK]
        m_new = narrow(np.maximum(m, tile.max(axis=1, keepdims=True)), m_type)
        l = narrow(np.exp(m - m_new) * l + np.exp(tile - m_new).sum(axis=1, keepdims=True), l_type)
        m = m_new
    return np.exp(S - m) / l


def _narrow_maximum() -> Finding:
    error = _rounded_state("bfloat16", "float32")
    return Finding(
        f"weights off by {error:.1g}",
        error < _HALF_A_UNIT / 100,
        "m cancels if the same m is subtracted everywhere, so it need not be the exact maximum",
    )


def _wide_sum() -> Finding:
    error = _rounded_state("float32", "bfloat16")
    return Finding(
        f"with l in bfloat16, the weights are wrong by {error:.1%}",
        error > _HALF_A_UNIT,
        "l is rounded once per tile, which is 64 times for 4,096 keys in tiles of 64, and every "
        "weight is divided by l",
    )


def _rounded_state(m_type: str, l_type: str) -> float:
    S = np.random.default_rng(2).standard_normal((8, 64 * _BLOCK)).astype(np.float32)
    return _worst(_online(S, m_type, l_type), _softmax(S.astype(np.float64)))


def _advance() -> Finding:
    """Check along which axis, d or N, a block pointer to K^T of shape (d, N) must advance."""
    q, k, v, _ = _inputs()
    true = _softmax(q @ k.T) @ v

    def walk(step: tuple[int, int]) -> np.ndarray:
        room = np.zeros((_D + _N, 2 * _N))
        room[:_D, :_N] = k.T
        S = [
            q @ room[n * step[0] : n * step[0] + _D, n * step[1] : n * step[1] + _BLOCK]
            for n in range(_N // _BLOCK)
        ]
        return _softmax(np.concatenate(S, axis=1)) @ v

    wrong, right = _worst(walk((_BLOCK, 0)), true), _worst(walk((0, _BLOCK)), true)
    return Finding(
        f"the output is then wrong by {wrong:.0%}; with steps of (0, BLOCK), by {right:.1g}",
        wrong < 1e-12,
        "K is read transposed, as (d, N), so its keys are along the second axis; V's keys are "
        "along the first axis",
    )


CLAIMS = (
    Claim("incoherent", "incoherent processing reorders the values", _incoherent),
    Claim("tile-softmax", "backward, P of a tile is softmax of that tile", _tile_softmax),
    Claim("l-sum", "L is the row's sum, and P = exp(S - L)", _logarithm),
    Claim("row-sums", "rowsum(P dP) = rowsum(O dO)", _row_sums),
    Claim("overflow-90", "a logit of 90 overflows naive softmax in float32", _overflow),
    Claim("underflow-90", "exp(-90) underflows in float32", _underflow),
    Claim("maximum-bf16", "the running maximum could be bfloat16", _narrow_maximum),
    Claim("sum-float32", "the running sum must be float32", _wide_sum),
    Claim("advance-k", "Triton: K's block pointer advances by (BLOCK, 0)", _advance),
)
