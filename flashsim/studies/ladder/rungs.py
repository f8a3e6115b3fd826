"""The ladder's algorithms ("rungs"), their expected bytes, and `climb`, which runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from flashsim import report
from flashsim.api.cost import fits
from flashsim.api.execution import run
from flashsim.counts import traffic
from flashsim.counts.questions import by_operation
from flashsim.errors import OptionError, UnsupportedError, choices, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.report import Table
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling
from flashsim.studies.ladder import fusion, softmax
from flashsim.studies.ladder.bench import Bench

Moves = dict[tuple[str, str], int]


def total(moved: Mapping[tuple[str, str], int], op: str | None, tensor: str | None) -> int:
    """Return the bytes in ``{(op, tensor): bytes}``, in total or for one operation or tensor."""
    return sum(n for key, n in moved.items() if op in (None, key[0]) and tensor in (None, key[1]))


@dataclass(frozen=True)
class Rung:
    """One algorithm of the ladder, a "rung".

    Attributes
    ----------
    result : {"P", "softmax V", "Q K^T V", "attention"}
        The quantity that the rung computes, which selects the float64 result to compare with.
    page : callable or None
        The function that runs the rung on a `Bench`; None for flashsim's own algorithms.
    scores : (int, int, int)
        How often the rung loads each element of S, stores each element of P, and loads each element
        of P. The closed form of a rung with a `page` follows from these numbers.
    """

    name: str
    title: str
    result: Literal["P", "softmax V", "Q K^T V", "attention"]
    page: Callable[[Bench], None] | None
    scores: tuple[int, int, int] = (0, 0, 0)

    @property
    def matrices(self) -> int:
        """The number of full matrices (S, P) that the rung keeps in HBM: 0, 1 or 2."""
        if self.page is None:
            return 2 * (self.name == "standard")
        return (self.scores[0] > 0) + (self.scores[1] > 0)

    def predict(self, problem: Problem, tiling: Tiling, device: Device) -> Moves:
        """Return the bytes that the rung moves, from closed forms, as ``{(op, tensor): bytes}``."""
        if self.page is None:
            counted = traffic.count_schedule(problem, tiling, self.name, "forward", device)
            return by_operation(counted.transfers)
        p, sums = problem, Schedule(problem, tiling, dense=True).sums
        e = p.itemsize
        crossings = (("load", "S"), ("store", "P"), ("load", "P"))
        moves = {
            crossing: times * sums.area * e
            for crossing, times in zip(crossings, self.scores, strict=True)
        }
        if self.result != "P":
            moves["load", "V"] = sums.row_cols * p.head_dim_v * e
            moves["store", "O"] = p.n_q * p.head_dim_v * e
        if self.result in ("Q K^T V", "attention"):
            moves["load", "Q"] = p.n_q * p.head_dim * e
            moves["load", "K"] = sums.row_cols * p.head_dim * e
        return {key: nbytes for key, nbytes in moves.items() if nbytes}


#: The rungs, from the softmax alone to FlashAttention.
RUNGS: dict[str, Rung] = {
    rung.name: rung
    for rung in (
        Rung("naive", "softmax, no maximum", "P", softmax.naive, (2, 1, 0)),
        Rung("stable", "softmax, three passes", "P", softmax.stable, (3, 1, 0)),
        Rung("online", "softmax, online in chunks", "P", softmax.online, (2, 1, 0)),
        Rung("whole-row", "softmax, whole rows on chip", "P", softmax.whole_row, (1, 1, 0)),
        Rung(
            *("softmax-then-product", "online softmax, then P V", "softmax V"),
            *(fusion.softmax_then_product, (2, 1, 1)),
        ),
        Rung(
            *("softmax-product", "softmax fused with P V", "softmax V"),
            *(fusion.softmax_product, (1, 0, 0)),
        ),
        Rung(
            *("without-softmax", "attention without its softmax", "Q K^T V"), fusion.without_softmax
        ),
        Rung(
            *("whole-row-attention", "attention, whole rows on chip", "attention"),
            fusion.whole_row_attention,
        ),
        Rung("standard", "standard attention, three kernels", "attention", None),
        Rung("flash1", "FlashAttention: KV-outer loop", "attention", None),
        Rung("flash2", "FlashAttention-2: Q-outer loop", "attention", None),
    )
}


@own_errors
@dataclass(frozen=True, eq=False)
class Step:
    """The result of running one rung (algorithm) of the ladder.

    Attributes
    ----------
    out : ndarray, (n_q, n_kv) for a softmax, else (n_q, head_dim)
    error : float
        Largest difference from the same quantity in float64.
    moved, predicted : dict
        ``{(op, tensor): bytes}``, from the run and in closed form.
    peak_sram : int
        The most bytes on chip at any time.
    """

    rung: Rung
    out: np.ndarray
    error: float
    moved: Moves
    predicted: Moves
    peak_sram: int

    def __repr__(self) -> str:
        return f"<Step {self.rung.name}: {self.bytes():,} B moved, error {self.error:.2g}>"

    def bytes(self, op: str | None = None, tensor: str | None = None) -> int:
        """Return the bytes that the rung moved, in total or for one operation or tensor."""
        return total(self.moved, op, tensor)

    def accesses(self, n_scores: int, itemsize: int) -> tuple[float, float]:
        """Return how often the rung loads and stores each score on average (naive: 2 and 1)."""
        loads, stores = (sum(self.bytes(op, tensor) for tensor in "SP") for op in ("load", "store"))
        return loads / (n_scores * itemsize), stores / (n_scores * itemsize)


@dataclass(frozen=True, eq=False, repr=False)
class Climb(report.Tabled):
    """The results of all rungs on the same inputs; prints as one table."""

    problem: Problem
    tiling: Tiling
    device: Device
    steps: dict[str, Step]

    def table(self) -> Table:
        """Return a table with one row per rung."""
        p = self.problem
        table = Table(
            f"{p.n_q:,} x {p.n_kv:,} scores, d={p.head_dim}, {p.dtype}, tiles {self.tiling}, "
            f"{self.device.name}",
            (
                *("rung", "computes", "loads/score", "stores/score", "load B", "store B"),
                *("predicted", "SRAM B", "max |error|"),
            ),
            note="predicted: whether the closed form equals the bytes moved; error: difference "
            "from float64, nan if an exponential overflowed" + self._loops(),
        )
        for name, step in self.steps.items():
            loads, stores = step.accesses(p.n_q * p.n_kv, p.itemsize)
            table.add(
                *(name, step.rung.title, loads, stores),
                *(step.bytes("load"), step.bytes("store")),
                "==" if step.moved == step.predicted else "DIFFERS",
                *(step.peak_sram, step.error),
            )
        return table

    def _loops(self) -> str:
        """Return a note that says which tensors FlashAttention-1 and -2 load repeatedly."""
        if not {"flash1", "flash2"} <= set(self.steps):
            return ""
        grid = Schedule(self.problem, self.tiling, dense=True)
        return (
            f"; flash2 loads K and V for each of {grid.t_r:,} row tiles, flash1 loads Q and O and "
            f"stores O for each of {grid.t_c:,} column tiles; with a large block_q flash2 moves "
            "fewer bytes, with a large block_k flash1 does"
        )


@own_errors
def climb(
    n_q: int = 512,
    n_kv: int = 512,
    head_dim: int = 64,
    *,
    dtype: str = "float32",
    tiling: Tiling | None = None,
    device: str | Device = "H100",
    rungs: tuple[str, ...] | list[str] | None = None,
    magnify: float = 1.0,
    seed: int = 0,
) -> Climb:
    """Run the ladder on one head of random Q, K and V.

    Rungs that compute only a softmax get S = scale Q K^T as input.

    Parameters
    ----------
    n_q, n_kv, head_dim : int
    dtype : str
        Element type in HBM.
    tiling : Tiling, optional
        Default 64 x 64.
    device : str or Device
    rungs : sequence of names in `RUNGS`, optional
        Default: all.
    magnify : float
        A factor on Q; with 100, the scores overflow the naive softmax.
    seed : int

    Raises
    ------
    OptionError
        If a rung is unknown, or the score matrices are larger than this machine's memory.
    SramOverflow
        If whole rows do not fit on chip. The message states the longest row that fits.
    """
    if rungs is not None and (not isinstance(rungs, (tuple, list)) or not rungs):
        raise OptionError(
            f"rungs= must be a non-empty list of names, got {shown(rungs)}; choose from "
            f"{choices(rungs, RUNGS)}"
        )
    names = tuple(RUNGS) if rungs is None else tuple(rungs)
    for name in names:
        checks.one_of("rung", name, RUNGS)
    magnify = checks.number("magnify", magnify)
    problem = Problem(n_q, n_kv, head_dim, dtype=dtype)
    if problem.fp8:
        raise UnsupportedError(
            f"the ladder computes sums in the inputs' type, and sums in {dtype} are not "
            "supported; use float16"
        )
    matrices = max(RUNGS[name].matrices for name in names)
    fits(
        matrices * n_q * problem.n_kv * problem.itemsize,
        f"one of these rungs needs {matrices} matrices of {n_q:,} x {problem.n_kv:,} scores in "
        "memory: use shorter sequences, or other rungs",
    )
    tiling, device = Tiling(64, 64) if tiling is None else tiling, Device.get(device)
    rng = np.random.default_rng(checks.seed(seed))
    with np.errstate(over="ignore"):
        q, k, v = (
            (factor * rng.standard_normal((1, 1, n, head_dim))).astype(numpy_dtype(dtype))
            for n, factor in ((n_q, magnify), (problem.n_kv, 1.0), (problem.n_kv, 1.0))
        )
    if not np.isfinite(q.astype(np.float64)).all():
        raise OptionError(
            f"magnify={magnify:g} makes Q exceed the range of {dtype}; use a smaller magnify"
        )
    inputs = _Inputs(problem, q, k, v)
    steps = {name: _run(RUNGS[name], inputs, tiling, device) for name in names}
    return Climb(problem, tiling, device, steps)


@dataclass(frozen=True)
class _Inputs:
    """The inputs Q, K and V of a rung."""

    problem: Problem
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @cached_property
    def s(self) -> np.ndarray:
        """The score matrix S as HBM stores it, an array of shape (1, 1, n_q, n_kv)."""
        rows = [self._scores(rows).astype(self.q.dtype) for rows in self._blocks()]
        return np.concatenate(rows)[None, None]

    def error(self, result: str, out: np.ndarray) -> float:
        """Return the largest difference between `out` and the same result computed in float64."""
        worst = [
            np.abs(out[rows].astype(np.float64) - self._expected(result, rows)).max()
            for rows in self._blocks()
        ]
        return float(np.max(worst))

    def _expected(self, result: str, rows: slice) -> np.ndarray:
        values = self.v[0, 0].astype(np.float64)
        if result == "Q K^T V":
            return self._scores(rows) @ values
        if result == "attention":
            return _softmax(self._scores(rows)) @ values
        P = _softmax(self.s[0, 0, rows].astype(np.float64))
        return P if result == "P" else P @ values

    def _scores(self, rows: slice) -> np.ndarray:
        q, k = (x[0, 0].astype(np.float64) for x in (self.q[:, :, rows], self.k))
        return self.problem.scale * q @ k.T

    def _blocks(self) -> Iterator[slice]:
        n = self.problem.n_q
        return (slice(start, min(start + 256, n)) for start in range(0, n, 256))


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _run(rung: Rung, x: _Inputs, tiling: Tiling, device: Device) -> Step:
    p = x.problem
    if rung.page is None:
        ran = run(x.q, x.k, x.v, algorithm=rung.name, tiling=tiling, device=device, trace=True)
        out, moved, peak = ran.out, by_operation(ran.trace.transfers), ran.trace.peak_sram()
    else:
        bench = Bench(p, tiling, device)
        for name in "SV" if rung.result in ("P", "softmax V") else "QKV":
            bench.hbm.put(name, getattr(x, name.lower()))
        P = bench.hbm.new("P", p.n_q, p.n_kv, p.dtype) if rung.scores[1] else None
        O = bench.hbm.new("O", p.n_q, p.head_dim_v, p.dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
            rung.page(bench)
        out, moved, peak = P if rung.result == "P" else O, dict(bench.transfers), bench.peak
    with np.errstate(invalid="ignore"):
        error = x.error(rung.result, out[0, 0])
    return Step(rung, out[0, 0], error, moved, rung.predict(p, tiling, device), peak)
