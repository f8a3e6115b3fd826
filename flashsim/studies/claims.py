"""Checks statements from well-known texts on FlashAttention, and says why each is right or wrong.

No verdict is stored: each check computes the correct figure and compares it with the statement.

>>> from flashsim import claims
>>> print(claims.table())  # doctest: +SKIP
>>> claims.judge("268-times").right
False
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

import numpy as np

from flashsim.errors import own_errors
from flashsim.problem import checks
from flashsim.problem.hardware import KIB, MIB, Device
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.report import Table
from flashsim.schedule.tensors import whole_bytes
from flashsim.schedule.tiling import Tiling
from flashsim.studies.reproduce import pallas


class Finding(NamedTuple):
    """The result of checking a claim: the computed figures, whether the claim is right, and why."""

    found: str
    right: bool
    why: str


@dataclass(frozen=True)
class Claim:
    """A shortened statement from a write-up, and the function that checks it by recomputing it."""

    name: str
    said: str
    check: Callable[[], Finding]


# -- bytes, FLOPs, times and on-chip sizes ---------------------------------------------------------


def _intensity() -> Finding:
    said = 52
    narrow, wide = (
        pallas.textbook("forward", "naive", 1024, dtype).intensity
        for dtype in ("bfloat16", "float32")
    )
    return Finding(
        f"{narrow:.0f} in bfloat16, {wide:.0f} in float32",
        round(narrow) == said,
        "the write-up counted 4 B per element, but bfloat16 has 2 B, which doubles the intensity",
    )


def _faster_backward() -> Finding:
    mine, theirs = (pallas.TIMES["backward", kernel][-1] for kernel in ("flash", "cuDNN"))
    credited = [pallas.speed("backward", kernel, -1) / 1e12 for kernel in ("flash", "cuDNN")]
    alike = credited[1] * theirs / mine  # both credited with the work of one pass
    return Finding(
        f"{mine} ms versus cuDNN's {theirs} ms: {mine / theirs:.2f} times as long",
        mine < theirs,
        f"the {credited[0]:.0f} TFLOP/s count 14 N² d FLOPs, cuDNN's {credited[1]:.0f} count 10 N² "
        f"d; with the same count it is {alike:.0f} versus cuDNN's {credited[1]:.0f}",
    )


def _beyond_the_peak() -> Finding:
    said, a100, h100 = 335e12, *(Device.get(name).peak("float16") for name in ("A100", "H100"))
    return Finding(
        f"its peak is {a100 / 1e12:g} TFLOP/s, so 335 would be {said / a100:.0%} of it",
        said <= a100,
        f"FlashAttention-2's paper (section 4.1) reports 335 TFLOP/s on an H100, {said / h100:.0%} "
        f"of its peak of {h100 / 1e12:g}",
    )


def _blocks() -> Finding:
    """Check B = sqrt(M / c) for square tiles: side B, on-chip memory M, and two element sizes c."""
    side, printed = 128, (64, 45)
    ours = side, isqrt(side**2 // 2)
    quarter = isqrt(side**2 // 4), isqrt(side**2 // 8)
    device = Device.get("A100")
    fitting = [_largest_square(device, dtype) for dtype in ("float16", "float32")]
    return Finding(
        f"the formula gives {ours[0]} and {ours[1]}",
        printed == ours,
        f"{quarter[0]} and {quarter[1]} result from a quarter of the memory; with all buffers "
        f"counted, the largest square tile of an A100 thread block at d = 64 is {fitting[0]} in "
        f"float16 and {fitting[1]} in float32",
    )


def _largest_square(device: Device, dtype: str) -> int:
    problem, side = Problem(1 << 20, head_dim=64, dtype=dtype), 1
    while Tiling(side + 1, side + 1).footprint(problem) <= device.sram_bytes:
        side += 1
    return side


def _scores() -> Finding:
    problem = Problem(2048)
    each = [whole_bytes(problem, name) / MIB for name in ("S", "P")]
    return Finding(
        f"{each[0]:g} MiB each",
        each == [32, 32],
        f"each has 2,048 x 2,048 x {problem.itemsize} B; both together have {sum(each):g} MiB",
    )


def _ratio() -> Finding:
    scores, kept = whole_bytes(Problem(4096), "S"), 256 * KIB
    mixed = (scores / 1e6) / (kept / MIB)
    return Finding(
        f"{scores // kept} times",
        scores // kept == 268,
        f"{scores // MIB} MiB are {scores / 1e6:.1f} MB: dividing MB by MiB gives {mixed:.0f}",
    )


def _reread() -> Finding:
    seconds = 64e6 / 2e12
    device = Device.get("A100-80GB")
    exact = whole_bytes(Problem(4096), "P") / device.hbm_bandwidth
    return Finding(
        f"{seconds * 1e6:g} µs",
        round(seconds * 1e6, 6) == 32,
        f"4,096 x 4,096 float32 at an {device.name}'s {device.hbm_bandwidth / 1e12:g} TB/s: "
        f"{exact * 1e6:.1f} µs per head each time that P is read",
    )


def _whole_row() -> Finding:
    row, said = 4, 16_384
    fits = {n: Device.get(n).sram_bytes // row for n in ("T4", "A100", "H100")}
    return Finding(
        ", ".join(f"{name} {longest:,}" for name, longest in fits.items()),
        fits["T4"] == said,
        "the limit is one float32 row in the shared memory of a thread block: 16,384 scores in 64 "
        "KiB, and more on GPUs with more; `flashsim study ladder --rungs whole-row` prints it",
    )


# -- numerical results -----------------------------------------------------------------------------

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


# -- all claims ------------------------------------------------------------------------------------

#: Every claim by its name.
CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for claim in (
        Claim("bf16-52", "naive attention, T = 1,024, d = 64, bfloat16: 52 FLOP/B", _intensity),
        Claim("faster-backward", "51 TFLOP/s backward outperform cuDNN's 48", _faster_backward),
        Claim("a100-335", "335 TFLOP/s on an A100", _beyond_the_peak),
        Claim("blocks-64-45", "the block formula gives 64 and 45", _blocks),
        Claim("scores-32", "S and P of 2,048 x 2,048 in float32: 32 MiB each", _scores),
        Claim("268-times", "64 MiB of scores against 256 KiB: 268 times less", _ratio),
        Claim("reread-32us", "reading 64 MB again at 2 TB/s costs 32 µs", _reread),
        Claim("row-16k", "a softmax that keeps its row on chip stops at 16k", _whole_row),
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
}


@own_errors
def judge(name: str) -> Finding:
    """Check one claim by recomputing it, and return the finding.

    Raises
    ------
    OptionError
        If no claim has that name; the message lists all names.
    """
    return CLAIMS[checks.one_of("claim", name, CLAIMS)].check()


@own_errors
def table(*names: str) -> Table:
    """Return a table that shows, for each claim, our verdict, the statement, our result and why.

    If no names are passed, the table contains all claims.

    Raises
    ------
    OptionError
        If a name is unknown.
    """
    result = Table("Claims, recomputed", ("claim", "verdict", "said", "found", "why"))
    for name in names or CLAIMS:
        finding = judge(name)
        verdict = "right" if finding.right else "wrong"
        result.add(name, verdict, CLAIMS[name].said, finding.found, finding.why)
    return result


@own_errors
def overview(full: Table) -> Table:
    """Return the table of claims without its last column, the long reasons."""
    return Table(
        full.title,
        full.columns[:-1],
        [row[:-1] for row in full.rows],
        note="`flashsim study claims NAME` prints the reason; docs/reference/texts.md has all",
    )


__all__ = ["CLAIMS", "Claim", "Finding", "judge", "overview", "table"]
