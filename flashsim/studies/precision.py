"""The precision laboratory: the error that each rounding causes in out and in the gradients.

>>> from flashsim import precision
>>> found = precision.laboratory((256,), kinds=("normal",), points=("lse", "m"))
>>> found.of("lse").errors["dq"] > 1e3 * found.of("m").errors["dq"]
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flashsim import report
from flashsim.api.cost import fits
from flashsim.api.execution import run
from flashsim.errors import OptionError, choices, own_errors, shown
from flashsim.problem import checks, oracle
from flashsim.problem.precision import PRESETS, Precision, points_of
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.tiling import Tiling

#: The kinds of input, with a description.
KINDS = {
    "normal": "N(0, 1)",
    "rising": "scores rise from -50 to 50 along the keys, so the maximum changes at every tile",
    "falling": "scores fall from 50 to -50: the first tile has the maximum",
    "heavy": "N(0, 1), with one element in a hundred 8 times as large",
    "outliers": "N(0, 1) + N(0, 100) Bernoulli(0.001), FlashAttention-3's (arXiv:2407.08608, 4.3)",
}


class Drawn(NamedTuple):
    """Random inputs q, k, v and dout in float64, each of shape (1, heads, n, head_dim)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray


@own_errors
def draw(kind: str, n: int, head_dim: int = 64, *, heads: int = 1, seed: int = 0) -> Drawn:
    """Return random inputs q, k, v and dout of one kind; the same seed gives the same numbers."""
    checks.one_of("kind of input", kind, KINDS)
    n = checks.positive_int("n", n)
    d = checks.positive_int("head_dim", head_dim)
    heads = checks.positive_int("heads", heads)
    rng = np.random.default_rng(checks.seed(seed))
    fits(4 * 8 * heads * n * d, "use a smaller n")
    arrays = [rng.standard_normal((1, heads, n, d)) for _ in range(4)]
    if kind == "heavy":
        for x in arrays:
            x[rng.random(x.shape) < 0.01] *= 8
    elif kind == "outliers":
        for x in arrays:
            x += 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.001)
    elif kind in ("rising", "falling"):
        direction = np.full(d, d**-0.5)  # a unit vector; the default scale is 1 / sqrt(d)
        ramp = np.linspace(-50, 50, n)[:: 1 if kind == "rising" else -1]
        arrays[0] = 0.1 * arrays[0] + direction
        arrays[1] = arrays[1] + d**0.5 * ramp[:, None] * direction
    return Drawn(*arrays)


RESULTS = ("out", "dq", "dk", "dv")
#: The name of a row without lowered precision, in which everything is float32.
NOTHING = "float32"
_COLUMNS = ("inputs", "N", "lowered", *RESULTS, "|rows of P - 1|")
_NOTE = (
    "error: root mean square of the difference from float64, divided by the root mean square of "
    "the result; rows of P: the largest difference from 1 of the sum of a row, which the backward "
    "pass recomputes as exp(S - LSE)"
)


@dataclass(frozen=True)
class LoweredPoint:
    """The errors caused by one rounding on one kind of input.

    Attributes
    ----------
    point : str
        The rounding point that was lowered, or `NOTHING`, or the name of a published kernel.
    n : int
        The number of queries and of keys.
    errors : dict of float
        For "out", "dq", "dk" and "dv": the root mean square of the error divided by that of the
        result; NaN or infinite if the result is.
    row_sum : float
        The largest ``|sum of exp(S - LSE) - 1|`` over rows.
    """

    point: str
    kind: str
    n: int
    errors: dict[str, float]
    row_sum: float

    def row(self) -> tuple[report.Cell, ...]:
        """Return the errors of the lowered rounding point as one row of a table."""
        each = (self.errors[name] for name in RESULTS)
        return (self.kind, self.n, self.point, *each, self.row_sum)


@own_errors
@dataclass(frozen=True, repr=False)
class Laboratory(report.Tabled):
    """The errors with one rounding point at a time lowered to the type `dtype`; prints tables."""

    dtype: str
    algorithm: str
    head_dim: int
    findings: tuple[LoweredPoint, ...]

    def of(self, point: str, kind: str | None = None, n: int | None = None) -> LoweredPoint:
        """Return the errors of one lowered rounding point.

        If several findings match, the method returns the first one.
        """
        for f in self.findings:
            if f.point == point and kind in (None, f.kind) and n in (None, f.n):
                return f
        known = dict.fromkeys(f.point for f in self.findings)
        raise OptionError(
            f"there are no results for the rounding point {point!r}; choose from "
            f"{choices(point, known)}"
        )

    @property
    def kinds(self) -> list[str]:
        """The kinds of input, in the order of the findings."""
        return list(dict.fromkeys(f.kind for f in self.findings))

    def table(self) -> report.Table:
        """Return a table with one row per kind of input, length and rounding point."""
        what = f"{self.algorithm}, d = {self.head_dim}"
        title = f"Errors of {what}, with one rounding point at a time in {self.dtype}"
        return report.Table(title, _COLUMNS, [f.row() for f in self.findings], _NOTE)

    def tables(self) -> list[report.Table]:
        """Return up to two tables of errors: one compares lengths N, the other kinds of input.

        The table of lengths has the first kind of input, and the table of input kinds has the
        largest N.
        """
        first, longest = self.kinds[0], max(f.n for f in self.findings)
        result = []
        if any(f.n != longest for f in self.findings):
            result.append(self._table(lambda f: f.kind == first, f"as N grows, {first} inputs"))
        if len(self.kinds) > 1 or not result:
            result.append(self._table(lambda f: f.n == longest, f"by inputs, N = {longest:,}"))
        return result

    def _table(self, chosen: Callable[[LoweredPoint], bool], what: str) -> report.Table:
        whole = self.table()
        order = list(dict.fromkeys(f.point for f in self.findings))
        kept = sorted(
            (f for f in self.findings if chosen(f)),
            key=lambda f: (order.index(f.point), self.kinds.index(f.kind), f.n),
        )
        return report.Table(f"{whole.title}: {what}", _COLUMNS, [f.row() for f in kept], whole.note)

    def __str__(self) -> str:
        return "\n".join(table.text() for table in self.tables())


@own_errors
def laboratory(
    n: Sequence[int] = (256, 1024),
    *,
    dtype: str = "bfloat16",
    kinds: Iterable[str] | None = None,
    points: Iterable[str] | None = None,
    algorithm: str = "flash2",
    head_dim: int = 64,
    causal: bool = False,
    tiling: Tiling | None = None,
    seed: int = 0,
) -> Laboratory:
    """Measure the errors that arise if one intermediate result is rounded to a lower precision.

    Attention runs once per intermediate result ("rounding point"), and its results are compared
    with float64. The inputs and all other rounding points are float32.

    Parameters
    ----------
    n : sequence of int
        The lengths, at least one.
    dtype : str
        The type to which rounding points are lowered.
    kinds : names in `KINDS`, optional
        The kinds of input; default: all.
    points : names in `points_of` the algorithm, optional
        The rounding points to lower; default: all.
    algorithm : str
    head_dim : int
    causal : bool
    tiling : Tiling, optional
        Default: 64 x 64.
    seed : int

    Raises
    ------
    OptionError, DTypeError, ShapeError
        If an argument is invalid or a name is unknown.
    """
    if not isinstance(n, Sequence) or isinstance(n, str) or not n:
        raise OptionError(f"n must be a sequence of lengths, such as (256, 1024), got {shown(n)}")
    dtype = checks.dtype_name(dtype)
    plans.check_algorithm(algorithm)
    plans.check_backward(algorithm)
    known = points_of(algorithm)
    asked = [checks.one_of("rounding point", x, known) for x in (points or known)]
    lowered = {NOTHING: Precision()}
    for x in asked:
        alone: dict[str, Any] = {x: dtype}
        lowered[x] = Precision(**alone)
    lengths = [checks.positive_int("n", each) for each in n]
    checks.flag("causal", causal)
    checks.positive_int("head_dim", head_dim)
    problems = [Problem(each, head_dim=head_dim, causal=causal) for each in lengths]
    how = lowered, algorithm, tiling or Tiling(64, 64), seed
    findings = [
        finding
        for kind in (kinds or KINDS)
        for problem in problems
        for finding in _findings(kind, problem, *how)
    ]
    return Laboratory(dtype, algorithm, head_dim, tuple(findings))


#: The algorithm of each published kernel. FP8 kernels are missing, because they need scales
#: (`flashsim study reproduce fp8`).
KERNELS = {
    "standard": "standard",
    "flash-attention-1": "flash1",
    "flash-attention-2": "flash2",
    "flash-attention-3": "flash2",
}


@own_errors
def presets(
    n: int = 1024, *, dtype: str = "bfloat16", head_dim: int = 64, seed: int = 0
) -> report.Table:
    """Return a table of the errors that published kernels' roundings (`Precision.preset`) cause."""
    n, head_dim = checks.positive_int("n", n), checks.positive_int("head_dim", head_dim)
    table = report.Table(
        f"Error of published kernels' roundings, {dtype}, N = {n:,}, d = {head_dim}",
        (*_COLUMNS[:2], "kernel", *_COLUMNS[3:]),
        note="sources: " + "; ".join(f"{name}: {PRESETS[name][1]}" for name in KERNELS),
    )
    problem = Problem(n, head_dim=head_dim)
    for kind in KINDS:
        for name, algorithm in KERNELS.items():
            how = {name: Precision.preset(name, dtype)}, algorithm, Tiling(64, 64), seed
            table.rows += [f.row() for f in _findings(kind, problem, *how)]
    return table


def _findings(
    kind: str, p: Problem, lowered: dict[str, Precision], algorithm: str, tiling: Tiling, seed: int
) -> list[LoweredPoint]:
    """Run attention with each `Precision` in `lowered`, on the same inputs; return the errors."""
    drawn = draw(kind, p.n_q, p.head_dim, seed=seed)
    q, k, v, dout = (part.astype(np.float32) for part in drawn)
    out, lse = oracle.attention(q, k, v, p)
    truth = {"out": out, **oracle.gradients(q, k, v, dout, p)}
    how: dict[str, Any] = {"algorithm": algorithm, "causal": p.causal, "tiling": tiling}
    findings = []
    for point, precision in lowered.items():
        result = run(q, k, v, **how, precision=precision)
        gradients = result.backward(dout, tiling=tiling)
        got = {"out": result.out, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
        with np.errstate(all="ignore"):
            apart = np.abs(np.expm1(lse - result.lse.astype(np.float64)))
        errors = {name: _error(got[name], truth[name]) for name in RESULTS}
        findings.append(LoweredPoint(point, kind, p.n_q, errors, float(apart.max())))
    return findings


def _error(got: np.ndarray, truth: np.ndarray) -> float:
    """Return the root mean square (RMS) of the error, divided by the RMS of the true result."""
    with np.errstate(all="ignore"):
        square = ((got.astype(np.float64) - truth) ** 2).mean() / (truth**2).mean()
    return float(np.sqrt(square))


__all__ = ["KINDS", "Laboratory", "LoweredPoint", "draw", "laboratory", "presets"]
