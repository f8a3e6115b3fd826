"""What each algorithm holds on chip: its stages (one kernel each) and their buffers, in one table.

An algorithm runs in stages. A stage has an *outer* loop, over query row tiles or key column tiles,
and an inner loop over the tiles that the outer one visits. A buffer lives either as long as an
outer step or as long as one visit. `footprint` sizes a kernel from this table, `fit` searches it,
and the simulated SRAM is measured against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from flashsim.errors import OptionError, choices
from flashsim.problem.problem import Problem

Direction = Literal["forward", "backward"]
Outer = Literal["queries", "keys"]

ALGORITHMS = ("standard", "flash1", "flash2", "flash2-fused")
DIRECTIONS = ("forward", "backward")


class Buffer(NamedTuple):
    """One on-chip array: bytes a query row, bytes a key column and bytes a score of the tile."""

    name: str
    per_row: int = 0
    per_col: int = 0
    per_score: int = 0
    visit: bool = False  # lives for one visit; otherwise for a whole outer step

    def nbytes(self, rows, cols):
        """Bytes at a tile of `rows` x `cols` (numbers or arrays)."""
        return self.per_row * rows + self.per_col * cols + self.per_score * rows * cols


@dataclass(frozen=True)
class Stage:
    """One pass over the score matrix.

    Attributes
    ----------
    name : str
        What the trace calls it.
    outer : {"queries", "keys"}
        The outer loop.
    buffers : tuple of Buffer
        What it holds on chip. ``visit=False`` buffers are held while the inner loop runs.
    dense : bool
        Visits every tile, also those the mask empties (standard attention does not skip).
    per : {"head", "group", "bias"}
        Whose walk it is: each query head's own; one for all query heads of a key head (dK and dV
        are summed over the group); or one for each matrix of a bias shared by several heads.
    """

    name: str
    outer: Outer
    buffers: tuple[Buffer, ...]
    dense: bool = False
    per: Literal["head", "group", "bias"] = "head"


@lru_cache(maxsize=64)
def stages(problem: Problem, algorithm: str, direction: str = "forward") -> tuple[Stage, ...]:
    """The stages of an algorithm, in the order they run.

    Raises
    ------
    OptionError
        If the algorithm or the direction does not exist.
    """
    check_algorithm(algorithm)
    if direction not in DIRECTIONS:
        raise OptionError(f"unknown direction {direction!r}; {choices(direction, DIRECTIONS)}")
    return _TABLE[algorithm, direction](_Sizes(problem))


def backward_form(algorithm: str, deterministic: bool | None) -> str:
    """The algorithm whose backward pass `deterministic` asks for; None asks for `algorithm`'s own.

    Raises
    ------
    OptionError
        If there is nothing to choose.
    """
    if deterministic is None:
        return algorithm
    if algorithm not in ("flash2", "flash2-fused"):
        raise OptionError(
            f"deterministic chooses between the forms of FlashAttention-2's backward; "
            f"{algorithm!r} has one form, and it is deterministic"
        )
    return "flash2" if deterministic else "flash2-fused"


def check_algorithm(algorithm: str) -> None:
    """Raise `OptionError`, naming the algorithms there are, unless `algorithm` is one of them."""
    if algorithm not in ALGORITHMS:
        raise OptionError(f"unknown algorithm {algorithm!r}; {choices(algorithm, ALGORITHMS)}")


def heads_of(stage: Stage, problem: Problem) -> tuple[int, int]:
    """How many times a stage's walk is made, and the step between their first query heads."""
    p = problem
    if stage.per == "bias":
        batch, heads = p.bias or (1, 1)
        return batch * heads, 1 if heads == p.heads else p.heads
    stride = p.group if stage.per == "group" else 1
    return p.batch * p.heads // stride, stride


class _Sizes:
    """Buffers by the papers' names. e: element type in HBM; a: accumulator type."""

    def __init__(self, problem: Problem) -> None:
        p = self.problem = problem
        e, a, d, dv = p.itemsize, p.compute_itemsize, p.head_dim, p.head_dim_v
        self.Q, self.O, self.dO = Buffer("Q", d * e), Buffer("O", dv * a), Buffer("dO", dv * e)
        self.dQ, self.O_in = Buffer("dQ", d * a), Buffer("O", dv * e)
        self.K, self.V = Buffer("K", 0, d * e), Buffer("V", 0, dv * e)
        self.dK, self.dV = Buffer("dK", 0, d * a), Buffer("dV", 0, dv * a)
        self.S, self.dP = (Buffer(x, per_score=a, visit=True) for x in ("S", "dP"))
        self.m, self.l, self.L, self.delta = (Buffer(x, a) for x in ("m", "l", "L", "delta"))
        self.bias = (Buffer("bias", per_score=e, visit=True),) if p.bias else ()
        # With a softcap, the backward keeps tanh's derivative from S to dS.
        self.gate = (Buffer("gate", per_score=a, visit=True),) if problem.softcap else ()
        # Standard attention's matrices in HBM are read a tile, or one whole row, at a time.
        self.S_in, self.P_in, self.dS_in = (
            Buffer(x, per_score=e, visit=True) for x in ("S", "P", "dS")
        )
        row = max(s.k_stop - s.k_start for s in problem.sequences) * e
        self.S_row, self.P_row, self.dP_row = (Buffer(x, row) for x in ("S", "P", "dP"))


def _visit(*buffers: Buffer) -> tuple[Buffer, ...]:
    return tuple(buffer._replace(visit=True) for buffer in buffers)


def _flash2_forward(s: _Sizes) -> tuple[Stage, ...]:
    held = (s.Q, s.O, s.m, s.l)
    return (Stage("forward", "queries", (*held, *_visit(s.K, s.V), s.S, *s.bias)),)


def _flash1_forward(s: _Sizes) -> tuple[Stage, ...]:
    tile = (s.K, s.V, *_visit(s.Q, s.O, s.m, s.l), s.S, *s.bias)
    return (Stage("init", "queries", ()), Stage("forward", "keys", tile), *_convert(s, s.O))


def _flash1_backward(s: _Sizes) -> tuple[Stage, ...]:
    tile = (
        s.K,
        s.V,
        s.dK,
        s.dV,
        *_visit(s.Q, s.O_in, s.dO, s.dQ, s.m, s.l),
        s.S,
        s.dP,
        *s.gate,
        *s.bias,
    )
    return (
        Stage("init", "queries", ()),
        *_clear_bias(s),
        Stage("backward", "keys", tile, per="group"),
        *_convert(s, s.dQ),
        *_convert_bias(s),
    )


def _flash2_backward(s: _Sizes) -> tuple[Stage, ...]:
    return (
        Stage("delta", "queries", (s.O_in, s.dO, s.delta)),
        *_clear_bias(s),
        Stage(
            "dkdv",
            "keys",
            (s.K, s.V, s.dK, s.dV, *_visit(s.Q, s.dO, s.L, s.delta), s.S, s.dP, *s.gate, *s.bias),
            per="group",
        ),
        Stage(
            "dq",
            "queries",
            (s.Q, s.dO, s.L, s.delta, s.dQ, *_visit(s.K, s.V), s.S, s.dP, *s.gate, *s.bias),
        ),
        *_convert_bias(s),
    )


def _flash2_fused_backward(s: _Sizes) -> tuple[Stage, ...]:
    tile = (
        *(s.K, s.V, s.dK, s.dV, *_visit(s.Q, s.dO, s.L, s.delta), s.S, s.dP),
        *(*_visit(s.dQ), *s.gate, *s.bias),
    )
    return (
        Stage("delta", "queries", (s.O_in, s.dO, s.delta)),
        *_clear_bias(s),
        Stage("fused", "keys", tile, per="group"),
        *_convert(s, s.dQ),
        *_convert_bias(s),
    )


def _standard_forward(s: _Sizes) -> tuple[Stage, ...]:
    return (
        Stage("scores", "queries", (s.Q, *_visit(s.K), s.S, *s.bias), dense=True),
        Stage("softmax", "queries", (s.S_row,), dense=True),
        Stage("output", "queries", (s.O, *_visit(s.V), s.P_in), dense=True),
    )


def _standard_backward(s: _Sizes) -> tuple[Stage, ...]:
    rows = (s.P_row, s.dP_row)
    if s.problem.softcap:  # S again, and the bias that was added to it
        rows += (s.S_row, *((s.S_row._replace(name="bias"),) if s.problem.bias else ()))
    return (
        Stage("dv", "keys", (s.dV, *_visit(s.dO), s.P_in), dense=True, per="group"),
        Stage("dp", "queries", (s.dO, *_visit(s.V), s.dP), dense=True),
        *_clear_bias(s),
        Stage("ds", "queries", rows, dense=True),
        Stage("dq", "queries", (s.dQ, *_visit(s.K), s.dS_in), dense=True),
        Stage("dk", "keys", (s.dK, *_visit(s.Q), s.dS_in), dense=True, per="group"),
        *_convert_bias(s),
    )


def _convert(s: _Sizes, accumulator: Buffer) -> tuple[Stage, ...]:
    """A pass that rounds an accumulator in HBM to the input's type, where the two differ."""
    if s.problem.itemsize == s.problem.compute_itemsize:
        return ()
    return (Stage("convert", "queries", (accumulator,)),)


def _clear_bias(s: _Sizes) -> tuple[Stage, ...]:
    return (Stage("clear_dbias", "queries", (), per="bias"),) if s.problem.bias else ()


def _convert_bias(s: _Sizes) -> tuple[Stage, ...]:
    if not s.problem.bias or s.problem.itemsize == s.problem.compute_itemsize:
        return ()
    row = Buffer("dBias", s.problem.n_kv * s.problem.compute_itemsize)
    return (Stage("convert_dbias", "queries", (row,), per="bias"),)


_TABLE = {
    ("standard", "forward"): _standard_forward,
    ("standard", "backward"): _standard_backward,
    ("flash1", "forward"): _flash1_forward,
    ("flash1", "backward"): _flash1_backward,
    ("flash2", "forward"): _flash2_forward,
    ("flash2", "backward"): _flash2_backward,
    ("flash2-fused", "forward"): _flash2_forward,
    ("flash2-fused", "backward"): _flash2_fused_backward,
}
